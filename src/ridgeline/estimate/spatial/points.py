"""What every cut of one unrolling costs at every point of its lattice, by cause: the numbers that bounds on time and energy are made of.

    Tilings ──> for each cut, over the flat lattice: energy, cycles on every port, tile, refills, how long each takes

A mapping's cost is nearly the sum of these at its cuts' points (latency.py says what is missing), never less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...target.array import DIMENSIONS, OPERANDS
from .counts import boundary_flows
from .edges import whole_tiles
from .layer import REDUCTION, RELEVANT
from .tilings import CutCosts, Tilings

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CutPoints:
    """One cut, at every point."""

    operand: str
    memory: str | None
    """Whose tile the cut bounds; None: the register of a PE."""
    port: str
    """Of the memory above, that brings the tile, or takes it."""
    outermost: bool
    """Whether that memory is the outermost."""
    inner: bool
    """Whether its port cycles have nothing to do with the outermost memory."""
    allowed: Mask
    """Where its tile fits by itself."""
    energy_pj: Floats
    ports: Mapping[str, Floats]
    elements: Floats
    """Of a tile."""
    complete: Mask
    """For O: no reduction is left outside."""
    events: Floats
    wait: Floats
    """For each tile, down for W and I, up for O, where computing waits for it."""
    ends: Floats
    """The first one down, the last one up."""
    held: Floats
    """Cycles that the largest one holds the port."""
    stored: Floats
    """For O: cycles that a mean one holds the port on its way up."""
    visits: Floats
    """How often each result is added to."""
    whole: Floats
    """Share of tiles that no edge of the layer cuts short."""
    larger: Floats
    """How much larger than the mean these are."""
    tile_bits: Floats
    """At least: finished results may lie below as partial sums, which are wider."""
    capacity_bits: float


class Points:
    """Of one unrolling."""

    def __init__(self, tilings: Tilings) -> None:
        self.tilings, self.array = tilings, tilings.array
        self.shape = tilings.lattice.fine_shape
        self.outermost = list(self.array.memories)[-1]
        self.events = self.spread(tilings.unrolled.count(DIMENSIONS, tilings.lattice.blocks)).astype(np.float64)
        self.visits = self.spread(tilings.unrolled.count(REDUCTION, tilings.lattice.blocks)).astype(np.float64)
        self.shared = tuple(name for name, memory in self.array.memories.items() if len(memory.operands) > 1 and name != self.outermost)
        """On-chip memories whose room operands divide."""
        self.cuts = {op: [self._cut(op, cut) for cut in tilings.cuts[op]] for op in OPERANDS}

    def flat(self, values: NDArray[Any]) -> NDArray[Any]:
        """Over the lattice's points."""
        return np.broadcast_to(values, self.shape).reshape(-1)

    def spread(self, values: NDArray[Any]) -> NDArray[Any]:
        """Over the lattice's points, from one axis a dimension."""
        return self.tilings.lattice.spread(np.asarray(values)).reshape(-1)

    def _cut(self, operand: str, cut: CutCosts) -> CutPoints:
        ladder, tile_bits = self.array.ladder(operand), self.flat(self.tilings.least_bits(cut))
        above, elements = ladder[cut.place], self.flat(cut.tile_elements)
        ports = {name: self.flat(cycles) for name, cycles in cut.port_cycles.items()}
        port, nothing = "", np.zeros(len(self.events))
        wait, ends, held, stored, capacity, whole, larger = nothing, nothing, nothing, nothing, inf, 1 + nothing, 1 + nothing
        if cut.memory:
            capacity = float(self.array.memories[cut.memory].capacity_bits.value)
            port = f"{above}.{self.array.memories[above].port_of(operand, 'wr_up' if operand == 'O' else 'rd_down')}"
            each, below, held = self._cycles_each(operand, cut.memory, above)
            if above == self.outermost:
                if operand == "O":
                    flows = boundary_flows(self.tilings.unrolled, "O", cut.place, self.tilings.lattice.blocks)
                    stored = self.spread(flows[above, "wr_up"].cycles) / self.events
                whole, larger = (self.spread(each) for each in whole_tiles(self.tilings.unrolled, operand, self.tilings.lattice.blocks))
            ends = each - self._shorter(each) if operand == "O" and above == self.outermost else each
            wait = self._mean_wait(operand, cut.place, above, ports[port] / self.events, below) if above == self.outermost else each
        return CutPoints(
            operand, cut.memory, port, cut.memory is not None and above == self.outermost, cut.memory is None or above != self.outermost,
            self.flat(self.tilings.fits(cut)), self.flat(cut.energy_pj), ports, elements, self.flat(cut.complete), self.events,
            wait, ends, held, stored, self.visits, whole, larger, tile_bits, capacity,
        )  # fmt: skip

    def _mean_wait(self, operand: str, place: int, above: str, mean: Floats, below: Floats) -> Floats:
        """For a mean tile of the outermost memory, which holds its port for `mean` cycles; the largest takes `below` on the chip's side."""
        unrolled, blocks, memory = self.tilings.unrolled, self.tilings.lattice.blocks, self.array.memories[above]
        flow = boundary_flows(unrolled, operand, place, blocks)[above, "wr_up" if operand == "O" else "rd_down"]
        largest = unrolled.largest(operand, blocks, memory.shared_over)
        part = flow.elements / np.maximum(unrolled.count(DIMENSIONS, blocks) * largest, 1)
        return np.maximum(mean, self.spread(part) * below) + (0 if operand == "O" else max(0, memory.latency_cycles - 1))

    def _cycles_each(self, operand: str, name: str, above: str) -> tuple[Floats, Floats, Floats]:
        """(the largest tile between two memories, the chip's side of it, the port's), down for W and I, up for O: `latency.Transfer`."""
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
        held = np.ceil(union / outer.bits_per_cycle)
        found = np.maximum(held, below)
        if array.systolic and spreads:
            found, below = (0 * found, 0 * below) if operand == "O" else (np.maximum(found, next(iter(array.axes.values()))), below)
        asked = 0 if operand == "O" else max(0, large.latency_cycles - 1)
        return self.spread(found + asked), self.spread(below), self.spread(held)

    def _shorter(self, each: Floats) -> Floats:
        """By how much the last store of results is shorter than the longest: edges of the layer."""
        share: Any = 1.0
        for dim in RELEVANT["O"]:
            span, size = self.tilings.lattice.blocks[dim] * self.tilings.unrolled.lanes(dim), self.tilings.layer.dims[dim]
            span = span.reshape([-1 if d == dim else 1 for d in DIMENSIONS])
            share = share * (size - (-(-size // span) - 1) * span) / np.minimum(size, span)
        found: Floats = np.floor(each * (1 - self.spread(np.asarray(share))))
        return found
