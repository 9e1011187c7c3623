"""Fronts against the definition, point by point."""

from __future__ import annotations

from math import inf, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.estimate.spatial.codesign import front as fronts

# few distinct values, so that equal points and equal columns turn up
POINTS = st.lists(st.tuples(*[st.integers(0, 4) | st.floats(0.1, 1e6)] * 3), max_size=24)


def beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and any(a < b for a, b in zip(one, other, strict=True))


def array(points: list[tuple[float, ...]]) -> np.ndarray:
    return np.array(points, dtype=np.float64).reshape(len(points), 3)


@given(POINTS)
def test_front_is_what_no_point_beats(points: list[tuple[float, ...]]) -> None:
    assert fronts.front(array(points)) == [i for i, p in enumerate(points) if not any(beats(q, p) for q in points)]


@given(POINTS, POINTS)
def test_dominated_by_others(points: list[tuple[float, ...]], others: list[tuple[float, ...]]) -> None:
    assert list(fronts.dominated(array(points), array(others))) == [any(beats(q, p) for q in others) for p in points]


@given(POINTS)
def test_ranks_peel_front_after_front(points: list[tuple[float, ...]]) -> None:
    ranks, left = fronts.ranks(array(points)), list(range(len(points)))
    for rank in range(max(ranks, default=-1) + 1):
        best = [i for i in left if not any(beats(points[j], points[i]) for j in left)]
        assert [i for i in range(len(points)) if ranks[i] == rank] == best
        left = [i for i in left if i not in best]
    assert left == []


@given(POINTS.filter(bool))
def test_knee_is_on_the_front_and_nearest(points: list[tuple[float, ...]]) -> None:
    chosen = [points[i] for i in fronts.front(array(points))]
    place, distance = fronts.knee(chosen)
    assert not any(beats(other, chosen[place]) for other in points)
    if all(value > 0 for point in chosen for value in point):
        best = [min(column) for column in zip(*chosen, strict=True)]
        away = [sum(log(value / low) ** 2 for value, low in zip(point, best, strict=True)) ** 0.5 for point in chosen]
        assert distance == pytest.approx(min(away)) == pytest.approx(away[place])


def test_blocks_of_points_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    points = np.random.default_rng(1).integers(0, 9, (200, 3)).astype(np.float64)
    whole = fronts.front(points)
    monkeypatch.setattr(fronts, "PAIRS", 7)
    assert fronts.front(points) == whole and len(whole) < 60


def test_crowding_by_hand() -> None:
    points = np.array([[0.0, 4.0], [1.0, 2.0], [3.0, 1.0], [4.0, 0.0]])
    assert fronts.crowding(points) == [inf, 3 / 4 + 3 / 4, 3 / 4 + 2 / 4, inf]
    assert fronts.crowding(np.zeros((0, 3))) == [] and fronts.crowding(np.ones((3, 2)))[1] == 0


def test_knee_by_hand() -> None:
    """(9, 9) is a factor of 9 from the best in both, each end a factor of 100 in one; a column of one value counts nothing."""
    assert fronts.knee([(1.0, 100.0, 5.0), (9.0, 9.0, 5.0), (100.0, 1.0, 5.0)]) == (1, pytest.approx(2**0.5 * log(9)))
    assert fronts.knee([(1.0, 1.1), (1.5, 1.0)])[0] == 0  # a tenth more is nearer than half more
    assert fronts.knee([(5.0, 5.0, 5.0)]) == (0, 0.0)
    assert fronts.knee([(0.0, 2.0), (1.0, 1.0)])[0] == 0  # a zero has no logarithm: linear
