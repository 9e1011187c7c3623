"""The dynamic programming against trying every labelling."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from ridgeline.transform.graph.layout.choose import LAST, NEVER, PLAIN, Problem, Value, choose, total_seconds
from tests.support import full_or_tenth


def random_problem(seed: int) -> Problem:
    """A small graph with branches, joins, fixed ops, shared and unshared copies and edges that cannot be converted."""
    draw = random.Random(seed)
    count = draw.randint(2, 9)
    seconds = []
    for _ in range(count):
        pair = [draw.randint(0, 20) / 4.0, draw.randint(0, 20) / 4.0]
        if draw.random() < 0.2:
            pair[draw.randrange(2)] = math.inf
        seconds.append((pair[0], pair[1]))
    values = []
    for producer in range(count - 1):
        later = list(range(producer + 1, count))
        consumers = tuple(sorted(draw.sample(later, draw.randint(1, min(4, len(later))))))
        both_free = all(math.inf not in seconds[op] for op in (producer, *consumers))
        cost = NEVER if both_free and draw.random() < 0.1 else (draw.randint(0, 12) / 4.0, draw.randint(0, 12) / 4.0)
        values.append(Value(producer, consumers, cost, shared=draw.random() < 0.8))
    return Problem(tuple(seconds), tuple(values))


def brute_force(problem: Problem) -> float:
    return min(total_seconds(problem, labels) for labels in itertools.product((0, 1), repeat=len(problem.seconds)))


@pytest.mark.parametrize("seed", range(full_or_tenth(600)))
def test_equals_brute_force(seed: int) -> None:
    problem = random_problem(seed)
    found = choose(problem)
    assert found.exact
    assert found.seconds == pytest.approx(brute_force(problem), abs=1e-12)
    assert total_seconds(problem, found.labels) == found.seconds


@pytest.mark.parametrize("width", [0, 1, 2])
def test_narrow_tables_still_give_a_good_labelling(width: int) -> None:
    """Cut points instead of wide tables: never worse than every op in one layout, and it says that it is not exact."""
    worse = 0
    for seed in range(60):
        problem = random_problem(seed)
        found, best = choose(problem, width=width), brute_force(problem)
        assert found.seconds >= best - 1e-12
        uniform = [[label if seconds[label] < math.inf else 1 - label for seconds in problem.seconds] for label in (PLAIN, LAST)]
        assert found.seconds <= min(total_seconds(problem, labels) for labels in uniform)
        worse += found.seconds > best + 1e-12
        assert not (found.exact and found.seconds > best + 1e-12)
    assert worse <= 30


def test_a_copy_is_paid_once() -> None:
    """Three consumers that save 2 s each in channels-last are worth one conversion of 3 s, not three of them."""
    seconds = ((0.0, math.inf), *((2.0, 0.0),) * 3)
    shared = Problem(seconds, (Value(0, (1, 2, 3), (3.0, 3.0)),))
    assert choose(shared).labels == (PLAIN, LAST, LAST, LAST)
    assert choose(shared).seconds == 3.0
    alone = Problem(seconds, (Value(0, (1, 2, 3), (3.0, 3.0), shared=False),))
    assert choose(alone).labels == (PLAIN,) * 4


def test_a_region_between_fixed_ends_pays_for_its_two_conversions() -> None:
    """Five ops that save 1 s each between a plain input and a plain output: worth 2 x 2 s, not 2 x 3 s."""
    seconds = ((0.0, math.inf), *((1.0, 0.0),) * 5, (0.0, math.inf))
    for convert_s, expected in ((2.0, LAST), (3.0, PLAIN)):
        values = tuple(Value(op, (op + 1,), (convert_s, convert_s)) for op in range(6))
        found = choose(Problem(seconds, values))
        assert set(found.labels[1:6]) == {expected}


def test_long_residual_net_is_exact() -> None:
    """2,000 ops with a skip at every second one: the tables stay small."""
    draw = random.Random(1)
    count = 2000
    seconds = tuple((draw.random(), draw.random()) for _ in range(count))
    values = tuple(Value(op, tuple({min(op + 1, count - 1), min(op + 2, count - 1)}), (0.3, 0.3)) for op in range(0, count - 1))
    assert choose(Problem(seconds, values)).exact
