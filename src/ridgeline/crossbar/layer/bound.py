"""Weights without outliers, so that the imperfections of cells weigh less.

    weight of a layer ──clamped to +- sigmas * its standard deviation──> the same layer, most weights untouched

A cell that is stuck or badly written errs by a share of the largest weight of its array, which is what the cell's range is set to. The few
largest weights thus make the error of all the others. Clamped at once a trained network forgets much, so train on:

    bound_weights_(analog); calibrate_(analog, batches)         ADC ranges for what columns sum to now
    fit(analog, data, after_step=BoundWeights(), …)              every step's weights are clamped again
"""

from __future__ import annotations

import torch
from torch import nn

from ...core.errors import OptionError
from .layers import CrossbarLayer

USUAL_SIGMAS = 2.5


@torch.no_grad()
def bound_weights_(model: nn.Module, sigmas: float = USUAL_SIGMAS) -> int:
    """Clamp every linear and convolution layer on arrays; how many layers there are."""
    if not sigmas > 0:
        raise OptionError(f"sigmas = {sigmas}", why="weights are clamped to that many standard deviations", do="give 2 to 3")
    weights = list({id(one.weight): one.weight for one in model.modules() if isinstance(one, CrossbarLayer)}.values())
    if not weights:
        raise OptionError("a model without layers on arrays", why="their weights are what is bounded", do="convert it with to_crossbar")
    for weight in weights:
        limit = sigmas * weight.std(correction=0)
        weight.clamp_(-limit, limit)
    return len(weights)


class BoundWeights:
    """bound_weights_ after every step of `fit`."""

    def __init__(self, sigmas: float = USUAL_SIGMAS) -> None:
        self.sigmas = sigmas

    def __call__(self, model: nn.Module, step: int) -> None:
        bound_weights_(model, self.sigmas)
