"""Every mapping of a small space looked at: what the searches, which weigh causes one by one, may have missed, and the proof if nothing.

    Tilings ──> chains: all rising points of each operand's cuts, with tiles, traffic, waits and energy ──bound alone──> fewer
            ──W x I, then x O, where their points lie on one rising path and tiles fit together──> a bound for each
            ──most promising first──> evaluate, until no bound is below the best

A mapping is one chain of each operand, all points of which can be put in one rising order (chain.py). Its bound asks of time what
compute, every port and the waits for tiles without a second copy need, and of energy what its cuts cost. So the answer is the best
of the space, if neither chains nor pairs nor mappings to be costed were more than the limits below; otherwise nothing is claimed.
Input memories that stream are left out: there the order of loops between two cuts matters as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...target.array import DIMENSIONS, OPERANDS
from .cost import InfeasibleMappingError, LayerCost, evaluate
from .counts import boundary_flows
from .layer import REDUCTION, RELEVANT
from .mapping import MappingPlan
from .tilings import CutCosts, Tilings

MOST_POINTS = 1 << 10
MOST_CHAINS = 20_000
MOST_PAIRS = 1_000_000
AT_ONCE = 500_000
"""Triples looked at together: what they need is some hundred megabytes."""
MOST_LISTED, MOST_TRIPLES, MOST_COSTED = 200_000, 8_000_000, 60
"""Chains listed, triples of them tried, and mappings costed, for one search."""
Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
ROUNDING = 1e-9


@dataclass(slots=True)
class Budget:
    """What one search may still look at."""

    chains: int = MOST_LISTED
    triples: int = MOST_TRIPLES
    costed: int = MOST_COSTED

    @property
    def spent(self) -> bool:
        return min(self.chains, self.triples, self.costed) <= 0


@dataclass(frozen=True, slots=True)
class Stay:
    """Tiles of one operand in one memory, for every chain."""

    memory: str
    operand: str
    port: str
    """Of the memory above, that brings them, or takes them."""
    outermost: bool
    """Whether that memory is the outermost."""
    bits: Floats
    events: Floats
    wait: Floats
    """For each, down for W and I, up for O, where computing waits for it."""
    ends: Floats
    """The first one down, the last one up."""


@dataclass(frozen=True, slots=True)
class Chains:
    """All chains of one operand."""

    operand: str
    points: Indices
    """(chains, cuts): places in the flat lattice."""
    energy_pj: Floats
    ports: Mapping[str, Floats]
    inner: Mapping[str, Floats]
    """Of the ports' cycles those that have nothing to do with the outermost memory."""
    stays: tuple[Stay, ...]
    held: Floats
    """How often the PEs get a new tile: the runs of a systolic grid."""

    def taken(self, chosen: Indices) -> Chains:
        stays = tuple(
            Stay(s.memory, s.operand, s.port, s.outermost, *(each[chosen] for each in (s.bits, s.events, s.wait, s.ends)))
            for s in self.stays
        )
        ports, inner = ({name: cycles[chosen] for name, cycles in each.items()} for each in (self.ports, self.inner))
        return Chains(self.operand, self.points[chosen], self.energy_pj[chosen], ports, inner, stays, self.held[chosen])

    def least(self) -> Chains:
        """A chain no dearer than any, that takes no room."""
        ports, inner = ({name: cycles.min(keepdims=True) for name, cycles in each.items()} for each in (self.ports, self.inner))
        return Chains(self.operand, self.points[:1], self.energy_pj.min(keepdims=True), ports, inner, (), self.held.min(keepdims=True))


def can_be_listed(tilings: Tilings, budget: Budget) -> bool:
    """Whether the chains of every operand are few enough, and their order is all that matters; asking is taken off the budget."""
    streams = any(tilings.array.memories[name].refill == "stream" for name in tilings.array.ladder("I")[:-1])
    if streams or prod(tilings.lattice.fine_shape) > MOST_POINTS or budget.spent:
        return False
    counts = [_Space(tilings, "").count(operand) for operand in OPERANDS]
    few = max(counts) <= MOST_CHAINS
    budget.chains -= int(sum(counts)) if few else MOST_LISTED // 20
    return few


