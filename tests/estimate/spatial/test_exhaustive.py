"""Small spaces looked at whole, against every order and every cut evaluated as it stands; and planted bounds that claim too much.

Arrays with one port or two a memory, answers that take a while, systolic grids, a network of few bits, leakage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import combinations_with_replacement, permutations, product
from math import inf
from random import Random
from typing import Any

import numpy as np
import pytest

from ridgeline.estimate.spatial import exhaustive, mapper
from ridgeline.estimate.spatial.cost import InfeasibleMappingError, LayerCost, evaluate
from ridgeline.estimate.spatial.exhaustive import Budget, best_of_all, can_be_listed
from ridgeline.estimate.spatial.mapper import OBJECTIVES, map_layer
from ridgeline.estimate.spatial.mapping import MappingPlan
from ridgeline.estimate.spatial.tilings import Tilings
from ridgeline.target.array import OPERANDS, SpatialArraySpec
from tests.estimate.spatial.npu_support import Problem, prime_loops, random_problem, returning_problem
from tests.support import full_or_tenth

MOST_LOOPS, MOST_MAPPINGS, ENOUGH = 4, 1200, Budget(1 << 60, 1 << 60, 1 << 60)


def varied(problem: Problem, random: Random) -> Problem:
    data = problem.array.model_dump()
    data["systolic"] = random.random() < 0.3
    data["mac"]["static_w"]["value"] = random.choice((0.0, 2e-4))
    data["noc"]["bits_per_cycle"] = random.choice((None, 8, 16))
    for fields in data["memories"].values():
        fields["latency_cycles"] = random.randint(0, 3)
        if random.random() < 0.4:
            port = fields["ports"]["all"]
            fields["ports"] = {"in": {**port, "direction": "write"}, "out": {**port, "direction": "read"}}
    return problem._replace(array=SpatialArraySpec.model_validate(data))


def plans(problem: Problem) -> list[MappingPlan]:
    places = [len(problem.array.ladder(op)) - 1 for op in OPERANDS]
    found = []
    for order in set(permutations(prime_loops(problem))):
        cuts = product(*(combinations_with_replacement(range(len(order) + 1), count) for count in places))
        found += [MappingPlan(problem.spatial, order, dict(zip(OPERANDS, each, strict=True))) for each in cuts]
        if len(found) > MOST_MAPPINGS:
            return []
    return found


def listed(count: int) -> Iterator[tuple[Problem, list[LayerCost]]]:
    """Problems small enough to list, and what every mapping that fits costs."""
    seed = 0
    while count:
        seed += 1
        problem = varied((random_problem, returning_problem)[seed % 3 == 0](Random(seed)), Random(seed))
        if len(prime_loops(problem)) > MOST_LOOPS or not (all_plans := plans(problem)):
            continue
        costs = []
        for plan in all_plans:
            with suppress(InfeasibleMappingError):
                costs.append(evaluate(problem.layer, problem.array, plan))
        count -= 1
        yield problem, costs


@cache
def small_problems() -> list[tuple[Problem, list[LayerCost]]]:
    return list(listed(full_or_tenth(60)))


def best(problem: Problem, objective: str, below: float = inf) -> tuple[LayerCost | None, bool]:
    return best_of_all(Tilings(problem.layer, problem.array, problem.spatial), objective, below, ENOUGH)


def wrong_answers() -> list[str]:
    found = []
    for number, (problem, costs) in enumerate(small_problems()):
        for objective in OBJECTIVES:
            least = min((cost.objective(objective) for cost in costs), default=inf)
            cost, whole = best(problem, objective)
            ours = cost.objective(objective) if cost else inf
            if not whole or ours != pytest.approx(least, rel=1e-9):
                found.append(f"{number} {objective}: {ours}, listed {least}, whole {whole}")
    return found


def test_the_best_of_everything_is_found() -> None:
    assert len(small_problems()) >= 6 and sum(bool(costs) for _, costs in small_problems()) >= 5
    assert wrong_answers() == []


def test_nothing_better_than_the_best_is_found() -> None:
    for problem, costs in small_problems():
        least = min((cost.objective("latency") for cost in costs), default=0.0)
        assert best(problem, "latency", least) == (None, True)


@pytest.mark.parametrize("share", [1.2, 0.0])
def test_planted_wrong_bounds_and_lost_chains_are_caught(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right, chains = exhaustive._Space.bound, exhaustive._Space.chains

    def one_less(self: Any, operand: str) -> exhaustive.Chains:
        found = chains(self, operand)
        return found.taken(np.arange(1, len(found.points)))

    if share:
        monkeypatch.setattr(exhaustive._Space, "bound", lambda self, chosen: share * right(self, chosen) + 2)
    else:
        monkeypatch.setattr(exhaustive._Space, "chains", one_less)
    assert wrong_answers()


def test_too_many_mappings_are_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = next(problem for problem, costs in small_problems() if len({cost.cycles for cost in costs}) > 2)
    tilings = Tilings(problem.layer, problem.array, problem.spatial)
    for empty in (Budget(costed=0), Budget(triples=0)):
        assert best_of_all(tilings, "latency", inf, empty) == (None, False)
    assert can_be_listed(tilings, Budget()) and not can_be_listed(tilings, Budget(chains=0))
    for limit in ("MOST_POINTS", "MOST_CHAINS"):
        monkeypatch.setattr(exhaustive, limit, 1)
        assert not can_be_listed(tilings, Budget())
        monkeypatch.undo()


@pytest.mark.parametrize("objective", ["latency", "edp"])
def test_the_mapper_looks_at_all_and_says_so(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(Random(30017))
    found = map_layer(problem.layer, problem.array, "any", objective)
    assert found.optimal
    mapper._search.cache_clear()
    nothing: Any = lambda *_: (None, False)  # noqa: E731
    monkeypatch.setattr(mapper, "best_of_all", nothing)
    without = map_layer(problem.layer, problem.array, "any", objective)
    mapper._search.cache_clear()
    assert without.cost.objective(objective) >= found.cost.objective(objective) and (objective == "edp" or not without.optimal)
