"""Which chips to evaluate, until the front is known or the budget is spent.

    every chip of a small space, best bound first ──┐ rounds of up to 16 choices
    a small population that crosses and mutates  ───┴──> over a limit? beaten by its bound? in the journal? else evaluate ──> front

grid     all of a space of up to `budget` chips: the front is that of the whole space
evolve   NSGA-II's selection (front rank, then room around a point) with uniform crossing, steps to neighbouring values, and
         no chip twice; the front is that of all chips seen

A chip is not mapped if its area or its leakage alone exceeds a limit, or if a chip already known beats even its lower bound:
such a chip cannot be on the front, so the front is the same as if all had been mapped. Both tests look only at earlier
rounds, so the path depends on the seed and not on how many processes share the work. Ref: Deb et al., NSGA-II, 2002.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

import numpy as np

from ....core.errors import OptionError
from .evaluate import Evaluated, Problem, bound_of, chip_of
from .front import crowding, dominated, front, ranks
from .journal import Journal
from .space import DesignSpace
from .workers import Evaluator

ROUND = 16
PROPOSALS_PER_CHIP = 50
NEIGHBOUR_SHARE = 0.5
TRIES = 30
Picks = tuple[int, ...]
Goal = Literal["latency", "throughput"]
METHODS = ("auto", "grid", "evolve")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a chip may take; None: anything."""

    area_mm2: float | None = None
    power_w: float | None = None

    def violation(self, area_mm2: float, power_w: float) -> float:
        """By how much a chip is over, as a share of the limits; 0: it is not."""
        shares = [(area_mm2, self.area_mm2), (power_w, self.power_w)]
        return sum(max(0.0, value / limit - 1) for value, limit in shares if limit is not None)


@dataclass(frozen=True, slots=True)
class Seen:
    """A choice that was looked at, mapped or not."""

    picks: Picks
    result: Evaluated | None
    """None: not mapped."""
    violation: float
    """Of the limits; infinite for a chip that is impossible or beaten by another."""
    why: Literal["", "over a limit", "beaten by its bound", "impossible"] = ""


@dataclass(slots=True)
class Search:
    """The state of a search: what was seen, and what is known of it."""

    problem: Problem
    space: DesignSpace
    limits: Limits
    goal: Goal
    journal: Journal
    evaluator: Evaluator
    progress: Callable[[Search], None] = lambda search: None
    prune: bool = True
    seen: dict[Picks, Seen] = field(default_factory=dict)
    best: list[Evaluated] = field(default_factory=list)
    """Chips within the limits that no other seen so far beats."""
    mapped: int = 0

    def objectives(self, result: Evaluated) -> tuple[float, float, float]:
        """(time, energy, area), all to be small."""
        time = result.latency_s if self.goal == "latency" else result.sample_s
        return time, result.energy_j, result.area_mm2

    def front(self) -> list[Evaluated]:
        """Chips no other beats, fastest first."""
        return sorted(self.best, key=lambda one: (*self.objectives(one), str(one.choice)))

    def look(self, round_of: Sequence[Picks]) -> list[Seen]:
        """Look at a round of new choices, mapping only those that could be on the front."""
        known = _array([self.objectives(one) for one in self.best])
        first = {picks: self._without_mapping(picks, known) for picks in round_of}
        wanted = [self.space.choice(picks) for picks, one in first.items() if one is None]
        unknown = [choice for choice in wanted if self.journal.get(choice) is None]
        self.mapped += len(wanted) - len(unknown)
        for choice, result in self.evaluator.results(unknown):
            self.journal.put(choice, result)
            self.mapped += 1
            self.progress(self)
        looked = [one or self._judged(picks) for picks, one in first.items()]
        self.seen |= {one.picks: one for one in looked}
        rivals = [*self.best, *(one.result for one in looked if one.result is not None and not one.violation)]
        self.best = [rivals[index] for index in front(_array([self.objectives(one) for one in rivals]))]
        self.progress(self)
        return looked

    def _without_mapping(self, picks: Picks, known: np.ndarray) -> Seen | None:
        choice = self.space.choice(picks)
        array = chip_of(self.problem, choice)
        if isinstance(array, str):
            return Seen(picks, None, inf, "impossible")
        if over := self.limits.violation(array.area_mm2, array.static_w):
            return Seen(picks, None, over, "over a limit")
        if self.prune:
            bound = bound_of(self.problem, choice, array)
            time = bound.latency_s if self.goal == "latency" else bound.sample_s
            if dominated(_array([(time, bound.energy_j, array.area_mm2)]), known)[0]:
                return Seen(picks, None, inf, "beaten by its bound")
        return None

    def _judged(self, picks: Picks) -> Seen:
        result = self.journal.get(self.space.choice(picks))
        assert result is not None
        if result.infeasible:
            return Seen(picks, None, inf, "impossible")
        over = self.limits.violation(result.area_mm2, result.power_w)
        return Seen(picks, result, over, "over a limit" if over else "")


