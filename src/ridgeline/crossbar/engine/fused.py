"""The engine for GPUs: two Triton kernels a product, nothing sliced is ever written to memory.

    x ──quantise_patches──> q (one small integer an element of a patch), steps ──multiply_arrays──> out, bias added
    cells ──pack_cells, once──> w (groups, slices, arrays, N', R): float8 or int8 where levels are whole numbers, else float16
          ──read_cells, every call──> float16, only where reads vary

`unable` names what it leaves to the blocked engine: sums beyond float32, inputs of more than 16 bits. Where rows share a scale, maxima are
found by a launch of their own.
Whole numbers are exact in all three types. Float16 holds other levels to 5e-4 of their value; noise is drawn in float32 and rounded
to it. Inputs that are not finite give nan.
The sign slice of x is skipped on the device itself, by a flag that the first kernel sets, so that no pass waits for the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...core.errors import OptionError
from ...kernel.jit import HAVE_TRITON, INTERPRETED, cdiv, empty, launch, next_power_of_2
from .. import noise
from ..adc import check_ranges
from ..cells import Cells, low_level
from ..plan import Draw, Plan, Window
from ..tiling import merge_maxima
from ..tiling import plan as plan_tiles
from .fused_kernels import multiply_arrays, quantise_patches
from .fused_noise import read_cells
from .fused_program import of_levels, pack
from .fused_settings import (
    DOTS,
    EXACT_FLOAT8,
    MOST_CODE,
    PatchTile,
    Settings,
    Tile,
    collapsed_bounds,
    columns_padded,
    constants_of,
    fits_float32,
    packed_of,
    patch_tile_of,
    rows_padded,
    settings_of,
    skips_sign,
    tile_of,
    units_of,
)
from .packing import collapsed_weights

READ_TILE = 32, 64  # rows and columns of cells
MOST_ELEMENTS = (1 << 31) - (1 << 24)  # a patch at the border begins before its image
ONE_TAP = Window((1, 1), (1, 1), (0, 0), (1, 1))


@dataclass(slots=True)
class Prepared:
    """Cells as the kernels want them."""

    settings: Settings
    levels: Tensor
    """(groups, slices, arrays, N', R), float8, int8 or float16; where reads vary: where each call writes them."""
    step: Tensor
    """float32 (groups, arrays, N'), the unit of worth folded in."""
    planes: Tensor | None
    """Programmed levels, where every call reads its own."""
    sigmas: Tensor | None
    negative: Tensor
    """int32: whether the last input had a negative value."""
    constants: dict[str, Any]
    """Of multiply_arrays."""
    offsets: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    tables: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)


