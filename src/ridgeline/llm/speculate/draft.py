"""What a draft is: something that guesses the next tokens of a request cheaply, so that the target checks them all in one pass.

Ask: request, count ──propose──> Proposal: tokens x₁…x_k, and the distributions q₁…q_k they were drawn from (None: not wanted)
target pass over k + 1 tokens ──accept──> 1 to k + 1 tokens that are distributed as if the target had sampled them one by one

A draft may keep state for a request (a cache of its own); it must be correct whatever was accepted, also when the request was preempted.
It never decides the text: a bad draft costs time only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from ..cache.kv import KVCache
    from ..engine.request import Request
    from ..model.decoder import Decoder


@dataclass(slots=True)
class Ask:
    """What a draft is asked: `count` tokens after prompt + output of a request, drawn with these random numbers, one a token."""

    request: Request
    count: int
    uniforms: Sequence[float]
    distributions: bool  # whether the distributions of the drafted tokens are wanted; without: the tokens alone


@dataclass(slots=True)
class Proposal:
    """The tokens a draft proposes for one request; at most as many as were asked for, often none."""

    tokens: list[int] = field(default_factory=list)
    distributions: torch.Tensor | None = None  # float32 [len(tokens), vocab]; None: each token is taken as given (one-hot)


class Draft(Protocol):
    """Anything that can propose tokens. `relative_cost` is one draft token against one target step, predicted from bytes read."""

    name: str
    relative_cost: float

    def attach(self, target: Decoder, cache: KVCache) -> None:
        """Called once by the engine with the model it drafts for and that model's cache."""

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """A proposal for each, in order; empty where the draft has none."""

    def forget(self, request: Request) -> None:
        """The request ended: release whatever was kept for it (nothing kept: nothing happens)."""


def known_tokens(request: Request) -> list[int]:
    """Every token of a request so far; the last one has not been through the target yet."""
    return [*request.prompt, *request.output]
