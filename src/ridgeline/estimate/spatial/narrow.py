"""Which points the cuts of a better mapping can be at: bounds that weigh every cause of time, and energy, at once.

    Causes ──weights──> a mean of causes: no more than the cycles of any mapping, and a sum over its cuts
           ──cheapest chain (through.py)──> its least value over all mappings: a bound; and its least value through every point
           ──> closed: no mapping is below the limit; or the points whose cheapest chain is (listing.py lists these)
    edp      mappings below a limit lie under a hyperbola of cycles and energy, and so below its chord between the least of both

Weights are those that raise the bound most, given the mappings met so far: a game of causes against mappings. What does not fit
together into a memory is charged as well: a mapping that fits pays nothing, so it is a bound still. This is a Lagrangian dual, its
weights found by column generation and the points ruled out by reduced costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np

from ...target.array import OPERANDS
from .causes import Causes, Chosen, Mix, Name, Sum, weighted
from .points import Floats, Mask
from .through import Cheapest
from .tilings import Tilings

ROUNDS, PATIENCE, LITTLE = 12, 4, 1e-4
"""Weights tried, and how many in a row may raise the bound by no more than a little."""
KEPT = 3
"""Sums whose cheapest chains are asked for every point."""
ROUNDING = 1e-9
STEEP, PIVOTS = 1000.0, 200
"""Of a game: values this many times the least are alike, and the steps to solve it."""


@dataclass(frozen=True, slots=True)
class Line:
    """What is better than the limit costs less than `limit` at these prices."""

    per_pj: float
    per_cycle: float
    limit: float

    def value(self, energy_pj: float, cycles: float) -> float:
        return self.per_pj * energy_pj + self.per_cycle * cycles


@dataclass(frozen=True, slots=True)
class Weighing:
    """A sum over cuts that every better mapping keeps below a limit."""

    sum: Sum
    limit: float
    least: dict[frozenset[int], float]
    """What the cuts of some operands, and no others, cost at least."""


@dataclass(frozen=True, slots=True)
class Narrowed:
    """What is left of an unrolling."""

    alive: list[list[Mask]]
    """Points each cut of each operand may be at; nowhere if no mapping is better."""
    weighings: list[Weighing]
    bound: float
    """No mapping of the unrolling has a smaller objective."""
    mix: Mix
    met: list[Chosen]
    """Mappings of some weighings' least values, fitting or not."""

    @property
    def closed(self) -> bool:
        return not all(mask.any() for cuts in self.alive for mask in cuts)


