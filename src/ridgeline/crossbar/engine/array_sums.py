"""What some arrays of a piece of inputs add to its outputs: the inner part of the blocked engine.

q (groups, arrays, rows, M') ──levels, packing──> X ──dots with each slice of w──> T ──sums apart──> total * scale, round, clip
  ──> code * worth, added up ──step_x * step_w──> total (groups, N, M') +=
Conversion   one slice pair's ADC as floats, exact as packing.py says
Job          one piece; Call what all pieces of a call share
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..adc import AddedInTurn, voltage_factor
from ..numbers import block_scale, step_of, whole_numbers
from ..plan import Draw, Plan, Window
from .packing import BITS, Packing, collapsed_weights, is_power_of_two

OFFSET = -1


@dataclass(slots=True)
class Call:
    """What one call's pieces share."""

    plan: Plan
    draw: Draw
    levels: Tensor
    step: Tensor
    """(groups, arrays, N) in the dtype of outputs."""
    window: Window
    whole: bool
    negative: bool
    """Whether any input is."""
    made: dict[tuple[Any, ...], Made]
    record: Tensor | None = None
    """Codes (B, arrays, Sx, Sw, M, N), for tests."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Of one slice pair, in floats: code = round(sum * times / over + shift), each code worth so much."""

    times: float
    over: float
    shift: float
    rounds: bool
    worth: float


@dataclass(frozen=True, slots=True)
class Made:
    """What follows from a plan and a packing."""

    packing: Packing
    conversions: dict[tuple[int, int], Conversion]
    """By (i, j); (i, OFFSET) is the offset column's, read by the ADC of slice 0."""
    weights: list[dict[int, int]]
    """For each dot what a level of a slice of x counts."""
    uptos: list[dict[int, int]] | None
    """A shorter way to the same inputs: for each dot how often floor(q / 2^shift_i) counts."""


def made_of(plan: Plan, packing: Packing) -> Made:
    chip, found = plan.chip, {}
    noisy = not packing.whole or chip.adc.noise_lsb.value > 0 or chip.adc.offset_lsb.value > 0
    a_sum = plan.offset_worth / Fraction((chip.dac.levels - 1) * (chip.cell.levels - 1))
    slices = [i for one in packing.packs for i, _ in one]
    for i, j in product(slices, range(OFFSET, len(plan.w.widths))):
        scale = packing.scale(plan, i, max(j, 0)) if packing.whole else plan.scale(max(j, 0))
        worth = plan.worth(i, j) if j >= 0 else -a_sum * plan.x.largest[i] * plan.x.weights[i] / plan.scale(0)
        divides = packing.whole and not is_power_of_two(scale.denominator)
        times, over = (scale.numerator, scale.denominator) if divides else (scale, 1)
        rounds = noisy or scale.denominator > 1
        shift = float(plan.shift(max(j, 0))) if rounds else 0.0
        found[i, j] = Conversion(float(times), float(over), shift, rounds, float(worth))
    weights = [dict(one) for one in packing.packs]
    if packing.collapsed:
        worths = collapsed_weights(plan, packing.units)[0]
        weights = [{i: worths[i] for i in slices}]
    uptos = _uptos(plan, weights, 1 << BITS[packing.dtype]) if packing.whole and all(packing.units[i] for i in slices) else None
    return Made(packing, found, weights, uptos)


def _uptos(plan: Plan, weights: list[dict[int, int]], limit: int) -> list[dict[int, int]] | None:
    """Level i is upto_i - 2^width_i * upto_(i-1), where upto_i = floor(q / 2^shift_i); None where a sum of these would pass the limit."""
    widths, found = plan.x.widths, []
    for one in weights:
        often = {i: one.get(i, 0) - (one.get(i + 1, 0) << widths[i + 1] if i + 1 < len(widths) else 0) for i in range(len(widths))}
        if 0 in one and plan.x.kind == "twos":
            often[0] -= 2 * one[0]  # the floor of a negative number is -1
        if not any(0 in each for each in weights):
            del often[0]  # no input is negative
        if sum(abs(times) << sum(widths[: i + 1]) for i, times in often.items()) >= limit:
            return None
        found.append({i: times for i, times in often.items() if times})
    return found


