"""A writer of small GGUF files, from the published format: what the reader's tests read.

write_gguf(path, {key: (type, value)}, {name: (kind, shape, bytes)}) ──> file
tiny_llama(path, generator) ──> a two-layer decoder of F32 tensors with its metadata
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch

from ridgeline.workload.models.decoder import CausalLM, DecoderConfig

FORMS = {"u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"),
         "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d")}  # fmt: skip
NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
           "F64": 28, "BF16": 30}  # fmt: skip


def text(value: str) -> bytes:
    raw = value.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(kind: str, value: Any) -> bytes:
    """The bytes of a value after its type number."""
    if kind == "str":
        return text(value)
    if kind.startswith("["):
        inner = kind[1:]
        number = 8 if inner == "str" else 9 if inner.startswith("[") else FORMS[inner][0]
        return struct.pack("<IQ", number, len(value)) + b"".join(value_bytes(inner, item) for item in value)
    return struct.pack(f"<{FORMS[kind][1]}", value)


def pair(key: str, kind: str, value: Any) -> bytes:
    number = 8 if kind == "str" else 9 if kind.startswith("[") else FORMS[kind][0]
    return text(key) + struct.pack("<I", number) + value_bytes(kind, value)


def write_gguf(
    path: Path, metadata: dict[str, tuple[str, Any]], tensors: dict[str, tuple[str, tuple[int, ...], bytes]], version: int = 3
) -> Path:
    """The whole file; shapes are given the torch way round and stored reversed, data is aligned to 32."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    out += b"".join(pair(key, kind, value) for key, (kind, value) in metadata.items())
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        data += b"\0" * (-len(data) % 32)
        out += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        out += struct.pack("<IQ", NUMBERS[kind], len(data))
        data += raw
    path.write_bytes(out + b"\0" * (-len(out) % 32) + data)
    return path


CONFIG = DecoderConfig(layers=2, hidden=48, intermediate=80, heads=6, kv_heads=2, vocab=61, rope_theta=5e5)
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm", "model.embed_tokens": "token_embd", "model.norm": "output_norm",
         "lm_head": "output"}  # fmt: skip


def gguf_name(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name.replace("model.layers.", "blk.")


def interleaved(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows i and i + head_dim/2 of each head side by side, by a plain loop: what converters do to Llama's q and k."""
    order = []
    for head in range(0, len(rows), head_dim):
        for index in range(head_dim // 2):
            order += [head + index, head + index + head_dim // 2]
    return rows[order]


def decoder_metadata(kind: str, config: DecoderConfig) -> dict[str, tuple[str, Any]]:
    return {
        "general.architecture": ("str", kind),
        f"{kind}.block_count": ("u32", config.layers),
        f"{kind}.embedding_length": ("u32", config.hidden),
        f"{kind}.feed_forward_length": ("u32", config.intermediate),
        f"{kind}.attention.head_count": ("u32", config.heads),
        f"{kind}.attention.head_count_kv": ("u32", config.kv_heads),
        f"{kind}.rope.freq_base": ("f32", config.rope_theta),
        f"{kind}.attention.layer_norm_rms_epsilon": ("f32", config.norm_eps),
    }


def write_decoder(path: Path, model: CausalLM, config: DecoderConfig, kind: str = "llama") -> Path:
    """A decoder of ours as a converter would write it, in F32."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if config.tied and name == "lm_head.weight":
            continue
        theirs = gguf_name(name)
        if kind == "llama" and ("attn_q." in theirs or "attn_k." in theirs):
            tensor = interleaved(tensor, config.head_dim)
        tensors[theirs] = ("F32", tuple(tensor.shape), tensor.contiguous().numpy().astype("<f4").tobytes())
    return write_gguf(path, decoder_metadata(kind, config), tensors)
