"""The search against the whole space, listed; and what holds for every mapping it returns.

    exhaustive   every order of the prime loops, every place of every cut, capacities checked ──> least energy of an unrolling
    Tilings.solve ──> the same, to rounding; with two private memories for O, or one that streams inputs, at least a true bound

Holds and is tested: the best energy never rises with capacity or with cheaper accesses, the bound on cycles never rises with
bandwidth, `any` needs no more energy than any dataflow. Small spaces are looked at whole (test_exhaustive.py). In larger ones the
cycles the search finds (latency, edp) are heuristic: they may be higher on a better array, and on an array of a few PEs the search for
latency may end behind that for energy; what is certain is that a mapping once found is no slower there, and that the bound stays below.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from math import ceil, inf, isclose
from random import Random
from typing import Any

import numpy as np
import pytest

from ridgeline.core.errors import OptionError
from ridgeline.estimate.spatial import chain, counts, mapper
from ridgeline.estimate.spatial.cost import InfeasibleMappingError, LayerCost, evaluate
from ridgeline.estimate.spatial.layer import REDUCTION, RELEVANT, Layer
from ridgeline.estimate.spatial.mapper import OBJECTIVES, Mapped, map_layer
from ridgeline.estimate.spatial.mapping import MappingPlan
from ridgeline.estimate.spatial.tilings import Tilings
from ridgeline.estimate.spatial.unrolling import unrollings
from ridgeline.target.array import DATAFLOWS, DIMENSIONS, OPERANDS, OperandBits, SpatialArraySpec
from ridgeline.target.load import load_array, load_target
from tests.estimate.spatial.cases import memory, small_array
from tests.estimate.spatial.npu_support import (
    Problem,
    exhaustive,
    literally_all,
    prime_loops,
    problems,
    random_problem,
    returning_problem,
    with_bandwidth,
    with_capacity,
    with_memory,
)
from tests.support import full_or_tenth

EXACT = 1e-9


def solved(problem: Problem, dataflow: str = "any") -> tuple[MappingPlan | None, float]:
    """(plan, lower bound on the energy) of the search under the problem's unrolling."""
    tilings = Tilings(problem.layer, problem.array, problem.spatial, dataflow, False)
    plan, value = tilings.solve({(cut.operand, cut.place): cut.energy_pj for cuts in tilings.cuts.values() for cut in cuts})
    return plan, value + tilings.fixed_energy_pj


def two_private_sums(array: SpatialArraySpec) -> bool:
    return sum(set(array.memories[name].shared_over) < set(array.axes) for name in array.ladder("O")) > 1


def assert_least_energy(problem: Problem) -> None:
    """The search finds the least energy there is, or says how much less there might be."""
    best, best_plan = exhaustive(problem)
    plan, bound = solved(problem)
    assert (plan is None) == (best_plan is None)
    if plan is None or best_plan is None:
        return
    found = evaluate(problem.layer, problem.array, plan).energy_pj
    assert isclose(evaluate(problem.layer, problem.array, best_plan).energy_pj, best, rel_tol=EXACT)
    assert bound <= best * (1 + EXACT) and found >= best * (1 - EXACT)
    if not two_private_sums(problem.array):
        assert isclose(found, best, rel_tol=EXACT) and isclose(bound, best, rel_tol=EXACT)


PROBLEMS = [*problems(full_or_tenth(250)), *problems(full_or_tenth(80), returning_problem)]


@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_search_finds_the_least_energy_of_an_unrolling(number: int) -> None:
    assert_least_energy(PROBLEMS[number])


def test_taking_operands_apart_changes_nothing() -> None:
    small = [p for p in PROBLEMS if len(prime_loops(p)) <= 3 and sum(len(p.array.ladder(op)) for op in OPERANDS) <= 7][: full_or_tenth(40)]
    assert len(small) >= 4
    for problem in small:
        assert isclose(literally_all(problem), exhaustive(problem)[0], rel_tol=EXACT)