class Narrowing:
    """The search for weights, for one unrolling."""

    def __init__(
        self, causes: Causes, objective: str, below: float, least_pj: float, offer: Callable[[Chosen], float], alive: list[list[Mask]]
    ) -> None:
        self.causes, self.points, self.objective, self.below, self.offer = causes, causes.points, objective, below, offer
        self.least_pj, self.alive = least_pj, alive
        self.met: list[Chosen] = []
        array, tilings = self.points.array, self.points.tilings
        self.static_pj = array.static_w / array.clock_hz.value * 1e12
        self.least_cycles = float(max(tilings.least_cycles, tilings.latency_bound(), 1))
        self.bound = self._objective(least_pj, self.least_cycles)
        self.weighings: list[Weighing] = []
        self.tables: list[tuple[float, int, Cheapest]] = []
        """The best: how near the limit, of which weighing."""

    def narrowed(self, mix: Mix) -> Narrowed:
        mix = self.causes.known(mix)
        if self.bound >= self.below:
            self._close()
        if self.anywhere():
            mix = self._weigh(mix)
        if self.anywhere():
            for _, which, table in self.tables:
                self._keep(table.through(), self.weighings[which])
        return Narrowed(self.alive, self.weighings, self.bound, mix, self.met)

    def anywhere(self) -> bool:
        return all(mask.any() for cuts in self.alive for mask in cuts)

    def _close(self) -> None:
        self.bound = max(self.bound, self.below)
        self.alive = [[np.zeros_like(mask) for mask in cuts] for cuts in self.alive]

    def _keep(self, through: list[list[Floats]], weighing: Weighing) -> None:
        room = weighing.limit - weighing.sum.offset
        for masks, costs in zip(self.alive, through, strict=True):
            for mask, cost in zip(masks, costs, strict=True):
                mask &= cost < room

    def _table(self, costs: Sum) -> Cheapest:
        nothing = np.zeros(len(self.points.events))
        masked = [
            [np.where(mask, nothing if cost is None else cost, inf) for mask, cost in zip(masks, cuts, strict=True)]
            for masks, cuts in zip(self.alive, costs.costs, strict=True)
        ]
        return Cheapest(masked, self.points.shape)

    def _line(self) -> Line:
        if self.objective == "latency":
            return Line(0.0, 1.0, self.below)
        if self.objective == "energy":
            return Line(1.0, self.static_pj, self.below)
        static, first = self.static_pj, self.least_cycles
        most_pj = self.below / first - static * first
        last = self.below / self.least_pj  # cycles at which the least energy meets the limit
        if static:
            last = (sqrt(self.least_pj**2 + 4 * static * self.below) - self.least_pj) / (2 * static)
        slope = (most_pj - self.least_pj) / (last - first) if last > first else 0.0
        return Line(1.0, slope, most_pj + slope * first)

    def _objective(self, energy_pj: float, cycles: float) -> float:
        energy_pj += self.static_pj * cycles
        return {"latency": cycles, "energy": energy_pj, "edp": energy_pj * cycles}[self.objective]

    def _least_objective(self, line: Line, value: float) -> float:
        """Of all that costs at least `value` at a line's prices: at one of its ends."""
        if self.objective != "edp":
            return value
        first, least = self.least_cycles, self.least_pj
        if line.per_cycle <= 0:
            return self.bound
        ends = ((value - line.per_cycle * first, first), (least, (value - least) / line.per_cycle))
        return min(self._objective(max(energy, least), max(cycles, first)) for energy, cycles in ends)

    def _weigh(self, mix: Mix) -> Mix:
        """Raise the bound until the mapping it names is known, or nothing is below the limit."""
        rows = dict.fromkeys(mix)
        best, kept, stuck = -inf, mix, 0
        for _ in range(ROUNDS):
            line = self._line()
            costs = self._weighed(line, mix)
            table = self._table(costs)
            value = table.all + costs.offset
            if not np.isfinite(value):  # nothing fits
                self._close()
                return kept
            self.bound = max(self.bound, min(self.below, self._least_objective(line, value)))
            stuck = stuck + 1 if value / line.limit < best + LITTLE else 0
            if value / line.limit > best:
                best, kept = value / line.limit, mix
            if value >= line.limit:
                self._close()
                return kept
            self.tables = sorted([*self.tables, (value / line.limit, len(self.weighings), table)], key=lambda item: -item[0])[:KEPT]
            self.weighings.append(Weighing(costs, line.limit, _least(table)))
            chosen = table.points()
            cycles, slowest = self.causes.slowest(chosen)
            energy = self.causes.energy.at(chosen)
            over, crowded = self.causes.fullest(chosen)
            if not over and self._objective(energy, cycles) < self.below:
                self.below = min(self.below, self.offer(chosen))
            if value >= (line.value(energy, cycles) + over * line.limit) * (1 - ROUNDING) or chosen in self.met or stuck >= PATIENCE:
                return kept
            self.met.append(chosen)
            rows[slowest, crowded] = None
            values = np.array([[self._value(line, row, each) for each in self.met] for row in rows])
            mix = {row: weight for row, weight in zip(rows, best_mix(values), strict=True) if weight > ROUNDING}
        return kept

    def _weighed(self, line: Line, mix: Mix) -> Sum:
        parts = [(line.per_pj, self.causes.energy)]
        for (name, crowded), weight in mix.items():
            parts.append((line.per_cycle * weight, self.causes.cause(name)))
            if crowded:
                parts.append((line.limit * weight, self.causes.rooms[crowded]))
        return weighted(parts)

    def _value(self, line: Line, row: tuple[Name, str], chosen: Chosen) -> float:
        name, crowded = row
        over = line.limit * self.causes.rooms[crowded].at(chosen) if crowded else 0.0
        return line.value(self.causes.energy.at(chosen), self.causes.cause(name).at(chosen)) + over


def least_energy_pj(tilings: Tilings) -> float:
    """Of any mapping, but for what leaks: each operand's tiles have all the room they could have."""
    costs = [[np.where(tilings.fits(cut), cut.energy_pj, inf) for cut in tilings.cuts[op]] for op in OPERANDS]
    return tilings.fixed_energy_pj + Cheapest(costs, tilings.lattice.fine_shape).all


def _least(table: Cheapest) -> dict[frozenset[int], float]:
    return {frozenset(ops): table.of(ops) for ops in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2))}


def best_mix(values: Floats) -> Floats:
    """Weights of the rows that make the least weighted column largest: a matrix game, solved by the simplex method.

    Values far above the least one of the best row are cut off: they say only that a row must have some weight.
    """
    rows, columns = values.shape
    game = np.minimum(values, STEEP * values.min(axis=1).max())
    game = 0.1 + (game - game.min()) / max(float(np.ptp(game)), 1e-300)  # the weights are the same, the numbers near 1
    table = np.zeros((rows + 1, columns + rows + 1))
    table[:rows, :columns], table[:rows, columns:-1], table[:rows, -1] = game, np.eye(rows), 1.0
    table[rows, :columns] = -1.0
    for _ in range(PIVOTS):
        enters = int(table[rows, :-1].argmin())
        ratios = np.divide(table[:rows, -1], table[:rows, enters], out=np.full(rows, inf), where=table[:rows, enters] > 1e-12)
        leaves = int(ratios.argmin())
        if table[rows, enters] >= -1e-12 or not np.isfinite(ratios[leaves]):
            break
        table[leaves] /= table[leaves, enters]
        others = np.arange(rows + 1) != leaves
        table[others] -= np.outer(table[others, enters], table[leaves])
    weights = np.maximum(table[rows, columns:-1], 0.0)
    found: Floats = weights / weights.sum()
    return found
