"""The cheapest chain of cuts against every chain there is, on lattices small enough to list them."""

from __future__ import annotations

from itertools import pairwise, product
from math import inf, isclose, prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.estimate.spatial import chain
from ridgeline.estimate.spatial.chain import Cut, Ladder, cheapest_chain, lattice_for, lower_bound, smooth_above
from ridgeline.target.array import DIMENSIONS

Point = tuple[int, ...]


def rises(points: list[Point]) -> bool:
    """Whether points can be put in an order that rises along every axis."""
    ranked = sorted(points, key=sum)
    return all(all(a <= b for a, b in zip(low, high, strict=True)) for low, high in pairwise(ranked))


def all_chains(ladders: list[list[np.ndarray[Any, Any]]], shape: Point) -> tuple[float, int]:
    """(cheapest cost, number of chains) by listing every choice of points; each ladder's own points rise in its order."""
    best, chains = inf, 0
    everywhere = list(np.ndindex(*shape))
    for chosen in product(everywhere, repeat=sum(map(len, ladders))):
        left, cost, fits = list(chosen), 0.0, rises(list(chosen))
        for ladder in ladders:
            mine, left = left[: len(ladder)], left[len(ladder) :]
            fits = fits and all(all(a <= b for a, b in zip(low, high, strict=True)) for low, high in pairwise(mine))
            cost += sum(float(costs[point]) for costs, point in zip(ladder, mine, strict=True))
        if fits:
            best, chains = min(best, cost), chains + 1
    return best, chains


def as_ladders(ladders: list[list[np.ndarray[Any, Any]]]) -> list[Ladder]:
    return [[{0: [Cut(costs)]} for costs in ladder] for ladder in ladders]


@pytest.mark.parametrize("seed", range(25))
def test_cheapest_of_all_chains(seed: int) -> None:
    random = np.random.default_rng(seed)
    shape = [(2, 2), (3, 2), (2, 2, 2), (4,), (3, 3)][seed % 5]
    lengths = [(1, 1, 1), (2, 1, 1), (2, 2), (1, 2, 1), (1, 1)][seed // 5]
    if prod(shape) ** sum(lengths) > 10_000:
        lengths = (1, 1, 1)
    ladders = [[np.where(random.random(shape) < 0.2, inf, random.integers(0, 9, shape).astype(float)) for _ in range(n)] for n in lengths]
    best, _ = all_chains(ladders, shape)
    cost, points = cheapest_chain(as_ladders(ladders), shape)
    assert cost == best
    if np.isfinite(best):
        assert (
            sum(float(costs[at]) for ladder, mine in zip(ladders, points, strict=True) for costs, at in zip(ladder, mine, strict=True))
            == best
        )
        assert rises([at for mine in points for at in mine])


@given(st.data())
def test_cheapest_of_all_generated_chains(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(2, 2), (3, 2), (4,), (2, 2, 2)]))
    costs = st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0, 11.0, inf]), min_size=prod(shape), max_size=prod(shape))
    tables = data.draw(st.lists(costs.map(lambda flat: np.array(flat).reshape(shape)), min_size=3, max_size=3))
    split = data.draw(st.sampled_from([(3,), (2, 1), (1, 2), (1, 1, 1)]))
    ladders, left = [], list(tables)
    for length in split:
        ladders.append(left[:length])
        left = left[length:]
    assert cheapest_chain(as_ladders(ladders), shape)[0] == all_chains(ladders, shape)[0]


def test_chains_are_exactly_the_loop_orders() -> None:
    # Two loops: 2 orders, each with 3 places for a cut; a cut of one ladder alone can lie at any of the 4 points.
    free = np.zeros((2, 2))
    assert all_chains([[free]], (2, 2))[1] == 4
    # Two cuts of different ladders: all 16 pairs but the two where one has one loop inside and the other the other one.
    assert all_chains([[free], [free]], (2, 2))[1] == 14
    clash = [np.where(np.indices((2, 2))[0] == 1 - i, inf, np.where(np.indices((2, 2))[1] == i, inf, 0.0)) for i in (0, 1)]
    assert [int(np.isfinite(c).sum()) for c in clash] == [1, 1]
    assert cheapest_chain(as_ladders([[clash[0]], [clash[1]]]), (2, 2)) == (inf, [])


