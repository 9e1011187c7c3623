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
from .narrow import Narrowed
from .points import Floats, Indices, Mask
from .windows import BURSTS_A_STEP, smaller

MOST_PLACES, MOST_CHAINS, MOST_PAIRS, MOST_TRIPLES = 4096, 20_000, 1_000_000, 1_000_000
"""Points that cuts may be at, and what is listed of them."""
AT_ONCE = 500_000
"""Triples looked at together: what they need is some hundred megabytes."""


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
    mean: Floats
    """Cycles that each holds its port of the outermost memory."""
    stored: Floats
    """Of these, for results, what goes up."""
    visits: Floats
    """How often each result is added to."""
    held: Floats
    """The same for the largest."""
    whole: Floats
    larger: Floats
    """Share of tiles that no edge cuts short, and how much larger than the mean these are."""

    def arrays(self) -> tuple[Floats, ...]:
        return (self.bits, self.events, self.wait, self.ends, self.mean, self.stored, self.visits, self.held, self.whole, self.larger)


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
                    hidden = {stay.operand: self._hidden(stay, chosen) for stay in top}
                    held = sum((stay.held for stay in top if stay.operand != "O" and stay.port == name), np.zeros(1))
                    found = np.maximum(found, fill + _windows(name, top, hidden, on_chip, fill - held) + fills["O"])
        return np.asarray(found, np.float64)

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


def _windows(port: str, top: Sequence[Stay], hidden: Mapping[str, Mask], on_chip: Any, ahead: Any) -> Any:
    """`windows.Windows.cycles` for one port of the outermost memory and many mappings: a little less, since no answer is waited for."""
    found = _sized_windows(port, top, hidden, on_chip, ahead)
    at = next((at for at, stay in enumerate(top) if stay.operand == "O"), None)
    if at is None:
        return found
    o, rarest = top[at], reduce(np.minimum, [stay.events for stay in top])
    apart = reduce(np.logical_and, [(stay.events > rarest) | (stay.visits == o.visits) for stay in top]) & (o.visits > 1)
    if not apart.any():
        return found
    returning = 1 - 1 / np.maximum(o.visits, 2)  # share of visits that load
    means = (o.stored, o.stored + (o.mean - o.stored) / returning)
    kinds = [[*top[:at], replace(o, mean=mean), *top[at + 1 :]] for mean in means]
    first, later = (_sized_windows(port, kind, hidden, on_chip, ahead) for kind in kinds)
    return np.where(apart, np.maximum(found, (1 - returning) * first + returning * later), found)


def _sized_windows(port: str, top: Sequence[Stay], hidden: Mapping[str, Mask], on_chip: Any, ahead: Any) -> Any:
    """Windows of whole tiles and of others, told apart by the operand for which it matters most."""
    found: Any = 0.0
    for whole in {id(stay.whole): np.minimum(stay.whole, 1 - 1e-9) for stay in top}.values():
        larger = [np.where(stay.whole >= whole, stay.larger, 1.0) for stay in top]
        kinds = ((whole, larger), (1 - whole, [smaller(whole, size) for size in larger]))
        found = np.maximum(found, sum(share * _Windows(port, top, hidden, on_chip, ahead, sizes).cycles() for share, sizes in kinds))
    return found


class _Windows:
    """Windows of tiles that are so large against the mean."""

    def __init__(self, port: str, top: Sequence[Stay], hidden: Mapping[str, Mask], on_chip: Any, ahead: Any, sizes: Sequence[Any]) -> None:
        events = np.stack(np.broadcast_arrays(*(stay.events for stay in top)))
        self.order = np.argsort(-events, axis=0, kind="stable")
        self.events, self.ahead = np.take_along_axis(events, self.order, axis=0), ahead
        self.step = on_chip / self.events[0]
        mean = [size * stay.mean * (stay.port == port) for stay, size in zip(top, sizes, strict=True)]
        stored = [size * stay.stored * (stay.port == port) for stay, size in zip(top, sizes, strict=True)]
        self.moved = {
            (before, after): self._by_level(
                [self._moves(mean[at], stored[at], hidden[stay.operand], stay.operand, before, after) for at, stay in enumerate(top)]
            )
            for before in (False, True)
            for after in (False, True)
        }
        often, plain = events, [stay.mean * (stay.port == port) for stay in top]
        alone = [
            ~reduce(np.logical_or, [often[at] == often[other] for other in range(len(top)) if other != at], False) for at in range(len(top))
        ]
        turns = [hidden[stay.operand] & alone[at] & ((stay.operand != "O") | (stay.visits == 1)) for at, stay in enumerate(top)]
        self.turns = self._by_level(turns)
        self.bursts = self._by_level([self._burst(at, often, plain) for at in range(len(top))])
        self.known: dict[tuple[int, bool, bool], tuple[Any, Any]] = {}

    def _burst(self, at: int, events: Floats, mean: Sequence[Any]) -> Any:
        """`windows.Windows._burst`."""
        share: Any = 0.0
        longest: Any = 0.0
        for other, cycles in enumerate(mean):
            fewer = (events[other] > 1) & (events[other] < events[at])
            share = share + np.where(fewer, cycles * events[other], 0.0)
            longest = np.maximum(longest, np.where(fewer, np.minimum(self.step / BURSTS_A_STEP, cycles), 0.0))
        return share / np.maximum(sum(cycles * events[other] for other, cycles in enumerate(mean)), 1e-300) * longest

    def _by_level(self, values: Sequence[Any]) -> Floats:
        """Of the operand whose tiles change most often first."""
        return np.take_along_axis(np.stack([np.broadcast_to(each, self.order.shape[1:]) for each in values]), self.order, axis=0)

    def _moves(self, mean: Floats, stored: Floats, hidden: Mask, operand: str, before: bool, after: bool) -> Any:
        """Through the port in a window of an operand's tile, others of its kind preceding and following."""
        if operand != "O":
            return mean if after else 0.0 * mean
        if before == after:
            return mean if after else 0.0 * mean
        return np.where(hidden == before, stored, 0.0)

    def cycles(self) -> Any:
        return self._several(len(self.events), self.events[-1], False, False)[0]

    def _several(self, level: int, count: Any, before: bool, after: bool) -> tuple[Any, Any]:
        one = self._window(level, before, after)
        if (count <= 1).all():
            return one
        between = np.maximum(0.0, count - 2)
        ends = (count - between) / 2
        parts = [
            (ends, self._window(level, before, True)),
            (between, self._window(level, True, True)),
            (ends, self._window(level, True, after)),
        ]
        many = [sum(times * part[which] for times, part in parts) for which in (0, 1)]
        return np.where(count <= 1, one[0], many[0]), np.where(count <= 1, one[1], many[1])

    def _window(self, level: int, before: bool, after: bool) -> tuple[Any, Any]:
        if level == 0:
            return self.step, 0.0
        if (level, before, after) not in self.known:
            inside = self.events[level - 2] / self.events[level - 1] if level > 1 else np.ones(1)
            cycles, traffic = self._several(level - 1, inside, before, after)
            moved = self.moved[before, after][level - 1]
            longest = np.maximum(cycles, traffic + moved - (0.0 if before else self.ahead))
            if before and after:
                waits = cycles + self.bursts[level - 1]
                half = traffic + (waits + moved) / 2
                turn = (half + np.sqrt(np.maximum(0.0, half * half - 2 * traffic * waits))) / 2
                longest = np.where(self.turns[level - 1], np.maximum(longest, turn), longest)
            self.known[level, before, after] = longest, traffic + moved
        return self.known[level, before, after]


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
