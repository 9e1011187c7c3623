"""One decoder for Llama, Mistral, Qwen2, Qwen3 and GPT-2, over a paged cache.

    Batch: tokens [T] of all sequences, one after another ──embed (+ learned positions)──> x [T, hidden]
      layer: h, x = norm(x + change)      h ──qkv──> heads ──norm, rotate──> query, key, value ──> cache ──attend──> out: the change
             h, x = norm(x + change)      h ──up (and gate)──> silu(gate) · up, or gelu ──down──> the change
    ──norm──> rows that are wanted ──lm_head──> logits float32 [R, vocab]

query, key and value are one product, gate and up another; the sum before a norm is made with the norm, in one kernel on CUDA.
A decode step (starts None) on CUDA needs nothing from the host and allocates by shape alone: it may be captured in a graph.
Each row's result does not depend on the others', but for the order in which a matrix product adds up: the last bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from ...kernel.gemv import weights_are_still
from .attend import Reading, attend, write
from .config import ModelConfig
from .kernels import add_norm, norm, turned
from .linear import Linear
from .rope import Rope

if TYPE_CHECKING:
    from ..cache.kv import KVCache


@dataclass(slots=True)
class Batch:
    """The tokens of one step, all sequences one after another; tensors on the model's device."""

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]: page * page_size + offset where each token's key and value go; -1: nowhere
    page_table: Tensor  # int32 [S, most_pages]
    lengths: Tensor  # int32 [S]: keys each sequence has after this step
    starts: tuple[int, ...] | None = None  # S + 1 offsets into T; None: one token a sequence, and nothing is needed on the host
    wanted: Tensor | None = None  # int64 [R]: rows of T whose logits are wanted; None: all
    lengths_host: tuple[int, ...] | None = None  # `lengths`, known to the host: saves a wait for the device in prefill steps


class Norm(nn.Module):
    """RMS or layer norm of a sum: (norm(x + residual), x + residual)."""

    bias: nn.Parameter | None

    def __init__(self, size: int, kind: str, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if kind == "layer" else None

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return add_norm(x, residual, self.weight, self.bias, self.eps)

    def alone(self, x: Tensor) -> Tensor:
        """The norm over the last dimension."""
        return norm(x, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """Query, key and value in one product; heads turned, written, read back with all that came before."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.window = layer, config.window(layer)
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        width = config.heads * config.head_dim
        self.qkv = Linear(config.hidden, width + 2 * config.kv_heads * config.head_dim, config.qkv_bias)
        self.out = Linear(width, config.hidden, config.out_bias)
        self.query_norm = Norm(config.head_dim, "rms", config.norm_eps) if config.qk_norm else None
        self.key_norm = Norm(config.head_dim, "rms", config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None, reading: Reading, slots: Tensor, cache: KVCache) -> Tensor:
        qkv: Tensor = self.qkv(x)
        query, key, value = qkv.unflatten(1, (-1, self.head_dim)).split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm.alone(query), self.key_norm.alone(key)
        if angles is not None:
            query, key = turned(query, key, *angles)
        write(cache, self.layer, key, value, slots)
        attended = attend(reading, query, key, value, cache, self.layer, self.window)
        out: Tensor = self.out(attended)
        return out


class Perceptron(nn.Module):
    """silu(gate) · up with both in one product, or GPT-2's gelu."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gated = config.activation == "silu"
        self.up = Linear(config.hidden, config.intermediate * (2 if self.gated else 1), config.mlp_bias)
        self.down = Linear(config.intermediate, config.hidden, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up.gated(x) if self.gated else gelu(self.up(x), approximate="tanh")
        out: Tensor = self.down(inner)
        return out


class Layer(nn.Module):
    """Attention and perceptron; takes and gives (change, x), which the next norm adds up."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = Norm(config.hidden, config.norm, config.norm_eps)
        self.attention = Attention(config, layer)
        self.perceptron_norm = Norm(config.hidden, config.norm, config.norm_eps)
        self.perceptron = Perceptron(config)

    def forward(
        self, change: Tensor, x: Tensor | None, angles: tuple[Tensor, Tensor] | None, reading: Reading, slots: Tensor, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        normed, x = self.attention_norm(change, x)
        normed, x = self.perceptron_norm(self.attention(normed, angles, reading, slots, cache), x)
        return self.perceptron(normed), x


class Decoder(nn.Module):
    """Token ids to logits. Parameters need no gradient, and are empty until filled: weights.py."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.hidden, _weight=torch.empty(config.vocab, config.hidden)).requires_grad_(False)
        self.position: nn.Embedding | None = None
        self.rope: Rope | None = None
        if config.positions == "learned":
            table = torch.empty(config.context, config.hidden)
            self.position = nn.Embedding(config.context, config.hidden, _weight=table).requires_grad_(False)
        else:
            self.rope = Rope(config)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.layers))
        self.norm = Norm(config.hidden, config.norm, config.norm_eps)
        self.lm_head = Linear(config.hidden, config.vocab)
        if config.tied:
            self.lm_head.weight = self.embed.weight  # type: ignore[assignment]

    @property
    def dtype(self) -> torch.dtype:
        """What activations are computed in."""
        return self.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def forward(self, batch: Batch, cache: KVCache, layers: range | None = None) -> Tensor:
        """Logits float32 [R, vocab] of the wanted rows; every token's key and value are in the cache after it.

        `layers`: only these, in this order (a draft that skips some).
        """
        with weights_are_still():  # nothing that is queued writes them: weights.py and quantise_decoder_ wait at their ends
            return self._forward(batch, cache, layers)

    def _forward(self, batch: Batch, cache: KVCache, layers: range | None) -> Tensor:
        change, x, angles = self.embed(batch.tokens), None, None
        if self.position is not None:
            change = change + self.position(batch.positions)
        if self.rope is not None:
            angles = self.rope(batch.positions)
        reading = Reading(batch, cache.page_size)
        for index in range(len(self.layers)) if layers is None else layers:
            change, x = self.layers[index](change, x, angles, reading, batch.slots, cache)
        if batch.wanted is not None:  # before the norm: it works row by row
            change, x = change[batch.wanted], None if x is None else x[batch.wanted]
        logits: Tensor = self.lm_head(self.norm(change, x)[0])
        return logits.float() if logits.dtype is not torch.float64 else logits
