"""Activation-aware scaling: columns that meet large inputs get finer steps.

    s = magnitude^α, over its geometric mean      magnitude: mean |x| of each input channel; α searched on 0 .. 1       (Lin 2023)
    y = W x = (W diag s) (x / s):  W diag s is rounded, x / s is moved into what made x, or multiplied at run time

The error of each α is exact on the calibration inputs: tr(Δ gram Δᵀ), Δ = Q(W diag s) / s - W, summed over the layers that read x.
Moved ("folded") where x comes straight from a norm with a weight; the surroundings are run before and after with the float weights,
and a fold that changes their output is undone and kept as the layer's input scale instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .codebook import quantise_as
from .grid import Grid, as_rows, dequantise

STEPS = 20
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest change of the output, as a share of its largest, that rounding the folded weights explains."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """The scale of each input channel, α (0: none) and the squared output error against that of α = 0."""

    scale: Tensor
    alpha: float
    error: float
    plain_error: float


def search(
    weights: Sequence[Tensor], gram: Tensor, magnitude: Tensor, grid: Grid, form: str = "uniform", *, steps: int = STEPS,
    name: str = "the weight",
) -> Scaled:  # fmt: skip
    """The α of 0, 1/steps, … that costs the layers' outputs least."""
    plain = best = _error(weights, torch.ones_like(magnitude), gram, grid, form, name)
    chosen, scale = 0.0, torch.ones_like(magnitude)
    for step in range(1, steps + 1):
        tried = channel_scale(magnitude, step / steps)
        error = _error(weights, tried, gram, grid, form, name)
        if error < best:
            best, chosen, scale = error, step / steps, tried
    return Scaled(scale, chosen, best, plain)


def channel_scale(magnitude: Tensor, alpha: float) -> Tensor:
    """magnitude^α with geometric mean 1, cut to 1e-4 .. 1e4; channels never used keep 1."""
    used = magnitude > 0
    if not bool(used.any()):
        return torch.ones_like(magnitude)
    logarithm = torch.where(used, magnitude, 1.0).double().log()
    logarithm = torch.where(used, logarithm - logarithm[used].mean(), 0.0)
    return torch.exp(alpha * logarithm).clamp(1e-4, 1e4).to(magnitude.dtype)


def _error(weights: Sequence[Tensor], scale: Tensor, gram: Tensor, grid: Grid, form: str, name: str) -> float:
    total = 0.0
    for weight in weights:
        rows = as_rows(weight.detach()).float()
        delta = (dequantise(quantise_as(rows * scale, form, grid, name)) / scale - rows).double()
        total += float(((delta @ gram) * delta).sum())
    return total


@torch.no_grad()
def fold_(source: nn.Module | None, layers: Sequence[nn.Linear], scale: Tensor, check: Callable[[], Tensor]) -> bool:
    """Move 1 / scale into a norm's weight and scale into the layers; False, and undone, where `source` is no such norm or the output
    of `check` changes (the norm has other readers)."""
    if not isinstance(source, nn.RMSNorm | nn.LayerNorm) or source.weight is None or source.weight.shape != scale.shape:
        return False
    touched: list[nn.Module] = [source, *layers]
    kept = [{name: tensor.clone() for name, tensor in module.named_parameters(recurse=False)} for module in touched]
    before = check()
    for tensor in source.parameters(recurse=False):
        tensor.div_(scale.to(tensor.dtype))
    for layer in layers:
        layer.weight.mul_(scale.to(layer.weight.dtype))
    change = float((check() - before).abs().max())
    if change <= TOLERANCE.get(before.dtype, 1e-4) * float(before.abs().max()):
        return True
    for module, old in zip(touched, kept, strict=True):
        for name, tensor in module.named_parameters(recurse=False):
            tensor.copy_(old[name])
    return False
