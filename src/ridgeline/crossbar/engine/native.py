"""The CPU engine: one C kernel, compiled on the spot, that goes from an image to its analog product without anything in between.

    cells ──prepare──> Prepared(levels in the order the kernel reads them, steps, ADC scales)      once; at every call if reads vary
      collapsed   where every code says its sum exactly, slices are put together again: one product of integers
    x (B, M, K) or (B, groups * C, *size) ──base, offset: where each row and each k lie──> kernel ──> out
      whole-numbered levels up to 127: bytes, exact sums;  else float32
      ADC: code = round(sum * scale) in float32 if that is right for every sum an array can give (all are tried, once), else a table
      noise of ADC and DAC, offsets: drawn in the kernel, float32, by the counters of noise.py. A code may differ from the oracle's where
      the value lies within 1e-4 of a half (of an ADC of 256 levels; in proportion above), and only there

Not here: offset columns, scales shared by several rows of x. Then `unable` says so and the caller takes another.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from ...core.errors import MeasureError, OptionError, RidgelineError
from .. import noise
from ..adc import check_ranges, exact_codes, numbers_of_conversion
from ..cells import Cells
from ..plan import Draw, Plan, Window
from ..tiling import plan as tile
from .native_build import build
from .native_source import SOURCE
from .packing import collapsed_weights, column_bounds, loses_nothing

MOST_SUM = 1 << 21  # of levels in a column, and of codes: adding 1.5 * 2^23 rounds up to 2^22, and noise may add to a sum
MOST_BITS = 22
MOST_SLICES = 32
MOST_SIGMAS = 6  # no normal of 24 bits is larger
LANES = 16
MOST_TILES = 4
LEVELS_BYTES = 1 << 19  # of inputs held as levels at once: they stay in the second cache

_POINTERS = ("x", "base", "offset", "cells", "correction", "step", "levels", "table", "adc_offset", "out", "codes")
_NUMBERS = (
    *("x_length", "x_image", "x_group", "out_image", "out_m", "out_n"),
    *("images", "groups", "m", "k", "n", "rows", "arrays", "block_arrays", "words"),
    *("x_slices", "w_slices", "in_floats", "narrow", "bfp", "is_signed", "clip", "span", "magnitude_bits", "full", "shift"),
    *("tiles", "columns", "threads", "next", "failed"),
    *("seed", "chip", "call", "adc_stream", "dac_stream", "numbers"),
)


class _Job(ctypes.Structure):
    """As the C text lays it out."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _NUMBERS),
        *((name, ctypes.c_int32 * MOST_SLICES) for name in ("bits_below", "largest", "factor", "level_start")),
        *((name, ctypes.c_float * MOST_SLICES) for name in ("scale", "lowest", "highest")),
        ("worth", ctypes.c_float * MOST_SLICES**2),
        ("adc_sigma", ctypes.c_float),
        ("dac_sigma", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class Packed:
    """Cells in the kernel's order."""

    levels: Tensor
    """int8 (groups, arrays, N, words, slices, 4), or float32 (groups, arrays, N, rows, slices)."""
    correction: Tensor
    """int32 (groups, arrays, N, slices): what the shift of signed inputs added."""
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Form:
    """What the kernel needs to know of a layer."""

    packed: Packed | None
    """Where all calls read the same."""
    step: Tensor
    """float32 (groups, arrays, N): output per unit of worth, for a step of x of 1."""
    dac: Tensor
    """int32: levels of the digits of those slices whose levels are no multiple of them, one after the other."""
    table: Tensor | None
    """float32 (slices of w, 2 * full + 1): codes of all sums; None: float32 converts them right, or noise leaves no ties to decide."""
    template: bytes
    """A job without pointers and without the numbers of a call."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """One layer's weights, ready to multiply."""

    cells: Cells | None
    """Where every call reads them anew."""
    sliced: Form
    collapsed: Form | None
    """All slices as one, where that gives the same sums."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of x lie, and where the outputs go; all in values, not bytes."""

    base: Tensor
    offset: Tensor
    x_image: int
    x_group: int
    out_image: int
    out_m: int
    out_n: int


class NativeEngine:
    """Compiled for this processor; gcc is needed."""

    name = "native"

    def unable(self, plan: Plan, device: str) -> str | None:
        if not device.startswith("cpu"):
            return f"native runs on the CPU, not on {device}"
        library = _library()
        return _unable(plan) or (library if isinstance(library, str) else None)

    def prepare(self, plan: Plan, cells: Cells) -> Prepared:
        check_ranges(plan)
        chip, steady = plan.chip, not any(cells.read_sigmas)
        levels = cells.as_read(plan, Draw()) if steady else None
        packed = None if levels is None else _pack(plan, levels)
        unit = 1 / ((chip.dac.levels - 1) * (chip.cell.levels - 1) * plan.scale(0))
        whole = steady and cells.exact and not _draws(plan)  # else sums are no whole numbers, and there is nothing to look up
        table = _table(plan) if whole else None
        factors, dac = _dac(plan)
        sliced = Form(packed, _step(cells, unit), dac, table, bytes(_template(plan, factors)))
        return Prepared(
            None if steady else cells, sliced, _collapsed(plan, cells, levels, factors) if whole and levels is not None else None
        )

    def product(self, x: Tensor, plan: Plan, prepared: Prepared, draw: Draw) -> Tensor:
        """x (B, M, K) → (B, M, N)."""
        values, rows = _matrix_rows(x, plan)
        out = torch.empty(x.shape[0], x.shape[1], plan.n)
        _run(values, rows, out, plan, prepared, draw)
        return out.to(x.dtype)

    def convolution(self, x: Tensor, window: Window, plan: Plan, prepared: Prepared, draw: Draw) -> Tensor:
        """x (B, groups * C, *size) → (B, groups * N, *output size)."""
        size = window.output_size(tuple(x.shape[2:]))
        if min(size) < 1:
            why = "the kernel is larger than the padded image"
            raise OptionError(f"a kernel of {window.kernel} on an image of {tuple(x.shape[2:])}", why=why, do="pad more or dilate less")
        values = x.detach().float()
        if any(window.padding):
            values = functional.pad(values, [pad for one in reversed(window.padding) for pad in (one, one)])
        values = values.contiguous()
        channels, room = x.shape[1] // plan.groups, tuple(values.shape[2:])
        base, offset = _window_rows(room, size, window.kernel, window.stride, window.dilation, channels)
        places, plane = len(base), _length(room)
        rows = Rows(base, offset, x.shape[1] * plane, channels * plane, plan.groups * plan.n * places, 1, places)
        out = torch.empty(x.shape[0], plan.groups * plan.n, *size)
        _run(values, rows, out, plan, prepared, draw)
        return out.to(x.dtype)

    def shortcuts(self, plan: Plan, prepared: Prepared) -> list[str]:
        """What is left out without changing a code."""
        if prepared.collapsed is not None:
            return ["slices are collapsed into one product, as the ADC loses nothing", "no noise is drawn"]
        adds = plan.chip.adc.noise_lsb.value or plan.chip.adc.offset_lsb.value
        skipped = f"a slice of x that is all zero in {LANES} rows of an array is {'converted, not multiplied' if adds else 'skipped'}"
        return [skipped] if prepared.cells is not None or _draws(plan) else [skipped, "no noise is drawn"]

    def codes(self, x: Tensor, plan: Plan, prepared: Prepared, draw: Draw) -> Tensor:
        """int32 (B, arrays, Sx, Sw, M, N), from the very kernel `product` runs."""
        values, rows = _matrix_rows(x, plan)
        batch, m = x.shape[:2]
        codes = torch.zeros(batch, plan.arrays, len(plan.x.widths), len(plan.w.widths), m, plan.n, dtype=torch.int32)
        _run(values, rows, torch.empty(batch, m, plan.n), plan, prepared, draw, codes)
        return codes


def _unable(plan: Plan) -> str | None:
    chip, operands = plan.chip, plan.chip.operands
    if operands.sign == "offset":
        return 'native has no offset column: sign is "slice" or "differential"'
    block = tile((2, plan.k), (operands.x_tile_rows, plan.rows), operands.x_granularity).block
    if block[0] != 1:
        return f"native scales x row by row, and here {operands.x_granularity} share a scale"
    if chip.adc.kind == "ramp" and not chip.ideal:
        return "native reads a ramp ADC from a table, which has whole sums only"
    highest = max(float(plan.full * plan.scale(j)) for j in range(len(plan.w.widths)))
    disturbed = 1 + MOST_SIGMAS * chip.dac.noise_sigma.value
    added = MOST_SIGMAS * (chip.adc.noise_lsb.value + chip.adc.offset_lsb.value)
    if max(plan.full, highest) * disturbed + added >= MOST_SUM or plan.x.span > MOST_BITS:
        return f"native holds column sums and codes below {MOST_SUM:,} and inputs of up to {MOST_BITS} bits"
    return None


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | str:
    """The compiled kernel, or why there is none; tried once a process."""
    try:
        library = build(SOURCE)
        library.run.argtypes, library.run.restype = [ctypes.c_void_p], ctypes.c_int64
        library.wrong_conversions.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_float]
        library.wrong_conversions.restype = ctypes.c_int64
        library.normals.argtypes, library.normals.restype = [*[ctypes.c_int64] * 6, ctypes.c_float, ctypes.c_void_p], None
        library.job_bytes.restype = ctypes.c_int64
    except (RidgelineError, OSError, AttributeError) as error:
        return f"native cannot be compiled here: {error}"
    assert library.job_bytes() == ctypes.sizeof(_Job), "the C text and _Job lay out different structures"
    return library


