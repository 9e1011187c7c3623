"""A better array never costs more: more room in a memory, more bits through a port or the network.

    for every mapping    its energy, cycles and energy-delay product never rise: a better array has all the mappings of a lesser one,
                         none of them dearer, so that the best of all mappings can only get better
    for the search       holds for energy without leakage, which is solved exactly, and wherever the answer is known to be optimal:
                         random problems of a few loops, and real layers (all of ResNet-18's: benchmarks/npu_monotone.py)
    not proven           where a search's budget runs out: only the bound is certain there

Rooms are set so tight that second copies fit or just do not; factors are 1.25, 2, 3 and one word. RIDGELINE_FULL=1: 4,000 mappings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.estimate.spatial import latency, mapper
from ridgeline.estimate.spatial.cost import evaluate
from ridgeline.estimate.spatial.exhaustive import Budget
from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.mapper import OBJECTIVES, map_layer
from ridgeline.target.array import SpatialArraySpec
from ridgeline.target.load import load_array
from tests.estimate.spatial.cases import Case, random_case
from tests.estimate.spatial.npu_support import changed, random_problem, reference, returning_problem, with_capacity
from tests.support import FULL, full_or_tenth

ROUNDING = 1e-12
EXACT = 1e-9
MORE = (1.25, 2.0, 3.0, 0.0)
"""Times as much; 0: one word more."""
WORD_BITS = 8


def with_more_room(array: SpatialArraySpec, name: str, times: float) -> SpatialArraySpec:
    bits = int(array.memories[name].capacity_bits.value)
    return with_capacity(array, name, int(bits * times) if times else bits + WORD_BITS)


def with_wider_port(array: SpatialArraySpec, name: str, port: str, times: float) -> SpatialArraySpec:
    """At least one word wider; words themselves stay as wide as they are, or traffic would be rounded anew."""
    data = array.model_dump()
    fields = data["memories"][name]["ports"][port]
    fields["word_bits"] = fields["word_bits"] or fields["bits_per_cycle"]
    words = fields["bits_per_cycle"] // fields["word_bits"]
    fields["bits_per_cycle"] = fields["word_bits"] * max(words + 1, ceil(words * times))
    return SpatialArraySpec.model_validate(data)


def with_wider_network(array: SpatialArraySpec, times: float) -> SpatialArraySpec:
    bits = array.noc.bits_per_cycle or 1
    return changed(array, noc=array.noc.model_dump() | {"bits_per_cycle": int(bits * times) if times else bits + WORD_BITS})


def better_arrays(array: SpatialArraySpec, random: Random) -> Iterator[tuple[str, SpatialArraySpec]]:
    """The array with one memory larger, one port wider or the network wider, each in turn."""
    for name, fields in array.memories.items():
        yield f"room of {name}", with_more_room(array, name, random.choice(MORE))
        for port in fields.ports:
            yield f"port {name}.{port}", with_wider_port(array, name, port, random.choice(MORE))
    if array.noc.bits_per_cycle:
        yield "network", with_wider_network(array, random.choice(MORE))


def tight(case: Case, random: Random) -> Case:
    """Memories just large enough for the mapping, or for some second copies; perhaps leaking, perhaps systolic."""
    layer, array, plan = case
    data = array.model_dump() | {"systolic": random.random() < 0.3}
    data["mac"]["static_w"]["value"] = random.choice((0.0, 2e-4))
    used: dict[str, int] = {}
    for refill in evaluate(layer, array, plan).refills:
        used[refill.memory] = used.get(refill.memory, 0) + refill.tile_bits
    for name, bits in used.items():
        room = int(max(bits, 64) * random.choice((1.0, 1.6, 2.0)))
        data["memories"][name]["capacity_bits"] = {"value": room, "unit": "b", "source": "test", "status": "assumed"}
    return Case(layer, SpatialArraySpec.model_validate(data), plan)


def dearer_when_better(case: Case, random: Random) -> list[str]:
    """Every change for the better that makes the mapping cost more; [] is the only good answer."""
    layer, array, plan = tight(case, random)
    before, found = evaluate(layer, array, plan), []
    for what, better in better_arrays(array, random):
        after = evaluate(layer, better, plan)
        for objective in OBJECTIVES:
            if after.objective(objective) > before.objective(objective) * (1 + ROUNDING):
                found.append(f"{what}: {objective} {before.objective(objective)} -> {after.objective(objective)}")
    return found


@given(st.randoms(use_true_random=False))
def test_no_generated_mapping_costs_more_on_a_better_array(random: Random) -> None:
    assert dearer_when_better(random_case(random, 150), random) == []


def test_no_mapping_costs_more_on_a_better_array() -> None:
    for seed in range(4000 if FULL else 25):
        assert dearer_when_better(random_case(Random(seed)), Random(seed)) == [], seed


def no_second_copies_in_large_memories(array: SpatialArraySpec, name: str, tiles: latency.Tiles, events: Any) -> bool:
    held = sum(tiles[name, op] for op in array.memories[name].operands)
    return 2 * held <= array.memories[name].capacity_bits.value < 3 * held


def waiting_for_every_word_of_width(unrolled: Any, operand: str, name: str, above: str, *more: Any) -> latency.Transfer:
    port = unrolled.array.memories[above].ports[unrolled.array.memories[above].port_of(operand, "rd_down")]
    found = TRANSFER(unrolled, operand, name, above, *more)
    return replace(found, asked_cycles=found.asked_cycles + port.bits_per_cycle // port.granule)


TRANSFER = latency._transfer


@pytest.mark.parametrize(
    ("function", "rule"), [("_has_room", no_second_copies_in_large_memories), ("_transfer", waiting_for_every_word_of_width)]
)
def test_planted_rule_that_punishes_the_better_array_is_caught(function: str, rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, function, rule)
    assert any(dearer_when_better(random_case(Random(seed)), Random(seed)) for seed in range(300))


def searched(count: int) -> Iterator[tuple[Random, Layer, SpatialArraySpec]]:
    for seed in range(9000, 9000 + count):
        random = Random(seed)
        problem = (random_problem, returning_problem)[seed % 3 == 0](random)
        yield random, problem.layer, problem.array


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_best_cost_never_rises(objective: str) -> None:
    for random, layer, array in searched(full_or_tenth(60)):
        before = map_layer(layer, array, "any", objective).cost.objective(objective)
        for what, better in better_arrays(array, random):
            after = map_layer(layer, better, "any", objective)
            assert after.lower_bound <= before * (1 + EXACT), what
            assert after.cost.objective(objective) <= before * (1 + EXACT), what


REAL = [("tpu-like", "layer2.0.conv2", "latency"), ("tpu-like", "layer3.0.conv1", "edp"), ("eyeriss-like", "layer4.0.downsample", "edp")]


@pytest.mark.parametrize(("target", "name", "objective"), REAL)
def test_best_cost_of_a_real_layer_never_rises(target: str, name: str, objective: str) -> None:
    """Both answers are optimal, so neither can be worse than the other's; some of the better arrays, all with RIDGELINE_FULL=1."""
    array, shape = (
        load_array(target),
        next(each for each in reference("layers.json", fall_back=True)["resnet18_unique"] if each["name"] == name),
    )
    dims = {ours: shape[theirs] for ours, theirs in {"K": "K", "C": "C", "P": "OY", "Q": "OX", "R": "FY", "S": "FX"}.items()}
    layer = Layer(name, dims, (shape["stride"],) * 2, (1, 1), (shape["pad"],) * 2, bits=array.bits)
    before, random = map_layer(layer, array, "any", objective), Random(name)
    assert before.optimal
    for what, better in list(better_arrays(array, random))[:: 1 if FULL else 6]:
        after = map_layer(layer, better, "any", objective)
        assert after.optimal and after.cost.objective(objective) <= before.cost.objective(objective) * (1 + EXACT), what


