"""One step of a first-order search: the architecture on a validation batch, then the weights on a training batch.

    SearchStep(supernet, weight optimiser, architecture optimiser)(train batch, validation batch) ──> Losses, on the device
      CPU      as written
      CUDA     the first steps as written (libraries warm up, optimisers make their state: these are steps like any other), then the whole
               of both halves, optimisers included, in one CUDA graph: batches are copied into its buffers, nothing waits
      sample   both halves' draws are made on the host before the step (on CUDA from weights a step old: nothing waits) and go to the
               graph's buffer in one copy; the graph has the kernels of all ops, and those not drawn write zeros and return (draws.py)
               without a graph, only the drawn ops' kernels are started; both forms take the same draws and give the same gradients
      top_k    ops are chosen anew every `refresh_every` steps on the host; where they change, one step runs as written, then a new graph

Each half asks for its own gradients only: the architecture's pass does not compute those of the weights.
Weights of ops that were not computed have a gradient of zeros, not none: decay and momentum move them like any other.
Precision "bf16": float32 weights, optimiser and architecture; convolutions and states in bfloat16 (as autocast; batch statistics and sums
of batch norm float32, sums over ops rounded once). Batches of another shape than the graph's run as written. Layout is NCHW: branches side
by side in the channels stay whole planes, which is what the depthwise kernels read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...core.errors import OptionError, unknown_name
from .draws import Draw, packed
from .network import Supernet

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Drawn = Draw | Tensor | None
PRECISIONS = ("float32", "bf16")


@dataclass(frozen=True, slots=True)
class Losses:
    """Of this step, as tensors; `architecture` is None in a step of weights only."""

    weights: Tensor
    architecture: Tensor | None


@dataclass(slots=True)
class _Captured:
    graph: Any
    inputs: list[Tensor]
    draws: Tensor | None
    """Of `sample`: [passes, 2, edges, ops]."""
    losses: Losses
    kept: object
    """What the graph reads and nobody else may hold any more."""


class SearchStep:
    def __init__(
        self, supernet: Supernet, weight_optimiser: torch.optim.Optimizer, architecture_optimiser: torch.optim.Optimizer,
        loss: Loss = functional.cross_entropy, *, precision: str = "float32", clip: float | None = 5.0, graph: bool | None = None,
        warm: int = 3, refresh_every: int = 50, term: Callable[[Supernet], Tensor] | None = None,
    ) -> None:  # fmt: skip
        """`term` is added to the architecture's loss (a device cost); `graph` None: on CUDA."""
        if precision not in PRECISIONS:
            raise unknown_name("precision", precision, PRECISIONS, see="docs/search.md")
        self.supernet, self.loss, self.term = supernet, loss, term
        self.weight_optimiser, self.architecture_optimiser = weight_optimiser, architecture_optimiser
        self.precision, self.clip, self.warm, self.refresh_every = precision, clip, warm, refresh_every
        self.weights, self.architecture = list(supernet.weight_parameters()), list(supernet.architecture_parameters())
        on_cuda = self.weights[0].is_cuda
        self.graph = on_cuda if graph is None else graph
        if self.graph and not on_cuda:
            raise OptionError("a captured step", why="it needs a CUDA device", do="leave `graph` to the step")
        self.steps = 0
        self.captures = 0
        self._captured: dict[tuple[Any, ...], _Captured] = {}
        self._seen: dict[tuple[Any, ...], int] = {}

    def __call__(self, train: Batch, valid: Batch | None = None) -> Losses:
        """Without a validation batch, the weights only."""
        if self.supernet.policy == "top_k" and self.steps % self.refresh_every == 0 and self.supernet.refresh():
            self._captured.clear()
            self._seen = dict.fromkeys(self._seen, self.warm - 1)  # the libraries are warm; kernels of new shapes load once more
        self.steps += 1
        drawn = [self.supernet.sample() for _ in range(1 if valid is None else 2)] if self.supernet.policy == "sample" else []
        if not self.graph:
            return self.run(train, valid, drawn)
        sent = packed(drawn, self.architecture[0]) if drawn else None
        batches = [*train, *(valid or ())]
        key = tuple((tuple(one.shape), one.dtype) for one in batches)
        if key not in self._captured:
            seen = self._seen[key] = self._seen.get(key, 0) + 1
            if seen <= self.warm or (self._captured and key not in self._captured and seen <= 100):
                # A rare shape (the last batch) is not worth a graph of its own.
                return self.run(train, valid, [] if sent is None else sent.to(batches[0].device, non_blocking=True).unbind(0))
            self._captured[key] = self.capture(batches, sent)
        captured = self._captured[key]
        for buffer, given in zip(captured.inputs, batches, strict=True):
            buffer.copy_(given, non_blocking=True)
        if captured.draws is not None and sent is not None:
            captured.draws.copy_(sent, non_blocking=True)
        captured.graph.replay()
        found = captured.losses
        return Losses(found.weights.clone(), None if found.architecture is None else found.architecture.clone())

    def run(self, train: Batch, valid: Batch | None, drawn: Sequence[Drawn] = ()) -> Losses:
        """`drawn`: of `sample`, the halves' draws in the order they run."""
        first, last = (drawn[0], drawn[-1]) if len(drawn) else (None, None)
        found = None if valid is None else self.architecture_step(*valid, first)
        return Losses(self.weight_step(*train, last), found)

    def architecture_step(self, x: Tensor, y: Tensor, drawn: Drawn = None) -> Tensor:
        with _fixed(self.weights):
            loss = self.forward(x, y, drawn)
            whole = loss if self.term is None else loss + self.term(self.supernet)
            _assign(self.architecture, _gradients(whole, self.architecture))
        self.architecture_optimiser.step()
        return loss.detach()

    def weight_step(self, x: Tensor, y: Tensor, drawn: Drawn = None) -> Tensor:
        with _fixed(self.architecture):
            loss = self.forward(x, y, drawn)
            _assign(self.weights, _gradients(loss, self.weights))
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.weights, self.clip)
        self.weight_optimiser.step()
        return loss.detach()

    def forward(self, x: Tensor, y: Tensor, drawn: Drawn = None) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=False):
            logits = self.supernet(x) if drawn is None else self.supernet(x, drawn)
        return self.loss(logits.float() if logits.dtype == torch.bfloat16 else logits, y)

    def capture(self, batches: list[Tensor], sent: Tensor | None) -> _Captured:
        inputs = [one.clone() for one in batches]
        draws = None if sent is None else sent.to(inputs[0].device)
        drawn = [] if draws is None else draws.unbind(0)
        first = drawn[0] if len(drawn) else None
        self.supernet.plans(self.supernet.choose(first)[1], inputs[0].device)  # indices are sent before the capture, not by it
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        self.captures += 1
        with torch.cuda.graph(graph):
            losses = self.run((inputs[0], inputs[1]), (inputs[2], inputs[3]) if len(inputs) == 4 else None, drawn)
        return _Captured(graph, inputs, draws, losses, self.supernet._plans)


