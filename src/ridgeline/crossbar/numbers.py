"""Real numbers to digits and back: block-scaled integers, two's complement, slices.

    tiles v ──quantise──> q (B bits, two's complement) ──digits──> (…, S, r, c), one unsigned digit a slice, most significant first
      INT   scale = block maximum m     q = round(v / m * (2^(B-1) - 1))                                   step = m / (2^(B-1) - 1)
      BFP   scale = exponent e          q = clip(round(v / 2^e * 2^(B-2)), -2^(B-1), 2^(B-1) - 1)          step = 2^(e + 2 - B)
            e = floor(log2(m + 1e-10))
      v ≈ q * step;  q = sum of digit * weight, where of a two's complement the first slice is one bit, the sign, of weight -2^(B-1);
      digits of a magnitude carry q's sign and B counts its bits alone; an offset's digits are those of q + 2^(B-1)

Everything is float64 or int64 and rounds half to even. v / m is rounded to float64 before it is multiplied: the order is part of the
definition, since a value that lies within an ulp of half a step follows it. Powers of two are exact, so BFP has no such case.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from ..core.errors import OptionError
from ..target.crossbar import MOST_BITS
from .tiling import Granularity, Tiling, plan

FORMATS = ("int", "bfp")
SliceKind = Literal["twos", "magnitude", "offset"]
MOST_BITS_FLOAT32 = 16  # beyond it too many values lie near half a step
SMALLEST = 1e-10  # keeps the exponent of an all-zero block finite: -34


@dataclass(frozen=True, slots=True)
class Slices:
    """Widths of the pieces an operand's bits are cut into, most significant first, and how they hold negative numbers.

    twos: two's complement, the first slice is the sign; magnitude: digits of |q|, each with q's sign; offset: digits of q + 2^(B-1).
    """

    widths: tuple[int, ...]
    kind: SliceKind = "twos"

    def __post_init__(self) -> None:
        signed_first = self.kind != "twos" or (len(self.widths) >= 2 and self.widths[0] == 1)
        if not self.widths or not signed_first or min(self.widths) < 1 or not 2 <= self.bits <= MOST_BITS:
            raise OptionError(
                f"slices {list(self.widths)}",
                why=f"they sum to 2 to {MOST_BITS} bits, and of a two's complement the first is the sign: 1 bit wide, and another follows",
                do="e.g. [1, 1, 2, 2]",
            )

    @property
    def bits(self) -> int:
        return sum(self.widths)

    @property
    def span(self) -> int:
        """Bits of a two's complement that holds the same numbers."""
        return self.bits + (self.kind == "magnitude")

    @property
    def largest(self) -> tuple[int, ...]:
        """The largest digit of each slice."""
        return tuple(2**width - 1 for width in self.widths)

    @property
    def shifts(self) -> tuple[int, ...]:
        """Bits below each slice."""
        return tuple(self.bits - upto for upto in accumulate(self.widths))

    @property
    def weights(self) -> tuple[int, ...]:
        """What one of each slice's digits is worth."""
        first = -1 if self.kind == "twos" else 1
        return (first * 2 ** self.shifts[0], *(2**shift for shift in self.shifts[1:]))

    def held(self, integers: Tensor) -> Tensor:
        """What of a two's complement of `span` bits the digits can hold: a magnitude has no -2^B."""
        return integers.clamp(min=1 - 2**self.bits) if self.kind == "magnitude" else integers

    def digits(self, integers: Tensor) -> Tensor:
        """(…, r, c) → (…, S, r, c); every digit >= 0, but of magnitudes, which carry q's sign."""
        if self.kind == "magnitude":
            return self._cut(self.held(integers).abs()) * integers.sign().unsqueeze(-3)
        if self.kind == "offset":
            return self._cut(integers + 2 ** (self.bits - 1))
        return self._cut(integers & (2**self.bits - 1))  # of a negative int64 as well: the low bits of its two's complement

    def _cut(self, pattern: Tensor) -> Tensor:
        return torch.stack([(pattern >> shift) & most for shift, most in zip(self.shifts, self.largest, strict=True)], dim=-3)

    def assemble(self, digits: Tensor) -> Tensor:
        """(…, S, r, c) → (…, r, c): what `digits` took apart."""
        weights = torch.tensor(self.weights, dtype=torch.int64, device=digits.device)
        found = (digits * weights[:, None, None]).sum(-3)
        return found - 2 ** (self.bits - 1) if self.kind == "offset" else found


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand as the chip holds it."""

    tiling: Tiling
    slices: Slices
    digits: Tensor
    """int64 (…, tile rows, tile columns, S, r, c)."""
    scale: Tensor
    """float64 (…, tile rows, tile columns): block maximum (int) or block exponent (bfp)."""
    step: Tensor
    """float64, like `scale`: the value of q = 1."""
    values: Tensor
    """float64 (…, H, W): the dequantised operand."""


def encode(matrix: Tensor, slices: Slices, number_format: str, tile: tuple[int, int], granularity: Granularity) -> Operand:
    """(…, H, W) → digits and scales of every tile, and the values they stand for."""
    exact = matrix.detach().to(torch.float64)
    if not bool(torch.isfinite(exact).all()):
        raise OptionError(
            "an operand that is not finite", why="no digit stands for inf or nan", do="look for an overflow before this layer"
        )
    tiling = plan((exact.shape[-2], exact.shape[-1]), tile, granularity)
    scale = block_scale(tiling.block_maximum(exact), number_format)
    integers = slices.held(quantise(tiling.cut(exact), scale[..., None, None], slices.span, number_format))
    values = tiling.join(dequantise(integers, scale[..., None, None], slices.span, number_format))
    return Operand(tiling, slices, slices.digits(integers), scale, step_of(scale, slices.span, number_format), values)


def block_scale(maximum: Tensor, number_format: str) -> Tensor:
    """What is stored beside a block: its maximum (int) or floor(log2) of it (bfp)."""
    _check_format(number_format)
    if number_format == "int":
        return maximum
    return (torch.frexp(maximum + SMALLEST).exponent - 1).to(torch.float64)  # exact, where log2 may round up to the next whole number


def quantise(values: Tensor, scale: Tensor, bits: int, number_format: str) -> Tensor:
    """float64 → int64 of `bits` bits; an all-zero block gives 0."""
    _check_format(number_format)
    if number_format == "int":
        divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
        return torch.round(values / divisor * _largest(bits)).to(torch.int64)
    shifted = values / _power_of_two(scale) * (1 << (bits - 2))
    return torch.round(shifted).clamp(-_largest(bits) - 1, _largest(bits)).to(torch.int64)


def whole_numbers(values: Tensor, maximum: Tensor, bits: int, number_format: str, dtype: torch.dtype) -> Tensor:
    """The whole numbers of `quantise`, as floats; a magnitude of `bits` - 1 bits is clipped by `held`.

    A float32 is divided in float32, and only where that lies near half a step is it repeated in float64, so that no number differs.
    """
    if values.dtype == torch.float64 or bits > MOST_BITS_FLOAT32 or (number_format == "int" and _tiny(maximum)):
        scale = block_scale(maximum.double(), number_format)
        return quantise(values.double(), scale, bits, number_format).to(dtype)
    if number_format == "bfp":  # a power of two: exact in float32
        scaled = values * _power_of_two(bits - 2 - block_scale(maximum.double(), number_format)).float()
        return scaled.round_().clamp_(-_largest(bits) - 1, _largest(bits)).to(dtype)
    divisor = torch.where(maximum > 0, maximum, torch.ones_like(maximum)).double()
    scaled = values * (_largest(bits) / divisor).float()
    rounded = scaled.round()
    near = scaled.sub_(rounded).abs_() > 0.5 - _largest(bits) * 2.0**-22  # two roundings of 2^-24, with room to spare
    places = near.nonzero(as_tuple=True)
    if len(places[0]):
        exact = values[places].double() / divisor.expand_as(values)[places] * _largest(bits)
        rounded[places] = exact.round().to(rounded.dtype)
    return rounded.to(dtype)


def _tiny(maximum: Tensor) -> bool:
    """Whether a block's maximum is so small that its reciprocal leaves float32."""
    return bool(((maximum > 0) & (maximum < 1e-30)).any())


def dequantise(integers: Tensor, scale: Tensor, bits: int, number_format: str) -> Tensor:
    """int64 → the float64 values they stand for."""
    _check_format(number_format)
    if number_format == "int":
        return _per_largest(integers.to(torch.float64), bits) * scale
    return integers.to(torch.float64) * step_of(scale, bits, number_format)


def step_of(scale: Tensor, bits: int, number_format: str) -> Tensor:
    """The value of q = 1 in a block of this scale."""
    _check_format(number_format)
    if number_format == "int":
        return _per_largest(scale, bits)
    return _power_of_two(scale + 2 - bits)


def _largest(bits: int) -> int:
    return (1 << (bits - 1)) - 1


def _per_largest(values: Tensor, bits: int) -> Tensor:
    """values / largest, rounded once. By a tensor: torch multiplies a CUDA tensor by a number's reciprocal, an ulp off the CPU's."""
    return values / torch.full((), _largest(bits), dtype=values.dtype, device=values.device)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent, exact: the bits of the float64 itself, so that no library's power decides them."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def _check_format(number_format: str) -> None:
    if number_format not in FORMATS:
        raise OptionError(f"number format {number_format!r}", why="no such format", do=f"give {' or '.join(FORMATS)}")
