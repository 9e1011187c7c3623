"""What an analog in-memory chip is: arrays of memory cells that multiply by conductance, with their converters and their faults.

    chip.toml ──load_target──> CrossbarSpec
      array      rows x columns of cells; a column sums the currents of its rows
      operands   how a number becomes digits: format, slice widths (most significant first), granularity of scales, handling of signs
      dac        input digit ──> voltage        volts on a row, levels, noise
      cell       weight digit ──> conductance   siemens, levels, write and read variation, stuck cells, drift, wire resistance
      adc        column current ──> code        levels, range, clipping, noise, offset
      cost       joules, seconds and mm2 of each event; estimate.crossbar counts the events
      host       what runs the ops the arrays cannot

Every physical constant carries unit, source and status. A chip whose sigmas, rates and exponents are all 0, the defaults, is ideal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator, model_validator

from ..core.spec import Constant, Spec, quantity
from .array import HostFallback, SquareMillimetres, Watts, Whole

MOST_LEVELS = 1 << 24
MOST_WIDTH = 16
MOST_BITS = 32
NOT_STATED = "not stated"
GRANULARITIES = ("per-matrix", "per-row", "per-col")
Item = TypeVar("Item")

_SIGMA = quantity("ratio", least=0.0, most=10.0)
# Bounds far beyond anything built: a prefix too many is an error, and no product of theirs leaves the floats.
Sigma = Annotated[Constant, _SIGMA]
Rate = Annotated[Constant, quantity("ratio", least=0.0, most=1.0)]
Siemens = Annotated[Constant, quantity("S", most=1e3)]
SiemensOrNone = Annotated[Constant, quantity("S", least=0.0, most=1e3)]
Volts = Annotated[Constant, quantity("V", most=1e3)]
Ohms = Annotated[Constant, quantity("ohm", least=0.0, most=1e9)]
Steps = Annotated[Constant, quantity("LSB", least=0.0, most=1e6)]
Joules = Annotated[Constant, quantity("J", least=0.0, most=1.0)]
Seconds = Annotated[Constant, quantity("s", least=0.0, most=1e12)]
Levels = Annotated[Whole, Field(ge=2, le=MOST_LEVELS)]
Width = Annotated[Whole, Field(ge=1, le=MOST_WIDTH)]


def _zero(unit: str) -> Constant:
    return Constant(value=0.0, unit=unit, source=NOT_STATED, status="assumed")


def _one_or_each(check: Callable[[Any], Item]) -> BeforeValidator:
    """For a field that takes one value or a list of them: the error names the field and, in a list, the place."""

    def convert(given: Any) -> Any:
        if not isinstance(given, list | tuple):
            return check(given)
        if not given:
            raise ValueError("give one value, or a list of at least one")
        checked = []
        for place, item in enumerate(given):
            try:
                checked.append(check(item))
            except ValueError as error:
                raise ValueError(f"entry {place}: {error}") from None
        return tuple(checked)

    return BeforeValidator(convert)


def _levels(given: Any) -> int:
    if isinstance(given, bool) or not isinstance(given, int):
        raise ValueError(f"must be a whole number of levels, got {given!r}")
    if not 2 <= given <= MOST_LEVELS:
        raise ValueError(f"must be between 2 and {MOST_LEVELS} levels, got {given}")
    return given


def _sigma_constant(given: Any) -> Constant:
    try:
        return Constant.model_validate(_SIGMA.func(given))  # type: ignore[call-arg]
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


LevelsOrEach = Annotated[int | tuple[int, ...], _one_or_each(_levels)]
SigmaOrEach = Annotated[Constant | tuple[Constant, ...], _one_or_each(_sigma_constant)]


def _granularity(given: Any) -> Any:
    if isinstance(given, str) and given in GRANULARITIES:
        return given
    sizes = given if isinstance(given, list | tuple) else ()
    if len(sizes) == 2 and all(isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= MOST_LEVELS for size in sizes):
        return tuple(sizes)
    raise ValueError(f"must be {', '.join(GRANULARITIES)} or [rows, columns], both at least 1, got {given!r}")


Granularity = Annotated[str | tuple[int, int], BeforeValidator(_granularity)]


class CrossbarArray(Spec):
    """One array."""

    rows: Whole = Field(ge=1, le=65536)
    """Inputs it takes at once: the products of a column's rows are summed by their wire."""
    columns: Whole = Field(ge=1, le=65536)
    """Sums it gives at once."""


