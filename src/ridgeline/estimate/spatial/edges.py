"""Tiles and stays that an edge of the layer cuts short.

    whole_tiles   share and size of the largest tiles of an operand; the others are cut short, or padding
    short_stays   a loop over tiles that ends at an edge: its last stay is short, and the next tile, a whole one, must arrive in it
    ShortStays    the same for many mappings at once: cycles lost there at least

The order of loops between two cuts is free, so short stays are only known of where a single loop lies between an operand's cut and the
next one above it. `windows` says what they cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...target.array import DIMENSIONS
from .chain import Lattice
from .counts import Blocks, Unrolled
from .layer import RELEVANT
from .windows import Short

Top = tuple[str, int, bool, Blocks]
"""(operand, tiles that come, whether they hide, blocks) between the outermost memory and the chip."""
Places = NDArray[np.int64]
Tiles = tuple[str, Places, Any]
"""(operand, places at which its tiles come from the outermost memory, how many) of many mappings."""


def whole_tiles(unrolled: Unrolled, operand: str, blocks: Blocks) -> tuple[Any, Any]:
    """(Share, size against the mean) of the largest tiles that pass the outermost port: others are cut short by an edge, or padding."""
    share: Any = np.ones(1)
    larger: Any = np.ones(1)
    for factor in unrolled.factors(operand, blocks, unrolled.array.memories[unrolled.array.ladder(operand)[-1]].shared_over):
        sizes, often, largest = factor.step_values, factor.step_counts, factor.largest
        tiles, total = often.sum(axis=-1), (sizes * often).sum(axis=-1)
        share = share * (often * (sizes == largest[..., None])).sum(axis=-1) / np.maximum(tiles, 1)
        larger = larger * largest * tiles / np.maximum(total, 1)
    return share, larger


def short_stays(unrolled: Unrolled, top: Sequence[Top]) -> list[Short]:
    """Of operands whose innermost loop over tiles ends at an edge."""
    found = []
    for operand, events, hidden, blocks in top:
        above = [other for other in top if other[1] < events]
        rarer = max(above, key=lambda other: other[1])[3] if above else None
        loops = [d for d in DIMENSIONS if _tiles(unrolled, d, blocks) > (_tiles(unrolled, d, rarer) if rarer else 1)]
        if not hidden or len(loops) != 1:
            continue
        dim = loops[0]
        tiles, block, turns = _tiles(unrolled, dim, blocks), int(blocks[dim][0]), _turns(unrolled, dim)
        followed = events // tiles - 1  # but the very last
        if (last := turns % block) and followed:
            within = {other[0]: _within(unrolled, other[0], dim, int(other[3][dim][0]), block) for other in top if other[1] > events}
            within |= {other[0]: (1.0, 1.0) for other in top if other[1] == events and other[0] != operand}
            larger = float(_larger(unrolled, operand, dim, blocks[dim]).flat[0])
            found.append(Short(operand, followed / (events - 2), last * tiles / turns, larger, within))
    return found


def _within(unrolled: Unrolled, operand: str, dim: str, own: Any, block: Any) -> tuple[Any, Any]:
    """(Number of an operand's tiles, their size), against their means, in the last of a loop's stays, which an edge cuts short."""
    size, turns, own = unrolled.layer.dims[dim], _turns(unrolled, dim), np.minimum(own, block)
    number, often = -(-(turns % block) // own), -(-turns // own) / -(-turns // block)
    elements = size - turns // block * block * unrolled.lanes(dim)
    return number / often, elements / np.maximum(number, 1) / (size / -(-turns // own)) if dim in RELEVANT[operand] else 1.0


def _turns(unrolled: Unrolled, dim: str) -> int:
    return -(-unrolled.layer.dims[dim] // unrolled.lanes(dim))


def _tiles(unrolled: Unrolled, dim: str, blocks: Blocks) -> int:
    return int(unrolled.steps(dim, blocks).flat[0])


def _larger(unrolled: Unrolled, operand: str, dim: str, block: NDArray[np.int64]) -> Any:
    """Whole tiles against the mean, where no other dimension is cut."""
    whole = {d: np.array([_turns(unrolled, d)]) for d in DIMENSIONS}
    return whole_tiles(unrolled, operand, {**whole, dim: block})[1]


class ShortStays:
    """Of one unrolling, at some places of its lattice."""

    def __init__(self, unrolled: Unrolled, lattice: Lattice, places: Places) -> None:
        self.unrolled, self.lattice, self.places = unrolled, lattice, places
        self.dims = [d for d in DIMENSIONS if _turns(unrolled, d) > 1]
        self.block = {d: self._at(_along(d, lattice.blocks[d])) for d in self.dims}
        self.tiles = {d: -(-_turns(unrolled, d) // self.block[d]) for d in self.dims}
        self.known: dict[tuple[str, str], NDArray[np.float64]] = {}

    def _at(self, values: NDArray[Any]) -> NDArray[Any]:
        return self.lattice.spread(values).reshape(-1)[self.places]

    def larger(self, operand: str, dim: str) -> NDArray[np.float64]:
        """Whole tiles against the mean, at every place."""
        if (operand, dim) not in self.known:
            self.known[operand, dim] = self._at(_larger(self.unrolled, operand, dim, self.lattice.blocks[dim]))
        return self.known[operand, dim]

    def of(self, tiles: Sequence[Tiles]) -> dict[str, ShortOnes]:
        """By operand, of mappings given by where the tiles of each come from the outermost memory."""
        return {operand: self._ones(operand, place, events, tiles) for operand, place, events in tiles}

    def _ones(self, operand: str, place: Places, events: Any, tiles: Sequence[Tiles]) -> ShortOnes:
        others = [other for other in tiles if other[0] != operand]
        rarer: Any = dict.fromkeys(self.dims, 1)
        most: Any = 0
        for _, where, often in others:  # the next cut above: of those that change less often, the one that changes most
            nearer = (often < events) & (often > most)
            rarer = {d: np.where(nearer, self.tiles[d][where], rarer[d]) for d in self.dims}
            most = np.where(nearer, often, most)
        loops = {d: self.tiles[d][place] > rarer[d] for d in self.dims}
        single = sum(each.astype(np.int64) for each in loops.values()) == 1
        found = {}
        for d in self.dims:
            block, count = self.block[d][place], self.tiles[d][place]
            applies = single & loops[d] & (_turns(self.unrolled, d) % block > 0) & (events > count)
            if applies.any():
                found[d] = applies
        return ShortOnes(self, operand, place, events, others, found)


@dataclass(frozen=True, slots=True)
class ShortOnes:
    """Short stays of one operand's tiles, in many mappings."""

    stays: ShortStays
    operand: str
    place: Places
    events: Any
    others: Sequence[Tiles]
    loops: Mapping[str, NDArray[np.bool_]]
    """By dimension, the mappings in which a loop over it ends at an edge and begins anew."""

    @property
    def any(self) -> NDArray[np.bool_]:
        return reduce(np.logical_or, self.loops.values(), np.zeros(1, bool))

    def lost(self, means: Mapping[str, Any], on_chip: Any) -> Any:
        """Cycles that the array waits in all for one port, which the mean tile of each operand holds for so long."""
        lost: Any = 0.0
        for dim, applies in self.loops.items():
            turns, block, count = _turns(self.stays.unrolled, dim), self.stays.block[dim][self.place], self.stays.tiles[dim][self.place]
            needed = means[self.operand] * self.stays.larger(self.operand, dim)[self.place]
            for operand, where, often in self.others:
                number, size = _within(self.stays.unrolled, operand, dim, self.stays.block[dim][where], block)
                passing = np.where(often > self.events, often / self.events * number * size, often == self.events)
                needed = needed + means[operand] * passing
                # two kinds of short stays at once are left to the exact count
                applies = applies & ((often != self.events) | (where == self.place))
            stay = on_chip / self.events * (turns % block) * count / turns
            lost = np.where(applies, (self.events / count - 1) * np.maximum(0.0, needed - stay), lost)
        return lost


def _along(dim: str, values: NDArray[Any]) -> NDArray[Any]:
    return values.reshape([-1 if d == dim else 1 for d in DIMENSIONS])
