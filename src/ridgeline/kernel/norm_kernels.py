"""Triton kernels of layer and RMS normalisation, forward and backward; layer_norm.py launches them.

    x [rows, cols] ──_forward──> y, mean, rstd      a row, or a few, a program, kept in registers
      chunks of 16 bytes (n, mean, squares about it) ──one reduction──> those of the row: no second pass, no cancellation
    g, x, mean, rstd ──_backward──> dx, and dw, db partial sums [programs, cols] ──_reduce──> dw, db
    longer rows: _forward_long, _backward_long, and dw, db by _columns

mean_ptr None: no mean is taken off (RMS norm). r_ptr: a residual, added first and rounded to its dtype. Ref: Chan, Golub and
LeVeque 1983 (joining the moments of two samples).
"""

from __future__ import annotations

from .jit import jit, tl
from .overlap import promptly

KERNELS = __file__
"""The file whose changes ask for new tuning."""


@jit
def _moments(n, mean, squares, n2, mean2, squares2):  # type: ignore[no-untyped-def]
    """Count, mean and centred squares of two samples together; either may be empty."""
    both = n + n2
    share = n2 / tl.maximum(both, 1.0)
    gap = mean2 - mean
    return both, mean + gap * share, squares + squares2 + gap * gap * (n * share)