class Operands(Spec):
    """How inputs x and weights w become digits; both are cut into slices, each slice of w in arrays of its own."""

    format: Literal["int", "bfp"] = "int"
    """int: scaled by a block's largest value; bfp: by its power of two."""
    x_slices: tuple[Width, ...] = Field(min_length=1, max_length=MOST_BITS)
    """Bits of each slice of an input, most significant first; applied one after the other."""
    w_slices: tuple[Width, ...] = Field(min_length=1, max_length=MOST_BITS)
    """Bits of each slice of a weight, most significant first."""
    x_bits: Annotated[Whole, Field(ge=1, le=MOST_BITS)] | None = None
    """Bits of an input's slices, to be checked: they must sum to it; of differential pairs the magnitude's, without the sign."""
    w_bits: Annotated[Whole, Field(ge=1, le=MOST_BITS)] | None = None
    """Bits of a weight, to be checked likewise."""
    x_granularity: Granularity = "per-row"
    """What shares one scale; [rows, columns] is rounded up to whole arrays."""
    w_granularity: Granularity = "per-col"
    """The same for weights."""
    x_tile_rows: Whole = Field(default=1, ge=1, le=65536)
    """Rows of x in one tile."""
    sign: Literal["slice", "differential", "offset"] = "slice"
    """slice: two's complement, the first slice is the sign; differential: two cells a weight; offset: a column of one value, subtracted."""

    @field_validator("x_slices", "w_slices")
    @classmethod
    def _few_bits(cls, slices: tuple[int, ...]) -> tuple[int, ...]:
        if sum(slices) > MOST_BITS:
            raise ValueError(f"must sum to at most {MOST_BITS} bits, got {sum(slices)}")
        return slices

    @field_validator("x_bits", "w_bits")
    @classmethod
    def _slices_sum(cls, bits: int | None, info: ValidationInfo) -> int | None:
        name = f"{str(info.field_name)[0]}_slices"
        if bits is not None and name in info.data and sum(info.data[name]) != bits:
            raise ValueError(f"{name} must sum to it, got {bits} and {'+'.join(map(str, info.data[name]))} = {sum(info.data[name])}")
        return bits


class Dac(Spec):
    """Drives one row with one digit."""

    levels: Levels
    """Voltages it can give, zero among them."""
    vread_v: Volts
    """The largest of them."""
    noise_sigma: Sigma = _zero("ratio")
    """Of a voltage, relative to it; drawn anew for every read."""


class Cell(Spec):
    """Holds one digit of one weight."""

    high_s: Siemens
    """Conductance of the largest digit."""
    low_s: SiemensOrNone
    """Conductance of digit 0."""
    levels: Levels
    """Conductances it can be written to, evenly spaced from low_s to high_s."""
    write_sigma: SigmaOrEach = _zero("ratio")
    """Spread of what was written, relative to it; one number, or one for each level from low to high."""
    read_sigma: SigmaOrEach = _zero("ratio")
    """Spread from read to read, of the logarithm; one number, or one for each level."""
    stuck_high: Rate = _zero("ratio")
    """Share of cells that stay at high_s whatever is written."""
    stuck_low: Rate = _zero("ratio")
    """Share of cells that stay at low_s."""
    drift_nu: Rate = _zero("ratio")
    """G(t) = G * (t / drift_from_s) ** -drift_nu."""
    drift_nu_sigma: Sigma = _zero("ratio")
    """Spread of drift_nu from cell to cell, absolute."""
    drift_time_s: Seconds = _zero("s")
    """Time since writing at which the chip is read; no drift before drift_from_s."""
    drift_from_s: Annotated[Constant, quantity("s", most=1e12)] = Constant(value=1.0, unit="s", source=NOT_STATED, status="assumed")
    """Time after writing at which a cell has the conductance it was written to."""
    drift_compensated: bool = Field(default=False, strict=True)
    """Outputs are multiplied by (drift_time_s / drift_from_s) ** drift_nu, digitally: the mean drift is undone, its spread remains."""
    retention_s: Annotated[Constant, quantity("s", most=1e18)] | None = None
    """Time constant with which a cell relaxes to low_s; None: it keeps its state."""
    line_resistance_ohm: Ohms = _zero("ohm")
    """Of the wire between two neighbouring cells."""

    @model_validator(mode="after")
    def _possible(self) -> Cell:
        if self.low_s.value >= self.high_s.value:
            raise ValueError(f"cell.low_s: must be below high_s, got {self.low_s.value:g} and {self.high_s.value:g} S")
        if (stuck := self.stuck_high.value + self.stuck_low.value) > 1.0:
            raise ValueError(f"cell.stuck_low: it and stuck_high are shares of the same cells and must sum to at most 1, got {stuck:g}")
        for name in ("write_sigma", "read_sigma"):
            given = getattr(self, name)
            if isinstance(given, tuple) and len(given) != self.levels:
                raise ValueError(f"cell.{name}: must be one number or one for each of the {self.levels} levels, got {len(given)}")
        return self

    @property
    def write_sigmas(self) -> tuple[float, ...]:
        """One for each level."""
        return _each(self.write_sigma, self.levels)

    @property
    def read_sigmas(self) -> tuple[float, ...]:
        """One for each level."""
        return _each(self.read_sigma, self.levels)


def _each(given: Constant | tuple[Constant, ...], count: int) -> tuple[float, ...]:
    return tuple(one.value for one in given) if isinstance(given, tuple) else (given.value,) * count


