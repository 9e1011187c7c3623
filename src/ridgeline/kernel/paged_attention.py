"""Attention of one new token a sequence over keys and values kept in pages.

    paged_write     key, value [T, Hkv, D], slots [T] ──> caches [pages, page_size, Hkv, D]      slot = page · page_size + offset
    paged_attention query [B, H, D], caches, page_table [B, max_pages], lengths [B]
      ──split: a program a (sequence, key head, share of the sequence)──> partial out and lse, float32 ──combine──> out [B, H, D]

The query heads of a group go through a tile of keys together, padded to 16 for tensor cores: keys and values are read once. The
number of shares comes from shapes alone (enough programs to fill the GPU); each program reads its sequence's length on the device and
takes its share of that, so short sequences in a long table spread as well and nothing waits for the host (Dao 2023, flash-decoding).
window: only the last `window` tokens of a sequence are read. int8 caches come with a scale a token and head [pages, page_size, Hkv]:
the scale of a key multiplies its score and that of a value its weight, so tensor cores see small integers, which halves hold exactly.
Least bytes: lengths · Hkv · D · 2, once: 0.54 GB for B 32, 4096 tokens, Hkv 8, D 128 in bfloat16, 0.124 ms at 4.34 TB/s.
Limits: page_size a power of two >= 16, D up to 256, no gradient. float64 and scale <= 0 take the plain formula. Length 0 gives zeros.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from ..core.errors import OptionError
from .attention_kernels import narrowed
from .case import Case, Inputs, benchmark
from .jit import INTERPRETED, cdiv, jit, launch, next_power_of_2, tl
from .library import operator
from .overlap import promptly
from .tuning import Config, config, space

Tensor = torch.Tensor


@jit
def paged_split(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lengths_ptr, out_ptr, lse_ptr, q_b, q_h, k_p, k_s, k_h, v_p, v_s, v_h,
    table_b, shared, group, splits, capacity, window, scale,
    PAGE: tl.constexpr, WINDOWED: tl.constexpr, DIRECT: tl.constexpr, UPCAST: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, PROMPT: tl.constexpr = False,
):  # fmt: skip
    """One share of one sequence for one key head; DIRECT: the only share, so the result itself. `scale` includes log2(e)."""
    promptly(PROMPT)
    head = tl.program_id(0) % shared  # fastest: the heads of a token are neighbours in memory
    split = tl.program_id(0) // shared % splits
    batch = (tl.program_id(0) // shared // splits).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + batch).to(tl.int32), capacity)
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0)
    base = first // BLOCK_N * BLOCK_N  # tiles begin where pages do
    share = tl.cdiv(tl.cdiv(length - base, splits), BLOCK_N) * BLOCK_N
    start = base + split * share
    stop = tl.minimum(start + share, length)
    members = tl.arange(0, BLOCK_G)
    columns = tl.arange(0, BLOCK_D)
    kept = (members[:, None] < group) & (columns[None, :] < D)
    k_ptr += head.to(tl.int64) * k_h
    v_ptr += head.to(tl.int64) * v_h
    table_ptr += batch * table_b
    q = tl.load(q_ptr + batch * q_b + (head * group + members)[:, None] * q_h + columns[None, :], mask=kept, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    out = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    for at in range(start, stop, BLOCK_N):
        tokens = at + tl.arange(0, BLOCK_N)
        valid = tokens < stop
        if WINDOWED:
            valid = valid & (tokens >= first)
        pages = tl.load(table_ptr + tokens // PAGE, mask=valid, other=0).to(tl.int64)
        loaded = valid[:, None] & (columns[None, :] < D)
        k = tl.load(k_ptr + (pages * k_p + tokens % PAGE * k_s)[:, None] + columns[None, :], mask=loaded, other=0.0)
        v = tl.load(v_ptr + (pages * v_p + tokens % PAGE * v_s)[:, None] + columns[None, :], mask=loaded, other=0.0)
        if k_scale_ptr is not None:
            places = (pages * PAGE + tokens % PAGE) * shared + head
            k_scale = tl.load(k_scale_ptr + places, mask=valid, other=0.0).to(tl.float32)
            v_scale = tl.load(v_scale_ptr + places, mask=valid, other=0.0).to(tl.float32)
            k = k.to(q.dtype)
            v = v.to(q.dtype)
        if UPCAST:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [BLOCK_G, BLOCK_N]
        if k_scale_ptr is not None:
            scores *= k_scale[None, :]
        scores = tl.where(valid[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        if k_scale_ptr is not None:
            p *= v_scale[None, :]
        p = narrowed(p, v.dtype, UPCAST)
        if UPCAST:
            p = p.to(tl.float32)
            v = v.to(tl.float32)
        out = tl.dot(p, v, out * shrink[:, None], input_precision="ieee")
        top = higher
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    rows = (batch * shared + head) * group + members  # of [B, H]
    if DIRECT:
        tl.store(out_ptr + rows[:, None] * D + columns[None, :], narrowed(out, out_ptr.dtype.element_ty, UPCAST), mask=kept)
    else:
        parts = rows * splits + split
        tl.store(lse_ptr + parts, top + tl.log2(total), mask=members < group)
        tl.store(out_ptr + parts[:, None] * D + columns[None, :], out, mask=kept & (members[:, None] < tl.where(start < stop, group, 0)))


@jit
def paged_combine(  # type: ignore[no-untyped-def]
    part_ptr, lse_ptr, out_ptr, splits, BLOCK_S: tl.constexpr, UPCAST: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PROMPT: tl.constexpr = False,
):  # fmt: skip
    """Shares of one head weighted by their part of the softmax's sum; an empty share has lse -inf and nothing written."""
    promptly(PROMPT)
    row = tl.program_id(0).to(tl.int64)
    shares = tl.arange(0, BLOCK_S)
    columns = tl.arange(0, BLOCK_D)
    all_lse = tl.load(lse_ptr + row * splits + shares, mask=shares < splits, other=float("-inf"))
    top = tl.max(all_lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(all_lse - top), 0)
    out = tl.zeros([BLOCK_D], tl.float32)
    for at in range(0, splits, 16):
        some = at + tl.arange(0, 16)
        lse = tl.load(lse_ptr + row * splits + some, mask=some < splits, other=float("-inf"))
        written = (lse > float("-inf"))[:, None] & (columns[None, :] < D)
        part = tl.load(part_ptr + (row * splits + some)[:, None] * D + columns[None, :], mask=written, other=0.0)
        out += tl.sum(part * tl.exp2(lse - top)[:, None], 0)
    out = out / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * D + columns, narrowed(out, out_ptr.dtype.element_ty, UPCAST), mask=columns < D)


