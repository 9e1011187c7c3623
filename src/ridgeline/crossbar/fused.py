"""The engine for GPUs: two Triton kernels a product, nothing sliced is ever written to memory.

    x ──quantise_patches──> q (one small integer an element of a patch), steps ──multiply_arrays──> out, bias to be added by the layer
    cells ──prepare, once──> w (groups, slices, arrays, N', R): int8 levels where they are whole numbers, else float16
          ──read_cells, every call──> float16, only where reads vary

`unable` names what it leaves to the blocked engine: rows that share a scale, an offset column, sums beyond float32, three axes.
Float16 holds levels to 5e-4 of their value; noise is drawn in float32 and rounded to it. Inputs that are not finite give nan.
The sign slice of x is skipped on the device itself, by a flag that the first kernel sets, so that no pass waits for the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..kernel.jit import HAVE_TRITON, INTERPRETED, cdiv, launch, next_power_of_2
from . import noise
from .adc import check_ranges
from .cells import Cells, low_level
from .fused_kernels import MAGIC_BITS, multiply_arrays, quantise_patches, read_cells
from .packing import collapsed_weights, column_bounds, is_power_of_two, loses_nothing
from .plan import Draw, Plan, Window
from .tiling import plan as plan_tiles

EXACT = 1 << 24  # float32 holds every whole number up to it
EXACT_FLOAT8 = 1 << 12  # tensor cores add float8 products with 13 bits or more
MOST_CODE = 1 << 21  # what is left of the 23 bits that hold a code, with either sign
ONE_TAP = Window((1, 1), (1, 1), (0, 0), (1, 1))
BLOCKS_EACH = 4  # of arrays that share a scale, for one program: it finds out once where its patches lie
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


@dataclass(slots=True)
class Prepared:
    """Cells as the kernels want them."""

    settings: Settings
    levels: Tensor
    """(groups, slices, arrays, N', R), int8 or float16; where reads vary: where each call writes them."""
    step: Tensor
    """float32 (groups, arrays, N'), the unit of worth folded in."""
    planes: Tensor | None
    """Programmed levels, where every call reads its own."""
    sigmas: Tensor | None
    negative: Tensor
    """int32: whether the last input had a negative value."""
    offsets: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    tables: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)