class Adc(Spec):
    """Turns a column's current into a code."""

    levels: LevelsOrEach
    """Codes it can give; one number, or one for each slice of w, most significant first."""
    range: Literal["full", "calibrated"] = "full"
    """full: up to the current of all cells high and all rows driven; calibrated: up to what data showed."""
    clip: bool = Field(default=False, strict=True)
    """Currents beyond the range give the last code."""
    noise_lsb: Steps = _zero("LSB")
    """Spread from conversion to conversion, in steps."""
    offset_lsb: Steps = _zero("LSB")
    """Spread of the offset from converter to converter, in steps."""
    kind: Literal["sar", "flash", "ramp"] = "sar"
    """sar and flash give the nearest code; ramp counts until it is passed, and rounds down. Their costs are what `cost` states."""


class CrossbarCost(Spec):
    """What each event costs. All zero: counts only."""

    array_read_j: Joules = _zero("J")
    """One read of one array, every row driven."""
    array_read_s: Seconds = _zero("s")
    """Until its columns have settled."""
    array_mm2: SquareMillimetres = _zero("mm2")
    """Cells of one array."""
    dac_conversion_j: Joules = _zero("J")
    """One row driven once."""
    dac_conversion_s: Seconds = _zero("s")
    """Before the columns start to settle; all rows at once."""
    dac_mm2: SquareMillimetres = _zero("mm2")
    """Of one; every row of every array has one."""
    adc_conversion_j: Joules = _zero("J")
    """One column's current to a code."""
    adc_conversion_s: Seconds = _zero("s")
    """Of one conversion."""
    adc_mm2: SquareMillimetres = _zero("mm2")
    """Of one."""
    adcs_per_array: Whole = Field(default=1, ge=1, le=65536)
    """Converters that share out an array's columns; the two arrays of a differential pair are subtracted first and have them together."""
    shift_add_j: Joules = _zero("J")
    """One code shifted to its slices' weight and added."""
    shift_add_s: Seconds = _zero("s")
    """After the last conversion; the others hide."""
    shift_add_mm2: SquareMillimetres = _zero("mm2")
    """Of one array's, or one pair's."""
    buffer_bit_j: Joules = _zero("J")
    """One bit read from or written to the buffer."""
    buffer_mm2: SquareMillimetres = _zero("mm2")
    """An array's share of it, or a pair's."""
    static_w: Watts = _zero("W")
    """Drawn all the time, by one array with what belongs to it."""


class CrossbarSpec(Spec):
    """An analog in-memory chip, all of it."""

    version: Literal[1]
    """Of this format."""
    kind: Literal["crossbar"]
    """Kind of target."""
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """As in `--on NAME`."""
    description: str = Field(default="", max_length=400)
    """One line."""
    array: CrossbarArray
    """Size of one array; there are as many as the network needs."""
    operands: Operands
    """Numbers to digits."""
    dac: Dac
    """Digits to voltages."""
    cell: Cell
    """Digits to conductances."""
    adc: Adc
    """Currents to codes."""
    cost: CrossbarCost = CrossbarCost()
    """Of events."""
    host: HostFallback = HostFallback()
    """Cost of what the arrays cannot run."""

    @property
    def x_bits(self) -> int:
        """Of an input, its sign included."""
        return sum(self.operands.x_slices) + (self.operands.sign == "differential")

    @property
    def w_bits(self) -> int:
        """Of a weight, its sign included."""
        return sum(self.operands.w_slices) + (self.operands.sign == "differential")

    @property
    def adc_levels(self) -> tuple[int, ...]:
        """One for each slice of w, most significant first."""
        given = self.adc.levels
        return given if isinstance(given, tuple) else (given,) * len(self.operands.w_slices)

    @property
    def ideal(self) -> bool:
        """Whether nothing is random, stuck, drifting or resistive: every code is then an integer's."""
        cell, adc = self.cell, self.adc
        spread: Iterable[float] = (*cell.write_sigmas, *cell.read_sigmas, cell.stuck_high.value, cell.stuck_low.value, cell.drift_nu.value,
                                   cell.drift_nu_sigma.value, cell.line_resistance_ohm.value, self.dac.noise_sigma.value,
                                   adc.noise_lsb.value, adc.offset_lsb.value)  # fmt: skip
        return not any(spread) and cell.retention_s is None

    @model_validator(mode="after")
    def _sound(self) -> CrossbarSpec:
        for name, slices in (("x_slices", self.operands.x_slices), ("w_slices", self.operands.w_slices)):
            signed_first = self.operands.sign == "slice" or (self.operands.sign == "offset" and name == "x_slices")
            if signed_first and (slices[0] != 1 or len(slices) < 2):
                raise ValueError(
                    f'operands.{name}: with sign = "{self.operands.sign}" the first of two or more slices is the sign and 1 bit wide, '
                    f"got {slices}"
                )
        widest = max(self.operands.w_slices)
        if 2**widest > self.cell.levels:
            raise ValueError(f"cell.levels: a slice of {widest} bits in operands.w_slices needs {2**widest} levels, got {self.cell.levels}")
        if isinstance(self.adc.levels, tuple) and len(self.adc.levels) != len(self.operands.w_slices):
            raise ValueError(
                f"adc.levels: one number or one for each of the {len(self.operands.w_slices)} slices of w, got {len(self.adc.levels)}"
            )
        return self
