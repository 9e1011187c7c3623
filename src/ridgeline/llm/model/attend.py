"""Attention of a step's tokens over the paged cache, into which their keys and values were just written.

    Batch ──Reading──> rows: tokens that each look back alone (decode, speculation)     parts: runs of one sequence (prefill)
      rows   CUDA  kernel.paged_attention: one launch for all, no word from the host, may be captured in a graph;
                   one token a sequence: kernel.decode_attention, with rotary positions and the write in the same launch
             CPU   keys of all rows gathered by one index (made once a step), one product; a lone run of pages is read in place
      parts  torch's scaled_dot_product_attention a sequence: causal, lower right where keys came before, masked by a window

A row's query heads that share a key head go through the keys together: [S, kv_heads, group, head_dim].
What lies beyond a row's length is never read: those places of the index repeat the row's first key, under a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ...kernel.decode_attention import decode_attention
from ...kernel.paged_attention import paged_attention, paged_write
from .kernels import runs_kernels

if TYPE_CHECKING:
    from ..cache.kv import KVCache
    from .decoder import Batch

CUDA_ROWS = 16
"""Runs up to this long are read row by row on CUDA: the second row finds the keys in the L2 cache."""
FOR_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Not cuDNN, torch's first choice on Hopper: it plans anew for every length, some 60 ms of the host each (H200, torch 2.11)."""


@dataclass(frozen=True, slots=True)
class Part:
    """A run of tokens [first, last) of one sequence, which has `length` keys after the step."""

    sequence: int
    first: int
    last: int
    length: int


@dataclass(frozen=True, slots=True)
class Gather:
    """Where the keys of all rows lie, as places of [pages * page_size]; `run`: they follow each other, and are read in place."""

    index: Tensor  # int64 [S * span]
    mask: Tensor | None  # bool [S, 1, 1, span]
    run: slice | None


