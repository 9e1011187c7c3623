"""The ADC's range from data: how large column sums really get, for each product and each slice of its weights.

    batches ──model, its products digital──> x of every product ──digits x digits of the weight──> column sums ──> Histogram
      percentile p   the smallest range that holds p per cent of the sums; 100: all that were seen
      "mse"          the range whose rounding and clipping err least, a sum weighed by the square of what its input slice is worth
      widened        a range that fits into the codes becomes the next one with a whole number of codes a level: nothing is lost

Ranges are whole numbers of levels, at least 1. Of each product and batch `sums` column sums are looked at, from rows evenly spread over
the batch; sums of input slices that are all zero are left out. Cells are taken as perfect, and layers before a product as digital, so
ranges do not depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...core.errors import OptionError
from ...train.evaluate import device_of, scoring
from ..numbers import encode
from ..plan import Plan, Window
from .layers import products
from .observe import digital_product
from .product import CrossbarProduct
from .straight_through import as_matrix, input_block, patches_of, quantised, weight_as_matrices

MOST_BINS = 1 << 16
FEWEST_ROWS = 16
MOST_VALUES = 1 << 25  # of patches made at once: 128 MiB
CANDIDATES = 64
Rule = float | Literal["mse"]


@dataclass(slots=True)
class Histogram:
    """How often each column sum occurred."""

    plan: Plan
    counts: Tensor = field(init=False)
    """float64 (x slices, w slices, bins) of |sum| // width."""
    cells: Tensor | None = None
    """The levels of the weight seen last."""
    made_of: tuple[Tensor, int] | None = None
    """That weight and its version; held, so that no other lies at its address."""

    def __post_init__(self) -> None:
        bins = -(-(self.plan.full + 1) // self.width)
        self.counts = torch.zeros(len(self.plan.x.widths), len(self.plan.w.widths), bins, dtype=torch.float64)

    @property
    def width(self) -> int:
        """Levels in a bin: 1 unless arrays are very large."""
        return -(-(self.plan.full + 1) // MOST_BINS)

    def levels_of(self, weight: Tensor, plan: Plan) -> Tensor:
        """Made once for as long as the weight stays; of products of activations it is another one in every call."""
        version = -1 if weight.is_inference() else weight._version
        if self.cells is None or self.made_of is None or version < 0 or not _same(self.made_of, weight, version):
            self.cells, self.made_of = cell_levels(weight, plan), (weight, version)
        return self.cells

    def add(self, i: int, j: int, sums: Tensor) -> None:
        bins = (sums.abs() / self.width).to(torch.int32).clamp_(max=self.counts.shape[-1] - 1).flatten()  # float32 beyond 2^24 is not exact
        self.counts[i, j] += torch.bincount(bins, minlength=self.counts.shape[-1]).cpu()

    def ranges(self, rule: Rule) -> tuple[int, ...]:
        """One for each slice of w."""
        return tuple(self._range(j, rule) for j in range(self.counts.shape[1]))

    def _range(self, j: int, rule: Rule) -> int:
        counts = self.counts[:, j].sum(0)
        if not float(counts.sum()):
            return widened(1, self.plan, j)
        share = 1.0 if rule == "mse" else rule / 100
        place = int(torch.searchsorted(counts.cumsum(0), share * float(counts.sum()) * (1 - 1e-12)))
        largest = min(self.plan.full, (place + 1) * self.width - 1)
        if rule != "mse":
            return widened(largest, self.plan, j)
        candidates = {widened(max(1, round(largest * at / CANDIDATES)), self.plan, j) for at in range(1, CANDIDATES + 1)}
        return min(sorted(candidates), key=lambda one: self._error(j, one))

    def _error(self, j: int, limit: int) -> float:
        worth = torch.tensor([(most * weight) ** 2 for most, weight in zip(self.plan.x.largest, self.plan.x.weights, strict=True)])
        weighed = (self.counts[:, j] * worth[:, None]).sum(0)
        sums = torch.arange(len(weighed), dtype=torch.float64) * self.width
        ranged = Plan(self.plan.chip, self.plan.k, self.plan.n, self.plan.groups, (limit,) * self.counts.shape[1])
        codes = torch.round(sums * float(ranged.scale(j))).clamp(max=ranged.code_bounds(j)[1])
        return float((weighed * (sums - codes / float(ranged.scale(j))) ** 2).sum())


def _same(made_of: tuple[Tensor, int], weight: Tensor, version: int) -> bool:
    old, at = made_of
    return (old.data_ptr(), old.shape, old.stride(), at) == (weight.data_ptr(), weight.shape, weight.stride(), version)


def widened(limit: int, plan: Plan, j: int) -> int:
    """The next larger range with a whole number of codes a level, where there is one; `limit` itself where codes are too few."""
    limit, most = max(1, limit), plan.chip.adc_levels[j] - 1
    codes = most // 2 if plan.signed else most
    if limit > codes:
        return limit
    if plan.signed and most % 2:
        return codes  # 255 steps over both signs: no whole number of them is a level, and this is next to one
    return next(codes // parts for parts in range(codes // limit, 0, -1) if codes % parts == 0)


def calibrate_(model: nn.Module, batches: Iterable[Any], *, percentile: Rule = 100.0, sums: int = 1 << 22) -> dict[str, tuple[int, ...]]:
    """Set the ADC ranges of every product on a chip with adc.range = "calibrated"; returns them by name.

    batches: inputs of the model, a tensor or a tuple each (of a pair from a data loader only the inputs).
    """
    if percentile != "mse" and not 0 < percentile <= 100:
        raise OptionError(f"percentile = {percentile}", why="it is above 0 and at most 100", do='give e.g. 99.9, 100 or "mse"')
    chosen = {name: one for name, one in products(model).items() if one.chip.adc.range == "calibrated"}
    seen: dict[CrossbarProduct, Histogram] = {}
    before = {one: one.watch for one in products(model).values()}

    def look(product: CrossbarProduct, x: Tensor, weight: Tensor, plan: Plan, window: Window | None) -> Tensor:
        if product.chip.adc.range == "calibrated":
            observe(seen.setdefault(product, Histogram(plan)), x, weight, plan, window, sums)
        return digital_product(x, weight, window, plan.groups)

    count = 0
    try:
        for product in before:
            product.watch = look
        with scoring([model], device_of(model)):
            for batch in batches:
                model(*batch) if isinstance(batch, tuple) else model(batch)
                count += 1
    finally:
        for product, watch in before.items():
            product.watch = watch
    if not count:
        raise OptionError("no batches to calibrate with", why="the ADC's ranges come from data", do="give at least one batch of inputs")
    for product, histogram in seen.items():
        product.ranges = histogram.ranges(percentile)
    return {name: one.ranges for name, one in chosen.items() if one in seen}


def observe(histogram: Histogram, x: Tensor, weight: Tensor, plan: Plan, window: Window | None, sums: int) -> None:
    """Add the column sums of some rows of x."""
    cells = histogram.levels_of(weight, plan)
    a_row = plan.groups * plan.arrays * len(plan.x.widths) * len(plan.w.widths) * plan.n
    integers = sampled(x, plan, window, max(FEWEST_ROWS, sums // a_row))
    for i in range(len(plan.x.widths)):
        driven = row_levels(integers, i, plan)  # (groups, arrays, R, rows)
        if not bool(driven.any()):
            continue
        for j in range(len(plan.w.widths)):
            histogram.add(i, j, torch.matmul(driven, cells[:, :, j]))
        if plan.w.kind == "offset":  # the column that tells the sum of inputs has the first slice's ADC
            histogram.add(i, 0, driven.sum(-1) * (plan.chip.cell.levels - 1))


def sampled(x: Tensor, plan: Plan, window: Window | None, wanted: int) -> Tensor:
    """q of about so many rows of x, evenly spread: int32 (groups, arrays, R, rows)."""
    rows_of_one = x.shape[1] if window is None else math.prod(window.output_size(tuple(x.shape[2:])))
    images = x[spread(x.shape[0], max(1, MOST_VALUES // max(1, plan.groups * plan.k * rows_of_one)), x.device)]
    rows = images[:, None] if window is None else patches_of(images, window, plan.groups)  # (B, groups, M, K)
    chosen = spread(rows.shape[2], max(1, wanted // max(1, len(rows))), x.device)
    if input_block(plan, rows.shape[2])[0] == 1:  # a row's scale is its own: the others need not be quantised
        found = as_matrix(quantised(rows[:, :, chosen].contiguous(), plan)[0], len(chosen), plan.k)
    else:
        found = as_matrix(quantised(rows, plan)[0], rows.shape[2], plan.k)[:, :, chosen]
    filled: Tensor = functional.pad(found.transpose(0, 1).flatten(1, 2), (0, plan.arrays * plan.rows - plan.k))  # (groups, R, K')
    by_array: Tensor = filled.unflatten(-1, (plan.arrays, plan.rows)).transpose(1, 2)
    return by_array.to(torch.int32).contiguous()


def spread(length: int, count: int, device: torch.device) -> Tensor:
    """At most `count` indices below `length`, evenly spread."""
    count = min(length, count)
    return ((torch.arange(count, device=device) + 0.5) * length / max(1, count)).long()


def row_levels(integers: Tensor, i: int, plan: Plan) -> Tensor:
    """q → DAC levels of slice i, with their signs: float32."""
    slices = plan.x
    shift, most = slices.shifts[i], slices.largest[i]
    pattern = integers.abs().clamp(max=2**slices.bits - 1) if slices.kind == "magnitude" else integers
    digits = ((pattern >> shift) & most).to(torch.float32)
    levels = digits.mul_((plan.chip.dac.levels - 1) / most).round_()  # never halfway: the largest digit is odd
    return levels * integers.sign() if slices.kind == "magnitude" else levels


def cell_levels(weight: Tensor, plan: Plan) -> Tensor:
    """Perfect cells with their signs: float32 (groups, arrays, Sw, rows, N)."""
    chip, operands = plan.chip, plan.chip.operands
    matrices = weight_as_matrices(weight.detach(), plan.groups)
    coded = encode(matrices, plan.w, operands.format, (plan.rows, chip.array.columns), operands.w_granularity)
    most = torch.tensor(plan.w.largest, dtype=torch.float64, device=weight.device)[:, None, None]
    levels = torch.round(coded.digits * ((chip.cell.levels - 1) / most)).to(torch.float32)  # (groups, K tiles, N tiles, Sw, rows, columns)
    return levels.movedim(2, -2).flatten(-2)[:, : plan.arrays, ..., : plan.n]