@jit
def paged_scatter(  # type: ignore[no-untyped-def]
    key_ptr, value_ptr, k_ptr, v_ptr, slots_ptr, key_t, key_h, value_t, value_h, k_p, k_s, k_h, v_p, v_s, v_h, shared, slots,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """All heads of one token into its slot; a slot outside the cache is skipped."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    written = tl.where((slot >= 0) & (slot < slots), shared, 0)
    page = slot // PAGE
    offset = slot % PAGE
    columns = tl.arange(0, BLOCK_D)
    for first in range(0, shared, BLOCK_H):
        heads = first + tl.arange(0, BLOCK_H)
        kept = (heads[:, None] < written) & (columns[None, :] < D)
        key = tl.load(key_ptr + token * key_t + heads[:, None] * key_h + columns[None, :], mask=kept)
        value = tl.load(value_ptr + token * value_t + heads[:, None] * value_h + columns[None, :], mask=kept)
        tl.store(k_ptr + page * k_p + offset * k_s + heads[:, None] * k_h + columns[None, :], key, mask=kept)
        tl.store(v_ptr + page * v_p + offset * v_s + heads[:, None] * v_h + columns[None, :], value, mask=kept)


def _configuration(block_n: int, warps: int, stages: int, waves: int) -> dict[str, int]:
    return {"block_n": block_n, "warps": warps, "stages": stages, "waves": waves}


_TRIED = ((64, 4, 3, 4), (64, 4, 3, 5), (64, 4, 4, 2), (64, 4, 4, 8), (32, 4, 4, 8), (32, 2, 5, 8), (128, 4, 4, 2), (128, 8, 4, 2))
space("paged_attention", __file__, [_configuration(*tried) for tried in _TRIED])
_TRIED_INT8 = ((64, 8, 3, 2), (64, 8, 4, 2), (64, 8, 3, 1), (32, 4, 4, 3), (32, 4, 3, 4), (128, 8, 3, 1))
space("paged_attention_int8", __file__, [_configuration(*tried) for tried in _TRIED_INT8])


@lru_cache(maxsize=16)
def _processors(device: int) -> int:
    return 1 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def _shares(pairs: int, capacity: int, block_n: int, waves: int, processors: int) -> int:
    """Programs a sequence and key head: up to `waves` a processor, so that all run at once; two tiles of a full sequence at least."""
    return max(1, min(waves * processors // max(1, pairs), capacity // (2 * block_n), 1024))


def configured(query: Tensor, page: int, group: int, pairs: int, reach: int, scaled: bool) -> tuple[Config, int]:
    """(configuration, shares) of attention over pages; pairs: sequences times key heads, reach: most tokens one may have."""
    padded = max(16, next_power_of_2(query.shape[2]))
    single = query.dtype == torch.float32
    block_n = 16 if INTERPRETED else (32 if single or padded > 128 else 64)
    op, usual = ("paged_attention_int8", (block_n, 8, 3, 2)) if scaled else ("paged_attention", (block_n, 4, 3, 4))
    found = config(op, (padded, single, min(page, 128), group > 16), _configuration(*usual))
    return found, _shares(pairs, reach, found["block_n"], found["waves"], _processors(query.get_device()))


def launch_paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, page_table: Tensor, lengths: Tensor, scale: float, window: int = 0,
    key_scale: Tensor | None = None, value_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """split, and combine where there is more than one share; window 0: all tokens."""
    batch, heads, D = query.shape
    _, page, shared, _ = key_cache.shape
    if query.dtype == torch.float64 or D > 256 or not scale > 0:
        return paged_attention_reference(query, key_cache, value_cache, page_table, lengths, scale, window, key_scale, value_scale)
    query = query if query.stride(2) == 1 else query.contiguous()
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    lengths = lengths if lengths.is_contiguous() else lengths.contiguous()
    padded = max(16, next_power_of_2(D))
    group = heads // max(1, shared)
    capacity = page_table.shape[1] * page
    reach = min(capacity, window) if window else capacity
    found, splits = configured(query, page, group, batch * shared, reach, key_scale is not None)
    out = torch.empty((batch, heads, D), dtype=query.dtype, device=query.device)
    part = lse = out
    if splits > 1:
        part = torch.empty((batch, heads, splits, D), dtype=torch.float32, device=query.device)
        lse = torch.empty((batch, heads, splits), dtype=torch.float32, device=query.device)
    launch(
        paged_split, (batch * shared * splits,),
        query, key_cache, value_cache, key_scale, value_scale, page_table, lengths, part, lse, *query.stride()[:2],
        *key_cache.stride()[:3], *value_cache.stride()[:3], page_table.stride(0), shared, group, splits, capacity, reach,
        scale * 1.4426950408889634,
        PAGE=page, WINDOWED=window > 0, DIRECT=splits == 1, UPCAST=INTERPRETED, D=D, BLOCK_D=padded,
        BLOCK_G=max(16, next_power_of_2(group)), BLOCK_N=found["block_n"], num_warps=found["warps"], num_stages=found["stages"],
    )  # fmt: skip
    if splits > 1:
        launch(paged_combine, (batch * heads,), part, lse, out, splits,
               BLOCK_S=next_power_of_2(splits), UPCAST=INTERPRETED, D=D, BLOCK_D=padded, num_warps=4)  # fmt: skip
    return out


def launch_paged_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """scatter: a program a token."""
    key = key if key.stride(2) == 1 else key.contiguous()
    value = value if value.stride(2) == 1 else value.contiguous()
    slots = slots if slots.is_contiguous() else slots.contiguous()
    tokens, shared, D = key.shape
    pages, page = key_cache.shape[:2]
    padded = next_power_of_2(D)
    launch(
        paged_scatter, (tokens,),
        key, value, key_cache, value_cache, slots, *key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3],
        *value_cache.stride()[:3], shared, pages * page,
        PAGE=page, D=D, BLOCK_D=padded, BLOCK_H=max(1, min(next_power_of_2(shared), 4096 // padded)), num_warps=4,
    )  # fmt: skip


def _gathered(cache: Tensor, page_table: Tensor) -> Tensor:
    """[B, Hkv, max_pages · page_size, D], copied out of the pages."""
    return cache[page_table.long().clamp(0, max(0, cache.shape[0] - 1))].flatten(1, 2).transpose(1, 2)


def _seen(cache: Tensor, page_table: Tensor, lengths: Tensor, window: int = 0) -> Tensor:
    capacity = page_table.shape[1] * cache.shape[1]
    tokens, lengths = torch.arange(capacity, device=cache.device), lengths[:, None].clamp_max(capacity)
    return (tokens < lengths) & (tokens >= lengths - window) if window else tokens < lengths


def paged_attention_reference(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, page_table: Tensor, lengths: Tensor, scale: float, window: int = 0,
    key_scale: Tensor | None = None, value_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gather, then torch's attention with a mask."""
    seen = _seen(key_cache, page_table, lengths, window)
    # What lies beyond a length may be anything, infinities too, which a masked weight of zero would turn into nan.
    keys, values = (
        _widened(cache, scales, query.dtype, page_table).masked_fill(~seen[:, None, :, None], 0)
        for cache, scales in ((key_cache, key_scale), (value_cache, value_scale))
    )
    out = F.scaled_dot_product_attention(query[:, :, None], keys, values, attn_mask=seen[:, None, None], scale=scale, enable_gqa=True)
    return out[:, :, 0].masked_fill((lengths <= 0)[:, None, None], 0).contiguous()


def _widened(cache: Tensor, scales: Tensor | None, dtype: torch.dtype, page_table: Tensor) -> Tensor:
    """Gathered keys or values; those of an int8 cache times their scales, rounded once."""
    found = _gathered(cache, page_table)
    if scales is None:
        return found
    wide = torch.promote_types(dtype, torch.float32)
    return (found.to(wide) * _gathered(scales[..., None], page_table).to(wide)).to(dtype)


def paged_write_reference(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Indexed assignment of the tokens whose slot is inside the cache."""
    page = key_cache.shape[1]
    inside = (slots >= 0) & (slots < key_cache.shape[0] * page)
    places = slots[inside].long()
    key_cache[places // page, places % page] = key[inside]
    value_cache[places // page, places % page] = value[inside]


def _fake(query: Tensor, *rest: Any) -> Tensor:
    return query.new_empty(query.shape)


def _fake_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    return None


paged_attention_op = operator(
    "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor page_table, Tensor lengths, float scale, int window=0, "
    "Tensor? key_scale=None, Tensor? value_scale=None) -> Tensor",
    launch=launch_paged_attention,
    reference=paged_attention_reference,
    fake=_fake,
)
paged_write_op = operator(
    "paged_write(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots) -> ()",
    launch=launch_paged_write,
    reference=paged_write_reference,
    fake=_fake_write,
)


def _checked(key_cache: Tensor, value_cache: Tensor, new: Tensor, scaled: bool = False) -> None:
    """Caches that fit each other and what is asked of or written to them, [.., heads, D]."""
    if key_cache.dim() != 4 or key_cache.shape != value_cache.shape or new.dim() != 3 or new.shape[2] != key_cache.shape[3]:
        what = f"caches {tuple(key_cache.shape)} and {tuple(value_cache.shape)} with {tuple(new.shape)}"
        raise OptionError(what, why="shapes do not fit", do="give caches [pages, page_size, Hkv, D] and query or key [.., heads, D]")
    page = key_cache.shape[1]
    if page < 16 or page & (page - 1):
        raise OptionError(f"page_size = {page}", why="pages are read in tiles of a power of two", do="use 16, 32, 64, 128 or 256")
    if key_cache.stride(3) != 1 or value_cache.stride(3) != 1:
        raise OptionError(
            "a cache whose last dimension is strided", why="a copy would cost more than the attention", do="keep D contiguous"
        )
    if not (torch.int8 if scaled else new.dtype) == key_cache.dtype == value_cache.dtype:
        what = f"{new.dtype} with caches of {key_cache.dtype} and {value_cache.dtype}"
        raise OptionError(what, why="all share one dtype, or caches are int8 and have scales", do="cast the query or key")


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, page_table: Tensor, lengths: Tensor, scale: float | None = None,
    window: int | None = None, key_scale: Tensor | None = None, value_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale · query keysᵀ) values over the first `lengths` tokens of each sequence's pages; query [B, H, D].

    window: only the last so many of them. key_scale, value_scale [pages, page_size, Hkv]: caches are int8, each token's times its scale.
    """
    _checked(key_cache, value_cache, query, key_scale is not None)
    if key_cache.shape[2] == 0 or query.shape[1] % key_cache.shape[2] or page_table.shape[0] != query.shape[0] or lengths.dim() != 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key_cache, page_table, lengths))
        what = f"query, cache, page_table, lengths of {shapes}"
        raise OptionError(what, why="shapes do not fit", do="give [B, H, D], [B, max_pages], [B] and H a multiple of Hkv")
    if window is not None and window < 1:
        raise OptionError(f"window = {window}", why="a token sees itself at least", do="give 1 or more, or None for no window")
    for scales in (key_scale, value_scale):
        if (scales is None) != (key_scale is None) or (
            scales is not None and (scales.shape != key_cache.shape[:3] or not scales.is_contiguous())
        ):
            raise OptionError("scales of an int8 cache", why="they do not fit it", do="give both, contiguous [pages, page_size, Hkv]")
    used = query.shape[2] ** -0.5 if scale is None else scale
    out: Tensor = paged_attention_op(query, key_cache, value_cache, page_table, lengths, used, window or 0, key_scale, value_scale)
    return out