def best_of_all(tilings: Tilings, objective: str, below: float, budget: Budget) -> tuple[LayerCost | None, bool]:
    """(The best mapping of an unrolling if it is better than `below`, whether all were looked at)."""
    space = _Space(tilings, objective)
    chains = [space.chains(operand) for operand in OPERANDS]
    if not all(len(one.points) for one in chains):
        return None, True
    space.least = {one.operand: one for one in map(Chains.least, chains)}
    chains = [one.taken(np.flatnonzero(space.promising([one], below))) for one in chains]
    if not all(len(one.points) for one in chains):
        return None, True
    found = space.together(chains, below, budget)
    if found is None:
        return None, False
    bounds, triples = found
    best: LayerCost | None = None
    seen = set()
    for at in np.argsort(bounds, kind="stable"):
        if bounds[at] >= below * (1 - ROUNDING):
            break
        plan = space.plan(triples[at])
        if (same := _refilled_at(plan)) in seen:
            continue
        seen.add(same)
        if not budget.costed:
            return best, False
        budget.costed -= 1
        try:
            cost = evaluate(tilings.layer, tilings.array, plan, tilings.unrolled)
        except InfeasibleMappingError:
            continue
        if cost.objective(objective) < below:
            best, below = cost, cost.objective(objective)
    return best, True


def _refilled_at(plan: MappingPlan) -> tuple[tuple[int, ...], ...]:
    """Blocks at which tiles change: a mapping's cost depends on nothing else."""
    positions = [plan.refill_position(op, cut) for op in OPERANDS for cut in ((0,) if op != "O" else ()) + plan.cuts[op]]
    return tuple(tuple(plan.block(dim, position) for dim in DIMENSIONS) for position in positions)


