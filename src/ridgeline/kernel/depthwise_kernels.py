"""Kernels of kernel/depthwise.py, all NCHW, sums in float32.

    forward       program = (output channel, block of images, block of places): ROWS images x COLS places, one tap after the other
    grad input    program = (input channel, …): sums over every branch that reads the channel, and over two kernel sizes at once
    grad weight   program = (output channel, share of the images, row of the kernel): K sums of products at once; shares summed by torch

A tap's weight is one number a program; the K² reads of a place meet in L1. `unaligned` is always 3, and taken off again: were the compiler
to know that places start at multiples of 16 bytes, it would give each thread 8 in a row, and the reads of a warp, most of which are shifted
by a tap and cannot be wide, would touch four lines instead of one.
MASKED: a branch whose flag is 0 is not computed: its results are zeros, what it would send back is not read.
"""

from __future__ import annotations

from .jit import jit, tl


@jit
def bank_forward(x_ptr, w_ptr, source_ptr, on_ptr, out_ptr, batch, x_stride, out_stride, unaligned,  # type: ignore[no-untyped-def]
                 C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, K: tl.constexpr,
                 DILATION: tl.constexpr, STRIDE: tl.constexpr, RELU: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
                 COLS: tl.constexpr):  # fmt: skip
    channel = tl.program_id(0)
    source = tl.load(source_ptr + channel // C)
    image = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    place = tl.program_id(2) * COLS + tl.arange(0, COLS)
    row = place // WO
    col = place % WO
    here = (image < batch)[:, None] & (place < HO * WO)[None, :]
    plane = x_ptr + (unaligned - 3) + image.to(tl.int64)[:, None] * x_stride + (source * C + channel % C) * (H * W)
    out = out_ptr + (unaligned - 3) + image.to(tl.int64)[:, None] * out_stride + channel * (HO * WO) + place[None, :]
    total = tl.zeros((ROWS, COLS), tl.float32)
    off = False
    if MASKED:
        off = tl.load(on_ptr + channel // C) == 0.0
    if off:
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=here)
        return
    for i in tl.static_range(K):
        y = row * STRIDE + (i - K // 2) * DILATION
        for j in tl.static_range(K):
            x = col * STRIDE + (j - K // 2) * DILATION
            inside = (y >= 0) & (y < H) & (x >= 0) & (x < W)
            value = tl.load(plane + (y * W + x)[None, :], mask=here & inside[None, :], other=0.0).to(tl.float32)
            if RELU:
                value = tl.maximum(value, 0.0)
            total += value * tl.load(w_ptr + channel * (K * K) + i * K + j).to(tl.float32)
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=here)


@jit
def _gathered(total, g_ptr, w_ptr, starts_ptr, on_ptr, image, row, col, here, source, within, g_stride, unaligned,  # type: ignore[no-untyped-def]
              C: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, K: tl.constexpr, DILATION: tl.constexpr,
              STRIDE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """`total` plus what every branch of one kernel size sends back to these places."""
    first = tl.load(starts_ptr + source)
    last = tl.load(starts_ptr + source + 1)
    for branch in range(first, last):
        channel = branch * C + within
        plane = g_ptr + (unaligned - 3) + image.to(tl.int64)[:, None] * g_stride + channel * (HO * WO)
        on = True
        if MASKED:
            on = tl.load(on_ptr + branch) != 0.0
        if on:
            for i in tl.static_range(K):
                y = row - (i - K // 2) * DILATION
                for j in tl.static_range(K):
                    x = col - (j - K // 2) * DILATION
                    inside = (y >= 0) & (x >= 0)
                    if STRIDE == 2:
                        inside = inside & (y % 2 == 0) & (x % 2 == 0)
                    inside = inside & (y // STRIDE < HO) & (x // STRIDE < WO)
                    at = (y // STRIDE) * WO + x // STRIDE
                    value = tl.load(plane + at[None, :], mask=here & inside[None, :], other=0.0).to(tl.float32)
                    total += value * tl.load(w_ptr + channel * (K * K) + i * K + j).to(tl.float32)
    return total


@jit
def bank_grad_input(x_ptr, out_ptr, g0_ptr, w0_ptr, starts0_ptr, on0_ptr, g1_ptr, w1_ptr, starts1_ptr, on1_ptr, batch, x_stride,  # type: ignore[no-untyped-def]
                    g_stride, unaligned,
                    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, K0: tl.constexpr,
                    K1: tl.constexpr, DILATION: tl.constexpr, STRIDE: tl.constexpr, RELU: tl.constexpr, MASKED: tl.constexpr,
                    ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    channel = tl.program_id(0)
    source = channel // C
    within = channel % C
    image = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    place = tl.program_id(2) * COLS + tl.arange(0, COLS)
    row = place // W
    col = place % W
    here = (image < batch)[:, None] & (place < H * W)[None, :]
    total = tl.zeros((ROWS, COLS), tl.float32)
    total = _gathered(total, g0_ptr, w0_ptr, starts0_ptr, on0_ptr, image, row, col, here, source, within, g_stride, unaligned,
                      C, HO, WO, K0, DILATION, STRIDE, MASKED)  # fmt: skip
    if K1 > 0:
        total = _gathered(total, g1_ptr, w1_ptr, starts1_ptr, on1_ptr, image, row, col, here, source, within, g_stride, unaligned,
                          C, HO, WO, K1, DILATION, STRIDE, MASKED)  # fmt: skip
    at = (unaligned - 3) + image.to(tl.int64)[:, None] * x_stride + channel * (H * W) + place[None, :]
    if RELU:
        value = tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32)
        total = tl.where(value > 0.0, total, 0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=here)


@jit
def _product(plane, grad, y, col, here, J: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr,  # type: ignore[no-untyped-def]
             DILATION: tl.constexpr, STRIDE: tl.constexpr, RELU: tl.constexpr):  # fmt: skip
    """Gradient times the input the tap in column J of the kernel saw."""
    x = col * STRIDE + (J - K // 2) * DILATION
    inside = (y >= 0) & (y < H) & (x >= 0) & (x < W)
    value = tl.load(plane + (y * W + x)[None, :], mask=here & inside[None, :], other=0.0).to(tl.float32)
    if RELU:
        value = tl.maximum(value, 0.0)
    return value * grad


@jit
def bank_grad_weight(x_ptr, g_ptr, source_ptr, on_ptr, out_ptr, batch, images, x_stride, g_stride, unaligned,  # type: ignore[no-untyped-def]
                     C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, K: tl.constexpr,
                     DILATION: tl.constexpr, STRIDE: tl.constexpr, RELU: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
                     COLS: tl.constexpr):  # fmt: skip
    channel = tl.program_id(0)
    share = tl.program_id(1)
    i = tl.program_id(2)
    source = tl.load(source_ptr + channel // C)
    out = out_ptr + (share * tl.num_programs(0) + channel) * (K * K) + i * K
    off = False
    if MASKED:
        off = tl.load(on_ptr + channel // C) == 0.0
    if off:
        for j in tl.static_range(K):
            tl.store(out + j, 0.0)
        return
    row_of_tile = tl.arange(0, ROWS)
    t0 = tl.zeros((ROWS, COLS), tl.float32)
    t1 = t0
    t2 = t0
    t3 = t0
    t4 = t0
    first = share * images
    last = tl.minimum(first + images, batch)
    for start in range(0, images, ROWS):
        image = first + start + row_of_tile
        for at in range(0, HO * WO, COLS):
            place = at + tl.arange(0, COLS)
            y = place // WO * STRIDE + (i - K // 2) * DILATION
            col = place % WO
            here = (image < last)[:, None] & (place < HO * WO)[None, :]
            plane = x_ptr + (unaligned - 3) + image.to(tl.int64)[:, None] * x_stride + (source * C + channel % C) * (H * W)
            grads = g_ptr + (unaligned - 3) + image.to(tl.int64)[:, None] * g_stride + channel * (HO * WO) + place[None, :]
            grad = tl.load(grads, mask=here, other=0.0).to(tl.float32)
            t0 += _product(plane, grad, y, col, here, 0, H, W, K, DILATION, STRIDE, RELU)
            if K > 1:
                t1 += _product(plane, grad, y, col, here, 1, H, W, K, DILATION, STRIDE, RELU)
                t2 += _product(plane, grad, y, col, here, 2, H, W, K, DILATION, STRIDE, RELU)
            if K > 3:
                t3 += _product(plane, grad, y, col, here, 3, H, W, K, DILATION, STRIDE, RELU)
                t4 += _product(plane, grad, y, col, here, 4, H, W, K, DILATION, STRIDE, RELU)
    tl.store(out, tl.sum(t0))
    if K > 1:
        tl.store(out + 1, tl.sum(t1))
        tl.store(out + 2, tl.sum(t2))
    if K > 3:
        tl.store(out + 3, tl.sum(t3))
        tl.store(out + 4, tl.sum(t4))
