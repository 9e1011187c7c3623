"""The architecture parameters of a supernet: one tensor, one softmax.

    weights [edges of all cell kinds, ops] ──shares()──> softmax over ops
                 + Gumbel noise, / temperature ──shares(noise=…)──> relaxed one-hot;  hard: one-hot ahead, its gradient the relaxed one's
    Temperature(start, end, steps) ──at(step)──> the schedule, in Python: a captured step reads a tensor that `set_temperature` fills

`edge_weights` [edges] exist with edge normalisation only (partial channels): softmax over the edges into a node. Ref: Jang 2017 (Gumbel).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...core.errors import OptionError

KINDS = ("exponential", "linear", "cosine")


@dataclass(frozen=True, slots=True)
class Temperature:
    """From `start` to `end` over `steps`, then `end`."""

    start: float = 10.0
    end: float = 0.1
    steps: int = 10_000
    kind: str = "exponential"

    def __post_init__(self) -> None:
        if not (self.start > 0 and self.end > 0 and self.steps > 0):
            raise OptionError(
                f"temperature {self.start} to {self.end} over {self.steps} steps",
                why="all must be > 0",
                do="e.g. Temperature(10, 0.1, 10000)",
            )
        if self.kind not in KINDS:
            raise OptionError(f"temperature schedule {self.kind!r}", why="there is none of that name", do=f"one of {', '.join(KINDS)}")

    def at(self, step: int) -> float:
        done = min(max(step, 0), self.steps) / self.steps
        if self.kind == "exponential":
            return float(self.start * (self.end / self.start) ** done)
        mixed = done if self.kind == "linear" else (1 - math.cos(math.pi * done)) / 2
        return float(self.start + (self.end - self.start) * mixed)


class Architecture(nn.Module):
    """`targets[e]` numbers the node an edge goes into; only edge normalisation asks."""

    temperature: Tensor
    same_target: Tensor

    def __init__(self, edges: int, ops: int, *, targets: Sequence[int] = (), normalise_edges: bool = False, spread: float = 1e-3) -> None:
        super().__init__()
        self.weights = nn.Parameter(spread * torch.randn(edges, ops))
        self.edge_weights = nn.Parameter(spread * torch.randn(edges)) if normalise_edges else None
        self.register_buffer("temperature", torch.ones(()), persistent=False)
        same = torch.tensor([[a == b for b in targets] for a in targets]) if normalise_edges else None
        self.register_buffer("same_target", same, persistent=False)

    def set_temperature(self, value: float) -> None:
        self.temperature.fill_(value)

    def shares(
        self, temperature: float | Tensor | None = None, hard: bool = False, generator: torch.Generator | None = None, *,
        noise: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """[edges, ops]. Without noise and generator: the softmax of the weights over the temperature (1 unless given)."""
        logits: Tensor = self.weights
        if noise is None and generator is not None:
            noise = gumbel(logits.shape, generator, logits)
        if noise is not None:
            logits = logits + noise
            temperature = self.temperature if temperature is None else temperature
        if temperature is not None:
            logits = logits / temperature
        soft = torch.softmax(logits, dim=-1)
        return straight_through(soft) if hard else soft

    def edge_shares(self) -> Tensor:
        """[edges]: softmax over the edges into the same node."""
        if self.edge_weights is None:
            raise OptionError("edge shares", why="the architecture has no edge weights", do="build it with normalise_edges=True")
        logits = torch.where(self.same_target, self.edge_weights[None, :], float("-inf"))
        shares: Tensor = torch.softmax(logits, dim=-1).diagonal()
        return shares


def gumbel(shape: Sequence[int], generator: torch.Generator | None, like: Tensor) -> Tensor:
    """-log of exponential draws; they are never 0 in the dtype, so the noise is finite."""
    drawn = torch.empty(shape, dtype=like.dtype, device=like.device).exponential_(generator=generator)
    return -drawn.clamp_min(torch.finfo(like.dtype).tiny).log()


def straight_through(soft: Tensor) -> Tensor:
    """One-hot at the largest; the gradient is that of `soft`."""
    hot = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
    return hot + soft - soft.detach()