@dataclass(slots=True)
class Job:
    """The arrays of one piece."""

    call: Call
    made: Made
    compute: str
    rows: Tensor
    """image * M + m of every position."""
    block: int

    @property
    def packing(self) -> Packing:
        return self.made.packing

    @property
    def noisy(self) -> bool:
        adc = self.call.plan.chip.adc
        return adc.noise_lsb.value > 0 or adc.offset_lsb.value > 0

    def add(self, total: Tensor, v: Tensor, maximum: Tensor, groups: slice, arrays: slice) -> None:
        """total (groups, N, M') += what these arrays of these groups give."""
        plan, packing = self.call.plan, self.packing
        rows, number = used_rows(plan), arrays.stop - arrays.start
        part = v[groups, arrays.start * rows : arrays.stop * rows].unflatten(1, (number, rows))  # (g, a, rows, M')
        most = maximum[groups, arrays]
        q = plan.x.held(whole_numbers(part, most[:, :, None], plan.x.span, plan.chip.operands.format, packing.dtype))
        step = step_of(block_scale(most.double(), plan.chip.operands.format), plan.x.span, plan.chip.operands.format).to(total.dtype)
        inputs = self._inputs(q, groups, arrays)
        for n in ranges_of(plan.n, max(1, self.block // max(q.shape[0] * number * q.shape[-1], 1))):
            added = self._collapsed(inputs[0], groups, arrays, n) if packing.collapsed else self._pairs(inputs, groups, arrays, n)
            scaled = added.to(total.dtype).mul_(step[:, :, None]).mul_(self.call.step[groups, arrays, n, None])
            total[groups, n] += scaled.sum(1)

    def _inputs(self, q: Tensor, groups: slice, arrays: slice) -> list[Tensor]:
        """What is multiplied, one for each dot: (g * a, rows, M')."""
        plan, packing = self.call.plan, self.packing
        if self.made.uptos:
            return [found.flatten(0, 1) for found in _added_up(q, plan, self.made.uptos)]
        found: dict[int, Tensor] = {}
        for i, level in _levels(q, plan, packing.units):
            for place, weights in enumerate(self.made.weights):
                if i not in weights:
                    continue
                if not packing.whole:
                    level = self._disturbed(level * max(packing.units[i], 1), i, groups, arrays)
                found[place] = found[place].add_(level, alpha=weights[i]) if place in found else level * weights[i]
        return [found[place].flatten(0, 1) for place in sorted(found)]

    def _disturbed(self, level: Tensor, i: int, groups: slice, arrays: slice) -> Tensor:
        plan, rows, device = self.call.plan, used_rows(self.call.plan), level.device
        k = torch.arange(arrays.start * rows, arrays.stop * rows, device=device).view(1, -1, rows, 1)
        group = torch.arange(groups.start, groups.stop, device=device).view(-1, 1, 1, 1)
        factor = voltage_factor(plan, self.call.draw, self.rows, group * plan.k + k, i)
        return level if factor is None else level.mul_(factor.to(level.dtype))

    def _weight(self, groups: slice, j: int, arrays: slice, n: slice) -> Tensor:
        """(g * a, N, rows), a view: levels of weight slice j."""
        rows = used_rows(self.call.plan)
        taken = self.call.levels[groups, j, arrays.start * rows : arrays.stop * rows, n].to(self.packing.dtype)
        return taken.reshape(-1, rows, n.stop - n.start).transpose(1, 2)

    def _dot(self, w: Tensor, x: Tensor, out: Tensor) -> Tensor:
        if self.compute in ("float32", "tf32") or not self.packing.whole:
            return torch.bmm(w, x, out=out)
        narrow = {"float16": torch.float16, "bfloat16": torch.bfloat16, "integer": torch.int32}[self.compute]
        return out.copy_(torch.bmm(w.to(narrow), x.to(narrow)))

    def _collapsed(self, x: Tensor, groups: slice, arrays: slice, n: slice) -> Tensor:
        plan, packing = self.call.plan, self.packing
        _, weights, off, worth = collapsed_weights(plan, packing.units)
        w = self._weight(groups, 0, arrays, n) * weights[0]
        for j in range(1, len(weights)):
            w = w.add_(self._weight(groups, j, arrays, n), alpha=weights[j])
        return self._by_group(torch.bmm(w.sub_(off), x).mul_(float(worth)), groups)

    def _pairs(self, inputs: list[Tensor], groups: slice, arrays: slice, n: slice) -> Tensor:
        """sum over slice pairs of code * worth: (g, a, N, M')."""
        plan, x = self.call.plan, inputs[0]
        shape = (x.shape[0], n.stop - n.start, x.shape[-1])
        t, apart, added = (torch.empty(shape, dtype=x.dtype, device=x.device) for _ in range(3))
        first, noise = True, self._noise(groups, arrays, n)
        for j in range(len(plan.w.widths)):
            w = self._weight(groups, j, arrays, n)
            for one, taken in zip(self.packing.packs, inputs, strict=True):
                for i, sums in self._apart(one, self._dot(w, taken, t), apart):
                    codes, worth = self._convert(sums, i, j, (groups, arrays, n), noise), self.made.conversions[i, j].worth
                    added = torch.mul(codes, worth, out=added) if first else added.add_(codes, alpha=worth)
                    first = False
        if plan.w.kind == "offset":
            added += self._offset_column(inputs)
        return self._by_group(added, groups)

    @staticmethod
    def _by_group(sums: Tensor, groups: slice) -> Tensor:
        """(g * a, N, M') → (g, a, N, M')."""
        return sums.view(groups.stop - groups.start, -1, *sums.shape[1:])

    def _offset_column(self, inputs: list[Tensor]) -> Tensor:
        """(g * a, 1, M'): what the column of highest cells says the inputs sum to, times the offset, to be taken off."""
        top = self.call.plan.chip.cell.levels - 1
        said = torch.zeros((inputs[0].shape[0], 1, inputs[0].shape[-1]), dtype=inputs[0].dtype, device=inputs[0].device)
        for one, taken in zip(self.packing.packs, inputs, strict=True):
            t = taken.sum(1, keepdim=True) * top
            for i, sums in self._apart(one, t, torch.empty_like(t)):
                said.add_(self._convert(sums, i, OFFSET, None), alpha=self.made.conversions[i, OFFSET].worth)
        return said

    def _apart(self, packed: tuple[tuple[int, int], ...], t: Tensor, buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The sums of each slice in t; each may be overwritten before the next is asked for."""
        for i, radix in packed:
            if radix == 1:
                yield i, t
                return
            # The quotient's one rounding cannot reach the next whole number while t is exact.
            # By a tensor: a CUDA tensor divided by a number is multiplied by its reciprocal.
            by, signed = torch.full((), radix, dtype=t.dtype, device=t.device), self.call.plan.signed
            high = torch.div(t, by, rounding_mode=None if signed else "trunc", out=buffer)
            high = high.round_() if signed else high
            t.sub_(high, alpha=radix)
            yield i, high

    def _convert(
        self, sums: Tensor, i: int, j: int, where: tuple[slice, slice, slice] | None = None, noise: AddedInTurn | None = None
    ) -> Tensor:
        """Column sums → codes, in place; `where` they stand, or None for the offset column, which has no noise."""
        plan, how = self.call.plan, self.made.conversions[i, j]
        if how.times != 1:
            sums.mul_(how.times)
        if how.over != 1:
            sums.div_(how.over)
        if how.shift != 0:
            sums.add_(how.shift)
        if where is not None and noise is not None:
            groups, arrays, n = where
            added = noise.of(i, j, self.packing.dtype)
            assert added is not None
            sums.view(groups.stop - groups.start, arrays.stop - arrays.start, n.stop - n.start, len(self.rows)).add_(added)
        if how.rounds:
            sums.round_()
        if plan.chip.adc.clip:
            sums.clamp_(*plan.code_bounds(max(j, 0)))
        if self.call.record is not None and where is not None:
            self._note(sums, i, j, where)
        return sums

    def _noise(self, groups: slice, arrays: slice, n: slice) -> AddedInTurn | None:
        """Noise and offset of these conversions [LSB], which broadcast to (g, a, N, M')."""
        if not self.noisy:
            return None
        plan, device = self.call.plan, self.rows.device
        array = torch.arange(arrays.start, arrays.stop, device=device).view(-1, 1, 1)
        group = torch.arange(groups.start, groups.stop, device=device).view(-1, 1, 1, 1)
        column = group * plan.n + torch.arange(n.start, n.stop, device=device)[:, None]
        return AddedInTurn(plan, self.call.draw, self.rows, column, array)

    def _note(self, codes: Tensor, i: int, j: int, where: tuple[slice, slice, slice]) -> None:
        assert self.call.record is not None
        _, arrays, n = where
        m = self.call.record.shape[-2]
        image, position = self.rows // m, self.rows % m
        for place, array in enumerate(range(arrays.start, arrays.stop)):
            self.call.record[image, array, i, j, position, n] = codes[place].T.to(torch.int64)


def _added_up(q: Tensor, plan: Plan, uptos: list[dict[int, int]]) -> list[Tensor]:
    """For each dot the levels of whole numbers q, added up; q is overwritten."""
    sign = q.sign() if plan.x.kind == "magnitude" else None
    pattern = q.abs_() if sign is not None else q
    found: dict[int, Tensor] = {}
    for i, shift in enumerate(plan.x.shifts):
        wanted = [(place, often[i]) for place, often in enumerate(uptos) if i in often]
        upto = torch.mul(pattern, 2.0**-shift).floor_() if shift and wanted else pattern
        for place, often in wanted:
            found[place] = found[place].add_(upto, alpha=often) if place in found else upto * often
    return [found[place].mul_(sign) if sign is not None else found[place] for place in sorted(found)]


def _levels(q: Tensor, plan: Plan, units: tuple[int, ...]) -> Iterator[tuple[int, Tensor]]:
    """(slice, what the DAC is given for it) of whole numbers q, most significant first; in units, or in levels where a unit is 0."""
    slices, top = plan.x, plan.chip.dac.levels - 1
    magnitude = slices.kind == "magnitude"
    first = torch.neg if slices.kind == "twos" else torch.clone  # the floor of a negative number is -1
    pattern, above = q.abs() if magnitude else q, None
    for i, (shift, width, most) in enumerate(zip(slices.shifts, slices.widths, slices.largest, strict=True)):
        upto = torch.floor(pattern * 2.0**-shift) if shift else pattern
        level = first(upto) if above is None else torch.sub(upto, above, alpha=1 << width)
        if not units[i]:
            level.mul_(2 * top).add_(most).div_(2 * most).floor_()  # never a tie, as the largest digit is odd
        yield i, level.mul_(q.sign()) if magnitude else level
        above = upto


def used_rows(plan: Plan) -> int:
    """Rows of an array that are multiplied: an array alone need not be filled up with zeros."""
    return plan.rows if plan.arrays > 1 else plan.k


def padded_k(plan: Plan) -> int:
    return plan.arrays * used_rows(plan)


def ranges_of(count: int, most: int) -> Iterator[slice]:
    for start in range(0, count, most):
        yield slice(start, min(start + most, count))