class FusedEngine:
    """Triton on a GPU; in Triton's interpreter on a CPU, for tests."""

    name = "fused"
    adds_bias = True

    def __init__(self, dot: str | None = None, tile: Tile | None = None, patch_tile: PatchTile | None = None) -> None:
        self.dot, self.tile, self.patch_tile = dot, tile, patch_tile

    def unable(self, plan: Plan, device: str) -> str | None:
        operands, chip = plan.chip.operands, plan.chip
        if not HAVE_TRITON:
            return "Triton is not installed"
        if not device.startswith("cuda") and not INTERPRETED:
            return f"Triton does not run on {device}"
        if operands.sign == "offset" and chip.dac.noise_sigma.value:
            return 'DAC noise with sign = "offset"'
        if plan.x.span > 16 or chip.cell.levels > 2049 or chip.dac.levels > 2049:
            return f"inputs of {plan.x.span} bits, {chip.cell.levels} cell levels or {chip.dac.levels} DAC levels are too many for its dots"
        if max(chip.adc_levels) > MOST_CODE or not fits_float32(plan):
            return f"column sums of up to {plan.full:,} times the ADC's scale do not fit a float32"
        return None

    def prepare(self, plan: Plan, cells: Cells, collapse: bool = True) -> Prepared:
        check_ranges(plan)
        varies = any(sigma > 0 for sigma in cells.read_sigmas)
        whole = cells.exact and not varies and not plan.chip.dac.noise_sigma.value
        settings = settings_of(plan, whole, collapse)
        device, dtype = cells.planes.device, self._dtype(plan, settings, whole)
        worths = tuple(collapsed_weights(plan, units_of(plan))[1]) if settings.collapsed else ()
        parts, padded = plan.groups * (1 if worths else len(plan.w.widths)), columns_padded(plan)
        held = torch.int8 if dtype == torch.float8_e4m3fn else dtype  # whole numbers up to 7 are its subnormals
        levels = empty((parts, plan.arrays, padded, rows_padded(plan)), held, device)
        step = empty((plan.groups, plan.arrays, padded), torch.float32, device)
        pack(plan, cells, levels, step, settings.unit, worths)
        negative = torch.zeros(1, dtype=torch.int32, device=device)
        levels = levels if held == dtype else levels.view(dtype)
        planes, sigmas = (cells.planes, of_levels(cells.read_sigmas, device)) if varies else (None, None)
        return Prepared(settings, levels, step, planes, sigmas, negative, constants_of(plan, whole, collapse, dtype))

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

    def inputs(self, x: Tensor, window: Window | None, plan: Plan, prepared: Prepared) -> Tensor | None:
        """x (B, groups * C, H, W) → float32 (groups, K, B * L): the values its patches' digits stand for, patches along the rows.

        Without a window x is (B, L, K), and its rows are the patches. None where patches are not cut in the kernel.
        """
        if not x.numel() or (window is not None and len(window.kernel) != 2):
            return None
        if window is None:
            x, window = x.transpose(1, 2).unsqueeze(2), ONE_TAP
        size = window.output_size((x.shape[2], x.shape[3]))
        m = x.shape[0] * math.prod(size)
        q, step = quantised(x, window, size, m, plan, prepared, self.patch_tile or patch_tile_of(plan))
        used = min(plan.rows, rows_padded(plan))
        values = (q[..., :used] * step[..., None]).flatten(2)[..., : plan.k]  # (groups, M, K)
        return values.transpose(1, 2)

    def codes(self, x: Tensor, plan: Plan, prepared: Prepared, draw: Draw) -> Tensor:
        """x (B, M, K) → int32 (B, arrays, Sx, Sw, M, N). A collapsed product has none: prepare it with collapse=False."""
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
        elif skips_sign(plan) and not int(prepared.negative.item()):
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
            packed_of(plan, settings, torch.float8_e4m3fn)
            and max(plan.chip.cell.levels - 1, *plan.x.largest) <= 7
            and plan.full <= EXACT_FLOAT8
        ):
            return torch.float8_e4m3fn
        if settings.collapsed:
            return torch.int8 if max(collapsed_bounds(plan)) <= 128 and plan.x.span <= 8 else torch.float16
        fits = max(plan.chip.cell.levels - 1, *plan.x.largest, *settings.tops) <= 127 and plan.x.span <= 8
        return torch.int8 if fits else torch.float16

    def _run(
        self, x: Tensor, window: Window, plan: Plan, prepared: Prepared, draw: Draw, out: Tensor, strides: tuple[int, int, int],
        kept: Tensor | None = None, bias: Tensor | None = None,
    ) -> None:  # fmt: skip
        """x (B, groups * C, H, W) → out, addressed by (image, channel, position)."""
        if not out.numel():
            return
        if 1 + sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True)) > MOST_ELEMENTS:
            raise OptionError(
                f"an input of {x.numel():,} elements", why="the kernel counts them in 32 bits", do="give fewer images at once"
            )
        size = window.output_size((x.shape[2], x.shape[3]))
        length, m = math.prod(size), x.shape[0] * math.prod(size)
        q, step = quantised(x, window, size, m, plan, prepared, self.patch_tile or patch_tile_of(plan))
        if prepared.planes is not None:
            _read(plan, prepared, draw)
        chip, tile = plan.chip, self.tile or tile_of(plan, prepared.levels.dtype)
        skip = skips_sign(plan) and not prepared.settings.collapsed and kept is None
        padded = columns_padded(plan)
        launch(
            multiply_arrays, (cdiv(m, tile.rows) * (padded // tile.columns), plan.groups),
            q, step, prepared.levels, prepared.step, step if bias is None else bias, prepared.negative, _offsets(plan, prepared, draw),
            q if kept is None else kept, out,
            m, plan.n, length, *strides, plan.groups * plan.n, draw.layer, draw.call, draw.seed, draw.chip,
            float(chip.adc.noise_lsb.value), float(chip.dac.noise_sigma.value), plan.k, plan.arrays, padded,
            **prepared.constants, KEEP=kept is not None, SKIP=skip, BIAS=bias is not None, FLIP=strides[2] == 1,
            BM=tile.rows, BN=tile.columns, num_warps=tile.warps, num_stages=tile.stages, **tile.registers,
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


def quantised(
    x: Tensor, window: Window, size: tuple[int, ...], m: int, plan: Plan, prepared: Prepared, tile: PatchTile
) -> tuple[Tensor, Tensor]:
    """q (groups, M, arrays, R) and steps (groups, M, arrays)."""
    r, operands = rows_padded(plan), plan.chip.operands
    q = torch.empty((plan.groups, m, plan.arrays, r), dtype=torch.int8 if plan.x.span <= 8 else torch.int16, device=x.device)
    step = torch.empty((plan.groups, m, plan.arrays), dtype=torch.float32, device=x.device)
    length = math.prod(size)
    tiles = plan_tiles((length, plan.k), (operands.x_tile_rows, plan.rows), operands.x_granularity)
    block = min(tiles.block[1] // plan.rows, plan.arrays)
    largest = (1 << (plan.x.span - 1)) - 1
    lowest = -largest if plan.signed else -largest - 1
    each = min(tile.blocks, cdiv(plan.arrays, block))
    prepared.negative.zero_()

    def launched(shared: int) -> None:
        launch(
            quantise_patches, (cdiv(m, tile.patches), cdiv(plan.arrays, block * each), plan.groups),
            x, _table(x, window, plan, prepared), q.view(torch.int32), step, prepared.negative, m, x.shape[1] // plan.groups,
            x.shape[2], x.shape[3], size[0], size[1], *x.stride(), plan.arrays,
            KH=window.kernel[0], KW=window.kernel[1], SH=window.stride[0], SW=window.stride[1], PH=window.padding[0],
            PW=window.padding[1], DH=window.dilation[0], DW=window.dilation[1], R=r, A_BLOCK=block, EACH=each,
            PACK=4 if plan.x.span <= 8 else 2, LARGEST=float(largest), LOWEST=float(lowest), BFP=operands.format == "bfp",
            SPAN=plan.x.span, SHARED=shared, TILE=tile.patches, num_warps=tile.warps,
        )  # fmt: skip

    if tiles.block[0] == 1:
        launched(0)
    else:
        launched(1)
        of_image = step.view(plan.groups, -1, length, plan.arrays)
        step = merge_maxima(of_image, tiles.block[0], 2).contiguous().view(step.shape)
        launched(2)
    return q, step


def _table(x: Tensor, window: Window, plan: Plan, prepared: Prepared) -> Tensor:
    """int64 (arrays, R): where each row of an array lies from the first element of its patch, and its tap; see quantise_patches."""
    key = (*x.stride(), window)
    if key not in prepared.tables:
        prepared.tables = {key: _table_of(x.stride(), window, plan.k, plan.rows, rows_padded(plan), x.device)}
    return prepared.tables[key]


@lru_cache(maxsize=1024)
def _table_of(stride: tuple[int, ...], window: Window, k_all: int, rows: int, r: int, device: torch.device) -> Tensor:
    taps, (_, stride_c, stride_h, stride_w) = math.prod(window.kernel), stride
    arrays, held = cdiv(k_all, rows), min(rows, r)
    k = torch.arange(k_all, device=device)
    tap = k % taps
    down, across = tap // window.kernel[1] * window.dilation[0], tap % window.kernel[1] * window.dilation[1]
    at = k // taps * stride_c + down * stride_h + across * stride_w
    whole = torch.full((arrays * rows,), (0 if taps < 32 else 63) << 32, device=device)
    whole[:k_all] = at + (((1 << tap) if taps < 32 else tap) << 32)
    table = torch.full((arrays, r), (0 if taps < 32 else 63) << 32, device=device)
    table[:, :held] = whole.view(arrays, rows)[:, :held]
    return table


def _read(plan: Plan, prepared: Prepared, draw: Draw) -> None:
    """Levels of this call, written over those of the last."""
    planes, sigmas = prepared.planes, prepared.sigmas
    assert planes is not None and sigmas is not None
    parts = plan.groups * len(plan.w.widths)
    rows, columns = min(READ_TILE[0], next_power_of_2(plan.rows)), min(READ_TILE[1], max(4, next_power_of_2(plan.n)))
    launch(
        read_cells, (parts, cdiv(plan.n, columns), plan.arrays * cdiv(plan.rows, rows)), planes, sigmas, prepared.levels,
        parts * plan.k * plan.n, parts * plan.arrays * plan.rows * plan.n, plan.k, plan.n, low_level(plan), float(len(sigmas) - 1),
        draw.layer * noise.KINDS_A_LAYER + noise.Kind.READ.value, draw.call, draw.seed, draw.chip,
        ALIGNED=plan.n % 4 == 0, ROWS=plan.rows, R=rows_padded(plan), ARRAYS=plan.arrays, N_PADDED=columns_padded(plan), PAIR=plan.signed,
        BLOCK_K=rows, BLOCK_N=columns,
    )  # fmt: skip


def _offsets(plan: Plan, prepared: Prepared, draw: Draw) -> Tensor:
    """float32 (groups, arrays, Sw, N'): each converter's offset [codes]; anything where there are none."""
    sigma = plan.chip.adc.offset_lsb.value
    if sigma <= 0:
        return prepared.step
    key = (draw.seed, draw.chip, draw.layer)
    if key not in prepared.offsets:
        shape, device = (plan.arrays, plan.groups, plan.n, len(plan.w.widths)), prepared.step.device
        every = noise.normals(draw, noise.Kind.OFFSET, 0, math.prod(shape), device, torch.float32).reshape(shape)
        held = torch.zeros((plan.groups, plan.arrays, shape[3], columns_padded(plan)), dtype=torch.float32, device=device)
        held[..., : plan.n] = sigma * every.permute(1, 0, 3, 2)
        prepared.offsets = {key: held}
    return prepared.offsets[key]


def _two_axes(window: Window) -> Window:
    return Window((1, *window.kernel), (1, *window.stride), (0, *window.padding), (1, *window.dilation))
