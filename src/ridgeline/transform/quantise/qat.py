"""Quantisation-aware training: the model trains against the rounding it will live with, then becomes integers.

    Conv2d, Linear ──wrap_──> FakeQuantised: x on its uint8 grid, w on its b-bit grid, gradients straight through (grid.fake_quantise)
      ──train.fit, with or without the float model as teacher──> ──convert_──> Int8 layers, batch norms folded into the scales

    scale "max"      max|w| / (2^(b-1) - 1) of the weight as it stands           "learned"   a parameter, LSQ: its gradient times
    gradient of a learned scale: round(w/s) − w/s inside, the end's code beyond              1 / √(n · 2^(b-1)), Esser 2020

A batch norm stays a norm while training. Folding it afterwards multiplies scales and leaves codes as they were trained, so the
converted model answers as the trained one does in eval mode, but for float rounding. A negative γ makes a negative scale.
Without activation grids the result is a packed weight with float inputs. Ref: Jacob 2018 (the scheme), Bengio 2013 (straight through).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...core.errors import TransformError
from ..distil_loss import distillation_loss
from .fold import Pair, check_pairs, norm_as_affine, norm_pairs, put, trace
from .grid import Grid, Quantised, fake_quantise, quantise_with, ranges, scales, sqnr_db
from .int8_layers import ACTIVATION_LEVELS, Activation
from .observe import Method
from .packed import PackedConv2d, PackedLinear
from .static import Batch, LayerRow, bits_for, calibrate, candidates, entries_of, int8_layer, link_, weight_grid

Scale = Literal["max", "learned"]
SHRINKS = torch.linspace(0.3, 1.0, 71).tolist()  # of max|w|, tried for the first scale


class FakeQuantised(nn.Module):
    """A Conv2d or Linear that computes on rounded weights and inputs, in float. `layer` holds the weights that train."""

    input_scale: Tensor | nn.Parameter | None
    input_zero: Tensor | None
    weight_scale: nn.Parameter | None

    def __init__(self, layer: nn.Module, bits: int, entry: Activation | None, scale: Scale = "learned") -> None:
        super().__init__()
        self.layer, self.grid, self.scale_kind = layer, weight_grid(bits), scale
        weight = self.weight
        self.weight_scale = nn.Parameter(best_scale(weight, self.grid).flatten()) if scale == "learned" else None
        first = None if entry is None else torch.tensor(entry.scale, dtype=torch.float32, device=weight.device)
        if first is not None and scale == "learned":
            self.input_scale = nn.Parameter(first)
        else:
            self.register_buffer("input_scale", first)
        zero = None if entry is None else torch.tensor(float(entry.zero), device=weight.device)
        self.register_buffer("input_zero", zero)

    @property
    def weight(self) -> Tensor:
        held: Any = self.layer
        weight: Tensor = held.weight
        return weight

    def scale(self) -> Tensor:
        """Of the weight, [rows, 1]: always above 0."""
        if self.weight_scale is not None:
            return self.weight_scale.abs().clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        rows = self.weight.detach().reshape(len(self.weight), -1).float()
        least = torch.finfo(torch.float32).tiny
        return (rows.abs().amax(1, keepdim=True) / self.grid.high).clamp_min(least)

    def entry_scale(self) -> Tensor:
        """Of the input: always above 0."""
        scale = self.input_scale
        assert scale is not None
        positive: Tensor = scale.abs().clamp_min(torch.finfo(torch.float32).tiny)
        return positive

    def rounded_weight(self) -> Tensor:
        """The weight on its grid; the gradient reaches weight and scale."""
        weight = _wide(self.weight)
        scale = _gentle(self.scale(), weight.numel() // len(weight) * self.grid.high)
        return fake_quantise(weight, scale.view(-1, *[1] * (weight.dim() - 1)), None, self.grid.low, self.grid.high)

    def forward(self, x: Tensor) -> Tensor:
        if self.input_scale is not None:
            # of one sample: the loss is a mean over the batch already
            scale = _gentle(self.entry_scale(), x.numel() // max(len(x), 1) * (ACTIVATION_LEVELS - 1))
            x = fake_quantise(_wide(x), scale, self.input_zero, 0, ACTIVATION_LEVELS - 1)
        layer: Any = self.layer
        if isinstance(layer, nn.Conv2d):
            convolved: Tensor = layer._conv_forward(x, self.rounded_weight(), layer.bias)
            return convolved
        return functional.linear(x, self.rounded_weight(), getattr(layer, "bias", None))

    def quantised(self) -> Quantised:
        """Codes and scales of the weight as it stands: those that `forward` computes with."""
        return quantise_with(self.weight.detach().float(), self.scale().detach(), None, self.grid)

    def entry(self) -> Activation | None:
        if self.input_scale is None or self.input_zero is None:
            return None
        return Activation(self.entry_scale().item(), int(self.input_zero.item()))


def _wide(x: Tensor) -> Tensor:
    """float32 for the narrow types: 8 bits of code times a scale do not fit bfloat16."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _gentle(scale: Tensor, count: int) -> Tensor:
    """The same scale with its gradient over √count: steps of a scale and of the weights it serves are then of one relative size."""
    if not scale.requires_grad:
        return scale
    share = count**-0.5
    gentle: Tensor = scale * share + (scale * (1 - share)).detach()
    return gentle


