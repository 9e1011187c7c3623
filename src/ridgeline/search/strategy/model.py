"""The default: try what a Gaussian process hopes most of; ship what it believes most in.

listed space   (a table) every point is a candidate; one that computes the same as one told is closed
any other      candidates are drawn anew for each ask: mutations and crossings of the best told, and random points

Where costs are known beforehand (a latency table), the first points are spread over them, and none that breaks a limit is asked for.
The winner is the told point whose smoothed first objective is best: one training is noisy, its neighbours' say more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..surrogate import Surrogate
from .acquisition import choose, hopeful
from .base import Ask, Base, Known, beaten, ordered
from .screen import Screen, chance_to_fit

if TYPE_CHECKING:
    from ..spaces.space import Point, Space

FIRST = 12
"""Random points before the model is asked."""
LENGTH, NOISE, COST_NOISE, CUT, DRAWN = 24.0, 0.2, 0.01, 1.0, 0.8
"""Of a listed space's kernel, the share of an accuracy that is chance (of costs little is), where its low end is cut off, and deviations in
a draw: chosen on CIFAR-100 and ImageNet16-120, among some forty settings."""
PARENTS, CANDIDATES = 12, 96
NEAR, NEIGHBOURS = 3, 24
"""With several objectives every third trial is next to the front, on it or not: accuracies of short trainings misjudge small nets."""
SPREAD, GOLDEN = 32, 0.6180339887498949
MOST_LISTED = 5000
"""Observations a listed space's process can hold."""


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """All points of a space there are: features bool [N, F], groups [N] of points that compute the same, each group's row to ask for."""

    points: list[Point]
    features: Any
    groups: Any
    rows: Any


