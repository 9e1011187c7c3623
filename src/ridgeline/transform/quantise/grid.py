"""Uniform quantisers: the rule of each, exact, with its error in dB.

    weight ──rows, groups──> low, high of each group ──> scale, zero ──> codes ──dequantise──> weight'

    symmetric   codes int8 -2^(b-1) .. 2^(b-1)-1     scale = max|w| / (2^(b-1)-1)                           w' = code * scale
    zero        codes uint8 0 .. 2^b-1               scale = (high-low) / (2^b-1), 0 inside low..high       w' = (code - zero) * scale
    minimum     codes uint8 0 .. 2^b-1               scale = (high-low) / (2^b-1), zero = low               w' = code * scale + zero

Ranges are taken in float64; scale (and a minimum) are then rounded to `scale_type`, and codes follow from the rounded ones:
code = round(w / scale) + zero, round half to even, cut to the range. Granularity: one scale a tensor, a channel (dimension 0) or
`group` neighbours of a channel, the last group as short as it comes. A group of zeros gets scale 1 and code 0.
A group that lies on a grid of a `minimum` quantiser already keeps that grid: quantising twice changes nothing, and blocks of a GGUF
file (Q4_1: group 32, float16) come back bit by bit. Scales too small for the type become its smallest: error below that, not a refusal.
SQNR = 10 log10(sum w² / sum (w - w')²). Straight-through gradients: Bengio 2013; those of the scale: Esser 2020 (LSQ).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...core.errors import TransformError
from .lattice import keep_grids
from .packing import check_bits

Granularity = Literal["tensor", "channel", "group"]
Form = Literal["zero", "minimum", "codebook"]
SCALE_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Grid:
    """Which quantiser. `form` says how an asymmetric one is shifted; "codebook" marks codes that index a table (codebook.py)."""

    bits: int = 8
    symmetric: bool = True
    granularity: Granularity = "channel"
    group: int = 64
    form: Form = "zero"
    scale_type: str = "float32"

    def __post_init__(self) -> None:
        check_bits(self.bits)
        if self.granularity not in ("tensor", "channel", "group"):
            raise TransformError(f"granularity = {self.granularity!r}", why="it is tensor, channel or group", do="use channel")
        if self.granularity == "group" and self.group < 1:
            raise TransformError(f"group = {self.group}", why="a group holds at least one weight", do="use group = 64")
        if self.form not in ("zero", "minimum", "codebook"):
            raise TransformError(f"form = {self.form!r}", why="it is zero, minimum or codebook", do="use zero")
        if self.scale_type not in SCALE_TYPES:
            raise TransformError(f"scale_type = {self.scale_type!r}", why=f"scales are {', '.join(SCALE_TYPES)}", do="use float32")

    @property
    def low(self) -> int:
        """The least code."""
        return -(1 << (self.bits - 1)) if self.symmetric and self.form != "codebook" else 0

    @property
    def high(self) -> int:
        """The greatest code."""
        return self.low + (1 << self.bits) - 1

    @property
    def dtype(self) -> torch.dtype:
        return SCALE_TYPES[self.scale_type]

    def groups(self, columns: int) -> int:
        """Scales of one row."""
        return -(-columns // self.group) if self.granularity == "group" else 1


@dataclass(frozen=True, slots=True)
class Quantised:
    """Codes [rows, columns] of a weight of `shape`; scale [rows or 1, groups], zero likewise (uint8 zero point or minimum) or None."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    shape: torch.Size
    grid: Grid
    codebook: Tensor | None = None  # [rows or 1, 2**bits] float32: the value of each code, before the scale

    def to(self, device: torch.device | str) -> Quantised:
        """The same on another device."""
        zero = None if self.zero is None else self.zero.to(device)
        book = None if self.codebook is None else self.codebook.to(device)
        return Quantised(self.codes.to(device), self.scale.to(device), zero, self.shape, self.grid, book)


def as_rows(weight: Tensor) -> Tensor:
    """[rows, columns]: dimension 0 against all others; a vector is one row."""
    return weight.reshape(weight.shape[0], -1) if weight.dim() > 1 else weight.reshape(1, -1)


def check_weight(weight: Tensor, name: str) -> None:
    """A float weight with at least one element, all of them finite; else a TransformError that names the layer."""
    if not weight.is_floating_point() or weight.numel() == 0:
        raise TransformError(
            f"quantise {name}: {weight.dtype} of shape {tuple(weight.shape)}", why="it needs float weights, at least one", do=f"skip {name}"
        )
    if not bool(torch.isfinite(weight).all()):
        bad = int((~torch.isfinite(weight)).sum())
        raise TransformError(
            f"quantise {name}: {bad} of {weight.numel()} weights are NaN or infinite", why="no finite scale covers them",
            do="find where training diverged, or skip the layer",
        )  # fmt: skip


def spread(per_group: Tensor, grid: Grid, columns: int) -> Tensor:
    """[rows, groups] → a value for each weight: [rows, columns], or [rows, 1] where a row has one."""
    if grid.granularity != "group" or grid.group >= columns:
        return per_group
    return per_group.repeat_interleave(grid.group, 1)[:, :columns]