def two_loops() -> tuple[Layer, SpatialArraySpec, SpatialArraySpec]:
    problem = random_problem(Random(5064))
    return problem.layer, problem.array, with_wider_port(problem.array, "top", "all", 3.0)


def four_loops() -> tuple[Layer, SpatialArraySpec, SpatialArraySpec]:
    problem = random_problem(Random(5068))
    return problem.layer, problem.array, with_more_room(problem.array, "far", 2.0)


FOUND_BY_LOOKING_AT_ALL = {"a wider port": two_loops, "a larger memory": four_loops}


@pytest.mark.parametrize("which", FOUND_BY_LOOKING_AT_ALL)
@pytest.mark.parametrize("looking", [True, False])
def test_cycles_that_rose_before_every_mapping_was_looked_at(which: str, looking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, array, better = FOUND_BY_LOOKING_AT_ALL[which]()
    mapper._search.cache_clear()
    if not looking:
        monkeypatch.setattr(mapper, "Budget", lambda: Budget(cells=0))
    before, after = (map_layer(layer, one, "any", "latency") for one in (array, better))
    mapper._search.cache_clear()
    assert evaluate(layer, better, before.cost.plan).cycles <= before.cost.cycles  # the better array has this mapping too, and no dearer
    assert (after.cost.cycles <= before.cost.cycles) == looking and after.optimal == looking