@contextmanager
def _fixed(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Without gradients for these; a fused backward then computes none."""
    for one in parameters:
        one.requires_grad_(False)
    try:
        yield
    finally:
        for one in parameters:
            one.requires_grad_(True)


def _gradients(loss: Tensor, parameters: list[nn.Parameter]) -> tuple[Tensor | None, ...]:
    if not loss.requires_grad:  # every edge drew none: nothing depends on them
        return (None,) * len(parameters)
    return torch.autograd.grad(loss, parameters, allow_unused=True)


def _assign(parameters: list[nn.Parameter], gradients: tuple[Tensor | None, ...]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        # Zeros, not None, where nothing was computed: the fused optimisers want all parameters or none to have momentum.
        parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient


def make_optimisers(
    supernet: Supernet, *, rate: float = 0.025, momentum: float = 0.9, decay: float = 3e-4, architecture_rate: float = 3e-4,
    architecture_decay: float = 1e-3,
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:  # fmt: skip
    """DARTS's: momentum for the weights, Adam for the architecture; on CUDA such that a captured step sees the rate change (`set_rate`)."""
    weights, architecture = list(supernet.weight_parameters()), list(supernet.architecture_parameters())
    on_cuda = weights[0].is_cuda
    given: Any = torch.tensor(rate, device=weights[0].device) if on_cuda else rate
    first = torch.optim.SGD(weights, lr=given, momentum=momentum, weight_decay=decay, fused=on_cuda or None)
    second = torch.optim.Adam(
        architecture, lr=architecture_rate, betas=(0.5, 0.999), weight_decay=architecture_decay, capturable=on_cuda, fused=on_cuda or None
    )
    return first, second


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
