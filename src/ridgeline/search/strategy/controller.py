"""A policy-gradient controller (Williams 1992, Zoph 2017): a table of logits, one row a decision.

    softmax(logits) ──sample──> point ──> reward = sum of standardised objectives (infeasible: the worst so far)
    gradient of log p(point) x (reward - moving mean) + entropy ──Adam──> logits

The decisions are independent given the logits: with a few hundred trials an LSTM over them has more to learn than it can be told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .base import Ask, Base

if TYPE_CHECKING:
    from ..spaces.space import Point, Space

FIRST = 10
"""Answers before the policy moves: the reward's scale must be known."""


class Controller(Base):
    """REINFORCE with a moving baseline."""

    def __init__(
        self,
        space: Space,
        objectives: int,
        budget_trials: int | None,
        seed: int,
        *,
        rate: float = 0.1,
        entropy: float = 0.02,
        memory: float = 0.9,
    ) -> None:
        super().__init__(space, objectives, budget_trials, seed)
        self.rate, self.entropy, self.memory = rate, entropy, memory
        sizes = [len(decision.choices) for decision in space.decisions]
        self.open = np.arange(max(sizes)) < np.array(sizes)[:, None]  # [decisions, choices]
        self.logits = np.zeros(self.open.shape)
        self.first, self.second = np.zeros(self.open.shape), np.zeros(self.open.shape)  # Adam's moments
        self.steps, self.baseline = 0, 0.0
        self.history: list[tuple[Point, tuple[float, ...] | None]] = []

    def propose(self) -> Ask:
        if len(self.told) < FIRST:
            return Ask(self.chance())
        return Ask(self.fresh(self._drawn))

    def learn(self, ask: Ask, values: tuple[float, ...], feasible: bool) -> None:
        self.history.append((ask.point, values if feasible else None))
        if len(self.told) == FIRST and feasible and not self.steps:
            for point, found in self.history:
                self._step(point, found)
        elif len(self.told) >= FIRST:
            self._step(ask.point, values if feasible else None)

    def shares(self) -> Any:
        """[decisions, choices]: the policy."""
        powers = np.where(self.open, np.exp(self.logits - self.logits.max(axis=1, keepdims=True)), 0.0)
        return powers / powers.sum(axis=1, keepdims=True)

    def _drawn(self) -> Point:
        edges = self.shares().cumsum(axis=1)
        found = (self.random.random(len(edges))[:, None] > edges).sum(axis=1)
        last = self.open.sum(axis=1) - 1  # a cumulative sum may end below 1
        return tuple(int(choice) for choice in np.minimum(found, last))

    def _reward(self, values: tuple[float, ...] | None) -> float:
        seen = np.array(list(self.told.values()))
        middle = np.median(seen, axis=0)
        # a net that failed to train says how bad bad is, and would make all others look alike
        low = np.maximum(seen.min(axis=0), middle - 2 * (seen.max(axis=0) - middle))
        seen = np.maximum(seen, low)
        scaled = (np.maximum(low if values is None else np.array(values), low) - seen.mean(axis=0)) / (seen.std(axis=0) + 1e-12)
        return float(scaled.mean())

    def _step(self, point: Point, values: tuple[float, ...] | None) -> None:
        reward = self._reward(values)
        shares = self.shares()
        chosen = np.arange(shares.shape[1]) == np.array(point)[:, None]
        surprise = np.where(self.open, -np.log(np.maximum(shares, 1e-12)), 0.0)
        towards_even = shares * (surprise - (shares * surprise).sum(axis=1, keepdims=True))  # gradient of the entropy
        gradient = (reward - self.baseline) * (chosen - shares) + self.entropy * towards_even
        self.baseline = self.memory * self.baseline + (1 - self.memory) * reward
        self.steps += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        slope = self.first / (1 - 0.9**self.steps)
        self.logits += self.rate * slope / (np.sqrt(self.second / (1 - 0.999**self.steps)) + 1e-8)
