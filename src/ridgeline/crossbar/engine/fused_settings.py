"""What the fused engine's kernels are compiled for: constants of a plan, number types, tiles.

Plan ──settings_of──> Settings: of each slice pair, how a column sum becomes a code, and what a code is worth as a whole number
Plan ──tile_of──> Tile: what one program computes
packed    digits of four or two integers are cut out of a register at once, and are multiplied as subnormal floats
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch

from ...kernel.jit import INTERPRETED, cdiv, next_power_of_2
from ..plan import Plan
from .fused_kernels import MAGIC_BITS
from .packing import collapsed_weights, column_bounds, is_power_of_two, loses_nothing

EXACT = 1 << 24  # float32 holds every whole number up to it
EXACT_FLOAT16 = 1 << 11
EXACT_FLOAT8 = 1 << 12  # tensor cores add float8 products with 13 bits or more
MOST_CODE = 1 << 21  # what is left of the 23 bits that hold a code, with either sign
DOTS = {"float8": torch.float8_e4m3fn, "int8": torch.int8, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes, and how."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 2
    most_registers: int = 0
    """Of a thread; 0: as many as the compiler likes. Fewer let more programs share a multiprocessor."""

    @property
    def registers(self) -> dict[str, int]:
        return {"maxnreg": self.most_registers} if self.most_registers else {}


@dataclass(frozen=True, slots=True)
class PatchTile:
    """How quantise_patches shares its work out."""

    patches: int = 32
    warps: int = 1
    blocks: int = 4
    """Of arrays that share a scale, for one program: it finds out once where its patches lie."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Compile-time constants of one plan."""

    shifts: tuple[int, ...]
    mosts: tuple[int, ...]
    tops: tuple[int, ...]
    """Of each slice of x: 0 where digits are multiplied as they are, else the DAC's highest level."""
    multiply: tuple[float, ...]
    divide: tuple[float, ...]
    worth: tuple[Any, ...]
    """Of each slice pair, in units of `unit`."""
    unit: float
    whole: bool
    """Whether shift-adds fit int32."""
    lowest: tuple[float, ...]
    highest: tuple[float, ...]
    collapsed: bool
    reference: tuple[float, ...]
    """With an offset column, of each slice of x: multiplier and divisor of its sum of levels, and what its code is worth."""
    down: tuple[float, ...]
    """Of each slice of w: codes added before rounding, so that a ramp rounds down."""


def rows_padded(plan: Plan) -> int:
    """R: rows of an array that hold weights, filled up to a power of two that tensor cores take."""
    return max(32, next_power_of_2(min(plan.rows, plan.k)))


def columns_padded(plan: Plan) -> int:
    return cdiv(plan.n, 64) * 64 if plan.n > 32 else max(16, next_power_of_2(plan.n))


def tile_of(plan: Plan, dtype: torch.dtype) -> Tile:
    """The fastest of benchmarks/crossbar_tiles.py on an H200."""
    columns = columns_padded(plan)
    if INTERPRETED:
        return Tile(32, min(64, columns), 4, 1)
    if dtype == torch.float8_e4m3fn and rows_padded(plan) <= 32:
        return Tile(64, min(64, columns), 4, 3)
    if dtype == torch.float8_e4m3fn:
        return Tile(64, min(32, columns), 4, 3) if plan.arrays > 9 else Tile(64, min(32, columns), 4, 2, 128)
    if dtype == torch.float16 and columns >= 64 and rows_padded(plan) == 64:  # with 128 rows its stages do not fit in shared memory
        return Tile(128, 64, 8, 3)
    return Tile(64, min(32, columns), 4, 2)