class _Space:
    """One unrolling's chains, and what a set of them needs at least."""

    def __init__(self, tilings: Tilings, objective: str) -> None:
        self.tilings, self.objective, self.array = tilings, objective, tilings.array
        self.shape = tilings.lattice.fine_shape
        self.outermost = list(self.array.memories)[-1]
        self.least: dict[str, Chains] = {}
        """Of each operand what its cheapest chains cost, if not all the same one."""

    @property
    def below(self) -> NDArray[np.bool_]:
        return _below(self.shape)

    def flat(self, values: NDArray[Any]) -> NDArray[Any]:
        """Over the lattice's points."""
        return np.broadcast_to(values, self.shape).reshape(-1)

    def spread(self, values: NDArray[Any]) -> NDArray[Any]:
        """Over the lattice's points, from one axis a dimension."""
        return self.tilings.lattice.spread(np.asarray(values)).reshape(-1)

    def count(self, operand: str) -> float:
        """Of its chains."""
        places = [self._allowed(operand, cut) for cut in self.tilings.cuts[operand]]
        ending = np.ones(len(places[0]) if places else 1, np.float32)  # how many chains end at each place
        for before, here in pairwise(places):
            ending = ending @ self.below[np.ix_(before, here)]
        return float(ending.sum())

    def chains(self, operand: str) -> Chains:
        """All of an operand."""
        places = [self._allowed(operand, cut) for cut in self.tilings.cuts[operand]]
        found = places[0][:, None] if places else np.zeros((1, 0), np.int64)
        for here in places[1:]:
            first, second = np.nonzero(self.below[np.ix_(found[:, -1], here)])
            found = np.concatenate([found[first], here[second][:, None]], axis=1)
        return self._measured(operand, found)

    def _allowed(self, operand: str, cut: CutCosts) -> Indices:
        """Points where a cut may be: its tile fits by itself."""
        bits = self.tilings.layer.bits
        allowed = self.flat(cut.allowed)
        if cut.memory:
            width = min(bits.O, bits.F) if operand == "O" else getattr(bits, operand)
            allowed = allowed & (self.flat(cut.tile_elements) * width <= self.array.memories[cut.memory].capacity_bits.value)
        return np.flatnonzero(allowed)

    def _measured(self, operand: str, points: Indices) -> Chains:
        tilings, cuts = self.tilings, self.tilings.cuts[operand]
        unrolled, blocks, bits = tilings.unrolled, tilings.lattice.blocks, tilings.layer.bits
        energy, ports, inner, stays = np.zeros(len(points)), dict[str, Floats](), dict[str, Floats](), []
        events = self.spread(unrolled.count(DIMENSIONS, blocks))
        ladder, outermost = self.array.ladder(operand), self.outermost
        for number, cut in enumerate(cuts):
            at = points[:, number]
            energy = energy + self.flat(cut.energy_pj)[at]
            for name, cycles in cut.port_cycles.items():
                ports[name] = ports.get(name, 0.0) + self.flat(cycles)[at]
                if cut.memory is None or ladder[cut.place] != outermost:
                    inner[name] = inner.get(name, 0.0) + self.flat(cycles)[at]
            if cut.memory is None:
                continue
            above = ladder[cut.place]
            direction = "wr_up" if operand == "O" else "rd_down"
            port = f"{above}.{self.array.memories[above].port_of(operand, direction)}"
            each, below = self._cycles_each(operand, cut.memory, above)
            width: Any = getattr(bits, operand)
            if operand == "O" and number and cut.place > 1:
                width = np.where(self.flat(cuts[number - 1].complete)[points[:, number - 1]], bits.F, bits.O)
            last = each - self._shorter(each) if operand == "O" and above == outermost else each
            wait = each
            if above == outermost:
                wait = self._mean_wait(operand, cut.place, above, self.flat(cut.port_cycles[port]) / events, below)
            tile = self.flat(cut.tile_elements)[at] * width
            stays.append(Stay(cut.memory, operand, port, above == outermost, tile, events[at], wait[at], last[at]))
        held = events[points[:, 0]] if len(cuts) else np.ones(len(points))
        return Chains(operand, points, energy, ports, inner, tuple(stays), held)

    def _mean_wait(self, operand: str, place: int, above: str, mean: Floats, below: Floats) -> Floats:
        """For a mean tile of the outermost memory, which holds its port for `mean` cycles; the largest takes `below` on the chip's side."""
        unrolled, blocks, memory = self.tilings.unrolled, self.tilings.lattice.blocks, self.array.memories[above]
        flow = boundary_flows(unrolled, operand, place, blocks)[above, "wr_up" if operand == "O" else "rd_down"]
        largest = unrolled.largest(operand, blocks, memory.shared_over)
        part = flow.elements / np.maximum(unrolled.count(DIMENSIONS, blocks) * largest, 1)
        return np.maximum(mean, self.spread(part) * below) + (0 if operand == "O" else max(0, memory.latency_cycles - 1))

    def _cycles_each(self, operand: str, name: str, above: str) -> tuple[Floats, Floats]:
        """(the largest tile between two memories, of it the chip's side), down for W and I, up for O: `latency.Transfer` at every point."""
        array, unrolled, blocks, bits = self.array, self.tilings.unrolled, self.tilings.lattice.blocks, self.tilings.layer.bits
        small, large = array.memories[name], array.memories[above]
        spreads = set(large.shared_over) - set(small.shared_over)
        width: Any = getattr(bits, operand)
        tile = unrolled.largest(operand, blocks, small.shared_over) * width
        if operand == "O":
            finished = unrolled.count(REDUCTION, blocks) == 1
            tile = tile if spreads else np.where(finished, tile // width * bits.F, tile)
            width = np.where(finished, bits.F, width)
        union = unrolled.largest(operand, blocks, large.shared_over) * width
        ways = ("rd_up", "wr_up") if operand == "O" else ("wr_down", "rd_down")
        inner, outer = (memory.ports[memory.port_of(operand, way)] for memory, way in zip((small, large), ways, strict=True))
        below = np.ceil(tile / inner.bits_per_cycle)
        if array.noc.bits_per_cycle and spreads:
            below = np.maximum(below, np.ceil(union / array.noc.bits_per_cycle))
        found = np.maximum(np.ceil(union / outer.bits_per_cycle), below)
        if array.systolic and spreads:
            found, below = (0 * found, 0 * below) if operand == "O" else (np.maximum(found, next(iter(array.axes.values()))), below)
        asked = 0 if operand == "O" else max(0, large.latency_cycles - 1)
        return self.spread(found + asked), self.spread(below)

    def _shorter(self, each: Floats) -> Floats:
        """By how much the last store of results is shorter than the longest: edges of the layer."""
        share: Any = 1.0
        for dim in RELEVANT["O"]:
            at = DIMENSIONS.index(dim)
            size, axes = self.tilings.layer.dims[dim], [-1 if d == at else 1 for d in range(len(DIMENSIONS))]
            span = (self.tilings.lattice.blocks[dim] * self.tilings.unrolled.lanes(dim)).reshape(axes)
            share = share * (size - (-(-size // span) - 1) * span) / np.minimum(size, span)
        found: Floats = np.floor(each * (1 - self.spread(np.asarray(share))))
        return found

    def bound(self, chosen: Sequence[Chains]) -> Floats:
        """No mapping with these chains has a smaller objective; of operands not given, the best each could bring is taken."""
        given = {one.operand for one in chosen}
        chosen = [*chosen, *(one for operand, one in self.least.items() if operand not in given)]
        cycles = self._cycles(chosen)
        static = self.array.static_w / self.array.clock_hz.value * 1e12
        energy: Floats = self.tilings.fixed_energy_pj + static * cycles + sum((one.energy_pj for one in chosen), np.zeros(1))
        return {"latency": cycles, "energy": energy, "edp": energy * cycles}[self.objective]

    def _cycles(self, chosen: Sequence[Chains]) -> Floats:
        tilings, compute = self.tilings, self.tilings.compute_cycles
        ports: dict[str, Any] = dict(tilings.fixed_cycles)
        inner: dict[str, Any] = dict(tilings.fixed_cycles)
        fills: dict[str, Any] = dict.fromkeys(OPERANDS, 0.0)
        first: dict[str, Any] = {}
        waits: dict[tuple[bool, str], Any] = {}
        stored: Any = 0.0
        for one in chosen:
            for name, cycles in one.ports.items():
                ports[name] = ports.get(name, 0.0) + cycles
            for name, cycles in one.inner.items():
                inner[name] = inner.get(name, 0.0) + cycles
            for stay in one.stays:
                exposed = ~self._hidden(stay, chosen)
                fills[stay.operand] = fills[stay.operand] + stay.ends
                if stay.operand != "O":
                    first[stay.port] = first.get(stay.port, 0.0) + stay.ends
                wait = np.where(exposed, (stay.events - 1) * stay.wait, 0.0)
                if stay.operand == "O" and not stay.outermost:
                    stored = stored + wait
                else:
                    waits[stay.outermost, stay.port] = waits.get((stay.outermost, stay.port), 0.0) + wait
        on_chip = compute + stored + self._most(waits, False) + self._skew(chosen)
        for name, cycles in ports.items():  # a port that only hands on what an outermost one brings does not hold the array up
            if not name.startswith(f"{self.outermost}."):
                on_chip = np.maximum(on_chip, np.where(inner.get(name, 0.0), cycles, 0.0))
        fill = reduce(np.maximum, [fills["W"], fills["I"], *first.values()])
        whole = on_chip + self._most(waits, True) + fill + fills["O"]
        found: Any = whole
        for cycles in ports.values():
            found = np.maximum(found, cycles)
        return np.asarray(found, np.float64)

    def _most(self, waits: Mapping[tuple[bool, str], Any], outermost: bool) -> Any:
        found: Any = 0.0
        for (outside, _), cycles in waits.items():
            if outside == outermost:
                found = np.maximum(found, cycles)
        return found

    def _skew(self, chosen: Sequence[Chains]) -> Any:
        """A systolic grid's, in every run."""
        if not self.array.systolic:
            return 0
        runs = reduce(np.minimum, [one.held for one in chosen])
        return runs * sum(size - 1 for size in self.array.axes.values())

    def _hidden(self, stay: Stay, chosen: Sequence[Chains]) -> NDArray[np.bool_]:
        """Whether a refill may go on behind computing: an operand that is not given takes no room."""
        memory = self.array.memories[stay.memory]
        if memory.refill != "double":
            return (stay.events <= 1) | (memory.refill == "stream")
        room: Any = 0.0
        for one in chosen:
            for other in one.stays:
                if other.memory == stay.memory:
                    room = room + other.bits * np.where(other.events > 1, 2, 1)
        return np.asarray((stay.events <= 1) | (room <= memory.capacity_bits.value))

    def fits(self, chosen: Sequence[Chains]) -> NDArray[np.bool_]:
        used: dict[str, Any] = {}
        for one in chosen:
            for stay in one.stays:
                used[stay.memory] = used.get(stay.memory, 0.0) + stay.bits
        found: Any = np.ones(1, bool)
        for name, bits in used.items():
            found = found & (bits <= self.array.memories[name].capacity_bits.value)
        return np.asarray(found)

    def promising(self, chosen: Sequence[Chains], below: float) -> NDArray[np.bool_]:
        found = self.fits(chosen) & (self.bound(chosen) < below * (1 - ROUNDING))
        return np.broadcast_to(found, len(chosen[0].points))

    def together(self, chains: list[Chains], below: float, budget: Budget) -> tuple[Floats, Indices] | None:
        """(bounds, points of all cuts) of the mappings that may be better than `below`; None where they are too many."""
        w, i, o = chains
        if len(w.points) * len(i.points) > MOST_PAIRS:
            return None
        w_path, i_path = self._comparable(w.points), self._comparable(i.points)
        first, second = np.nonzero(_all_in(w_path, i.points))
        kept = np.flatnonzero(self.promising([w.taken(first), i.taken(second)], below))
        first, second = first[kept], second[kept]
        if len(first) * len(o.points) > budget.triples:
            return None
        budget.triples -= len(first) * len(o.points)
        bounds, points = [np.zeros(0)], [np.zeros((0, sum(one.points.shape[1] for one in chains)), np.int64)]
        each = max(1, AT_ONCE // len(o.points))
        for start in range(0, len(first), each):
            one, two = first[start : start + each], second[start : start + each]
            pair, third = np.nonzero(_all_in(w_path[one] & i_path[two], o.points))
            chosen = [w.taken(one[pair]), i.taken(two[pair]), o.taken(third)]
            kept = np.flatnonzero(self.promising(chosen, below))
            chosen = [part.taken(kept) for part in chosen]
            bounds.append(self.bound(chosen))
            points.append(np.concatenate([part.points for part in chosen], axis=1))
        return np.concatenate(bounds), np.concatenate(points)

    def _comparable(self, points: Indices) -> NDArray[np.bool_]:
        """(chains, lattice points): those that lie on a rising path with all of a chain's."""
        either = self.below | self.below.T
        found = np.ones((len(points), len(either)), bool)
        for column in points.T:
            found &= either[column]
        return found

    def plan(self, points: Indices) -> MappingPlan:
        lengths = [len(self.tilings.cuts[op]) for op in OPERANDS]
        places = [tuple(int(each) for each in np.unravel_index(int(point), self.shape)) for point in points]
        ends = np.cumsum([0, *lengths])
        return self.tilings.plan([places[ends[n] : ends[n + 1]] for n in range(len(OPERANDS))])


@lru_cache(maxsize=64)
def _below(shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """[a, b]: whether point b of a lattice is nowhere lower than a."""
    found = np.ones((1, 1), bool)
    for length in shape:
        found = np.kron(found, np.triu(np.ones((length, length), bool)))
    return found


def _all_in(allowed: NDArray[np.bool_], points: Indices) -> NDArray[np.bool_]:
    """[a, b]: whether all points of chain b are allowed to a."""
    found = np.ones((len(allowed), len(points)), bool)
    for column in points.T:
        found &= allowed[:, column]
    return found