def _compiled() -> ctypes.CDLL:
    library = _library()
    if isinstance(library, str):
        raise MeasureError("the native engine was called", why=library, do="ask `unable` first, or use the blocked engine")
    return library


def _draws(plan: Plan) -> bool:
    """Whether converters have noise or offsets."""
    return any(one.value > 0 for one in (plan.chip.dac.noise_sigma, plan.chip.adc.noise_lsb, plan.chip.adc.offset_lsb))


def _pack(plan: Plan, levels: Tensor) -> Packed:
    """(groups, slices, K', N) → the kernel's order: bytes where they hold all levels of cells and DAC."""
    chip, shift = plan.chip, plan.chip.dac.levels - 1 if plan.signed else 0
    large = max(chip.cell.levels - 1, shift) > 127 or chip.dac.levels > 256 or chip.dac.noise_sigma.value > 0
    return _in_order(plan, levels, None if large or levels.is_floating_point() else shift)


def _in_order(plan: Plan, levels: Tensor, shift: int | None) -> Packed:
    """`shift` is added to levels of x so that none is negative; None: floats, which need none."""
    groups, slices, _, n = levels.shape
    by_array = levels.view(groups, slices, plan.arrays, plan.rows, n).permute(0, 2, 4, 3, 1)  # (groups, arrays, N, rows, slices)
    if shift is None:
        return Packed(by_array.float().contiguous(), torch.empty(0, dtype=torch.int32))
    padded = functional.pad(by_array, (0, 0, 0, -plan.rows % 4)).to(torch.int8)
    words = padded.unflatten(3, (-1, 4)).transpose(-1, -2)  # (groups, arrays, N, words, slices, 4)
    return Packed(words.contiguous(), (-shift * padded.sum(3, dtype=torch.int32)).to(torch.int32).contiguous(), shift)


