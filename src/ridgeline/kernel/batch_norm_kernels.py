"""Kernels of batch norm in training, over [rows, cols] with the channels innermost; batch_norm.py draws the flow.

A program has BLOCK channels and walks over tiles of ROWS rows. Its sums are about the mean of its first tile, and the programs' means are
joined about their own mean: a variance loses nothing to a mean far from zero, and little to an outlier, wherever it stands.

The kernels of a pass have the same tensors and float numbers, whether they use them or not: they are one chain of launches, see plan.py.
"""

from __future__ import annotations

from .jit import jit, tl
from .overlap import promptly

KERNELS = __file__


@jit
def _loaded(ptr, at, inside, ACC: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(ptr + at, mask=inside, other=0.0).to(ACC)


@jit
def _columns_of(ptr, col, cols, fallback, ACC: tl.constexpr):  # type: ignore[no-untyped-def]
    """One number a channel; `fallback` where there are none."""
    if ptr is None:
        return tl.full(col.shape, fallback, ACC)
    else:
        return tl.load(ptr + col, mask=col < cols, other=0.0).to(ACC)


@jit
def _channels(stats_ptr, w_ptr, b_ptr, col, cols, ACC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Mean, 1 / deviation, that times the weight, and the bias of every channel."""
    mean = _columns_of(stats_ptr, col, cols, 0.0, ACC)
    rstd = _columns_of(stats_ptr + cols, col, cols, 0.0, ACC)
    return mean, rstd, rstd * _columns_of(w_ptr, col, cols, 1.0, ACC), _columns_of(b_ptr, col, cols, 0.0, ACC)


@jit
def _slope(z, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The derivative of the activation where its argument is z."""
    if KIND == "relu":
        return tl.where(z > 0, 1.0, 0.0)
    else:
        middle = tl.where(z > 3.0, 1.0, z * (1.0 / 3.0) + 0.5)  # hardswish
        return tl.where(z <= -3.0, 0.0, middle)


@jit
def _activated(z, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    if KIND == "relu":
        return tl.where(z < 0, 0.0, z)  # keeps NaN, as torch does
    else:
        return z * tl.minimum(tl.maximum(z + 3.0, 0.0), 6.0) * (1.0 / 6.0)


@jit
def _seen(part, parts, rows, tiles, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of a program's tiles: part, part + parts, …; the last of all tiles may be short."""
    return tl.cdiv(tiles - part, parts) * ROWS - tl.where((tiles - 1) % parts == part, tiles * ROWS - rows, 0)


@jit
def _statistics(x_ptr, r_ptr, w_ptr, b_ptr, part_ptr, stats_ptr, y_ptr, rows, cols, eps, ACC: tl.constexpr, VEC: tl.constexpr,  # type: ignore[no-untyped-def]
                ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    """part [parts, 2, cols]: mean, and sum of squares about it, of each program's rows."""
    promptly(PROMPT)
    width = cols // VEC * VEC  # no change; tells the compiler what divides the row, for wide loads
    part, parts = tl.program_id(1), tl.num_programs(1)
    col = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    lane = tl.arange(0, ROWS)[:, None]
    first = (part * ROWS + lane).to(tl.int64)
    origin = tl.sum(_loaded(x_ptr, first * width + col, (first < rows) & (col < width), ACC), 0)[None, :]
    origin /= tl.minimum(rows - part * ROWS, ROWS)
    total = tl.zeros([ROWS, BLOCK], ACC)
    square = tl.zeros([ROWS, BLOCK], ACC)
    for tile in tl.range(part, tl.cdiv(rows, ROWS), parts, num_stages=STAGES):
        row = (tl.arange(0, ROWS).to(tl.int64) + tile * ROWS)[:, None]
        inside = (row < rows) & (col < width)
        gap = tl.where(inside, _loaded(x_ptr, row * width + col, inside, ACC) - origin, 0.0)
        total += gap
        square += gap * gap
    count = _seen(part, parts, rows, tl.cdiv(rows, ROWS), ROWS).to(ACC)
    gap = tl.sum(total, 0)[None, :] / count
    out = part_ptr + part.to(tl.int64) * 2 * width + col
    tl.store(out, origin + gap, mask=col < width)
    tl.store(out + width, tl.maximum(tl.sum(square, 0)[None, :] - gap * gap * count, 0.0), mask=col < width)


@jit
def _combined(x_ptr, r_ptr, w_ptr, b_ptr, part_ptr, stats_ptr, y_ptr, rows, cols, parts, eps, ACC: tl.constexpr, TILE: tl.constexpr,  # type: ignore[no-untyped-def]
              ROWS: tl.constexpr, BLOCK: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    """stats [3, cols]: mean, 1 / deviation, variance as running statistics have it. TILE: the ROWS of _statistics."""
    promptly(PROMPT)
    col = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    tiles = tl.cdiv(rows, TILE)
    total = tl.zeros([ROWS, BLOCK], ACC)
    for first in range(0, parts, ROWS):
        part = first + tl.arange(0, ROWS)[:, None]
        inside = (part < parts) & (col < cols)
        total += tl.load(part_ptr + part.to(tl.int64) * 2 * cols + col, mask=inside, other=0.0)
    start = tl.sum(total, 0)[None, :] / parts
    total = tl.zeros([ROWS, BLOCK], ACC)
    for first in range(0, parts, ROWS):
        part = first + tl.arange(0, ROWS)[:, None]
        inside = (part < parts) & (col < cols)
        gap = tl.where(inside, tl.load(part_ptr + part.to(tl.int64) * 2 * cols + col, mask=inside, other=0.0) - start, 0.0)
        total += gap * _seen(part, parts, rows, tiles, TILE).to(ACC)
    mean = tl.sum(total, 0)[None, :] / rows
    squares = tl.zeros([ROWS, BLOCK], ACC)
    for first in range(0, parts, ROWS):
        part = first + tl.arange(0, ROWS)[:, None]
        inside = (part < parts) & (col < cols)
        at = part_ptr + part.to(tl.int64) * 2 * cols + col
        gap = tl.load(at, mask=inside, other=0.0) - start - mean
        square = tl.load(at + cols, mask=inside, other=0.0) + _seen(part, parts, rows, tiles, TILE).to(ACC) * gap * gap
        squares += tl.where(inside, square, 0.0)
    whole = tl.sum(squares, 0)[None, :]
    tl.store(stats_ptr + col, start + mean, mask=col < cols)
    tl.store(stats_ptr + cols + col, tl.rsqrt(whole / rows + eps), mask=col < cols)
    tl.store(stats_ptr + 2 * cols + col, whole / tl.maximum(rows - 1, 1), mask=col < cols)


@jit
def _apply(x_ptr, r_ptr, w_ptr, b_ptr, part_ptr, stats_ptr, y_ptr, rows, cols, eps, KIND: tl.constexpr, ACC: tl.constexpr,  # type: ignore[no-untyped-def]
           VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    """y = activation((x - mean) rstd w + b + r)."""
    promptly(PROMPT)
    width = cols // VEC * VEC
    col = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mean, _, scale, shift = _channels(stats_ptr, w_ptr, b_ptr, col, cols, ACC)
    last = tl.cdiv(rows, ROWS) - 1
    for step in tl.range(tl.program_id(1), last + 1, tl.num_programs(1), num_stages=STAGES):
        row = (tl.arange(0, ROWS).to(tl.int64) + (last - step) * ROWS)[:, None]  # from the end: it is still cached
        inside = (row < rows) & (col < width)
        z = (_loaded(x_ptr, row * width + col, inside, ACC) - mean) * scale + shift
        if r_ptr is not None:
            z += _loaded(r_ptr, row * width + col, inside, ACC)
        if KIND != "none":
            z = _activated(z, KIND)
        tl.store(y_ptr + row * width + col, z, mask=inside)


@jit
def _sent_back(g_ptr, x_ptr, r_ptr, at, inside, mean, scale, shift, KIND: tl.constexpr, ACC: tl.constexpr):  # type: ignore[no-untyped-def]
    """(gradient before the activation, x - mean); the activation's argument is computed again as _apply did."""
    g = _loaded(g_ptr, at, inside, ACC)
    gap = _loaded(x_ptr, at, inside, ACC) - mean
    if KIND != "none":
        z = gap * scale + shift
        if r_ptr is not None:
            z += _loaded(r_ptr, at, inside, ACC)
        g *= _slope(z, KIND)
    return g, gap


@jit
def _slopes(g_ptr, x_ptr, r_ptr, w_ptr, b_ptr, stats_ptr, sums_ptr, dx_ptr, dr_ptr, dw_ptr, db_ptr, rows, cols, KIND: tl.constexpr,  # type: ignore[no-untyped-def]
            ACC: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
            PROMPT: tl.constexpr = False):  # fmt: skip
    """sums [1 + parts, 2, cols], but for the first: of the gradient times the normalised x, and of the gradient, of each program's rows."""
    promptly(PROMPT)
    width = cols // VEC * VEC
    col = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mean, rstd, scale, shift = _channels(stats_ptr, w_ptr, b_ptr, col, cols, ACC)
    dw = tl.zeros([ROWS, BLOCK], ACC)
    db = tl.zeros([ROWS, BLOCK], ACC)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = (tl.arange(0, ROWS).to(tl.int64) + tile * ROWS)[:, None]
        inside = (row < rows) & (col < width)
        g, gap = _sent_back(g_ptr, x_ptr, r_ptr, row * width + col, inside, mean, scale, shift, KIND, ACC)
        db += g
        dw += g * gap
    out = sums_ptr + (tl.program_id(1).to(tl.int64) + 1) * 2 * width + col
    tl.store(out, tl.sum(dw, 0)[None, :] * rstd, mask=col < width)
    tl.store(out + width, tl.sum(db, 0)[None, :], mask=col < width)


@jit
def _summed(g_ptr, x_ptr, r_ptr, w_ptr, b_ptr, stats_ptr, sums_ptr, dx_ptr, dr_ptr, dw_ptr, db_ptr, parts, cols, ACC: tl.constexpr,  # type: ignore[no-untyped-def]
            ROWS: tl.constexpr, BLOCK: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    """The first of sums: all programs' together; they are dw and db, too."""
    promptly(PROMPT)
    col = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    dw = tl.zeros([ROWS, BLOCK], ACC)
    db = tl.zeros([ROWS, BLOCK], ACC)
    for first in range(0, parts, ROWS):
        part = first + tl.arange(0, ROWS)[:, None]
        inside = (part < parts) & (col < cols)
        at = sums_ptr + (part.to(tl.int64) + 1) * 2 * cols + col
        dw += tl.load(at, mask=inside, other=0.0)
        db += tl.load(at + cols, mask=inside, other=0.0)
    slope, level = tl.sum(dw, 0)[None, :], tl.sum(db, 0)[None, :]
    tl.store(sums_ptr + col, slope, mask=col < cols)
    tl.store(sums_ptr + cols + col, level, mask=col < cols)
    if dw_ptr is not None:
        tl.store(dw_ptr + col, slope, mask=col < cols)
    if db_ptr is not None:
        tl.store(db_ptr + col, level, mask=col < cols)


@jit
def _apply_backward(g_ptr, x_ptr, r_ptr, w_ptr, b_ptr, stats_ptr, sums_ptr, dx_ptr, dr_ptr, dw_ptr, db_ptr, rows, cols,  # type: ignore[no-untyped-def]
                    KIND: tl.constexpr, ACC: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                    STAGES: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    """dx = rstd w (g - db / rows - normalised x · dw / rows), dr = g; g the gradient before the activation."""
    promptly(PROMPT)
    width = cols // VEC * VEC
    col = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mean, rstd, scale, shift = _channels(stats_ptr, w_ptr, b_ptr, col, cols, ACC)
    slope = rstd * _columns_of(sums_ptr, col, cols, 0.0, ACC) / rows
    level = _columns_of(sums_ptr + cols, col, cols, 0.0, ACC) / rows
    last = tl.cdiv(rows, ROWS) - 1
    for step in tl.range(tl.program_id(1), last + 1, tl.num_programs(1), num_stages=STAGES):
        row = (tl.arange(0, ROWS).to(tl.int64) + (last - step) * ROWS)[:, None]  # from the end: it is still cached
        at = row * width + col
        inside = (row < rows) & (col < width)
        g, gap = _sent_back(g_ptr, x_ptr, r_ptr, at, inside, mean, scale, shift, KIND, ACC)
        if dr_ptr is not None:
            tl.store(dr_ptr + at, g, mask=inside)
        if dx_ptr is not None:
            tl.store(dx_ptr + at, (g - level - gap * slope) * scale, mask=inside)
