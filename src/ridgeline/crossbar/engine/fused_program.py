"""Programming on a GPU: two launches from weights to cells, one more to the layout the fused engine multiplies; see cells.py and noise.py.

    w (groups, K, N) ──array_maxima──> bits of max |w| of every array ──program_cells──> planes, step, values as `program` makes them
    planes, step ──pack_cells──> levels (groups, slices, arrays, N', R), step * unit (groups, arrays, N') for multiply_arrays

    q        v / max * (2^(B-1) - 1), decided in float64 with plain torch's order of operations: no digit, value or step differs by a bit
    words    Philox as everywhere; which cells are stuck is decided on them as integers
    levels   float32: level + (level + low) * sigma * z has no cancellation; within 1e-6 of the float64 of cells.py

A block with a weight that is not finite gets nan for its steps and values, so that no product or gradient of it looks like a number, and
`flag` is set (finite.py says who looks at it). Rows of the last array beyond K, and N' and R beyond what holds weights, are written as 0.
`takes` names what is left to plain torch: resistive wires, weights that are not float32, more than 24 bits, more than 4096 levels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...kernel.jit import cdiv, empty, jit, launch, next_power_of_2, tl
from .. import noise
from ..cells import Cells, disturbance_of, read_sigmas_of, step_factor, stored_dtype
from ..finite import WeightCheck, not_finite
from ..plan import Draw, Plan
from ..tiling import plan as plan_tiles
from .fused_noise import _cosine_sine, _philox, _radius

MOST_BITS, MOST_LEVELS = 24, 4096  # digits, and twice their product with a level, fit int32
NOT_FINITE = tl.constexpr(0x7F800000)
KINDS = {"twos": 0, "magnitude": 1, "offset": 2}
MAXIMA_TILE, CELL_TILE, PACK_TILE = (32, 64), (16, 32), (64, 32)  # rows and columns


@jit
def array_maxima(  # type: ignore[no-untyped-def]
    weight, maxima, k, n, sg, sk, sn, arrays, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (groups * arrays * across): int32, the bits of an array's largest |w|, where nan is above inf and inf above all others."""
    place = tl.program_id(0)
    group, array, tile = (place // across // arrays).to(tl.int64), place // across % arrays, place % across
    found = tl.zeros((BLOCK_K, BLOCK_N), tl.int32)
    for first_row in range(0, ROWS, BLOCK_K):
        row = first_row + tl.arange(0, BLOCK_K)
        for first_column in range(0, COLUMNS, BLOCK_N):
            column = first_column + tl.arange(0, BLOCK_N)
            at_k, at_n = (array * ROWS + row).to(tl.int64), (tile * COLUMNS + column).to(tl.int64)
            inside = ((row < ROWS) & (at_k < k))[:, None] & ((column < COLUMNS) & (at_n < n))[None, :]
            value = tl.load(weight + group * sg + at_k[:, None] * sk + at_n[None, :] * sn, mask=inside, other=0.0)
            found = tl.maximum(found, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(maxima + place, tl.max(tl.max(found, 0), 0))


@jit
def _block_maximum(maxima, group, array, tile, arrays, across, down, wide, SPREAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the block of down x wide arrays that this one lies in: bits, int32."""
    found = tl.zeros((SPREAD,), tl.int32)
    first_array, first_tile = array // down * down, tile // wide * wide
    for first in range(0, down * wide, SPREAD):
        place = first + tl.arange(0, SPREAD)
        a, c = first_array + place // wide, first_tile + place % wide
        inside = (place < down * wide) & (a < arrays) & (c < across)
        found = tl.maximum(found, tl.load(maxima + (group * arrays + a) * across + c, mask=inside, other=0))
    return tl.max(found, 0)


@jit
def _power_of_two(exponent):  # type: ignore[no-untyped-def]
    """float64, of an int64."""
    return ((exponent + 1023) << 52).to(tl.float64, bitcast=True)


@jit
def _nearest(wide):  # type: ignore[no-untyped-def]
    """float64 → int32, half to even. Only compared, never added to: the compiler would fuse the product before it and skip its rounding."""
    below = tl.floor(wide)
    half = below + 0.5
    whole = below.to(tl.int32)
    return whole + ((wide > half) | ((wide == half) & ((whole & 1) == 1))).to(tl.int32)


@jit
def _exponent(largest):  # type: ignore[no-untyped-def]
    """floor(log2(largest + 1e-10)), int64."""
    above = largest.to(tl.float64) + tl.full((), 1e-10, tl.float64)
    return (above.to(tl.int64, bitcast=True) >> 52) - 1023


@jit
def _quantised(v, largest, BITS: tl.constexpr, BFP: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """(q, step, value of each q): of float32 weights and their block's maximum; BITS of a two's complement that holds q."""
    most: tl.constexpr = (1 << (BITS - 1)) - 1
    if BFP:
        exponent = _exponent(largest)
        q = _nearest(v.to(tl.float64) * _power_of_two(BITS - 2 - exponent))
        q = tl.minimum(tl.maximum(q, -most - 1), most)
        if KIND == 1:  # a magnitude has no -2^B
            q = tl.maximum(q, -most)
        step = _power_of_two(exponent + 2 - BITS)
        value = q.to(tl.float64) * step
    else:
        scale = largest.to(tl.float64)
        q = _nearest(v.to(tl.float64) / tl.where(scale > 0.0, scale, scale * 0.0 + 1.0) * most)
        step = scale / most
        value = q.to(tl.float64) / most * scale
    return q, step, value


@jit
def _level(  # type: ignore[no-untyped-def]
    q, SHIFTS: tl.constexpr, MOSTS: tl.constexpr, TOP: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, SLICES: tl.constexpr
):
    """int32, >= 0: the level of q's digit in the slice of this program, round(digit / most * TOP); of a magnitude that of |q|."""
    if KIND == 1:
        pattern = tl.abs(q)
    elif KIND == 2:
        pattern = q + (1 << (BITS - 1))
    else:
        pattern = q & ((1 << BITS) - 1)
    level = pattern * 0
    for j in tl.static_range(SLICES):
        digit = (pattern >> SHIFTS[j]) & MOSTS[j]
        level = tl.where(tl.program_id(1) == j, (2 * digit * TOP + MOSTS[j]) // (2 * MOSTS[j]), level)
    return level


@jit
def _disturbed(  # type: ignore[no-untyped-def]
    level, cell, sigmas, inside, low, drift, drift_spread, kept, stuck_high, stuck, layer_kind, seed, chip,
    TOP: tl.constexpr, VARIED: tl.constexpr, STUCK: tl.constexpr, DRIFTS: tl.constexpr, SPREADS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """What is really programmed: int32 where cells are at most stuck, else float32. cell: int64 numbers of the cells; see cells.py."""
    held = level
    if not WHOLE:
        held = level.to(tl.float32)
    factor = held
    if VARIED or STUCK or SPREADS:
        first, second, third, _ = _philox(cell, layer_kind, 0, seed, chip)
        if VARIED or SPREADS:
            cosine, sine = _cosine_sine(second)
            radius = _radius(first)
            if VARIED:
                held += (held + low) * (tl.load(sigmas + level, mask=inside, other=0.0) * (radius * cosine))
            if SPREADS:
                factor = tl.exp(drift + drift_spread * (radius * sine))
        if STUCK:
            u = (third >> 8).to(tl.int32)
            held = tl.where(u < stuck_high, TOP, tl.where(u < stuck, 0, held))
    if DRIFTS:
        if not SPREADS:
            factor = tl.exp(held * 0.0 + drift)
        held = held * factor + low * (factor - 1.0)
    if not WHOLE:
        held = held * kept
    return held


@jit
def program_cells(  # type: ignore[no-untyped-def]
    weight, maxima, sigmas, planes, step_out, values, flag, k, n, sg, sk, sn, arrays, across, down, wide, cells, plane,
    low, drift, drift_spread, kept, stuck_high, stuck, layer_kind, seed, chip,
    SHIFTS: tl.constexpr, MOSTS: tl.constexpr, TOP: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr, BFP: tl.constexpr,
    KIND: tl.constexpr, VARIED: tl.constexpr, STUCK: tl.constexpr, DRIFTS: tl.constexpr, SPREADS: tl.constexpr, WHOLE: tl.constexpr,
    SLICES: tl.constexpr, PLANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPREAD: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (groups * arrays * across * tiles of an array, slices).

    planes (1 or 2, groups, slices, K', N); step (groups, arrays, N), float64; values (groups, N, K).
    cells, plane: numbers of one plane's cells without and with the rows that fill K up. down, wide: arrays of a block.
    """
    blocks_k: tl.constexpr = (ROWS + BLOCK_K - 1) // BLOCK_K
    blocks_n: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    part, place = tl.program_id(0) % (blocks_k * blocks_n), tl.program_id(0) // (blocks_k * blocks_n)
    group, array, tile = (place // across // arrays).to(tl.int64), place // across % arrays, place % across
    row = (part // blocks_n) * BLOCK_K + tl.arange(0, BLOCK_K)
    column = (part % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    at_k, at_n = (array * ROWS + row).to(tl.int64), (tile * COLUMNS + column).to(tl.int64)
    columns = (column < COLUMNS) & (at_n < n)
    inside = ((row < ROWS) & (at_k < k))[:, None] & columns[None, :]
    bits = _block_maximum(maxima, group, array, tile, arrays, across, down, wide, SPREAD)
    sound = bits < NOT_FINITE
    largest = tl.where(sound, bits, 0).to(tl.float32, bitcast=True)
    v = tl.load(weight + group * sg + at_k[:, None] * sk + at_n[None, :] * sn, mask=inside, other=0.0)
    q, step, value = _quantised(tl.where(sound, v, 0.0), largest, SPAN, BFP, KIND)
    nan = (bits * 0 + 0x7FC00000).to(tl.float32, bitcast=True)
    if tl.program_id(1) == 0:
        to = (group * n + at_n)[None, :] * k + at_k[:, None]
        tl.store(values + to, tl.where(sound, value.to(tl.float32), nan), mask=inside)
        if part < blocks_n:
            tl.store(step_out + (group * arrays + array) * n + at_n, tl.where(sound, step, nan) + at_n * 0, mask=columns)
            tl.store(flag, 1, mask=bits >= NOT_FINITE)
    level = _level(q, SHIFTS, MOSTS, TOP, BITS, KIND, SLICES)
    over = group * SLICES + tl.program_id(1)
    cell = (over * k + at_k[:, None]) * n + at_n[None, :]
    at = (over * (arrays * ROWS) + at_k[:, None]) * n + at_n[None, :]
    held_rows = (row < ROWS)[:, None] & columns[None, :]
    for sign in tl.static_range(PLANES):
        mine = level
        if KIND == 1:
            mine = tl.where(q < 0, level * sign, level * (1 - sign))
        held = _disturbed(
            mine, cell + sign * cells, sigmas, inside, low, drift, drift_spread, kept, stuck_high, stuck, layer_kind, seed, chip,
            TOP, VARIED, STUCK, DRIFTS, SPREADS, WHOLE,
        )  # fmt: skip
        tl.store(planes + sign * plane + at, tl.where(inside, held, 0).to(planes.dtype.element_ty), mask=held_rows)


@jit
def pack_cells(  # type: ignore[no-untyped-def]
    planes, step_in, levels, step_out, n, arrays, plane, n_padded, UNIT: tl.constexpr, WORTHS: tl.constexpr, EACH: tl.constexpr,
    PAIR: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (groups * PARTS * arrays * tiles of N' x R): cells lie along columns and are multiplied along rows.

    EACH slices, counted WORTHS times, are added up to one of the PARTS of a group: all of a collapsed product, else one. PAIR: plane 0 - 1.
    """
    tiles = (n_padded + BLOCK_N - 1) // BLOCK_N * (R // BLOCK_R)
    over, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    part, array = (over // arrays).to(tl.int64), over % arrays
    row = tile % (R // BLOCK_R) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tile // (R // BLOCK_R) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row < ROWS)[:, None] & (column < n)[None, :]
    found = tl.zeros((BLOCK_R, BLOCK_N), tl.int32 if WHOLE else tl.float32)
    for j in tl.static_range(EACH):
        at = planes + (((part * EACH + j) * arrays + array) * ROWS + row[:, None]) * n + column[None, :]
        held = tl.load(at, mask=inside, other=0).to(found.dtype)
        if PAIR:
            held -= tl.load(at + plane, mask=inside, other=0).to(found.dtype)
        found += held * WORTHS[j]
    to = levels + (over.to(tl.int64) * n_padded + column[None, :]) * R + row[:, None]
    tl.store(to, found.to(levels.dtype.element_ty), mask=(row < R)[:, None] & (column < n_padded)[None, :])
    if (part % PARTS == 0) & (tile % (R // BLOCK_R) == 0):
        across = (part // PARTS) * arrays + array
        step = tl.load(step_in + across * n + column, mask=column < n, other=0.0) * tl.full((BLOCK_N,), UNIT, tl.float64)
        tl.store(step_out + across * n_padded + column, step.to(tl.float32), mask=column < n_padded)


@dataclass(frozen=True, slots=True)
class Shape:
    """What programming a plan launches: found once a plan."""

    down: int
    """Arrays along K of a block that shares a scale; `wide`: along N."""
    wide: int
    across: int
    """Arrays along N."""
    varies: bool
    """Whether levels leave the whole numbers."""
    factor: float
    """Of `step`; see cells.py."""
    numbers: tuple[Any, ...]
    """Arguments of program_cells from `low` to `stuck`."""
    constants: dict[str, Any]


@lru_cache(maxsize=4096)
def shape_of(plan: Plan) -> Shape | None:
    """None: plain torch programs such a plan."""
    chip, cell, slices = plan.chip, plan.chip.cell, plan.w
    if cell.line_resistance_ohm.value > 0 or slices.span > MOST_BITS or cell.levels > MOST_LEVELS or not plan.k * plan.n * plan.groups:
        return None
    tiling = plan_tiles((plan.k, plan.n), (plan.rows, chip.array.columns), chip.operands.w_granularity)
    columns = min(chip.array.columns, plan.n)
    across = cdiv(plan.n, columns)
    down, wide = min(tiling.block[0] // plan.rows, plan.arrays), min(tiling.block[1] // chip.array.columns, across)
    found = disturbance_of(plan)
    below = [math.ceil(share * 2.0**24) for share in (found.stuck_high, found.stuck)]
    constants = {
        "SHIFTS": slices.shifts, "MOSTS": slices.largest, "TOP": cell.levels - 1, "BITS": slices.bits, "SPAN": slices.span,
        "BFP": chip.operands.format == "bfp", "KIND": KINDS[slices.kind], "VARIED": any(cell.write_sigmas), "STUCK": found.stuck > 0,
        "DRIFTS": found.drifts, "SPREADS": found.drift_spread != 0, "WHOLE": not found.varies, "SLICES": len(slices.widths),
        "PLANES": 1 + plan.signed, "ROWS": plan.rows, "COLUMNS": columns, "SPREAD": min(128, next_power_of_2(down * wide)),
        "BLOCK_K": min(CELL_TILE[0], next_power_of_2(plan.rows)), "BLOCK_N": min(CELL_TILE[1], next_power_of_2(columns)),
    }  # fmt: skip
    numbers = (found.low, found.drift, found.drift_spread, found.kept, *below)
    return Shape(down, wide, across, found.varies, step_factor(plan), numbers, constants)


def takes(matrix: Tensor, plan: Plan) -> bool:
    """Whether these kernels program it."""
    return matrix.dtype == torch.float32 and shape_of(plan) is not None


def programmed(matrix: Tensor, plan: Plan, draw: Draw, check: WeightCheck | None) -> Cells:
    """matrix (groups, K, N), any strides → the Cells of `program`. Without a `check` the host waits to see whether weights are finite."""
    shape, device, slices = shape_of(plan), matrix.device, len(plan.w.widths)
    assert shape is not None
    stream, _ = noise.stream_of(draw, noise.Kind.PROGRAM)
    if check is not None:
        check.look(device)
    k, n, arrays, across = plan.k, plan.n, plan.arrays, shape.across
    maxima = empty((plan.groups, arrays, across), torch.int32, device)
    dtype = torch.float32 if shape.varies else stored_dtype(plan)
    planes = empty((1 + plan.signed, plan.groups, slices, arrays * plan.rows, n), dtype, device)
    step = empty((plan.groups, arrays, n), torch.float64, device)
    values = empty((plan.groups, n, k), torch.float32, device)
    flag = torch.zeros(1, dtype=torch.int32, device=device) if check is None else check.flag(device)
    rows, columns = min(plan.rows, k), shape.constants["COLUMNS"]
    launch(
        array_maxima, (plan.groups * arrays * across,), matrix, maxima, k, n, *matrix.stride(), arrays, across, ROWS=rows, COLUMNS=columns,
        BLOCK_K=min(MAXIMA_TILE[0], next_power_of_2(rows)), BLOCK_N=min(MAXIMA_TILE[1], next_power_of_2(columns)),
    )  # fmt: skip
    tiles = cdiv(plan.rows, shape.constants["BLOCK_K"]) * cdiv(columns, shape.constants["BLOCK_N"])
    cells = plan.groups * slices * n
    launch(
        program_cells, (plan.groups * arrays * across * tiles, slices),
        matrix, maxima, of_levels(plan.chip.cell.write_sigmas, device), planes, step, values, flag,
        k, n, *matrix.stride(), arrays, across, shape.down, shape.wide, cells * k, cells * arrays * plan.rows,
        *shape.numbers, stream, draw.seed, draw.chip, **shape.constants,
    )  # fmt: skip
    if shape.factor != 1.0:
        step.mul_(shape.factor)
    if check is not None:
        check.written()
    elif bool(flag):
        raise not_finite()
    return Cells(planes, step, values.transpose(1, 2), not shape.varies, read_sigmas_of(plan))


def pack(plan: Plan, cells: Cells, levels: Tensor, step: Tensor, unit: float, worths: tuple[int, ...] = ()) -> None:
    """Cells → levels (groups * slices, arrays, N', R) and step (groups, arrays, N'); `worths`: of slices that are added up to one."""
    each, padded, r = max(1, len(worths)), levels.shape[2], levels.shape[3]
    parts = len(plan.w.widths) // each
    plane = cells.planes.numel() // (1 + plan.signed)
    rows, columns = min(PACK_TILE[0], r), min(PACK_TILE[1], padded)
    launch(
        pack_cells, (plan.groups * parts * plan.arrays * (r // rows) * cdiv(padded, columns),), cells.planes, cells.step, levels, step,
        plan.n, plan.arrays, plane, padded, UNIT=unit, WORTHS=worths or (1,), EACH=each, PAIR=plan.signed,
        WHOLE=cells.exact, PARTS=parts, ROWS=plan.rows, R=r, BLOCK_R=rows, BLOCK_N=columns,
    )  # fmt: skip


@lru_cache(maxsize=256)
def of_levels(sigmas: tuple[float, ...], device: torch.device) -> Tensor:
    """float32: the sigma of each level, copied to the device once."""
    return torch.tensor(sigmas, dtype=torch.float32, device=device)
