"""Weights as they lie in the arrays' cells.

    w (groups, K, N) ──quantise, digits──> levels ──disturb──> Cells.planes: what was really programmed
    Cells.as_read(draw) ──> levels of this call, read variation included: (groups, slices, K', N)

A level is (G - low) / (high - low) * (cell levels - 1): whole numbers as long as nothing is disturbed, or cells are only stuck, then int8,
int16 or int32; else float32. K' is K filled with zeros to whole arrays: cells not in use, undisturbed. A pair has two planes; their
difference multiplies. G is disturbed in this order, each with the cell's own random numbers (noise.py), and nothing is clipped:

    write       G * (1 + sigma[level] * z)                       stuck      u < stuck_high: high; else u < stuck_high + stuck_low: low
    drift       G * (t / t0) ^ -(nu + nu_sigma * z2), t > t0     retention  low + (G - low) * exp(-t / tau)
    wires       what the column gets of it (wires.py)            read       G * exp(sigma[nearest level] * z), at each call

On a GPU engine/fused_program.py does all of it but the wires in two launches, with the same digits and random words.
Stuck cells drift and relax as the others do. Drift compensation multiplies `step`. With sign = "offset" the reference column follows the
mean drift and the retention of a high cell: planes are divided by its share, `step` is multiplied by it. It has no wires and no spread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernel.jit import HAVE_TRITON
from ..target.crossbar import Cell
from . import noise, wires
from .finite import WeightCheck, not_finite
from .noise import Kind
from .numbers import block_scale, dequantise, quantise, step_of
from .plan import Draw, Plan
from .tiling import plan as plan_tiles

PIECE_WEIGHTS = 1 << 18  # programmed at once: their slices as int64 and float64 are some tens of megabytes


@dataclass(frozen=True, slots=True)
class Cells:
    """Programmed weights of one product."""

    planes: Tensor
    """(planes, groups, slices, K', N) levels, each >= 0 before disturbance: one plane, or the two of a differential pair."""
    step: Tensor
    """float64 (groups, arrays, N): the value of q_w = 1."""
    values: Tensor
    """float32 (groups, K, N): the dequantised weights, for gradients."""
    exact: bool
    """Whether all levels are whole numbers."""
    read_sigmas: tuple[float, ...] = ()
    """Of each level, as the chip states; empty: reads do not vary."""

    def as_read(self, plan: Plan, draw: Draw) -> Tensor:
        """(groups, slices, K', N): signed levels as this call reads them; integers if exact and steady, else float32."""
        if not self.read_sigmas:
            return self.planes[0] - self.planes[1] if len(self.planes) == 2 else self.planes[0]
        flat = self.planes.flatten(1, 2)  # (planes, groups * slices, K', N)
        out = torch.zeros(flat.shape[1:], dtype=torch.float32, device=flat.device)
        for plane, programmed in enumerate(flat):
            for part, rows in _regions(programmed.shape[0], plan.k, plan.n, noise.piece_of(flat.device)):
                start = ((plane * len(programmed) + part.start) * plan.k + rows.start) * plan.n
                levels = programmed[part, rows].to(torch.float32)
                z = noise.normals(draw, Kind.READ, start, levels.numel(), flat.device, torch.float32).reshape(levels.shape)
                read = _read(levels, z, self.read_sigmas, low_level(plan))
                out[part, rows] += -read if plane else read
        return out.reshape(self.planes.shape[1:])


def low_level(plan: Plan) -> float:
    """The conductance of level 0, in levels: what is added to a level before it is disturbed, and taken off after."""
    return _low_level(plan.chip.cell) / _reference_share(plan)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What happens to every cell of a plan, as numbers: for kernels; the formulas are above."""

    varies: bool
    """Whether levels leave the whole numbers."""
    low: float
    stuck_high: float
    stuck: float
    """Share of cells that are stuck at all."""
    drifts: bool
    drift: float
    """Logarithm of what drift leaves of G, and what a normal of 1 adds to it."""
    drift_spread: float
    kept: float
    """Share of G - low that is left of relaxation, over that of the reference column."""


def disturbance_of(plan: Plan) -> Disturbance:
    cell = plan.chip.cell
    drifts = _time_ratio(cell) > 1.0 and _disturbs(cell)
    log_ratio = -math.log(_time_ratio(cell)) if drifts else 0.0
    stuck, kept = cell.stuck_high.value + cell.stuck_low.value, _kept(cell) / _reference_share(plan)
    drift = (drifts, log_ratio * cell.drift_nu.value, log_ratio * cell.drift_nu_sigma.value)
    return Disturbance(_disturbs(cell), _low_level(cell), cell.stuck_high.value, stuck, *drift, kept)


def stored_dtype(plan: Plan) -> torch.dtype:
    """Of levels that are whole numbers."""
    levels = plan.chip.cell.levels
    return torch.int8 if levels <= 128 else torch.int16 if levels <= 32768 else torch.int32


def read_sigmas_of(plan: Plan) -> tuple[float, ...]:
    """Of each level; empty: reads do not vary."""
    sigmas = plan.chip.cell.read_sigmas
    return sigmas if any(sigmas) else ()


def program(weight: Tensor, plan: Plan, draw: Draw, check: WeightCheck | None = None, *, by_kernel: bool | None = None) -> Cells:
    """weight (groups, K, N), float → what the chip holds.

    On a GPU by the kernels of engine/fused_program.py, where these can: `by_kernel` says so anywhere else, for Triton's interpreter.
    Weights that are not finite are an error, at once; with a `check` of training passes the kernels say it later (finite.py).
    """
    matrix = weight.detach()
    if on_gpu(matrix) if by_kernel is None else by_kernel:
        from .engine import fused_program

        if fused_program.takes(matrix, plan):
            return fused_program.programmed(matrix, plan, draw, check)
    return _programmed(matrix, plan, draw)


def on_gpu(matrix: Tensor) -> bool:
    return matrix.is_cuda and HAVE_TRITON


def _programmed(matrix: Tensor, plan: Plan, draw: Draw) -> Cells:
    """By plain torch."""
    chip, cell, slices = plan.chip, plan.chip.cell, plan.w
    if not bool(torch.isfinite(matrix).all()):
        raise not_finite()
    tiles = plan_tiles((plan.k, plan.n), (chip.array.rows, chip.array.columns), chip.operands.w_granularity)
    scale = block_scale(tiles.block_maximum(matrix).to(torch.float64), chip.operands.format)[:, : plan.arrays]  # (groups, arrays, N tiles)
    scale = scale.repeat_interleave(chip.array.columns, -1)[..., : plan.n]
    disturbed, stuck = _disturbs(cell), cell.stuck_high.value + cell.stuck_low.value > 0
    shape = (1 + plan.signed, plan.groups, len(slices.widths), plan.arrays * plan.rows, plan.n)
    planes = torch.zeros(shape, dtype=torch.float32 if disturbed else stored_dtype(plan), device=matrix.device)
    values = torch.empty(matrix.shape, dtype=torch.float32, device=matrix.device)
    for groups, columns in _pieces(plan):
        part = matrix[groups, :, columns].to(torch.float64)
        scales = scale[groups, :, columns].repeat_interleave(plan.rows, 1)[:, : plan.k]
        integers = slices.held(quantise(part, scales, slices.span, chip.operands.format))
        values[groups, :, columns] = dequantise(integers, scales, slices.span, chip.operands.format)
        levels = _levels(slices.digits(integers), slices.largest, cell.levels - 1)  # (groups, S, K, columns)
        for plane in range(len(planes)):
            held = levels if not plan.signed else (-levels if plane else levels).clamp(min=0)
            if disturbed or stuck:
                held = _disturb(held, _index(plan, plane, groups, columns, matrix.device), plan, draw)
            planes[plane, groups, :, : plan.k, columns] = held
    step = step_of(scale, slices.span, chip.operands.format) * step_factor(plan)
    return Cells(planes, step, values, not disturbed, read_sigmas_of(plan))


def _pieces(plan: Plan) -> Iterator[tuple[slice, slice]]:
    """(groups, columns), whole arrays each, of about PIECE_WEIGHTS weights."""
    array = plan.chip.array
    across = plan.n if plan.n <= array.columns else -(-plan.n // array.columns) * array.columns
    down = plan.k if plan.k <= array.rows else plan.arrays * array.rows
    groups_each = max(1, PIECE_WEIGHTS // (down * across))
    columns_each = max(1, PIECE_WEIGHTS // (down * array.columns)) * array.columns
    for group in range(0, plan.groups, groups_each):
        for column in range(0, plan.n, columns_each):
            yield slice(group, min(group + groups_each, plan.groups)), slice(column, min(column + columns_each, plan.n))


def _regions(parts: int, k: int, n: int, most: int) -> Iterator[tuple[slice, slice]]:
    """(parts, rows) of `parts` matrices of K x N, consecutive in memory: several whole ones, or rows of one."""
    parts_each, rows_each = max(1, most // (k * n)), max(1, most // n)
    for part in range(0, parts, parts_each):
        for row in range(0, k, k if parts_each > 1 else rows_each):
            rows = slice(0, k) if parts_each > 1 else slice(row, min(row + rows_each, k))
            yield slice(part, min(part + parts_each, parts)), rows


def _levels(digits: Tensor, largest: tuple[int, ...], top: int) -> Tensor:
    """(…, S, K, N) digits → round(digit / largest * top), of the digit's sign; never a tie, as the largest digit is odd."""
    most = torch.tensor(largest, device=digits.device)[:, None, None]
    if not any(top % each for each in largest):
        return digits * (top // most)
    return digits.sign() * torch.div(2 * digits.abs() * top + most, 2 * most, rounding_mode="floor")


def _index(plan: Plan, plane: int, groups: slice, columns: slice, device: torch.device) -> Tensor:
    """int64 (groups, S, K, columns): the cells' numbers; see noise.py."""
    slices = len(plan.w.widths)

    def count(start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, dtype=torch.int64, device=device)

    group = plane * plan.groups + count(groups.start, groups.stop)[:, None, None, None]
    row = (group * slices + count(0, slices)[:, None, None]) * plan.k + count(0, plan.k)[:, None]
    return row * plan.n + count(columns.start, columns.stop)


def _disturb(levels: Tensor, index: Tensor, plan: Plan, draw: Draw) -> Tensor:
    """int64 levels (groups, S, K, columns) of whole arrays → what is programmed, the same shape: float32, or int64 if only stuck."""
    cell = plan.chip.cell
    flat, numbers = levels.reshape(-1), index.reshape(-1)
    each = noise.piece_of(levels.device)
    parts = zip(flat.split(each), numbers.split(each), strict=True)
    if not _disturbs(cell):
        return torch.cat([_stuck(part, noise.cell_words(draw, number)[2], cell, 0.0) for part, number in parts]).reshape(levels.shape)
    out = torch.cat([_written(part, number, cell, draw).to(torch.float32) for part, number in parts]).reshape(levels.shape)
    if cell.line_resistance_ohm.value > 0:
        out = _through_wires(out, plan)
    return out.div_(_reference_share(plan))


def _written(levels: Tensor, index: Tensor, cell: Cell, draw: Draw) -> Tensor:
    """int64 levels (n,) → float64 (n,): write variation, stuck cells, drift, retention."""
    low, ratio = _low_level(cell), _time_ratio(cell)
    g = levels.to(torch.float64) + low
    stuck = cell.stuck_high.value + cell.stuck_low.value > 0
    varied, spread = any(cell.write_sigmas), ratio > 1.0 and cell.drift_nu_sigma.value > 0
    exponent: Tensor | float = cell.drift_nu.value
    if stuck or varied or spread:
        first, second, third, _ = noise.cell_words(draw, index)
        if varied or spread:
            write, drift = noise.cell_normals(first, second)
            g *= 1.0 + write * _of_level(cell.write_sigmas, levels, torch.float64)
            exponent = exponent + cell.drift_nu_sigma.value * drift if spread else exponent
        if stuck:
            g = _stuck(g, third, cell, low)
    if ratio > 1.0:
        g *= torch.exp(-math.log(ratio) * exponent) if isinstance(exponent, Tensor) else ratio**-exponent
    return (g - low) * _kept(cell)


def _stuck(g: Tensor, word: Tensor, cell: Cell, low: float) -> Tensor:
    u, high, either = noise.as_uniform(word), cell.stuck_high.value, cell.stuck_high.value + cell.stuck_low.value
    return torch.where(u < high, torch.full_like(g, cell.levels - 1 + low), torch.where(u < either, torch.full_like(g, low), g))


def _through_wires(levels: Tensor, plan: Plan) -> Tensor:
    """float32 (groups, S, K, columns): every array for itself. Cells not in use are not connected."""
    cell, array = plan.chip.cell, plan.chip.array
    siemens_a_level = (cell.high_s.value - cell.low_s.value) / (cell.levels - 1)
    k, n = levels.shape[-2:]
    rows, columns = min(k, array.rows), min(n, array.columns)  # of an array that is filled in part only the cells in use matter
    g = torch.nn.functional.pad((levels + _low_level(cell)) * siemens_a_level, (0, -n % columns, 0, -k % rows))
    tiles = g.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows)).transpose(-3, -2)  # (groups, S, K tiles, N tiles, rows, columns)
    got = wires.approximate(tiles.reshape(-1, rows, columns), cell.line_resistance_ohm.value).reshape(tiles.shape)
    return got.transpose(-3, -2).flatten(-4, -3).flatten(-2)[..., :k, :n] / siemens_a_level - _low_level(cell)


