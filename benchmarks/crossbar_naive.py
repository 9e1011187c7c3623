"""A crossbar simulated as one first writes it down, and the same with one habit after another given up: a measuring stick, no engine.

    x ──unfold──> (M, K) ──quantise──> digits (Sx, arrays, M, rows) ──> voltages ┐
    w ──quantise──> digits (Sw, arrays, rows, N) ──> conductances, disturbed ────┴> sums (Sx, Sw, arrays, M, N) ──round──> codes ──> out

Habits says which of them are kept: copies for training, autograd's graph, random tensors at sigma 0, a pass over all cells for every
level, all slice pairs at once, weights cut anew at every call; `compiled` and `half` change how the loop over slice pairs runs.

Plain torch in float32, any device; sign = "slice", int operands, scales of single rows of x, one ADC for all slices, no clipping.
Voltages and conductances are in units of their levels, and the off state is a multiple of 2^-20 of one, so that sums are whole numbers
and codes those of the reference. x is quantised in float32: a value within an ulp of half a step may go the other way.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.crossbar.plan import Plan
from ridgeline.crossbar.tiling import plan as tiling
from ridgeline.target.crossbar import CrossbarSpec

OFF_STATE_GRAIN = 2.0**-20
EXACT_FLOAT32, EXACT_FLOAT16 = 2**24, 2**11


@dataclass(frozen=True, slots=True)
class Habits:
    """What the naive mode does, and what may be done instead."""

    copies: bool = True
    """Patches and dequantised operands stay until the next pass, as training would want."""
    graph: bool = True
    """autograd records."""
    zero_noise: bool = True
    """Random tensors are drawn and multiplied even if their sigma is 0."""
    level_loop: bool = True
    """Read noise goes over all cells once for every level."""
    pairs_at_once: bool = True
    weights_each_call: bool = True
    compiled: bool = False
    """torch.compile of everything behind the patches."""
    half: bool = False
    """Dots of float16."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """A plan as plain constants: they are part of a compiled graph."""

    rows: int
    arrays: int
    block_arrays: int
    x_shifts: tuple[int, ...]
    x_largest: tuple[int, ...]
    x_bits: int
    dac_top: int
    dac_sigma: float
    numerator: int
    denominator: int
    worth: tuple[tuple[float, ...], ...]


def numbers_of(plan: Plan) -> Numbers:
    chip, operands = plan.chip, plan.chip.operands
    if operands.sign != "slice" or operands.format != "int" or chip.adc.clip or len(set(chip.adc_levels)) > 1 or plan.groups > 1:
        raise ValueError("the naive mode knows sign = slice, int operands and one ADC without clipping only")
    if isinstance(operands.x_granularity, str) or operands.x_granularity[0] != 1 or operands.x_tile_rows != 1:
        raise ValueError("the naive mode knows scales of single rows of x only")
    if plan.full * (chip.adc_levels[0] - 1) >= EXACT_FLOAT32:
        raise ValueError("column sums times the ADC's levels leave float32")
    pairs = tuple(tuple(float(plan.worth(i, j)) for j in range(len(plan.w.widths))) for i in range(len(plan.x.widths)))
    return Numbers(
        plan.rows, plan.arrays, -(-operands.x_granularity[1] // plan.rows), plan.x.shifts, plan.x.largest, plan.x.bits,
        chip.dac.levels - 1, chip.dac.noise_sigma.value, chip.adc_levels[0] - 1, plan.full, pairs,
    )  # fmt: skip


def digits_of(integers: Tensor, bits: int, shifts: tuple[int, ...], largest: tuple[int, ...]) -> Tensor:
    """Whole float32 (…) → (S, …): digits of the two's complement, also float32."""
    pattern = torch.where(integers < 0, integers + 2**bits, integers)
    return torch.stack([torch.floor(pattern / 2**shift) % (most + 1) for shift, most in zip(shifts, largest, strict=True)])


def quantised(values: Tensor, maximum: Tensor, bits: int) -> Tensor:
    return torch.round(values / torch.where(maximum > 0, maximum, torch.ones_like(maximum)) * (2 ** (bits - 1) - 1))


def levels_of(digits: Tensor, largest: tuple[int, ...], top: int) -> Tensor:
    most = torch.tensor(largest, dtype=digits.dtype, device=digits.device).view(-1, *[1] * (digits.dim() - 1))
    return torch.round(digits / most * top)


def input_integers(rows: Tensor, of: Numbers) -> tuple[Tensor, Tensor]:
    """(M, K) → whole numbers (arrays, M, rows), and the value of 1 (arrays, M, 1)."""
    padded = functional.pad(rows, (0, of.arrays * of.rows - rows.shape[1]))
    missing = -of.arrays % of.block_arrays
    blocks = functional.pad(padded, (0, missing * of.rows)).unflatten(1, (-1, of.block_arrays * of.rows)).abs().amax(2)  # (M, blocks)
    maximum = blocks.repeat_interleave(of.block_arrays, 1)[:, : of.arrays].T.unsqueeze(2)  # (arrays, M, 1)
    integers = quantised(padded.unflatten(1, (of.arrays, of.rows)).transpose(0, 1), maximum, of.x_bits)
    return integers, maximum / (2 ** (of.x_bits - 1) - 1)


