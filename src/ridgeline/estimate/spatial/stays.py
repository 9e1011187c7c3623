"""How long the outermost memory keeps the array, for many mappings at once: no more than `windows` says of each.

Stay of every operand's top tile, on-chip cycles ──windows──> cycles between the first and the last multiplication, for one port
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from .points import Floats, Mask
from .windows import BURSTS_A_STEP, smaller


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


def windows(port: str, top: Sequence[Stay], hidden: Mapping[str, Mask], on_chip: Any, ahead: Any) -> Any:
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
