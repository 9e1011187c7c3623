"""Column sums to ADC codes: round half to even, decided on integers wherever there is no noise.

    sum of level_x * level_w ──convert_exact──> code = round_half_even(sum * (levels - 1) / full)            all integers
      full = rows * (DAC levels - 1) * (cell levels - 1): every row of the array at its highest, padding rows included
    current, reference [A] ──convert──> code = round(current / reference * (levels - 1))                     float64, for noisy cells
    total [levels], plan   ──to_codes──> the first of the two for any sign, range and clipping, or in float64 where something is added
    added_lsb, voltage_factor   noise and offset of the converters, by the counters of noise.py; AddedInTurn for all slice pairs in turn

The two are the same formula: reference = (high - low) * vread * rows, and a level is its share of vread or of (high - low).
With an even `full` and 2^n levels up to one conversion in a hundred lies exactly between two codes; a float would let its last bit
decide, differently in each dtype and order of summation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.errors import OptionError
from . import noise
from .plan import Draw, Plan

LARGEST_INTEGER = 2**62  # twice the largest numerator must fit int64


def full_scale(rows: int, dac_levels: int, cell_levels: int) -> int:
    """The largest column sum an array can give."""
    return rows * (dac_levels - 1) * (cell_levels - 1)


def round_half_even(numerator: Tensor, denominator: int) -> Tensor:
    """numerator / denominator (int64, > 0) to the nearest integer, ties to the even one; no float is involved."""
    above = 2 * numerator + denominator  # floor(n/d + 1/2) = floor((2n + d) / 2d)
    nearest = torch.div(above, 2 * denominator, rounding_mode="floor")
    return nearest - (_on_tie(above, denominator) & (nearest % 2 == 1)).to(torch.int64)


def is_tie(total: Tensor, levels: int, full: int) -> Tensor:
    """Which conversions lie exactly between two codes."""
    return _on_tie(2 * total * (levels - 1) + full, full)


def convert_exact(total: Tensor, levels: int, full: int) -> Tensor:
    """Column sums (int64) → codes (int64); sums of 0 … full give codes of 0 … levels - 1, so there is nothing to clip."""
    if total.dtype != torch.int64:
        raise OptionError(f"column sums in {total.dtype}", why="ties are decided on exact integers", do="give int64, or use convert()")
    if 2 * full * levels >= LARGEST_INTEGER:
        raise _too_large(full, levels)
    return round_half_even(total * (levels - 1), full)


def convert(current: Tensor, levels: int, reference: float, *, clip: bool = False) -> Tensor:
    """Column currents (float64) → codes (int64); `reference` is the current of the highest code."""
    codes = torch.round(current / reference * (levels - 1)).to(torch.int64)
    return codes.clamp(0, levels - 1) if clip else codes


def to_codes(total: Tensor, plan: Plan, j: int, added_lsb: Tensor | None = None) -> Tensor:
    """Column sums [levels] of weight slice j → codes (int64), clipped if the chip does.

    Whole sums without anything added are decided on integers.
    """
    scale = plan.scale(j)
    if total.dtype == torch.int64 and added_lsb is None:
        most = plan.full * scale.numerator
        if 2 * most >= LARGEST_INTEGER:
            raise _too_large(plan.full, plan.chip.adc_levels[j])
        codes = exact_codes(total, plan, j)
    else:
        exact = total.double() * scale.numerator / scale.denominator + float(plan.shift(j))
        codes = torch.round(exact if added_lsb is None else exact + added_lsb).to(torch.int64)
    return codes.clamp(*plan.code_bounds(j)) if plan.chip.adc.clip else codes


def exact_codes(total: Tensor, plan: Plan, j: int) -> Tensor:
    """Codes (int64, not clipped) of whole sums, decided on integers."""
    scale = plan.scale(j)
    if plan.shift(j):
        return torch.div(total * scale.numerator, scale.denominator, rounding_mode="floor")
    return round_half_even(total * scale.numerator, scale.denominator)


def check_ranges(plan: Plan) -> None:
    """A chip whose ADC ranges come from data needs the data first."""
    if plan.chip.adc.range == "calibrated" and not plan.ranges:
        raise OptionError('adc.range = "calibrated"', why="no ranges have been found yet", do="calibrate the model with data first")
    if plan.ranges and (len(plan.ranges) != len(plan.w.widths) or min(plan.ranges) < 1):
        why = f"there is one for each of the {len(plan.w.widths)} slices of w, a column sum of at least 1 level"
        raise OptionError(f"ADC ranges {list(plan.ranges)}", why=why, do="calibrate the model again")


def added_lsb(plan: Plan, draw: Draw, row: Tensor, column: Tensor, array: Tensor, i: int, j: int) -> Tensor | None:
    """Noise and offset of conversions [LSB], of the shape the three int64 indices have together; None: the ADC has neither.

    row = image * M + m, column = group * N + n, array along K.
    """
    sigma = plan.chip.adc.noise_lsb.value
    if sigma <= 0:
        return _offset_lsb(plan, draw, column, array, j)
    index = _conversion(plan, row, column, array) * numbers_of_conversion(plan) + j * len(plan.x.widths) + i
    return _sum(noise.normal(draw, noise.Kind.ADC, index) * sigma, _offset_lsb(plan, draw, column, array, j))


def numbers_of_conversion(plan: Plan) -> int:
    """Random numbers set aside for all slice pairs of one column and array: whole counters of four."""
    return -(-len(plan.x.widths) * len(plan.w.widths) // 4) * 4


class AddedInTurn:
    """added_lsb of the same conversions for one slice pair after another, j outer and i inner: a counter's four numbers are drawn once."""

    def __init__(self, plan: Plan, draw: Draw, row: Tensor, column: Tensor, array: Tensor) -> None:
        self.plan, self.draw, self.where = plan, draw, (row, column, array)
        self.drawn: tuple[int, Tensor] | None = None

    def of(self, i: int, j: int, dtype: torch.dtype = torch.float64) -> Tensor | None:
        plan, (row, column, array) = self.plan, self.where
        offset, sigma = _offset_lsb(plan, self.draw, column, array, j), plan.chip.adc.noise_lsb.value
        if sigma <= 0:
            return None if offset is None else offset.to(dtype)
        quad, number = divmod(j * len(plan.x.widths) + i, 4)
        if self.drawn is None or self.drawn[0] != quad:
            self.drawn = None  # the old numbers go before the new ones come
            counter = _conversion(plan, row, column, array) * (numbers_of_conversion(plan) // 4) + quad
            self.drawn = quad, noise.four_normals(self.draw, noise.Kind.ADC, counter, dtype).mul_(sigma)
        return _sum(self.drawn[1][number], None if offset is None else offset.to(dtype))


def _conversion(plan: Plan, row: Tensor, column: Tensor, array: Tensor) -> Tensor:
    return (row * (plan.groups * plan.n) + column) * plan.arrays + array


def _offset_lsb(plan: Plan, draw: Draw, column: Tensor, array: Tensor, j: int) -> Tensor | None:
    sigma = plan.chip.adc.offset_lsb.value
    if sigma <= 0:
        return None
    index = (array * (plan.groups * plan.n) + column) * len(plan.w.widths) + j
    return noise.normal(draw, noise.Kind.OFFSET, index) * sigma


def _sum(added: Tensor, offset: Tensor | None) -> Tensor:
    return added if offset is None else added + offset


def voltage_factor(plan: Plan, draw: Draw, row: Tensor, k: Tensor, i: int) -> Tensor | None:
    """What noise multiplies the voltages of input slice i by; k counts over all groups. None: the DAC has no noise."""
    sigma = plan.chip.dac.noise_sigma.value
    if sigma <= 0:
        return None
    index = (row * (plan.groups * plan.k) + k) * len(plan.x.widths) + i
    return 1 + sigma * noise.normal(draw, noise.Kind.DAC, index)


def _too_large(full: int, levels: int) -> OptionError:
    return OptionError(
        f"an array whose sums reach {full:,} read by an ADC of {levels:,} levels",
        why="their product does not fit 62 bits, so a tie could not be decided exactly",
        do="give fewer rows, DAC levels, cell levels or ADC levels",
    )


def _on_tie(above: Tensor, denominator: int) -> Tensor:
    return above % (2 * denominator) == 0
