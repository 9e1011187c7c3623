"""Models in a GGUF file: metadata to a config, blocks to tensors under Hugging Face's names.

    metadata ──as a config.json would say it──> config_of ──> ModelConfig
    tensor table ──names, order of rows──> Tensors, dequantised when read
    tokenizer.ggml.* ──> byte-level ("gpt2") or SentencePiece ("llama") tokenizer, chat template, tokens that end an answer

Architectures llama (Mistral's files say llama too), qwen2, qwen3, gpt2. Rows of q and k of llama files are pairs (2i, 2i+1) of one
rotation and are put in our order; GPT-2's matrices are turned back to its own (inputs first). A table of rotary frequencies must be
Llama 3's stretching. Ref: the GGUF specification (ggml, docs/gguf.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.errors import ModelFileError
from ...workload.gguf import Gguf, open_gguf
from ...workload.pretrained import GGUF_NAMES, half_split
from ...workload.tokenizer import from_gguf
from ..model.config import ModelConfig, RopeScaling, config_of, refused
from ..model.rope import frequencies
from .sentencepiece import USER_DEFINED, gguf_sentencepiece
from .source import Source
from .tensors import Tensors
from .tokenizer_json import wrap
from .tokens import PieceTokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")
REFUSED = (
    "expert_count", "logit_scale", "embedding_scale", "residual_scale", "attn_logit_softcapping", "final_logit_softcapping",
    "attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias", "rope.scaling.finetuned_scale",
    "rope.scaling.yarn_log_multiplier",
)  # fmt: skip
NEUTRAL: dict[str, object] = {"attention.causal": True, "rope.scaling.attn_factor": 1.0}
"""Keys that must say this or be absent; those of REFUSED, 0."""
ROTARY_NAMES = {**GGUF_NAMES, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
ROTARY_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
GPT2_NAMES = {
    "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}  # fmt: skip
GPT2_OUTER = {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f", "output": "lm_head"}
ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
"""Control tokens that end an answer in the chat formats, whatever the file calls its end of text."""
BEGIN_BY_DEFAULT = ("llama-bpe", "llama3")  # byte-level vocabularies whose models were trained with a begin-of-text token
MOST_TEMPLATE = 2**20


def open_gguf_model(path: Path) -> Source:
    """The model of a file; nothing of its weights is read yet."""
    file = open_gguf(path)
    config = gguf_config(file)
    tokenizer = gguf_tokenizer(file)
    numbered = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    eos = {index for index in numbered if type(index) is int and 0 <= index < config.vocab}
    eos |= {tokenizer.specials[name] for name in ENDS if name in tokenizer.specials}
    template = file.metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) and len(template) <= MOST_TEMPLATE else None
    return Source(path.stem, config, gguf_tensors(file, config), tokenizer, template, tuple(sorted(eos)))


def gguf_config(file: Gguf) -> ModelConfig:
    """What the metadata says, checked as a config.json would be."""
    kind, origin = file.metadata.get("general.architecture"), str(file.path)
    if kind not in ARCHITECTURES:
        raise refused("general.architecture", kind, origin, f"decoders of {', '.join(ARCHITECTURES)} are read")
    for key in (*REFUSED, *NEUTRAL):
        if file.metadata.get(f"{kind}.{key}") not in (None, NEUTRAL.get(key, 0)):
            raise refused(f"{kind}.{key}", file.metadata[f"{kind}.{key}"], origin, "the decoder does not compute it")
    if "token_embd.weight" not in file.tensors:
        raise ModelFileError(f"tensor token_embd.weight is missing from {origin}", why="it gives the vocabulary", do="download it again")
    said = {key.removeprefix(f"{kind}."): value for key, value in file.metadata.items() if key.startswith(f"{kind}.")}
    common = {"vocab_size": file.tensors["token_embd.weight"].shape[0], "tie_word_embeddings": "output.weight" not in file.tensors}
    if kind == "gpt2":
        return config_of({**_gpt2(said), **common}, origin)
    config = config_of({**_rotary(str(kind), said, file), **common}, origin)
    return _with_rope_table(file, config) if "rope_freqs.weight" in file.tensors else config


def _gpt2(said: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "n_embd": said.get("embedding_length"), "n_layer": said.get("block_count"),
        "n_head": said.get("attention.head_count"), "n_positions": said.get("context_length"), "n_inner": said.get("feed_forward_length"),
        "layer_norm_epsilon": _short(said.get("attention.layer_norm_epsilon", 1e-5)),
    }  # fmt: skip


def _rotary(kind: str, said: dict[str, Any], file: Gguf) -> dict[str, Any]:
    heads, window = said.get("attention.head_count"), said.get("attention.sliding_window")
    key_length, turned = said.get("attention.key_length"), said.get("rope.dimension_count")
    if len({size for size in (key_length, said.get("attention.value_length"), turned) if size is not None}) > 1:
        raise refused("rope.dimension_count", turned, str(file.path), "all of a head's features are turned, keys and values are as wide")
    if window and kind != "llama":
        raise refused("attention.sliding_window", window, str(file.path), "files of this architecture do not say which layers have it")
    data = {
        "model_type": "mistral" if window else kind, "hidden_size": said.get("embedding_length"),
        "num_hidden_layers": said.get("block_count"), "num_attention_heads": heads,
        "num_key_value_heads": said.get("attention.head_count_kv", heads), "head_dim": key_length or turned,
        "intermediate_size": said.get("feed_forward_length"), "max_position_embeddings": said.get("context_length", 2048),
        "rms_norm_eps": _short(said.get("attention.layer_norm_rms_epsilon", 1e-5)), "rope_theta": said.get("rope.freq_base", 1e4),
        "attention_bias": kind == "llama" and "blk.0.attn_q.bias" in file.tensors,
    }  # fmt: skip
    factor = said.get("rope.scaling.factor") or said.get("rope.scale_linear")  # the latter is how files before 2023-10 say it
    scaling = said.get("rope.scaling.type", "none" if factor in (None, 0, 1) else "linear")  # as llama.cpp reads a factor alone
    if scaling != "none":
        data["rope_scaling"] = {"rope_type": scaling, "factor": factor}
        if scaling == "yarn":
            data["rope_scaling"]["original_max_position_embeddings"] = said.get("rope.scaling.original_context_length")
    return {**data, **({"sliding_window": window} if window else {})}


def _short(value: Any) -> Any:
    """A file's float32 comes back as 9.999999747378752e-06: the shortest decimal that means the same float32 is what was written."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _with_rope_table(file: Gguf, config: ModelConfig) -> ModelConfig:
    """Llama 3.1's stretching is a table in the file: taken where our formula gives the same."""
    table = file.tensor("rope_freqs.weight").flatten()
    factor = round(float(table.max()), 3) if bool(torch.isfinite(table).all()) else 0.0
    stretched = replace(config, rope_scaling=RopeScaling("llama3", factor))
    if factor >= 1.0 and config.rope_scaling is None:
        expected = frequencies(config) / frequencies(stretched)
        if table.shape == expected.shape and torch.allclose(table, expected, rtol=1e-3):
            return stretched
    raise refused("rope_freqs.weight", f"{len(table)} numbers", str(file.path), "not the stretching of Llama 3.1")


