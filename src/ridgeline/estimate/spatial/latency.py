"""Cycles of a mapping: what computing, every port and every wait need.

    cycles  = max(fill + max(on chip, compute + exposed) + drain, traffic of each outermost port + last step)
    on chip = max(compute + exposed on chip, traffic of each on-chip port / its bits, NoC)

    fill     the first tiles come down every ladder before the first multiplication; the last results go up after the last (drain)
    exposed  refills that cannot hide behind computing: those of a `single` memory, or of a `double` one in which second copies
             of its tiles do not fit. Refills through different ports go on side by side. Each break of the array's run (a pass)
             also refills what `stream` memories hold and drains them, and on a systolic array pays the skew of the grid.
    last step   computing that follows the last load from the outermost memory

Ports are counted for their busiest instance, so no port's traffic takes longer than the cycles stated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ...target.array import DIMENSIONS, OPERANDS, SpatialArraySpec
from .counts import Blocks, Unrolled

Points = Mapping[str, list[Blocks]]
Tiles = Mapping[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class Refill:
    """One operand's tile in one on-chip memory: how large, how often, how long, whether computing waits for it."""

    memory: str
    operand: str
    tile_bits: int
    events: int
    cycles_each: int
    """Down for W and I, up for O."""
    returned_cycles: int
    """Partial sums coming back, where they do."""
    hidden: bool
    port: str
    """Of the memory above."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Cycles by cause."""

    cycles: int
    compute: int
    fill: int
    drain: int
    exposed: int
    on_chip: int
    """The array at work: all but waiting for the outermost memory, and the first fill and last drain."""
    last_step: int
    passes: int
    """Uninterrupted runs of the array."""


