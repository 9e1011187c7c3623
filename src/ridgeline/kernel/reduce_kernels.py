"""Triton kernels of the reductions: sum, mean, maximum, position of the maximum, variance.

    x[b, s, k, r]   kept: b, k   reduced: s, r   any strides; q = b * K + k numbers the outputs
      program (block of k, split, b): KEPT outputs x every `chunks`-th tile of r, each KEPT x RED elements, added up lane by lane
      STAGE 0  one piece an output: write it
      STAGE 1  write part[split, q]; a `*_finish` kernel combines the pieces of an output
      STAGE 2  the same, and the program that arrives last at a block combines them: one launch

The order of every sum is fixed by the shape, also in STAGE 2: the counter says who combines, not in which order. The counters are
zero between launches. AXIS is the place of r in the tile: 1 where r lies closest in memory, 0 where k does. ALIGN (a power of two)
divides the size of the closest dimension and all other strides; sizes along it come in units of ALIGN, which is how the compiler
learns that 128-bit loads are allowed for rows of, say, 1000 elements. ONCE: a piece is one tile. The pieces of a row take turns, so
that programs running at the same time read neighbouring memory. LINEAR: the grid has one axis, for counts the others cannot hold;
small reductions are all latency, and dividing a program's number costs them a tenth of a microsecond each time. WIDE: an int32 does not
count the outputs and the places behind them that a last block has.
"""

# ruff: noqa: SIM102, SIM108, SIM300
# A compile-time `if` must stand alone: joined with a run-time one by `and`, or made an expression, Triton compiles both sides.
from __future__ import annotations

from .jit import INTERPRETED, jit, tl
from .overlap import promptly

BY_HAND = tl.constexpr(INTERPRETED)
"""The interpreter cuts float32 off where a GPU rounds to the nearest bfloat16; `_write` rounds for it."""


@jit
def _write(at, value, live):  # type: ignore[no-untyped-def]
    if BY_HAND:
        if at.dtype.element_ty == tl.bfloat16:
            bits = value.to(tl.int32, bitcast=True)
            nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
            value = tl.where(value == value, nearest, value)
    tl.store(at, value, mask=live)


