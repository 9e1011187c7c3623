"""Every mapping looked at, against every order and every cut evaluated as it stands; bounds; and planted ones that claim too much.

Arrays with one port or two a memory, answers that take a while, systolic grids, a network of few bits, leakage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement, permutations, product
from random import Random
from typing import Any

import numpy as np
import pytest

from ridgeline.estimate.spatial import exhaustive, listing, mapper, narrow
from ridgeline.estimate.spatial.causes import Causes
from ridgeline.estimate.spatial.cost import InfeasibleMappingError, LayerCost, evaluate
from ridgeline.estimate.spatial.exhaustive import Budget, Everything
from ridgeline.estimate.spatial.listing import Listing
from ridgeline.estimate.spatial.mapper import OBJECTIVES, map_layer
from ridgeline.estimate.spatial.mapping import MappingPlan
from ridgeline.estimate.spatial.narrow import Narrowing, least_energy_pj
from ridgeline.estimate.spatial.points import Points
from ridgeline.estimate.spatial.tilings import Tilings
from ridgeline.target.array import OPERANDS, SpatialArraySpec
from tests.estimate.spatial.npu_support import Problem, prime_loops, random_problem, returning_problem
from tests.support import full_or_tenth

MOST_LOOPS, MOST_MAPPINGS, PLENTY = 4, 1200, 1 << 60


def varied(problem: Problem, random: Random) -> Problem:
    data = problem.array.model_dump()
    data["systolic"] = random.random() < 0.3
    data["mac"]["static_w"]["value"] = random.choice((0.0, 2e-4))
    data["noc"]["bits_per_cycle"] = random.choice((None, 8, 16))
    for fields in data["memories"].values():
        fields["latency_cycles"] = random.randint(0, 3)
        if set(fields["operands"]) in ({"I"}, {"I", "O"}) and random.random() < 0.6:
            fields["refill"] = "stream"
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


def tilings(problem: Problem) -> Tilings:
    return Tilings(problem.layer, problem.array, problem.spatial)


def looked_at(problem: Problem, objective: str, start: LayerCost, budget: Budget | None = None) -> Everything:
    """Everything, measured against some mapping."""
    everything = Everything(objective, start, budget or Budget(PLENTY, PLENTY, PLENTY))
    everything.add(0.0, lambda: tilings(problem))
    everything.finish()
    return everything


def cases() -> Iterator[tuple[Problem, list[LayerCost], str]]:
    for problem, costs in small_problems():
        for objective in OBJECTIVES if costs else ():
            yield problem, costs, objective


def wrong_answers() -> list[str]:
    found = []
    for number, (problem, costs, objective) in enumerate(cases()):
        ranked = sorted(costs, key=lambda cost: cost.objective(objective))
        for start in (ranked[-1], ranked[len(ranked) // 2], ranked[0]):
            everything, least = looked_at(problem, objective, start), ranked[0].objective(objective)
            if everything.below != pytest.approx(least, rel=1e-9) or everything.bound != everything.below:
                found.append(f"{number} {objective}: {everything.below}, listed {least}, bound {everything.bound}")
    return found


def test_the_best_of_everything_is_found() -> None:
    assert len(small_problems()) >= 6 and sum(bool(costs) for _, costs in small_problems()) >= 5
    assert wrong_answers() == []


@pytest.mark.parametrize("most", [1, 4])
def test_what_is_too_much_to_list_is_halved(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    halved = []
    monkeypatch.setattr(listing, "MOST_PAIRS", most)
    monkeypatch.setattr(exhaustive, "_halves", lambda *given: halved.append(given) or HALVES(*given))
    assert wrong_answers() == [] and len(halved) > 20


HALVES = exhaustive._halves


def bounds_above_costs() -> list[str]:
    """Bounds of narrowing and of listing, by whichever memories are crowded, that some mapping they speak of is below."""
    found, spoken_of = [], 0
    for number, (problem, costs, objective) in enumerate(cases()):
        points, below = Points(tilings(problem)), 2 * max(cost.objective(objective) for cost in costs)
        least_pj, bounds = least_energy_pj(points.tilings), []
        for crowded in (None, *exhaustive._subsets(points.shared)):
            causes = Causes(points, crowded)
            narrowing = Narrowing(causes, objective, below, least_pj, lambda _: below, causes.allowed())  # noqa: B023
            narrowed = narrowing.narrowed({})
            bounds.append(narrowed.bound)
            for bound, chosen in Listing(causes, objective, narrowed).mappings(below) or ():
                places = [[tuple(int(i) for i in np.unravel_index(place, points.shape)) for place in cuts] for cuts in chosen]
                plan = points.tilings.plan(places)
                blocks = [tuple(points.tilings.lattice.point(place).values()) for cuts in places for place in cuts]
                if exhaustive._refilled_at(plan) != tuple(blocks):
                    continue  # tiles stay for longer than the points say: other points, listed too, say so
                with suppress(InfeasibleMappingError):
                    cost, spoken_of = evaluate(problem.layer, problem.array, plan), spoken_of + 1
                    if bound > cost.objective(objective) * (1 + 1e-9):
                        found.append(f"{number} {objective}: bound {bound} of {chosen}, which costs {cost.objective(objective)}")
        least = min(cost.objective(objective) for cost in costs)
        if max(bounds[0], min(bounds[1:])) > least * (1 + 1e-9):
            found.append(f"{number} {objective}: bounds {bounds}, least {least}")
    assert spoken_of > 300
    return found


def test_no_mapping_is_below_its_bound() -> None:
    assert bounds_above_costs() == []


def test_bounds_are_close() -> None:
    """Of most problems the bound alone, before anything is listed, is within a tenth of the best."""
    ratios = []
    for problem, costs, objective in cases():
        points, best = Points(tilings(problem)), min(costs, key=lambda cost: cost.objective(objective))
        causes, limit = Causes(points, None), best.objective(objective) * 1.5
        narrowing = Narrowing(causes, objective, limit, least_energy_pj(points.tilings), lambda _: limit, causes.allowed())  # noqa: B023
        ratios.append(narrowing.narrowed({}).bound / best.objective(objective))
    assert sorted(ratios)[len(ratios) // 2] > 0.9


@pytest.mark.parametrize("planted", ["bound", "chains", "drain", "room", "chord"])
def test_planted_wrong_bounds_and_lost_chains_are_caught(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bound, chains, cut, line = Listing.bound, Listing.chains, Points._cut, Narrowing._line

    def one_less(self: Any, operand: str) -> listing.Chains:
        found = chains(self, operand)
        return found.taken(np.arange(1, len(found.points)))

    def wider(self: Any, *given: Any) -> Any:
        found = cut(self, *given)
        return replace(found, tile_bits=found.tile_bits * 1.5)

    def tighter(self: Any) -> narrow.Line:
        found = line(self)
        return replace(found, limit=0.9 * found.limit)

    if planted == "bound":
        monkeypatch.setattr(Listing, "bound", lambda self, chosen, closely=False: 1.2 * bound(self, chosen, closely) + 2)
    elif planted == "chains":
        monkeypatch.setattr(Listing, "chains", one_less)
    elif planted == "drain":
        monkeypatch.setattr(Points, "_cut", lambda self, *given: replace(cut(self, *given), ends=3 * cut(self, *given).ends + 1))
    elif planted == "room":
        monkeypatch.setattr(Points, "_cut", wider)
    else:
        monkeypatch.setattr(Narrowing, "_line", tighter)
    assert wrong_answers() or bounds_above_costs()


def test_too_many_mappings_are_not_claimed() -> None:
    problem, costs = next((p, costs) for p, costs in small_problems() if len({cost.cycles for cost in costs}) > 2)
    start = max(costs, key=lambda cost: cost.cycles)
    for empty in (Budget(costed=0), Budget(cells=0)):
        everything = looked_at(problem, "latency", start, empty)
        assert everything.best is start and everything.bound < everything.below and everything.unsettled()


@pytest.mark.parametrize("objective", ["latency", "edp"])
def test_the_mapper_looks_at_all_and_says_so(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(Random(30017))
    found = map_layer(problem.layer, problem.array, "any", objective)
    assert found.optimal
    mapper._search.cache_clear()
    monkeypatch.setattr(mapper, "Budget", lambda: Budget(cells=0))
    without = map_layer(problem.layer, problem.array, "any", objective)
    mapper._search.cache_clear()
    assert without.cost.objective(objective) >= found.cost.objective(objective) and not without.optimal


def test_weights_of_a_game() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        values = random.random((random.integers(1, 6), random.integers(1, 8))) * 10.0 ** random.integers(-3, 9)
        weights = narrow.best_mix(values)
        assert (weights >= 0).all() and weights.sum() == pytest.approx(1)
        others = random.dirichlet(np.ones(len(values)), 2000)
        assert (weights @ values).min() >= (others @ values).min(axis=1).max() - 1e-9 * values.max()
