"""The choice of ranks: hull and greedy buying against every combination there is."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import TransformError
from ridgeline.transform.factor.ranks import Rung, allot, energy_shares, hull
from tests.support import full_or_tenth


@st.composite
def ladder(draw: st.DrawFn) -> list[Rung]:
    costs = sorted(draw(st.lists(st.integers(1, 60), min_size=1, max_size=5, unique=True)))
    energies = sorted(draw(st.lists(st.floats(1 / 64, 1.0, width=32), min_size=len(costs), max_size=len(costs))))
    return [Rung((rank + 1,), cost, energy) for rank, (cost, energy) in enumerate(zip(costs, energies, strict=True))]


@settings(max_examples=full_or_tenth(500), deadline=None)
@given(rungs=ladder())
def test_the_hull_is_concave_and_nothing_lies_above_it(rungs: list[Rung]) -> None:
    corners = hull(rungs)
    slopes = [(b.energy - a.energy) / (b.cost - a.cost) for a, b in itertools.pairwise(corners)]
    assert all(first >= second > 0 for first, second in itertools.pairwise([*slopes, 1e-300]))
    for rung in rungs:
        below = [corner for corner in corners if corner.cost <= rung.cost]
        above = [corner for corner in corners if corner.cost >= rung.cost]
        if not above:
            assert rung.energy <= below[-1].energy
            continue
        a, b = below[-1], above[0]
        share = (rung.cost - a.cost) / max(b.cost - a.cost, 1)
        assert rung.energy <= a.energy + share * (b.energy - a.energy) + 1e-11


@settings(max_examples=full_or_tenth(500), deadline=None)
@given(ladders=st.lists(ladder(), min_size=1, max_size=4), spend=st.floats(0, 1))
def test_allotted_ranks_are_within_the_budget_and_one_segment_of_the_best(ladders: list[list[Rung]], spend: float) -> None:
    named = {str(index): rungs for index, rungs in enumerate(ladders)}
    least, most = sum(rungs[0].cost for rungs in ladders), sum(rungs[-1].cost for rungs in ladders)
    budget = least + spend * (most - least)
    chosen = allot(named, budget)
    assert sum(rung.cost for rung in chosen.values()) <= budget
    found = sum(rung.energy for rung in chosen.values())
    affordable = [c for c in itertools.product(*ladders) if sum(r.cost for r in c) <= budget]
    best = max(sum(r.energy for r in c) for c in affordable)
    largest = max((b.energy - a.energy for rungs in ladders for a, b in itertools.pairwise(hull(rungs))), default=0.0)
    assert best - largest - 1e-11 <= found <= best + 1e-12
    if spend == 1.0:
        assert found == pytest.approx(best)


def test_energy_goes_where_it_costs_least() -> None:
    steep = [Rung((1,), 10, 0.5), Rung((2,), 20, 0.9), Rung((), 100, 1.0)]
    flat = [Rung((1,), 10, 0.1), Rung((2,), 20, 0.2), Rung((), 100, 1.0)]
    assert {name: rung.ranks for name, rung in allot({"steep": steep, "flat": flat}, 40).items()} == {"steep": (2,), "flat": (2,)}
    assert {name: rung.ranks for name, rung in allot({"steep": steep, "flat": flat}, 120).items()} == {"steep": (2,), "flat": ()}


def test_a_budget_below_rank_one_everywhere_is_refused() -> None:
    with pytest.raises(TransformError, match="rank 1 everywhere already costs 20"):
        allot({"a": [Rung((1,), 10, 0.5)], "b": [Rung((1,), 10, 0.5)]}, 19)


def test_shares_of_nothing_are_whole() -> None:
    assert energy_shares(torch.zeros(3)) == [1.0, 1.0, 1.0]
    assert energy_shares(torch.tensor([3.0, 1.0])) == [0.75, 1.0]
