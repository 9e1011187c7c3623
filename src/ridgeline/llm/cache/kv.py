"""The keys and values of every token, in pages that are allocated once.

    key, value [T, kv_heads, head_dim], slots [T] ──write──> keys[layer], values[layer] [pages + 1, page_size, kv_heads, head_dim]
    pages of one sequence, length ──read──> key, value [length, kv_heads, head_dim] in the compute dtype      (the plain path)

    bytes = layers · 2 · (pages + 1) · page_size · kv_heads · (head_dim · item_bytes + scale_bytes)
      bf16: item 2, scale 0;  int8: item 1, scale 2 (one float16 a token and head: symmetric, x ≈ scale · q, |q| <= 127)

The page after the last is never handed out: slot -1, a padded token, is written there, which needs no mask and no host sync, so `write`
can be captured in a CUDA graph. All kv heads are stored once, whatever the number of query heads. A sliding window frees no pages.
int8 is rounding to half a step: at most scale / 2 off, plus the float16 rounding of the scale at the largest value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.errors import OptionError
from ...kernel.jit import HAVE_TRITON, INTERPRETED
from ...kernel.paged_attention import paged_write

if TYPE_CHECKING:
    from ..model.config import ModelConfig

SCALE_DTYPE = torch.float16
SMALLEST_SCALE = 2.0**-24  # of float16; keys below 2^-25 · 127 are stored as 0


def formula_bytes(config: ModelConfig, pages: int, page_size: int = 16, item_bytes: int = 2, int8: bool = False) -> int:
    """Bytes of a KVCache of that shape; `item_bytes` is that of its dtype and is not used for int8."""
    vector_bytes = config.head_dim + SCALE_DTYPE.itemsize if int8 else config.head_dim * item_bytes
    return config.layers * 2 * (pages + 1) * page_size * config.kv_heads * vector_bytes


def pages_for(config: ModelConfig, memory_bytes: int, page_size: int = 16, item_bytes: int = 2, int8: bool = False) -> int:
    """The most pages whose cache takes at most `memory_bytes`; an error where not even one does."""
    page_bytes = formula_bytes(config, 0, page_size, item_bytes, int8)
    pages = memory_bytes // page_bytes - 1
    if pages < 1:
        raise OptionError(
            f"{memory_bytes:,} bytes for the key-value cache",
            why=f"one page of {page_size} tokens takes {page_bytes:,} bytes and one more is for padding: {2 * page_bytes:,} at least",
            do="give it more memory, a smaller page_size, or int8 keys and values",
        )
    return pages


class KVCache:
    """Keys and values of `pages * page_size` tokens for every layer of a model; it never grows."""

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        page_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        int8: bool = False,
    ) -> None:
        self.pages, self.page_size, self.dtype, self.int8 = pages, page_size, dtype, int8
        self._one_kernel = HAVE_TRITON and page_size >= 16 and page_size.bit_count() == 1
        shape = (pages + 1, page_size, config.kv_heads, config.head_dim)
        stored = torch.int8 if int8 else dtype

        def layers(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
            # Zeros, not whatever was there: a masked key still meets its weight of 0, and 0 · nan is nan.
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]

        self.keys, self.values = layers(shape, stored), layers(shape, stored)
        self.key_scales = layers(shape[:-1], SCALE_DTYPE) if int8 else None
        self.value_scales = layers(shape[:-1], SCALE_DTYPE) if int8 else None
        self._tickets = [torch.zeros(0, dtype=torch.int32, device=device)]

    def tickets(self, count: int) -> Tensor:
        """int32 zeros, `count` at least, which kernel.decode_attention leaves as they were; a graph may hold smaller ones for ever."""
        if self._tickets[-1].numel() < count:
            self._tickets.append(self._tickets[-1].new_zeros(count))
        return self._tickets[-1]

    @property
    def bytes(self) -> int:
        """Bytes allocated; equal to formula_bytes of the same shape."""
        scales = (self.key_scales or []) + (self.value_scales or [])
        return sum(tensor.numel() * tensor.element_size() for tensor in self.keys + self.values + scales)

    def write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Store key and value [T, kv_heads, head_dim] at slots [T] = page * page_size + offset; slot -1 is dropped."""
        if self.key_scales is not None and self.value_scales is not None:
            quantised, scale = quantise(torch.stack((key, value)))  # at once: half the launches
            _put(self.keys[layer], slots, quantised[0])
            _put(self.values[layer], slots, quantised[1])
            _put(self.key_scales[layer], slots, scale[0])
            _put(self.value_scales[layer], slots, scale[1])
        elif self._one_kernel and key.dtype == self.dtype and (key.is_cuda or INTERPRETED):
            paged_write(key, value, self.keys[layer], self.values[layer], slots)
        else:
            _put(self.keys[layer], slots, key)
            _put(self.values[layer], slots, value)

    def read(self, layer: int, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values [length, kv_heads, head_dim] of the sequence in `pages` [int], in the compute dtype."""
        pages = pages[: -(-length // self.page_size)]

        def dense(stored: Tensor) -> Tensor:
            return stored.index_select(0, pages).flatten(0, 1)[:length]

        key, value = dense(self.keys[layer]), dense(self.values[layer])
        if self.key_scales is None or self.value_scales is None:
            return key, value
        key_scale, value_scale = dense(self.key_scales[layer]), dense(self.value_scales[layer])
        return dequantise(key, key_scale, self.dtype), dequantise(value, value_scale, self.dtype)

    def copy_page(self, source: int, target: int) -> None:
        """Copy every layer's keys and values of one page over another."""
        for tensor in self.keys + self.values + (self.key_scales or []) + (self.value_scales or []):
            tensor[target] = tensor[source]


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [..., head_dim] and its float16 scale [...]: the largest magnitude becomes 127."""
    wide = x.float()
    scale = (wide.abs().amax(-1) / 127).to(SCALE_DTYPE)
    step = scale.float().clamp_min(SMALLEST_SCALE).unsqueeze(-1)  # the stored scale, so that its rounding is not an error of its own
    return (wide / step).round_().clamp_(-127, 127).to(torch.int8), scale


def dequantise(quantised: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """quantised · scale, in float32 and then the compute dtype."""
    return (quantised.float() * scale.float().unsqueeze(-1)).to(dtype)


def _put(stored: Tensor, slots: Tensor, fresh: Tensor) -> None:
    # An index of -1 counts from the end and so means the last row of the spare page: one kernel, no mask.
    stored.flatten(0, 1)[slots] = fresh.to(stored.dtype)
