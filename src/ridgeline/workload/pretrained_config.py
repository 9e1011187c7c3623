"""What a model file says of a decoder's sizes, checked before anything is built from them.

    GGUF metadata ──gguf_config──┐
                                 ├──> DecoderConfig, or ModelFileError naming the key
    config.json ──huggingface_config──┘

Llama and Qwen2 decoders. Whatever the decoder does not compute (other rotary scalings, sliding windows, experts, head sizes that
are not hidden / heads) is refused, never ignored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..core.errors import ModelFileError
from .gguf import Gguf
from .models.decoder import DecoderConfig, rotary_frequencies

ARCHITECTURES = ("llama", "qwen2")
MOST = {"layers": 1000, "hidden": 2**16, "intermediate": 2**18, "heads": 2**10, "kv_heads": 2**10, "vocab": 2**20}
REFUSED_GGUF = ("expert_count", "rope.scaling.type", "attention.sliding_window", "logit_scale")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def gguf_config(file: Gguf) -> DecoderConfig:
    """The sizes in a GGUF file's metadata."""
    origin, metadata = str(file.path), file.metadata
    kind = metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise _refused("general.architecture", kind, origin, f"decoders of {' and '.join(ARCHITECTURES)} are read")
    for key in REFUSED_GGUF:
        if metadata.get(f"{kind}.{key}") not in (None, 0, "none"):
            raise _refused(f"{kind}.{key}", metadata[f"{kind}.{key}"], origin, "the decoder does not compute it")
    if "token_embd.weight" not in file.tensors:
        raise ModelFileError(f"tensor token_embd.weight is missing from {origin}", why="it gives the vocabulary", do="download it again")
    heads = metadata.get(f"{kind}.attention.head_count")
    sizes = {
        "layers": metadata.get(f"{kind}.block_count"),
        "hidden": metadata.get(f"{kind}.embedding_length"),
        "intermediate": metadata.get(f"{kind}.feed_forward_length"),
        "heads": heads,
        "kv_heads": metadata.get(f"{kind}.attention.head_count_kv", heads),
        "vocab": file.tensors["token_embd.weight"].shape[0],
    }
    config = _checked(
        sizes,
        rope_theta=metadata.get(f"{kind}.rope.freq_base", 1e4),
        norm_eps=metadata.get(f"{kind}.attention.layer_norm_rms_epsilon", 1e-5),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        tied="output.weight" not in file.tensors,
        head_dim=metadata.get(f"{kind}.rope.dimension_count"),
        origin=origin,
    )
    return _with_rope_table(file, config) if "rope_freqs.weight" in file.tensors else config


def _with_rope_table(file: Gguf, config: DecoderConfig) -> DecoderConfig:
    """Llama 3.1's stretching is a table in the file: accept it where our formula gives the same."""
    table = file.tensor("rope_freqs.weight").flatten()
    stretched = replace(config, rope_factor=round(float(table.max()), 3))
    expected = rotary_frequencies(config) / rotary_frequencies(stretched)
    if table.shape != expected.shape or not torch.allclose(table, expected, rtol=1e-3):
        raise _refused("rope_freqs.weight", f"{list(table.shape)} numbers", str(file.path), "not the stretching of Llama 3.1")
    return stretched


def huggingface_config(data: dict[str, Any], origin: str) -> DecoderConfig:
    """The sizes in a folder's config.json (already read and checked for code)."""
    kind = data["model_type"]
    if kind not in ARCHITECTURES:
        raise _refused("model_type", kind, origin, f"decoders of {' and '.join(ARCHITECTURES)} are read")
    if data.get("hidden_act", "silu") != "silu":
        raise _refused("hidden_act", data["hidden_act"], origin, "the decoder computes silu")
    for key in ("mlp_bias", "use_sliding_window", "quantization_config"):
        if data.get(key):
            raise _refused(key, data[key], origin, "the decoder does not compute it")
    names = {"layers": "num_hidden_layers", "hidden": "hidden_size", "intermediate": "intermediate_size", "heads": "num_attention_heads"}
    sizes = {ours: data.get(theirs) for ours, theirs in names.items()}
    sizes |= {"kv_heads": data.get("num_key_value_heads", sizes["heads"]), "vocab": data.get("vocab_size")}
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise _refused("rope_scaling", rope, origin, "it is an object")
    if kind == "llama" and data.get("attention_bias"):
        raise _refused("attention_bias", True, origin, "the decoder has no bias after attention")
    return _checked(
        sizes,
        rope_theta=rope.get("rope_theta", data.get("rope_theta", 1e4)),
        norm_eps=data.get("rms_norm_eps", 1e-6),
        qkv_bias=kind == "qwen2",
        tied=data.get("tie_word_embeddings", False),
        rope_factor=_stretch(rope, origin),
        head_dim=data.get("head_dim"),
        origin=origin,
    )


def _stretch(rope: dict[str, Any], origin: str) -> float:
    """The factor of Llama 3.1's rotary scaling, 1 where there is none."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return 1.0
    if kind != "llama3" or any(rope.get(key) != value for key, value in LLAMA3.items()):
        raise _refused("rope_scaling", rope, origin, f"only llama3 with {LLAMA3} is computed")
    return _number("rope_scaling.factor", rope.get("factor"), origin)


def _checked(
    sizes: dict[str, Any],
    *,
    rope_theta: Any,
    norm_eps: Any,
    qkv_bias: bool,
    tied: Any,
    head_dim: Any,
    origin: str,
    rope_factor: float = 1.0,
) -> DecoderConfig:
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST[name]:
            raise _refused(name, value, origin, f"a whole number from 1 to {MOST[name]}")
    hidden, heads, kv_heads = sizes["hidden"], sizes["heads"], sizes["kv_heads"]
    if hidden % (2 * heads) or heads % kv_heads or head_dim not in (None, hidden // heads):
        shapes = f"hidden {hidden}, heads {heads}, kv_heads {kv_heads}, head_dim {head_dim}"
        raise _refused("sizes", shapes, origin, "heads must divide hidden evenly and be shared out evenly")
    theta, eps = _number("rope_theta", rope_theta, origin), _number("norm_eps", norm_eps, origin)
    # A file's float32 comes back as 9.999999747378752e-06: the shortest decimal that means the same float32 is what was written.
    eps = float(f"{eps:.6g}")
    return DecoderConfig(**sizes, rope_theta=theta, norm_eps=eps, qkv_bias=qkv_bias, tied=bool(tied), rope_factor=rope_factor)


def _number(name: str, value: Any, origin: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e12:
        raise _refused(name, value, origin, "a number above 0")
    return float(value)


def _refused(name: str, value: Any, origin: str, why: str) -> ModelFileError:
    return ModelFileError(f"{name} = {value!r} in {origin}", why=why, do="give a Llama or Qwen2 decoder, or correct the file")
