"""Small model files of every kind that load_model reads, all of one decoder, written from the published formats.

    weights(config) ──> {Hugging Face name: tensor} ──> write_folder, write_gguf_model, write_llama2c ──> a file each
    byte_level_json, spaced_json ──> tokenizer.json          sentencepiece_vocabulary ──> pieces, scores, types

The vocabularies have 300 entries: 256 bytes, control tokens, and merges.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.llm.model.config import ModelConfig, config_of
from ridgeline.llm.model.weights import huggingface_places
from ridgeline.workload.tokenizer import byte_of_letter
from tests.workload.gguf_files import gguf_name, interleaved, write_gguf

VOCAB = 300
HUGGINGFACE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
WORDS = ["he", "ll", "hell", "hello", "wor", " wor", " world", "or", "wo", " w", "ld", "  ", "th", "the", " the", " t", "é", "日本"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def weights(data: dict[str, Any] = HUGGINGFACE, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(place.shape, generator=generator) * (0.3 if len(place.shape) > 1 else 0.1) + (1.0 if "norm" in name else 0.0)
        for name, place in huggingface_places(config_of(data, "test")).items()
    }


def byte_level_json() -> dict[str, Any]:
    """GPT-2 style: letters for bytes, merges, control tokens."""
    letters = {byte: letter for letter, byte in byte_of_letter().items()}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or"), ("Ã", "©")]
    tokens = [*SPECIALS, *(letters[byte] for byte in range(256)), *(left + right for left, right in merges)]
    tokens += [f"{letters[97 + index]}{letters[98 + index]}" for index in range(VOCAB - len(tokens) - 10)]
    tokens = list(dict.fromkeys(tokens))
    added = [
        {"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i, name in enumerate(SPECIALS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": [list(merge) for merge in merges]}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model,
    }  # fmt: skip


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Pieces with plain spaces, scores and GGUF types: <unk>, <s>, </s>, the bytes, words by falling score, characters."""
    characters = sorted(set("".join(WORDS)) | set("abcdefgh "))
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *WORDS, *(c for c in characters if c not in WORDS)]
    scores = [0.0] * 259 + [-float(index) for index in range(len(pieces) - 259)]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259)
    while len(pieces) < VOCAB:
        pieces.append(f"<unused{len(pieces)}>")
        scores.append(0.0)
        kinds.append(5)
    return pieces[:VOCAB], scores[:VOCAB], kinds[:VOCAB]


