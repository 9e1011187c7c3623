"""Attention of a decode step from the product's output on: rotary positions, the write into pages, attention, one launch.

    qkv [B, H + 2 Hkv, D], cos, sin [B, D], slots [B] ──a program a (sequence, key head, share of the tokens before)──┐
      first keys and values, read before the kernel before has ended ──> query turned ──> tiles of the share          │
      last share: key turned, key and value into their slot, and attended to from registers                           │
      shares of a head ──the last to end (tickets)──> combined ──> out [B, H, D]                                    <─┘

Half-split rotation (rope.py) in float32, rounded once to the dtype of qkv; int8 caches keep largest |x| / 127 of a token and head as a
float16 scale, made of what was rounded. Shares as in paged_attention.py; tokens before a step are those of `lengths` - 1, in pages;
a slot outside the caches is skipped, and its token still sees itself. tickets: int32 [B · Hkv], zeros before and after.
Under weights_are_still() page table, lengths and caches must have been written by kernels that do not overlap (torch's do not).
No gradient. float64, D above 256 or odd take the steps one by one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.errors import OptionError
from .attention_kernels import narrowed
from .jit import INTERPRETED, jit, launch, next_power_of_2, tl
from .library import operator
from .matmul_kernels import processors
from .overlap import are_still, begin, promptness, wait
from .paged_attention import configured, paged_attention_reference, paged_write_reference

Optional = Tensor | None
SMALLEST_SCALE = 2.0**-24
"""Of float16: smaller keys become 0."""
SHORT = 512
"""Most tokens that one program reads for a head of queries: beyond, shares are faster though they are combined (H200)."""
TILE_BYTES = 65536
"""Of the keys such a program reads at a time: 256 tokens of 128 halves."""


@jit
def _turned(x_ptr, cos_ptr, sin_ptr, columns, kept, HALF: tl.constexpr, DTYPE: tl.constexpr, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Heads at x_ptr + columns, turned and rounded; x_ptr and kept may have a dimension of heads before that of columns."""
    beside = tl.where(columns < HALF, columns + HALF, columns - HALF)
    x = tl.load(x_ptr + columns, mask=kept, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + beside, mask=kept, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + columns, mask=columns < 2 * HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + columns, mask=columns < 2 * HALF, other=0.0).to(tl.float32)
    return narrowed(x * cos + tl.where(columns < HALF, -other, other) * sin, DTYPE, UPCAST)