def test_problems_reach_what_makes_them_hard(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = 0
    overflow = Tilings._overflow

    def counting(self: Tilings, *args: Any) -> Any:
        nonlocal splits
        split = overflow(self, *args)
        splits += split is not None
        return split

    monkeypatch.setattr(Tilings, "_overflow", counting)
    seen = dict.fromkeys(("room divided", "sums return", "reduction lanes", "two private sums", "exact"), 0)
    for problem in PROBLEMS:
        splits = 0
        plan, _ = solved(problem)
        if plan is None:
            continue
        found = evaluate(problem.layer, problem.array, plan)
        seen["room divided"] += splits > 0
        seen["sums return"] += any(a.operand == "O" and a.direction == "wr_down" and a.words for a in found.accesses)
        seen["reduction lanes"] += any(d in REDUCTION for loops in problem.spatial.values() for d, _ in loops)
        seen["two private sums"] += two_private_sums(problem.array)
        seen["exact"] += not two_private_sums(problem.array)
    assert all(n >= 2 for n in seen.values()), seen
    assert seen["exact"] >= 20


@pytest.mark.parametrize("error", ["room not divided", "sums return for nothing", "half the orders"])
def test_planted_error_in_the_search_is_caught(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if error == "room not divided":
        monkeypatch.setattr(Tilings, "_overflow", lambda *a: None)
    elif error == "sums return for nothing":
        monkeypatch.setattr(Tilings, "_returned_to_pes", lambda self, blocks: np.zeros((1,) * len(DIMENSIONS), np.int64))
    else:
        monkeypatch.setattr(chain, "_running_minimum", lambda values: values.copy())
    with pytest.raises((AssertionError, InfeasibleMappingError, StopIteration)):
        for problem in PROBLEMS:
            assert_least_energy(problem)


STREAMING = list(problems(full_or_tenth(80), refills=("stream",)))


@pytest.mark.parametrize("number", range(len(STREAMING)))
def test_streaming_inputs_are_bounded_honestly(number: int) -> None:
    # Which loop a memory slides along is settled after the search, so that the mapping found may not be the best.
    problem = STREAMING[number]
    best, best_plan = exhaustive(problem)
    plan, bound = solved(problem)
    assert (plan is None) == (best_plan is None)
    assert bound <= best * (1 + EXACT)
    if plan:
        assert evaluate(problem.layer, problem.array, plan).energy_pj >= best * (1 - EXACT)


def searches(count: int) -> Iterator[Problem]:
    return (random_problem(Random(1000 + seed)) for seed in range(count))


def mapped(problem: Problem, dataflow: str = "any", objective: str = "energy") -> Mapped | None:
    try:
        return map_layer(problem.layer, problem.array, dataflow, objective)
    except InfeasibleMappingError:
        return None


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_bounds_are_below_and_optimal_means_equal(objective: str) -> None:
    for problem in searches(full_or_tenth(150)):
        found = map_layer(problem.layer, problem.array, "any", objective)
        value = found.cost.objective(objective)
        json.dumps(found.to_json(), allow_nan=False)  # plain numbers, whatever they were computed with
        assert 0 < found.lower_bound <= value * (1 + EXACT)
        assert found.optimal == (found.lower_bound >= value * (1 - EXACT))
        assert found.gap == pytest.approx(max(0.0, 1 - found.lower_bound / value))
        assert found.cost == evaluate(problem.layer, problem.array, found.cost.plan)
        if objective == "energy" and not two_private_sums(problem.array):
            assert found.optimal
        assert 1 <= found.solved <= found.unrollings + 1


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_same_search_gives_the_same_answer(objective: str) -> None:
    for problem in searches(5):
        answers = []
        for _ in range(2):
            mapper._search.cache_clear()
            answers.append(map_layer(problem.layer, problem.array, "any", objective))
        assert answers[0] == answers[1]


def test_answers_are_kept_by_all_that_they_depend_on() -> None:
    array = load_array("array-16")
    layer = Layer("conv", {"K": 4, "P": 4, "R": 3}, (2, 1), (1, 1), (1, 0), (9, 1))
    changes: tuple[dict[str, Any], ...] = (
        {"dims": {"K": 5, "P": 4, "R": 3}}, {"stride": (3, 1)}, {"dilation": (2, 1)}, {"padding": (0, 0)}, {"input_size": (8, 1)},
        {"bits": OperandBits(W=4)},
    )  # fmt: skip
    key = mapper._Key(layer, array, "any", "edp")
    assert key == mapper._Key(replace(layer, name="other"), load_array("array-16"), "any", "edp")
    others = [mapper._Key(replace(layer, **change), array, "any", "edp") for change in changes]
    others += [mapper._Key(layer, array, "ws", "edp"), mapper._Key(layer, array, "any", "energy")]
    faster = array.model_copy(update={"clock_hz": array.clock_hz.model_copy(update={"value": 1e9 + 1})})
    others.append(mapper._Key(layer, faster, "any", "edp"))
    assert all(other != key for other in others)


def test_answer_carries_the_name_of_the_layer_asked_for() -> None:
    problem = next(searches(1))
    names = [map_layer(Layer(name, problem.layer.dims, bits=problem.layer.bits), problem.array).cost.layer.name for name in "ab"]
    assert names == ["a", "b"]


def test_no_dataflow_needs_less_energy_than_any() -> None:
    worse = []
    for problem in searches(full_or_tenth(300)):
        free = mapped(problem)
        assert free is not None
        for dataflow in DATAFLOWS:
            bound_to = mapped(problem, dataflow)
            if bound_to and bound_to.cost.energy_pj < free.cost.energy_pj * (1 - EXACT):
                lanes = [dict(m.cost.plan.spatial) for m in (bound_to, free)]
                worse.append((dataflow, bound_to.cost.energy_pj, free.cost.energy_pj, dict(problem.layer.dims), lanes))
    assert worse == []


def test_objectives_agree_on_what_fits() -> None:
    for problem in searches(full_or_tenth(120)):
        for dataflow in ("any", *DATAFLOWS):
            found = {objective: mapped(problem, dataflow, objective) is not None for objective in OBJECTIVES}
            assert len(set(found.values())) == 1, (dataflow, found, problem)


def stays(cost: LayerCost, array: SpatialArraySpec, operand: str, dims: tuple[str, ...]) -> bool:
    """Whether no loop over `dims` that runs twice lies above the PEs' memory of an operand, or above their registers."""
    plan, ladder = cost.plan, array.ladder(operand)
    private = len(ladder) > 1 and not array.memories[ladder[0]].shared_over
    position = plan.refill_position(operand, plan.cuts[operand][0] if private else 0)
    reach = {dim: plan.unrolled(dim) * plan.block(dim, position) for dim in dims}
    return all(reach[dim] >= cost.layer.dims[dim] for dim in dims)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_dataflows_hold_in_what_is_returned(objective: str) -> None:
    seen = dict.fromkeys(DATAFLOWS, 0)
    for problem in searches(full_or_tenth(120)):
        layer, array = problem.layer, problem.array
        for dataflow in DATAFLOWS:
            answer = mapped(problem, dataflow, objective)
            if answer is None:
                continue
            seen[dataflow] += 1
            cost, plan = answer.cost, answer.cost.plan
            if dataflow == "rs":
                check_row_stationary(cost, array)
                continue
            operand = {"ws": "W", "is": "I", "os": "O"}[dataflow]
            assert all(d in RELEVANT[operand] for loops in plan.spatial.values() for d, _ in loops)
            first = array.ladder(operand)[0]
            private = len(array.ladder(operand)) > 1 and not array.memories[first].shared_over
            if operand != "O" or private:
                assert stays(cost, array, operand, tuple(d for d in DIMENSIONS if d not in RELEVANT[operand])), (dataflow, problem, plan)
            if dataflow == "ws":
                came = next(
                    a for a in cost.accesses if (a.memory, a.operand, a.direction) == (first, "W", "wr_down" if private else "rd_down")
                )
                assert came.elements == layer.elements("W")
            if dataflow == "os" and private:
                left = next(a for a in cost.accesses if (a.memory, a.operand, a.direction) == (first, "O", "rd_up"))
                assert left.elements == layer.elements("O")
                assert cost.words(first, "O", "wr_down") == 0
                assert cost.words(array.ladder("O")[1], "O", "rd_down") == 0
    assert all(n >= 3 for n in seen.values()), seen


def check_row_stationary(cost: LayerCost, array: SpatialArraySpec) -> None:
    plan, dims = cost.plan, cost.layer.dims
    along = {axis: dict(loops) for axis, loops in plan.spatial.items()}
    folds = {axis: ceil(dims["R"] / size) for axis, size in array.axes.items()}
    rows = (
        [axis for axis, loops in along.items() if loops.get("R", 1) == ceil(dims["R"] / folds[axis])] if dims["R"] > 1 else list(array.axes)
    )
    outs = [axis for axis, loops in along.items() if loops.get("P", 1) > 1] if dims["P"] > 1 else list(array.axes)
    assert any(a != b for a in rows for b in outs), plan
    assert not any(d in ("Q", "S") for loops in plan.spatial.values() for d, _ in loops)
    assert stays(cost, array, "W", ("Q", "S")), plan


def test_filter_rows_that_fit_no_axis_are_folded() -> None:
    array = small_array({"x": 2, "y": 2}, {"reg": memory("W"), "top": memory("WIO", "xy")})
    layer = Layer("l", {"R": 3, "P": 4, "K": 2})
    plan = map_layer(layer, array, "rs", "energy").cost.plan
    assert (plan.unrolled("R"), plan.unrolled("P"), plan.block("R", len(plan.loops))) == (2, 2, 2)
    assert map_layer(layer, array, "any", "energy").cost.energy_pj > 0


def test_a_failed_search_warns_of_nothing() -> None:
    # One filter row a PE is more than a register of one element holds, whatever the unrolling.
    array = small_array({"x": 2, "y": 1}, {"reg": memory("I"), "top": memory("WIO", "xy")})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InfeasibleMappingError):
            map_layer(Layer("l", {"B": 3, "K": 2, "R": 3, "S": 4}), array, "rs", "energy")


def test_infeasible_layer_names_the_memory_and_the_bytes() -> None:
    array = small_array({"x": 2}, {"reg": memory("WI", capacity_bits=20), "top": memory("WIO", "x", capacity_bits=800)})
    with pytest.raises(InfeasibleMappingError) as caught:
        map_layer(Layer("big", {"K": 20, "C": 10}, bits=OperandBits(O=8)), array)
    # 200 weights, 10 inputs, 20 outputs of 8 bits: 230 bytes, 130 more than 100
    assert "layer big needs 130 B more than memory top of small has" in str(caught.value)
    wide = Layer("wide", {"K": 2, "C": 3}, bits=OperandBits(W=16, I=16))
    with pytest.raises(InfeasibleMappingError, match="layer wide needs 2 B more than memory reg"):
        map_layer(wide, array)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"objective": "speed"}, "objective 'speed'"),
        ({"dataflow": "wrong"}, "dataflow 'wrong'"),
        ({"dataflow": "os"}, "its control runs ws, rs"),
    ],
)
def test_options_that_do_not_exist(options: dict[str, str], said: str) -> None:
    array = small_array({"x": 2}, {"top": memory("WIO", "x")}, dataflows=("ws", "rs"))
    with pytest.raises(OptionError) as caught:
        map_layer(Layer("l", {"K": 2}), array, **options)
    assert said in str(caught.value)


