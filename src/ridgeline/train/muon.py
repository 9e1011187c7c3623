"""Muon: momentum whose direction is made orthogonal, for the matrices of a network; Nesterov's SGD for everything else.

    buffer ← momentum · buffer + gradient          u = gradient + momentum · buffer (Nesterov) or buffer
    matrices [R,C] (a convolution is [out, in · height · width]):
        u ──Newton-Schulz──> U Vᵀ of u = U Σ Vᵀ, about      w ← w · (1 - rate · decay) - rate · √max(1, R/C) · U Vᵀ
    the rest (vectors, depthwise, stem, head):              w ← w - rate · (decay · w + u)

An update of a matrix has the Frobenius norm rate · √R (R <= C), and fresh weights of variance 2 / fan-in have √(2R): the rate is the
relative change, about 0.7 · rate, in every layer. Matrices of one shape go through one batched product. Five rounds take singular
values of 0.002 to 1 of the matrix's Frobenius norm to 0.68 .. 1.21 (measured); smaller ones stay smaller. Ref: Jordan 2024 (Muon and
its coefficients), Higham 2008, chapter 8 (Newton-Schulz).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

ROUNDS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c of x ← a x + b x³ + c x⁵
SMALLEST_SIDE, SMALLEST_INPUT = 16, 8  # below: too few directions to even out (head, stem, depthwise)


def is_matrix(parameter: nn.Parameter) -> bool:
    """Whether its update is made orthogonal."""
    if parameter.ndim < 2 or parameter.shape[1] < SMALLEST_INPUT:
        return False
    rows = parameter.shape[0]
    return min(rows, parameter.numel() // rows) >= SMALLEST_SIDE


@torch.no_grad()
def orthogonal(matrices: Tensor, rounds: int = ROUNDS) -> Tensor:
    """[N,R,C] with all singular values near 1, the singular vectors kept; bfloat16 on CUDA, where it is exact enough."""
    a, b, c = COEFFICIENTS
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(rounds):
        square = x @ x.mT  # [N,R,R], R the smaller side
        x = a * x + torch.baddbmm(b * square, square, square, beta=1.0, alpha=c) @ x
    upright: Tensor = x.mT if tall else x
    return upright.to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Groups say by `orthogonal` which of the two rules holds for them."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, momentum: float = 0.9, nesterov: bool = True, weight_decay: float = 0.0
    ) -> None:
        super().__init__(
            list(groups), {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "orthogonal": False}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                (_orthogonal_step if group["orthogonal"] else _plain_step)(parameters, self._directions(parameters, group), group)
        return loss

    def _directions(self, parameters: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """u of every parameter; the buffers are brought up to date."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not group["orthogonal"] and group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, gradients)
        return list(torch._foreach_add(gradients, buffers, alpha=group["momentum"])) if group["nesterov"] else buffers


def _plain_step(parameters: list[Tensor], directions: list[Tensor], group: dict[str, Any]) -> None:
    torch._foreach_add_(parameters, directions, alpha=-group["lr"])


def _orthogonal_step(parameters: list[Tensor], directions: list[Tensor], group: dict[str, Any]) -> None:
    if group["weight_decay"]:
        torch._foreach_mul_(parameters, 1.0 - group["lr"] * group["weight_decay"])
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, direction in enumerate(directions):
        alike[direction.shape[0], direction.numel() // direction.shape[0]].append(place)
    for (rows, columns), places in alike.items():
        made = orthogonal(torch.stack([directions[place].reshape(rows, columns) for place in places]))
        made *= -group["lr"] * max(1.0, rows / columns) ** 0.5
        torch._foreach_add_([parameters[place] for place in places], [made[n].view(parameters[p].shape) for n, p in enumerate(places)])
