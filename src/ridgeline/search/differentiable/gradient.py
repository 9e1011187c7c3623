"""The gradient of the architecture: plain, through one unrolled weight step, and products with its Hessian.

    first    ∇a Lv(w, a)
    second   ∇a Lv(w', a) - ξ ∇²aw Lt(w, a) · ∇w' Lv(w', a)         w' = w - ξ (μ m + ∇w Lt(w, a) + λ w)
               exact       the mixed product by a second backward pass
               difference  (∇a Lt(w + εv, a) - ∇a Lt(w - εv, a)) / 2ε,  ε = 0.01 / ‖v‖
    hessian  H v of ∇²aa, the same two ways ──power iteration──> the eigenvalue of largest magnitude

A loss is a function without arguments that runs the model on one batch at the parameters as they are; it must give the same
value each time (seed what it draws). Weights and buffers are as before when a function returns. Ref: Liu 2019 (DARTS), eq. 7-8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

Loss = Callable[[], Tensor]
Method = Literal["exact", "difference"]
METHODS = ("exact", "difference")
STEP = 0.01  # of the finite difference, as a length in the space of the weights


def gradients(value: Tensor, of: Sequence[Tensor], *, create_graph: bool = False) -> list[Tensor]:
    """d value / d each; zeros where it does not depend on one."""
    found = torch.autograd.grad(value, list(of), create_graph=create_graph, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(of, found, strict=True)]


def unrolled_gradient(
    train_loss: Loss, valid_loss: Loss, weights: Sequence[nn.Parameter], architecture: Sequence[nn.Parameter], *,
    rate: float, momentum: Sequence[Tensor] | None = None, weight_decay: float = 0.0, method: Method = "exact",
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """(Lv(w', a), its gradient with respect to a through the step from w to w').

    `momentum` is what the optimiser will add to the gradient (μ times its buffer); it does not depend on a.
    """
    taken = gradients(train_loss(), weights)
    with torch.no_grad():
        taken = list(torch._foreach_add(taken, list(weights), alpha=weight_decay)) if weight_decay else taken
        taken = list(torch._foreach_add(taken, list(momentum))) if momentum else taken
    with moved(weights, taken, -rate):
        value = valid_loss()
        found = gradients(value, [*architecture, *weights])
    direct, vector = found[: len(architecture)], found[len(architecture) :]
    mixed = mixed_product(train_loss, weights, architecture, vector, method)
    return value.detach(), [d - rate * m for d, m in zip(direct, mixed, strict=True)]


def mixed_product(
    loss: Loss, weights: Sequence[nn.Parameter], architecture: Sequence[nn.Parameter], vector: Sequence[Tensor], method: Method = "exact"
) -> list[Tensor]:
    """∇²aw L · v: how the weights' gradient along v changes with the architecture."""
    if method == "exact":
        along = _dot(gradients(loss(), weights, create_graph=True), vector)
        return [g.detach() for g in gradients(along, architecture)] if along.requires_grad else [torch.zeros_like(a) for a in architecture]
    return _difference(loss, weights, architecture, vector)


def hessian_product(loss: Loss, parameters: Sequence[nn.Parameter], method: Method = "exact") -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """v ──> ∇²L v. The exact form runs the loss once and keeps its graph for all products."""
    if method == "difference":
        return lambda vector: _difference(loss, parameters, parameters, vector)
    first = gradients(loss(), parameters, create_graph=True)

    def product(vector: Sequence[Tensor]) -> list[Tensor]:
        along = _dot(first, vector)
        if not along.requires_grad:
            return [torch.zeros_like(p) for p in parameters]
        found = torch.autograd.grad(along, list(parameters), retain_graph=True, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g.detach() for p, g in zip(parameters, found, strict=True)]

    return product


def dominant_eigenvalue(
    loss: Loss,
    parameters: Sequence[nn.Parameter],
    *,
    iterations: int = 30,
    tolerance: float = 1e-3,
    seed: int = 0,
    method: Method = "exact",
) -> float:
    """The Hessian's eigenvalue of largest magnitude, with its sign; waits for the device, so not for use inside a step.

    Ends when two estimates in a row differ by less than `tolerance` of their size.
    """
    product = hessian_product(loss, parameters, method)
    random = torch.Generator().manual_seed(seed)
    vector = [torch.randn(p.shape, generator=random).to(p.device, p.dtype) for p in parameters]
    estimate = 0.0
    for _ in range(iterations):
        length = _dot(vector, vector).sqrt()
        if not float(length) > 0.0:
            return 0.0  # H v = 0: with a random v, H = 0
        vector = [v / length for v in vector]
        image = product(vector)
        before, estimate = estimate, float(_dot(vector, image))
        vector = image
        if abs(estimate - before) <= tolerance * abs(estimate):
            break
    return estimate


@contextmanager
def moved(parameters: Sequence[nn.Parameter], along: Sequence[Tensor], by: float | Tensor) -> Iterator[None]:
    """Parameters at p + by · along inside, to the bit as before outside."""
    before = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p, direction in zip(parameters, along, strict=True):
            p.add_(direction * by)
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(list(parameters), before)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Running statistics that extra passes would move are put back."""
    kept = [(b, b.clone()) for b in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


def _difference(loss: Loss, along: Sequence[nn.Parameter], parameters: Sequence[nn.Parameter], vector: Sequence[Tensor]) -> list[Tensor]:
    """Central difference of ∇parameters L along `vector` in the space of `along`; no host sync: a zero vector gives zeros."""
    size = _dot(vector, vector).sqrt()
    epsilon = STEP / size.clamp(min=torch.finfo(size.dtype).tiny ** 0.5)
    sides = []
    for sign in (1.0, -1.0):
        with moved(along, vector, sign * epsilon):
            sides.append(gradients(loss(), parameters))
    return [(up - down) / (2.0 * epsilon) for up, down in zip(*sides, strict=True)]


def _dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(first, second, strict=True)]).sum()