def test_any_on_an_array_with_some_dataflows_is_the_best_of_these() -> None:
    for problem in searches(full_or_tenth(100)):
        array = SpatialArraySpec.model_validate(problem.array.model_dump() | {"dataflows": ("ws", "os")})
        each = [m.cost.energy_pj for flow in ("ws", "os") if (m := mapped(problem._replace(array=array), flow))]
        free = mapped(problem._replace(array=array))
        assert (free.cost.energy_pj if free else inf) == pytest.approx(min(each, default=inf))


def test_unroll_limits_which_dimensions_an_axis_takes() -> None:
    layer = Layer("l", {"K": 4, "C": 4, "P": 4})
    array = small_array({"x": 4, "y": 4}, {"top": memory("WIO", "xy")}, unroll={"x": ("C",), "y": ("P", "K")})
    plan = map_layer(layer, array).cost.plan
    assert all(d == "C" for d, _ in plan.spatial["x"]) and all(d in ("P", "K") for d, _ in plan.spatial["y"])


def test_more_room_never_costs_energy() -> None:
    for number, problem in enumerate(searches(full_or_tenth(100))):
        names = list(problem.array.memories)[:-1] or list(problem.array.memories)
        name = names[number % len(names)]
        larger = with_capacity(problem.array, name, problem.array.memories[name].capacity_bits.value * 2)
        before, after = mapped(problem), mapped(problem._replace(array=larger))
        assert after and before
        assert after.cost.energy_pj <= before.cost.energy_pj * (1 + EXACT) or two_private_sums(problem.array)
        assert after.lower_bound <= before.lower_bound * (1 + EXACT)