def paged_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write tokens [T, Hkv, D] into slots (page · page_size + offset) of the caches, in place; slots outside them are skipped."""
    _checked(key_cache, value_cache, key)
    if key.shape != value.shape or key.shape[1] != key_cache.shape[2] or slots.shape != key.shape[:1]:
        what = f"key {tuple(key.shape)}, value {tuple(value.shape)}, slots {tuple(slots.shape)} into {key_cache.shape[2]} heads"
        raise OptionError(what, why="shapes do not fit", do="give key and value [T, Hkv, D] and slots [T]")
    paged_write_op(key, value, key_cache, value_cache, slots)


def _make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Inputs:
    """shape: (B, tokens, H, Hkv, D); pages of 64 tokens, shuffled."""
    batch, tokens, heads, shared, D = shape
    pages = cdiv(tokens, 64)
    query = torch.randn((batch, heads, D), device=device).to(dtype)
    caches = tuple(torch.randn((batch * pages, 64, shared, D), device=device, dtype=dtype) for _ in range(2))
    table = torch.randperm(batch * pages, device=device).to(torch.int32).view(batch, pages)
    return query, *caches, table, torch.full((batch,), tokens, dtype=torch.int32, device=device)


def _plain(query: Tensor, key_cache: Tensor, value_cache: Tensor, page_table: Tensor, lengths: Tensor) -> Tensor:
    keys, values = _gathered(key_cache, page_table), _gathered(value_cache, page_table)
    seen = _seen(key_cache, page_table, lengths)[:, None, None]
    return F.scaled_dot_product_attention(query[:, :, None], keys, values, attn_mask=seen, enable_gqa=True)[:, :, 0]


def _exact(query: Tensor, key_cache: Tensor, value_cache: Tensor, page_table: Tensor, lengths: Tensor) -> Tensor:
    return paged_attention_reference(
        query.double(), key_cache.double(), value_cache.double(), page_table, lengths, query.shape[2] ** -0.5
    )  # fmt: skip


def _moved(inputs: Inputs, backward: bool) -> int:
    query, key_cache, _, table, _ = inputs
    tokens = table.numel() * key_cache.shape[1]
    return int(2 * query.numel() + 2 * tokens * key_cache[0, 0].numel()) * int(query.element_size()) + int(table.numel()) * 4


def _flops(inputs: Inputs, backward: bool) -> int:
    query, key_cache, _, table, _ = inputs
    return int(4 * query.numel() * table.shape[1] * key_cache.shape[1])


def _place(inputs: Inputs) -> tuple[str, int]:
    key_cache: Any = inputs[1]
    return "", int(key_cache.numel())


BENCH = benchmark(
    Case(
        op="paged_attention",
        ours=paged_attention,
        plain=_plain,
        make=_make,
        moved=_moved,
        flops=_flops,
        dtypes=(torch.bfloat16, torch.float16),
        sizes={
            "small": ((1, 1024, 32, 8, 128), (8, 1024, 32, 8, 128)),
            "medium": ((1, 32768, 32, 8, 128), (32, 1024, 32, 8, 128)),
            "large": ((32, 4096, 32, 8, 128),),
            "xlarge": ((64, 8192, 32, 8, 128),),
        },
        exact=_exact,
        kind=_place,
        in_graph=True,
    )
)