def _array(rows: Sequence[tuple[float, ...]]) -> np.ndarray:
    return np.array(rows, dtype=np.float64).reshape(len(rows), 3)


def run(search: Search, method: str = "auto", budget: int = 64, seed: int = 0) -> None:
    """Look at chips until the space or the budget is exhausted."""
    if method not in METHODS:
        raise OptionError(f"method {method!r}", why=f"the methods are {', '.join(METHODS)}", do="choose one of them")
    size = search.space.size
    if method == "grid" and size > budget:
        raise OptionError(
            f"a grid of {size:,} chips",
            why=f"the budget is {budget:,}",
            do="raise --budget, shorten the lists of the space, or use --method evolve",
        )
    rounds = _grid(search) if method == "grid" or (method == "auto" and size <= budget) else _evolution(search, budget, seed)
    for round_of in rounds:
        search.look(round_of)


def chosen_method(method: str, size: int, budget: int) -> str:
    return ("grid" if size <= budget else "evolve") if method == "auto" else method


def _grid(search: Search) -> Iterator[list[Picks]]:
    """Everything, the most promising bound (least energy times time) first: good chips found early rule out others."""
    every = [search.space.picks(number) for number in range(search.space.size)]
    every.sort(key=lambda picks: _promise(search, picks))
    for start in range(0, len(every), ROUND):
        yield every[start : start + ROUND]


def _promise(search: Search, picks: Picks) -> float:
    choice = search.space.choice(picks)
    array = chip_of(search.problem, choice)
    if isinstance(array, str):
        return inf
    bound = bound_of(search.problem, choice, array)
    return bound.energy_j * (bound.latency_s if search.goal == "latency" else bound.sample_s) * max(array.area_mm2, 1e-9)


def _evolution(search: Search, budget: int, seed: int) -> Iterator[list[Picks]]:
    """Generations of new chips; only mapped ones count against the budget."""
    random = np.random.default_rng(seed)
    population: list[Seen] = []
    size = search.space.size
    while search.mapped < budget and len(search.seen) < min(size, PROPOSALS_PER_CHIP * budget):
        wanted = min(ROUND, budget - search.mapped, size - len(search.seen))
        children: dict[Picks, None] = {}
        while len(children) < wanted:
            children[_child(search, population, children, random)] = None
        yield list(children)
        population = _survivors(search, [*population, *(search.seen[picks] for picks in children)])


def _child(search: Search, population: Sequence[Seen], taken: dict[Picks, None], random: np.random.Generator) -> Picks:
    """A chip not seen yet: from two parents where that leads anywhere, else from anywhere."""
    lengths = search.space.lengths
    for _ in range(TRIES if population else 0):
        mother, father = (_parent(population, random) for _ in range(2))
        genes = [one if random.random() < 0.5 else other for one, other in zip(mother.picks, father.picks, strict=True)]
        place = int(random.integers(len(genes)))
        if random.random() < NEIGHBOUR_SHARE:
            genes[place] = min(max(0, genes[place] + (1 if random.random() < 0.5 else -1)), lengths[place] - 1)
        else:
            genes[place] = int(random.integers(lengths[place]))
        if tuple(genes) not in search.seen and tuple(genes) not in taken:
            return tuple(genes)
    start = int(random.integers(search.space.size))
    numbers = (search.space.picks((start + step) % search.space.size) for step in range(search.space.size))
    return next(picks for picks in numbers if picks not in search.seen and picks not in taken)


def _parent(population: Sequence[Seen], random: np.random.Generator) -> Seen:
    """The better of two: the population is sorted."""
    return population[int(min(random.integers(len(population), size=2)))]


def _survivors(search: Search, candidates: Sequence[Seen]) -> list[Seen]:
    """The best of old and new, best first: by front and room around them, then by how little they exceed the limits."""
    fit = [(one, search.objectives(one.result)) for one in candidates if one.result is not None and not one.violation]
    points = _array([point for _, point in fit])
    rank, order = ranks(points), []
    for level in sorted(set(rank)):
        members = [place for place, its in enumerate(rank) if its == level]
        room = crowding(points[members])
        order += [place for _, place in sorted(zip([-each for each in room], members, strict=True))]
    over = sorted((one for one in candidates if 0 < one.violation < inf), key=lambda one: (one.violation, one.picks))
    return [*(fit[place][0] for place in order), *over][:ROUND]
