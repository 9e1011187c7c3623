"""Give every storage an offset in one arena: two that are alive together never overlap, and the arena is as small as we can find.

    [Interval] ──order──> place one after another into the best (or lowest) gap between those already placed
      1. orders by size, bytes x steps, length, time, bytes of neighbours, and from the bottom up (skyline.py), x two fits;
         greedy by size, best fit, is the first
      2. local search over orders from the bottom up: what forms the top of the arena, or is alive with it, goes further down;
         what is not worse is kept (annealed)
      stop: the arena equals the lower bound, the rounds are used up, or the time limit
    ──> Plan(offsets, arena_bytes, lower_bound_bytes, method)

Lower bound = peak live bytes, each storage rounded up to the alignment. Choosing offsets is NP-hard (Garey & Johnson 1979,
SR2): the gap to the bound is stated, not hidden. The same input gives the same plan unless the time limit cuts the search.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .lifetimes import Interval, live_bytes, peak_bytes, round_up
from .skyline import skyline_order

ALIGN = 64  # bytes: a cache line, and what torch's CPU allocator gives
ROUNDS = 2000
TIME_LIMIT_S = 2.0
SEED = 8
HEAT = 0.002  # an arena this share of the bound larger is kept one time in e, at first


@dataclass(frozen=True, slots=True)
class Plan:
    """Where each storage lies in the arena."""

    intervals: tuple[Interval, ...]
    offsets: tuple[int, ...]  # bytes, one for each interval
    arena_bytes: int
    lower_bound_bytes: int  # peak live bytes, each storage rounded up to the alignment
    method: str
    seconds: float
    align: int = ALIGN

    @property
    def over_bound(self) -> float:
        """How much larger than the lower bound: 0.03 is 3 %."""
        return self.arena_bytes / self.lower_bound_bytes - 1 if self.lower_bound_bytes else 0.0

    def offset_of(self, storage: int) -> int:
        """The offset of one storage [B]."""
        return next(offset for interval, offset in zip(self.intervals, self.offsets, strict=True) if interval.storage == storage)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data; `intervals` is the memory map: offset and bytes over first..last step."""
        return {
            "arena_bytes": self.arena_bytes,
            "lower_bound_bytes": self.lower_bound_bytes,
            "unrounded_peak_bytes": peak_bytes(self.intervals),
            "sum_bytes": sum(interval.bytes for interval in self.intervals),
            "over_bound": self.over_bound,
            "method": self.method,
            "seconds": self.seconds,
            "align": self.align,
            "live_bytes": live_bytes(self.intervals, self.align),
            "intervals": [
                {
                    "node": interval.node,
                    "bytes": interval.bytes,
                    "offset": offset,
                    "first": interval.first,
                    "last": interval.last,
                    "aliases": list(interval.aliases),
                }
                for interval, offset in zip(self.intervals, self.offsets, strict=True)
            ],
        }


def plan(
    intervals: Sequence[Interval], *, effort: int = ROUNDS, align: int = ALIGN, time_limit_s: float = TIME_LIMIT_S, seed: int = SEED
) -> Plan:
    """Offsets for these intervals; `effort` is the number of rounds of local search, 0 gives greedy by size alone."""
    start = time.perf_counter()
    table = _Table(intervals, align)
    bound = peak_bytes(intervals, align)
    orders = table.orders()
    best = table.place(orders["size"](), best_fit=True)
    method = "greedy by size, best fit"
    if effort:
        for name, ordered in orders.items():
            if best.arena == bound:
                break
            order = ordered()
            for best_fit in (True, False):
                tried = table.place(order, best_fit)
                if tried.arena < best.arena:
                    best, method = tried, f"greedy by {name}, {'best' if best_fit else 'first'} fit"
        if best.arena > bound:
            found = _search(table, best, bound, effort, start + time_limit_s, random.Random(seed))
            if found.arena < best.arena:
                best, method = found, f"local search from {method}"
    return Plan(tuple(intervals), tuple(best.offsets), best.arena, bound, method, time.perf_counter() - start, align)


@dataclass(slots=True)
class _Placed:
    order: list[int]
    best_fit: bool
    offsets: list[int]
    arena: int