def ranges(rows: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Least and greatest weight of each group, float64 [rows or 1, groups]."""
    if grid.granularity == "tensor":
        rows = rows.reshape(1, -1)
    grouped = _grouped(rows, grid)
    return grouped.amin(2).double(), grouped.amax(2).double()


def _grouped(rows: Tensor, grid: Grid) -> Tensor:
    """[rows, groups, group]; a short last group is filled up with the row's last weight, which changes no range."""
    count, columns = rows.shape
    if grid.granularity != "group" or grid.group >= columns:
        return rows[:, None]
    short = -columns % grid.group
    if short:
        rows = torch.cat((rows, rows[:, -1:].expand(count, short)), 1)
    return rows.reshape(count, -1, grid.group)


def scales(low: Tensor, high: Tensor, grid: Grid, name: str = "the weight") -> tuple[Tensor, Tensor | None]:
    """(scale, zero) of groups that range from low to high (float64), as stored."""
    if grid.symmetric:
        return _stored(torch.maximum(low.abs(), high.abs()) / grid.high, grid, name), None
    steps = grid.high - grid.low
    if grid.form == "minimum":
        minimum = _rounded(low, grid, name)
        return _rounded((high - low) / steps, grid, name), minimum
    low, high = low.clamp_max(0), high.clamp_min(0)
    scale = _stored((high - low) / steps, grid, name)
    zero = torch.round(-low / scale.double()).clamp(grid.low, grid.high)
    return scale, zero.to(torch.uint8)


def _stored(scale: Tensor, grid: Grid, name: str) -> Tensor:
    """Rounded to the type; 1 for a group of zeros, never 0."""
    info = torch.finfo(grid.dtype)
    # kernels flush float32 and bfloat16 subnormals to 0; those of float16 are normal numbers to them
    least = info.smallest_normal * info.eps if grid.dtype is torch.float16 else info.smallest_normal
    rounded = _rounded(scale, grid, name).clamp_min(least)
    return torch.where(scale == 0, torch.ones_like(rounded), rounded)


def _rounded(value: Tensor, grid: Grid, name: str) -> Tensor:
    rounded = value.to(grid.dtype)
    if not bool(torch.isfinite(rounded).all()):
        raise TransformError(
            f"quantise {name}: a scale or minimum of {float(value.abs().max()):.3g}", why=f"it does not fit {grid.scale_type}",
            do="use scale_type = float32, or rescale the layer",
        )  # fmt: skip
    return rounded


def quantise(weight: Tensor, grid: Grid, name: str = "the weight") -> Quantised:
    """Round to nearest on the grid that each group's range asks for."""
    check_weight(weight, name)
    rows = as_rows(weight.detach())
    low, high = ranges(rows, grid)
    scale, zero = scales(low, high, grid, name)
    if grid.form == "minimum" and not grid.symmetric:
        assert zero is not None
        scale, zero = keep_grids(_grouped(rows if grid.granularity != "tensor" else rows.reshape(1, -1), grid), scale, zero, grid.high)
    return quantise_with(weight, scale, zero, grid)


def quantise_with(weight: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid) -> Quantised:
    """Codes of a weight on given scales (a trained scale, say): [rows or 1, groups] each."""
    rows = as_rows(weight.detach())
    return Quantised(codes_of(rows, scale, zero, grid), scale, zero, weight.shape, grid)


def codes_of(rows: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid) -> Tensor:
    """Codes [rows, columns], int8 where symmetric, else uint8; float32 arithmetic as in `fake_quantise` (float64 with a minimum)."""
    columns = rows.shape[1]
    wide = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
    if grid.form == "minimum" and zero is not None:
        step, least = spread(scale, grid, columns).double(), spread(zero, grid, columns).double()
        code = torch.where(step == 0, torch.zeros((), dtype=step.dtype, device=step.device), torch.round((rows.double() - least) / step))
        return code.nan_to_num(0.0).clamp(grid.low, grid.high).to(torch.uint8)
    code = torch.round(rows.to(wide) / spread(scale, grid, columns).to(wide))
    if zero is not None:
        code = code + spread(zero, grid, columns).to(wide)
    return code.clamp(grid.low, grid.high).to(torch.int8 if grid.symmetric else torch.uint8)


def dequantise(quantised: Quantised, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight the codes stand for, in its shape; float32 arithmetic, rounded once to `dtype` (float64 is exact)."""
    grid, columns = quantised.grid, quantised.codes.shape[1]
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    scale = spread(quantised.scale, grid, columns).to(wide)
    if quantised.codebook is not None:
        book = quantised.codebook.to(wide).expand(quantised.codes.shape[0], -1)
        return (book.gather(1, quantised.codes.long()) * scale).to(dtype).reshape(quantised.shape)
    values = quantised.codes.to(wide)
    if quantised.zero is None:
        return (values * scale).to(dtype).reshape(quantised.shape)
    zero = spread(quantised.zero, grid, columns).to(wide)
    out = values * scale + zero if grid.form == "minimum" else (values - zero) * scale
    return out.to(dtype).reshape(quantised.shape)


def sqnr_db(weight: Tensor, approximation: Tensor) -> float:
    """Signal over quantisation noise in dB; infinite where nothing was lost."""
    # a common scale first: squares of 1e38 or 1e-40 fit no float32, and of 1e-200 no float64
    largest = weight.abs().max().double().clamp_min(torch.finfo(torch.float64).tiny)
    signal = (weight.double() / largest).square().sum().item()
    noise = ((weight.double() - approximation.double()) / largest).square().sum().item()
    return math.inf if noise == 0 else -math.inf if signal == 0 else 10 * math.log10(signal / noise)


def fake_quantise(x: Tensor, scale: Tensor, zero: Tensor | None, low: float, high: float) -> Tensor:
    """x on its grid, still as floats, gradients straight through the rounding: 1 inside the range and 0 beyond it for x, and for a
    scale that needs one round(x/s) - x/s inside, the end's code beyond. Shapes broadcast."""
    if zero is None:
        cut = (x / scale).clamp(low, high)
    else:
        shift = zero.to(x.dtype)
        cut = torch.clamp(x / scale, low - shift, high - shift)
    rounded = cut + (cut.round() - cut).detach()
    return rounded * scale