class Reading:
    """How the tokens of one batch read the cache: made once a step, used by every layer."""

    def __init__(self, batch: Batch, page_size: int) -> None:
        self.page_size = page_size
        self.parts: list[Part] = []
        self.rows: Tensor | None = None  # int64: which tokens are rows; None: all of them
        self.table, self.lengths = batch.page_table, batch.lengths
        self.one_each = batch.starts is None
        self._gathers: dict[int | None, Gather] = {}
        self._masks: dict[tuple[Part, int | None], Tensor] = {}
        self.row_count = batch.tokens.shape[0]
        if batch.starts is not None:
            self._split(batch, batch.starts)

    def _split(self, batch: Batch, starts: tuple[int, ...]) -> None:
        """Short runs become rows, longer ones parts."""
        most = CUDA_ROWS if runs_kernels(batch.tokens) else 1
        tokens: list[int] = []
        sequences: list[int] = []
        lengths = batch.lengths_host
        for sequence, (first, last) in enumerate(pairwise(starts)):
            if last - first <= most:
                tokens += range(first, last)
                sequences += [sequence] * (last - first)
            else:
                lengths = lengths or tuple(batch.lengths.tolist())
                self.parts.append(Part(sequence, first, last, lengths[sequence]))
        self.row_count = len(tokens)
        if self.parts or len(sequences) != len(starts) - 1:
            device = batch.tokens.device
            self.rows = torch.tensor(tokens, dtype=torch.int64, device=device)
            self.table = batch.page_table[torch.tensor(sequences, dtype=torch.int64, device=device)]
            self.lengths = (batch.positions[self.rows] + 1).to(torch.int32)
        self.page_table = batch.page_table

    def gather(self, window: int | None) -> Gather:
        """The places of the rows' keys within this window."""
        if window not in self._gathers:
            self._gathers[window] = self._gather(window)
        return self._gathers[window]

    def _gather(self, window: int | None) -> Gather:
        lengths = self.lengths.long().clamp(min=1)
        device = lengths.device
        # On a device the longest length is not known without waiting: then the table's width stands for it.
        longest = int(lengths.max()) if device.type == "cpu" else self.table.shape[1] * self.page_size
        span = longest if window is None else min(window, longest)
        first = torch.zeros_like(lengths) if window is None else (lengths - window).clamp(min=0)
        offset = first[:, None] + torch.arange(span, device=device)
        seen = offset < lengths[:, None]
        offset = torch.where(seen, offset, first[:, None])
        index = self.table.long().gather(1, offset // self.page_size) * self.page_size + offset % self.page_size  # [S, span]
        if device.type != "cpu":
            return Gather(index.flatten(), seen[:, None, None], None)
        mask = None if bool(seen.all()) else seen[:, None, None]
        start = int(index[0, 0])
        in_place = index.shape[0] == 1 and torch.equal(index[0], torch.arange(start, start + span))
        return Gather(index.flatten(), mask, slice(start, start + span) if in_place else None)

    def mask(self, part: Part, window: int, kept: int) -> Tensor:
        """bool [tokens, kept]: which of the last `kept` keys each token of a part sees through a window."""
        if (part, window) not in self._masks:
            device = self.lengths.device
            token = torch.arange(part.length - (part.last - part.first), part.length, device=device)[:, None]
            key = torch.arange(part.length - kept, part.length, device=device)
            self._masks[part, window] = (key <= token) & (key > token - window)
        return self._masks[part, window]


def attends_at_once(reading: Reading, qkv: Tensor, cache: KVCache) -> bool:
    """Whether `attend_new` takes the step: one token a sequence, on kernels."""
    return reading.one_each and runs_kernels(qkv) and _fits(cache.page_size)


def attend_new(
    reading: Reading, qkv: Tensor, angles: tuple[Tensor, Tensor], slots: Tensor, cache: KVCache, layer: int, window: int | None
) -> Tensor:
    """[S, heads + 2 kv_heads, head_dim] of one new token a sequence → [S, heads * head_dim]; turned, written and attended."""
    keys, values = cache.keys[layer], cache.values[layer]
    scales = _of(cache.key_scales, layer), _of(cache.value_scales, layer)
    tickets = cache.tickets(qkv.shape[0] * keys.shape[2])
    where = slots, keys, values, reading.table, reading.lengths, tickets
    return decode_attention(qkv, *angles, *where, None, window, *scales).flatten(1)


def write(cache: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Key and value [T, kv_heads, head_dim] into their slots; on CUDA both in one launch, unless the cache rounds them."""
    keys, values = cache.keys[layer], cache.values[layer]
    if runs_kernels(key) and keys.dtype is key.dtype and _fits(cache.page_size):
        paged_write(key, value, keys, values, slots)
    else:
        cache.write(layer, key, value, slots)


def attend(reading: Reading, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, layer: int, window: int | None) -> Tensor:
    """[T, heads, head_dim] of query, and of the same step's key and value, already in the cache, → [T, heads * head_dim]."""
    if reading.rows is None and not reading.parts:
        return _attend_rows(reading, query, cache, layer, window).flatten(1)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if reading.row_count:
        out[reading.rows] = _attend_rows(reading, query[reading.rows], cache, layer, window)
    with sdpa_kernel(FOR_ANY_LENGTH):
        for part in reading.parts:
            run = slice(part.first, part.last)
            out[run] = _attend_part(reading, part, query[run], key[run], value[run], cache, layer, window)
    return out.flatten(1)


def _attend_rows(reading: Reading, query: Tensor, cache: KVCache, layer: int, window: int | None) -> Tensor:
    """[S, heads, head_dim] in and out, one token a row."""
    keys, values = cache.keys[layer], cache.values[layer]
    scales = _of(cache.key_scales, layer), _of(cache.value_scales, layer)
    if runs_kernels(query) and _fits(cache.page_size):
        return paged_attention(query, keys, values, reading.table, reading.lengths, None, window, *scales)
    gather = reading.gather(window)
    grouped = query.unflatten(1, (keys.shape[2], -1))  # [S, kv_heads, group, head_dim]
    keys = _gathered(keys, scales[0], gather, query)
    values = _gathered(values, scales[1], gather, query)
    return scaled_dot_product_attention(grouped, keys, values, attn_mask=gather.mask).flatten(1, 2)


def _fits(page_size: int) -> bool:
    """Pages that the kernel reads."""
    return page_size >= 16 and page_size & (page_size - 1) == 0


def _of(scales: list[Tensor] | None, layer: int) -> Tensor | None:
    return None if scales is None else scales[layer]


def _gathered(pages: Tensor, scales: Tensor | None, gather: Gather, like: Tensor) -> Tensor:
    """[S, kv_heads, span, head_dim] of keys or values, in the dtype of `like`."""
    flat = pages.flatten(0, 1)
    found = flat[gather.run] if gather.run is not None else flat.index_select(0, gather.index)
    if scales is not None:
        flat = scales.flatten(0, 1)
        scale = flat[gather.run] if gather.run is not None else flat.index_select(0, gather.index)
        found = found * scale.float()[..., None]
    return found.to(like.dtype).view(like.shape[0], -1, *pages.shape[2:]).transpose(1, 2)


def _attend_part(
    reading: Reading, part: Part, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, layer: int, window: int | None
) -> Tensor:
    """[tokens, heads, head_dim] of one sequence's run, over its keys so far."""
    count, length = query.shape[0], part.length
    # Freshly computed keys are what the cache holds, unless it rounds them: then all see the rounded ones, however text is cut in runs.
    if length > count or cache.key_scales is not None or cache.keys[layer].dtype is not query.dtype:
        pages = reading.page_table[part.sequence, : -(-length // reading.page_size)]
        key, value = (found.to(query.dtype) for found in cache.read(layer, pages, length))
    kept = length if window is None else min(length, count + window - 1)
    # [1, heads, tokens, head_dim]
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key[length - kept :], value[length - kept :]))
    shared = query.shape[1] != key.shape[1]
    if window is None or window >= length:
        if count == length:
            out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)
        else:
            out = scaled_dot_product_attention(query, key, value, attn_mask=_lower_right(reading, part), enable_gqa=shared)
    else:
        if query.is_cuda and shared:  # of torch's CUDA kernels none takes a mask and shared heads, and the plain formula needs memory
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        mask = reading.mask(part, window, kept)
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1])
    return out[0].transpose(0, 1)


def _lower_right(reading: Reading, part: Part) -> Tensor:
    """The causal mask of a run that ends where its keys end; on CUDA a bias that is never written out."""
    count = part.last - part.first
    if reading.lengths.is_cuda:
        from torch.nn.attention.bias import causal_lower_right  # brings torch's compiler along

        return causal_lower_right(count, part.length)
    return reading.mask(part, part.length, part.length)
