"""Single steps from a mapping: what a step is, that it keeps what it must, and that the end is no worse than the start."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from ridgeline.estimate.spatial.cost import InfeasibleMappingError, evaluate
from ridgeline.estimate.spatial.mapper import OBJECTIVES, map_layer
from ridgeline.estimate.spatial.polish import in_primes, keeps_dataflow, neighbours, polished
from ridgeline.target.array import DATAFLOWS, SpatialArraySpec
from tests.estimate.spatial.npu_support import random_problem, with_bandwidth, with_capacity
from tests.support import full_or_tenth

WORSE = 0.01
"""How much worse a larger memory may make what is not searched exactly; the largest seen, not on these arrays, is 0.9 %."""


def problems(count: int, first: int = 7000):  # type: ignore[no-untyped-def]
    return (random_problem(Random(first + seed)) for seed in range(count))


def test_loops_in_primes_are_the_same_mapping() -> None:
    for problem in problems(full_or_tenth(100)):
        cost = map_layer(problem.layer, problem.array).cost
        plan = in_primes(cost.plan)
        again = evaluate(problem.layer, problem.array, plan)
        assert (again.energy_pj, again.cycles) == (cost.energy_pj, cost.cycles)
        assert all(factor in (2, 3, 5, 7) or all(factor % p for p in (2, 3, 5, 7)) for _, factor in plan.loops)


def test_neighbours_are_one_step_away_and_whole() -> None:
    for problem in problems(full_or_tenth(60)):
        plan = in_primes(map_layer(problem.layer, problem.array).cost.plan)
        for near in neighbours(plan):
            assert sorted(near.loops) == sorted(plan.loops)
            moved = sum(abs(a - b) for op in plan.cuts for a, b in zip(plan.cuts[op], near.cuts[op], strict=True))
            assert (moved, near.loops == plan.loops) in ((1, True), (0, False))
            assert all(a <= b for cuts in near.cuts.values() for a, b in pairwise((0, *cuts, len(near.loops))))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_polishing_never_makes_worse_and_leaves_no_better_step(objective: str) -> None:
    for problem in problems(full_or_tenth(60)):
        start = map_layer(problem.layer, problem.array, "any", "latency" if objective == "energy" else "energy").cost
        end = polished(start, problem.array, objective, 10_000)
        assert end.objective(objective) <= start.objective(objective)
        for near in neighbours(in_primes(end.plan)):
            try:
                assert evaluate(problem.layer, problem.array, near).objective(objective) >= end.objective(objective)
            except InfeasibleMappingError:
                continue


def test_steps_keep_the_dataflow() -> None:
    kept = broken = 0
    for number, problem in enumerate(problems(60)):
        try:
            plan = in_primes(map_layer(problem.layer, problem.array, DATAFLOWS[number % 4], "edp").cost.plan)
        except InfeasibleMappingError:
            continue
        assert keeps_dataflow(problem.layer, problem.array, plan)
        near = [keeps_dataflow(problem.layer, problem.array, one) for one in neighbours(plan)]
        kept, broken = kept + sum(near), broken + len(near) - sum(near)
    assert kept > 200 and broken > 5  # some steps would leave it, and are seen


def leaking(array: SpatialArraySpec) -> SpatialArraySpec:
    data = array.model_dump()
    data["mac"]["static_w"]["value"] = 2e-4
    return SpatialArraySpec.model_validate(data)


@pytest.mark.parametrize("objective", ["edp", "latency", "energy with leakage"])
def test_more_room_and_more_bandwidth(objective: str) -> None:
    """More bandwidth never costs; a larger memory at most WORSE of the objective."""
    name = objective.partition(" ")[0]
    for problem in problems(full_or_tenth(60), first=5000):
        layer = problem.layer
        array = leaking(problem.array) if "leakage" in objective else problem.array
        before = map_layer(layer, array, "any", name).cost.objective(name)
        assert map_layer(layer, with_bandwidth(array, 2), "any", name).cost.objective(name) <= before * (1 + 1e-9)
        for memory in list(array.memories)[:-1]:
            larger = with_capacity(array, memory, int(array.memories[memory].capacity_bits.value) * 2)
            assert map_layer(layer, larger, "any", name).cost.objective(name) <= before * (1 + WORSE), memory
