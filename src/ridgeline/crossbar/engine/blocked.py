"""The engine for everything, in plain torch: any device, window, granularity, sign, number of bits and noise, in bounded memory.

    x ──patches of some positions──> v (groups, K', M') ──maxima──> ──some arrays──> q ──levels, packing──> X (arrays, rows, M')
      for each slice of w:   T = W^T X (arrays, N, M')   ──sums apart──> total * scale, round, clip ──> code * worth added up
      out += step_x * step_w * that, summed over the arrays
    budget_bytes bounds v and what is made of it; T and its like have BLOCK elements, so that they stay in a cache

Exact where column sums are whole numbers (packing.py says how), in float32 or, beyond 2^24, in float64. Noise of the DAC or of cells
makes sums fractions, which are converted as they are. x is quantised in float32; values near half a step are repeated in float64.
`compute` is what the dots run in; all but float32 round sums or inputs where they have too many bits, and then codes may differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...core.errors import OptionError
from ..adc import check_ranges
from ..cells import Cells
from ..plan import Draw, Plan, Window
from ..tiling import Granularity, merge_maxima
from .array_sums import Call, Job, Made, made_of, padded_k, ranges_of, used_rows
from .packing import pack
from .patches import ONE_TAP, Piece, as_one_tap, output_size, patches, pieces

MIB = 1 << 20
BUDGET_CPU, BUDGET_GPU = 16 * MIB, 512 * MIB
BLOCK_CPU, BLOCK_GPU = 1 << 19, 1 << 24  # elements of T: on a CPU as many as memory allows, since each operation starts threads anew
MOST_POSITIONS_CPU = 1024  # more only makes the arrays of one block fewer, but where it has all of them
COMPUTE = ("float32", "tf32", "float16", "bfloat16", "integer")


@dataclass(slots=True)
class Prepared:
    """Cells ready to multiply."""

    step: Tensor
    """float64 (groups, arrays, N): the value of q_w = 1."""
    cells: Cells | None
    """Where each call reads its own levels."""
    levels: Tensor | None
    """(groups, Sw, K', N) as every call reads them, otherwise; nothing else of the cells is kept."""
    made: dict[tuple[Any, ...], Made] = field(default_factory=dict)
    """Packings used so far, by what they depend on."""


class BlockedEngine:
    """Plain torch in bounded memory."""

    name = "blocked"

    def __init__(self, budget_bytes: int | None = None, compute: str = "float32") -> None:
        if compute not in COMPUTE:
            raise OptionError(f"compute = {compute!r}", why="dots do not run in it", do=f"give one of {', '.join(COMPUTE)}")
        if budget_bytes is not None and budget_bytes < MIB:
            raise OptionError(f"budget_bytes = {budget_bytes}", why="less than a MiB holds no array's sums", do=f"give at least {MIB}")
        self.budget_bytes, self.compute = budget_bytes, compute

    def unable(self, plan: Plan, device: str) -> str | None:
        if self.compute == "integer" and not device.startswith("cpu"):
            return f"torch multiplies no integer matrices on {device}"
        if pack(plan, tuple(range(len(plan.x.widths))), whole=True, wide=False, apart=True, collapse=False) is None:
            return f"column sums of up to {plan.full:,} times the ADC's scale do not fit a float64"
        return None

    def prepare(self, plan: Plan, cells: Cells) -> Prepared:
        varies = any(sigma > 0 for sigma in cells.read_sigmas)
        return Prepared(cells.step, cells if varies else None, None if varies else cells.as_read(plan, Draw()))

    def product(self, x: Tensor, plan: Plan, prepared: Prepared, draw: Draw) -> Tensor:
        return self._run(as_one_tap(x), self._call(x, ONE_TAP, plan, prepared, draw)).transpose(1, 2)

    def convolution(self, x: Tensor, window: Window, plan: Plan, prepared: Prepared, draw: Draw) -> Tensor:
        return self._run(x, self._call(x, window, plan, prepared, draw))

    def codes(self, x: Tensor, plan: Plan, prepared: Prepared, draw: Draw) -> Tensor:
        """x (B, M, K) → int64 (B, arrays, Sx, Sw, M, N)."""
        call = self._call(x, ONE_TAP, plan, prepared, draw)
        shape = (x.shape[0], plan.arrays, len(plan.x.widths), len(plan.w.widths), x.shape[1], plan.n)
        call.record = torch.zeros(shape, dtype=torch.int64, device=x.device)
        self._run(as_one_tap(x), call)
        return call.record

    def _call(self, x: Tensor, window: Window, plan: Plan, prepared: Prepared, draw: Draw) -> Call:
        check_ranges(plan)
        levels = prepared.levels if prepared.cells is None else prepared.cells.as_read(plan, draw)
        assert levels is not None
        whole = not levels.is_floating_point() and plan.chip.dac.noise_sigma.value == 0
        negative = x.numel() > 0 and bool(x.detach().amin() < 0)
        return Call(plan, draw, levels, prepared.step, window, whole, negative, prepared.made)

    @torch.no_grad()
    def _run(self, x: Tensor, call: Call) -> Tensor:
        size = output_size(x, call.window)
        plan = call.plan
        work = torch.float64 if x.dtype == torch.float64 else torch.float32
        out = torch.empty((x.shape[0], plan.groups * plan.n, *size), dtype=work, device=x.device)
        if out.numel() == 0:
            return out.to(x.dtype)
        call.step = call.step.to(work)
        on_gpu = x.device.type != "cpu"
        budget = self.budget_bytes or (BUDGET_GPU if on_gpu else BUDGET_CPU)
        block = min(BLOCK_GPU if on_gpu else BLOCK_CPU, budget // 32)
        a_position = plan.groups * (padded_k(plan) + plan.n) * work.itemsize
        positions = max(1, budget // 2 // a_position)
        if not on_gpu:
            positions = min(positions, max(MOST_POSITIONS_CPU, block // (plan.groups * plan.arrays * plan.n)))
        maxima = self._maxima_first(x, call, size, positions) if _block_rows(plan) != 1 else None
        with _full_precision(x.device.type, self.compute):
            for piece in pieces(x.shape[0], size, positions):
                self._piece(x, out, piece, maxima, call, block)
        return out.to(x.dtype)

    def _maxima_first(self, x: Tensor, call: Call, size: tuple[int, ...], positions: int) -> Tensor:
        """(groups, arrays, B, M): of the blocks that several rows share, which no single piece sees."""
        plan, length = call.plan, math.prod(size)
        found = [_array_maxima(_taken(x, call, piece), plan, call.negative) for piece in pieces(x.shape[0], size, positions)]
        whole = torch.cat(found, -1).reshape(plan.groups, plan.arrays, x.shape[0], length)
        return merge_maxima(whole, _block_rows(plan), -1)

    def _piece(self, x: Tensor, out: Tensor, piece: Piece, maxima: Tensor | None, call: Call, block: int) -> None:
        """All of `out` that the piece covers."""
        plan = call.plan
        v = _taken(x, call, piece)  # (groups, K', M')
        maximum = _array_maxima(v, plan, call.negative)
        if maxima is not None:
            span = math.prod(out.shape[3:])
            cut = maxima[:, :, piece.first : piece.last, piece.top * span : piece.bottom * span]
            maximum = cut.reshape(maximum.shape)
        if not bool(torch.isfinite(maximum).all()):
            raise OptionError(
                "an input that is not finite", why="no digit stands for inf or nan", do="look for an overflow before this layer"
            )
        maximum = merge_maxima(maximum, _block_arrays(plan), 1)  # (groups, arrays, M')
        made = self._made(call, x.dtype == torch.float64)
        total = torch.zeros((plan.groups, plan.n, v.shape[-1]), dtype=out.dtype, device=x.device)
        job = Job(call, made, self.compute, _rows_of(piece, out, x.device), block)
        for groups, arrays in _blocks(plan, v.shape[-1], block):
            job.add(total, v, maximum, groups, arrays)
        images = piece.last - piece.first
        shaped = total.view(plan.groups * plan.n, images, piece.bottom - piece.top, *out.shape[3:])
        out[piece.first : piece.last, :, piece.top : piece.bottom] = shaped.movedim(0, 1)

    def _made(self, call: Call, wide: bool) -> Made:
        plan, adc = call.plan, call.plan.chip.adc
        skip = plan.x.kind == "twos" and not call.negative and not adc.noise_lsb.value and not adc.offset_lsb.value
        key = (skip, wide, call.whole, self.compute, call.record is None)
        if key in call.made:
            return call.made[key]
        active = tuple(range(1 if skip else 0, len(plan.x.widths)))
        packing = pack(plan, active, whole=call.whole, wide=wide, apart=self.compute != "float32", collapse=call.record is None)
        if packing is None:
            raise OptionError("a product whose column sums fit no float", why=str(self.unable(plan, "cpu")), do="give fewer rows or levels")
        call.made[key] = made_of(plan, packing)
        return call.made[key]

    def shortcuts(self, plan: Plan, prepared: Prepared) -> list[str]:
        """Those taken in the calls so far."""
        found = set()
        for (skip, *_), made in prepared.made.items():
            packing = made.packing
            together = max(map(len, packing.packs))
            if skip:
                found.add("the sign slice of inputs that are all >= 0 is skipped")
            if packing.collapsed:
                found.add("slices are collapsed into one product, as the ADC loses nothing")
            elif together > 1:
                found.add(f"up to {together} slices of x share one {str(packing.dtype).removeprefix('torch.')} dot")
        return sorted(found)


def _taken(x: Tensor, call: Call, piece: Piece) -> Tensor:
    """(groups, K', M') of the piece, float32 or float64."""
    count = math.prod(output_size(x, call.window)[1:]) * (piece.bottom - piece.top) * (piece.last - piece.first)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    into = torch.empty((call.plan.groups, padded_k(call.plan), count), dtype=dtype, device=x.device)
    patches(x, call.window, call.plan.groups, piece, into)
    return into


def _array_maxima(v: Tensor, plan: Plan, negative: bool) -> Tensor:
    """(groups, arrays, M') of |v|."""
    tiles = v.unflatten(1, (plan.arrays, -1))
    most = tiles.amax(2)  # aminmax along an outer axis takes fifty times as long
    return torch.maximum(most, tiles.amin(2).neg_()) if negative else most


def _block_rows(plan: Plan) -> int:
    """Rows of x that share a scale; 0: all of a matrix."""
    operands = plan.chip.operands
    return _blocked(operands.x_granularity, 0, operands.x_tile_rows)


def _block_arrays(plan: Plan) -> int:
    """Arrays along K that share a scale; 0: all."""
    return _blocked(plan.chip.operands.x_granularity, 1, plan.rows) // plan.rows


def _blocked(granularity: Granularity, axis: int, tile: int) -> int:
    if isinstance(granularity, str):
        alone = "per-row" if axis == 0 else "per-col"
        return tile if granularity == alone else 0
    return -(-granularity[axis] // tile) * tile


def _rows_of(piece: Piece, out: Tensor, device: torch.device) -> Tensor:
    """image * M + m of the piece's positions."""
    line, m = math.prod(out.shape[3:]), math.prod(out.shape[2:])
    position = torch.arange(piece.top * line, piece.bottom * line, device=device)
    return (torch.arange(piece.first, piece.last, device=device)[:, None] * m + position).flatten()


def _blocks(plan: Plan, positions: int, block: int) -> Iterator[tuple[slice, slice]]:
    """(groups, arrays) to be done at once, so that about `block` sums are, and no more inputs than that."""
    many = max(1, block // max(max(plan.n, used_rows(plan)) * positions, 1))
    for groups in ranges_of(plan.groups, max(1, many // plan.arrays)):
        for arrays in ranges_of(plan.arrays, many):
            yield groups, arrays


class _full_precision:
    """Whatever was set for other float32 products, ours are not rounded to fewer bits, unless asked for."""

    def __init__(self, device: str, compute: str) -> None:
        self.wanted = "high" if compute == "tf32" else "highest"
        self.autocast = torch.autocast(device, enabled=False)

    def __enter__(self) -> None:
        self.before = torch.get_float32_matmul_precision()
        if self.before != self.wanted:
            torch.set_float32_matmul_precision(self.wanted)
        self.autocast.__enter__()

    def __exit__(self, *what: Any) -> None:
        self.autocast.__exit__(*what)
        if self.before != self.wanted:
            torch.set_float32_matmul_precision(self.before)
