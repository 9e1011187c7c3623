"""Successive halving (Jamieson & Talwalkar 2016): many points with little training, the best third with three times more, and so on.

    width points at fidelity 1/9 ──best third──> 1/3 ──best third──> 1      then the next bracket, with new points
    a budget of T trials: the widest bracket whose 1 + 1/3 + 1/9 of asks fit in T, with fewer rungs where 9 + 3 + 1 do not fit;
    without one: 27 + 9 + 3

Nothing is promoted before its whole rung is told, so the order of answers does not matter. Infeasible points are never promoted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...core.errors import OptionError
from .base import Ask, Base, ordered

if TYPE_CHECKING:
    from ..spaces.space import Point, Space


class Halving(Base):
    """Fidelity is in the Ask; the winner is the best of the highest fidelity that was told."""

    def __init__(self, space: Space, objectives: int, budget_trials: int | None, seed: int, *, eta: int = 3, rungs: int = 3) -> None:
        super().__init__(space, objectives, budget_trials, seed)
        if eta < 2 or not 1 <= rungs <= 8:
            raise OptionError(
                f"halving by {eta} over {rungs} rungs", why="it keeps 1/eta of 1 to 8 rungs", do="give eta >= 2, rungs 1 to 8"
            )
        self.eta, self.rungs = eta, rungs
        while budget_trials is not None and self.rungs > 1 and sum(eta**rung for rung in range(self.rungs)) > budget_trials:
            self.rungs -= 1
        self.rung, self.width = 0, self._width()
        self.queue: list[Point] = []  # of this rung, not yet told
        self.drawn = 0  # points of this bracket so far
        self.results: list[tuple[Point, tuple[float, ...]]] = []  # of this rung
        self.highest: dict[Point, float] = {}

    def propose(self) -> Ask:
        if self.rung == 0 and self.drawn < self.width:
            return Ask(self.chance(), self._fidelity())
        return Ask(self.queue[0], self._fidelity())

    def learn(self, ask: Ask, values: tuple[float, ...], feasible: bool) -> None:
        if feasible:
            self.results.append((ask.point, values))
            self.highest[ask.point] = max(ask.fidelity, self.highest.get(ask.point, 0.0))
        if self.rung == 0:
            self.drawn += 1
        elif self.queue:
            self.queue.pop(0)
        if self.drawn >= self.width and not self.queue:
            self._promote()

    def best(self) -> Point:
        self.need_told()
        top = max(self.highest.values())
        return max((point for point, value in self.highest.items() if value == top), key=lambda point: self.told[point])

    def _fidelity(self) -> float:
        return float(self.eta) ** (self.rung + 1 - self.rungs)

    def _promote(self) -> None:
        """The next rung, or the next bracket where nothing is left to promote."""
        count = self.width // self.eta ** (self.rung + 1)
        self.rung += 1
        if self.rung < self.rungs and self.results and count:
            order = ordered(np.array([values for _, values in self.results]))
            self.queue = [self.results[row][0] for row in order[:count]]
        else:
            self.rung, self.drawn, self.queue = 0, 0, []
        self.results = []

    def _width(self) -> int:
        most = self.budget_trials if self.budget_trials is not None else sum(self.eta**rung for rung in range(1, self.rungs + 1))
        least: int = self.eta ** (self.rungs - 1)
        low = least
        high = max(most, least) + 1  # low fits, or is the least there is; high does not fit
        while high - low > 1:
            middle = (low + high) // 2
            fits = sum(middle // self.eta**rung for rung in range(self.rungs)) <= most
            low, high = (middle, high) if fits else (low, middle)
        return low