def _step(cells: Cells, unit: Fraction) -> Tensor:
    return (cells.step * float(unit)).float().contiguous()


def _collapsed(plan: Plan, cells: Cells, levels: Tensor, factors: list[int]) -> Form | None:
    """One slice of x, q itself, and one of w; None: codes say less than the sums, or these grow too large."""
    x, units = plan.x, tuple(factors)
    if not all(units) or not loses_nothing(plan, units, column_bounds(plan, units)):
        return None
    _, weights, _, worth = collapsed_weights(plan, units)  # of x: 2^shift of each slice, as every unit is a whole number
    top = plan.chip.cell.levels - 1
    if sum(map(abs, weights)) * top >= 1 << 31:
        return None
    w = torch.zeros_like(levels[:, 0], dtype=torch.int32)
    for j, weight in enumerate(weights):
        w.add_(levels[:, j], alpha=weight)
    if bool((w % top == 0).all()):
        w, worth = w // top, worth * top
    lowest, highest = int(w.min()), int(w.max())
    shift = (1 << x.bits) - 1 if plan.signed else 1 << (x.span - 1)  # the largest |q|
    if min(plan.rows, plan.k) * shift * max(highest, -lowest) >= 2 * MOST_SUM:
        return None
    in_bytes = 2 * shift - (not plan.signed) <= 255 and lowest >= -128 and highest <= 127
    job = _template(plan, factors)
    job.x_slices, job.w_slices, job.clip, job.is_signed, job.magnitude_bits = 1, 1, 0, 1, x.bits if plan.signed else x.span
    job.bits_below[0], job.largest[0], job.factor[0], job.scale[0], job.worth[0] = 0, (1 << x.span) - 1, 1, 1.0, 1.0
    packed = _in_order(plan, w[:, None], shift if in_bytes else None)
    return Form(packed, _step(cells, worth), torch.empty(0, dtype=torch.int32), None, bytes(job))


