"""The mappings left when points are narrowed down: every triple of chains that may be below a limit, with a bound close to its cost.

    Narrowed ──> chains: all rising points of each operand's cuts ──bounds alone──> fewer
             ──W x I, then x O, where their points lie on one rising path and tiles fit together──> bounds, points of all cuts

A mapping is one chain of each operand, all points of which can be put in one rising order (chain.py). Its bound asks of time what
compute, every port, the waits for tiles without a second copy and the stays of tiles at the outermost memory need, and of energy
what its cuts cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np

from ...target.array import OPERANDS
from .causes import Causes, Chosen
from .edges import ShortStays
from .narrow import Narrowed
from .points import Floats, Indices, Mask
from .stays import Stay, windows

MOST_PLACES, MOST_CHAINS, MOST_PAIRS, MOST_TRIPLES = 4096, 20_000, 1_000_000, 1_000_000
"""Points that cuts may be at, and what is listed of them."""
AT_ONCE = 500_000
"""Triples looked at together: what they need is some hundred megabytes."""


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
    sums: tuple[Floats, ...]
    """By each weighing."""

    def taken(self, chosen: Indices) -> Chains:
        stays = tuple(Stay(s.memory, s.operand, s.port, s.outermost, *(each[chosen] for each in s.arrays())) for s in self.stays)
        ports, inner = ({name: cycles[chosen] for name, cycles in each.items()} for each in (self.ports, self.inner))
        sums = tuple(each[chosen] for each in self.sums)
        return Chains(self.operand, self.points[chosen], self.energy_pj[chosen], ports, inner, stays, self.held[chosen], sums)

    def least(self) -> Chains:
        """A chain no dearer than any, that takes no room."""
        ports, inner = ({name: cycles.min(keepdims=True) for name, cycles in each.items()} for each in (self.ports, self.inner))
        return Chains(self.operand, self.points[:1], self.energy_pj.min(keepdims=True), ports, inner, (), self.held.min(keepdims=True), ())


class Listing:
    """One unrolling's chains, and what a set of them needs at least."""

    def __init__(self, causes: Causes, objective: str, narrowed: Narrowed) -> None:
        self.points, self.objective, self.narrowed = causes.points, objective, narrowed
        self.tilings, self.array = self.points.tilings, self.points.array
        self.places = np.flatnonzero(reduce(np.logical_or, [mask for cuts in narrowed.alive for mask in cuts]))
        """Of the flat lattice that any cut may be at; points below are numbers of these."""
        self.least: dict[str, Chains] = {}
        """Of each operand what its cheapest chains cost, if not all the same one."""

    def mappings(self, limit: float) -> list[tuple[float, Chosen]] | None:
        """Bound and points of every mapping that may be below a limit, lowest bound first; None where they are too many."""
        if len(self.places) > MOST_PLACES:
            return None
        self.below = _below(self.places, self.points.shape)
        self.edges = ShortStays(self.tilings.unrolled, self.tilings.lattice, self.places)
        if max(self.count(operand) for operand in OPERANDS) > MOST_CHAINS:
            return None
        chains = [self.chains(operand) for operand in OPERANDS]
        for _ in range(2):  # what one operand's best ones cost tells more of the others
            if not all(len(one.points) for one in chains):
                return []
            self.least = {one.operand: one for one in map(Chains.least, chains)}
            chains = [one.taken(np.flatnonzero(self.promising([one], limit))) for one in chains]
        found = self.together(chains, limit)
        if found is None:
            return None
        bounds, points = found
        return [(float(bounds[at]), self._chosen(points[at])) for at in np.argsort(bounds, kind="stable")]

    def alive(self, operand: str) -> list[Indices]:
        """For each cut the places it may be at."""
        return [np.flatnonzero(mask[self.places]) for mask in self.narrowed.alive[OPERANDS.index(operand)]]

    def count(self, operand: str) -> float:
        """Of its chains."""
        places = self.alive(operand)
        ending = np.ones(len(places[0]) if places else 1, np.float32)  # how many chains end at each place
        for before, here in pairwise(places):
            ending = ending @ self.below[np.ix_(before, here)]
        return float(ending.sum())

    def chains(self, operand: str) -> Chains:
        """All of an operand."""
        places = self.alive(operand)
        found = places[0][:, None] if places else np.zeros((1, 0), np.int64)
        for here in places[1:]:
            first, second = np.nonzero(self.below[np.ix_(found[:, -1], here)])
            found = np.concatenate([found[first], here[second][:, None]], axis=1)
        return self._measured(operand, found)

    def _measured(self, operand: str, points: Indices) -> Chains:
        cuts, bits = self.points.cuts[operand], self.tilings.layer.bits
        energy, ports, inner, stays = np.zeros(len(points)), dict[str, Floats](), dict[str, Floats](), []
        flat = self.places[points]
        for number, cut in enumerate(cuts):
            at = flat[:, number]
            energy = energy + cut.energy_pj[at]
            for name, cycles in cut.ports.items():
                ports[name] = ports.get(name, 0.0) + cycles[at]
                if cut.inner:
                    inner[name] = inner.get(name, 0.0) + cycles[at]
            if cut.memory is None:
                continue
            width: Any = getattr(bits, operand)
            if operand == "O" and number:
                width = np.where(cuts[number - 1].complete[flat[:, number - 1]], bits.F, bits.O)
            mean = cut.ports[cut.port][at] / cut.events[at]
            measured = (
                cut.events[at],
                cut.wait[at],
                cut.ends[at],
                mean,
                cut.stored[at],
                cut.visits[at],
                cut.held[at],
                cut.whole[at],
                cut.larger[at],
            )
            stays.append(Stay(cut.memory, operand, cut.port, cut.outermost, cut.elements[at] * width, *measured))
        held = self.points.events[flat[:, 0]] if cuts else np.ones(len(points))
        return Chains(operand, points, energy, ports, inner, tuple(stays), held, self._sums(operand, flat))

    def _sums(self, operand: str, flat: Indices) -> tuple[Floats, ...]:
        found = []
        for weighing in self.narrowed.weighings:
            total = np.zeros(len(flat))
            for cost, at in zip(weighing.sum.costs[OPERANDS.index(operand)], flat.T, strict=True):
                if cost is not None:
                    total += cost[at]
            found.append(total)
        return tuple(found)

    def bound(self, chosen: Sequence[Chains], closely: bool = False) -> Floats:
        """No mapping with these chains has a smaller objective; of operands not given, the best each could bring is taken.

        `closely`: with all operands given, their tiles' stays are followed one by one.
        """
        given = {one.operand for one in chosen}
        chosen = [*chosen, *(one for operand, one in self.least.items() if operand not in given)]
        cycles = self._cycles(chosen, closely)
        static = self.array.static_w / self.array.clock_hz.value * 1e12
        energy: Floats = self.tilings.fixed_energy_pj + static * cycles + sum((one.energy_pj for one in chosen), np.zeros(1))
        return {"latency": cycles, "energy": energy, "edp": energy * cycles}[self.objective]

    def _cycles(self, chosen: Sequence[Chains], closely: bool) -> Floats:
        tilings, outside = self.tilings, f"{self.points.outermost}."
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
                fills[stay.operand] = fills[stay.operand] + stay.ends
                if stay.operand != "O":
                    first[stay.port] = first.get(stay.port, 0.0) + stay.ends
        for stay, times in self._waited(chosen):
            wait = np.maximum(0.0, times - 1) * stay.wait
            if stay.operand == "O" and not stay.outermost:
                stored = stored + wait
            else:
                waits[stay.outermost, stay.port] = waits.get((stay.outermost, stay.port), 0.0) + wait
        on_chip = tilings.compute_cycles + stored + self._most(waits, False) + self._skew(chosen)
        for name, cycles in ports.items():  # a port that only hands on what an outermost one brings does not hold the array up
            if not name.startswith(outside):
                on_chip = np.maximum(on_chip, np.where(inner.get(name, 0.0), cycles, 0.0))
        fill = reduce(np.maximum, [fills["W"], fills["I"], *first.values()])
        found: Any = on_chip + self._most(waits, True) + fill + fills["O"]
        top = [stay for one in chosen for stay in one.stays if stay.outermost]
        closely = closely and len(top) == sum(len(self.array.ladder(op)) > 1 for op in OPERANDS)
        for name, cycles in ports.items():
            found = np.maximum(found, cycles)
            if name.startswith(outside):
                last = sum((stay.mean for stay in top if stay.operand == "O" and stay.port == name), np.zeros(1))
                found = np.maximum(found, cycles - last + fills["O"])
        if closely and top:
            found = np.maximum(found, fill + self._outside(chosen, top, on_chip, fill) + fills["O"])
        return np.asarray(found, np.float64)

    def _outside(self, chosen: Sequence[Chains], top: Sequence[Stay], on_chip: Any, fill: Any) -> Any:
        """Cycles between fill and drain by the tiles' stays, for each port of the outermost memory the most."""
        hidden = {stay.operand: self._hidden(stay, chosen) for stay in top}
        tiles = [(stay.operand, one.points[:, -1], stay.events) for one in chosen for stay in one.stays if stay.outermost]
        short = {operand: found for operand, found in self.edges.of(tiles).items() if (found.any & hidden[operand]).any()}
        plain = [_without_edges(stay, short[stay.operand].any & hidden[stay.operand]) if stay.operand in short else stay for stay in top]
        found: Any = on_chip
        for port in {stay.port for stay in top}:
            held = sum((stay.held for stay in top if stay.operand != "O" and stay.port == port), np.zeros(1))
            found = np.maximum(found, windows(port, plain, hidden, on_chip, fill - held))
            means = {stay.operand: stay.mean * (stay.port == port) for stay in top}
            for operand, each in short.items():
                found = np.maximum(found, on_chip + np.where(hidden[operand], each.lost(means, on_chip), 0.0))
        return found

    def _waited(self, chosen: Sequence[Chains]) -> list[tuple[Stay, Any]]:
        """How often each tile is waited for, the first time included: refills that do not hide, and `stream` memories at every pass."""
        stays = [stay for one in chosen for stay in one.stays]
        shown = [np.where(self._hidden(stay, chosen), 1.0, stay.events) for stay in stays]
        passes: Any = reduce(np.minimum, [one.held for one in chosen]) if self.array.systolic else reduce(np.maximum, shown, np.ones(1))
        found = []
        for stay, times in zip(stays, shown, strict=True):
            streams = self.array.memories[stay.memory].refill == "stream" and not stay.outermost
            found.append((stay, np.minimum(passes, stay.events) if streams else times))
        return found

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

    def _hidden(self, stay: Stay, chosen: Sequence[Chains]) -> Mask:
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

    def fits(self, chosen: Sequence[Chains]) -> Mask:
        used: dict[str, Any] = {}
        for one in chosen:
            for stay in one.stays:
                used[stay.memory] = used.get(stay.memory, 0.0) + stay.bits
        found: Any = np.ones(1, bool)
        for name, bits in used.items():
            found = found & (bits <= self.array.memories[name].capacity_bits.value)
        return np.asarray(found)

    def cheap(self, chosen: Sequence[Chains]) -> Mask:
        """Whether every weighing leaves room for the operands not given."""
        others = frozenset(range(len(OPERANDS))) - {OPERANDS.index(one.operand) for one in chosen}
        found: Any = np.ones(len(chosen[0].points), bool)
        for number, weighing in enumerate(self.narrowed.weighings):
            total = weighing.sum.offset + weighing.least.get(others, 0.0) + sum(one.sums[number] for one in chosen)
            found &= total < weighing.limit
        return np.asarray(found)

    def promising(self, chosen: Sequence[Chains], limit: float) -> Mask:
        found = self.fits(chosen) & (self.bound(chosen) < limit) & self.cheap(chosen)
        return np.broadcast_to(found, len(chosen[0].points))

    def together(self, chains: list[Chains], limit: float) -> tuple[Floats, Indices] | None:
        """(bounds, points of all cuts) of the mappings below a limit; None where they are too many."""
        w, i, o = chains
        if len(w.points) * len(i.points) > MOST_PAIRS:
            return None
        w_path, i_path = self._comparable(w.points), self._comparable(i.points)
        first, second = np.nonzero(_all_in(w_path, i.points))
        kept = np.flatnonzero(self.promising([w.taken(first), i.taken(second)], limit))
        first, second = first[kept], second[kept]
        if len(first) * len(o.points) > MOST_TRIPLES:
            return None
        bounds, points = [np.zeros(0)], [np.zeros((0, sum(one.points.shape[1] for one in chains)), np.int64)]
        each = max(1, AT_ONCE // max(1, len(o.points)))
        for start in range(0, len(first), each):
            one, two = first[start : start + each], second[start : start + each]
            pair, third = np.nonzero(_all_in(w_path[one] & i_path[two], o.points))
            chosen = [w.taken(one[pair]), i.taken(two[pair]), o.taken(third)]
            kept = np.flatnonzero(self.promising(chosen, limit))
            chosen = [part.taken(kept) for part in chosen]
            closely = self.bound(chosen, closely=True)
            kept = np.flatnonzero(closely < limit)
            bounds.append(closely[kept])
            points.append(np.concatenate([part.points[kept] for part in chosen], axis=1))
        return np.concatenate(bounds), np.concatenate(points)

    def _comparable(self, points: Indices) -> Mask:
        """(chains, places): those that lie on a rising path with all of a chain's."""
        either = self.below | self.below.T
        found = np.ones((len(points), len(either)), bool)
        for column in points.T:
            found &= either[column]
        return found

    def _chosen(self, points: Indices) -> Chosen:
        ends = np.cumsum([0, *(len(self.points.cuts[op]) for op in OPERANDS)])
        flat = [int(self.places[point]) for point in points]
        return [flat[a:b] for a, b in pairwise(ends)]


def _without_edges(stay: Stay, where: Mask) -> Stay:
    """Whose short tiles make up for whole ones."""
    return replace(stay, whole=np.where(where, 1.0, stay.whole), larger=np.where(where, 1.0, stay.larger))


def _below(places: Indices, shape: tuple[int, ...]) -> Mask:
    """[a, b]: whether place b of a lattice is nowhere lower than a."""
    found = np.ones((len(places), len(places)), bool)
    for axis in np.unravel_index(places, shape):
        found &= axis[:, None] <= axis[None, :]
    return found


def _all_in(allowed: Mask, points: Indices) -> Mask:
    """[a, b]: whether all points of chain b are allowed to a."""
    found = np.ones((len(allowed), len(points)), bool)
    for column in points.T:
        found &= allowed[:, column]
    return found
