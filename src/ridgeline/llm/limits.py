"""The limit of decoding: what one step must read, and how long that takes at this machine's measured bandwidth.

    weights as stored (dense, int8 or int4 with their scales; of the input table one row a token) ──┐
    keys and values of every position attended to, a layer's window at most ────────────────────────┴─> bytes a step
    bytes a step / measured read bandwidth = least seconds a step          per cent reached = least / measured seconds

A step gives each of its sequences one token, so a batch divides the weights among its tokens. Not counted: activations, the new keys
and values written, the logits; all are under a per cent of the rest for one sequence. A model smaller than the caches can pass 100 %,
and so can speculation, which gives several tokens for one reading of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..target.machine import bandwidth, cache_sizes, seconds_per_call
from .model.linear import Int4Linear, Int8Linear

if TYPE_CHECKING:
    from .cache.kv import KVCache
    from .model.config import ModelConfig

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Limit:
    """What a decode step reads, and the least time that takes."""

    weight_bytes: int
    cache_bytes: int
    sequences: int
    bandwidth_bps: float

    @property
    def step_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes

    @property
    def bytes_per_token(self) -> float:
        return self.step_bytes / self.sequences

    @property
    def step_s(self) -> float:
        return self.step_bytes / self.bandwidth_bps

    @property
    def tokens_per_s(self) -> float:
        return self.sequences / self.step_s

    def percent(self, tokens_per_s: float) -> float:
        """How much of the limit a measured rate reaches."""
        return 100 * tokens_per_s / self.tokens_per_s

    def to_json(self, tokens_per_s: float) -> dict[str, float]:
        """The limit beside what was measured."""
        return {
            "weight_bytes": self.weight_bytes,
            "cache_bytes": self.cache_bytes,
            "bytes_per_token": round(self.bytes_per_token),
            "bandwidth_bps": self.bandwidth_bps,
            "limit_ms_per_token": 1e3 * self.step_s / self.sequences,
            "limit_tokens_per_s": self.tokens_per_s,
            "tokens_per_s": tokens_per_s,
            "percent_of_limit": self.percent(tokens_per_s),
        }


def decode_limit(model: nn.Module, config: ModelConfig, cache: KVCache, lengths: Sequence[float], bandwidth_bps: float) -> Limit:
    """The limit of one step over sequences that hold `lengths` tokens each (means are fine)."""
    return Limit(weight_bytes(model), round(sum(cache_bytes(config, cache, length) for length in lengths)), len(lengths), bandwidth_bps)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of weights one step reads, as they are stored; of tables that are looked up (not multiplied by) it reads a row."""
    total = 0
    for module in model.modules():
        if isinstance(module, Int8Linear | Int4Linear):
            total += module.nbytes + (0 if module.bias is None else module.bias.nbytes)
        elif not isinstance(module, nn.Embedding):  # a tied table is counted where it multiplies
            total += sum(weight.nbytes for weight in module.parameters(recurse=False))
    return total


def cache_bytes(config: ModelConfig, cache: KVCache, length: float) -> float:
    """Bytes of keys and values a new token of a sequence of `length` reads, scales included."""
    scales = 0 if cache.key_scales is None else cache.key_scales[0].element_size()
    row = 2 * config.kv_heads * (config.head_dim * cache.keys[0].element_size() + scales)  # a token in one layer
    windows = config.windows or (None,) * config.layers
    return float(sum(row * (length if window is None else min(length, window)) for window in windows))


@lru_cache(maxsize=4)
def read_bandwidth(device: str) -> float:
    """B/s this machine reads at best, measured now: sums, copies and additions over far more than its caches hold."""
    if device.startswith("cuda"):
        free = torch.cuda.mem_get_info(torch.device(device))[0]
        size = int(min(GIB, free // 4))
        with torch.cuda.device(torch.device(device)):
            return max(bandwidth(size, "cuda"), _own_sum(size))
    return bandwidth(max(4 * max(cache_sizes().values()), 256 << 20), "cpu")


def _own_sum(size: int) -> float:
    """B/s of our own reduction, which reads faster than torch's on some GPUs; 0 where it cannot run."""
    from ..kernel.reduce import sum as own_sum

    data = torch.rand(size // 4, device="cuda")
    try:
        return data.nbytes / seconds_per_call(lambda: own_sum(data), "cuda", best=True)
    except RuntimeError:
        return 0.0