def patch_tile_of(plan: Plan) -> PatchTile:
    """By the same benchmark: a warp for every 32 rows of an array."""
    return PatchTile(warps=min(4, rows_padded(plan) // 32))


@lru_cache(maxsize=4096)
def settings_of(plan: Plan, whole: bool, collapse: bool = True) -> Settings:
    """The constants of a plan; `whole`: column sums are whole numbers; `collapse`: slices become one product where nothing is lost."""
    sx, sw, units = len(plan.x.widths), len(plan.w.widths), units_of(plan)
    scales = [plan.scale(j) * max(units[i], 1) for i in range(sx) for j in range(sw)]
    if whole:
        multiply = tuple(float(scale) if is_power_of_two(scale.denominator) else float(scale.numerator) for scale in scales)
        divide = tuple(1.0 if is_power_of_two(scale.denominator) else float(scale.denominator) for scale in scales)
    else:
        multiply, divide = tuple(map(float, scales)), (1.0,) * len(scales)
    collapsed = collapse and whole and _collapses(plan, units)
    worths = [plan.worth(i, j) for i in range(sx) for j in range(sw)]
    unit = _common(worths)
    integers = [int(worth / unit) for worth in worths]
    most = sum(abs(integers[i * sw + j]) * (plan.chip.adc_levels[j] + 1) * 4 for i in range(sx) for j in range(sw))
    fits = most < 1 << 31
    if collapsed:
        x, _, _, unit = collapsed_weights(plan, units)
        unit, fits = unit * abs(x[-1]), True
    tops = tops_of(plan)
    lowest, highest = zip(*(plan.code_bounds(j) for j in range(sw)), strict=True)
    return Settings(
        plan.x.shifts, plan.x.largest, tops, multiply, divide, tuple(integers) if fits else tuple(float(worth / unit) for worth in worths),
        float(unit), fits, tuple(map(float, lowest)), tuple(map(float, highest)), collapsed, _reference(plan, units, unit),
        tuple(float(plan.shift(j)) for j in range(sw)),
    )  # fmt: skip


def _collapses(plan: Plan, units: tuple[int, ...]) -> bool:
    """Whether the ADC loses nothing, and the one product that is left fits its dots."""
    if not all(units) or plan.w.kind == "offset" or not loses_nothing(plan, units, column_bounds(plan, units)):
        return False
    x, w = collapsed_bounds(plan)
    return max(x, w) <= EXACT_FLOAT16 and plan.rows * x * w < EXACT


def collapsed_bounds(plan: Plan) -> tuple[int, int]:
    """The largest whole numbers of x and of w in a collapsed product."""
    _, w, _, _ = collapsed_weights(plan, units_of(plan))
    return 1 << (plan.x.span - 1), sum(map(abs, w)) * (plan.chip.cell.levels - 1)


def _reference(plan: Plan, units: tuple[int, ...], unit: Fraction) -> tuple[float, ...]:
    if plan.w.kind != "offset":
        return ()
    found: list[float] = []
    top = plan.chip.cell.levels - 1
    for i, (most, weight) in enumerate(zip(plan.x.largest, plan.x.weights, strict=True)):
        scale = plan.scale(0) * max(units[i], 1) * top
        exact = is_power_of_two(scale.denominator)
        worth = plan.offset_worth * Fraction(most * weight, (plan.chip.dac.levels - 1) * top) / plan.scale(0)
        found += [float(scale) if exact else float(scale.numerator), 1.0 if exact else float(scale.denominator), float(worth / unit)]
    return tuple(found)


def _common(worths: list[Fraction]) -> Fraction:
    """The largest fraction all of them are whole multiples of."""
    denominator = math.lcm(*(worth.denominator for worth in worths))
    return Fraction(math.gcd(*(int(worth * denominator) for worth in worths)), denominator)


def units_of(plan: Plan) -> tuple[int, ...]:
    top = plan.chip.dac.levels - 1
    return tuple(top // most if top % most == 0 else 0 for most in plan.x.largest)


def tops_of(plan: Plan) -> tuple[int, ...]:
    return tuple(0 if unit else plan.chip.dac.levels - 1 for unit in units_of(plan))


def fits_float32(plan: Plan) -> bool:
    units = units_of(plan)
    for bound, unit in zip(column_bounds(plan, units), units, strict=True):
        for j in range(len(plan.w.widths)):
            scale = plan.scale(j) * max(unit, 1)
            room = EXACT // 4 if plan.shift(j) else EXACT if is_power_of_two(scale.denominator) else EXACT // 2
            if bound * scale.numerator >= room or bound * scale >= MOST_CODE:
                return False
    return True


def skips_sign(plan: Plan) -> bool:
    """Whether the first slice of x says nothing where no input is negative; a noisy ADC reads something even then."""
    return plan.x.kind == "twos" and not plan.chip.adc.noise_lsb.value and not plan.chip.adc.offset_lsb.value


@lru_cache(maxsize=4096)
def start_of(settings: Settings, sx: int, sw: int, first: int) -> int:
    """What a shift-add starts from, so that the bits of 1.5 * 2^23 in every code cancel, in int32 that wraps around."""
    total: int = -MAGIC_BITS * sum(settings.worth[i * sw + j] for i in range(first, sx) for j in range(sw))
    return (total + (1 << 31)) % (1 << 32) - (1 << 31)


@lru_cache(maxsize=4096)
def constants_of(plan: Plan, whole: bool, collapse: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Constants of multiply_arrays that stay from call to call; `dtype` of the levels."""
    settings, chip = settings_of(plan, whole, collapse), plan.chip
    sx, sw = (1, 1) if settings.collapsed else (len(plan.x.widths), len(plan.w.widths))
    packed = packed_of(plan, settings, dtype)
    sums = (start_of(settings, sx, sw, 0), start_of(settings, sx, sw, 1)) if settings.whole and not settings.collapsed else (0, 0)
    noisy = (chip.adc.noise_lsb.value > 0) + 2 * (chip.dac.noise_sigma.value > 0) + 4 * (chip.adc.offset_lsb.value > 0)
    return {
        "SHIFTS": settings.shifts, "MOSTS": settings.mosts, "TOPS": settings.tops, "PACKED": packed, "MAGNITUDE": plan.signed,
        "MULTIPLY": multiply_of(settings, dtype, packed), "DIVIDE": settings.divide, "WORTH": settings.worth, "SUM_ALL": sums[0],
        "SUM_SKIPPED": sums[1], "LOWEST": settings.lowest, "HIGHEST": settings.highest, "CLIP": chip.adc.clip,
        "COLLAPSED": settings.collapsed, "WHOLE": settings.whole, "NOISE": noisy, "REFERENCE": settings.reference,
        "OFFSET": bool(settings.reference), "DOWN": settings.down, "SX": sx, "SW": sw, "PAIRS": cdiv(sx * sw, 4), "ROWS": plan.rows,
        "R": rows_padded(plan),
    }  # fmt: skip


UNITS = {torch.float8_e4m3fn: 2.0**-18, torch.float16: 2.0**-24}
"""What a product of packed digits and levels is counted in: float8 holds both as subnormals, n * 2^-9, float16 only the digits."""


def multiply_of(settings: Settings, dtype: torch.dtype, packed: bool) -> tuple[float, ...]:
    unit = UNITS.get(dtype, 1.0) if packed else 1.0
    return tuple(one / unit for one in settings.multiply)


def packed_of(plan: Plan, settings: Settings, dtype: torch.dtype) -> bool:
    """Whether all digits of a register can be cut out at once; the interpreter knows no assembly."""
    plain = plan.x.kind == "twos" and plan.x.bits <= 8 and not any(settings.tops) and not plan.chip.dac.noise_sigma.value
    return plain and not INTERPRETED and not settings.collapsed and dtype != torch.float32