class FusedEngine:
    """Triton on a GPU; in Triton's interpreter on a CPU, for tests."""

    name = "fused"
    adds_bias = True

    def __init__(self, dot: str | None = None, tile: Tile | None = None) -> None:
        self.dot, self.tile = dot, tile

    def unable(self, plan: Plan, device: str) -> str | None:
        operands, chip = plan.chip.operands, plan.chip
        if not HAVE_TRITON:
            return "Triton is not installed"
        if not device.startswith("cuda") and not INTERPRETED:
            return f"Triton does not run on {device}"
        tiles = plan_tiles((1 << 20, plan.k), (operands.x_tile_rows, plan.rows), operands.x_granularity)
        if tiles.block[0] != 1:
            return "several rows of x share a scale"
        if operands.sign == "offset":
            return 'sign = "offset"'
        if plan.x.span > 16 or chip.cell.levels > 2049 or chip.dac.levels > 2049:
            return f"inputs of {plan.x.span} bits, {chip.cell.levels} cell levels or {chip.dac.levels} DAC levels are too many for its dots"
        if max(chip.adc_levels) > MOST_CODE or not _fits(plan):
            return f"column sums of up to {plan.full:,} times the ADC's scale do not fit a float32"
        return None

    def prepare(self, plan: Plan, cells: Cells) -> Prepared:
        check_ranges(plan)
        varies = any(sigma > 0 for sigma in cells.read_sigmas)
        settings = settings_of(plan, whole=cells.exact and not varies and not plan.chip.dac.noise_sigma.value)
        device, parts = cells.planes.device, plan.groups * len(plan.w.widths)
        r, padded = rows_padded(plan), columns_padded(plan)
        whole = cells.exact and not varies and not plan.chip.dac.noise_sigma.value
        dtype = self._dtype(plan, settings, whole)
        step = torch.zeros((plan.groups, plan.arrays, padded), dtype=torch.float32, device=device)
        step[..., : plan.n] = (cells.step * settings.unit).to(torch.float32)
        negative = torch.zeros(1, dtype=torch.int32, device=device)
        if varies:
            levels = torch.zeros((parts, plan.arrays, padded, r), dtype=dtype, device=device)
            sigmas = torch.tensor(cells.read_sigmas, dtype=torch.float32, device=device)
            return Prepared(settings, levels, step, cells.planes, sigmas, negative)
        read = cells.as_read(plan, Draw())  # (groups, slices, K', N)
        if settings.collapsed:
            weights = torch.tensor(collapsed_weights(plan, _units(plan))[1], device=device)[:, None, None]
            read = (read * weights).sum(1, keepdim=True)
        parts = plan.groups * read.shape[1]
        shaped = read.reshape(parts, plan.arrays, plan.rows, plan.n)[:, :, :r].transpose(2, 3)
        levels = torch.zeros((parts, plan.arrays, padded, r), dtype=dtype, device=device)
        if dtype == torch.float8_e4m3fn:  # whole numbers up to 7 are its subnormals
            levels = levels.view(torch.int8)
        levels[:, :, : plan.n, : shaped.shape[3]] = shaped.to(levels.dtype)
        return Prepared(settings, levels.view(dtype), step, None, None, negative)

    def product(self, x: Tensor, plan: Plan, prepared: Prepared, draw: Draw, bias: Tensor | None = None) -> Tensor:
        out = torch.empty((x.shape[0], x.shape[1], plan.n), dtype=torch.float32, device=x.device)
        image = x.to(torch.float32).transpose(1, 2).unsqueeze(2)  # (B, K, 1, M)
        self._run(image, ONE_TAP, plan, prepared, draw, out, (out.stride(0), out.stride(2), out.stride(1)), bias=bias)
        return out.to(x.dtype)

    def convolution(self, x: Tensor, window: Window, plan: Plan, prepared: Prepared, draw: Draw, bias: Tensor | None = None) -> Tensor:
        if len(window.kernel) == 3:
            return self._volume(x, window, plan, prepared, draw, bias)
        wide = x.unsqueeze(2) if len(window.kernel) == 1 else x
        flat = window if len(window.kernel) == 2 else _two_axes(window)
        size = flat.output_size((wide.shape[2], wide.shape[3]))
        out = torch.empty((x.shape[0], plan.groups * plan.n, *size), dtype=torch.float32, device=x.device)
        self._run(wide, flat, plan, prepared, draw, out, (out.stride(0), out.stride(1), 1), bias=bias)
        return (out.squeeze(2) if len(window.kernel) == 1 else out).to(x.dtype)

    def codes(self, x: Tensor, plan: Plan, prepared: Prepared, draw: Draw) -> Tensor:
        """x (B, M, K) → int32 (B, arrays, Sx, Sw, M, N); a collapsed product has none, so it is prepared again without."""
        out = torch.empty((x.shape[0], x.shape[1], plan.n), dtype=torch.float32, device=x.device)
        shape = (plan.arrays, len(plan.x.widths), len(plan.w.widths), x.shape[0] * x.shape[1], plan.n)
        kept = torch.zeros(shape, dtype=torch.int32, device=x.device)
        image = x.to(torch.float32).transpose(1, 2).unsqueeze(2)
        self._run(image, ONE_TAP, plan, prepared, draw, out, (out.stride(0), out.stride(2), out.stride(1)), kept)
        codes: Tensor = kept.unflatten(3, (x.shape[0], x.shape[1])).movedim(3, 0)
        return codes

    def shortcuts(self, plan: Plan, prepared: Prepared) -> list[str]:
        """Those the last call took."""
        found = []
        if prepared.settings.collapsed:
            found.append("slices are collapsed into one product, as the ADC loses nothing")
        elif _skips(plan) and not int(prepared.negative.item()):
            found.append("the sign slice of inputs that are all >= 0 is skipped")
        found.append(f"dots of {str(prepared.levels.dtype).removeprefix('torch.')} levels")
        return found

    def _dtype(self, plan: Plan, settings: Settings, whole: bool) -> torch.dtype:
        """What levels are multiplied in: the smallest type that holds them exactly, float16 where they are not whole numbers."""
        if self.dot is not None:
            return DOTS[self.dot]
        if not whole:
            return torch.float16
        if (
            _packed(plan, settings, torch.float8_e4m3fn)
            and max(plan.chip.cell.levels - 1, *plan.x.largest) <= 7
            and plan.full <= EXACT_FLOAT8
        ):
            return torch.float8_e4m3fn
        if settings.collapsed:
            return torch.int8 if max(plan.x.span, plan.w.span) <= 8 else torch.float16
        fits = max(plan.chip.cell.levels - 1, *plan.x.largest, *settings.tops) <= 127 and plan.x.span <= 8
        return torch.int8 if fits else torch.float16

    def _run(
        self, x: Tensor, window: Window, plan: Plan, prepared: Prepared, draw: Draw, out: Tensor, strides: tuple[int, int, int],
        kept: Tensor | None = None, bias: Tensor | None = None,
    ) -> None:  # fmt: skip
        """x (B, groups * C, H, W) → out, addressed by (image, channel, position)."""
        if not out.numel():
            return
        size = window.output_size((x.shape[2], x.shape[3]))
        length, m = math.prod(size), x.shape[0] * math.prod(size)
        q, step = _quantised(x, window, size, m, plan, prepared)
        if prepared.planes is not None:
            _read(plan, prepared, draw)
        settings, chip = prepared.settings, plan.chip
        noisy = (chip.adc.noise_lsb.value > 0) + 2 * (chip.dac.noise_sigma.value > 0) + 4 * (chip.adc.offset_lsb.value > 0)
        skip = _skips(plan) and not settings.collapsed and kept is None
        sx, sw = (1, 1) if settings.collapsed else (len(plan.x.widths), len(plan.w.widths))
        tile = self.tile or tile_of(plan, prepared.levels.dtype)
        bm, bn = tile.rows, tile.columns
        padded, packed = columns_padded(plan), _packed(plan, settings, prepared.levels.dtype)
        sums = (_start(settings, sx, sw, 0), _start(settings, sx, sw, 1)) if settings.whole and not settings.collapsed else (0, 0)
        launch(
            multiply_arrays, (cdiv(m, bm) * (padded // bn), plan.groups),
            q, step, prepared.levels, prepared.step, step if bias is None else bias, prepared.negative, _offsets(plan, prepared, draw), q if kept is None else kept, out,
            m, plan.n, length, *strides, plan.groups * plan.n, draw.layer, draw.call, draw.seed, draw.chip,
            float(chip.adc.noise_lsb.value), float(chip.dac.noise_sigma.value), plan.k, plan.arrays, padded,
            SHIFTS=settings.shifts, MOSTS=settings.mosts, TOPS=settings.tops, PACKED=packed, MAGNITUDE=plan.signed,
            MULTIPLY=_multiply(settings, prepared.levels.dtype, packed),
            DIVIDE=settings.divide, WORTH=settings.worth, SUM_ALL=sums[0], SUM_SKIPPED=sums[1], LOWEST=settings.lowest,
            HIGHEST=settings.highest, CLIP=chip.adc.clip, COLLAPSED=settings.collapsed, WHOLE=settings.whole, NOISE=noisy,
            KEEP=kept is not None, SKIP=skip, SX=sx, SW=sw, PAIRS=cdiv(sx * sw, 4), ROWS=plan.rows, R=rows_padded(plan),
            BIAS=bias is not None, FLIP=strides[2] == 1, BM=bm, BN=bn, num_warps=tile.warps, num_stages=tile.stages, **tile.registers,
        )  # fmt: skip

    def _volume(self, x: Tensor, window: Window, plan: Plan, prepared: Prepared, draw: Draw, bias: Tensor | None) -> Tensor:
        """Three axes: each image's patches are made, and are multiplied as a matrix."""
        size = window.output_size(tuple(x.shape[2:]))
        padded = torch.nn.functional.pad(x, [side for pad in reversed(window.padding) for side in (pad, pad)])
        for axis, (taps, step, dilate) in enumerate(zip(window.kernel, window.stride, window.dilation, strict=True)):
            padded = padded.unfold(2 + axis, dilate * (taps - 1) + 1, step)
        cut = padded[..., :: window.dilation[0], :: window.dilation[1], :: window.dilation[2]]  # (B, G * C, *size, *kernel)
        patches = cut.movedim((2, 3, 4), (5, 6, 7)).flatten(5).flatten(1, 4)  # (B, G * C * taps, M)
        out = torch.empty((x.shape[0], plan.groups * plan.n, *size), dtype=torch.float32, device=x.device)
        self._run(patches.unsqueeze(2), ONE_TAP, plan, prepared, draw, out, (out.stride(0), out.stride(1), 1), bias=bias)
        return out.to(x.dtype)


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
    if dtype == torch.float8_e4m3fn:
        return Tile(64, min(64, columns), 4, 2) if plan.arrays >= 48 else Tile(64, min(32, columns), 4, 2, 128)
    return Tile(64, min(32, columns), 4, 2)


@lru_cache(maxsize=4096)
def settings_of(plan: Plan, whole: bool) -> Settings:
    """The constants of a plan; `whole`: column sums are whole numbers."""
    sx, sw, units = len(plan.x.widths), len(plan.w.widths), _units(plan)
    scales = [plan.scale(j) * max(units[i], 1) for i in range(sx) for j in range(sw)]
    if whole:
        multiply = tuple(float(scale) if is_power_of_two(scale.denominator) else float(scale.numerator) for scale in scales)
        divide = tuple(1.0 if is_power_of_two(scale.denominator) else float(scale.denominator) for scale in scales)
    else:
        multiply, divide = tuple(map(float, scales)), (1.0,) * len(scales)
    collapsed = whole and all(units) and loses_nothing(plan, units, column_bounds(plan, units)) and not plan.chip.dac.noise_sigma.value
    worths = [plan.worth(i, j) for i in range(sx) for j in range(sw)]
    unit = _common(worths)
    integers = [int(worth / unit) for worth in worths]
    most = sum(abs(integers[i * sw + j]) * (plan.chip.adc_levels[j] + 1) * 4 for i in range(sx) for j in range(sw))
    fits = most < 1 << 31
    if collapsed:
        x, _, _, unit = collapsed_weights(plan, units)
        unit, fits = unit * abs(x[-1]), True
    tops = _tops(plan)
    lowest, highest = zip(*(plan.code_bounds(j) for j in range(sw)), strict=True)
    return Settings(
        plan.x.shifts, plan.x.largest, tops, multiply, divide, tuple(integers) if fits else tuple(float(worth / unit) for worth in worths),
        float(unit), fits, tuple(map(float, lowest)), tuple(map(float, highest)), collapsed,
    )  # fmt: skip


def _common(worths: list[Fraction]) -> Fraction:
    """The largest fraction all of them are whole multiples of."""
    denominator = math.lcm(*(worth.denominator for worth in worths))
    return Fraction(math.gcd(*(int(worth * denominator) for worth in worths)), denominator)


def _units(plan: Plan) -> tuple[int, ...]:
    top = plan.chip.dac.levels - 1
    return tuple(top // most if top % most == 0 else 0 for most in plan.x.largest)


def _tops(plan: Plan) -> tuple[int, ...]:
    return tuple(0 if unit else plan.chip.dac.levels - 1 for unit in _units(plan))


def _fits(plan: Plan) -> bool:
    units = _units(plan)
    for bound, unit in zip(column_bounds(plan, units), units, strict=True):
        for j in range(len(plan.w.widths)):
            scale = plan.scale(j) * max(unit, 1)
            exact = is_power_of_two(scale.denominator)
            if bound * scale.numerator >= (EXACT if exact else EXACT // 2) or bound * scale >= MOST_CODE:
                return False
    return True


def _skips(plan: Plan) -> bool:
    """Whether the first slice of x says nothing where no input is negative; a noisy ADC reads something even then."""
    return plan.x.kind == "twos" and not plan.chip.adc.noise_lsb.value and not plan.chip.adc.offset_lsb.value


def _start(settings: Settings, sx: int, sw: int, first: int) -> int:
    """What a shift-add starts from, so that the bits of 1.5 * 2^23 in every code cancel, in int32 that wraps around."""
    total: int = -MAGIC_BITS * sum(settings.worth[i * sw + j] for i in range(first, sx) for j in range(sw))
    return (total + (1 << 31)) % (1 << 32) - (1 << 31)


UNITS = {torch.float8_e4m3fn: 2.0**-18, torch.float16: 2.0**-24}
"""What a product of packed digits and levels is counted in: float8 holds both as subnormals, n * 2^-9, float16 only the digits."""


def _multiply(settings: Settings, dtype: torch.dtype, packed: bool) -> tuple[float, ...]:
    unit = UNITS.get(dtype, 1.0) if packed else 1.0
    return tuple(one / unit for one in settings.multiply)


def _packed(plan: Plan, settings: Settings, dtype: torch.dtype) -> bool:
    """Whether all digits of a register can be cut out at once; the interpreter knows no assembly."""
    plain = plan.x.kind == "twos" and plan.x.bits <= 8 and not any(settings.tops) and not plan.chip.dac.noise_sigma.value
    return plain and not INTERPRETED and not settings.collapsed and dtype != torch.float32


def _quantised(x: Tensor, window: Window, size: tuple[int, ...], m: int, plan: Plan, prepared: Prepared) -> tuple[Tensor, Tensor]:
    """q (groups, M, arrays, R) and steps (groups, M, arrays)."""
    r, operands = rows_padded(plan), plan.chip.operands
    q = torch.empty((plan.groups, m, plan.arrays, r), dtype=torch.int8 if plan.x.span <= 8 else torch.int16, device=x.device)
    step = torch.empty((plan.groups, m, plan.arrays), dtype=torch.float32, device=x.device)
    tiles = plan_tiles((m, plan.k), (1, plan.rows), operands.x_granularity)
    block = min(tiles.block[1] // plan.rows, plan.arrays)
    largest = (1 << (plan.x.span - 1)) - 1
    lowest = -largest if plan.signed else -largest - 1
    prepared.negative.zero_()
    tile = 32 if r > 32 else 64  # not R: a square tile makes Triton read it across, sixteen values of a row in one thread
    each = min(BLOCKS_EACH, cdiv(plan.arrays, block))
    launch(
        quantise_patches, (cdiv(m, tile), cdiv(plan.arrays, block * each), plan.groups),
        x, _table(x, window, plan, prepared), q, step, prepared.negative, m, x.shape[1] // plan.groups, x.shape[2], x.shape[3], size[0], size[1], *x.stride(), plan.arrays,
        KH=window.kernel[0], KW=window.kernel[1], SH=window.stride[0], SW=window.stride[1], PH=window.padding[0], PW=window.padding[1],
        DH=window.dilation[0], DW=window.dilation[1], R=r, A_BLOCK=block, EACH=each, LARGEST=float(largest),
        LOWEST=float(lowest), BFP=operands.format == "bfp", SPAN=plan.x.span, TILE=tile, num_warps=4,
    )  # fmt: skip
    return q, step


def _table(x: Tensor, window: Window, plan: Plan, prepared: Prepared) -> Tensor:
    """int32 (arrays, 2, R): where each row of an array lies from the first element of its patch, and its tap; see quantise_patches."""
    key = (*x.stride(), window)
    if key not in prepared.tables:
        taps, (_, stride_c, stride_h, stride_w) = math.prod(window.kernel), x.stride()
        k = torch.arange(plan.k, device=x.device)
        tap = k % taps
        down, across = tap // window.kernel[1] * window.dilation[0], tap % window.kernel[1] * window.dilation[1]
        both = torch.stack([k // taps * stride_c + down * stride_h + across * stride_w, tap])  # (2, K)
        whole = torch.zeros((2, plan.arrays * plan.rows), dtype=torch.int64, device=x.device)
        whole[1] = 31 if taps < 32 else 63
        whole[:, : plan.k] = both
        rows = min(plan.rows, rows_padded(plan))
        table = torch.zeros((plan.arrays, 2, rows_padded(plan)), dtype=torch.int32, device=x.device)
        table[:, 1] = 31 if taps < 32 else 63
        table[:, :, :rows] = whole.unflatten(1, (plan.arrays, plan.rows)).transpose(0, 1)[:, :, :rows]
        prepared.tables = {key: table}
    return prepared.tables[key]


def _read(plan: Plan, prepared: Prepared, draw: Draw) -> None:
    """Levels of this call, written over those of the last."""
    planes, sigmas = prepared.planes, prepared.sigmas
    assert planes is not None and sigmas is not None
    count = plan.groups * len(plan.w.widths) * plan.k * plan.n
    launch(
        read_cells, (cdiv(count, 1024),), planes, sigmas, prepared.levels, count, plan.k, plan.n, low_level(plan), float(len(sigmas) - 1),
        draw.layer * noise.KINDS_A_LAYER + noise.Kind.READ.value, draw.call, draw.seed, draw.chip,
        ROWS=plan.rows, R=rows_padded(plan), ARRAYS=plan.arrays, N_PADDED=columns_padded(plan), PAIR=plan.signed, BLOCK=1024,
    )  # fmt: skip


def _offsets(plan: Plan, prepared: Prepared, draw: Draw) -> Tensor:
    """float32 (arrays, Sw, N'): each converter's offset [codes]; anything where there are none."""
    sigma = plan.chip.adc.offset_lsb.value
    if sigma <= 0:
        return prepared.step
    key = (draw.seed, draw.chip, draw.layer)
    if key not in prepared.offsets:
        slices, device = len(plan.w.widths), prepared.step.device
        every = noise.normals(draw, noise.Kind.OFFSET, 0, plan.arrays * plan.n * slices, device, torch.float32)
        held = torch.zeros((plan.arrays, slices, columns_padded(plan)), dtype=torch.float32, device=device)
        held[..., : plan.n] = sigma * every.reshape(plan.arrays, plan.n, slices).transpose(1, 2)
        prepared.offsets = {key: held}
    return prepared.offsets[key]


def _two_axes(window: Window) -> Window:
    return Window((1, *window.kernel), (1, *window.stride), (0, *window.padding), (1, *window.dilation))