def test_cheaper_accesses_never_cost_energy() -> None:
    for number, problem in enumerate(searches(full_or_tenth(60))):
        name = list(problem.array.memories)[number % len(problem.array.memories)]
        cheaper = with_memory(problem.array, name, read_pj=problem.array.memories[name].read_pj.value / 2)
        before, after = mapped(problem), mapped(problem._replace(array=cheaper))
        assert after and before
        assert after.lower_bound <= before.lower_bound * (1 + EXACT)


def test_more_bandwidth_never_raises_the_bound_on_cycles() -> None:
    for problem in searches(full_or_tenth(150)):
        layer, array, spatial = problem
        wider = with_bandwidth(array, 2)
        assert Tilings(layer, wider, spatial).latency_bound() <= Tilings(layer, array, spatial).latency_bound()
        before, after = (map_layer(layer, one, "any", "latency") for one in (array, wider))
        assert after.lower_bound <= before.lower_bound * (1 + EXACT)
        assert evaluate(layer, wider, before.cost.plan).cycles <= before.cost.cycles


def test_bound_on_cycles_is_below_every_mapping() -> None:
    for number, problem in enumerate(PROBLEMS):
        layer, array, spatial = problem
        bound, random = Tilings(layer, array, spatial).latency_bound(), Random(number)
        for _ in range(20):
            order = tuple(random.sample(loops := prime_loops(problem), len(loops)))
            cuts = {op: tuple(sorted(random.randint(0, len(order)) for _ in array.ladder(op)[1:])) for op in OPERANDS}
            with suppress(InfeasibleMappingError):
                assert evaluate(layer, array, MappingPlan(spatial, order, cuts)).cycles >= bound