def spaced_json() -> dict[str, Any]:
    """Llama 2 style: ▁ for spaces, byte fallback; merges in the order of the scores above."""
    pieces, _, kinds = sentencepiece_vocabulary()
    spelled = [piece.replace(" ", "▁") for piece in pieces]
    normal = {piece for piece, kind in zip(spelled, kinds, strict=True) if kind == 1}
    merges = []
    for piece in (word.replace(" ", "▁") for word in WORDS):
        merges += [[piece[:k], piece[k:]] for k in range(1, len(piece)) if piece[:k] in normal and piece[k:] in normal]
    added = [
        {"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i, name in enumerate(SPECIALS[:3])
    ]
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
                  {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}  # fmt: skip
    decoder = {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
               {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}  # fmt: skip
    processor = {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }  # fmt: skip
    model = {"type": "BPE", "dropout": None, "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
             "vocab": {token: i for i, token in enumerate(spelled)}, "merges": merges}  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": None, "post_processor": processor, "decoder": decoder, "model": model,
    }  # fmt: skip


def write_folder(
    folder: Path, tensors: dict[str, Tensor], data: dict[str, Any] = HUGGINGFACE, tokenizer: dict[str, Any] | None = None, shards: int = 1
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer or byte_level_json(), ensure_ascii=False), encoding="utf-8")
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4]}))
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    files = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def gguf_metadata(data: dict[str, Any], kind: str = "llama", spaced: bool = True) -> dict[str, tuple[str, Any]]:
    metadata: dict[str, tuple[str, Any]] = {
        "general.architecture": ("str", kind),
        f"{kind}.block_count": ("u32", data["num_hidden_layers"]),
        f"{kind}.context_length": ("u32", data["max_position_embeddings"]),
        f"{kind}.embedding_length": ("u32", data["hidden_size"]),
        f"{kind}.feed_forward_length": ("u32", data["intermediate_size"]),
        f"{kind}.attention.head_count": ("u32", data["num_attention_heads"]),
        f"{kind}.attention.head_count_kv": ("u32", data["num_key_value_heads"]),
        f"{kind}.attention.layer_norm_rms_epsilon": ("f32", data["rms_norm_eps"]),
        f"{kind}.rope.freq_base": ("f32", data["rope_theta"]),
        "tokenizer.chat_template": ("str", TEMPLATE),
        "tokenizer.ggml.bos_token_id": ("u32", 1),
        "tokenizer.ggml.eos_token_id": ("u32", 2),
    }
    if "head_dim" in data:
        metadata |= {f"{kind}.attention.{part}_length": ("u32", data["head_dim"]) for part in ("key", "value")}
    if spaced:
        pieces, scores, kinds = sentencepiece_vocabulary()
        spelled = [piece.replace(" ", "▁") for piece in pieces]
        found: dict[str, tuple[str, Any]] = {
            "model": ("str", "llama"), "tokens": ("[str", spelled), "scores": ("[f32", scores), "token_type": ("[i32", kinds),
        }  # fmt: skip
    else:
        model = byte_level_json()["model"]
        tokens = list(model["vocab"])
        found = {
            "model": ("str", "gpt2"), "pre": ("str", "gpt-2"), "tokens": ("[str", tokens),
            "merges": ("[str", [" ".join(merge) for merge in model["merges"]]),
            "token_type": ("[i32", [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS))),
        }  # fmt: skip
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def write_gguf_model(
    path: Path, tensors: dict[str, Tensor], data: dict[str, Any] = HUGGINGFACE, kind: str = "llama", spaced: bool = True
) -> Path:
    """As a converter would: q and k of llama in pairs, all in F32."""
    head_dim = config_of(data, "test").head_dim
    entries = {}
    for name, tensor in tensors.items():
        theirs = gguf_name(name).replace("self_attn.q_norm", "attn_q_norm").replace("self_attn.k_norm", "attn_k_norm")
        if kind == "llama" and ("attn_q." in theirs or "attn_k." in theirs):
            tensor = interleaved(tensor, head_dim)
        entries[theirs] = ("F32", tuple(tensor.shape), tensor.contiguous().numpy().astype("<f4").tobytes())
    return write_gguf(path, gguf_metadata(data, kind, spaced), entries)


def write_llama2c(path: Path, tensors: dict[str, Tensor], config: ModelConfig) -> Path:
    """The legacy export, with tok300.bin beside it."""
    head = [config.hidden, config.intermediate, config.layers, config.heads, config.kv_heads, config.vocab, config.context]
    if not config.tied:
        head[5] *= -1
    parts = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
             "post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj", "mlp.up_proj"]  # fmt: skip
    out = [tensors["model.embed_tokens.weight"]]
    for part in parts:
        for layer in range(config.layers):
            tensor = tensors[f"model.layers.{layer}.{part}.weight"]
            out.append(interleaved(tensor, config.head_dim) if "q_proj" in part or "k_proj" in part else tensor)
    out += [tensors["model.norm.weight"], torch.full((config.context * config.head_dim,), 7.0)]  # the angles are not read
    out += [] if config.tied else [tensors["lm_head.weight"]]
    path.write_bytes(struct.pack("<7i", *head) + b"".join(tensor.contiguous().numpy().astype("<f4").tobytes() for tensor in out))
    write_llama2c_vocabulary(path.with_name(f"tok{config.vocab}.bin"))
    return path


def write_llama2c_vocabulary(path: Path) -> Path:
    pieces, scores, _ = sentencepiece_vocabulary()
    pieces[1:3] = ["\n<s>\n", "\n</s>\n"]
    raw = [piece.encode() for piece in pieces]
    entries = (struct.pack("<fi", score, len(piece)) + piece for score, piece in zip(scores, raw, strict=True))
    path.write_bytes(struct.pack("<i", max(map(len, raw))) + b"".join(entries))
    return path
