"""The oracle: what the chip computes, in the clearest form; every other engine must give the same ADC codes.

    x (…, M, K), w (K, N) ──encode──> digits, steps of every tile
      for each slice i of x, j of w, array k:   total = sum over its rows of level_x * level_w            integer
                                                code  = round_half_even(total * scale_j)                  adc.py
      out = sum over k of  step_x * step_w * sum over i, j of  code * worth_ij                            plan.py
    levels: round(digit / largest * (n - 1)) of the n a DAC or a cell has; never a tie, as the largest digit is odd
    sign = "offset": one more column of cells at the highest level, ideal and without noise, tells each array's sum of inputs

Given `cells`, levels are as those were programmed and as this call reads them; given `draw`, the noise of DACs and ADCs is drawn.
Given `conductance` [S] or `voltage` [V] (as read, noise and faults included; the shape of w_digits, x_digits), totals are currents
sum V * (G - low) in float64, and nothing is drawn.

Gradients pass straight through: grad_x = g wq^T, grad_w = xq^T g, with dequantised operands, no noise and no ADC.
Memory is slice pairs x arrays x M x N at once: for small sizes only. ReferenceEngine is the same behind the engines' protocol.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ...core.errors import OptionError
from ...target.crossbar import CrossbarSpec
from ..adc import added_lsb, check_ranges, convert, to_codes, voltage_factor
from ..cells import Cells
from ..numbers import Operand, Slices, encode
from ..plan import Draw, Plan, Window
from .patches import output_size, patches

Pair = int | tuple[int, int]
WeightGradient = Literal["patch", "image"]


@dataclass(frozen=True, slots=True)
class Analog:
    """A product and everything on the way to it; slices are most significant first."""

    out: Tensor
    """float64 (…, M, N)."""
    codes: Tensor
    """int64 (…, arrays along K, x slices, w slices, M, N)."""
    x_digits: Tensor
    """int64 (…, M tiles, K tiles, S, r, c)."""
    w_digits: Tensor
    """int64 (K tiles, N tiles, S, r, c)."""
    x_scale: Tensor
    """float64 (…, M tiles, K tiles): block maximum (int) or exponent (bfp)."""
    w_scale: Tensor
    """float64 (K tiles, N tiles)."""
    xq: Tensor
    """float64 (…, M, K): the input the digits stand for."""
    wq: Tensor
    """float64 (K, N)."""


def matmul(
    x: Tensor,
    w: Tensor,
    chip: CrossbarSpec,
    *,
    conductance: Tensor | None = None,
    voltage: Tensor | None = None,
    plan: Plan | None = None,
    cells: Cells | None = None,
    draw: Draw | None = None,
) -> Analog:
    """x (…, M, K) times w (K, N) on the chip; of `cells`, those programmed with w. Noise of converters is drawn if `draw` is given."""
    _check_shapes(x, w)
    plan = plan or Plan(chip, *w.shape)
    check_ranges(plan)
    a, b = encode_input(x, plan.chip), encode_weight(w, plan.chip)
    if conductance is not None or voltage is not None:
        codes, offset_codes = _codes_of_currents(_currents(a, b, plan, conductance, voltage), plan), None
        codes = codes[..., : x.shape[-2], : w.shape[-1]]
    else:
        codes, offset_codes = _codes(a, _weight_levels(b, plan, cells, draw), plan, draw, x.shape[-2])
    step = _columns_of_tiles(b.step, plan, b.tiling.tile[1]) if cells is None else cells.step[0]
    out = _shift_add(codes, offset_codes, _input_step(a, plan, x.shape[-2]), step, plan)
    return Analog(out, codes, a.digits, b.digits, a.scale, b.scale, a.values, b.values)


def encode_input(x: Tensor, chip: CrossbarSpec) -> Operand:
    operands = chip.operands
    slices = Plan(chip, 1, 1).x
    return encode(x, slices, operands.format, (operands.x_tile_rows, chip.array.rows), operands.x_granularity)


def encode_weight(w: Tensor, chip: CrossbarSpec) -> Operand:
    operands = chip.operands
    slices = Plan(chip, 1, 1).w
    return encode(w, slices, operands.format, (chip.array.rows, chip.array.columns), operands.w_granularity)


def levels_of(digits: Tensor, slices: Slices, levels: int) -> Tensor:
    """(…, S, r, c) digits → the levels that stand for them, each slice driven at full scale."""
    most = torch.tensor(slices.largest, dtype=torch.int64, device=digits.device)[:, None, None]
    return torch.div(2 * digits * (levels - 1) + most, 2 * most, rounding_mode="floor")


def ideal_voltage(x: Operand, chip: CrossbarSpec) -> Tensor:
    """Volts on the rows, without noise; the shape of x.digits."""
    return chip.dac.vread_v.value * levels_of(x.digits, x.slices, chip.dac.levels).double() / (chip.dac.levels - 1)


def ideal_conductance(w: Operand, chip: CrossbarSpec) -> Tensor:
    """Siemens of the cells, as programmed without error; the shape of w.digits."""
    low, high = chip.cell.low_s.value, chip.cell.high_s.value
    return low + levels_of(w.digits, w.slices, chip.cell.levels).double() * (high - low) / (chip.cell.levels - 1)


def _currents(x: Operand, w: Operand, plan: Plan, conductance: Tensor | None, voltage: Tensor | None) -> Tensor:
    chip = plan.chip
    if chip.operands.sign != "slice":
        why = f'with operands.sign = "{chip.operands.sign}" there is not one cell for each digit'
        raise OptionError("a conductance or voltage", why=why, do="give programmed cells")
    g = ideal_conductance(w, chip) if conductance is None else conductance.to(torch.float64)
    v = ideal_voltage(x, chip) if voltage is None else voltage.to(torch.float64)
    for name, given, digits in (("conductance", g, w.digits), ("voltage", v, x.digits)):
        if given.shape != digits.shape:
            why = f"there is one for each digit: {tuple(digits.shape)}"
            raise OptionError(f"a {name} of shape {tuple(given.shape)}", why=why, do="give tile rows, tile columns, slices, rows, columns")
    rows, columns = _rows_of_tiles(v, plan.arrays), _weights_of_tiles(g - chip.cell.low_s.value, plan.arrays)
    return torch.matmul(rows[..., :, None, :, :], columns[:, None])


def _codes_of_currents(currents: Tensor, plan: Plan) -> Tensor:
    """(…, arrays, Sx, Sw, M', N') [A] → codes of the same shape; each weight slice has its own ADC."""
    chip = plan.chip
    span_a = (chip.cell.high_s.value - chip.cell.low_s.value) * chip.dac.vread_v.value * chip.array.rows
    slices = zip(currents.unbind(-3), chip.adc_levels, plan.range_of_slice, strict=True)
    return torch.stack([convert(i, levels, span_a * (top / plan.full), clip=chip.adc.clip) for i, levels, top in slices], dim=-3)


def _rows_of_tiles(x: Tensor, arrays: int) -> Tensor:
    """(…, M tiles, K tiles, Sx, r, rows) → (…, arrays, Sx, M', rows); K tiles beyond the arrays are padding of a block."""
    return x[..., :arrays, :, :, :].movedim(-5, -3).flatten(-3, -2)


def _weights_of_tiles(w: Tensor, arrays: int) -> Tensor:
    """(K tiles, N tiles, Sw, rows, c) → (arrays, Sw, rows, N')."""
    return w[:arrays].movedim(1, -2).reshape(arrays, w.shape[-3], w.shape[-2], -1)


def _columns_of_tiles(step: Tensor, plan: Plan, columns: int) -> Tensor:
    """(K tiles, N tiles) → (arrays, N)."""
    return step[: plan.arrays].repeat_interleave(columns, -1)[:, : plan.n]


def _input_step(x: Operand, plan: Plan, m: int) -> Tensor:
    """(…, arrays, M)."""
    return x.step[..., : plan.arrays].repeat_interleave(x.tiling.tile[0], -2)[..., :m, :].movedim(-1, -2)


def _weight_levels(w: Operand, plan: Plan, cells: Cells | None, draw: Draw | None) -> Tensor:
    """(arrays, Sw, rows, N): whole numbers (int64) or, of disturbed cells, float64."""
    if cells is None:
        return _weights_of_tiles(levels_of(w.digits, w.slices, plan.chip.cell.levels), plan.arrays)[..., : plan.n]
    return _cell_levels(cells, plan, draw or Draw())[0]


def _cell_levels(cells: Cells, plan: Plan, draw: Draw) -> Tensor:
    """(groups, arrays, Sw, rows, N)."""
    read = cells.as_read(plan, draw)
    split = read.reshape(*read.shape[:2], plan.arrays, plan.rows, plan.n).transpose(1, 2)
    return split.to(torch.float64 if split.is_floating_point() else torch.int64)


def _codes(x: Operand, w: Tensor, plan: Plan, draw: Draw | None, m: int, group: int = 0) -> tuple[Tensor, Tensor | None]:
    """Codes (…, arrays, Sx, Sw, M, N) of weight levels (arrays, Sw, rows, N), and with an offset column its codes (…, arrays, Sx, M)."""
    levels = _rows_of_tiles(levels_of(x.digits, x.slices, plan.chip.dac.levels), plan.arrays)[..., :m, :]
    lead, device = levels.shape[:-4], levels.device
    row = torch.arange(math.prod(lead) * m, device=device).reshape(*lead, 1, m, 1)
    array = torch.arange(plan.arrays, device=device)[:, None, None]
    column = group * plan.n + torch.arange(plan.n, device=device)
    k = torch.arange(plan.arrays * plan.rows, device=device).reshape(plan.arrays, 1, plan.rows)
    slices = range(len(plan.x.widths))
    if draw is not None and plan.chip.dac.noise_sigma.value > 0:
        factors = [voltage_factor(plan, draw, row, group * plan.k + k, i) for i in slices]  # beyond K the level is 0
        levels = levels * torch.stack([factor for factor in factors if factor is not None], dim=-3)
    whole = levels.dtype == w.dtype == torch.int64
    levels, w = levels.double(), w.double()  # whole sums stay below 2^53, and no GPU multiplies int64
    codes = []
    for i in slices:
        totals = torch.matmul(levels[..., i, None, :, :], w)  # (…, arrays, Sw, M, N)
        totals = totals.to(torch.int64) if whole else totals
        added = [added_lsb(plan, draw, row, column, array, i, j) if draw else None for j in range(len(plan.w.widths))]
        codes.append(torch.stack([to_codes(totals[..., j, :, :], plan, j, one) for j, one in enumerate(added)], dim=-3))
    sums = levels.sum(-1) * (plan.chip.cell.levels - 1)
    offset = to_codes(sums.to(torch.int64) if whole else sums, plan, 0) if plan.w.kind == "offset" else None
    return torch.stack(codes, dim=-4), offset


def _shift_add(codes: Tensor, offset_codes: Tensor | None, x_step: Tensor, w_step: Tensor, plan: Plan) -> Tensor:
    """codes (…, arrays, Sx, Sw, M, N) → (…, M, N); integers within a slice of w, float64 across slices, scales and arrays."""
    x_worth = torch.tensor([most * weight for most, weight in zip(plan.x.largest, plan.x.weights, strict=True)], device=codes.device)
    by_slice = (codes * x_worth[:, None, None, None]).sum(-4)  # (…, arrays, Sw, M, N)
    w_worth = [float(plan.worth(0, j) / int(x_worth[0])) for j in range(len(plan.w.widths))]
    added = (by_slice * torch.tensor(w_worth, dtype=torch.float64, device=codes.device)[:, None, None]).sum(-3)  # (…, arrays, M, N)
    if offset_codes is not None:
        unit = plan.offset_worth / ((plan.chip.dac.levels - 1) * (plan.chip.cell.levels - 1) * plan.scale(0))
        added = added - ((offset_codes * x_worth[:, None]).sum(-2).double() * float(unit))[..., None]
    return (added * x_step[..., None] * w_step[:, None, :]).sum(-3)


class ReferenceEngine:
    """The oracle behind the engines' protocol; any device, float64, for small sizes."""

    name = "reference"

    def unable(self, plan: Plan, device: str) -> str | None:
        return None

    def prepare(self, plan: Plan, cells: Cells) -> Cells:
        return cells

    def product(self, x: Tensor, plan: Plan, prepared: Cells, draw: Draw) -> Tensor:
        return self._groups(x[:, None], plan, prepared, draw)[1][:, 0].to(x.dtype)

    def convolution(self, x: Tensor, window: Window, plan: Plan, prepared: Cells, draw: Draw) -> Tensor:
        taken = patches(x, window, plan.groups)  # (groups, K, B, L)
        out = self._groups(taken.permute(2, 0, 3, 1), plan, prepared, draw)[1]  # (B, groups, L, N)
        return out.transpose(-1, -2).reshape(x.shape[0], plan.groups * plan.n, *output_size(x, window)).to(x.dtype)

    def codes(self, x: Tensor, plan: Plan, prepared: Cells, draw: Draw) -> Tensor:
        return self._groups(x[:, None], plan, prepared, draw)[0][:, 0]

    def _groups(self, x: Tensor, plan: Plan, cells: Cells, draw: Draw) -> tuple[Tensor, Tensor]:
        """x (B, groups, M, K) → codes (B, groups, arrays, Sx, Sw, M, N) and out (B, groups, M, N)."""
        check_ranges(plan)
        levels, m, found = _cell_levels(cells, plan, draw), x.shape[-2], []
        for group in range(plan.groups):
            a = encode_input(x[:, group], plan.chip)
            codes, offset = _codes(a, levels[group], plan, draw, m, group)
            found.append((codes, _shift_add(codes, offset, _input_step(a, plan, m), cells.step[group], plan)))
        return torch.stack([codes for codes, _ in found], 1), torch.stack([out for _, out in found], 1)


class _Replace(torch.autograd.Function):
    """Shows one tensor, and hands its gradient to another of the same shape."""

    @staticmethod
    def forward(ctx: Any, shown: Tensor, carrier: Tensor) -> Tensor:
        return shown.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0]