def test_objectives_pull_their_way() -> None:
    for problem in searches(full_or_tenth(80)):
        energy, latency, edp = (
            map_layer(problem.layer, problem.array, "any", objective).cost for objective in ("energy", "latency", "edp")
        )
        assert energy.energy_pj <= min(latency.energy_pj, edp.energy_pj) * (1 + EXACT) or two_private_sums(problem.array)
        assert edp.edp <= energy.edp * (1 + EXACT)


def test_fast_mappings_of_a_real_layer_are_fast() -> None:
    array = load_target("tpu-like")
    assert isinstance(array, SpatialArraySpec)
    layer = Layer("layer3.0.conv1", {"K": 256, "C": 128, "P": 14, "Q": 14, "R": 3, "S": 3}, (2, 2), padding=(1, 1), bits=array.bits)
    found = {objective: map_layer(layer, array, "any", objective) for objective in OBJECTIVES}
    assert found["latency"].cost.cycles <= 1.05 * min(one.cost.cycles for one in found.values())
    assert found["latency"].gap < 0.2


def test_mapped_layer_in_json() -> None:
    problem = next(searches(1))
    found = map_layer(problem.layer, problem.array, "any", "energy")
    data = found.to_json()
    assert data["objective"] == "energy" and data["optimal_within_space"] == found.optimal
    assert data["energy_pj"] == found.cost.energy_pj and data["lower_bound"] == found.lower_bound and data["gap"] == found.gap
    assert data["shape"]["dims"] == dict(problem.layer.dims)
    assert (data["unrollings"], data["unrollings_searched"]) == (found.unrollings, found.solved)


@pytest.mark.parametrize("room", [counts.MOST_KEPT, 2000, 0])
def test_what_unrollings_have_in_common_changes_nothing(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of every cut of every unrolling, found alone and after all the others; also where not all is kept."""
    monkeypatch.setattr(counts, "MOST_KEPT", room)
    layer, array = Layer("conv", {"K": 12, "C": 6, "P": 7, "Q": 7, "R": 3, "S": 3}, padding=(1, 1)), load_array("eyeriss-like")
    known, found = counts.Known(), 0
    for one in unrollings(layer, array, "any")[::9]:
        for with_cycles in (False, True):
            alone = Tilings(layer, array, one.spatial, with_cycles=with_cycles)
            shared = Tilings(layer, array, one.spatial, with_cycles=with_cycles, known=known)
            for mine, theirs in zip((c for op in "WIO" for c in alone.cuts[op]), (c for op in "WIO" for c in shared.cuts[op]), strict=True):
                assert np.array_equal(mine.energy_pj, theirs.energy_pj) and np.array_equal(mine.tile_elements, theirs.tile_elements)
                assert mine.port_cycles.keys() == theirs.port_cycles.keys()
                assert all(np.array_equal(cycles, theirs.port_cycles[name]) for name, cycles in mine.port_cycles.items())
                found += 1
    assert found > 100 and (len(known.kept) > 100) == (room > 2000)


def test_what_is_kept_of_another_layer_is_wrong() -> None:
    """The test above would see it: what is known is of one layer on one array."""
    array, known = load_array("eyeriss-like"), counts.Known()
    first, second = (Layer("conv", {"K": k, "C": 6, "P": 7}, padding=(0, 0)) for k in (12, 11))
    spatial = unrollings(first, array, "any")[0].spatial
    Tilings(first, array, spatial, known=known)
    alone, shared = Tilings(second, array, spatial), Tilings(second, array, spatial, known=known)
    assert any(not np.array_equal(a.energy_pj, b.energy_pj) for op in "WIO" for a, b in zip(alone.cuts[op], shared.cuts[op], strict=True))
