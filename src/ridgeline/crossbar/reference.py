"""The oracle: what the chip computes, in the clearest form; every other engine must give the same ADC codes.

    x (…, M, K), w (K, N) ──encode──> digits, steps of every tile
      for each slice i of x, j of w, array k:   total = sum over its rows of level_x * level_w            integer
                                                code  = round_half_even(total * (levels_j - 1) / full)    adc.py
      out = sum over k of  step_x * step_w * rows * sum over i, j of  code / (levels_j - 1) * largest_i * largest_j * weight_i * weight_j
    levels: round(digit / largest * (n - 1)) of the n a DAC or a cell has; never a tie, as the largest digit is odd

Given `conductance` [S] or `voltage` [V] (as read, noise and faults included; the shape of w_digits, x_digits), totals are currents
sum V * (G - low) in float64. The chip's own sigmas and rates are not drawn here, and neither are its ADC's noise and offset.

Gradients pass straight through: grad_x = g wq^T, grad_w = xq^T g, with dequantised operands, no noise and no ADC.
Memory is slice pairs x arrays x M x N at once: for small sizes only. Signs are sign slices on both operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ..core.errors import OptionError
from ..target.crossbar import CrossbarSpec
from .adc import convert, convert_exact, full_scale
from .numbers import Operand, Slices, encode

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


def matmul(x: Tensor, w: Tensor, chip: CrossbarSpec, *, conductance: Tensor | None = None, voltage: Tensor | None = None) -> Analog:
    """x (…, M, K) times w (K, N) on the chip."""
    _check(x, w, chip)
    a, b = encode_input(x, chip), encode_weight(w, chip)
    noisy = conductance is not None or voltage is not None
    totals = _currents(a, b, chip, conductance, voltage) if noisy else _totals(a, b, chip)
    codes = _codes(totals, chip)[..., : x.shape[-2], : w.shape[-1]]
    return Analog(_shift_add(codes, a, b, chip), codes, a.digits, b.digits, a.scale, b.scale, a.values, b.values)


def encode_input(x: Tensor, chip: CrossbarSpec) -> Operand:
    operands = chip.operands
    return encode(x, operands.x_slices, operands.format, (operands.x_tile_rows, chip.array.rows), operands.x_granularity)


def encode_weight(w: Tensor, chip: CrossbarSpec) -> Operand:
    operands = chip.operands
    return encode(w, operands.w_slices, operands.format, (chip.array.rows, chip.array.columns), operands.w_granularity)


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


def _totals(x: Operand, w: Operand, chip: CrossbarSpec) -> Tensor:
    return _column_sums(levels_of(x.digits, x.slices, chip.dac.levels), levels_of(w.digits, w.slices, chip.cell.levels))


def _currents(x: Operand, w: Operand, chip: CrossbarSpec, conductance: Tensor | None, voltage: Tensor | None) -> Tensor:
    g = ideal_conductance(w, chip) if conductance is None else conductance.to(torch.float64)
    v = ideal_voltage(x, chip) if voltage is None else voltage.to(torch.float64)
    for name, given, digits in (("conductance", g, w.digits), ("voltage", v, x.digits)):
        if given.shape != digits.shape:
            why = f"there is one for each digit: {tuple(digits.shape)}"
            raise OptionError(f"a {name} of shape {tuple(given.shape)}", why=why, do="give tile rows, tile columns, slices, rows, columns")
    return _column_sums(v, g - chip.cell.low_s.value)


def _column_sums(x: Tensor, w: Tensor) -> Tensor:
    """x (…, M tiles, K tiles, Sx, r, rows), w (K tiles, N tiles, Sw, rows, c) → (…, K tiles, Sx, Sw, M', N')."""
    arrays = min(x.shape[-4], w.shape[-5])  # both cover K; where one is padded further, the other has no row to meet it
    lead = x.shape[:-5]
    rows = x[..., :arrays, :, :, :].movedim(-5, -3).reshape(*lead, arrays, x.shape[-3], 1, -1, x.shape[-1])
    columns = w[:arrays].movedim(1, -2).reshape(arrays, 1, w.shape[-3], w.shape[-2], -1)
    return torch.matmul(rows, columns)


def _codes(totals: Tensor, chip: CrossbarSpec) -> Tensor:
    """(…, arrays, Sx, Sw, M', N') → codes of the same shape; each weight slice has its own ADC."""
    full = full_scale(chip.array.rows, chip.dac.levels, chip.cell.levels)
    reference_a = (chip.cell.high_s.value - chip.cell.low_s.value) * chip.dac.vread_v.value * chip.array.rows

    def of_slice(total: Tensor, levels: int) -> Tensor:
        if total.is_floating_point():
            return convert(total, levels, reference_a, clip=chip.adc.clip)
        return convert_exact(total, levels, full)

    return torch.stack([of_slice(total, levels) for total, levels in zip(totals.unbind(-3), chip.adc_levels, strict=True)], dim=-3)


def _shift_add(codes: Tensor, x: Operand, w: Operand, chip: CrossbarSpec) -> Tensor:
    """codes (…, arrays, Sx, Sw, M, N) → (…, M, N); integers within a slice of w, float64 across slices, scales and arrays."""
    x_worth = [most * weight for most, weight in zip(x.slices.largest, x.slices.weights, strict=True)]
    by_slice = (codes * torch.tensor(x_worth, device=codes.device)[:, None, None, None]).sum(-4)  # (…, arrays, Sw, M, N)
    w_slices = zip(w.slices.largest, w.slices.weights, chip.adc_levels, strict=True)
    w_worth = [most * weight / (levels - 1) for most, weight, levels in w_slices]
    worth = torch.tensor(w_worth, dtype=torch.float64, device=codes.device)[:, None, None]
    added = (by_slice * worth).sum(-3) * chip.array.rows  # (…, arrays, M, N)
    arrays, m, n = added.shape[-3:]
    x_step = x.step[..., :arrays].repeat_interleave(x.tiling.tile[0], -2)[..., :m, :].movedim(-1, -2)[..., None]  # (…, arrays, M, 1)
    w_step = w.step[:arrays].repeat_interleave(w.tiling.tile[1], -1)[:, None, :n]  # (arrays, 1, N)
    return (added * x_step * w_step).sum(-3)


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


def _check(x: Tensor, w: Tensor, chip: CrossbarSpec) -> None:
    if x.dim() < 2 or w.dim() != 2 or x.shape[-1] != w.shape[0] or 0 in w.shape:
        why = "x is (…, M, K) and w is (K, N) with the same K, and w is not empty"
        raise OptionError(f"x of shape {tuple(x.shape)} times w of shape {tuple(w.shape)}", why=why, do="look at the layer's shapes")
    for field, given, done in (("operands.sign", chip.operands.sign, "slice"), ("adc.range", chip.adc.range, "full")):
        if given != done:
            raise OptionError(f"{field} = {given!r}", why="the reference does not compute it", do=f"give {done!r}")


def _check_convolution(x: Tensor, weight: Tensor, groups: int) -> None:
    sound = x.dim() == 4 and weight.dim() == 4 and groups >= 1 and x.shape[1] == weight.shape[1] * groups and weight.shape[0] % groups == 0
    if not sound:
        why = "x is (B, C, H, W), weight (N, C / groups, ky, kx), and groups divides C and N"
        raise OptionError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, {groups} groups", why=why, do="look at the layer's shapes")