def _replace(shown: Tensor, carrier: Tensor) -> Tensor:
    replaced: Tensor = _Replace.apply(shown, carrier)  # type: ignore[no-untyped-call]
    return replaced


def product(x: Tensor, w: Tensor, chip: CrossbarSpec) -> Tensor:
    """matmul(…).out with the straight-through gradient, float64."""
    analog = matmul(x, w, chip)
    return _replace(analog.out, _replace(analog.xq, x.double()) @ _replace(analog.wq, w.double()))


def linear(x: Tensor, weight: Tensor, chip: CrossbarSpec, bias: Tensor | None = None) -> Tensor:
    """x (…, M, K), weight (N, K) as torch's linear holds it; the bias is added digitally."""
    out = product(x, weight.T, chip)
    return out if bias is None else out + bias


def conv2d(
    x: Tensor,
    weight: Tensor,
    chip: CrossbarSpec,
    bias: Tensor | None = None,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    weight_gradient: WeightGradient = "patch",
) -> Tensor:
    """x (B, C, H, W), weight (N, C / groups, ky, kx); quantised after im2col, an image's patches being one matrix.

    A pixel may have other digits in each patch: weight_gradient "patch" uses them as they are, "image" their average over the patches.
    """
    _check_convolution(x, weight, groups)
    window: dict[str, Any] = {"kernel_size": tuple(weight.shape[2:]), "stride": stride, "padding": padding, "dilation": dilation}
    size = _output_size(x, window)
    outputs = []
    for part, kernel in zip(x.double().chunk(groups, 1), weight.double().chunk(groups, 0), strict=True):
        patches = functional.unfold(part, **window).transpose(1, 2)  # (B, L, K), K = channel, ky, kx
        analog = matmul(patches, kernel.flatten(1).T, chip)
        used = analog.xq if weight_gradient == "patch" else _averaged(analog.xq, part.shape[2:], window)
        outputs.append(_replace(analog.out, _replace(used, patches) @ _replace(analog.wq, kernel.flatten(1).T)))  # (B, L, N / groups)
    out = torch.cat(outputs, dim=-1).transpose(1, 2).reshape(x.shape[0], weight.shape[0], *size)
    return out if bias is None else out + bias[:, None, None]


