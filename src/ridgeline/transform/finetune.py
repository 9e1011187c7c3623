"""The step "finetune": some more training between other steps, through the one training loop.

    model, context.data ──fit(epochs | steps, ...)──> the same structure, other weights

Weights that are exactly zero stay zero (`keep_zeros`), so that what was pruned before stays pruned; biases and norms are free.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ..core.spec import Spec
from .step import Context, Done, step


class FinetuneSettings(Spec):
    """How much, and with what."""

    epochs: int | None = Field(default=None, ge=1)
    """Passes over the training data; 1 where neither this nor `steps` is given."""
    steps: int | None = Field(default=None, ge=1)
    """Optimiser steps, instead of epochs."""
    batch: int = Field(default=128, ge=1)
    """Rows of one step."""
    optimiser: Literal["sgd", "adam", "adamw"] = "sgd"
    """Which of torch's."""
    learning_rate: float = Field(default=0.01, gt=0)
    """At the start; the schedule lowers it."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Of sgd."""
    weight_decay: float = Field(default=5e-4, ge=0)
    """As in `fit`."""
    schedule: Literal["cosine", "constant", "step", "linear", "onecycle"] = "cosine"
    """How the learning rate falls."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the passes, by autocast."""
    keep_zeros: bool = True
    """Whether weights that are zero stay zero."""


@step("finetune", FinetuneSettings)
def run(model: nn.Module, settings: FinetuneSettings, context: Context) -> Done:
    """Train the copy in place."""
    from ..train.fit import fit

    data = context.need("data", "finetune")
    options = settings.model_dump(exclude={"keep_zeros"})
    if settings.epochs is None and settings.steps is None:
        options["epochs"] = 1
    zeros = zero_masks(model) if settings.keep_zeros else {}
    trained = _require_grad(model)
    fit(model, data, **options, seed=context.seed, after_step=_keeper(zeros) if zeros else None, progress=False)
    for parameter in trained:
        parameter.requires_grad_(False)
    kept = f"{sum(int(mask.sum()) for mask in zeros.values()):,} zeros kept" if zeros else "no zeros to keep"
    length = f"{settings.steps} steps" if settings.steps is not None else f"{options['epochs']} epoch{'s' * (options['epochs'] > 1)}"
    return Done(model, f"finetune {length}", notes=(kept,))


def zero_masks(model: nn.Module) -> dict[str, Tensor]:
    """True where a weight of a matrix or a convolution is zero, for the tensors that have any."""
    found = {name: parameter.detach() == 0 for name, parameter in model.named_parameters() if parameter.dim() >= 2}
    return {name: mask for name, mask in found.items() if bool(mask.any())}


def _keeper(zeros: dict[str, Tensor]) -> Any:
    def keep(model: nn.Module, _: int) -> None:
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, mask in zeros.items():
                parameters[name].masked_fill_(mask, 0.0)

    return keep


def _require_grad(model: nn.Module) -> list[nn.Parameter]:
    """Named models come without gradients: switch on what can have one; returns those that were off."""
    off = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
    every = [p for p in model.parameters() if p.is_floating_point()]
    if len(off) < len(every):
        return []  # somebody chose what to freeze
    for parameter in off:
        parameter.requires_grad_(True)
    return off
