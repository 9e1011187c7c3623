"""Column sums to ADC codes: round half to even, decided on integers wherever there is no noise.

    sum of level_x * level_w ──convert_exact──> code = round_half_even(sum * (levels - 1) / full)            all integers
      full = rows * (DAC levels - 1) * (cell levels - 1): every row of the array at its highest, padding rows included
    current, reference [A] ──convert──> code = round(current / reference * (levels - 1))                     float64, for noisy cells

The two are the same formula: reference = (high - low) * vread * rows, and a level is its share of vread or of (high - low).
With an even `full` and 2^n levels up to one conversion in a hundred lies exactly between two codes; a float would let its last bit
decide, differently in each dtype and order of summation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.errors import OptionError

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
        raise OptionError(
            f"an array whose sums reach {full:,} read by an ADC of {levels:,} levels",
            why="their product does not fit 62 bits, so a tie could not be decided exactly",
            do="give fewer rows, DAC levels, cell levels or ADC levels",
        )
    return round_half_even(total * (levels - 1), full)


def convert(current: Tensor, levels: int, reference: float, *, clip: bool = False) -> Tensor:
    """Column currents (float64) → codes (int64); `reference` is the current of the highest code."""
    codes = torch.round(current / reference * (levels - 1)).to(torch.int64)
    return codes.clamp(0, levels - 1) if clip else codes


def _on_tie(above: Tensor, denominator: int) -> Tensor:
    return above % (2 * denominator) == 0