def voltages_of(integers: Tensor, of: Numbers, habits: Habits, note: Callable[[str, Tensor], Tensor]) -> Tensor:
    """(arrays, M, rows) → (Sx, arrays, M, rows)."""
    digits = note("slices", digits_of(integers, of.x_bits, of.x_shifts, of.x_largest))
    voltages = levels_of(digits, of.x_largest, of.dac_top)
    if habits.zero_noise or of.dac_sigma > 0:
        voltages = voltages * (1 + of.dac_sigma * torch.randn_like(voltages))
    return voltages


def dots(subscripts: str, voltages: Tensor, conductances: Tensor, half: bool) -> Tensor:
    if not half:
        return torch.einsum(subscripts, voltages, conductances)
    return torch.einsum(subscripts, voltages.half(), conductances.half()).float()  # sums up to 2048 are exact


def accumulated(rows: Tensor, conductances: Tensor, step_w: Tensor, of: Numbers, habits: Habits) -> Tensor:
    """(M, K) → (M, N), a slice pair at a time."""
    integers, step_x = input_integers(rows, of)
    voltages = voltages_of(integers, of, habits, unnoted)
    total = torch.zeros((of.arrays, rows.shape[0], step_w.shape[-1]), dtype=torch.float32, device=rows.device)
    for i, worths in enumerate(of.worth):
        for j, worth in enumerate(worths):
            sums = dots("amr,arn->amn", voltages[i], conductances[j], habits.half)
            total = total + torch.round(sums * of.numerator / of.denominator) * worth
    return (total * (step_x * step_w)).sum(0)


@cache
def compiled_loop(of: Numbers, habits: Habits) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def loop(rows: Tensor, conductances: Tensor, step_w: Tensor) -> Tensor:
        return accumulated(rows, conductances, step_w, of, habits)

    torch._dynamo.config.recompile_limit = 64  # one graph a shape
    return torch.compile(loop, dynamic=False, fullgraph=True)


def unnoted(name: str, tensor: Tensor) -> Tensor:
    return tensor


@dataclass(slots=True)
class Cells:
    """Weights as conductances less the off state (Sw, arrays, rows, N), and the value of 1 (arrays, 1, N)."""

    conductances: Tensor
    step: Tensor
    values: Tensor | None = field(default=None)


