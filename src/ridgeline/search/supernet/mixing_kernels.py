"""Kernels of mixing.py; sums in float32.

    sums        program = (channel of a branch, share of the images): Σ y and Σ y²; with a gradient: Σ g and Σ g·x̂
    mix         program = (channel of a target, block of images, block of places): Σ over its branches of (y - mean) · gain / deviation
    grad_input  program = (channel of a branch, …)

Who needs a channel's mean and deviation adds up the shares' sums: a few numbers, no kernel of their own. `shares` is a float so that its
value does not make another kernel. MASKED: a branch whose flag is 0 counts as zeros and is not read.
"""

from __future__ import annotations

from ...kernel.jit import jit, tl


@jit
def _statistics(sums_ptr, channel, channels, shares, count, eps, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """(mean, 1 / deviation) of a channel from [shares, 2, channels]."""
    share = tl.arange(0, WIDTH)
    at = sums_ptr + share * 2 * channels + channel
    mean = tl.sum(tl.load(at, mask=share < shares, other=0.0)) / count
    square = tl.sum(tl.load(at + channels, mask=share < shares, other=0.0)) / count
    return mean, 1.0 / tl.sqrt(tl.maximum(square - mean * mean, 0.0) + eps)


@jit
def sums(y_ptr, out_ptr, g_ptr, y_sums_ptr, target_ptr, on_ptr, batch, images, y_stride, g_stride, shares, count, eps,  # type: ignore[no-untyped-def]
         C: tl.constexpr, P: tl.constexpr, BACKWARD: tl.constexpr, MAPPED: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr,
         ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    channel = tl.program_id(0)
    channels = tl.num_programs(0)
    share = tl.program_id(1)
    out = out_ptr + share * 2 * channels + channel
    off = False
    if MASKED:
        off = tl.load(on_ptr + channel // C) == 0.0
    if off:
        tl.store(out, 0.0)
        tl.store(out + channels, 0.0)
        return
    first = share * images
    last = tl.minimum(first + images, batch)
    t0 = tl.zeros((ROWS, COLS), tl.float32)
    t1 = tl.zeros((ROWS, COLS), tl.float32)
    g_channel = channel
    if BACKWARD:
        mean, scale = _statistics(y_sums_ptr, channel, channels, shares, count, eps, WIDTH)
        if MAPPED:
            g_channel = tl.load(target_ptr + channel // C) * C + channel % C
    for start in range(0, images, ROWS):
        image = first + start + tl.arange(0, ROWS)
        for at in range(0, P, COLS):
            place = at + tl.arange(0, COLS)
            here = (image < last)[:, None] & (place < P)[None, :]
            y = tl.load(y_ptr + image.to(tl.int64)[:, None] * y_stride + channel * P + place[None, :], mask=here, other=0.0).to(tl.float32)
            if BACKWARD:
                g = tl.load(g_ptr + image.to(tl.int64)[:, None] * g_stride + g_channel * P + place[None, :], mask=here, other=0.0)
                g = g.to(tl.float32)
                t0 += g
                t1 += g * ((y - mean) * scale)
            else:
                t0 += y
                t1 += y * y
    tl.store(out, tl.sum(t0))
    tl.store(out + channels, tl.sum(t1))


@jit
def mix(y_ptr, out_ptr, sums_ptr, gain_ptr, order_ptr, starts_ptr, on_ptr, batch, channels, y_stride, out_stride, shares, count, eps,  # type: ignore[no-untyped-def]
        C: tl.constexpr, P: tl.constexpr, GAIN: tl.constexpr, MAPPED: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr,
        ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    target = tl.program_id(0) // C
    within = tl.program_id(0) % C
    image = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    place = tl.program_id(2) * COLS + tl.arange(0, COLS)
    here = (image < batch)[:, None] & (place < P)[None, :]
    total = tl.zeros((ROWS, COLS), tl.float32)
    first = target
    last = target + 1
    if MAPPED:
        first = tl.load(starts_ptr + target)
        last = tl.load(starts_ptr + target + 1)
    for at in range(first, last):
        branch = at
        if MAPPED:
            branch = tl.load(order_ptr + at)
        channel = branch * C + within
        on = True
        if MASKED:
            on = tl.load(on_ptr + branch) != 0.0
        if on:
            mean, scale = _statistics(sums_ptr, channel, channels, shares, count, eps, WIDTH)
            if GAIN:
                scale = scale * tl.load(gain_ptr + branch).to(tl.float32)
            y = tl.load(y_ptr + image.to(tl.int64)[:, None] * y_stride + channel * P + place[None, :], mask=here, other=0.0)
            total += (y.to(tl.float32) - mean) * scale
    out = out_ptr + image.to(tl.int64)[:, None] * out_stride + tl.program_id(0) * P + place[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=here)


@jit
def grad_input(y_ptr, g_ptr, out_ptr, sums_ptr, g_sums_ptr, gain_ptr, target_ptr, on_ptr, batch, y_stride, g_stride, shares, count, eps,  # type: ignore[no-untyped-def]
               C: tl.constexpr, P: tl.constexpr, GAIN: tl.constexpr, MAPPED: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr,
               ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    channel = tl.program_id(0)
    channels = tl.num_programs(0)
    branch = channel // C
    image = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    place = tl.program_id(2) * COLS + tl.arange(0, COLS)
    here = (image < batch)[:, None] & (place < P)[None, :]
    y_at = image.to(tl.int64)[:, None] * y_stride + channel * P + place[None, :]
    off = False
    if MASKED:
        off = tl.load(on_ptr + branch) == 0.0
    if off:
        tl.store(out_ptr + y_at, tl.zeros((ROWS, COLS), out_ptr.dtype.element_ty), mask=here)
        return
    mean, scale = _statistics(sums_ptr, channel, channels, shares, count, eps, WIDTH)
    share = tl.arange(0, WIDTH)
    at = g_sums_ptr + share * 2 * channels + channel
    g_mean = tl.sum(tl.load(at, mask=share < shares, other=0.0)) / count
    g_along = tl.sum(tl.load(at + channels, mask=share < shares, other=0.0)) / count
    g_channel = channel
    if MAPPED:
        g_channel = tl.load(target_ptr + branch) * C + channel % C
    y = tl.load(y_ptr + y_at, mask=here, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + image.to(tl.int64)[:, None] * g_stride + g_channel * P + place[None, :], mask=here, other=0.0).to(tl.float32)
    out = (g - g_mean - (y - mean) * scale * g_along) * scale
    if GAIN:
        out = out * tl.load(gain_ptr + branch).to(tl.float32)
    tl.store(out_ptr + y_at, out.to(out_ptr.dtype.element_ty), mask=here)