@torch.no_grad()
def best_scale(weight: Tensor, grid: Grid) -> Tensor:
    """[rows, 1]: the shrunk max|w| with the least squared error in each row."""
    rows = weight.detach().reshape(len(weight), -1).float()
    whole, _ = scales(*ranges(rows, grid), grid)
    best, error = whole.clone(), torch.full_like(whole, torch.inf)
    for share in SHRINKS:
        scale = whole * share
        now = (fake_quantise(rows, scale, None, grid.low, grid.high) - rows).square().sum(1, keepdim=True)
        best, error = torch.where(now < error, scale, best), torch.minimum(now, error)
    return best


@torch.no_grad()
def wrap_(
    model: nn.Module, batches: Iterable[Batch] | None, *, bits: int = 4, layer_bits: Mapping[str, int] | None = None,
    scale: Scale = "learned", method: Method = "mse", percentile: float = 99.99, skip: Sequence[str] = (),
) -> list[str]:  # fmt: skip
    """Put FakeQuantised around every layer; input grids from the batches, or none without. Returns notes."""
    layers, notes = candidates(model, skip)
    entries = {} if batches is None else entries_of(calibrate(model, layers, batches), method, percentile)
    for name, module in layers.items():
        put(model, name, FakeQuantised(module, bits_for(name, bits, layer_bits or {}), entries.get(name), scale))
    return notes


@torch.no_grad()
def convert_(model: nn.Module, pairs: Iterable[Pair]) -> tuple[list[LayerRow], list[str]]:
    """Every FakeQuantised becomes the layer it stood for, in integers where its input has a grid; norms of `pairs` are folded."""
    model.eval()
    norms, rows = dict(pairs), []
    wrapped = [(name, module) for name, module in model.named_modules() if isinstance(module, FakeQuantised)]
    for name, fake in wrapped:
        layer, row = _converted(name, fake, model.get_submodule(norms[name]) if name in norms else None)
        put(model, name, layer)
        rows.append(row)
        if name in norms:
            put(model, norms[name], nn.Identity())
    linked = link_(model)
    notes = [f"{len(norms)} batch norms folded into scales, {len(linked)} of {len(rows)} layers hand on codes"]
    return rows, notes


def _converted(name: str, fake: FakeQuantised, norm: nn.Module | None) -> tuple[nn.Module, LayerRow]:
    quantised, layer, entry = fake.quantised(), fake.layer, fake.entry()
    bias: Tensor | None = getattr(layer, "bias", None)
    whole = fake.weight.detach().float()
    sqnr = sqnr_db(whole, fake.rounded_weight())
    if norm is not None:
        factor, shift = norm_as_affine(norm)
        scale = (quantised.scale.double() * factor[:, None]).float()
        quantised = Quantised(quantised.codes, scale, None, quantised.shape, quantised.grid)
        bias = (shift if bias is None else shift + bias.detach().double() * factor).float()
    if not bool(torch.isfinite(quantised.scale).all()):
        raise TransformError(f"quantise {name}: a scale is not finite", why="training diverged", do="lower the learning rate")
    made: Any
    if entry is not None:
        made = int8_layer(layer, quantised, bias, entry)
    elif isinstance(layer, nn.Conv2d):
        made = PackedConv2d.from_quantised(quantised, layer, bias)
    else:
        made = PackedLinear.from_quantised(quantised, bias)
    low, high = (entry.low, entry.high) if entry is not None else (None, None)
    return made, LayerRow(name, quantised.grid.bits, sqnr, made.packed_bytes(), low, high)


def foldable(model: nn.Module, pairs: Sequence[Pair] | None, layers: Iterable[str]) -> list[Pair]:
    """Pairs to fold at the end whose convolution is one of `layers`; found before the layers are wrapped."""
    if pairs is not None:
        found = check_pairs(model, pairs)
    else:
        graph = trace(model)
        found = [] if graph is None else norm_pairs(model, graph)
    chosen = set(layers)
    return [pair for pair in found if pair[0] in chosen]


Objective = Callable[[nn.Module, Tensor, Tensor], Tensor]


def taught_by(teacher: nn.Module, temperature: float, alpha: float) -> Objective:
    """An objective for train.fit: the float model's answers beside the right ones (Hinton 2015)."""
    teacher.eval().requires_grad_(False)

    def objective(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(inputs)
        return distillation_loss(model(inputs), wanted, targets, temperature=temperature, alpha=alpha)

    return objective
