"""How long the outermost memory keeps the array: stays of tiles on chip, one inside the other.

    on-chip cycles, Outside of each operand ──Windows──> cycles between the first and the last multiplication

    window   a tile's stay in its top on-chip memory; the windows of the operand that changes least often contain those of the others.
             It takes the longest of
               the windows in it, and the waits of refills that do not hide at its end
               its traffic on each port
               half of (these windows + a tile's way to its buffer, and a result's way out of it): there are two buffers, so a tile
               is asked for when the one before the last has been used up. The traffic of the windows in it, more urgent, goes first:
               of a window of D cycles it leaves the port free for D - traffic, so m cycles of a tile take m D / (D - traffic); and a
               burst of what is less urgent is waited for
    first    stores nothing, and its loads, which must arrive as well, have a head start while other ports fill;  last: loads nothing

A tile that an edge of the layer cuts short does not make up for a whole one, and other operands' tiles are short at the same edge: so
windows of whole tiles are told apart from the others, which are taken at their mean, by the operand for which this matters most;
those of operands with fewer whole tiles are taken at their mean in both. Where the edge ends a loop that begins anew, the short tile's
stay is followed by a whole one, which must arrive in it (`Short`): then whole tiles that come in whole stays, short ones that do and whole
ones in short stays are told apart. `schedule.stream` walks them all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any

BURSTS_A_STEP = 8
"""Pieces that transfers are cut into, of a step: a long one lets a short urgent one pass."""
Traffic = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Way:
    """A mean transfer: cycles it holds its port, and from then on until it is there."""

    port: str
    cycles: float
    later: float

    @property
    def total(self) -> float:
        return self.cycles + self.later

    def sized(self, size: float) -> Way:
        return replace(self, cycles=size * self.cycles)


@dataclass(frozen=True, slots=True)
class Outside:
    """One operand between the outermost memory and the chip."""

    operand: str
    events: int
    hidden: bool
    returning: float
    """Share of events that load: of O, all but first visits."""
    load: Way
    store: Way | None
    whole: float = 1.0
    """Share of the tiles that no edge of the layer cuts short."""
    larger: float = 1.0
    """How large these are against the mean."""
    traffic: Traffic = field(default_factory=dict)
    """Cycles on each port of the outermost memory, all in all."""
    apart: bool = False
    """Whether no tile of another operand sees both first visits of O and such that load."""

    def sized(self, size: float) -> Outside:
        store = self.store.sized(size) if self.store else None
        return replace(self, load=self.load.sized(size), store=store, whole=1.0)


@dataclass(frozen=True, slots=True)
class Short:
    """Stays of one operand's tiles that an edge cuts short and a whole tile follows; all but the share of a mean stay or tile."""

    operand: str
    share: float
    """Of its stays between the first and the last."""
    stay: float
    """How long they are."""
    larger: float
    """The tile that must arrive."""
    within: Mapping[str, tuple[float, float]]
    """Number and size of the tiles of each operand that changes as often or more often."""


