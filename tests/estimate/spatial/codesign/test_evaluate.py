"""A chip's worth against sums made here, and bounds that never exceed it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ridgeline.estimate.spatial.codesign.evaluate import Problem, bound_of, chip_of, evaluate_chip, from_json
from ridgeline.estimate.spatial.codesign.space import Choice, RegisterBits
from ridgeline.estimate.spatial.network import map_layers
from ridgeline.target.array import Cores, OperandBits, SpatialArraySpec
from ridgeline.workload.graph import Op
from tests.estimate.spatial.codesign.nets import BASE, SPACE, operand, pebble_net, pebble_problem

CHOICES = [
    Choice(fusion=False),
    Choice(rows=1, columns=1, buffer_bits=1024, bandwidth_bits=8),
    Choice(columns=1, bandwidth_bits=128, batch=2),
    Choice(precision=OperandBits(W=4, I=4, O=12, F=4), dataflow="ws"),
    Choice(cores=Cores(count=2), batch=2),
    Choice(cores=Cores(count=2, use="pipeline")),
    Choice(register_bits=RegisterBits(W=64, I=64, O=64), noc_bits=16),
]


def array_of(choice: Choice) -> SpatialArraySpec:
    array = chip_of(pebble_problem(), choice)
    assert isinstance(array, SpatialArraySpec)
    return array


def test_without_fusion_it_is_what_map_layers_says() -> None:
    array = array_of(Choice(rows=1))
    network = map_layers(pebble_net(), array)
    worth = evaluate_chip(pebble_problem(), Choice(rows=1, fusion=False))
    assert worth.latency_s == worth.sample_s == pytest.approx(network.seconds) and worth.energy_j == pytest.approx(
        network.energy_pj * 1e-12
    )
    assert worth.area_mm2 == array.area_mm2 and worth.utilisation == pytest.approx(network.utilisation)
    peak = max((layer.energy_pj - layer.mapped.cost.energy_by_pj["static"]) * 1e-12 / layer.mapped.cost.seconds for layer in network.layers)
    assert worth.power_w == pytest.approx(array.static_w + peak) and worth.fusion == () and worth.kept_bytes == 0


def test_fusion_is_reported_and_pays() -> None:
    apart, together = (evaluate_chip(pebble_problem(), Choice(fusion=fusion)) for fusion in (False, True))
    assert together.fusion == (("first", "second", "last"),) and together.kept_bytes == 192
    assert together.energy_j < apart.energy_j and together.latency_s < apart.latency_s and together.area_mm2 == apart.area_mm2


def test_batch_is_a_pass_in_time_and_a_sample_in_energy() -> None:
    worth = evaluate_chip(pebble_problem(1, 4), Choice(batch=4, fusion=False))
    network = map_layers(pebble_net(4), array_of(Choice()))
    assert worth.latency_s == pytest.approx(network.seconds) and worth.sample_s == pytest.approx(network.seconds / 4)
    assert worth.energy_j == pytest.approx(network.energy_pj * 1e-12 / 4)


def test_pipeline_leaks_for_an_interval_and_draws_all_stages() -> None:
    array = array_of(Choice(cores=Cores(count=2, use="pipeline")))
    network = map_layers(pebble_net(), array)
    worth = evaluate_chip(pebble_problem(), Choice(cores=Cores(count=2, use="pipeline")))
    dynamic = sum(layer.energy_pj - layer.static_pj for layer in network.layers) * 1e-12
    assert worth.sample_s == network.interval_s < worth.latency_s == pytest.approx(network.seconds)
    assert worth.energy_j == pytest.approx(dynamic + array.static_w * network.interval_s)
    assert worth.power_w >= array.static_w + dynamic / network.interval_s * (1 - 1e-12)


def test_models_add_up_and_the_hungriest_sets_the_power() -> None:
    one = pebble_net()
    pool = Op("pool", "pool", "pooling", "max_pool2d", "float32", (operand("last.out", (1, 2)),), (operand("pool.out", (1, 2)),), 2000)
    other = replace(one, model="other", ops=(one.ops[0], pool))
    both = evaluate_chip(Problem(BASE, {1: (one, other)}), Choice())
    alone = [evaluate_chip(Problem(BASE, {1: (each,)}), Choice()) for each in (one, other)]
    assert both.latency_s == pytest.approx(sum(each.latency_s for each in alone)) and both.power_w == max(each.power_w for each in alone)
    assert both.energy_j == pytest.approx(sum(each.energy_j for each in alone))
    assert [each["model"] for each in both.models] == ["pebble-net", "other"] and both.models[1]["host_s"] == pytest.approx(2e-6)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.key)
def test_bound_is_never_above_the_worth(choice: Choice) -> None:
    problem = pebble_problem(1, 2)
    worth, bound = evaluate_chip(problem, choice), bound_of(problem, choice, array_of(choice))
    assert 0 < bound.latency_s <= worth.latency_s and 0 < bound.sample_s <= worth.sample_s and 0 < bound.energy_j <= worth.energy_j


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("number", range(0, 200, 40))
def test_bounds_of_the_space(number: int, batch: int) -> None:
    problem, choice = pebble_problem(1, 2), replace(SPACE.choice(SPACE.picks(number)), batch=batch)
    worth, bound = evaluate_chip(problem, choice), bound_of(problem, choice, array_of(choice))
    assert bound.latency_s <= worth.latency_s and bound.sample_s <= worth.sample_s and bound.energy_j <= worth.energy_j


def test_bound_by_hand() -> None:
    """4 PEs, 128 + 128 + 64 MACs; 16 bits a cycle; bits of W, I and O of the three layers: 8, 8, 64; 32, 64, 32; 32, 2 words of 8."""
    problem, array = pebble_problem(), array_of(Choice())
    moved = [8 + 32 + 64, 8 + 64 + 32, 64 + 32 + 2]
    cycles = sum(max(macs / 4, words * 8 / 16) for macs, words in zip((128, 128, 64), moved, strict=True))
    apart, together = (bound_of(problem, Choice(fusion=fusion), array) for fusion in (False, True))
    assert apart.latency_s == pytest.approx(cycles / 1e8, rel=1e-8)
    energy = 320 * 0.3e-12 + sum(moved) * 100e-12 + array.static_w * cycles / 1e8
    assert apart.energy_j == pytest.approx(energy, rel=1e-8)
    kept = [8 + 32, 8, 64 + 2]  # words that must move: the first input, all weights, the last output
    cycles = sum(max(macs / 4, words * 8 / 16) for macs, words in zip((128, 128, 64), kept, strict=True))
    assert together.latency_s == pytest.approx(cycles / 1e8, rel=1e-8)
    narrow = array_of(Choice(buffer_bits=64 * 8 - 8))  # the first output does not fit, the second does
    cycles = sum(max(macs / 4, words * 8 / 16) for macs, words in zip((128, 128, 64), [8 + 32 + 64, 8 + 64, 64 + 2], strict=True))
    assert bound_of(problem, Choice(), narrow).latency_s == pytest.approx(cycles / 1e8, rel=1e-8)
    shared = narrow.model_copy(update={"cores": Cores(count=2)})  # half of it fits into each core's buffer
    cycles = sum(max(macs / 8, words * 8 / 16) for macs, words in zip((128, 128, 64), kept, strict=True))
    assert bound_of(problem, Choice(), shared).latency_s == pytest.approx(cycles / 1e8, rel=1e-8)


def test_impossible_chips_say_why() -> None:
    worth = evaluate_chip(pebble_problem(), Choice(register_bits=RegisterBits(W=2, I=2, O=2)))
    assert "smaller than one element" in worth.infeasible and worth.chip == {}
    full = BASE.model_copy(update={"memories": {**BASE.memories, "dram": BASE.memories["dram"].model_copy(
        update={"capacity_bits": BASE.memories["dram"].capacity_bits.model_copy(update={"value": 64.0})})}})  # fmt: skip
    worth = evaluate_chip(pebble_problem(base=full), Choice())
    assert "memory dram" in worth.infeasible and worth.latency_s == 0 and worth.area_mm2 > 0


def test_json_and_back_is_exact() -> None:
    worth = evaluate_chip(pebble_problem(), SPACE.choice(SPACE.picks(123)))
    assert from_json(json.loads(json.dumps(worth.to_json()))) == worth


def test_work_key_follows_the_layers_only() -> None:
    problem = pebble_problem(1, 2)
    renamed = replace(problem, workloads={1: (replace(pebble_net(), model="x"),)})
    assert problem.work_key(1) == renamed.work_key(1) != problem.work_key(2)
    assert problem.portable().work_key(1) == problem.work_key(1)
