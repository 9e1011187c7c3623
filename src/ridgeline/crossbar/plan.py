"""One product on a chip, before any data: what every engine must agree on.

    Plan(chip, k, n, groups, ranges)      x (…, M, K) times w (K, N), `groups` of them side by side
      arrays   along K; the last one may be filled in part
      scale    codes for each unit of a column sum: code = round_half_even(total * scale + shift), exact fractions
      worth    what one code of a slice pair adds to the integer product sum of q_x * q_w
    Window     a convolution's kernel, stride, padding, dilation
    Draw       where random numbers come from: (seed, chip, layer, call)
    Engine     prepares cells once, then multiplies; `unable` says in words what it cannot do

Totals are in levels: DAC levels times cell levels, summed over the rows of one array. Out = sum over arrays of
step_x * step_w * (sum over slice pairs of code * worth).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ..target.crossbar import CrossbarSpec
from .numbers import SliceKind, Slices

if TYPE_CHECKING:
    from .cells import Cells


@dataclass(frozen=True)
class Plan:
    """One product of K x N weights on a chip."""

    chip: CrossbarSpec
    k: int
    n: int
    groups: int = 1
    ranges: tuple[int, ...] = field(default=())
    """Of each slice of w: the column sum [levels] of the highest code. Empty: the full range."""

    @cached_property
    def _hash(self) -> int:
        return hash((self.chip, self.k, self.n, self.groups, self.ranges))

    def __hash__(self) -> int:
        """Found once: that of a chip is the hash of everything its file says, and plans are looked up at every pass."""
        return self._hash

    def __reduce__(self) -> Any:
        return Plan, (self.chip, self.k, self.n, self.groups, self.ranges)  # another process hashes text in another way

    @cached_property
    def x(self) -> Slices:
        return Slices(self.chip.operands.x_slices, "magnitude" if self.signed else "twos")

    @cached_property
    def w(self) -> Slices:
        kinds: dict[str, SliceKind] = {"slice": "twos", "differential": "magnitude", "offset": "offset"}
        return Slices(self.chip.operands.w_slices, kinds[self.chip.operands.sign])

    @property
    def signed(self) -> bool:
        """Whether column sums may be negative: two cells a weight, and voltages of both signs."""
        return self.chip.operands.sign == "differential"

    @property
    def rows(self) -> int:
        return self.chip.array.rows

    @property
    def arrays(self) -> int:
        """Along K."""
        return -(-self.k // self.rows)

    @property
    def full(self) -> int:
        """The largest column sum an array can give."""
        return self.rows * (self.chip.dac.levels - 1) * (self.chip.cell.levels - 1)

    @cached_property
    def range_of_slice(self) -> tuple[int, ...]:
        return self.ranges or (self.full,) * len(self.w.widths)

    def scale(self, j: int) -> Fraction:
        """Codes for each unit of a column sum of weight slice j."""
        return Fraction(self.chip.adc_levels[j] - 1, self.range_of_slice[j] * (2 if self.signed else 1))

    def shift(self, j: int) -> Fraction:
        """Codes added before rounding to the nearest: 0, or of a ramp, whose counter rounds down, what makes that of it.

        Column sums * scale are multiples of 1 / denominator, so that with this no value lies between two codes.
        """
        return Fraction(1, 2 * self.scale(j).denominator) - Fraction(1, 2) if self.chip.adc.kind == "ramp" else Fraction(0)

    def code_bounds(self, j: int) -> tuple[int, int]:
        """The lowest and the highest code of weight slice j; codes leave them only where the chip does not clip."""
        most = self.chip.adc_levels[j] - 1
        return (-(most // 2), most // 2) if self.signed else (0, most)

    def worth(self, i: int, j: int) -> Fraction:
        """What one code of input slice i and weight slice j adds to sum of q_x * q_w."""
        digits = self.x.largest[i] * self.x.weights[i] * self.w.largest[j] * self.w.weights[j]
        return Fraction(digits, (self.chip.dac.levels - 1) * (self.chip.cell.levels - 1)) / self.scale(j)

    @property
    def offset_worth(self) -> int:
        """With sign = "offset" a weight's digits stand for q_w + this; a column of cells at their highest level tells the sum of inputs."""
        return 1 << (self.w.bits - 1)


@dataclass(frozen=True, slots=True)
class Window:
    """Of a convolution over one, two or three axes."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def output_size(self, size: tuple[int, ...]) -> tuple[int, ...]:
        axes = zip(size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((length + 2 * pad - dilate * (taps - 1) - 1) // step + 1 for length, taps, step, pad, dilate in axes)


@dataclass(frozen=True, slots=True)
class Draw:
    """Names every random number of one call: the same four always give the same numbers, on any device and engine."""

    seed: int = 0
    chip: int = 0
    layer: int = 0
    call: int = 0


class Engine(Protocol):
    """Computes products on a chip. One whose `adds_bias` is true takes `bias` (groups * N, float32) in both products."""

    name: str

    def unable(self, plan: Plan, device: str) -> str | None:
        """Why it cannot run this plan there; None: it can."""
        ...

    def prepare(self, plan: Plan, cells: Cells) -> Any:
        """What `product` and `convolution` need, made once from programmed cells, on the device of the cells."""
        ...

    def product(self, x: Tensor, plan: Plan, prepared: Any, draw: Draw) -> Tensor:
        """x (B, M, K) → (B, M, N) in the dtype of x; groups must be 1."""
        ...

    def convolution(self, x: Tensor, window: Window, plan: Plan, prepared: Any, draw: Draw) -> Tensor:
        """x (B, groups * C, *size) → (B, groups * N, *output size), K = C * taps."""
        ...
