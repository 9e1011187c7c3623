"""The cheapest chain through every point against every chain there is, on lattices small enough to list them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from math import inf, prod
from typing import Any

import numpy as np
import pytest

from ridgeline.estimate.spatial import through
from ridgeline.estimate.spatial.through import Cheapest
from tests.estimate.spatial.test_chain import Point, rises

Tables = list[list[np.ndarray[Any, Any]]]
SHAPES = [(2, 2), (3, 2), (4,), (2, 2, 2), (3, 1, 2)]
LENGTHS = [(1, 1, 1), (2, 1, 0), (1, 2, 1), (0, 1, 2), (2, 1, 1)]


def tables(seed: int) -> tuple[Tables, Point]:
    random = np.random.default_rng(seed)
    shape, lengths = SHAPES[seed % 5], LENGTHS[seed // 5 % 5]
    if prod(shape) ** sum(lengths) > 10_000:
        lengths = (1, 1, 1)
    return [[np.where(random.random(shape) < 0.2, inf, random.integers(0, 9, shape) * 1.0) for _ in range(n)] for n in lengths], shape


def chains(costs: Tables, shape: Point) -> Iterator[tuple[float, list[list[int]]]]:
    """Every chain: its cost, and the flat places of each operand's cuts."""
    for chosen in product(list(np.ndindex(*shape)), repeat=sum(map(len, costs))):
        if not rises(list(chosen)):
            continue
        left, places, cost, fits = list(chosen), [], 0.0, True
        for cuts in costs:
            mine, left = left[: len(cuts)], left[len(cuts) :]
            fits = fits and all(a <= b for low, high in pairwise(mine) for a, b in zip(low, high, strict=True))
            cost += sum(float(table[point]) for table, point in zip(cuts, mine, strict=True))
            places.append([int(np.ravel_multi_index(point, shape)) for point in mine])
        if fits:
            yield cost, places


def wrong(seed: int) -> list[str]:
    costs, shape = tables(seed)
    listed = list(chains(costs, shape))
    found = Cheapest(costs, shape)
    least = min((cost for cost, _ in listed), default=inf)
    errors = [] if found.all == least else [f"least {found.all}, listed {least}"]
    for operand, cuts in enumerate(found.through()):
        for at, values in enumerate(cuts):
            for place, value in enumerate(values):
                best = min((cost for cost, places in listed if places[operand][at] == place), default=inf)
                errors += [] if value == best else [f"cut {operand}.{at} at {place}: {value}, listed {best}"]
    if np.isfinite(least) and (least, found.points()) not in listed:
        errors.append(f"{found.points()} is no cheapest chain")
    return errors


@pytest.mark.parametrize("seed", range(25))
def test_cheapest_through_every_point(seed: int) -> None:
    assert wrong(seed) == []


def test_some_operands_alone() -> None:
    costs, shape = tables(3)
    found = Cheapest(costs, shape)
    for operands in ([0], [1], [2], [0, 1], [0, 2], [1, 2]):
        some = [cuts if operand in operands else [] for operand, cuts in enumerate(costs)]
        assert found.of(operands) == min((cost for cost, _ in chains(some, shape)), default=inf)


def test_planted_running_minimum_along_too_few_axes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def but_the_last(stack: np.ndarray[Any, Any], outwards: bool) -> None:
        for axis in range(1, stack.ndim - 1):
            along = stack.swapaxes(0, axis)[:: -1 if outwards else 1]
            for i in range(1, len(along)):
                np.minimum(along[i], along[i - 1], out=along[i])

    monkeypatch.setattr(through, "_running_minimum", but_the_last)
    assert any(wrong(seed) for seed in range(5))