class Windows:
    """See the module."""

    def __init__(self, on_chip: int, outside: list[Outside], streams: Traffic, head_start: Traffic, shorts: Sequence[Short] = ()) -> None:
        self.on_chip, self.outside, self.streams, self.head_start = on_chip, outside, streams, head_start
        self.shorts = {short.operand: short for short in shorts}
        self.events = sorted({each.events for each in outside}, reverse=True) or [1]
        self.steps = self.events[0]

    def cycles(self) -> float:
        for at, each in enumerate(self.outside):
            if each.apart and 0 < each.returning < 1:
                halves = [replace(each, returning=returning, apart=False) for returning in (0.0, 1.0)]
                kinds = [[*self.outside[:at], half, *self.outside[at + 1 :]] for half in halves]
                shorts = tuple(self.shorts.values())
                first, later = (Windows(self.on_chip, kind, self.streams, self.head_start, shorts).cycles() for kind in kinds)
                return (1 - each.returning) * first + each.returning * later
        if self.shorts:
            plain = [replace(each, whole=1.0, larger=1.0) if each.operand in self.shorts else each for each in self.outside]
            return max(self._sequence(), Windows(self.on_chip, plain, self.streams, self.head_start).cycles())
        splits = {each.whole for each in self.outside if each.whole < 1}
        return max(self._split(whole) for whole in splits) if splits else self._sequence()

    def _sequence(self) -> float:
        return max(self._several(len(self.events), self.events[-1], False, False)[0], *self.streams.values(), 0.0)

    def _split(self, whole: float) -> float:
        """Windows of whole tiles, so large a share, and of the others."""
        larger = [each.larger if each.whole >= whole else 1.0 for each in self.outside]
        kinds = ((whole, larger), (1 - whole, [smaller(whole, size) for size in larger]))
        return sum(share * self._sized(sizes).cycles() for share, sizes in kinds)

    def _sized(self, sizes: list[float]) -> Windows:
        outside = [each.sized(size) for each, size in zip(self.outside, sizes, strict=True)]
        return Windows(self.on_chip, outside, self.streams, self.head_start)

    def waits(self) -> float:
        """Of refills that do not hide."""
        more = [self._exposed(level) - self._exposed(level - 1) for level in range(1, len(self.events) + 1)]
        return sum((events - 1) * cycles for events, cycles in zip(self.events, more, strict=True))

    def _several(self, level: int, count: float, before: bool, after: bool) -> tuple[float, Traffic]:
        """Windows one after another; before, after: whether others of their kind precede and follow."""
        if count <= 1:
            return self._window(level, before, after)
        between = max(0.0, count - 2)
        ends = (count - between) / 2  # the mean number of windows in a larger one need not be whole
        parts = [
            (ends, self._window(level, before, True)),
            (between, self._window(level, True, True)),
            (ends, self._window(level, True, after)),
        ]
        return _sum([(times, cycles) for times, (cycles, _) in parts]), _add([(times, traffic) for times, (_, traffic) in parts])

    def _window(self, level: int, before: bool, after: bool) -> tuple[float, Traffic]:
        if level == 0:
            return self.on_chip / self.steps, _add([(1 / self.steps, self.streams)])
        inside = self.events[level - 2] / self.events[level - 1] if level > 1 else 1.0
        cycles, traffic = self._several(level - 1, inside, before, after)
        if after:
            cycles += self._exposed(level) - self._exposed(level - 1)
        here = [each for each in self.outside if each.events == self.events[level - 1]]
        shorts = [self.shorts[each.operand] for each in here if each.operand in self.shorts]
        if not shorts or not before or not after:
            return self._one(here, cycles, traffic, before, after, level)
        kinds = []
        for at, (weight, stay, _) in enumerate(_kinds(shorts[0])):
            sized = [each.sized(_kinds(self.shorts[each.operand])[at][2]) if each.operand in self.shorts else each for each in here]
            more_often = traffic if at else self._inside(level, shorts[0])
            kinds.append((weight, self._one(sized, stay * cycles, more_often, before, after)))
        return _sum([(weight, found) for weight, (found, _) in kinds]), _add([(weight, moved) for weight, (_, moved) in kinds])

    def _one(
        self, here: list[Outside], cycles: float, traffic: Traffic, before: bool, after: bool, level: int | None = None
    ) -> tuple[float, Traffic]:
        """A window of some operands, with `cycles` and `traffic` of the windows in it; with `level`, bursts are waited for."""
        share = next((each.returning for each in here if each.store), 0.0) if after else 0.0
        kinds = [(weight, self._moved(here, before, after, returns)) for weight, returns in ((1 - share, False), (share, True)) if weight]
        ahead = {} if before else self.head_start
        means = []
        for weight, (moved, ways) in kinds:
            both = _add([(1.0, traffic), (1.0, moved)])
            turns = [self._turn(cycles + (self._burst(level, each) if level else 0.0), each, moved, traffic) for each in ways]
            there = [each.load.total - ahead.get(each.load.port, 0.0) for each in here if after and not before and not each.store]
            means.append((weight, max(cycles, *turns, *there, *(c - ahead.get(port, 0.0) for port, c in both.items()))))
        return _sum(means), _add([(1.0, traffic), *((weight, moved) for weight, (moved, _) in kinds)])

    def _inside(self, level: int, short: Short) -> Traffic:
        """Of the operands that change more often than those of a level, in a short stay."""
        parts = [(short.stay / self.events[level - 1], self.streams)]
        for each in self.outside:
            if each.events > self.events[level - 1]:
                number, size = short.within[each.operand]
                parts.append((number * size / self.events[level - 1], each.traffic))
        return _add(parts)

    def _moved(self, here: list[Outside], before: bool, after: bool, returns: bool) -> tuple[Traffic, list[list[Way]]]:
        """(Traffic of a window's own operands, ways through each one's buffer)."""
        moved: dict[str, float] = defaultdict(float)
        found: list[list[Way]] = []
        for each in here:
            ways = []
            if after and (returns or not each.store):
                ways.append(each.load)
            if each.store and (before if each.hidden else after):
                ways.append(each.store)
            for way in ways:
                moved[way.port] += way.cycles
            if each.hidden and after and before:  # at first both buffers are free
                found.append(ways)
        return moved, found

    def _burst(self, level: int, ways: list[Way]) -> float:
        """Of a transfer that is less urgent, and may go on when these are asked for: as often as it has a share in the port's traffic."""
        step, found = self.on_chip / self.steps / BURSTS_A_STEP, 0.0
        for port in {way.port for way in ways}:
            traffic = [(each.events, each.traffic.get(port, 0.0)) for each in self.outside]
            others = [(events, cycles) for events, cycles in traffic if 1 < events < self.events[level - 1]]  # one: in fill and drain
            if in_all := sum(cycles for _, cycles in traffic):
                share = sum(cycles for _, cycles in others) / in_all
                found = max(found, share * max((min(step, cycles / events) for events, cycles in others), default=0.0))
        return found

    def _turn(self, cycles: float, ways: list[Way], moved: Traffic, traffic: Traffic) -> float:
        """The least D with 2 D = cycles + later + m D / (D - traffic): what moves through the ways' ports has other traffic go first.

        Of two ports the busier counts for both, so that D never falls when anything else rises.
        """
        ports = {way.port for way in ways}
        own, busy = sum(moved[port] for port in ports), max((traffic.get(port, 0.0) for port in ports), default=0.0)
        waits = cycles + sum(way.later for way in ways)
        half = (2 * busy + waits + own) / 2
        return (half + sqrt(max(0.0, half * half - 2 * busy * waits))) / 2

    def _exposed(self, level: int) -> float:
        """Wait where a window of this level ends, and all in it: one port's transfers one after another, a store before its load."""
        ports: dict[str, float] = defaultdict(float)
        for each in self.outside:
            if level and each.events >= self.events[level - 1] and not each.hidden:
                load = each.load.total * each.returning
                ports[each.load.port] += load
                if each.store:
                    ports[each.store.port] += each.store.total
                    ports["O"] += each.store.total + load
        return max(ports.values(), default=0.0)


def _kinds(short: Short) -> list[tuple[float, float, float]]:
    """(Share, stay, tile that arrives in it): whole tiles in short stays, short tiles in whole stays, whole tiles in whole stays."""
    stay, tile = smaller(short.share, short.stay), smaller(1 - short.share, short.larger)
    return [(short.share, short.stay, short.larger), (short.share, stay, max(0.0, tile)), (1 - 2 * short.share, stay, short.larger)]


def smaller(whole: Any, larger: Any) -> Any:
    """How large the other tiles are against the mean, when a share of them is whole, and larger by this much."""
    return (1 - whole * larger) / (1 - whole)


def _sum(parts: list[tuple[float, float]]) -> float:
    return sum(times * cycles for times, cycles in parts)


def _add(parts: list[tuple[float, Traffic]]) -> Traffic:
    total: dict[str, float] = defaultdict(float)
    for times, traffic in parts:
        for port, cycles in traffic.items():
            total[port] += times * cycles
    return total
