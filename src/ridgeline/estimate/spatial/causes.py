"""Everything a mapping's cycles cannot be less than, as sums over its cuts.

    cycles  >=  core + fill + wait + drain      core: computing and waiting on chip, or the traffic of an on-chip port
                                                fill, wait: an operand's first tiles, or a port's; waits for the outermost memory
            >=  traffic of a port of the outermost memory; without the last results, whose way out is the drain, with the drain
    room    of a memory that operands share: what it is too small by; nothing for a mapping that fits

A refill of a shared memory waits if second copies of all its tiles do not fit together. So mappings are told apart by the memories
where they do not (`crowded`): where they do there is less room, where they do not every refill waits.
Left out: the skew of a systolic grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ...target.array import OPERANDS
from .points import CutPoints, Floats, Mask, Points

OVERFLOW = 1e-9
Chosen = list[list[int]]
"""The flat place of each cut, by operand."""
Name = tuple[str, ...]
Mix = dict[tuple[Name, str], float]
"""Weights of causes, each with the memory whose overflow is charged beside it, or ""."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A number and, for each cut of each operand, what it adds at every point."""

    offset: float
    costs: list[list[Floats | None]]

    def at(self, chosen: Chosen) -> float:
        return self.offset + sum(
            float(cost[place])
            for cuts, places in zip(self.costs, chosen, strict=True)
            for cost, place in zip(cuts, places, strict=True)
            if cost is not None
        )


def weighted(parts: Iterable[tuple[float, Sum]]) -> Sum:
    """The sum of some, each times its weight."""
    offset, costs = 0.0, list[list[Floats | None]]()
    for weight, part in parts:
        offset += weight * part.offset
        costs = costs or [[None] * len(cuts) for cuts in part.costs]
        for into, cuts in zip(costs, part.costs, strict=True):
            for at, cost in enumerate(cuts):
                if cost is not None:
                    into[at] = weight * cost if into[at] is None else into[at] + weight * cost  # type: ignore[operator]
    return Sum(offset, costs)