def _averaged(patches: Tensor, size: torch.Size, window: dict[str, Any]) -> Tensor:
    """Patches (B, L, K) of the image whose pixels are the averages of theirs."""
    image = functional.fold(patches.transpose(1, 2), tuple(size), **window)
    uses = functional.fold(torch.ones_like(patches).transpose(1, 2), tuple(size), **window)
    averaged: Tensor = functional.unfold(image / uses.clamp(min=1), **window)
    return averaged.transpose(1, 2)


def _output_size(x: Tensor, window: dict[str, Any]) -> tuple[int, int]:
    kernel, stride, padding, dilation = ((value, value) if isinstance(value, int) else value for value in window.values())
    down, across = ((x.shape[2 + i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in (0, 1))
    if min(down, across) < 1:
        why = "the kernel is larger than the padded image"
        raise OptionError(f"a {kernel[0]} x {kernel[1]} kernel on an image of {tuple(x.shape[2:])}", why=why, do="pad more or dilate less")
    return down, across


def _check_shapes(x: Tensor, w: Tensor) -> None:
    if x.dim() < 2 or w.dim() != 2 or x.shape[-1] != w.shape[0] or 0 in w.shape:
        why = "x is (…, M, K) and w is (K, N) with the same K, and w is not empty"
        raise OptionError(f"x of shape {tuple(x.shape)} times w of shape {tuple(w.shape)}", why=why, do="look at the layer's shapes")


def _check_convolution(x: Tensor, weight: Tensor, groups: int) -> None:
    sound = x.dim() == 4 and weight.dim() == 4 and groups >= 1 and x.shape[1] == weight.shape[1] * groups and weight.shape[0] % groups == 0
    if not sound:
        why = "x is (B, C, H, W), weight (N, C / groups, ky, kx), and groups divides C and N"
        raise OptionError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, {groups} groups", why=why, do="look at the layer's shapes")