def _matrix_rows(x: Tensor, plan: Plan) -> tuple[Tensor, Rows]:
    if x.dim() != 3 or x.shape[-1] != plan.k or plan.groups != 1:
        raise OptionError(f"x of shape {tuple(x.shape)}", why=f"it is (B, M, {plan.k}), of one group", do="look at the layer's shapes")
    values, m = x.detach().float().contiguous(), x.shape[1]
    base = torch.arange(m) * plan.k
    return values, Rows(base, torch.arange(plan.k), m * plan.k, 0, m * plan.n, plan.n, 1)


@lru_cache(maxsize=256)
def _window_rows(
    room: tuple[int, ...], size: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...], channels: int
) -> tuple[Tensor, Tensor]:
    """Of a padded image (channels, *room): the place of each output's first tap, and of each (channel, taps) from there."""
    base, offset, pitch = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 1
    for length, outputs, taps, step, apart in zip(*(reversed(axis) for axis in (room, size, kernel, stride, dilation)), strict=True):
        base = (torch.arange(outputs)[:, None] * step * pitch + base).flatten()
        offset = (torch.arange(taps)[:, None] * apart * pitch + offset).flatten()
        pitch *= length
    offset = (torch.arange(channels)[:, None] * pitch + offset).flatten()
    return base, offset


def _length(size: tuple[int, ...]) -> int:
    return int(torch.Size(size).numel())


@lru_cache(maxsize=64)
def _table(plan: Plan) -> Tensor | None:
    """Codes of every sum from -full to full, for each slice of w: (slices, 2 * full + 1); None where rounding float32 finds them all."""
    full, found, right = plan.full, [], True
    sums = torch.arange(-full, full + 1)
    for j in range(len(plan.w.widths)):
        found.append(exact_codes(sums, plan, j).to(torch.int32))
        right = right and not plan.shift(j) and not _compiled().wrong_conversions(found[j].data_ptr(), full, float(plan.scale(j)))
    if right:
        return None
    bounds = [plan.code_bounds(j) if plan.chip.adc.clip else (-MOST_SUM, MOST_SUM) for j in range(len(found))]
    lowest, highest = torch.tensor(bounds).T[..., None]
    return torch.stack(found).clamp(lowest, highest).to(torch.float32)


