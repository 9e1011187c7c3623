"""Rotary positions of query and key, and the key and value into their pages, in one launch: what a decode step does before attention.

    query [T, H, D], key, value [T, Hkv, D], cos, sin [T, D], slots [T] ──a program a token and head──> query turned [T, H, D]
      and, in place, caches [pages, page_size, Hkv, D] at slot = page · page_size + offset; a slot outside them is skipped
      int8 caches: largest |x| of a token and head / 127 is its scale, float16 [pages, page_size, Hkv]; x ≈ scale · q

Half-split rotation (rope.py), in float32, rounded once to the dtype of the query; int8 is made of what was rounded, so that a key is the
same whether it came this way or through rope and a write of its own. Inputs may be parts of a wider tensor (D innermost). No gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.errors import OptionError
from .attention_kernels import narrowed
from .jit import INTERPRETED, jit, launch, next_power_of_2, tl
from .library import operator
from .overlap import begin, early, wait
from .paged_attention import paged_write_reference

Optional = Tensor | None
SMALLEST_SCALE = 2.0**-24
"""Of float16: smaller keys become 0."""


@jit
def _turned(x_ptr, cos_ptr, sin_ptr, d, HALF: tl.constexpr, DTYPE: tl.constexpr, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both halves of one head, turned and rounded."""
    kept = d < HALF
    x1 = tl.load(x_ptr + d, mask=kept, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + HALF + d, mask=kept, other=0.0).to(tl.float32)
    c1 = tl.load(cos_ptr + d, mask=kept, other=0.0).to(tl.float32)
    c2 = tl.load(cos_ptr + HALF + d, mask=kept, other=0.0).to(tl.float32)
    s1 = tl.load(sin_ptr + d, mask=kept, other=0.0).to(tl.float32)
    s2 = tl.load(sin_ptr + HALF + d, mask=kept, other=0.0).to(tl.float32)
    return narrowed(x1 * c1 - x2 * s1, DTYPE, UPCAST), narrowed(x2 * c2 + x1 * s2, DTYPE, UPCAST)


@jit
def _whole(x, step):  # type: ignore[no-untyped-def]
    """x / step to the nearest integer of -127..127; adding 1.5 · 2^23 rounds half to even."""
    return tl.minimum(tl.maximum((x.to(tl.float32) / step + 12582912.0) - 12582912.0, -127.0), 127.0).to(tl.int8)


