"""How slices of x go through the multiplier of a float without losing a bit.

    slices of x ──levels / unit──> whole numbers ──X = sum of R_i * level_i──> one dot for several slices ──T──> sums of each, apart again
      bound_i = rows * most_i * (cell levels - 1)     the largest column sum of slice i, in units
      R        of a slice: the product of (bound + 1) of those below it; with signed sums (2 * bound + 1)
      exact    while T and sum * numerator of scale stay below 2^24 (float32) or 2^53 (float64)
      code     total * scale: scale = p / 2^k is exact; else total * p / q, whose one rounding cannot reach a half that is not one

Three slices of (1, 2, 2) bits on 32 rows of 4-level cells fit one float32: 96 * 289^2 < 2^24. That is a third of the dots.
`collapsed`: where every scale is a whole number and nothing clips, codes say exactly the sums, and all slices are one product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch

from ..plan import Plan

BITS = {torch.float32: 24, torch.float64: 53}


@dataclass(frozen=True, slots=True)
class Packing:
    """Of the active slices of x, most significant first."""

    dtype: torch.dtype
    units: tuple[int, ...]
    """Of every slice: levels its digits are counted in; 0: the DAC has no level for each digit, levels are counted themselves."""
    packs: tuple[tuple[tuple[int, int], ...], ...]
    """(slice, R) of the slices in one dot, the highest R first."""
    whole: bool
    """Whether column sums are whole numbers."""
    collapsed: bool

    def scale(self, plan: Plan, i: int, j: int) -> Fraction:
        """Codes for each unit of a column sum of slices i and j."""
        return plan.scale(j) * max(self.units[i], 1)


def pack(plan: Plan, active: tuple[int, ...], *, whole: bool, wide: bool, apart: bool, collapse: bool) -> Packing | None:
    """None: not even float64 holds the sums. `wide`: float64 in any case; `apart`: each slice in a dot of its own."""
    top = plan.chip.dac.levels - 1
    units = tuple(top // most if top % most == 0 else 0 for most in plan.x.largest)
    if not whole:
        return Packing(torch.float64 if wide else torch.float32, units, tuple(((i, 1),) for i in active), False, False)
    bounds = column_bounds(plan, units)
    collapsed = collapse and not apart and loses_nothing(plan, units, bounds)
    for dtype in (torch.float64,) if wide else (torch.float32, torch.float64):
        limit = 1 << BITS[dtype]
        if (
            plan.x.span >= BITS[dtype]
            or (collapsed and _collapsed_bound(plan, units) >= limit)
            or not _converts(plan, units, bounds, limit)
        ):
            continue
        return Packing(dtype, units, _packs(active, bounds, plan.signed, 1 if apart else limit), True, collapsed)
    return None


def column_bounds(plan: Plan, units: tuple[int, ...]) -> tuple[int, ...]:
    """The largest column sum of each slice of x, in its units."""
    rows, dac, cell = min(plan.rows, plan.k), plan.chip.dac.levels - 1, plan.chip.cell.levels - 1
    return tuple(rows * (most if unit else dac) * cell for most, unit in zip(plan.x.largest, units, strict=True))


def loses_nothing(plan: Plan, units: tuple[int, ...], bounds: tuple[int, ...]) -> bool:
    """Whether every code says its column sum exactly: whole scales, no noise, and no sum that would be clipped."""
    adc, places = plan.chip.adc, range(len(plan.w.widths))
    if adc.noise_lsb.value or adc.offset_lsb.value or any(plan.scale(j).denominator > 1 for j in places):
        return False
    most = max(bound * max(unit, 1) for bound, unit in zip(bounds, units, strict=True))
    return not adc.clip or all(most * plan.scale(j) <= plan.code_bounds(j)[1] for j in places)


def collapsed_weights(plan: Plan, units: tuple[int, ...]) -> tuple[list[int], list[int], int, Fraction]:
    """What a level of each slice of x and of w counts in the one product, what is taken off w, and the worth of its result."""
    x = [max(unit, 1) * most * weight for unit, most, weight in zip(units, plan.x.largest, plan.x.weights, strict=True)]
    w = [most * weight for most, weight in zip(plan.w.largest, plan.w.weights, strict=True)]
    dac, cell = plan.chip.dac.levels - 1, plan.chip.cell.levels - 1
    off = plan.offset_worth * cell if plan.w.kind == "offset" else 0
    common_x, common_w = math.gcd(*x), math.gcd(*w, off)
    return [one // common_x for one in x], [one // common_w for one in w], off // common_w, Fraction(common_x * common_w, dac * cell)


def _collapsed_bound(plan: Plan, units: tuple[int, ...]) -> int:
    x, w, off, _ = collapsed_weights(plan, units)
    dac, cell = plan.chip.dac.levels - 1, plan.chip.cell.levels - 1
    most_x = sum(abs(one) * (most if unit else dac) for one, most, unit in zip(x, plan.x.largest, units, strict=True))
    return min(plan.rows, plan.k) * most_x * (sum(map(abs, w)) * cell + off)


def _converts(plan: Plan, units: tuple[int, ...], bounds: tuple[int, ...], limit: int) -> bool:
    for bound, unit in zip(bounds, units, strict=True):
        for j in range(len(plan.w.widths)):
            scale = plan.scale(j) * max(unit, 1)
            room = limit // 4 if plan.shift(j) else limit if is_power_of_two(scale.denominator) else limit // 2
            if bound * scale.numerator >= room:
                return False
    return True


def _packs(active: tuple[int, ...], bounds: tuple[int, ...], signed: bool, limit: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    packs: list[tuple[tuple[int, int], ...]] = []
    current: list[tuple[int, int]] = []
    radix = 1
    for i in reversed(active):
        if current and radix * bounds[i] + radix >= limit:
            packs.append(tuple(reversed(current)))
            current, radix = [], 1
        current.append((i, radix))
        radix *= (2 * bounds[i] if signed else bounds[i]) + 1
    packs.append(tuple(reversed(current)))
    return tuple(reversed(packs))


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
