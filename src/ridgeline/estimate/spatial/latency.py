"""Cycles of a mapping: what computing, every port and every wait need.

    cycles  = fill + the outermost boundary's windows + drain, never below any port's traffic
    on chip = max(compute + exposed on chip, traffic of each on-chip port / its bits, NoC), ports paced by an outermost one left out

    fill     the first tiles come down every ladder before the first multiplication; the last results go up after the last (drain)
    exposed  refills that cannot hide behind computing: those of a `single` memory, or of a `double` one in which second copies
             of its tiles do not fit. Refills through different ports go on side by side. Each break of the array's run (a pass)
             also refills what `stream` memories hold and drains them, and on a systolic array pays the skew of the grid.
    windows  a tile's stay in its top on-chip memory; those of the operand that changes least often contain those of the others.
             A window takes as long as the windows in it and the waits of refills that do not hide, as its traffic on each port, or
             as half of (computing + the way to the buffer and back): two buffers, so a tile is asked for while one is used, and
             the one before that has gone. The first window stores nothing, the last loads nothing.

Ports are counted for their busiest instance, so no port's traffic takes longer than the cycles stated. A mapping is never slower
with more room, a wider port or a wider network: whatever is compared here is a mean with a mean, or a largest with a largest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np

from ...target.array import DIMENSIONS, OPERANDS, SpatialArraySpec
from .counts import Blocks, Unrolled
from .edges import short_stays, whole_tiles
from .layer import REDUCTION, RELEVANT
from .windows import Outside, Way, Windows

Points = Mapping[str, list[Blocks]]
Tiles = Mapping[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One tile between a memory and the one above."""

    elements: int = 0
    bits: int = 0
    """At the port above."""
    above_cycles: int = 0
    below_cycles: int = 0
    """On the port below or the network, the slower."""
    shift_cycles: int = 0
    """Through the rows of a systolic grid, however small the tile."""
    asked_cycles: int = 0
    """Before the first bit comes; a write waits for no answer."""

    @property
    def cycles(self) -> int:
        return max(self.above_cycles, self.below_cycles, self.shift_cycles) + self.asked_cycles


@dataclass(frozen=True, slots=True)
class Moves:
    """All transfers of an operand between a memory and the one above, one way."""

    above: str
    below: str
    """Ports."""
    above_cycles: int
    below_cycles: int
    largest: Transfer
    """The largest of them."""
    elements: int
    """Of all of them, through the port above."""


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
    moves: tuple[Moves, ...] = ()
    """Down, and for O up."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Cycles by cause."""

    cycles: int
    compute: int
    fill: int
    drain: int
    exposed: int
    """Waits between the first and the last multiplication, those for the outermost memory among them."""
    exposed_on_chip: int
    """Of these, the ones below the outermost memory."""
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
    top = tuple(row for row in rows if row.port.startswith(outermost))
    inner_waits = _exposed(array, tuple(row for row in rows if row not in top), runs)
    fill, drain = _ends(rows)
    drain -= _last_is_smaller(unrolled, points, rows)
    paced = paced_ports(top, ports)
    on_chip = max([compute + inner_waits, *(c for name, c in ports.items() if not name.startswith(outermost) and name not in paced)])
    returning, apart = _returning(unrolled, points), _returns_apart(unrolled, points, top)
    outside = [
        _outside(row, paced, returning if row.operand == "O" else 1.0, whole_tiles(unrolled, row.operand, points[row.operand][-1]), apart)
        for row in top
    ]
    streams = {name: float(c) for name, c in ports.items() if name.startswith(outermost)}  # what goes straight to the PEs
    first: dict[str, float] = {}
    for row in top:
        for moves in row.moves:
            streams[moves.above] -= moves.above_cycles
        if row.operand != "O":
            first[row.port] = first.get(row.port, 0.0) + row.moves[0].largest.above_cycles
    shorts = short_stays(unrolled, [(row.operand, row.events, row.hidden, points[row.operand][-1]) for row in top])
    windows = Windows(on_chip, outside, streams, {name: fill - first.get(name, 0.0) for name in streams}, shorts)
    cycles = max([ceil(fill + windows.cycles() + drain - 1e-6), *ports.values()])
    waits = inner_waits + ceil(windows.waits())
    return Latency(cycles, compute, fill, drain, waits, inner_waits, on_chip, ceil(on_chip / windows.steps), runs)


