"""How large the tiles of one dimension are, every one of them, edges and padding included.

    extents(size 10, block 2, lanes 2) ──> tiles of 4, 4, 2 indices: {4: 2, 2: 1}          one dimension
    windows(P and R, or Q and S)       ──> distinct input rows each (P tile, R tile) touches, padding left out

A dimension's indices are dealt to `lanes` (PEs it is unrolled over), `block` time steps to a tile. An instance of a memory
sees the lanes of its group: all of them when it is shared over the axes they lie on, else some. Dimensions are independent,
so an operand's tiles are the products of these, and counts over all of them are sums over a few distinct sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Pattern = tuple[tuple[int, bool], ...]
"""(factor, shared?) of each unrolling of a dimension, innermost lane first; shared: the memory asked about serves that axis."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Distinct tile sizes of one dimension (or window) at one block size."""

    values: tuple[int, ...]
    """Sizes > 0 of the tiles of all instances."""
    counts: tuple[int, ...]
    """How many (tile, instance) pairs have each."""
    step_values: tuple[int, ...]
    """Sizes of the largest instance's tile at each step."""
    step_counts: tuple[int, ...]
    """How many steps have each."""

    @property
    def active(self) -> int:
        """(Tile, instance) pairs that hold anything."""
        return sum(self.counts)

    @property
    def steps(self) -> int:
        return sum(self.step_counts)

    @property
    def total(self) -> int:
        return sum(v * c for v, c in zip(self.values, self.counts, strict=True))

    @property
    def largest(self) -> int:
        return max(self.step_values, default=0)


@lru_cache(maxsize=4096)
def lane_groups(pattern: Pattern) -> tuple[int, tuple[int, ...]]:
    """(number of groups, group of each lane): lanes differing only along shared axes are in one group."""
    groups, radix = np.zeros(1, np.int64), 1
    for factor, shared in pattern:
        digits = np.arange(factor)
        groups = (groups[None, :] + (0 if shared else radix) * digits[:, None]).reshape(-1)
        radix *= 1 if shared else factor
    return radix, tuple(int(g) for g in groups)


@lru_cache(maxsize=65536)
def extents(size: int, block: int, pattern: Pattern) -> Sizes:
    """Tiles of a plain dimension."""
    number, groups = lane_groups(pattern)
    lanes = len(groups)
    if number == 1:  # all lanes in one instance: full tiles, then what is left
        span = block * lanes
        full, rest = divmod(size, span)
        pairs = [(span, full)] * (full > 0) + [(rest, 1)] * (rest > 0)
        values, counts = tuple(v for v, _ in pairs), tuple(c for _, c in pairs)
        return Sizes(values, counts, values, counts)
    index = np.arange(size)
    tile = index // (lanes * block)
    held = np.bincount(tile * number + np.asarray(groups)[index % lanes], minlength=(int(tile[-1]) + 1) * number)
    return _sizes(held.reshape(-1, number))


@dataclass(frozen=True, slots=True)
class Slide:
    """Tiles of which only what the one before lacked is moved, along runs of neighbouring tiles of one dimension."""

    dim: str
    """P, Q, R or S."""
    run: int
    """Tiles in a run; the first of each is moved whole."""


@lru_cache(maxsize=65536)
def windows(
    outs: int,
    taps: int,
    geometry: tuple[int, int, int, int],
    blocks: tuple[int, int],
    patterns: tuple[Pattern, Pattern],
    slide: tuple[bool, int] | None = None,
    held_patterns: tuple[Pattern, Pattern] | None = None,
) -> Sizes:
    """Tiles of input rows; geometry = (stride, dilation, padding, input size), patterns are those of outs and taps.

    `slide` = (along taps?, run): count only the rows that instances with `held_patterns` (default: the same) do not hold yet.
    """
    stride, dilation, padding, size = geometry
    if taps == 1 and padding == 0 and (outs - 1) * stride < size:
        return extents(outs, blocks[0], patterns[0])  # every output needs one row of its own
    out_number, out_groups = lane_groups(patterns[0])
    tap_number, tap_groups = lane_groups(patterns[1])
    out, tap = np.arange(outs), np.arange(taps)
    out_tile, tap_tile = out // (len(out_groups) * blocks[0]), tap // (len(tap_groups) * blocks[1])
    row = out[:, None] * stride + tap[None, :] * dilation - padding
    stored = (row >= 0) & (row < size)
    tap_tiles = int(tap_tile[-1]) + 1
    step = out_tile[:, None] * tap_tiles + tap_tile[None, :]
    instance = _pairs(out_groups, tap_groups, tap_number, outs, taps)
    number, steps = out_number * tap_number, int(step.max()) + 1
    if slide:
        outs_held, taps_held = (lane_groups(p) for p in held_patterns or patterns)
        held = _pairs(outs_held[1], taps_held[1], taps_held[0], outs, taps)
        stored &= _is_new(step, held, row, size, tap_tiles, slide)
    keys = np.unique(((step * number + instance) * size + row)[stored])
    return _sizes(np.bincount(keys // size, minlength=steps * number).reshape(steps, number))


def _pairs(out_groups: tuple[int, ...], tap_groups: tuple[int, ...], tap_number: int, outs: int, taps: int) -> Ints:
    """Instance of each (output, tap)."""
    out_group = np.asarray(out_groups)[np.arange(outs) % len(out_groups)]
    tap_group = np.asarray(tap_groups)[np.arange(taps) % len(tap_groups)]
    pairs: Ints = out_group[:, None] * tap_number + tap_group[None, :]
    return pairs


def _is_new(step: Ints, instance: Ints, row: Ints, size: int, tap_tiles: int, slide: tuple[bool, int]) -> NDArray[np.bool_]:
    """Where the instance did not hold the row in the tile before, in the same run."""
    along_taps, run = slide
    back, place = (1, step % tap_tiles) if along_taps else (tap_tiles, step // tap_tiles)
    number, wide = int(instance.max()) + 1, size + 2 * (abs(int(row.min())) + int(row.max()) + 1)
    rows = row - int(row.min())
    held = np.unique((step * number + instance) * wide + rows)
    before = np.isin(((step - back) * number + instance) * wide + rows, held)
    new: NDArray[np.bool_] = ~before | (place % run == 0)
    return new


def _sizes(held: NDArray[np.int64]) -> Sizes:
    """`held[step, instance]` elements."""
    values, counts = np.unique(held[held > 0], return_counts=True)
    step_values, step_counts = np.unique(held.max(axis=1), return_counts=True)
    return Sizes(*(tuple(int(x) for x in array) for array in (values, counts, step_values, step_counts)))
