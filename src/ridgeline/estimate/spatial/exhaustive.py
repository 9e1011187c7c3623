"""Every mapping looked at that may be better than the best so far: what the searches missed, or the proof that it is nothing.

    unrollings, one after another ──narrow.py──> closed by a bound, or the points each cut may be at
        ──listing.py──> mappings with a bound each ──most promising first──> evaluate, until no bound is below the best
        ──too many to list──> halved, the most promising part first, and again

So the answer is the best of the space, unless what one search may cost is used up; otherwise `bound` says how far it may be from it.
Where an input memory streams, the order of loops between two cuts matters as well: what it keeps depends on the loop its refill sits
in, and how far that one runs. So every mapping is costed with each of the window's loops first. Arrays where several stream are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import combinations, count
from math import prod

import numpy as np

from ...target.array import DIMENSIONS, OPERANDS, SpatialArraySpec
from .causes import Causes, Chosen, Mix
from .cost import WINDOW, InfeasibleMappingError, LayerCost, evaluate, sliding
from .listing import Listing
from .mapping import MappingPlan
from .narrow import ROUNDING, Narrowed, Narrowing, least_energy_pj
from .points import Mask, Points
from .tiles import Slide
from .tilings import Tilings

WHOLE = 1e-3
"""Of a cycle: what rounding may be off by."""
MOST_COSTED, MOST_PARTS, MOST_CELLS = 200, 60, 60_000_000
"""Mappings costed, parts halved, and numbers in tables of cheapest chains, for one search."""
FEWEST_TABLES = 4
"""Without room for so many, an unrolling is not begun: three are held at once."""


@dataclass(slots=True)
class Budget:
    """What one search may still cost."""

    costed: int = MOST_COSTED
    parts: int = MOST_PARTS
    cells: int = MOST_CELLS

    @property
    def spent(self) -> bool:
        return min(self.costed, self.parts, self.cells) <= 0


def streaming(array: SpatialArraySpec) -> int:
    """Input memories that stream."""
    return sum(array.memories[name].refill == "stream" for name in array.ladder("I")[:-1])


@dataclass(frozen=True, order=True, slots=True)
class Part:
    """Of an unrolling's mappings those that are left."""

    bound: float
    number: int
    causes: Causes = field(compare=False)
    least_pj: float = field(compare=False)
    narrowed: Narrowed = field(compare=False)


class Everything:
    """The best mapping of some unrollings, and what is left of them."""

    def __init__(self, objective: str, best: LayerCost, budget: Budget) -> None:
        self.objective, self.best, self.below, self.budget = objective, best, best.objective(objective), budget
        self.looked = 0
        """Unrollings that their first bounds did not rule out."""
        self.seen: set[tuple[str, tuple[tuple[int, ...], ...], str]] = set()
        self.mix: Mix = {}
        self.queue: list[Part] = []
        self.numbers = count()
        self.unlisted: list[tuple[float, Tilings]] = []
        """Unrollings that cannot be listed, with what is known of them."""

    @property
    def limit(self) -> float:
        """What is better is below this: cycles are whole."""
        return self.below - 1 + WHOLE if self.objective == "latency" else self.below * (1 - ROUNDING)

    @property
    def bound(self) -> float:
        """No mapping of these unrollings has a smaller objective."""
        return min([self.below, *(bound for bound, _ in self.unlisted), *(part.bound for part in self.queue)])

    def add(self, bound: float, make: Callable[[], Tilings]) -> None:
        """An unrolling, made if `bound`, what is known of its mappings, does not rule it out."""
        if bound >= self.limit:
            return
        self.looked += 1
        tilings = make()
        if streaming(tilings.array) > 1 or FEWEST_TABLES * _cells(tilings) > self.budget.cells:
            self.unlisted.append((bound, tilings))
            return
        self.budget.cells -= _cells(tilings)
        least_pj = least_energy_pj(tilings)
        if self.objective != "latency":  # time is not asked for yet
            cycles = max(tilings.least_cycles, tilings.compute_cycles)
            energy = least_pj + tilings.array.static_w / tilings.array.clock_hz.value * 1e12 * cycles
            if energy * (cycles if self.objective == "edp" else 1) >= self.limit:
                return
        points = Points(replace(tilings, with_cycles=True))
        causes = Causes(points, None)
        either = self._narrowed(causes, least_pj, causes.allowed())
        doubling = [name for name in points.shared if tilings.array.memories[name].refill == "double"]
        for crowded in _subsets(doubling) if not either.closed else ():
            causes = Causes(points, crowded)
            alive = [[a & b for a, b in zip(*both, strict=True)] for both in zip(either.alive, causes.allowed(), strict=True)]
            self._look(causes, least_pj, alive)

    def finish(self) -> None:
        """Halve what could not be listed, the most promising first."""
        while self.queue and self.queue[0].bound < self.limit and not self.budget.spent:
            self.budget.parts -= 1
            part = heappop(self.queue)
            for alive in _halves(part.causes.points, part.narrowed):
                self._look(part.causes, part.least_pj, alive)
        self.queue = sorted(part for part in self.queue if part.bound < self.limit)

    def unsettled(self) -> list[Tilings]:
        """Unrollings that may hold a better mapping, most promising first."""
        left = [item for item in self.unlisted if item[0] < self.limit] + [(part.bound, part.causes.points.tilings) for part in self.queue]
        found = {id(tilings): tilings for _, tilings in sorted(left, key=lambda item: item[0])}
        return list(found.values())

    def tell(self, best: LayerCost) -> None:
        """Of a mapping found elsewhere."""
        if best.objective(self.objective) < self.below:
            self.best, self.below = best, best.objective(self.objective)

    def _narrowed(self, causes: Causes, least_pj: float, alive: list[list[Mask]]) -> Narrowed:
        offer = partial(self._offer, causes.points)
        narrowed = Narrowing(causes, self.objective, self.limit, least_pj, offer, alive).narrowed(self.mix)
        self.mix = self.mix if causes.crowded else narrowed.mix
        self.budget.cells -= _cells(causes.points.tilings) * (len(narrowed.weighings) + 1)
        return narrowed

    def _look(self, causes: Causes, least_pj: float, alive: list[list[Mask]]) -> None:
        narrowed = self._narrowed(causes, least_pj, alive)
        if narrowed.closed:
            return
        left = Listing(causes, self.objective, narrowed).mappings(self.limit)
        for bound, chosen in left or ():
            if bound >= self.limit:
                return
            if self.budget.costed <= 0:
                left = None
                break
            self._offer(causes.points, chosen)
        if left is None:
            heappush(self.queue, Part(narrowed.bound, next(self.numbers), causes, least_pj, narrowed))

    def _offer(self, points: Points, chosen: Chosen) -> float:
        """The limit after costing a mapping, if that was not done yet and the budget allows."""
        tilings = points.tilings
        places = [[tuple(int(each) for each in np.unravel_index(place, points.shape)) for place in cuts] for cuts in chosen]
        for first in WINDOW if streaming(tilings.array) else WINDOW[:1]:
            plan = tilings.plan(places, first)
            same = (str(plan.spatial), _refilled_at(plan), str(sliding_at(tilings.array, plan)))
            if same not in self.seen and self.budget.costed > 0:
                self.seen.add(same)
                self.budget.costed -= 1
                with suppress(InfeasibleMappingError):
                    self.tell(evaluate(tilings.layer, tilings.array, plan, tilings.unrolled))
        return self.limit