def paced_ports(top: tuple[Refill, ...], ports: Mapping[str, int]) -> set[str]:
    """On-chip ports that carry nothing but what passes one outermost port: loads and stores wait for them, the array does not."""
    cycles: dict[str, int] = {}
    partners: dict[str, set[str]] = {}
    for moves in (moves for row in top for moves in row.moves if moves.below_cycles):
        cycles[moves.below] = cycles.get(moves.below, 0) + moves.below_cycles
        partners.setdefault(moves.below, set()).add(moves.above)
    return {name for name, found in partners.items() if len(found) == 1 and cycles[name] == ports.get(name)}


def _outside(row: Refill, paced: set[str], returning: float, whole: tuple[Any, Any], apart: bool) -> Outside:
    shares = (returning, 1.0)[: len(row.moves)]
    means = []
    for moves, share in zip(row.moves, shares, strict=True):
        held = max(moves.above_cycles, moves.below_cycles if moves.below in paced else 0)
        often = row.events * share
        if not often:
            means.append(Way(moves.above, 0.0, 0.0))
            continue
        mean, largest = held / often, moves.largest
        part = moves.elements / often / largest.elements if largest.elements else 0.0
        # a mean beside a mean, never beside the largest: a wider port would add to the wait what it saves on the largest
        later = max(0.0, part * largest.below_cycles - mean, largest.shift_cycles - mean) + largest.asked_cycles
        means.append(Way(moves.above, mean, later))
    traffic: dict[str, float] = {}
    for moves in row.moves:
        traffic[moves.above] = traffic.get(moves.above, 0.0) + moves.above_cycles
    share, larger = (float(each.flat[0]) for each in whole)
    store = means[1] if row.operand == "O" else None
    return Outside(row.operand, row.events, row.hidden, returning, means[0], store, share, larger, traffic, apart)


def _returning(unrolled: Unrolled, points: Points) -> float:
    """Share of visits that find partial sums."""
    visits = int(unrolled.count(REDUCTION, points["O"][-1]).flat[0])
    return 1 - 1 / visits


def _returns_apart(unrolled: Unrolled, points: Points, top: tuple[Refill, ...]) -> bool:
    """Whether visits that find partial sums share no tile of another operand with first ones: what is left to add lies outside them all."""
    rarest = min(top, key=lambda row: row.events, default=None)
    if rarest is None:
        return False
    ours, theirs = (int(unrolled.count(REDUCTION, points[operand][-1]).flat[0]) for operand in ("O", rarest.operand))
    return ours == theirs