def _read(levels: Tensor, z: Tensor, sigmas: tuple[float, ...], low: float) -> Tensor:
    nearest = levels.round().clamp_(0, len(sigmas) - 1).to(torch.int32)
    return (levels + low) * z.mul_(_of_level(sigmas, nearest, torch.float32)).exp_() - low


def _of_level(sigmas: tuple[float, ...], levels: Tensor, dtype: torch.dtype) -> Tensor | float:
    """The sigma of each cell; one number where all levels share it."""
    if len(set(sigmas)) == 1:
        return sigmas[0]
    return torch.tensor(sigmas, dtype=dtype, device=levels.device)[levels]


def _disturbs(cell: Cell) -> bool:
    """Whether levels leave the whole numbers."""
    drifts = _time_ratio(cell) > 1.0 and cell.drift_nu.value + cell.drift_nu_sigma.value > 0
    return any(cell.write_sigmas) or drifts or _kept(cell) < 1.0 or cell.line_resistance_ohm.value > 0


def _low_level(cell: Cell) -> float:
    return cell.low_s.value / (cell.high_s.value - cell.low_s.value) * (cell.levels - 1)


def _time_ratio(cell: Cell) -> float:
    """t / t0; there is no drift up to 1."""
    return max(1.0, cell.drift_time_s.value / cell.drift_from_s.value)


def _kept(cell: Cell) -> float:
    """Share of G - low that is left of relaxation."""
    return 1.0 if cell.retention_s is None else math.exp(-cell.drift_time_s.value / cell.retention_s.value)


def _reference_share(plan: Plan) -> float:
    """What of its level the reference column of sign = "offset" has kept; 1 without such a column."""
    if plan.chip.operands.sign != "offset":
        return 1.0
    cell, low, top = plan.chip.cell, _low_level(plan.chip.cell), plan.chip.cell.levels - 1
    share = ((top + low) * _time_ratio(cell) ** -cell.drift_nu.value - low) * _kept(cell) / top
    return share if share > 0 else 1.0


def step_factor(plan: Plan) -> float:
    """What `step` is multiplied by: the reference column's share, and the mean drift where it is compensated."""
    compensation = _time_ratio(plan.chip.cell) ** plan.chip.cell.drift_nu.value if plan.chip.cell.drift_compensated else 1.0
    return _reference_share(plan) * compensation
