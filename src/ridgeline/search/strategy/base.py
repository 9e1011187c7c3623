"""What every strategy has: one pending question, what was told, what was refused.

ask() ──> Ask(point, fidelity)     evaluate it     tell(ask, objectives [larger is better], feasible)     best() ──> the point to ship

know(known) before the first ask: what costs no training to know, so that it is not guessed.

A proposal is drawn with a generator of (seed, number of tells) and changes nothing; only tells do. So a strategy is a function of
(seed, settings, tells): ask() again before tell() gives the same Ask, and telling a fresh one what a journal holds brings it to the same
state, with or without the asks between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ...core.errors import OptionError

if TYPE_CHECKING:
    from ..spaces.space import Point, Space

Known = Callable[["Point"], tuple[tuple[float | None, ...], bool]]
"""Point ──> objectives that are known without a training (None: the others), and whether it keeps the limits on what is known."""
TRIES, KNOWN_TRIES = 100, 3000
"""Draws before a point that was already told is asked again; and, where costs are known, one that breaks a limit."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Evaluate this point, with this share of the full training."""

    point: Point
    fidelity: float = 1.0


class Strategy(Protocol):
    """What a search talks to."""

    def ask(self) -> Ask: ...
    def tell(self, ask: Ask, objectives: Sequence[float], feasible: bool = True) -> None: ...
    def best(self) -> Point: ...


class Base:
    """Subclasses give propose() and, where they keep more than this, learn()."""

    def __init__(self, space: Space, objectives: int, budget_trials: int | None, seed: int) -> None:
        self.space, self.objectives, self.budget_trials = space, objectives, budget_trials
        self.seed, self.tells = seed, 0
        self.random = np.random.default_rng(seed)  # of the proposal at hand
        self.told: dict[Point, tuple[float, ...]] = {}
        self.refused: dict[Point, None] = {}  # infeasible, or without a finite number; in order
        self.seen: set[Point] = set()  # canonical forms of both
        self.pending: Ask | None = None
        self.known: Known | None = None

    def know(self, known: Known) -> None:
        """What costs no training to know; the same for a point every time."""
        self.known = known

    def ask(self) -> Ask:
        if self.pending is None:
            self.random = np.random.default_rng([self.seed, self.tells])
            self.pending = self.propose()
        return self.pending

    def tell(self, ask: Ask, objectives: Sequence[float], feasible: bool = True) -> None:
        if feasible and len(objectives) != self.objectives:
            raise OptionError(f"{len(objectives)} objectives told", why=f"the strategy was made for {self.objectives}", do="tell as many")
        self.pending = None
        self.tells += 1
        values = tuple(float(value) for value in objectives)
        feasible = feasible and bool(np.isfinite(values).all())
        if feasible:
            self.told[ask.point] = values
        elif ask.point not in self.told:
            self.refused[ask.point] = None
        self.seen.add(self.space.canonical(ask.point))
        self.learn(ask, values, feasible)

    def best(self) -> Point:
        self.need_told()
        return max(self.told, key=lambda point: self.told[point])  # among equals of the first objective the others decide

    def propose(self) -> Ask:
        """From what was told and self.random alone, changing neither."""
        raise NotImplementedError

    def learn(self, ask: Ask, values: tuple[float, ...], feasible: bool) -> None:
        """What a subclass does with an answer."""

    def need_told(self) -> None:
        if not self.told:
            raise OptionError(
                "a search without a result",
                why=f"none of {len(self.refused)} points was feasible",
                do="loosen the limits, or try more points",
            )

    def fresh(self, draw: Callable[[], Point]) -> Point:
        """The first drawn point that computes something not yet told, within the limits on known costs; after all tries, whatever comes."""
        new: Point | None = None
        for number in range(TRIES if self.known is None else KNOWN_TRIES):
            point = draw()
            if self.space.canonical(point) not in self.seen:
                if self.allowed(point):
                    return point
                new = new or point
            elif new is None and number >= TRIES:
                break
        return new or draw()

    def allowed(self, point: Point) -> bool:
        """Whether no cost that is known breaks a limit."""
        return self.known is None or self.known(point)[1]

    def chance(self) -> Point:
        return self.fresh(lambda: self.space.random(self.random))


def standardised(values: Any) -> Any:
    """[n, objectives], each with mean 0 and deviation 1."""
    return (values - values.mean(axis=0)) / (values.std(axis=0) + 1e-12)


def beaten(values: Any) -> Any:
    """[n]: how many others are at least as good in all of [n, objectives] and better in one."""
    better = (values[None] >= values[:, None]).all(axis=2) & (values[None] > values[:, None]).any(axis=2)  # [one, the better other]
    return better.sum(axis=1)


def ordered(values: Any) -> list[int]:
    """Rows of [n, objectives], best first: by how many beat them, then by the sum of standardised objectives."""
    return [int(row) for row in np.lexsort((-standardised(values).sum(axis=1), beaten(values)))]
