"""The decoder of Llama and Qwen, with Hugging Face's layer names.

    input_ids [B,T], positions [T] ─embed─> [B,T,hidden] ─layers─> norm, lm_head ─> logits [B,T,vocab]
      layer: x = x + attention(norm x); x = x + down(silu(gate(norm x)) · up(norm x))

    prefill  T = context, no cache: token t attends to tokens 0..t
    decode   T = 1, positions = [context - 1]: the new key and value are written into kv_cache, in place, and the token
             attends to all of it; kv_cache is one (key, value) pair a layer, each [B,kv_heads,context,head_dim]

Fewer key-value heads than query heads are shared out by grouped attention. cos and sin of the rotary positions are computed
once a pass, in float32. Ref: Touvron 2023 (Llama), Su 2021 (rotary positions), Ainslie 2023 (grouped heads).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from . import Example

Cache = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The sizes of a decoder."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    rope_theta: float
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    tied: bool = False  # the embedding table is also the output matrix
    rope_factor: float = 1.0  # Llama 3.1's stretching of slow rotations; 1 leaves them

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


CONFIGS = {  # layers, hidden, intermediate, heads, kv_heads, vocab, rope_theta
    "llama-3-8b": DecoderConfig(32, 4096, 14336, 32, 8, 128_256, 5e5),
    "llama-3.2-1b": DecoderConfig(16, 2048, 8192, 32, 8, 128_256, 5e5, tied=True, rope_factor=32.0),
    "tinyllama-1.1b": DecoderConfig(22, 2048, 5632, 32, 4, 32_000, 1e4),
    "qwen2.5-0.5b": DecoderConfig(24, 896, 4864, 14, 2, 151_936, 1e6, norm_eps=1e-6, qkv_bias=True, tied=True),
    "qwen2.5-1.5b": DecoderConfig(28, 1536, 8960, 12, 2, 151_936, 1e6, norm_eps=1e-6, qkv_bias=True, tied=True),
    "smollm2-135m": DecoderConfig(30, 576, 1536, 9, 3, 49_152, 1e5, tied=True),
}


def build(name: str, example: Example) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The module and the inputs of one phase."""
    config = CONFIGS[name]
    args, kwargs = language_inputs(example, config.vocab, config.layers, config.kv_heads, config.head_dim)
    return CausalLM(config), args, kwargs


def language_inputs(example: Example, vocab: int, layers: int, kv_heads: int, head_dim: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Random token ids with their positions; in decode also a full cache."""
    batch, context = example.batch, example.tokens
    if example.phase == "prefill":
        return (torch.randint(vocab, (batch, context)), torch.arange(context)), {}
    shape = (batch, kv_heads, context, head_dim)
    # Not zeros: untouched zero pages share one physical page, and reading them would measure the cache, not memory.
    cache = [(torch.randn(shape), torch.randn(shape)) for _ in range(layers)]
    return (torch.randint(vocab, (batch, 1)), torch.full((1,), context - 1)), {"kv_cache": cache}


def attend(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, cache: tuple[Tensor, Tensor] | None) -> Tensor:
    """[B,heads,T,head_dim] each in, [B,T,hidden] out; causal without a cache, else over the cache with the new token written in."""
    if cache is not None:
        key = cache[0].index_copy_(2, positions, key)
        value = cache[1].index_copy_(2, positions, value)
    grouped = query.size(1) != key.size(1)
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=cache is None, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(2)


def rotary_frequencies(config: DecoderConfig) -> Tensor:
    """Radians a position for each pair of features: [head_dim / 2], float32 whatever the model's dtype."""
    frequency = config.rope_theta ** -(torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)
    if config.rope_factor == 1.0:
        return frequency
    # Llama 3.1: waves that turn less than once in the 8192 positions of pre-training are stretched by the factor,
    # those that turn more than four times are left, and those between are blended.
    turns = frequency * 8192 / (2 * math.pi)
    kept = ((turns - 1.0) / (4.0 - 1.0)).clamp(0.0, 1.0)
    return frequency * (kept + (1.0 - kept) / config.rope_factor)


class RotaryEmbedding(nn.Module):
    """cos and sin for each position, laid out for `rotate`."""

    inv_freq: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rotary_frequencies(config), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angle = positions[:, None] * self.inv_freq  # [T,head_dim/2]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)  # [T,head_dim]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn feature i together with feature i + head_dim/2; the minus of the rotation is already in `sin`."""
    if has_torch_function((x, cos, sin)):  # use_kernels() does it in one launch
        return handle_torch_function(rotate, (x, cos, sin), x, cos, sin)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, first), dim=-1) * sin


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    if has_torch_function((gate, up)):  # as in `rotate`
        return handle_torch_function(gated, (gate, up), gate, up)
    return functional.silu(gate) * up


class Attention(nn.Module):
    """Rotary positions, grouped key-value heads."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden, bias=False)

    def forward(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor] | None) -> Tensor:
        shape = (*x.shape[:2], -1, self.head_dim)
        query, key, value = (project(x).view(shape).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj))
        out: Tensor = self.o_proj(attend(rotate(query, cos, sin), rotate(key, cos, sin), value, positions, cache))
        return out


class MLP(nn.Module):
    """A gated perceptron (SwiGLU)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))
        return out


class Layer(nn.Module):
    """Attention and perceptron, each normalised before and added to its input."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, cos, sin, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Token ids to the normalised last hidden states."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(self, input_ids: Tensor, positions: Tensor, kv_cache: Cache | None) -> Tensor:
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(positions, x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, positions, cos, sin, kv_cache[index] if kv_cache is not None else None)
        out: Tensor = self.norm(x)
        return out


class CausalLM(nn.Module):
    """The decoder and its output matrix."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor, kv_cache: Cache | None = None) -> Tensor:
        logits: Tensor = self.lm_head(self.model(input_ids, positions, kv_cache))
        return logits