class ModelSearch(Base):
    def __init__(
        self, space: Space, objectives: int, budget_trials: int | None, seed: int, *, listed: Listed | None = None, first: int = FIRST
    ) -> None:
        super().__init__(space, objectives, budget_trials, seed)
        self.first = min(first, max(2, (budget_trials or 4 * first) // 4))
        self.pool: _Pool = _Drawn(self) if listed is None else _Everything(self, listed)

    def know(self, known: Known) -> None:
        super().know(known)
        self.pool.know(known)

    def propose(self) -> Ask:
        if len(self.told) < self.first:
            return Ask(self.pool.chance() if self.known is None else self._spread(self.known))
        values = np.array(list(self.told.values()))
        if self.objectives > 1 and self.tells % NEAR == 0 and (point := self._near(values)):
            return Ask(point)
        return Ask(self.pool.pick(values) or self.pool.chance())

    def _spread(self, known: Known) -> Point:
        """A random point within the limits; of SPREAD such the one nearest to another cost each time: the golden ratio's multiples."""
        drawn = list(dict.fromkeys(self.pool.chance() for _ in range(SPREAD)))
        found = [(known(point)[0], point) for point in drawn if self.allowed(point)]
        if not found:
            return drawn[0]
        costs = [place for place in range(self.objectives) if found[0][0][place] is not None]
        if not costs:
            return found[0][1]
        cost = np.array([values[costs[0]] for values, _ in found], dtype=float)
        wanted = cost.min() + self.tells * GOLDEN % 1 * (cost.max() - cost.min())
        return found[int(np.argmin(np.abs(cost - wanted)))][1]

    def _near(self, values: Any) -> Point | None:
        """The most hopeful new neighbour of a random point of the front."""
        told, front = list(self.told), np.flatnonzero(beaten(values) == 0)
        member = told[int(self.random.choice(front))]
        drawn = (self.space.mutated(member, self.random) for _ in range(NEIGHBOURS))
        new = {form: point for point in drawn if (form := self.space.canonical(point)) not in self.seen}
        points = [point for point in new.values() if self.allowed(point)]
        hope = self.pool.hopes(points) if points else []
        return self.pool.plain(points[int(np.argmax(hope))]) if len(hope) and np.isfinite(hope).any() else None

    def learn(self, ask: Ask, values: tuple[float, ...], feasible: bool) -> None:
        self.pool.learn(ask.point, values if feasible else None)

    def best(self) -> Point:
        self.need_told()
        told = list(self.told)
        return told[int(np.argmax(self.pool.smoothed(told)))]


class _Pool:
    """Where candidates come from, and what is guessed of them."""

    def __init__(self, search: ModelSearch) -> None:
        self.search = search

    def chance(self) -> Point:
        """A random point not told."""
        return self.search.chance()

    def pick(self, seen: Any) -> Point | None:
        """The candidate to try, given the objectives seen so far [n, objectives]; None where nothing new is left."""
        raise NotImplementedError

    def plain(self, point: Point) -> Point:
        """The point to ask for among those that compute the same."""
        return point

    def hopes(self, points: list[Point]) -> Any:
        """Of the first objective, less where a limit may be broken; -inf for points that are not listed."""
        raise NotImplementedError

    def learn(self, point: Point, values: tuple[float, ...] | None) -> None:
        raise NotImplementedError

    def know(self, known: Known) -> None:
        """Costs that need no guess."""

    def smoothed(self, told: list[Point]) -> Any:
        raise NotImplementedError


class _Drawn(_Pool):
    """Candidates of a space too large to list."""

    def __init__(self, search: ModelSearch) -> None:
        super().__init__(search)
        self.screen = Screen(search.space)

    def pick(self, seen: Any) -> Point | None:
        points = self._candidates()
        return points[choose(*self.screen.guesses(points), seen=seen, random=self.search.random)] if points else None

    def hopes(self, points: list[Point]) -> Any:
        guesses, feasible = self.screen.guesses(points)
        return hopeful(*guesses[0], feasible)

    def learn(self, point: Point, values: tuple[float, ...] | None) -> None:
        self.screen.add(point, values)

    def know(self, known: Known) -> None:
        self.screen.known = known

    def smoothed(self, told: list[Point]) -> Any:
        return self.screen.guesses(told)[0][0][0]

    def _candidates(self) -> list[Point]:
        """A quarter random, the rest near the best: one or two mutations of one, a third of them after a crossing with another."""
        search, space, random = self.search, self.search.space, self.search.random
        told = list(search.told)
        parents = [told[row] for row in ordered(np.array(list(search.told.values())))[:PARENTS]]
        found: dict[Point, Point] = {}
        for number in range(CANDIDATES):
            if number % 4 == 0:
                point = space.random(random)
            else:
                point = parents[int(random.integers(len(parents)))]
                if random.random() < 1 / 3:
                    point = space.crossed(point, parents[int(random.integers(len(parents)))], random)
                for _ in range(int(random.integers(1, 3))):
                    point = space.mutated(point, random)
            form = space.canonical(point)
            if form not in search.seen:
                found.setdefault(form, point)
        return [point for point in found.values() if search.allowed(point)]


class _Everything(_Pool):
    """All points of a listed space; those that compute the same are one candidate."""

    def __init__(self, search: ModelSearch, listed: Listed) -> None:
        super().__init__(search)
        self.points, self.groups, self.rows = listed.points, listed.groups, listed.rows
        self.features = listed.features[self.rows]
        self.group_of = {point: int(group) for point, group in zip(listed.points, listed.groups, strict=True)}
        self.most = min(search.budget_trials or MOST_LISTED, MOST_LISTED)
        noises = [COST_NOISE if place else NOISE for place in range(search.objectives)]
        self.models = [Surrogate(self.features, LENGTH, noise, self.most, CUT) for noise in noises]
        self.closed = np.zeros(len(self.rows), dtype=bool)
        self.flags: dict[Point, Any] = {}

    def chance(self) -> Point:
        rows = np.flatnonzero(~self.closed[self.groups])
        group = self.groups[int(self.search.random.choice(rows if len(rows) else len(self.points)))]
        return self.points[int(self.rows[group])]

    def pick(self, seen: Any) -> Point | None:
        free = np.flatnonzero(~self.closed)
        if not len(free):
            return None
        guesses = [(mean[free], deviation[free]) for mean, deviation in (model.posterior() for model in self.models)]
        feasible = chance_to_fit(self.flags, self.search.refused, self.features[free], LENGTH)
        if len(guesses) == 1:  # among thousands of candidates expected improvement keeps to one corner too long
            place = drawn(*guesses[0], feasible, self.search.random)
        else:
            place = choose(guesses, feasible, seen, self.search.random)
        return self.points[int(self.rows[free[place]])]

    def plain(self, point: Point) -> Point:
        return self.points[int(self.rows[self.group_of[point]])]

    def hopes(self, points: list[Point]) -> Any:
        listed = np.array([self.group_of.get(point, -1) for point in points])
        mean, deviation = self.models[0].posterior()
        feasible = chance_to_fit(self.flags, self.search.refused, self.features[listed], LENGTH)
        return np.where(listed < 0, -np.inf, hopeful(mean[listed], deviation[listed], feasible))

    def learn(self, point: Point, values: tuple[float, ...] | None) -> None:
        group = self.group_of.get(point)
        if group is None:  # told from elsewhere
            return
        self.flags[point] = self.features[group]
        self.closed[group] = True
        if values is not None and len(self.models[0].rows) < self.most:
            near = self.models[0].kernel(group)
            for model, value in zip(self.models, values, strict=True):
                model.observe(group, value, near)

    def smoothed(self, told: list[Point]) -> Any:
        return self.models[0].posterior()[0][[self.group_of[point] for point in told]]


def drawn(mean: Any, deviation: Any, feasible: Any, random: np.random.Generator) -> int:
    """The row with the best of values drawn around the means, each on its own (after Thompson 1933)."""
    values = mean + DRAWN * deviation * random.standard_normal(len(mean))
    return int(np.argmax((values - values.min() + 1e-9) * feasible))