@jit
def _forward_tile(x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr, tile, rows, width, eps, ACC: tl.constexpr,  # type: ignore[no-untyped-def]
                  FULL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, LATE: tl.constexpr,
                  CENTER: tl.constexpr, STREAM: tl.constexpr):  # fmt: skip
    policy: tl.constexpr = "evict_first" if STREAM else ""
    modifier: tl.constexpr = ".cs" if STREAM else ""
    start = tl.arange(0, BLOCK // CHUNK)[None, :] * CHUNK
    col = start[:, :, None] + tl.arange(0, CHUNK)[None, None, :]
    row = (tl.arange(0, ROWS).to(tl.int64) + tile * ROWS)[:, None, None]
    line = tl.arange(0, ROWS).to(tl.int64) + tile * ROWS
    at = row * (BLOCK if FULL else width) + col
    inside = None if FULL else (row < rows) & (col < width)
    # w and b as many times as rows: from the cache in the layout of x, instead of through shared memory into it
    every = tl.broadcast_to(col, [ROWS, BLOCK // CHUNK, CHUNK])
    known = None if FULL else every < width
    count = BLOCK if FULL else width
    x = tl.load(x_ptr + at, mask=inside, other=None if FULL else 0.0, eviction_policy=policy).to(ACC)
    if r_ptr is not None:
        r = tl.load(r_ptr + at, mask=inside).to(ACC) if FULL else tl.load(r_ptr + at, mask=inside, other=0.0).to(ACC)
        total = (x + r).to(s_ptr.dtype.element_ty)
    if not LATE:  # on their way while the row is reduced; later means fewer registers
        if w_ptr is not None:
            w = tl.load(w_ptr + every, mask=known)
        if b_ptr is not None:
            b = tl.load(b_ptr + every, mask=known)
    if r_ptr is not None:
        tl.store(s_ptr + at, total, mask=inside)
        x = total.to(ACC)
    if CENTER:
        n = (tl.zeros([ROWS, BLOCK // CHUNK], ACC) + CHUNK) if FULL else \
            tl.zeros([ROWS, BLOCK // CHUNK], ACC) + tl.minimum(tl.maximum(width - start, 0), CHUNK)  # fmt: skip
        middle = tl.sum(x, 2) / tl.maximum(n, 1.0)
        gap = x - middle[:, :, None]
        if not FULL:
            gap = tl.where(inside, gap, 0.0)
        _, mean, squares = tl.reduce((n, middle, tl.sum(gap * gap, 2)), 1, _moments)
        x -= mean[:, None, None]
    else:
        squares = tl.sum(tl.sum(x * x, 2), 1)
    rstd = tl.rsqrt(squares / count + eps)
    if LATE:
        if w_ptr is not None:
            w = tl.load(w_ptr + every, mask=known)
        if b_ptr is not None:
            b = tl.load(b_ptr + every, mask=known)
    y = x * rstd[:, None, None]
    if w_ptr is not None:
        y *= w.to(ACC)
    if b_ptr is not None:
        y += b.to(ACC)
    tl.store(y_ptr + at, y, mask=inside, cache_modifier=modifier)
    if mean_ptr is not None:
        tl.store(mean_ptr + line, mean, mask=None if FULL else line < rows)
    if rstd_ptr is not None:  # nobody needs it without a gradient
        tl.store(rstd_ptr + line, rstd, mask=None if FULL else line < rows)


@jit
def _forward(x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr, rows, cols, eps, ACC: tl.constexpr, VEC: tl.constexpr,  # type: ignore[no-untyped-def]
             FULL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, LATE: tl.constexpr,
             CENTER: tl.constexpr, STAGES: tl.constexpr, STREAM: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    promptly(PROMPT)
    width = cols // VEC * VEC  # no change; tells the compiler what divides the row, for wide loads
    if STAGES:
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
            _forward_tile(x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr, tile, rows, width, eps, ACC, FULL, ROWS, BLOCK,
                          CHUNK, LATE, CENTER, STREAM)  # fmt: skip
    else:
        _forward_tile(x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr, tl.program_id(0), rows, width, eps, ACC, FULL, ROWS,
                      BLOCK, CHUNK, LATE, CENTER, STREAM)  # fmt: skip


@jit
def _summed(x_ptr, r_ptr, at, inside, ACC: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if r_ptr is not None:
        x = (x.to(ACC) + tl.load(r_ptr + at, mask=inside, other=0.0).to(ACC)).to(x_ptr.dtype.element_ty)
    return x


@jit
def _forward_long(x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr, cols, eps, ACC: tl.constexpr,  # type: ignore[no-untyped-def]
                  BLOCK: tl.constexpr, CENTER: tl.constexpr, STAGES: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    promptly(PROMPT)
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK)
    mean = 0.0
    if CENTER:
        total = tl.zeros([BLOCK], ACC)
        for chunk in tl.range(0, tl.cdiv(cols, BLOCK), num_stages=STAGES):
            col = chunk * BLOCK + step
            total += _summed(x_ptr, r_ptr, row * cols + col, col < cols, ACC).to(ACC)
        mean = tl.sum(total, 0) / cols
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean)
    squares = tl.zeros([BLOCK], ACC)
    for chunk in tl.range(0, tl.cdiv(cols, BLOCK), num_stages=STAGES):
        col = chunk * BLOCK + step
        x = _summed(x_ptr, r_ptr, row * cols + col, col < cols, ACC).to(ACC)
        x = tl.where(col < cols, x - mean, 0.0)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, 0) / cols + eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd)
    for chunk in tl.range(0, tl.cdiv(cols, BLOCK), num_stages=STAGES):
        col = chunk * BLOCK + step
        inside = col < cols
        x = _summed(x_ptr, r_ptr, row * cols + col, inside, ACC)
        if r_ptr is not None:
            tl.store(s_ptr + row * cols + col, x, mask=inside)
        y = (x.to(ACC) - mean) * rstd
        if w_ptr is not None:
            y *= tl.load(w_ptr + col, mask=inside, other=0.0).to(ACC)
        if b_ptr is not None:
            y += tl.load(b_ptr + col, mask=inside, other=0.0).to(ACC)
        tl.store(y_ptr + row * cols + col, y, mask=inside)


@jit
def _backward(g_ptr, x_ptr, mean_ptr, rstd_ptr, w_ptr, gs_ptr, dx_ptr, dw_ptr, db_ptr, rows, cols, ACC: tl.constexpr,  # type: ignore[no-untyped-def]
              VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    promptly(PROMPT)
    width = cols // VEC * VEC
    col = tl.arange(0, BLOCK)[None, :]
    if w_ptr is not None:
        w = tl.load(w_ptr + col, mask=col < width, other=0.0)
    if dw_ptr is not None:
        dw = tl.zeros([ROWS, BLOCK], ACC)
    if db_ptr is not None:
        db = tl.zeros([ROWS, BLOCK], ACC)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tl.arange(0, ROWS).to(tl.int64) + tile * ROWS)[:, None]
        at = row * width + col
        inside = (row < rows) & (col < width)
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(ACC)  # 0 outside: so are all sums there
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(ACC)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        if mean_ptr is not None:
            x -= tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        x *= rstd
        if db_ptr is not None:
            db += g
        if dw_ptr is not None:
            dw += g * x
        if dx_ptr is not None:
            if w_ptr is not None:
                g *= w.to(ACC)
            dx = g - x * (tl.sum(g * x, 1)[:, None] / cols)
            if mean_ptr is not None:
                dx -= tl.sum(g, 1)[:, None] / cols
            dx *= rstd
            if gs_ptr is not None:
                dx += tl.load(gs_ptr + at, mask=inside, other=0.0).to(ACC)
            tl.store(dx_ptr + at, dx, mask=inside)
    out = tl.program_id(0).to(tl.int64) * width + tl.arange(0, BLOCK)
    if dw_ptr is not None:
        tl.store(dw_ptr + out, tl.sum(dw, 0), mask=tl.arange(0, BLOCK) < width)
    if db_ptr is not None:
        tl.store(db_ptr + out, tl.sum(db, 0), mask=tl.arange(0, BLOCK) < width)


@jit
def _backward_long(g_ptr, x_ptr, mean_ptr, rstd_ptr, w_ptr, gs_ptr, dx_ptr, cols, ACC: tl.constexpr, BLOCK: tl.constexpr,  # type: ignore[no-untyped-def]
                   STAGES: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    promptly(PROMPT)
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK)
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row)
    products = tl.zeros([BLOCK], ACC)
    total = tl.zeros([BLOCK], ACC)
    for chunk in tl.range(0, tl.cdiv(cols, BLOCK), num_stages=STAGES):
        col = chunk * BLOCK + step
        g = tl.load(g_ptr + row * cols + col, mask=col < cols, other=0.0).to(ACC)
        x = (tl.load(x_ptr + row * cols + col, mask=col < cols, other=0.0).to(ACC) - mean) * rstd
        if w_ptr is not None:
            g *= tl.load(w_ptr + col, mask=col < cols, other=0.0).to(ACC)
        products += g * x
        total += g
    slope = tl.sum(products, 0) / cols
    level = tl.sum(total, 0) / cols
    last = tl.cdiv(cols, BLOCK) - 1
    for chunk in tl.range(0, last + 1, num_stages=STAGES):
        col = (last - chunk) * BLOCK + step  # backwards: the end of the row is still cached
        g = tl.load(g_ptr + row * cols + col, mask=col < cols, other=0.0).to(ACC)
        x = (tl.load(x_ptr + row * cols + col, mask=col < cols, other=0.0).to(ACC) - mean) * rstd
        if w_ptr is not None:
            g *= tl.load(w_ptr + col, mask=col < cols, other=0.0).to(ACC)
        dx = g - x * slope
        if mean_ptr is not None:
            dx -= level
        dx *= rstd
        if gs_ptr is not None:
            dx += tl.load(gs_ptr + row * cols + col, mask=col < cols, other=0.0).to(ACC)
        tl.store(dx_ptr + row * cols + col, dx, mask=col < cols)


@jit
def _columns(g_ptr, x_ptr, mean_ptr, rstd_ptr, dw_ptr, db_ptr, rows, cols, ACC: tl.constexpr, ROWS: tl.constexpr,  # type: ignore[no-untyped-def]
             BLOCK: tl.constexpr, STAGES: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    promptly(PROMPT)
    col = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    dw = tl.zeros([ROWS, BLOCK], ACC)
    db = tl.zeros([ROWS, BLOCK], ACC)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = (tl.arange(0, ROWS).to(tl.int64) + tile * ROWS)[:, None]
        inside = (row < rows) & (col < cols)
        g = tl.load(g_ptr + row * cols + col, mask=inside, other=0.0).to(ACC)
        db += g
        if dw_ptr is not None:
            x = tl.load(x_ptr + row * cols + col, mask=inside, other=0.0).to(ACC)
            if mean_ptr is not None:
                x -= tl.load(mean_ptr + row, mask=row < rows, other=0.0)
            dw += g * x * tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    out = tl.program_id(1).to(tl.int64) * cols + col
    if dw_ptr is not None:
        tl.store(dw_ptr + out, tl.sum(dw, 0)[None, :], mask=col < cols)
    if db_ptr is not None:
        tl.store(db_ptr + out, tl.sum(db, 0)[None, :], mask=col < cols)


@jit
def _reduce(pw_ptr, pb_ptr, dw_ptr, db_ptr, count, cols, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,  # type: ignore[no-untyped-def]
            PROMPT: tl.constexpr = False):  # fmt: skip
    promptly(PROMPT)
    col = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    dw = tl.zeros([ROWS, BLOCK], ACC)
    db = tl.zeros([ROWS, BLOCK], ACC)
    for start in range(0, count, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < count) & (col < cols)
        if dw_ptr is not None:
            dw += tl.load(pw_ptr + row * cols + col, mask=inside, other=0.0)
        if db_ptr is not None:
            db += tl.load(pb_ptr + row * cols + col, mask=inside, other=0.0)
    if dw_ptr is not None:
        tl.store(dw_ptr + col, tl.sum(dw, 0)[None, :], mask=col < cols)
    if db_ptr is not None:
        tl.store(db_ptr + col, tl.sum(db, 0)[None, :], mask=col < cols)