def gguf_tensors(file: Gguf, config: ModelConfig) -> Tensors:
    """Every tensor under its Hugging Face name."""
    gpt2 = config.family == "gpt2"
    paired = file.metadata["general.architecture"] == "llama"
    inner, outer, layers = (GPT2_NAMES, GPT2_OUTER, "transformer.h") if gpt2 else (ROTARY_NAMES, ROTARY_OUTER, "model.layers")
    readers: dict[str, Callable[[], Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, entry in file.tensors.items():
        if name == "rope_freqs.weight":  # already in the config
            continue
        place = re.fullmatch(r"blk\.(\d{1,6})\.(\w+)\.(\w+)", name)
        if place is None:
            stem, _, ending = name.rpartition(".")
            theirs, part = f"{outer.get(stem, stem)}.{ending}", stem
        else:
            layer, part, ending = place.groups()
            theirs = f"{layers}.{int(layer)}.{inner.get(part, part)}.{ending}"
        if theirs in readers:
            raise ModelFileError(f"tensor {name} in {file.path}", why=f"another stands for {theirs} too", do="download it again")
        turned = gpt2 and ending == "weight" and place is not None and len(entry.shape) == 2
        head_dim = config.head_dim if paired and part in ("attn_q", "attn_k") and entry.shape[0] % config.head_dim == 0 else None
        readers[theirs] = _reader(file, name, head_dim, turned)
        shapes[theirs] = tuple(reversed(entry.shape)) if turned else entry.shape
    return Tensors(readers, shapes, str(file.path))


def _reader(file: Gguf, name: str, head_dim: int | None, turned: bool) -> Callable[[], Tensor]:
    def read() -> Tensor:
        tensor = file.tensor(name)
        if head_dim is not None:
            tensor = half_split(tensor, head_dim)
        return tensor.t().contiguous() if turned else tensor

    return read


def gguf_tokenizer(file: Gguf) -> PieceTokenizer:
    """The vocabulary in the file's metadata."""
    if file.metadata.get("tokenizer.ggml.model") == "llama":
        return gguf_sentencepiece(file)
    coder = from_gguf(file)
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    always = {file.metadata["tokenizer.ggml.tokens"][index]: index for index, kind in enumerate(kinds) if kind == USER_DEFINED}
    usual = file.metadata.get("tokenizer.ggml.pre") in BEGIN_BY_DEFAULT
    return wrap(coder, always=always, add_bos=file.metadata.get("tokenizer.ggml.add_bos_token", usual) is True)