def _dac(plan: Plan) -> tuple[list[int], Tensor]:
    """Of each slice of x: level / digit, or 0 and a table of levels where that is no whole number."""
    most = plan.chip.dac.levels - 1
    factors = [0 if most % largest else most // largest for largest in plan.x.largest]
    tabled = [largest for largest, factor in zip(plan.x.largest, factors, strict=True) if not factor]
    levels = [(2 * digit * most + largest) // (2 * largest) for largest in tabled for digit in range(largest + 1)]
    return factors, torch.tensor(levels, dtype=torch.int32)


def _template(plan: Plan, factors: list[int]) -> _Job:
    x, w, chip = plan.x, plan.w, plan.chip
    job = _Job(
        groups=plan.groups, k=plan.k, n=plan.n, rows=plan.rows, arrays=plan.arrays, x_slices=len(x.widths), w_slices=len(w.widths),
        bfp=chip.operands.format == "bfp", is_signed=plan.signed, clip=chip.adc.clip, span=x.span, magnitude_bits=x.bits, full=plan.full,
        numbers=numbers_of_conversion(plan), adc_sigma=chip.adc.noise_lsb.value, dac_sigma=chip.dac.noise_sigma.value,
    )  # fmt: skip
    block = tile((1, plan.k), (chip.operands.x_tile_rows, plan.rows), chip.operands.x_granularity).block[1]
    job.block_arrays = min(block // plan.rows, plan.arrays)
    start = 0
    for i, (below, largest, factor) in enumerate(zip(x.shifts, x.largest, factors, strict=True)):
        job.bits_below[i], job.largest[i], job.factor[i], job.level_start[i] = below, largest, factor, start
        start += 0 if factor else largest + 1
    for j in range(len(w.widths)):
        job.scale[j] = float(plan.scale(j))
        job.lowest[j], job.highest[j] = plan.code_bounds(j)
        for i in range(len(x.widths)):
            exact = x.largest[i] * x.weights[i] * w.largest[j] * w.weights[j] * plan.scale(0) / plan.scale(j)
            job.worth[i * MOST_SLICES + j] = float(exact)
    return job


def _run(x: Tensor, rows: Rows, out: Tensor, plan: Plan, prepared: Prepared, draw: Draw, codes: Tensor | None = None) -> None:
    """Fills `out`, and `codes` if given."""
    if out.numel() == 0:
        return
    form = prepared.sliced if codes is not None or prepared.collapsed is None else prepared.collapsed
    packed = form.packed
    if packed is None:
        assert prepared.cells is not None
        packed = _pack(plan, prepared.cells.as_read(plan, draw))
    job = _Job.from_buffer_copy(form.template)
    offsets = _offsets(plan, draw)
    held = (x, rows.base, rows.offset, packed.levels, packed.correction, form.step, form.dac, form.table, offsets, out, codes)
    for name, tensor in zip(_POINTERS, held, strict=True):
        setattr(job, name, None if tensor is None else tensor.data_ptr())
    job.x_length, job.images, job.m, job.words = x.numel(), x.shape[0], len(rows.base), packed.levels.shape[3]
    job.x_image, job.x_group, job.out_image, job.out_m, job.out_n = rows.x_image, rows.x_group, rows.out_image, rows.out_m, rows.out_n
    job.in_floats, job.shift = packed.levels.is_floating_point(), packed.shift
    job.narrow = not job.in_floats and plan.x.bits <= 8 and len(form.dac) == 0
    if _draws(plan):
        job.seed, job.chip = draw.seed, draw.chip
        (job.adc_stream, job.call), (job.dac_stream, _) = noise.stream_of(draw, noise.Kind.ADC), noise.stream_of(draw, noise.Kind.DAC)
    job.tiles, job.columns, job.threads = _shares(job)
    _raise_for(_compiled().run(ctypes.addressof(job)))


def _offsets(plan: Plan, draw: Draw) -> Tensor | None:
    """float32 (arrays, groups * N, slices of w) [LSB]."""
    sigma = plan.chip.adc.offset_lsb.value
    if sigma <= 0:
        return None
    found = torch.empty(plan.arrays, plan.groups * plan.n, len(plan.w.widths))
    _compiled().normals(draw.seed, draw.chip, *noise.stream_of(draw, noise.Kind.OFFSET), 0, found.numel(), sigma, found.data_ptr())
    return found


def _shares(job: _Job) -> tuple[int, int, int]:
    """(tiles, columns) of one work item, and threads: enough items for all threads, few enough that inputs are not cut twice in vain."""
    threads, all_tiles, parts = torch.get_num_threads(), -(-job.m // LANES), job.images * job.groups
    fitting = LEVELS_BYTES // (job.block_arrays * job.x_slices * job.words * LANES * 4)
    tiles = max(1, min(MOST_TILES, fitting, -(-all_tiles * parts // (2 * threads))))
    items = -(-all_tiles // tiles) * parts
    chunks = min(-(-threads // items), -(-job.n // LANES))
    columns = -(-job.n // chunks)
    return tiles, columns, min(threads, items * chunks)


def _raise_for(result: int) -> None:
    if result == 1:
        raise OptionError(
            "an operand that is not finite", why="no digit stands for inf or nan", do="look for an overflow before this layer"
        )
    if result:
        raise OptionError(
            "no memory for one tile of inputs", why="the system gave none", do="use scales of fewer columns, or the blocked engine"
        )