def _last_is_smaller(unrolled: Unrolled, points: Points, rows: tuple[Refill, ...]) -> int:
    """Cycles the last store of results is shorter than the longest: edges."""
    row = next((row for row in reversed(rows) if row.operand == "O"), None)
    if row is None:
        return 0
    blocks, share = points["O"][-1], 1.0
    for dim in RELEVANT["O"]:
        span, size = int(blocks[dim][0]) * unrolled.lanes(dim), unrolled.layer.dims[dim]
        share *= (size - (-(-size // span) - 1) * span) / min(size, span)
    return int(row.cycles_each * (1 - share))


Traffic = Mapping[tuple[str, str, str], tuple[str, int, int]]
"""(memory, operand, direction) -> port, its cycles, elements moved."""


def refills(unrolled: Unrolled, points: Points, tiles: Tiles, traffic: Traffic) -> tuple[Refill, ...]:
    """Every on-chip tile."""
    array, rows = unrolled.array, []
    events = {
        (name, operand): _count(unrolled, points[operand][place + 1])
        for operand in OPERANDS
        for place, name in enumerate(array.ladder(operand)[:-1])
    }
    for operand in OPERANDS:
        ladder = array.ladder(operand)
        for place, (name, above) in enumerate(pairwise(ladder)):
            moves, each = [], []
            for way, (outer, inner) in enumerate((("rd_down", "wr_down"), ("wr_up", "rd_up"))[: 2 if operand == "O" else 1]):
                largest = _transfer(unrolled, operand, name, above, points[operand][place + 1], way)
                (port, cycles, elements), (port_below, below, _) = traffic[above, operand, outer], traffic[name, operand, inner]
                moves.append(Moves(f"{above}.{port}", f"{name}.{port_below}", cycles, below, largest, elements))
                each.append(largest.cycles)
            returned = each[0] if operand == "O" and moves[0].above_cycles else 0
            hidden = events[name, operand] == 1 or _has_room(array, name, tiles, events)
            rows.append(
                Refill(
                    name, operand, tiles[name, operand], events[name, operand], each[-1], returned, hidden, moves[-1].above, tuple(moves)
                )
            )
    return tuple(rows)


def _count(unrolled: Unrolled, blocks: Blocks) -> int:
    return int(unrolled.count(DIMENSIONS, blocks).flat[0])


def _has_room(array: SpatialArraySpec, name: str, tiles: Tiles, events: Mapping[tuple[str, str], int]) -> bool:
    """Whether a refill can go on while the tile is used."""
    memory = array.memories[name]
    if memory.refill != "double":
        return memory.refill == "stream"
    return sum(tiles[name, op] * (2 if events[name, op] > 1 else 1) for op in memory.operands) <= memory.capacity_bits.value


def _transfer(unrolled: Unrolled, operand: str, name: str, above: str, blocks: Blocks, way: int) -> Transfer:
    """The largest tile; way 0 is down, 1 up."""
    array, widths = unrolled.array, unrolled.layer.bits
    small, large = array.memories[name], array.memories[above]
    spreads = set(large.shared_over) - set(small.shared_over)
    if array.systolic and spreads and operand == "O":
        return Transfer()  # results leave with the skew of the grid
    width: int = getattr(widths, operand)
    tile_bits = int(unrolled.largest(operand, blocks, small.shared_over).flat[0]) * width
    if way == 1 and int(unrolled.count(REDUCTION, blocks).flat[0]) == 1:
        if not spreads:
            tile_bits = tile_bits // width * widths.F
        width = widths.F  # what arrives above is finished; what leaves one lane may still be added to that of others
    elements = int(unrolled.largest(operand, blocks, large.shared_over).flat[0])
    union_bits = elements * width
    inner = small.ports[small.port_of(operand, ("wr_down", "rd_up")[way])].bits_per_cycle
    outer = large.ports[large.port_of(operand, ("rd_down", "wr_up")[way])].bits_per_cycle
    network = -(-union_bits // array.noc.bits_per_cycle) if array.noc.bits_per_cycle and spreads else 0
    # a systolic grid takes a new stationary operand row by row, all rows whether used or not
    shift = next(iter(array.axes.values())) if array.systolic and spreads else 0
    asked = 0 if way else max(0, large.latency_cycles - 1)
    return Transfer(elements, union_bits, -(-union_bits // outer), max(-(-tile_bits // inner), network), shift, asked)


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
            waits = min(passes, row.events) - 1
        if row.operand == "O":
            drained += waits * (row.cycles_each + row.returned_cycles)
        else:
            by_port[row.port] = by_port.get(row.port, 0) + waits * row.cycles_each
    skew = passes * sum(size - 1 for size in array.axes.values()) if array.systolic else 0
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