@jit
def _tile(k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, at, start, stop, k_p, k_s, v_p, v_s, shared, head, columns,  # type: ignore[no-untyped-def]
          PAGE: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Keys and values of tokens [at, at + BLOCK_N) of [start, stop), their scales, and which exist."""
    tokens = at + tl.arange(0, BLOCK_N)
    valid = (tokens >= start) & (tokens < stop)
    pages = tl.load(table_ptr + tokens // PAGE, mask=valid, other=0).to(tl.int64)
    loaded = valid[:, None] & (columns[None, :] < D)
    k = tl.load(k_ptr + (pages * k_p + tokens % PAGE * k_s)[:, None] + columns[None, :], mask=loaded, other=0)
    v = tl.load(v_ptr + (pages * v_p + tokens % PAGE * v_s)[:, None] + columns[None, :], mask=loaded, other=0)
    k_scale = 1.0
    v_scale = 1.0
    if k_scale_ptr is not None:
        places = (pages * PAGE + tokens % PAGE) * shared + head
        k_scale = tl.load(k_scale_ptr + places, mask=valid, other=0.0).to(tl.float32)
        v_scale = tl.load(v_scale_ptr + places, mask=valid, other=0.0).to(tl.float32)
    return k, v, k_scale, v_scale, valid


@jit
def _seen(q, k, v, k_scale, v_scale, valid, out, total, top, scale, SCALED: tl.constexpr, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """(out, total, top) of a running softmax after one more tile."""
    if SCALED:
        k = k.to(q.dtype)
        v = v.to(q.dtype)
    if UPCAST:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [BLOCK_G, BLOCK_N]
    if SCALED:
        scores *= k_scale[None, :]
    scores = tl.where(valid[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)  # a tile of nothing
    p = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(top - safe)
    total = total * shrink + tl.sum(p, 1)
    if SCALED:
        p *= v_scale[None, :]
    return tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision="ieee"), total, higher


@jit
def _kept(x, cache_ptr, scale_ptr, at, place, columns, room):  # type: ignore[no-untyped-def]
    """x [BLOCK_D] into the cache, and what the cache then holds, in float32; room: columns there are, 0 where the slot is outside."""
    held = x.to(tl.float32)
    if scale_ptr is not None:
        scale = (tl.max(tl.abs(held), 0) / 127.0).to(tl.float16)
        step = tl.maximum(scale.to(tl.float32), 5.9604644775390625e-08)
        codes = tl.minimum(tl.maximum((held / step + 12582912.0) - 12582912.0, -127.0), 127.0)  # 1.5 · 2^23: half to even
        tl.store(scale_ptr + place, scale, mask=room > 0)
        tl.store(cache_ptr + at + columns, codes.to(tl.int8), mask=columns < room)
        held = codes * scale.to(tl.float32)
    else:
        tl.store(cache_ptr + at + columns, x, mask=columns < room)
    return held


@jit
def _and_itself(q, key, value, out, total, top, scale, length):  # type: ignore[no-untyped-def]
    """(out, total, top) after the token's own key and value, float32 [BLOCK_D]; a sequence of length 0 has none."""
    score = tl.sum(q.to(tl.float32) * key[None, :], 1) * scale
    score = tl.where(length > 0, score, float("-inf"))
    higher = tl.maximum(top, score)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(score - safe)
    shrink = tl.exp2(top - safe)
    return out * shrink[:, None] + p[:, None] * value[None, :], total * shrink + p, higher


@jit
def _combined(part_ptr, lse_ptr, out_ptr, pair, splits, active, group, columns,  # type: ignore[no-untyped-def]
              STEP: tl.constexpr, MEMBERS: tl.constexpr, D: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Shares of a key head's queries, weighted by their part of the softmax's sum; past the first-level cache, which knows no others."""
    member = tl.arange(0, MEMBERS)
    out = tl.zeros([MEMBERS, columns.shape[0]], tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    top = tl.full([MEMBERS], float("-inf"), tl.float32)
    kept = (member[:, None] < group) & (columns[None, :] < D)
    for at in range(0, active, STEP):
        some = at + tl.arange(0, STEP)
        rows = (pair * splits + some)[:, None] * group + member[None, :]
        known = (some < active)[:, None] & (member < group)[None, :]
        lse = tl.load(lse_ptr + rows, mask=known, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(part_ptr + rows[:, :, None] * D + columns[None, None, :], mask=known[:, :, None] & (columns < D)[None, None, :],
                       other=0.0, cache_modifier=".cg")  # fmt: skip
        higher = tl.maximum(top, tl.max(lse, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(lse - safe[None, :])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weight, 0)
        out = out * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
        top = higher
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    rows = pair * group + member
    tl.store(out_ptr + rows[:, None] * D + columns[None, :], narrowed(out, out_ptr.dtype.element_ty, UPCAST), mask=kept)


@jit
def decode_attention_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, cos_ptr, sin_ptr, slots_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lengths_ptr, ticket_ptr, part_ptr,
    lse_ptr, out_ptr, qkv_b, k_p, k_s, k_h, v_p, v_s, v_h, table_b, shared, group, splits, capacity, window, slots, scale,
    PAGE: tl.constexpr, WINDOWED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
    MEMBERS: tl.constexpr, STEP: tl.constexpr, PEEL: tl.constexpr, UPCAST: tl.constexpr, PROMPT: tl.constexpr = False,
):  # fmt: skip
    """One share of one sequence for one key head. `scale` includes log2(e). PEEL: the first tile is read before the wait."""
    begin(PROMPT)
    HALF: tl.constexpr = D // 2
    SCALED: tl.constexpr = k_scale_ptr is not None
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    head = tl.program_id(0) % shared  # fastest: the heads of a token are neighbours in memory
    split = tl.program_id(0) // shared % splits
    batch = (tl.program_id(0) // shared // splits).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + batch).to(tl.int32), capacity)
    before = tl.maximum(length - 1, 0)
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0)
    base = first // BLOCK_N * BLOCK_N  # tiles begin where pages do
    share = tl.maximum(tl.cdiv(tl.cdiv(before - base, splits), BLOCK_N), 1) * BLOCK_N
    active = tl.maximum(tl.cdiv(before - base, share), 1)
    if split < active:
        start = base + split * share
        stop = tl.minimum(start + share, before)
        members = tl.arange(0, BLOCK_G)
        columns = tl.arange(0, BLOCK_D)
        kept = (members[:, None] < group) & (columns[None, :] < D)
        k_ptr += head.to(tl.int64) * k_h
        v_ptr += head.to(tl.int64) * v_h
        table_ptr += batch * table_b
        qkv_ptr += batch * qkv_b
        if PEEL:
            k, v, k_scale, v_scale, valid = _tile(k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, start, first, stop, k_p, k_s, v_p,
                                                  v_s, shared, head, columns, PAGE, D, BLOCK_N)  # fmt: skip
        slot = tl.load(slots_ptr + batch).to(tl.int64)
        cos_ptr += batch * D
        sin_ptr += batch * D
        wait(PROMPT)
        q = _turned(qkv_ptr + (head * group + members)[:, None] * D, cos_ptr, sin_ptr, columns[None, :], kept, HALF, DTYPE, UPCAST)
        key = _turned(qkv_ptr + (shared * group + head) * D, cos_ptr, sin_ptr, columns, columns < D, HALF, DTYPE, UPCAST)
        value = tl.load(qkv_ptr + (shared * group + shared + head) * D + columns, mask=columns < D, other=0.0)
        if UPCAST:
            q = q.to(tl.float32)
        out = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        top = tl.full([BLOCK_G], float("-inf"), tl.float32)
        if PEEL:
            out, total, top = _seen(q, k, v, k_scale, v_scale, valid, out, total, top, scale, SCALED, UPCAST)
        for at in range(start + (BLOCK_N if PEEL else 0), stop, BLOCK_N):
            k, v, k_scale, v_scale, valid = _tile(k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, at, first, stop, k_p, k_s, v_p, v_s,
                                                  shared, head, columns, PAGE, D, BLOCK_N)  # fmt: skip
            out, total, top = _seen(q, k, v, k_scale, v_scale, valid, out, total, top, scale, SCALED, UPCAST)
        if split == active - 1:
            room = tl.where((slot >= 0) & (slot < slots), D, 0)
            place = slot * shared + head
            new_key = _kept(key, k_ptr, k_scale_ptr, slot // PAGE * k_p + slot % PAGE * k_s, place, columns, room)
            new_value = _kept(value, v_ptr, v_scale_ptr, slot // PAGE * v_p + slot % PAGE * v_s, place, columns, room)
            out, total, top = _and_itself(q, new_key, new_value, out, total, top, scale, length)
        out = out / tl.where(total == 0.0, 1.0, total)[:, None]
        pair = batch * shared + head
        if active == 1:
            rows = pair * group + members
            tl.store(out_ptr + rows[:, None] * D + columns[None, :], narrowed(out, out_ptr.dtype.element_ty, UPCAST), mask=kept)
        else:
            rows = (pair * splits + split) * group + members
            tl.store(lse_ptr + rows, top + tl.log2(total), mask=members < group)
            tl.store(part_ptr + rows[:, None] * D + columns[None, :], out, mask=kept)
            tl.debug_barrier()  # all threads have written before the ticket says so
            done = tl.atomic_add(ticket_ptr + pair, 1, sem="acq_rel")
            if done == active - 1:
                tl.store(ticket_ptr + pair, 0)
                _combined(part_ptr, lse_ptr, out_ptr, pair, splits, active, group, columns, STEP, MEMBERS, D, UPCAST)


@jit
def _seen_alone(q, k, v, k_scale, v_scale, valid, out, total, top, scale, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(out [BLOCK_D], total, top) of one query after one more tile: products in float32, nothing goes through shared memory."""
    scores = tl.sum(k.to(tl.float32) * q[None, :], 1) * scale
    if SCALED:
        scores *= k_scale
    scores = tl.where(valid, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 0))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(scores - safe)
    shrink = tl.exp2(top - safe)
    total = total * shrink + tl.sum(p, 0)
    if SCALED:
        p *= v_scale
    return out * shrink + tl.sum(p[:, None] * v.to(tl.float32), 0), total, higher


@jit
def decode_attention_head_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, cos_ptr, sin_ptr, slots_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lengths_ptr, out_ptr, qkv_b, k_p, k_s, k_h,
    v_p, v_s, v_h, table_b, shared, group, capacity, window, slots, scale, PAGE: tl.constexpr, WINDOWED: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr, PROMPT: tl.constexpr = False,
):  # fmt: skip
    """All tokens of one sequence for one head of queries. Few tokens are read faster once more than shares of them are combined."""
    begin(PROMPT)
    HALF: tl.constexpr = D // 2
    SCALED: tl.constexpr = k_scale_ptr is not None
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    own = tl.program_id(0) % (shared * group)
    batch = (tl.program_id(0) // (shared * group)).to(tl.int64)
    head = own // group
    length = tl.minimum(tl.load(lengths_ptr + batch).to(tl.int32), capacity)
    slot = tl.load(slots_ptr + batch).to(tl.int64)
    stop = tl.maximum(length - 1, 0)
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0)
    start = first // BLOCK_N * BLOCK_N
    columns = tl.arange(0, BLOCK_D)
    k_ptr += head.to(tl.int64) * k_h
    v_ptr += head.to(tl.int64) * v_h
    table_ptr += batch * table_b
    qkv_ptr += batch * qkv_b
    cos_ptr += batch * D
    sin_ptr += batch * D
    k, v, k_scale, v_scale, valid = _tile(k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, start, first, stop, k_p, k_s, v_p, v_s, shared,
                                          head, columns, PAGE, D, BLOCK_N)  # fmt: skip
    wait(PROMPT)
    query = _turned(qkv_ptr + own * D, cos_ptr, sin_ptr, columns, columns < D, HALF, DTYPE, UPCAST).to(tl.float32)
    key = _turned(qkv_ptr + (shared * group + head) * D, cos_ptr, sin_ptr, columns, columns < D, HALF, DTYPE, UPCAST)
    value = tl.load(qkv_ptr + (shared * group + shared + head) * D + columns, mask=columns < D, other=0.0)
    out = tl.zeros([BLOCK_D], tl.float32)
    total = 0.0
    top = float("-inf")
    out, total, top = _seen_alone(query, k, v, k_scale, v_scale, valid, out, total, top, scale, SCALED)
    for at in range(start + BLOCK_N, stop, BLOCK_N):
        k, v, k_scale, v_scale, valid = _tile(k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, at, first, stop, k_p, k_s, v_p, v_s,
                                              shared, head, columns, PAGE, D, BLOCK_N)  # fmt: skip
        out, total, top = _seen_alone(query, k, v, k_scale, v_scale, valid, out, total, top, scale, SCALED)
    room = tl.where((slot >= 0) & (slot < slots) & (own % group == 0), D, 0)
    place = slot * shared + head
    new_key = _kept(key, k_ptr, k_scale_ptr, slot // PAGE * k_p + slot % PAGE * k_s, place, columns, room)
    new_value = _kept(value, v_ptr, v_scale_ptr, slot // PAGE * v_p + slot % PAGE * v_s, place, columns, room)
    score = tl.sum(query * new_key, 0) * scale
    score = tl.where(length > 0, score, float("-inf"))
    higher = tl.maximum(top, score)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(top - safe)
    p = tl.exp2(score - safe)
    total = total * shrink + p
    out = (out * shrink + p * new_value) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + (batch * shared * group + own) * D + columns, narrowed(out, out_ptr.dtype.element_ty, UPCAST), mask=columns < D)


def _short(heads: int, reach: int, device: int) -> bool:
    """Whether a program a head of queries is faster; heads: of all sequences."""
    return reach <= SHORT and heads <= 2 * processors(device)


def _launch(qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor, page_table: Tensor,
            lengths: Tensor, tickets: Tensor, scale: float, window: int, key_scale: Optional, value_scale: Optional) -> Tensor:  # fmt: skip
    batch, heads, D = qkv.shape
    pages, page, shared, _ = key_cache.shape
    if qkv.dtype == torch.float64 or D > 256 or D % 2 or not scale > 0:
        return _reference(qkv, cos, sin, slots, key_cache, value_cache, page_table, lengths, tickets, scale, window, key_scale, value_scale)
    qkv, cos, sin, slots, lengths = (x if x.is_contiguous() else x.contiguous() for x in (qkv, cos, sin, slots, lengths))
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    heads -= 2 * shared
    group, padded = heads // shared, max(16, next_power_of_2(D))
    members = next_power_of_2(group)
    capacity = page_table.shape[1] * page
    reach = min(capacity, window) if window else capacity
    operands = (qkv, cos, sin, slots, key_cache, value_cache, key_scale, value_scale, page_table, lengths)
    strides = (qkv.stride(0), *key_cache.stride()[:3], *value_cache.stride()[:3], page_table.stride(0), shared, group)
    out = torch.empty((batch, heads, D), dtype=qkv.dtype, device=qkv.device)
    if _short(batch * heads, reach, qkv.get_device()):
        launch(
            decode_attention_head_kernel, (batch * heads,), *operands, out, *strides, capacity, reach, pages * page,
            scale * 1.4426950408889634, PAGE=page, WINDOWED=window > 0, D=D, BLOCK_D=padded,
            BLOCK_N=16 if INTERPRETED else min(256, TILE_BYTES // (padded * qkv.element_size())), UPCAST=INTERPRETED,
            num_warps=4 if padded <= 64 else 8, num_stages=1, **promptness(are_still()),
        )  # fmt: skip
        return out
    found, splits = configured(qkv, page, group, batch * shared, reach, key_scale is not None)
    few = batch * shared < processors(qkv.get_device())
    if few and found["block_n"] == 64:  # latency is the time: fewer shares of larger tiles
        found, splits = {**found, "block_n": 128, "warps": 8}, max(1, min(splits, reach // 256))
    part = lse = out
    if splits > 1:
        part = torch.empty((batch * shared, splits, group, D), dtype=torch.float32, device=qkv.device)
        lse = torch.empty((batch * shared, splits, group), dtype=torch.float32, device=qkv.device)
    launch(
        decode_attention_kernel, (batch * shared * splits,), *operands, tickets, part, lse, out, *strides, splits, capacity, reach,
        pages * page, scale * 1.4426950408889634,
        PAGE=page, WINDOWED=window > 0, D=D, BLOCK_D=padded, BLOCK_G=max(16, members), BLOCK_N=found["block_n"], MEMBERS=members,
        STEP=max(1, min(16, 4096 // (members * padded))), PEEL=few, UPCAST=INTERPRETED,
        num_warps=found["warps"], num_stages=found["stages"],
        **promptness(are_still()),
    )  # fmt: skip
    return out


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 and float16 scale of the last dimension."""
    wide = x.float()
    scale = (wide.abs().amax(-1) / 127).half()
    return (wide / scale.float().clamp_min(SMALLEST_SCALE)[..., None]).round().clamp(-127, 127).to(torch.int8), scale


def _reference(qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor, page_table: Tensor,
               lengths: Tensor, tickets: Tensor, scale: float, window: int, key_scale: Optional,
               value_scale: Optional) -> Tensor:  # fmt: skip
    """The steps one by one."""
    shared = key_cache.shape[2]
    query, key, value = qkv.split((qkv.shape[1] - 2 * shared, shared, shared), 1)
    wide = torch.promote_types(qkv.dtype, torch.float32)
    cos, sin = cos.to(wide)[:, None], sin.to(wide)[:, None]

    def turn(x: Tensor) -> Tensor:
        first, second = x.to(wide).chunk(2, -1)
        return (x.to(wide) * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)

    key = turn(key)
    seen_key_scale = seen_value_scale = None
    if key_scale is not None and value_scale is not None:
        (key, key_scales), (value, value_scales) = _quantised(key), _quantised(value)
        paged_write_reference(key_scales, value_scales, key_scale, value_scale, slots)
        seen_key_scale, seen_value_scale = (_held(*x, page_table, lengths) for x in ((key_scale, key_scales), (value_scale, value_scales)))
    paged_write_reference(key, value, key_cache, value_cache, slots)
    keys, values = _held(key_cache, key, page_table, lengths), _held(value_cache, value, page_table, lengths)
    own = torch.arange(page_table.numel(), device=page_table.device).view(page_table.shape)
    return paged_attention_reference(turn(query), keys, values, own, lengths, scale, window, seen_key_scale, seen_value_scale)


def _held(cache: Tensor, new: Tensor, page_table: Tensor, lengths: Tensor) -> Tensor:
    """Pages of each sequence's own, [B · max_pages, page_size, ..]: what it holds, and its new token last, which may have no slot."""
    held = cache[page_table.long().clamp(0, max(0, cache.shape[0] - 1))]
    batch, pages, page = held.shape[:3]
    last = lengths.long().clamp(max=pages * page) - 1
    rows = torch.arange(batch, device=cache.device)[last >= 0]
    held[rows, last[rows] // page, last[rows] % page] = new[rows]
    return held.flatten(0, 1)


def _fake(qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, key_cache: Tensor, *rest: Any) -> Tensor:
    return qkv.new_empty((qkv.shape[0], qkv.shape[1] - 2 * key_cache.shape[2], qkv.shape[2]))


decode_attention_op = operator(
    "decode_attention(Tensor qkv, Tensor cos, Tensor sin, Tensor slots, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor page_table, "
    "Tensor lengths, Tensor(c!) tickets, float scale, int window, Tensor(d!)? key_scale, Tensor(e!)? value_scale) -> Tensor",
    launch=_launch, reference=_reference, fake=_fake,
)  # fmt: skip


def decode_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor, page_table: Tensor, lengths: Tensor,
    tickets: Tensor, scale: float | None = None, window: int | None = None, key_scale: Optional = None, value_scale: Optional = None,
) -> Tensor:  # fmt: skip
    """[B, H, D] of one token a sequence; its key, turned, and value are in the caches afterwards. Scales: the caches are int8.

    lengths count the token itself. tickets: int32 zeros, B · Hkv at least; they are zeros again afterwards.
    """
    batch, heads, width = qkv.shape
    page, shared, wide = key_cache.shape[1:]
    fits = cos.shape == sin.shape == (batch, width) and slots.shape == lengths.shape == page_table.shape[:1] == (batch,)
    if (
        not fits
        or shared == 0
        or heads <= 2 * shared
        or heads % shared
        or key_cache.shape != value_cache.shape
        or wide != width
        or width % 2
    ):
        given = ", ".join(str(tuple(x.shape)) for x in (qkv, cos, slots, key_cache, page_table, lengths))
        what = f"qkv, cos, slots, cache, page_table, lengths of {given}"
        raise OptionError(what, why="shapes do not fit",
                          do="give [B, H + 2 Hkv, D], [B, D], [B], [pages, page_size, Hkv, D], [B, max_pages], [B]")  # fmt: skip
    scales = [x for x in (key_scale, value_scale) if x is not None]
    stored = qkv.dtype if not scales else torch.int8
    fits = all(x.shape == key_cache.shape[:3] and x.is_contiguous() and x.dtype == torch.float16 for x in scales)
    fits = (
        fits and len(scales) != 1 and key_cache.dtype == value_cache.dtype == stored and key_cache.stride(3) == value_cache.stride(3) == 1
    )
    if not fits or page < 16 or page & (page - 1):
        what = f"{qkv.dtype} into caches {tuple(key_cache.shape)} of {key_cache.dtype} with {len(scales)} scales"
        raise OptionError(what, why="they do not fit", do="caches have qkv's dtype, or are int8 with float16 [pages, page_size, Hkv]; "
                          "pages hold 16, 32, 64, … tokens")  # fmt: skip
    if tickets.dtype != torch.int32 or tickets.numel() < batch * shared or not tickets.is_contiguous():
        raise OptionError(
            f"tickets {tuple(tickets.shape)} {tickets.dtype}", why="one a sequence and key head", do="give int32 zeros [B · Hkv]"
        )
    if window is not None and window < 1:
        raise OptionError(f"window = {window}", why="a token sees itself at least", do="give 1 or more, or None for no window")
    used = width**-0.5 if scale is None else scale
    out: Tensor = decode_attention_op(qkv, cos, sin, slots, key_cache, value_cache, page_table, lengths, tickets, used, window or 0,
                                      key_scale, value_scale)  # fmt: skip
    return out