class Causes:
    """Of one unrolling's mappings, those with these crowded memories; None: of all."""

    def __init__(self, points: Points, crowded: frozenset[str] | None) -> None:
        self.points, self.crowded, tilings = points, crowded, points.tilings
        cuts = [cut for op in OPERANDS for cut in points.cuts[op]]
        self.waits = {id(cut): self._waits(cut) for cut in cuts}
        self.energy = self._sum(_energy, tilings.fixed_energy_pj)
        ports = sorted({name for cut in cuts for name in cut.ports} | set(tilings.fixed_cycles))
        traffic = {name: self._sum(partial(_traffic, name), tilings.fixed_cycles.get(name, 0.0)) for name in ports}
        outside = f"{points.outermost}."
        self.streams = {name: each for name, each in traffic.items() if name.startswith(outside)}
        waiting = [cut for cut in cuts if self.waits[id(cut)] is not None]
        inside = sorted({cut.port for cut in waiting if cut.operand != "O" and not cut.outermost}) or [""]
        compute = float(tilings.compute_cycles)
        self.cores = {f"compute {port}".strip(): self._sum(partial(self._waits_inside, port), compute) for port in inside}
        self.cores |= {name: traffic[name] for name in ports if not name.startswith(outside) and self._always_inner(name, cuts)}
        brought = sorted({cut.port for cut in cuts if cut.memory and cut.operand != "O"})
        self.fills = {name: self._sum(partial(_first, name)) for name in ("W", "I", *brought)}
        self.drain = self._sum(partial(_first, "O"))
        but_last = {name: self._sum(partial(_traffic_but_last, name), traffic[name].offset) for name in self.streams}
        self.streams |= {f"{name} drain": weighted([(1.0, each), (1.0, self.drain)]) for name, each in but_last.items()}
        outer = sorted({cut.port for cut in waiting if cut.outermost}) or [""]
        self.outer = {port: self._sum(partial(self._waits_outside, port)) for port in outer}
        self.rooms = {name: self._sum(partial(self._room, name), -1.0) for name in points.shared}
        self.named: dict[Name, Sum] = {}

    def _sum(self, measure: Callable[[CutPoints], Floats | None], offset: float = 0.0) -> Sum:
        return Sum(offset, [[measure(cut) for cut in self.points.cuts[op]] for op in OPERANDS])

    def allowed(self) -> list[list[Mask]]:
        """For each cut of each operand, where its tile fits."""
        return [[cut.allowed & (self._bits(cut) <= cut.capacity_bits) for cut in self.points.cuts[op]] for op in OPERANDS]

    def _bits(self, cut: CutPoints) -> Floats:
        """Of a tile, and of its second copy where there must be one."""
        doubled = cut.memory in self.points.shared and self.crowded is not None and cut.memory not in self.crowded
        doubled = doubled and self._refill(cut) == "double"
        return cut.tile_bits * np.where(cut.events > 1, 2, 1) if doubled else cut.tile_bits

    def _room(self, name: str, cut: CutPoints) -> Floats | None:
        return self._bits(cut) / cut.capacity_bits if cut.memory == name else None

    def _refill(self, cut: CutPoints) -> str:
        return self.points.array.memories[cut.memory].refill if cut.memory else "stream"

    def _waits(self, cut: CutPoints) -> Floats | None:
        """Cycles that computing waits for the tiles of a cut after the first; None where it never does."""
        refill, shared = self._refill(cut), cut.memory in self.points.shared
        if refill == "stream" or (refill == "double" and shared and cut.memory not in (self.crowded or ())):
            return None
        exposed = cut.events > 1
        if refill == "double" and not shared:
            exposed = exposed & (2 * cut.tile_bits > cut.capacity_bits)
        return np.where(exposed, (cut.events - 1) * cut.wait, 0.0) if exposed.any() else None

    def _waits_inside(self, port: str, cut: CutPoints) -> Floats | None:
        return self.waits[id(cut)] if not cut.outermost and (cut.operand == "O" or cut.port == port) else None

    def _waits_outside(self, port: str, cut: CutPoints) -> Floats | None:
        return self.waits[id(cut)] if cut.outermost and cut.port == port else None

    def _always_inner(self, port: str, cuts: Sequence[CutPoints]) -> bool:
        """Whether a port carries something that does not pass the outermost memory, whatever the mapping: it holds the array up."""
        if self.points.tilings.fixed_cycles.get(port):
            return True
        return any(cut.inner and port in cut.ports and cut.allowed.any() and cut.ports[port][cut.allowed].min() > 0 for cut in cuts)

    def cause(self, name: Name) -> Sum:
        """`(port,)` of the outermost memory, perhaps with the drain, or `(core, fill, wait)`, one after another."""
        if name not in self.named:
            parts = (
                [self.streams[name[0]]] if len(name) == 1 else [self.cores[name[0]], self.fills[name[1]], self.outer[name[2]], self.drain]
            )
            self.named[name] = weighted((1.0, part) for part in parts)
        return self.named[name]

    def known(self, mix: Mix) -> Mix:
        """Of another unrolling's weights those that mean something here."""
        found = {row: weight for row, weight in mix.items() if self._knows(row[0])}
        total = sum(found.values())
        if not total:
            return {((next(iter(self.cores)), next(iter(self.fills)), next(iter(self.outer))), ""): 1.0}
        return {name: weight / total for name, weight in found.items()}

    def _knows(self, name: Name) -> bool:
        if len(name) == 1:
            return name[0] in self.streams
        return name[0] in self.cores and name[1] in self.fills and name[2] in self.outer

    def slowest(self, chosen: Chosen) -> tuple[float, Name]:
        """The cause that asks most of a mapping."""
        parts = [_most(each, chosen) for each in (self.cores, self.fills, self.outer)]
        whole = sum(cycles for cycles, _ in parts) + self.drain.at(chosen)
        port, name = _most(self.streams, chosen)
        return (port, (name,)) if port > whole else (whole, tuple(name for _, name in parts))

    def fullest(self, chosen: Chosen) -> tuple[float, str]:
        """(By how much of itself a shared memory is too small for a mapping, which)."""
        over, name = _most(self.rooms, chosen)
        return (over, name) if over > OVERFLOW else (0.0, "")


def _energy(cut: CutPoints) -> Floats:
    return cut.energy_pj


def _traffic(port: str, cut: CutPoints) -> Floats | None:
    return cut.ports.get(port)


def _traffic_but_last(port: str, cut: CutPoints) -> Floats | None:
    """Without the last store of results, which is part of the drain."""
    found = cut.ports.get(port)
    return found * (1 - 1 / cut.events) if found is not None and cut.operand == "O" and cut.outermost else found


def _first(name: str, cut: CutPoints) -> Floats | None:
    """Bringing the first tile down an operand's ladder, or through a port; for O taking the last one up."""
    return cut.ends if cut.memory and (cut.operand == name or (cut.operand != "O" and cut.port == name)) else None


def _most(sums: Mapping[str, Sum], chosen: Chosen) -> tuple[float, str]:
    return max(((each.at(chosen), name) for name, each in sums.items()), default=(0.0, ""))
