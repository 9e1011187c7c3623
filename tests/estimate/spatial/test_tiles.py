"""Tile sizes of one dimension and of windows of inputs, against lists made by dealing out every index."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.estimate.spatial.tiles import Pattern, Sizes, extents, lane_groups, windows

patterns = st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=3).map(tuple)


def digits(lane: int, pattern: Pattern) -> tuple[int, ...]:
    """Where a lane lies along each unrolling."""
    found = []
    for factor, _ in pattern:
        lane, digit = divmod(lane, factor)
        found.append(digit)
    return tuple(found)


def instance(lane: int, pattern: Pattern) -> tuple[int, ...]:
    """The place of a lane along the axes its memory does not serve."""
    return tuple(digit for digit, (_, shared) in zip(digits(lane, pattern), pattern, strict=True) if not shared)


def lanes(pattern: Pattern) -> int:
    count = 1
    for factor, _ in pattern:
        count *= factor
    return count


def summary(held: dict[Any, dict[Any, set[int]]]) -> Sizes:
    """{step: {instance: elements}} as the engine states it."""
    each: dict[int, int] = defaultdict(int)
    largest: dict[int, int] = defaultdict(int)
    for tiles in held.values():
        for tile in tiles.values():
            if tile:
                each[len(tile)] += 1
        largest[max((len(tile) for tile in tiles.values()), default=0)] += 1
    return Sizes(
        tuple(sorted(each)), tuple(each[n] for n in sorted(each)), tuple(sorted(largest)), tuple(largest[n] for n in sorted(largest))
    )


def tidy(sizes: Sizes) -> Sizes:
    """The same in rising order."""
    pairs, steps = (sorted(zip(*two, strict=True)) for two in ((sizes.values, sizes.counts), (sizes.step_values, sizes.step_counts)))
    return Sizes(*(tuple(column) for both in (pairs, steps) for column in (list(zip(*both, strict=True)) or [(), ()])))


def test_tiles_of_a_dimension() -> None:
    # 10 indices, 2 steps to a tile, 2 lanes in one instance: 4, 4, 2.
    whole = extents(10, 2, ((2, True),))
    assert (whole.values, whole.counts) == ((4, 2), (2, 1))
    assert (whole.active, whole.steps, whole.total, whole.largest) == (3, 3, 10, 4)
    # Each lane its own instance: lane 0 holds {0 2} {4 6} {8}, lane 1 {1 3} {5 7} {9}.
    apart = extents(10, 2, ((2, False),))
    assert tidy(apart) == Sizes((1, 2), (2, 4), (1, 2), (1, 2))
    # 9 indices: lane 1 of the last tile holds nothing, and is not at work.
    assert tidy(extents(9, 2, ((2, False),))) == Sizes((1, 2), (1, 4), (1, 2), (1, 2))


def test_lanes_along_shared_axes_are_one_group() -> None:
    assert lane_groups(()) == (1, (0,))
    assert lane_groups(((2, True), (3, False))) == (3, (0, 0, 1, 1, 2, 2))
    assert lane_groups(((2, False), (3, True))) == (2, (0, 1, 0, 1, 0, 1))


@given(st.integers(1, 40), st.integers(1, 9), patterns)
def test_extents_deal_out_every_index(size: int, block: int, pattern: Pattern) -> None:
    held: dict[int, dict[Any, set[int]]] = defaultdict(lambda: defaultdict(set))
    for index in range(size):
        step, lane = divmod(index, lanes(pattern))
        held[step // block][instance(lane, pattern)].add(index)
    assert tidy(extents(size, block, pattern)) == summary(held)


def test_windows_overlap_and_padding_is_left_out() -> None:
    # Rows p + r - 1 on 0..4 for P5 and R3, two outputs to a tile: {0 1 2} (row -1 is padding), {1 2 3 4}, {3 4} (row 5 is).
    rows = windows(5, 3, (1, 1, 1, 5), (2, 3), ((), ()))
    assert tidy(rows) == Sizes((2, 3, 4), (1, 1, 1), (2, 3, 4), (1, 1, 1))
    # Sliding along the outputs, what is new of each: {0 1 2}, {3 4}, nothing.
    assert tidy(windows(5, 3, (1, 1, 1, 5), (2, 3), ((), ()), (False, 1 << 40))) == Sizes((2, 3), (1, 1), (0, 2, 3), (1, 1, 1))
    # In runs of two tiles the third starts afresh: {0 1 2}, {3 4}, {3 4}.
    assert tidy(windows(5, 3, (1, 1, 1, 5), (2, 3), ((), ()), (False, 2))) == Sizes((2, 3), (2, 1), (2, 3), (2, 1))


@given(
    st.integers(1, 9), st.integers(1, 4), st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2)), st.integers(1, 12),
    st.tuples(st.integers(1, 4), st.integers(1, 3)), st.tuples(patterns, patterns),
    st.one_of(st.none(), st.tuples(st.booleans(), st.integers(1, 4))),
)  # fmt: skip
def test_windows_deal_out_every_row(
    outs: int, taps: int, geometry: tuple[int, int, int], size: int, blocks: tuple[int, int], both: Any, slide: Any
) -> None:
    stride, dilation, padding = geometry
    held: dict[tuple[int, int], dict[Any, set[int]]] = {}
    for out, tap in product(range(outs), range(taps)):
        row = out * stride + tap * dilation - padding
        (out_step, out_lane), (tap_step, tap_lane) = divmod(out, lanes(both[0])), divmod(tap, lanes(both[1]))
        tiles = held.setdefault((out_step // blocks[0], tap_step // blocks[1]), defaultdict(set))
        if 0 <= row < size:
            tiles[instance(out_lane, both[0]), instance(tap_lane, both[1])].add(row)
    moved = {step: {who: set(tile) for who, tile in tiles.items()} for step, tiles in held.items()}
    if slide:
        along, run = slide
        for (o, t), tiles in moved.items():
            if (t if along else o) % run:
                before = held[(o, t - 1) if along else (o - 1, t)]
                for who, tile in tiles.items():
                    tile -= before.get(who, set())
    assert tidy(windows(outs, taps, (*geometry, size), blocks, both, slide)) == summary(moved)


@pytest.mark.parametrize("slide", [None, (False, 4)])
def test_union_of_what_is_new_below(slide: Any) -> None:
    # Four lanes of P, one output each, R3: a shared parent sees 6 rows, then 6 of which 2 were held. With instances below that hold
    # their own three rows, a row is new for the union when any of them lacks it: lane 0 goes from {0 1 2} to {4 5 6}: all are new.
    shared, apart = ((4, True),), ((4, False),)
    union = windows(8, 3, (1, 1, 0, 10), (1, 3), (shared, ()), slide, (apart, ()) if slide else None)
    assert tidy(union) == Sizes((6,), (2,), (6,), (2,))
    if slide:
        assert tidy(windows(8, 3, (1, 1, 0, 10), (1, 3), (shared, ()), slide)) == Sizes((4, 6), (1, 1), (4, 6), (1, 1))
