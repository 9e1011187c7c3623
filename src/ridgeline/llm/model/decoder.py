"""One decoder for Llama, Mistral, Qwen2, Qwen3 and GPT-2, over a paged cache.

    Batch: tokens [T] of all sequences, one after another ──embed (+ learned positions)──> x [T, hidden]
      layer: h, x = norm(x + change)      h ──qkv──> heads ──norm, rotate──> query, key, value ──> cache ──attend──> out: the change
             h, x = norm(x + change)      h ──up (and gate)──> silu(gate) · up, or gelu ──down──> the change
    ──norm──> rows that are wanted ──lm_head──> logits float32 [R, vocab]

query, key and value are one product, gate and up another; the sum before a norm is made with the norm, in one kernel on CUDA. One token
in halves on CUDA takes five launches a layer: norm with the product after it, sum with the product before it.
A decode step (starts None) on CUDA needs nothing from the host and allocates by shape alone: it may be captured in a graph.
Each row's result does not depend on the others', but for the order in which a matrix product adds up: the last bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from ...kernel.gemv import weights_are_still
from .attend import Reading, attend, attend_new, attends_at_once, write
from .config import ModelConfig
from .kernels import add_norm, norm, runs_kernels, turned
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
    angles: tuple[Tensor, Tensor] | None = None  # of the positions, where they were made with the slots


@dataclass(slots=True)
class Step:
    """What every layer of a step shares."""

    angles: tuple[Tensor, Tensor] | None
    reading: Reading
    slots: Tensor
    cache: KVCache


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

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """The change."""
        out: Tensor = self.out(self.attended(self.qkv(x), step))
        return out

    def attended(self, qkv: Tensor, step: Step) -> Tensor:
        """[T, heads * head_dim] of the product's output."""
        angles, reading, slots, cache = step.angles, step.reading, step.slots, step.cache
        qkv = qkv.unflatten(1, (-1, self.head_dim))
        if self.query_norm is None and angles is not None and attends_at_once(reading, qkv, cache):
            return attend_new(reading, qkv, angles, slots, cache, self.layer, self.window)
        query, key, value = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm.alone(query), self.key_norm.alone(key)
        if angles is not None:
            query, key = turned(query, key, *angles)
        write(cache, self.layer, key, value, slots)
        return attend(reading, query, key, value, cache, self.layer, self.window)


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

    def forward(self, change: Tensor, x: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        normed, x = self.attention_norm(change, x)
        normed, x = self.perceptron_norm(self.attention(normed, step), x)
        return self.perceptron(normed), x

    def of_one(self, x: Tensor, step: Step) -> Tensor:
        """The same of one token on CUDA in five launches: norms go with the product after them, sums with the one before."""
        attention, perceptron = self.attention, self.perceptron
        first, second = self.attention_norm, self.perceptron_norm
        qkv = attention.qkv(x, None, first.weight, first.eps)
        x = attention.out(attention.attended(qkv, step), x)
        if perceptron.gated:
            inner = perceptron.up.gated(x, second.weight, second.eps)
        else:
            inner = gelu(perceptron.up(x, None, second.weight, second.eps), approximate="tanh")
        out: Tensor = perceptron.down(inner, x)
        return out


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
        logits = self.narrow_logits(batch, cache, layers)
        return logits.float() if logits.dtype is not torch.float64 else logits

    def narrow_logits(self, batch: Batch, cache: KVCache, layers: range | None = None) -> Tensor:
        """The same in the dtype of activations, which holds them exactly."""
        with weights_are_still():  # nothing that is queued writes them: weights.py and quantise_decoder_ wait at their ends
            return self._logits(batch, cache, layers)

    def _logits(self, batch: Batch, cache: KVCache, layers: range | None) -> Tensor:
        change, angles = self.embed(batch.tokens), batch.angles
        if self.position is not None:
            change = change + self.position(batch.positions)
        if self.rope is not None and angles is None:
            angles = self.rope(batch.positions)
        step = Step(angles, Reading(batch, cache.page_size), batch.slots, cache)
        logits: Tensor
        chosen: list[Any] = [self.layers[index] for index in (range(len(self.layers)) if layers is None else layers)]
        if self._one_row(change):
            for layer in chosen:
                change = layer.of_one(change, step)
            if batch.wanted is not None:  # a chunk of one token that ends no prompt wants none
                change = change[batch.wanted]
            logits = self.lm_head(change, None, self.norm.weight, self.norm.eps)
        else:
            x: Tensor | None = None
            for layer in chosen:
                change, x = layer(change, x, step)
            if batch.wanted is not None:  # before the norm: it works row by row
                change, x = change[batch.wanted], None if x is None else x[batch.wanted]
            logits = self.lm_head(self.norm(change, x)[0])
        return logits

    def _one_row(self, x: Tensor) -> bool:
        """Whether products take norms and sums with them: one token, in halves, on kernels, RMS norms."""
        return x.shape[0] == 1 and x.dtype in (torch.float16, torch.bfloat16) and self.norm.bias is None and runs_kernels(x)
