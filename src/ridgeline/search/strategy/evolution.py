"""Regularised evolution (Real 2019): the oldest of the population dies, the best of a few drawn ones has a child.

    first parents   the best of three times as many random points by zero-cost proxies (proxy=(): just random)
    child           a mutation, one in four after a crossing of two parents; of CHILDREN such the one that the process over everything
                    told believes most in
Several objectives: each choice weighs them anew. Infeasible points have no children, and their like is avoided.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import OptionError
from .acquisition import hopes
from .base import Ask, Base, Known, standardised
from .screen import Screen

if TYPE_CHECKING:
    from ..spaces.space import Point, Space

CHILDREN = 8
POOL = 3
"""Random points scored by the proxies, for each first parent."""


class Evolution(Base):
    def __init__(
        self,
        space: Space,
        objectives: int,
        budget_trials: int | None,
        seed: int,
        *,
        population: int | None = None,
        tournament: int | None = None,
        proxy: tuple[str, ...] = ("synflow", "nwot"),
        screen: bool = True,
    ) -> None:
        super().__init__(space, objectives, budget_trials, seed)
        self.population = population or min(30, max(4, (budget_trials or 90) // 3))
        self.tournament = tournament or max(2, self.population // 3)
        if not 2 <= self.tournament <= self.population:
            raise OptionError(
                f"a tournament of {self.tournament} in a population of {self.population}", why="it draws 2 or more of them", do="change one"
            )
        self.proxy = proxy
        self.alive: deque[Point] = deque()
        self.parents: list[Point] | None = None  # the first ones, by proxies
        self.screen = Screen(space) if screen else None

    def know(self, known: Known) -> None:
        super().know(known)
        if self.screen:
            self.screen.known = known

    def propose(self) -> Ask:
        if len(self.alive) < self.population:
            return Ask(self._first())
        weight = self.random.dirichlet(np.ones(self.objectives))
        children = [self.fresh(lambda: self._child(weight)) for _ in range(CHILDREN if self.screen else 1)]
        return Ask(children[self._best_of(children, weight)])

    def learn(self, ask: Ask, values: tuple[float, ...], feasible: bool) -> None:
        if self.screen:
            self.screen.add(ask.point, values if feasible else None)
        if feasible:
            self.alive.append(ask.point)
        if len(self.alive) > self.population:
            self.alive.popleft()

    def _first(self) -> Point:
        if self.proxy and self.parents is None:
            self.parents = self._by_proxies()
        for point in self.parents or ():
            if self.space.canonical(point) not in self.seen and self.allowed(point):
                return point
        if self.screen is None or not (self.refused or self.known):
            return self.chance()
        drawn = [self.chance() for _ in range(CHILDREN)]
        return drawn[int(np.argmax(self.screen.feasible(drawn)))]

    def _by_proxies(self) -> list[Point]:
        """Of the seed alone, whenever it is first asked for."""
        from ..proxies import rank_points

        random = np.random.default_rng(self.seed)
        pool = {self.space.canonical(point): point for point in (self.space.random(random) for _ in range(POOL * self.population))}
        points = list(pool.values())
        scores = rank_points(self.space, points, self.proxy, seed=self.seed)
        return [points[row] for row in np.argsort(-scores, kind="stable")[: self.population]]

    def _child(self, weight: Any) -> Point:
        first, second = (self._parent(weight) for _ in range(2))
        if self.random.random() < 0.25:
            first = self.space.crossed(first, second, self.random)
        return self.space.mutated(first, self.random)

    def _parent(self, weight: Any) -> Point:
        score = standardised(np.array([self.told[point] for point in self.alive])) @ weight
        drawn = self.random.choice(len(self.alive), self.tournament, replace=False)
        return self.alive[int(drawn[np.argmax(score[drawn])])]

    def _best_of(self, children: list[Point], weight: Any) -> int:
        if self.screen is None:
            return 0
        guesses, feasible = self.screen.guesses(children)
        scale = np.array(list(self.told.values())).std(axis=0) + 1e-12
        score = hopes(guesses) / scale @ weight
        return int(np.argmax((score - score.min() + 1e-9) * feasible))