@jit
def _put(cache_ptr, scale_ptr, at, place, y1, y2, d, room, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both halves of a head to the cache, as they are or in int8 with a scale; room is 0 where the slot is outside."""
    if scale_ptr is not None:
        most = tl.max(tl.maximum(tl.abs(y1.to(tl.float32)), tl.abs(y2.to(tl.float32))), 0)
        scale = (most / 127.0).to(tl.float16)
        step = tl.maximum(scale.to(tl.float32), 5.9604644775390625e-08)
        y1 = _whole(y1, step)
        y2 = _whole(y2, step)
        tl.store(scale_ptr + place, scale, mask=room > 0)
    tl.store(cache_ptr + at + d, y1, mask=d < room)
    tl.store(cache_ptr + at + HALF + d, y2, mask=d < room)


@jit
def rope_write_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, slots_ptr, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, out_ptr,
    q_t, q_h, k_t, k_h, v_t, v_h, keys_p, keys_s, keys_h, values_p, values_s, values_h, heads, shared, slots,
    PAGE: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head of one token: of the query, or of key and value."""
    begin(EARLY)
    wait(EARLY)
    token = (tl.program_id(0) // (heads + shared)).to(tl.int64)
    head = tl.program_id(0) % (heads + shared)
    d = tl.arange(0, BLOCK_D)
    cos_ptr += token * (2 * HALF)
    sin_ptr += token * (2 * HALF)
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    if head < heads:
        y1, y2 = _turned(q_ptr + token * q_t + head * q_h, cos_ptr, sin_ptr, d, HALF, DTYPE, UPCAST)
        out_ptr += (token * heads + head) * (2 * HALF)
        tl.store(out_ptr + d, y1, mask=d < HALF)
        tl.store(out_ptr + HALF + d, y2, mask=d < HALF)
    else:
        head = head - heads
        slot = tl.load(slots_ptr + token).to(tl.int64)
        room = tl.where((slot >= 0) & (slot < slots), HALF, 0)
        page = slot // PAGE
        offset = slot % PAGE
        place = slot * shared + head
        v_ptr += token * v_t + head * v_h
        v1 = tl.load(v_ptr + d, mask=d < HALF, other=0.0)
        v2 = tl.load(v_ptr + HALF + d, mask=d < HALF, other=0.0)
        y1, y2 = _turned(k_ptr + token * k_t + head * k_h, cos_ptr, sin_ptr, d, HALF, DTYPE, UPCAST)
        _put(keys_ptr, key_scale_ptr, page * keys_p + offset * keys_s + head * keys_h, place, y1, y2, d, room, HALF)
        _put(values_ptr, value_scale_ptr, page * values_p + offset * values_s + head * values_h, place, v1, v2, d, room, HALF)


def _launch(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor,
            key_scale: Optional, value_scale: Optional) -> Tensor:  # fmt: skip
    if query.dtype == torch.float64:
        return _reference(query, key, value, cos, sin, slots, key_cache, value_cache, key_scale, value_scale)
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    tokens, heads, width = query.shape
    pages, page, shared, _ = key_cache.shape
    out = torch.empty((tokens, heads, width), dtype=query.dtype, device=query.device)
    launch(
        rope_write_kernel, (tokens * (heads + shared),), query, key, value, cos.contiguous(), sin.contiguous(), slots.contiguous(),
        key_cache, value_cache, key_scale, value_scale, out, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        *key_cache.stride()[:3], *value_cache.stride()[:3], heads, shared, pages * page, PAGE=page, HALF=width // 2,
        BLOCK_D=next_power_of_2(width // 2), UPCAST=INTERPRETED, num_warps=1, **early(query.get_device()),
    )  # fmt: skip
    return out


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 and float16 scale of the last dimension."""
    wide = x.float()
    scale = (wide.abs().amax(-1) / 127).half()
    return (wide / scale.float().clamp_min(SMALLEST_SCALE)[..., None]).round().clamp(-127, 127).to(torch.int8), scale


def _reference(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor,
               key_scale: Optional, value_scale: Optional) -> Tensor:  # fmt: skip
    wide = torch.promote_types(query.dtype, torch.float32)
    cos, sin = cos.to(wide)[:, None], sin.to(wide)[:, None]

    def turn(x: Tensor) -> Tensor:
        first, second = x.to(wide).chunk(2, -1)
        return (x.to(wide) * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)

    key = turn(key)
    if key_scale is not None and value_scale is not None:
        (key, key_scales), (value, value_scales) = _quantised(key), _quantised(value)
        paged_write_reference(key_scales, value_scales, key_scale, value_scale, slots)
    paged_write_reference(key, value, key_cache, value_cache, slots)
    return turn(query).contiguous()


_rope_write = operator(
    "rope_write(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor slots, Tensor(a!) key_cache, "
    "Tensor(b!) value_cache, Tensor(c!)? key_scale, Tensor(d!)? value_scale) -> Tensor",
    launch=_launch, reference=_reference, fake=lambda query, *rest: query.new_empty(query.shape),
)  # fmt: skip


def rope_write(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor,
    key_scale: Optional = None, value_scale: Optional = None,
) -> Tensor:  # fmt: skip
    """The query turned; the key turned and the value written to the caches, in place. Scales: the caches are int8."""
    tokens, _, width = query.shape
    shared = key_cache.shape[2]
    shapes = key.shape == value.shape == (tokens, shared, width) and cos.shape == sin.shape == (tokens, width) and slots.shape == (tokens,)
    if not shapes or width % 2 or key_cache.shape != value_cache.shape or key_cache.shape[3] != width:
        given = ", ".join(str(tuple(x.shape)) for x in (query, key, value, cos, slots, key_cache))
        what = f"query, key, value, cos, slots, cache of {given}"
        raise OptionError(what, why="shapes do not fit", do="give [T, H, D], [T, Hkv, D] twice, [T, D], [T], [pages, page_size, Hkv, D]")
    stored = query.dtype if key_scale is None else torch.int8
    scales = [x for x in (key_scale, value_scale) if x is not None]
    fitting = all(x.shape == key_cache.shape[:3] and x.is_contiguous() and x.dtype == torch.float16 for x in scales)
    if (
        not key_cache.dtype == value_cache.dtype == stored
        or len(scales) == 1
        or not fitting
        or (key_cache.stride(3), value_cache.stride(3)) != (1, 1)
    ):
        what = f"{query.dtype} into caches of {key_cache.dtype} with {len(scales)} scales"
        raise OptionError(
            what, why="dtypes do not fit", do="caches have the query's dtype, or are int8 with float16 [pages, page_size, Hkv]"
        )
    out: Tensor = _rope_write(query, key, value, cos, sin, slots, key_cache, value_cache, key_scale, value_scale)
    return out
