"""Deriving under a skip budget and a cost limit, against trying every architecture."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from ridgeline.core.errors import OptionError
from ridgeline.search.differentiable.derive import Limit, derive, entries_of, groups_of, scores_of, skip_count, summed_cost
from ridgeline.search.spaces.space import load_space
from tests.support import full_or_tenth

NB201 = load_space("nb201", channels=4, cells=1)
DARTS = load_space("darts", channels=4, cells=3)


def score(space, weights: np.ndarray, point) -> float:
    return float(sum(scores_of(weights)[entry] for entry in entries_of(space, point)))


@pytest.mark.parametrize("space", [NB201, DARTS], ids=["nb201", "darts"])
def test_without_limits_it_is_the_spaces_own(space) -> None:
    random = np.random.default_rng(0)
    for _ in range(full_or_tenth(100)):
        weights = random.normal(size=_shape(space))
        assert derive(space, scores_of(weights)) == space.derive(weights)
        # the greedy rule of DARTS maximises the summed log share: the search over groups finds nothing better
        best = derive(space, scores_of(weights), skips=99, limit=Limit(np.full(_shape(space), 1e-9), 1.0))
        assert score(space, weights, best) == pytest.approx(score(space, weights, space.derive(weights)))


def _shape(space) -> tuple[int, int]:
    return (28, 8) if space.name == "darts" else (6, 5)


def test_best_of_all_cells_within_budget_and_limit() -> None:
    random = np.random.default_rng(1)
    for _ in range(full_or_tenth(20)):
        weights, costs = 2 * random.normal(size=(6, 5)), random.uniform(0, 1, size=(6, 5))
        weights[:, 0] += 2.0  # skips are attractive
        budget, most = int(random.integers(0, 3)), float(random.uniform(1.2, 3.0))
        points = [p for p in product(range(5), repeat=6) if p.count(0) <= budget and sum(costs[e, o] for e, o in enumerate(p)) <= most]
        if not points:
            continue
        found = derive(NB201, scores_of(weights), skips=budget, limit=Limit(costs, most))
        assert skip_count(NB201, found) <= budget and summed_cost(NB201, found, costs) <= most
        within = [p for p in points if summed_cost(NB201, p, costs) <= most * (1 - 6 / 4096)]  # rounding up six costs
        assert score(NB201, weights, found) >= max(score(NB201, weights, p) for p in within) - 1e-9


def test_skip_budget_counts_the_normal_cell_alone() -> None:
    weights = np.zeros((28, 8))
    weights[:, 3] = 5.0
    assert skip_count(DARTS, derive(DARTS, scores_of(weights))) == 8
    found = derive(DARTS, scores_of(weights + np.random.default_rng(2).normal(size=(28, 8)) * 0.1), skips=2)
    assert skip_count(DARTS, found) == 2
    skips = [DARTS.decisions[i].choices[v] for i, v in enumerate(found)].count("skip_connect")
    assert skips == 10  # all eight of the reduction cell stay


def test_a_predictor_that_is_no_sum_is_kept_to() -> None:
    weights, costs = np.random.default_rng(3).normal(size=(28, 8)), np.random.default_rng(4).uniform(0.1, 1, size=(28, 8))
    plain = derive(DARTS, scores_of(weights))

    def predict(point) -> float:
        return 3.0 + 1.3 * summed_cost(DARTS, point, costs)  # overhead, and more than the table says

    most = 3.0 + 0.6 * (predict(plain) - 3.0)
    found = derive(DARTS, scores_of(weights), skips=2, limit=Limit(costs, most, predict))
    assert predict(found) <= most < predict(plain)


def test_limits_nothing_can_keep() -> None:
    with pytest.raises(OptionError, match="cheapest"):
        derive(NB201, np.zeros((6, 5)), limit=Limit(np.ones((6, 5)), 5.9))
    with pytest.raises(OptionError, match="no edges"):
        groups_of(load_space("macro"))


@pytest.mark.parametrize("share", [0.001, 0.02, 0.3])
def test_best_within_a_limit_on_what_is_no_sum(share: float) -> None:
    """nb201: an edge that leads nowhere costs nothing, so a prediction is no sum over edges. Every cell is tried."""
    random = np.random.default_rng(5)
    costs = random.uniform(0.2, 1.0, size=(6, 5))
    costs[:, NB201.ops.index("none")] = 0.0

    def predict(point) -> float:
        live = NB201.canonical(point)
        return 1.0 + summed_cost(NB201, live, costs) + 0.3 * (len(set(live)) > 2)

    points = list(product(range(5), repeat=6))
    predicted = np.array([predict(point) for point in points])
    most = float(np.quantile(predicted, share))
    for _ in range(3):
        weights = 2 * random.normal(size=(6, 5))
        kept = [point for point, cost in zip(points, predicted, strict=True) if cost <= most and skip_count(NB201, point) <= 2]
        found = derive(NB201, scores_of(weights), skips=2, limit=Limit(costs, most, predict))
        assert predict(found) <= most and skip_count(NB201, found) <= 2
        assert score(NB201, weights, found) == pytest.approx(max(score(NB201, weights, point) for point in kept))
    with pytest.raises(OptionError, match="cheapest"):
        derive(NB201, scores_of(weights), limit=Limit(costs, float(predicted.min()) * 0.99, predict))


def test_a_large_space_within_a_limit_on_what_is_no_sum() -> None:
    """darts: the part that is no sum is taken as large as it was ever seen to be, so attempts end, within the limit."""
    random = np.random.default_rng(6)
    weights, costs = 2 * random.normal(size=(28, 8)), random.uniform(0.2, 1.0, size=(28, 8))

    def predict(point) -> float:
        return summed_cost(DARTS, point, costs) * (1.1 if point[0] else 1.0) + 2.0

    plain = derive(DARTS, scores_of(weights))
    for share in (0.95, 0.85, 0.75):
        most = share * predict(plain)
        assert predict(derive(DARTS, scores_of(weights), limit=Limit(costs, most, predict))) <= most
    with pytest.raises(OptionError, match="cheapest"):
        derive(DARTS, scores_of(weights), limit=Limit(costs, 2.0, predict))
