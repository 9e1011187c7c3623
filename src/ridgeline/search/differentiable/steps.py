"""One step of a search, of either order: the architecture on a batch of its half, then the weights on a batch of theirs.

    Steps(supernet, rates)(train, valid, search=True) ──> (training loss, validation loss), on the device: nothing waits for it
      order 1  supernet/step.py's SearchStep: on CUDA both halves in one graph
      order 2  the architecture's gradient through one unrolled weight step (gradient.py), as written; then SearchStep for the weights

`sample` draws a new path for every pass; within an order-2 step, the passes over one batch draw the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ...train.feed import Batch
from ..supernet.network import Supernet
from ..supernet.step import SearchStep, make_optimisers, set_rate
from .gradient import Method, buffers_kept, gradients, unrolled_gradient
from .terms import DeviceTerm

PRECISIONS = {"float32": "float32", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class Rates:
    """Of both optimisers; DARTS's where not told otherwise."""

    learning_rate: float
    architecture_rate: float
    momentum: float = 0.9
    weight_decay: float = 3e-4
    architecture_decay: float = 1e-3
    clip: float = 5.0


class Steps:
    """Both optimisers and what a step does with them."""

    def __init__(
        self, supernet: Supernet, rates: Rates, *, order: int = 1, method: Method = "exact", term: DeviceTerm | None = None,
        precision: str = "float32",
    ) -> None:  # fmt: skip
        self.supernet, self.rates, self.order, self.method, self.term, self.precision = supernet, rates, order, method, term, precision
        self.weights, self.architecture = list(supernet.weight_parameters()), list(supernet.architecture_parameters())
        self.of_weights, self.of_architecture = make_optimisers(
            supernet, rate=rates.learning_rate, momentum=rates.momentum, decay=rates.weight_decay,
            architecture_rate=rates.architecture_rate, architecture_decay=rates.architecture_decay,
        )  # fmt: skip
        self.rate = rates.learning_rate
        self.restart(0)

    def restart(self, done: int) -> None:
        """Go on after `done` steps, without the graphs captured so far: those of steps that will not come again only hold memory."""
        self.step = SearchStep(
            self.supernet, self.of_weights, self.of_architecture, precision=PRECISIONS[self.precision], clip=self.rates.clip, term=self.term
        )
        self.step.steps = done  # what top_k's choices are timed by

    def set_rate(self, rate: float) -> None:
        self.rate = rate
        set_rate(self.of_weights, rate)

    def __call__(self, train: Batch, valid: Batch, *, search: bool) -> tuple[Tensor, Tensor]:
        """`search` False: weights alone, and the validation loss is 0."""
        both = search and self.order == 1
        unrolled = self._second_order(train, valid) if search and not both else None
        losses = self.step((train.inputs, train.targets), (valid.inputs, valid.targets) if both else None)
        found = losses.architecture if both else unrolled
        return losses.weights, torch.zeros_like(losses.weights) if found is None else found

    def loss(self, batch: Batch, precision: str | None = None) -> Tensor:
        """Cross entropy of the supernet, its graph kept."""
        with torch.autocast(batch.inputs.device.type, torch.bfloat16, enabled=(precision or self.precision) == "bfloat16"):
            logits = self.supernet(batch.inputs)
        return functional.cross_entropy(logits.float() if logits.dtype == torch.bfloat16 else logits, batch.targets)

    def _second_order(self, train: Batch, valid: Batch) -> Tensor:
        state = self.of_weights.state
        buffers = [state[p].get("momentum_buffer") if p in state else None for p in self.weights]
        momentum = [torch.zeros_like(p) if b is None else b * self.rates.momentum for p, b in zip(self.weights, buffers, strict=True)]
        drawn = self.supernet.draws
        with buffers_kept(self.supernet):
            loss, found = unrolled_gradient(
                self._same_path(train, drawn), self._same_path(valid, drawn + 1), self.weights, self.architecture,
                rate=self.rate, momentum=momentum, weight_decay=self.rates.weight_decay, method=self.method,
            )  # fmt: skip
        self.supernet.draws = drawn + 2
        if self.term:
            found = [a + b for a, b in zip(found, gradients(self.term(self.supernet), self.architecture), strict=True)]
        for parameter, gradient in zip(self.architecture, found, strict=True):
            parameter.grad = gradient
        self.of_architecture.step()
        self.of_architecture.zero_grad(set_to_none=True)
        return loss

    def _same_path(self, batch: Batch, drawn: int) -> Callable[[], Tensor]:
        def loss() -> Tensor:
            self.supernet.draws = drawn
            return self.loss(batch)

        return loss