def latency(unrolled: Unrolled, points: Points, rows: tuple[Refill, ...], ports: Mapping[str, int]) -> Latency:
    """From tiles and port traffic to cycles."""
    array, compute = unrolled.array, unrolled.compute_cycles()
    runs = _passes(unrolled, points, rows)
    outermost = f"{list(array.memories)[-1]}."
    waits = _exposed(array, rows, runs)
    inner_waits = _exposed(array, tuple(row for row in rows if not row.port.startswith(outermost)), runs)
    fill, drain = _ends(rows)
    on_chip = max([compute + inner_waits, *(cycles for name, cycles in ports.items() if not name.startswith(outermost))])
    inside = max(on_chip, compute + waits)
    steps = max((row.events for row in rows if row.port.startswith(outermost)), default=compute)
    last = -(-inside // max(1, steps)) if rows else 0
    loads = {row.port for row in rows}  # other streams go straight to the PEs and end with computing
    outside = max((cycles + last * (name in loads) for name, cycles in ports.items() if name.startswith(outermost)), default=0)
    return Latency(max(fill + inside + drain, outside), compute, fill, drain, waits, on_chip, last, runs)


def refills(unrolled: Unrolled, points: Points, tiles: Tiles, returning: Mapping[str, bool]) -> tuple[Refill, ...]:
    """Every on-chip tile; `returning` says of each O memory whether partial sums come back to it."""
    array, rows = unrolled.array, []
    events = {
        (name, operand): _count(unrolled, points[operand][place + 1])
        for operand in OPERANDS
        for place, name in enumerate(array.ladder(operand)[:-1])
    }
    for operand in OPERANDS:
        ladder = array.ladder(operand)
        for place, (name, above) in enumerate(pairwise(ladder)):
            down, up = (
                _transfer_cycles(unrolled, operand, name, above, tiles[name, operand], points[operand][place + 1], way) for way in (0, 1)
            )
            port = array.memories[above].port_of(operand, "wr_up" if operand == "O" else "rd_down")
            hidden = events[name, operand] == 1 or _has_room(array, name, tiles, events)
            rows.append(
                Refill(name, operand, tiles[name, operand], events[name, operand], up if operand == "O" else down,
                       down if operand == "O" and returning[name] else 0, hidden, f"{above}.{port}")
            )  # fmt: skip
    return tuple(rows)


def _count(unrolled: Unrolled, blocks: Blocks) -> int:
    return int(unrolled.count(DIMENSIONS, blocks).flat[0])


def _has_room(array: SpatialArraySpec, name: str, tiles: Tiles, events: Mapping[tuple[str, str], int]) -> bool:
    """Whether a refill can go on while the tile is used."""
    memory = array.memories[name]
    if memory.refill != "double":
        return memory.refill == "stream"
    return sum(tiles[name, op] * (2 if events[name, op] > 1 else 1) for op in memory.operands) <= memory.capacity_bits.value


def _transfer_cycles(unrolled: Unrolled, operand: str, name: str, above: str, tile_bits: int, blocks: Blocks, way: int) -> int:
    """Cycles of moving the largest tile between a memory and the one above; way 0 is down, 1 up."""
    array = unrolled.array
    small, large = array.memories[name], array.memories[above]
    width: int = getattr(unrolled.layer.bits, operand)
    union_bits = int(unrolled.largest(operand, blocks, large.shared_over).flat[0]) * width
    if operand != "O" and way == 1:
        return 0
    inner = small.ports[small.port_of(operand, ("wr_down", "rd_up")[way])].bits_per_cycle
    outer = large.ports[large.port_of(operand, ("rd_down", "wr_up")[way])].bits_per_cycle
    spreads = set(large.shared_over) - set(small.shared_over)
    if array.systolic and spreads and operand == "O":
        return 0  # results leave with the skew of the grid
    network = -(-union_bits // array.noc.bits_per_cycle) if array.noc.bits_per_cycle and spreads else 0
    # a systolic grid takes a new stationary operand row by row, all rows whether used or not
    shift = next(iter(array.axes.values())) if array.systolic and spreads else 0
    return max(-(-tile_bits // inner), -(-union_bits // outer), network, shift) + max(0, large.latency_cycles - 1)


def _passes(unrolled: Unrolled, points: Points, rows: tuple[Refill, ...]) -> int:
    if not unrolled.array.systolic:
        return max((row.events for row in rows if not row.hidden), default=1)
    # a systolic grid starts a new run with every new stationary operand: the one that changes least often at the PEs
    return min(_count(unrolled, stationary_blocks(points, operand)) for operand in OPERANDS)


def stationary_blocks(points: Points, operand: str) -> Blocks:
    """Blocks at which a PE's operand changes; O leaves a PE when its first memory is emptied."""
    return points[operand][min(1, len(points[operand]) - 1)] if operand == "O" else points[operand][0]


def _exposed(array: SpatialArraySpec, rows: tuple[Refill, ...], passes: int) -> int:
    """Cycles the array waits between its first and last multiplication."""
    by_port: dict[str, int] = {}
    drained = 0
    for row in rows:
        waits = 0 if row.hidden else row.events - 1
        if row.hidden and array.memories[row.memory].refill == "stream" and row.events > 1:
            waits = passes - 1
        if row.operand == "O":
            drained += waits * (row.cycles_each + row.returned_cycles)
        else:
            by_port[row.port] = by_port.get(row.port, 0) + waits * row.cycles_each
    skew = passes * (sum(array.axes.values()) - 2) if array.systolic else 0
    return max(by_port.values(), default=0) + drained + skew


def _ends(rows: tuple[Refill, ...]) -> tuple[int, int]:
    """(cycles before the first multiplication, after the last): ladders side by side, one port's loads one after another."""
    chains = dict.fromkeys(OPERANDS, 0)
    ports: dict[str, int] = {}
    for row in rows:
        chains[row.operand] += row.cycles_each
        if row.operand != "O":
            ports[row.port] = ports.get(row.port, 0) + row.cycles_each
    return max([chains["W"], chains["I"], *ports.values()]), chains["O"]


def noc_cycles(unrolled: Unrolled, injected_bits: int) -> int:
    width = unrolled.array.noc.bits_per_cycle
    return -(-injected_bits // width) if width else 0


def one(values: object) -> int:
    """The only entry of a lattice of one point."""
    return int(np.asarray(values).reshape(-1)[0])
