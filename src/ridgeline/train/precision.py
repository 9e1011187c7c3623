"""Mixed precision: autocast for the passes, torch's GradScaler for float16, and an eye on both.

    float32   plain
    bfloat16  autocast                              the exponent of float32: no scale needed
    float16   autocast + loss · scale ──backward──> gradients · scale ──unscale──> clip ──> step, or skip where one is not finite
                scale ← scale · backoff after a skipped step, · growth after `interval` good ones       (fixed: stays)

A skipped step leaves weights and optimiser as they were, and training goes on. What cannot go on raises: a loss that is not
finite without a scale to blame, or a scale that fell below 1 while every step is skipped. Ref: Micikevicius 2018.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import OptionError, TrainError
from .options import TrainSettings

STALLED_STEPS = 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one optimiser step; tensors stay on the device so that nobody waits for them."""

    scale: Tensor | None = None  # the loss scale the step was taken with
    skipped: Tensor | None = None  # above 0: gradients were not finite


class Precision:
    """Autocast and loss scale of one run."""

    def __init__(self, settings: TrainSettings, device: torch.device, parameters: Sequence[nn.Parameter]) -> None:
        self.clip, self.scaling, self.scaler = settings.clip, settings.scaling, None
        self._autocast: AbstractContextManager[Any] = nullcontext()
        if settings.precision != "float32":
            self._autocast = torch.autocast(device.type, dtype=getattr(torch, settings.precision))
        if settings.precision == "float16":
            _need_float32(parameters)
            scaling = settings.scaling
            self.scaler = torch.amp.GradScaler(device.type, scaling.initial, scaling.growth, scaling.backoff, scaling.interval)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        return self._autocast

    def scale(self, loss: Tensor) -> Tensor:
        """What backward starts from."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def step(self, optimiser: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> Outcome:
        """Unscale, clip, and step or skip."""
        if self.scaler is None:
            self._clip(parameters)
            optimiser.step()
            return Outcome()
        self.scaler.unscale_(optimiser)
        self._clip(parameters)
        # GradScaler tells the scale and what it found only by names with an underscore, or by waiting for the device (get_scale)
        scale = self.scaler._get_scale_async()
        assert scale is not None
        used = scale.clone()
        self.scaler.step(optimiser)
        found = torch.stack([flag.to(used.device) for flag in self.scaler._found_inf_per_device(optimiser).values()]).sum()
        self.scaler.update(None if self.scaling.dynamic else float(self.scaling.initial))
        return Outcome(used, found)

    def _clip(self, parameters: Sequence[nn.Parameter]) -> None:
        if self.clip is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip)

    def state(self) -> dict[str, float]:
        """The scaler's state, JSON-ready."""
        return {} if self.scaler is None else dict(self.scaler.state_dict())

    def load(self, state: dict[str, float]) -> None:
        """Take up a stored state."""
        if self.scaler is not None:
            self.scaler.load_state_dict(state)


def _need_float32(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.dtype == torch.float16:
            raise OptionError(
                "precision = 'float16' for a model whose weights are float16",
                why="loss scaling needs gradients in float32, and updates of float16 weights vanish",
                do="call model.float() first; autocast runs the passes in float16 all the same",
            )


class Watch:
    """Sees every step in order and raises where a run can only waste time."""

    def __init__(self, dynamic: bool) -> None:
        self.dynamic, self.skipped_in_a_row = dynamic, 0

    def see(self, step: int, loss: float, scale: float | None, skipped: bool) -> None:
        """One finished step."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if not skipped and not math.isfinite(loss):
            raise bad_loss(step, loss)
        if self.skipped_in_a_row >= STALLED_STEPS and (not self.dynamic or (scale is not None and scale < 1)):
            raise TrainError(
                f"the last {self.skipped_in_a_row} steps up to step {step} were all skipped at loss scale {scale:g}",
                why="gradients are not finite whatever the scale" if self.dynamic else "gradients overflow float16 at this fixed scale",
                do="train in bfloat16, lower the learning rate or clip, and look for a NaN in the data"
                if self.dynamic
                else "choose a smaller initial scale or dynamic=True",
            )


def bad_loss(step: int, loss: float) -> TrainError:
    """The error of a loss that is not a number."""
    return TrainError(
        f"loss is {loss} at step {step}",
        why="the model or the data holds a value that is not finite, or training diverged",
        do="lower learning_rate, add warmup or clip=1.0, and check the inputs; with checkpoint= you can go back to the last good step",
    )
