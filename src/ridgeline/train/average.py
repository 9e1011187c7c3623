"""A moving average of the weights, which a run ends with.

    after step s:  average ← d · average + (1 - d) · weights,   d = min(decay, (1 + s) / (10 + s))
    at the end:    weights ← average                            parameters and floating-point buffers (running statistics) alike

The smaller decay of the first steps forgets the random start. Fused into a few kernels; the average lives in a checkpoint beside
the weights. Ref: Polyak 1992; the ramp is TensorFlow's ExponentialMovingAverage with num_updates.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Average:
    """Of one model, in its own memory."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.followed = {name: value.detach() for name, value in model.state_dict().items() if value.is_floating_point()}
        self.values = {name: value.clone() for name, value in self.followed.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After optimiser step `step`, from 0."""
        kept = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.values.values()), list(self.followed.values()), 1.0 - kept)

    @torch.no_grad()
    def give(self) -> None:
        """Put the average into the model."""
        torch._foreach_copy_(list(self.followed.values()), list(self.values.values()))

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {f"average.{name}": value for name, value in self.values.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up a checkpoint's."""
        for name, value in self.values.items():
            value.copy_(tensors[f"average.{name}"])