def test_variants_depend_on_the_cut_before() -> None:
    # The second cut is free after a first one at the high point (which leads to phase 1), and costs 10 after any other.
    low, high = np.array([0.0, inf]), np.array([inf, 3.0])
    ladder: Ladder = [{0: [Cut(low, 0), Cut(high, 1)]}, {0: [Cut(np.full(2, 10.0))], 1: [Cut(np.zeros(2))]}]
    assert cheapest_chain([ladder], (2,)) == (3.0, [[(1,), (1,)]])
    dearer: Ladder = [{0: [Cut(low, 0), Cut(high + 8, 1)]}, ladder[1]]
    cost, points = cheapest_chain([dearer], (2,))
    assert (cost, points[0][0]) == (10.0, (0,))


def test_bound_ends_a_search_that_cannot_succeed() -> None:
    ladders = as_ladders([[np.array([4.0, 3.0])], [np.array([5.0, 2.0])]])
    assert cheapest_chain(ladders, (2,))[0] == 5.0
    assert cheapest_chain(ladders, (2,), bound=5.5)[0] == 5.0
    assert cheapest_chain(ladders, (2,), bound=5.0) == (inf, [])


@pytest.mark.parametrize("seed", range(20))
def test_bound_never_hides_a_cheaper_chain(seed: int) -> None:
    random = np.random.default_rng(seed)
    ladders = as_ladders([[random.integers(0, 20, (3, 2, 2)).astype(float)] for _ in range(3)])
    cost, _ = cheapest_chain(ladders, (3, 2, 2))
    assert cheapest_chain(ladders, (3, 2, 2), bound=cost + 0.5)[0] == cost
    assert cheapest_chain(ladders, (3, 2, 2), bound=cost)[0] == inf


def test_lower_bound_from_parts() -> None:
    single = {frozenset([i]): cost for i, cost in enumerate((1.0, 2.0, 4.0))}
    assert lower_bound(single, 3) == 7
    pairs = single | {frozenset([0, 1]): 5.0, frozenset([0, 2]): 6.0, frozenset([1, 2]): 6.5}
    assert lower_bound({**single, frozenset([0, 1]): 5.0}, 3) == 9
    assert lower_bound(pairs, 3) == max(5 + 4, 6 + 2, 6.5 + 1, (5 + 6 + 6.5) / 2)
    assert lower_bound(pairs | {frozenset([0, 1, 2]): 11.0}, 3) == 11


@pytest.mark.parametrize(("count", "next_one"), [(1, 1), (7, 7), (11, 12), (13, 14), (59, 60), (64, 64), (121, 125), (1000, 1000)])
def test_smooth_numbers(count: int, next_one: int) -> None:
    assert smooth_above(count) == next_one
    assert all(
        any(n % p == 0 for p in (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 101, 103, 107, 109, 113))
        for n in range(count, next_one)
    )


def test_lattice_holds_all_divisors_in_multiples() -> None:
    counts = dict.fromkeys(DIMENSIONS, 1) | {"K": 12, "P": 13, "R": 3}
    lattice = lattice_for(counts)
    assert sorted(lattice.blocks["K"].tolist()) == [1, 2, 3, 4, 6, 12]
    assert sorted(lattice.blocks["P"].tolist()) == [1, 2, 7, 14]
    assert lattice.blocks["B"].tolist() == [1]
    assert lattice.fine_shape == (3, 2, 2, 2, 2)  # K: 2^2 and 3; P: 2 and 7; R: 3
    for fine in np.ndindex(*lattice.fine_shape):
        for axis in range(len(fine)):
            if fine[axis]:
                lower = lattice.point([n - (i == axis) for i, n in enumerate(fine)])
                assert all(lattice.point(fine)[d] % lower[d] == 0 for d in DIMENSIONS)
    assert lattice.point([n - 1 for n in lattice.fine_shape]) == dict.fromkeys(DIMENSIONS, 1) | {"K": 12, "P": 14, "R": 3}


def test_costs_spread_over_the_lattice_keep_their_place() -> None:
    lattice = lattice_for(dict.fromkeys(DIMENSIONS, 1) | {"K": 6, "C": 4})
    blocks = [lattice.blocks[d].reshape([-1 if d == e else 1 for e in DIMENSIONS]) for d in DIMENSIONS]
    value = blocks[DIMENSIONS.index("K")] * 100 + blocks[DIMENSIONS.index("C")]
    spread = lattice.spread(value)
    for fine in np.ndindex(*lattice.fine_shape):
        point = lattice.point(fine)
        assert isclose(spread[fine], point["K"] * 100 + point["C"])


def test_planted_error_in_the_running_minimum_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "_running_minimum", lambda values: values.copy())
    with pytest.raises(AssertionError):
        for seed in range(25):
            test_cheapest_of_all_chains(seed)
