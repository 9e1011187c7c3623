"""How long the outermost memory keeps the array: stays of tiles on chip, one inside the other.

    on-chip cycles, Outside of each operand ──Windows──> cycles between the first and the last multiplication

    window   a tile's stay in its top on-chip memory; the windows of the operand that changes least often contain those of the others.
             It takes the longest of
               the windows in it, and the waits of refills that do not hide at its end
               its traffic on each port
               half of (these windows + a tile's way to its buffer, and a result's way out of it): there are two buffers, so a tile
               is asked for when the one before the last has been used up
    first    stores nothing, and its loads have a head start while other ports fill;  last: loads nothing

Tiles cut short by the layer's edge are told apart from whole ones where they come from W, O or the channels of I; input windows
that differ (padding, overlap) are taken at their mean, which is too short; `schedule.stream` walks them all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

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
    sizes: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    """(Share of the tiles, how large they are against the mean): the edges of the layer."""
    load_bits: float = 0.0
    """A mean load, the same at any width of port."""


class Windows:
    """See the module."""

    def __init__(self, on_chip: int, outside: list[Outside], streams: Traffic, head_start: Traffic) -> None:
        self.on_chip, self.outside, self.streams, self.head_start = on_chip, outside, streams, head_start
        self.events = sorted({each.events for each in outside}, reverse=True) or [1]
        self.steps = self.events[0]

    def cycles(self) -> float:
        return max(self._several(len(self.events), self.events[-1], False, False)[0], *self.streams.values(), 0.0)

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
        share = next((each.returning for each in here if each.store), 0.0) if after else 0.0
        kinds = [(weight, self._moved(here, before, after, returns)) for weight, returns in ((1 - share, False), (share, True)) if weight]
        ahead = {} if before else self.head_start
        means = []
        for weight, (moved, way) in kinds:
            for part, size in self._edges(here):
                both = _add([(1.0, traffic), (size, moved)])
                longest = max(cycles, (cycles + size * way) / 2, *(c - ahead.get(port, 0.0) for port, c in both.items()))
                means.append((weight * part, longest))
        return _sum(means), _add([(1.0, traffic), *((weight, moved) for weight, (moved, _) in kinds)])

    def _edges(self, here: list[Outside]) -> tuple[tuple[float, float], ...]:
        """Sizes of the tiles that most of a window's own traffic brings: a short one does not make up for a long one."""
        return max(here, key=lambda each: each.load_bits).sizes if here else ((1.0, 1.0),)

    def _moved(self, here: list[Outside], before: bool, after: bool, returns: bool) -> tuple[Traffic, float]:
        """(Traffic of a window's own operands, longest way through a buffer)."""
        moved: dict[str, float] = defaultdict(float)
        longest = 0.0
        for each in here:
            way = 0.0
            if after and (returns or not each.store):
                moved[each.load.port] += each.load.cycles
                way += each.load.total
            if each.store and (before if each.hidden else after):
                moved[each.store.port] += each.store.cycles
                way += each.store.total
            if each.hidden and after and before:  # at first both buffers are free
                longest = max(longest, way)
        return moved, longest

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


def _sum(parts: list[tuple[float, float]]) -> float:
    return sum(times * cycles for times, cycles in parts)


def _add(parts: list[tuple[float, Traffic]]) -> Traffic:
    total: dict[str, float] = defaultdict(float)
    for times, traffic in parts:
        for port, cycles in traffic.items():
            total[port] += times * cycles
    return total