def program(weight: Tensor, plan: Plan, habits: Habits, note: Callable[[str, Tensor], Tensor]) -> Cells:
    """weight (K, N), cut, programmed and read."""
    chip, bits, rows = plan.chip, plan.w.bits, plan.rows
    down, across = tiling((plan.k, plan.n), (rows, chip.array.columns), chip.operands.w_granularity).block
    whole = functional.pad(weight, (0, -plan.n % across, 0, -plan.k % down))
    blocks = whole.unflatten(1, (-1, across)).unflatten(0, (-1, down)).abs().amax((1, 3))  # (down blocks, across blocks)
    maximum = blocks.repeat_interleave(down // rows, 0)[: plan.arrays].repeat_interleave(across, 1)[:, : plan.n].unsqueeze(1)
    integers = quantised(whole[: plan.arrays * rows, : plan.n].unflatten(0, (plan.arrays, rows)), maximum, bits)  # (arrays, rows, N)
    step = maximum / (2 ** (bits - 1) - 1)
    digits = note("slices", digits_of(integers, bits, plan.w.shifts, plan.w.largest))
    off = off_state(chip)
    g = levels_of(digits, plan.w.largest, chip.cell.levels - 1) + off
    return Cells(read(written(g, chip, habits), chip, habits) - off, step, integers * step if habits.copies else None)


def off_state(chip: CrossbarSpec) -> float:
    """The conductance of level 0, in levels."""
    share = chip.cell.low_s.value / (chip.cell.high_s.value - chip.cell.low_s.value) * (chip.cell.levels - 1)
    return round(share / OFF_STATE_GRAIN) * OFF_STATE_GRAIN


def written(g: Tensor, chip: CrossbarSpec, habits: Habits) -> Tensor:
    """Write variation and stuck cells."""
    cell = chip.cell
    if habits.zero_noise or any(cell.write_sigmas):
        g = g * (1 + cell.write_sigmas[0] * torch.randn_like(g))
    if habits.zero_noise or cell.stuck_high.value + cell.stuck_low.value > 0:
        u, off = torch.rand_like(g), off_state(chip)
        g = torch.where(u < cell.stuck_high.value, torch.full_like(g, cell.levels - 1 + off), g)
        g = torch.where((u >= 1 - cell.stuck_low.value), torch.full_like(g, off), g)
    return g


def read(g: Tensor, chip: CrossbarSpec, habits: Habits) -> Tensor:
    """Conductances of this read: each times exp(sigma of its nearest level * z)."""
    cell, off = chip.cell, off_state(chip)
    if not (habits.zero_noise or any(cell.read_sigmas)):
        return g
    if not habits.level_loop:
        nearest = torch.round(g - off).clamp(0, cell.levels - 1).long()
        return g * torch.exp(torch.tensor(cell.read_sigmas, device=g.device)[nearest] * torch.randn_like(g))
    nearest = torch.stack([(g - (level + off)).abs() for level in range(cell.levels)]).argmin(0)
    out = g
    for level, sigma in enumerate(cell.read_sigmas):
        out = torch.where(nearest == level, g * torch.exp(sigma * torch.randn_like(g)), out)
    return out


class NaiveLayer(nn.Module):
    """In the place of a linear layer or a two-dimensional convolution."""

    def __init__(self, digital: nn.Linear | nn.Conv2d, chip: CrossbarSpec, habits: Habits) -> None:
        super().__init__()
        self.weight, self.bias, self.chip, self.habits = digital.weight, digital.bias, chip, habits
        self.window: dict[str, Any] | None = None
        if isinstance(digital, nn.Conv2d):
            names = ("kernel_size", "dilation", "padding", "stride")
            self.window = {name: getattr(digital, name) for name in names}
        self.plan = Plan(chip, digital.weight[0].numel(), digital.weight.shape[0])
        self.numbers = numbers_of(self.plan)
        if habits.half and self.plan.full > EXACT_FLOAT16:
            raise ValueError("column sums leave the whole numbers of float16")
        self.kept: tuple[Tensor | None, ...] = ()
        self.prepared: Cells | None = None
        self.bytes: dict[str, int] | None = None
        """Where the sizes of intermediate tensors go, if anyone wants them."""
        self.codes: Tensor | None = None

    def note(self, name: str, tensor: Tensor) -> Tensor:
        if self.bytes is not None:
            self.bytes[name] = self.bytes.get(name, 0) + tensor.untyped_storage().nbytes()
        return tensor

    def forward(self, x: Tensor) -> Tensor:
        rows, size = self.patches(x)
        cells = self.cells()
        if self.habits.pairs_at_once:
            out = self.all_pairs(rows, cells)
        elif self.habits.compiled:
            out = compiled_loop(self.numbers, self.habits)(rows, cells.conductances, cells.step)
        else:
            out = accumulated(rows, cells.conductances, cells.step, self.numbers, self.habits)
        if size is not None:
            out = out.unflatten(0, (x.shape[0], -1)).transpose(1, 2).unflatten(2, size)
        return out if self.bias is None else out + self.bias.view(-1, *[1] * (0 if size is None else 2))

    def patches(self, x: Tensor) -> tuple[Tensor, tuple[int, int] | None]:
        """(M, K), M over images and positions, and the size of the output image."""
        if self.window is None:
            return self.note("im2col", x.reshape(-1, x.shape[-1])), None
        unfolded = self.note("im2col", functional.unfold(x, **self.window))  # (B, K, L)
        kernel, dilation, padding, stride = self.window.values()
        down, across = ((x.shape[2 + i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in (0, 1))
        return unfolded.transpose(1, 2).reshape(-1, unfolded.shape[1]), (down, across)

    def cells(self) -> Cells:
        if self.prepared is not None:
            return self.prepared
        made = program(self.weight.flatten(1).T, self.plan, self.habits, self.note)
        if not self.habits.weights_each_call:
            self.prepared = made
        return made

    def all_pairs(self, rows: Tensor, cells: Cells) -> Tensor:
        of = self.numbers
        integers, step_x = input_integers(rows, of)
        if self.habits.copies:
            self.kept = (rows.detach(), (integers * step_x).detach(), cells.values)
        voltages = voltages_of(integers, of, self.habits, self.note)
        sums = self.note("products", dots("samr,tarn->stamn", voltages, cells.conductances, self.habits.half))
        scaled = self.note("adc", sums * of.numerator / of.denominator)
        codes = self.note("adc", torch.round(scaled))
        del scaled
        if self.codes is not None:
            self.codes = codes.detach().movedim(2, 0).long()  # (arrays, Sx, Sw, M, N)
        worth = torch.tensor(of.worth, dtype=torch.float32, device=rows.device)[:, :, None, None, None]
        return ((codes * worth).sum((0, 1)) * (step_x * cells.step)).sum(0)


def naive(model: nn.Module, chip: CrossbarSpec, habits: Habits) -> nn.Module:
    """A copy of the model whose linear layers and convolutions are naive ones."""
    made = copy.deepcopy(model).requires_grad_(habits.graph)
    for parent in list(made.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear | nn.Conv2d):
                setattr(parent, name, NaiveLayer(child, chip, habits))
    return made


def layers(model: nn.Module) -> dict[str, NaiveLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, NaiveLayer)}


def forget(model: nn.Module) -> None:
    """Drop what a pass left behind for training."""
    for layer in layers(model).values():
        layer.kept = ()


def prepared_bytes(model: nn.Module) -> int:
    """Of what was made from the weights and is kept."""
    kept = [layer.prepared for layer in layers(model).values() if layer.prepared is not None]
    return sum(math.prod(tensor.shape) * tensor.element_size() for cells in kept for tensor in (cells.conductances, cells.step))