@jit
def _k_size(k_units, AXIS: tl.constexpr, ALIGN: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    if WIDE:
        return tl.full((), k_units, tl.int64) * (ALIGN if AXIS == 0 else 1)
    else:
        return k_units * (ALIGN if AXIS == 0 else 1)


@jit
def _program(kept, k_units, splits, AXIS: tl.constexpr, KEPT: tl.constexpr, FLAT: tl.constexpr, ALIGN: tl.constexpr,  # type: ignore[no-untyped-def]
             LINEAR: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Which block of k, which split and which b this program has, and the number of its block of outputs."""
    if WIDE:
        kept = tl.full((), kept, tl.int64)
    if FLAT:
        blocks = tl.cdiv(kept, KEPT)
    else:
        blocks = tl.cdiv(_k_size(k_units, AXIS, ALIGN, WIDE), KEPT)
    at = tl.program_id(0)
    if LINEAR:
        rest = at // blocks
        return at % blocks, rest % splits, rest // splits, rest // splits * blocks + at % blocks
    else:
        return at, tl.program_id(1), tl.program_id(2), tl.program_id(2) * blocks + at


@jit
def _place(at, b, kept, k_units, sb, sk, AXIS: tl.constexpr, KEPT: tl.constexpr, FLAT: tl.constexpr, ALIGN: tl.constexpr,  # type: ignore[no-untyped-def]
           WIDE: tl.constexpr):  # fmt: skip
    """Outputs of a block: their numbers, which of them exist, and where their elements begin."""
    k_size = _k_size(k_units, AXIS, ALIGN, WIDE)
    if FLAT:
        q = at.to(tl.int64) * KEPT + tl.arange(0, KEPT)
        live = q < kept
        begin = (q // k_size) * sb + (q % k_size) * sk
        if AXIS == 1:
            begin = tl.multiple_of(begin, ALIGN)
    else:
        if WIDE:
            at = at.to(tl.int64)
        k = at * KEPT + tl.arange(0, KEPT)
        live = k < k_size
        q = b.to(tl.int64) * k_size + k
        along = k.to(tl.int64) * sk
        if AXIS == 1:
            along = tl.multiple_of(along, ALIGN)
        begin = tl.multiple_of(b.to(tl.int64) * sb, ALIGN) + along
    return q, live, begin


@jit
def _piece(x_ptr, split, r_units, ss, sr, chunks, AXIS: tl.constexpr, RED: tl.constexpr, ALIGN: tl.constexpr, SOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a piece begins, its first index along r, elements from there to the end of r, and from one of its tiles to the next."""
    first = split
    if not SOLE:
        first = split % chunks
        x_ptr += tl.multiple_of((split // chunks).to(tl.int64) * ss, ALIGN)
    start = first.to(tl.int64) * RED
    left = tl.full((), r_units, tl.int64) * (ALIGN if AXIS == 1 else 1) - start
    turn = tl.full((), chunks, tl.int64) * RED
    return x_ptr + tl.multiple_of(start * sr, ALIGN), start, left, turn


@jit
def _offsets(begin, sr, turn, AXIS: tl.constexpr, RED: tl.constexpr, ALIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets of a tile from the beginning of a piece, and the step to the next tile of the piece."""
    along = tl.arange(0, RED).to(tl.int64) * sr
    if AXIS == 0:
        along = tl.multiple_of(along, ALIGN)
        tile = along[:, None] + begin[None, :]
    else:
        tile = begin[:, None] + along[None, :]
    return tile, tl.multiple_of(turn * sr, ALIGN)


@jit
def _tiles(left, turn):  # type: ignore[no-untyped-def]
    """Tiles of a piece."""
    return ((left + turn - 1) // turn).to(tl.int32)


@jit
def _mask(left, live, AXIS: tl.constexpr, RED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements of a tile that exist, where `left` remain of r."""
    inside = tl.arange(0, RED) < tl.minimum(left, RED).to(tl.int32)
    if AXIS == 0:
        return inside[:, None] & live[None, :]
    else:
        return live[:, None] & inside[None, :]


@jit
def _last(count_ptr, block, splits):  # type: ignore[no-untyped-def]
    """Whether every other piece of this block is written; the barrier puts all threads' stores before the one that counts."""
    tl.debug_barrier()
    last = tl.atomic_add(count_ptr + block, 1, sem="acq_rel") == splits - 1
    if last:
        tl.store(count_ptr + block, 0)
    return last


@jit
def _merge(a, v, MAXIMUM: tl.constexpr):  # type: ignore[no-untyped-def]
    if MAXIMUM:
        return tl.where((v > a) | (v != v), v, a)  # a NaN stays: nothing is larger than it, nothing else is unequal to itself
    else:
        return a + v


@jit
def _fold(acc, AXIS: tl.constexpr, MAXIMUM: tl.constexpr):  # type: ignore[no-untyped-def]
    if MAXIMUM:
        if acc.dtype.is_floating():
            strange = tl.max((acc != acc).to(tl.int32), axis=AXIS)
            top = tl.max(tl.where(acc != acc, float("-inf"), acc), axis=AXIS)
            return tl.where(strange > 0, float("nan"), top)
        else:
            return tl.max(acc, axis=AXIS)
    else:
        return tl.sum(acc, axis=AXIS)


@jit
def _quotient(value, divisor, ACC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Correctly rounded; `/` of float32 is not on a GPU."""
    below = tl.full(value.shape, divisor, ACC)
    if ACC == tl.float32:
        return tl.div_rn(value, below)
    else:
        return value / below


@jit
def _combine_fold(part_ptr, kept, splits, q, live, MAXIMUM: tl.constexpr, ACC: tl.constexpr, IDENTITY: tl.constexpr,  # type: ignore[no-untyped-def]
                  SPL: tl.constexpr, KEPT: tl.constexpr):  # fmt: skip
    acc = tl.full([SPL, KEPT], IDENTITY, ACC)
    for s in range(0, splits, SPL):
        row = s + tl.arange(0, SPL)
        there = (row < splits)[:, None] & live[None, :]
        # .cg: past the first-level cache, which does not see what other programs of this launch wrote
        v = tl.load(part_ptr + row.to(tl.int64)[:, None] * kept + q[None, :], mask=there, other=IDENTITY, cache_modifier=".cg")
        acc = _merge(acc, v, MAXIMUM)
    return _fold(acc, 0, MAXIMUM)


@jit
def fold_kernel(x_ptr, out_ptr, part_ptr, count_ptr, kept, k_units, r_units, sb, sk, ss, sr, chunks, splits, divisor,  # type: ignore[no-untyped-def]
                AXIS: tl.constexpr, KEPT: tl.constexpr, RED: tl.constexpr, FLAT: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
                LINEAR: tl.constexpr, SOLE: tl.constexpr, ONCE: tl.constexpr, STAGE: tl.constexpr, SPL: tl.constexpr, ACC: tl.constexpr,
                MAXIMUM: tl.constexpr, MEAN: tl.constexpr, IDENTITY: tl.constexpr, WIDE: tl.constexpr = False,
                PROMPT: tl.constexpr = False):  # fmt: skip
    """Sum, mean (divided by `divisor`) or maximum."""
    promptly(PROMPT)
    at, split, b, block = _program(kept, k_units, splits, AXIS, KEPT, FLAT, ALIGN, LINEAR, WIDE)
    q, live, begin = _place(at, b, kept, k_units, sb, sk, AXIS, KEPT, FLAT, ALIGN, WIDE)
    base, _start, left, turn = _piece(x_ptr, split, r_units, ss, sr, chunks, AXIS, RED, ALIGN, SOLE)
    tile, step = _offsets(begin, sr, turn, AXIS, RED, ALIGN)
    acc = tl.full(tile.shape, IDENTITY, ACC)
    for _ in range(0, 1 if ONCE else _tiles(left, turn)):
        if EVEN:
            v = tl.load(base + tile).to(ACC)
        else:
            there = _mask(left, live, AXIS, RED)
            v = tl.load(base + tile, mask=there, other=0).to(ACC)
            if MAXIMUM:
                v = tl.where(there, v, IDENTITY)
        acc = _merge(acc, v, MAXIMUM)
        base += step
        left -= turn
    total = _fold(acc, AXIS, MAXIMUM)
    if STAGE == 0:
        if MEAN:
            total = _quotient(total, divisor, ACC)
        _write(out_ptr + q, total, live)
    else:
        tl.store(part_ptr + split.to(tl.int64) * kept + q, total, mask=live)
        if STAGE == 2:
            if _last(count_ptr, block, splits):
                total = _combine_fold(part_ptr, kept, splits, q, live, MAXIMUM, ACC, IDENTITY, SPL, KEPT)
                if MEAN:
                    total = _quotient(total, divisor, ACC)
                _write(out_ptr + q, total, live)


@jit
def fold_finish(part_ptr, out_ptr, kept, splits, divisor, KEPT: tl.constexpr, SPL: tl.constexpr, ACC: tl.constexpr,  # type: ignore[no-untyped-def]
                MAXIMUM: tl.constexpr, MEAN: tl.constexpr, IDENTITY: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    """Second launch of `fold_kernel`."""
    promptly(PROMPT)
    q = tl.program_id(0).to(tl.int64) * KEPT + tl.arange(0, KEPT)
    total = _combine_fold(part_ptr, kept, splits, q, q < kept, MAXIMUM, ACC, IDENTITY, SPL, KEPT)
    if MEAN:
        total = _quotient(total, divisor, ACC)
    _write(out_ptr + q, total, q < kept)


@jit
def _better(v, a):  # type: ignore[no-untyped-def]
    return (v > a) | ((v != v) & (a == a))


@jit
def _fold_position(top, where, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The maximum and the first place that holds it; a NaN is larger than all numbers."""
    best = _fold(top, AXIS, True)
    wide = tl.expand_dims(best, AXIS)
    same = (top == wide) | ((top != top) & (wide != wide))
    return best, tl.min(tl.where(same, where, 9223372036854775807), axis=AXIS)


@jit
def _combine_position(part_ptr, index_ptr, kept, splits, q, live, ACC: tl.constexpr, IDENTITY: tl.constexpr,  # type: ignore[no-untyped-def]
                      SPL: tl.constexpr, KEPT: tl.constexpr):  # fmt: skip
    top = tl.full([SPL, KEPT], IDENTITY, ACC)
    where = tl.full([SPL, KEPT], 9223372036854775807, tl.int64)
    for s in range(0, splits, SPL):
        row = s + tl.arange(0, SPL)
        there = (row < splits)[:, None] & live[None, :]
        at = row.to(tl.int64)[:, None] * kept + q[None, :]
        v = tl.load(part_ptr + at, mask=there, other=IDENTITY, cache_modifier=".cg")
        i = tl.load(index_ptr + at, mask=there, other=9223372036854775807, cache_modifier=".cg")
        # equal values: the smaller index, so that rows of nothing but the lowest value find theirs
        better = _better(v, top) | ((v == top) & (i < where))
        top = tl.where(better, v, top)
        where = tl.where(better, i, where)
    _best, place = _fold_position(top, where, 0)
    return place


@jit
def position_kernel(x_ptr, out_ptr, part_ptr, index_ptr, count_ptr, kept, k_units, r_units, sb, sk, sr, splits,  # type: ignore[no-untyped-def]
                    AXIS: tl.constexpr, KEPT: tl.constexpr, RED: tl.constexpr, FLAT: tl.constexpr, EVEN: tl.constexpr,
                    ALIGN: tl.constexpr, LINEAR: tl.constexpr, ONCE: tl.constexpr, STAGE: tl.constexpr, SPL: tl.constexpr,
                    ACC: tl.constexpr, IDENTITY: tl.constexpr, WIDE: tl.constexpr = False, PROMPT: tl.constexpr = False):  # fmt: skip
    """Index of the first maximum along r (there is no s here)."""
    promptly(PROMPT)
    at, split, b, block = _program(kept, k_units, splits, AXIS, KEPT, FLAT, ALIGN, LINEAR, WIDE)
    q, live, begin = _place(at, b, kept, k_units, sb, sk, AXIS, KEPT, FLAT, ALIGN, WIDE)
    base, start, left, turn = _piece(x_ptr, split, r_units, 0, sr, splits, AXIS, RED, ALIGN, True)
    tile, step = _offsets(begin, sr, turn, AXIS, RED, ALIGN)
    top = tl.full(tile.shape, IDENTITY, ACC)
    where = tl.zeros(tile.shape, tl.int32)  # the tile in the piece
    for done in range(0, 1 if ONCE else _tiles(left, turn)):
        there = _mask(left, live, AXIS, RED)
        if EVEN:
            v = tl.load(base + tile).to(ACC)
        else:
            v = tl.where(there, tl.load(base + tile, mask=there, other=0).to(ACC), IDENTITY)
        better = _better(v, top)
        top = tl.where(better, v, top)
        where = tl.where(better, done, where)
        base += step
        left -= turn
    along = tl.expand_dims(tl.arange(0, RED), 1 - AXIS)
    best, place = _fold_position(top, where.to(tl.int64) * turn + (start + along), AXIS)
    if STAGE == 0:
        tl.store(out_ptr + q, place, mask=live)
    else:
        at = split.to(tl.int64) * kept + q
        tl.store(part_ptr + at, best, mask=live)
        tl.store(index_ptr + at, place, mask=live)
        if STAGE == 2:
            if _last(count_ptr, block, splits):
                tl.store(out_ptr + q, _combine_position(part_ptr, index_ptr, kept, splits, q, live, ACC, IDENTITY, SPL, KEPT), mask=live)


@jit
def position_finish(part_ptr, index_ptr, out_ptr, kept, splits, KEPT: tl.constexpr, SPL: tl.constexpr, ACC: tl.constexpr,  # type: ignore[no-untyped-def]
                    IDENTITY: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    """Second launch of `position_kernel`."""
    promptly(PROMPT)
    q = tl.program_id(0).to(tl.int64) * KEPT + tl.arange(0, KEPT)
    tl.store(out_ptr + q, _combine_position(part_ptr, index_ptr, kept, splits, q, q < kept, ACC, IDENTITY, SPL, KEPT), mask=q < kept)


@jit
def _fold_spread(mean, m2, n, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Mean, sum of squared distances from it and count, of lanes that hold the same three (Chan, Golub, LeVeque 1983)."""
    count = tl.sum(n, axis=AXIS)
    middle = tl.sum(mean * n, axis=AXIS) / tl.maximum(count, 1.0)
    apart = mean - tl.expand_dims(middle, AXIS)
    slip = tl.sum(apart * n, axis=AXIS)  # zero but for the rounding of `middle`, whose effect it takes out again
    spread = tl.sum(m2 + apart * apart * n, axis=AXIS) - slip * slip / tl.maximum(count, 1.0)
    return middle, tl.where(spread < 0, 0.0, spread), count  # roundings may leave a little less than nothing of equal numbers


@jit
def _combine_spread(part_ptr, kept, splits, q, live, ACC: tl.constexpr, SPL: tl.constexpr, KEPT: tl.constexpr):  # type: ignore[no-untyped-def]
    mean = tl.zeros([SPL, KEPT], ACC)
    m2 = tl.zeros([SPL, KEPT], ACC)
    n = tl.zeros([SPL, KEPT], ACC)
    plane = tl.full((), kept, tl.int64) * splits
    for s in range(0, splits, SPL):
        row = s + tl.arange(0, SPL)
        there = (row < splits)[:, None] & live[None, :]
        at = part_ptr + row.to(tl.int64)[:, None] * kept + q[None, :]
        mean_in = tl.load(at, mask=there, other=0.0, cache_modifier=".cg")
        m2_in = tl.load(at + plane, mask=there, other=0.0, cache_modifier=".cg")
        n_in = tl.load(at + 2 * plane, mask=there, other=0.0, cache_modifier=".cg")
        both = n + n_in
        share = n_in / tl.maximum(both, 1.0)
        apart = mean_in - mean
        mean += apart * share
        m2 += m2_in + apart * apart * n * share
        n = both
    _middle, spread, _count = _fold_spread(mean, m2, n, 0)
    return spread


@jit
def spread_kernel(x_ptr, out_ptr, part_ptr, count_ptr, kept, k_units, r_units, sb, sk, ss, sr, chunks, splits, divisor,  # type: ignore[no-untyped-def]
                  AXIS: tl.constexpr, KEPT: tl.constexpr, RED: tl.constexpr, FLAT: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
                  LINEAR: tl.constexpr, SOLE: tl.constexpr, ONCE: tl.constexpr, STAGE: tl.constexpr, SPL: tl.constexpr,
                  ACC: tl.constexpr, WIDE: tl.constexpr = False, PROMPT: tl.constexpr = False):  # fmt: skip
    """Sum of squared distances from the mean over `divisor`: Welford's update lane by lane, of x less the first element of its output."""
    promptly(PROMPT)
    at, split, b, block = _program(kept, k_units, splits, AXIS, KEPT, FLAT, ALIGN, LINEAR, WIDE)
    q, live, begin = _place(at, b, kept, k_units, sb, sk, AXIS, KEPT, FLAT, ALIGN, WIDE)
    base, _start, left, turn = _piece(x_ptr, split, r_units, ss, sr, chunks, AXIS, RED, ALIGN, SOLE)
    tile, step = _offsets(begin, sr, turn, AXIS, RED, ALIGN)
    if ONCE:
        lanes = (tl.arange(0, RED) < tl.minimum(left, RED).to(tl.int32)).to(ACC)
    else:
        tiles = _tiles(left, turn)
        tail = left - (tiles - 1).to(tl.int64) * turn  # elements of r from the last tile on
        lanes = (tiles - 1 + (tl.arange(0, RED) < tl.minimum(tail, RED).to(tl.int32)).to(tl.int32)).to(ACC)
    n = tl.zeros(tile.shape, ACC) + tl.expand_dims(lanes, 1 - AXIS)
    m2 = tl.zeros(tile.shape, ACC)
    if ONCE and STAGE == 0:  # all of an output at hand: its mean first, then the distances, fewer roundings
        mean = tl.load(base + tile, mask=_mask(left, live, AXIS, RED), other=0).to(ACC)
    else:
        # a shift common to all pieces changes no variance and keeps a far mean from eating the digits
        shift = tl.expand_dims(tl.load(x_ptr + begin, mask=live, other=0).to(ACC), AXIS)
        mean = tl.zeros(tile.shape, ACC)
        seen = tl.zeros((), ACC)
        for _ in range(0, 1 if ONCE else _tiles(left, turn)):
            seen += 1.0
            if EVEN:
                v = tl.load(base + tile).to(ACC) - shift
                apart = v - mean
            else:
                there = _mask(left, live, AXIS, RED)
                v = tl.load(base + tile, mask=there, other=0).to(ACC) - shift
                apart = tl.where(there, v - mean, 0.0)
            mean += apart * (1.0 / seen)
            m2 += apart * (v - mean)
            base += step
            left -= turn
    middle, spread, count = _fold_spread(mean, m2, n, AXIS)
    if STAGE == 0:
        _write(out_ptr + q, _quotient(spread, divisor, ACC), live)
    else:
        plane = tl.full((), kept, tl.int64) * splits
        at = part_ptr + split.to(tl.int64) * kept + q
        tl.store(at, middle, mask=live)
        tl.store(at + plane, spread, mask=live)
        tl.store(at + 2 * plane, count, mask=live)
        if STAGE == 2:
            if _last(count_ptr, block, splits):
                spread = _combine_spread(part_ptr, kept, splits, q, live, ACC, SPL, KEPT)
                _write(out_ptr + q, _quotient(spread, divisor, ACC), live)


@jit
def spread_finish(part_ptr, out_ptr, kept, splits, divisor, KEPT: tl.constexpr, SPL: tl.constexpr, ACC: tl.constexpr,  # type: ignore[no-untyped-def]
                  PROMPT: tl.constexpr = False):  # fmt: skip
    """Second launch of `spread_kernel`."""
    promptly(PROMPT)
    q = tl.program_id(0).to(tl.int64) * KEPT + tl.arange(0, KEPT)
    spread = _combine_spread(part_ptr, kept, splits, q, q < kept, ACC, SPL, KEPT)
    _write(out_ptr + q, _quotient(spread, divisor, ACC), q < kept)