class _Table:
    """Sizes and, for each interval, those alive at the same time."""

    def __init__(self, intervals: Sequence[Interval], align: int) -> None:
        self.intervals = intervals
        self.sizes = [round_up(interval.bytes, align) for interval in intervals]
        self.together = _together(intervals)

    def orders(self) -> dict[str, Callable[[], list[int]]]:
        """Orders to place in, each made when asked for. Ties fall to the longer lived, then to the earlier."""
        spans, sizes = self.intervals, self.sizes
        length = [span.last - span.first + 1 for span in spans]
        keys: dict[str, Callable[[int], Any]] = {
            "size": lambda i: (-sizes[i], -length[i], i),
            "area": lambda i: (-sizes[i] * length[i], i),
            "length": lambda i: (-length[i], -sizes[i], i),
            "time": lambda i: (spans[i].first, -sizes[i], i),
            "crowding": lambda i: (-sum(sizes[j] for j in self.together[i]), -sizes[i], i),
        }
        made: dict[str, Callable[[], list[int]]] = {name: partial(sorted, range(len(spans)), key=key) for name, key in keys.items()}
        made["skyline of the longest"] = lambda: skyline_order(spans, sizes, lambda i: (length[i], sizes[i]))
        made["skyline of the largest"] = lambda: skyline_order(spans, sizes, lambda i: (sizes[i], length[i]))
        return made

    def place(self, order: list[int], best_fit: bool) -> _Placed:
        """Place in this order: into the smallest gap that fits (or the lowest), else on top of what is alive at the same time."""
        offsets, arena = [-1] * len(order), 0
        for i in order:
            taken = sorted((offsets[j], offsets[j] + self.sizes[j]) for j in self.together[i] if offsets[j] >= 0)
            offsets[i] = _gap(taken, self.sizes[i], best_fit)
            arena = max(arena, offsets[i] + self.sizes[i])
        return _Placed(order, best_fit, offsets, arena)


def _together(intervals: Sequence[Interval]) -> list[list[int]]:
    """For each interval the others alive at one step at least, by a sweep over the starts."""
    found: list[list[int]] = [[] for _ in intervals]
    alive: list[int] = []
    for i in sorted(range(len(intervals)), key=lambda i: intervals[i].first):
        alive = [j for j in alive if intervals[j].last >= intervals[i].first]
        for j in alive:
            found[i].append(j)
            found[j].append(i)
        alive.append(i)
    return found


def _gap(taken: list[tuple[int, int]], size: int, best_fit: bool) -> int:
    """Where `size` bytes go between these sorted (start, end) pieces."""
    top, chosen, smallest = 0, -1, math.inf
    for start, end in taken:
        room = start - top
        if size <= room < smallest:
            chosen, smallest = top, room
            if not best_fit:
                return chosen
        top = max(top, end)
    return top if chosen < 0 else chosen


def _search(table: _Table, best: _Placed, bound: int, rounds: int, deadline: float, chance: random.Random) -> _Placed:
    """Annealed local search over orders; never returns worse than it was given."""
    now = best
    for step in range(rounds):
        if best.arena == bound or time.perf_counter() > deadline:
            break
        heat = HEAT * bound * (1 - step / rounds) ** 2
        tried = table.place(_neighbour(table, now, chance), now.best_fit if chance.random() < 0.9 else not now.best_fit)
        if tried.arena <= now.arena or (heat > 0 and chance.random() < math.exp((now.arena - tried.arena) / heat)):
            now = tried
        if now.arena < best.arena:
            best = now
    return best


def _neighbour(table: _Table, now: _Placed, chance: random.Random) -> list[int]:
    """From the bottom up, with one interval at the top of the arena, or one alive with it, moved further down."""
    order = sorted(now.order, key=lambda i: now.offsets[i])
    top = chance.choice([i for i in order if now.offsets[i] + table.sizes[i] == now.arena])
    moved = top if chance.random() < 0.5 or not table.together[top] else chance.choice(table.together[top])
    place = order.index(moved)
    order.insert(chance.randrange(place + 1), order.pop(place))
    return order