def sliding_at(array: SpatialArraySpec, plan: MappingPlan) -> list[Slide | None]:
    """How each input memory moves on."""
    return [sliding(array, plan, "I", place) for place in range(1, len(array.ladder("I")))]


def _cells(tilings: Tilings) -> int:
    """Of a table of cheapest chains."""
    return prod(tilings.lattice.fine_shape) * prod(len(cuts) + 1 for cuts in tilings.cuts.values())


def _refilled_at(plan: MappingPlan) -> tuple[tuple[int, ...], ...]:
    """Blocks at which tiles change: a mapping's cost depends on nothing else."""
    positions = [plan.refill_position(op, cut) for op in OPERANDS for cut in ((0,) if op != "O" else ()) + plan.cuts[op]]
    return tuple(tuple(plan.block(dim, position) for dim in DIMENSIONS) for position in positions)


def _subsets(names: Sequence[str]) -> list[frozenset[str]]:
    """The empty one first."""
    return [frozenset(chosen) for many in range(len(names) + 1) for chosen in combinations(names, many)]


def _halves(points: Points, narrowed: Narrowed) -> list[list[list[Mask]]]:
    """Two parts of what is left: by how often a cut's tile changes, for the cut on which the mappings met differ most."""
    often, cuts = np.log(points.events), [(op, at) for op, masks in enumerate(narrowed.alive) for at in range(len(masks))]
    ends = {(op, at): [often[chosen[op][at]] for chosen in narrowed.met] or [0.0] for op, at in cuts}
    op, at = max(cuts, key=lambda cut: max(ends[cut]) - min(ends[cut]))
    mask, middle = narrowed.alive[op][at], (max(ends[op, at]) + min(ends[op, at])) / 2
    low = mask & (often <= middle)
    if not low.any() or (low == mask).all():
        op, at = max(cuts, key=lambda cut: int(narrowed.alive[cut[0]][cut[1]].sum()))
        mask = narrowed.alive[op][at]
        places = np.flatnonzero(mask)
        low = mask & (np.arange(len(mask)) <= places[(len(places) - 1) // 2])
    return [_with(narrowed.alive, op, at, half) for half in (low, mask & ~low)]


def _with(alive: list[list[Mask]], op: int, at: int, mask: Mask) -> list[list[Mask]]:
    return [[mask if (o, a) == (op, at) else each.copy() for a, each in enumerate(masks)] for o, masks in enumerate(alive)]
