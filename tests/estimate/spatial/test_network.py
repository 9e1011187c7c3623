"""Whole networks: who runs what, what the host costs, how cores share the work, and that totals are sums."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ridgeline.core.errors import RidgelineError
from ridgeline.estimate.spatial.breakdown import energy_terms
from ridgeline.estimate.spatial.cost import InfeasibleMappingError
from ridgeline.estimate.spatial.layer import layers_of
from ridgeline.estimate.spatial.mapper import map_layer
from ridgeline.estimate.spatial.network import SCHEMA, NetworkMapping, estimate_on_array, map_layers, profile_of, slowest_stage
from ridgeline.estimate.spatial.replay import mappings_to_json, replay
from ridgeline.target.array import SpatialArraySpec
from ridgeline.workload.capture import capture
from ridgeline.workload.graph import Op, Workload
from tests.estimate.spatial.cases import memory, small_array
from tests.estimate.spatial.npu_support import changed
from tests.estimate.support import matmul, pointwise, tensor, workload

HOST = {"ops_per_s": 1e9, "bytes_per_s": 2e9, "pj_per_op": 3.0, "pj_per_byte": 5.0}


class Net(nn.Module):
    """relu (host), conv, batch norm, relu (epilogue), depthwise, add, gelu, pool, (host) linear, softmax (host)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.dw, self.pool, self.fc = nn.Conv2d(8, 8, 3, groups=8), nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn(self.conv(torch.relu(x))))
        x = nn.functional.gelu(self.dw(x) + 1)
        return torch.softmax(self.fc(self.pool(x).flatten(1)), -1)


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


@cache
def net() -> Workload:
    return capture(Net().eval(), inputs=(torch.zeros(2, 3, 8, 8),))


def array(**more: Any) -> SpatialArraySpec:
    memories = {
        "reg": memory("W", capacity_bits=64, read_pj=0.1, write_pj=0.1),
        "buffer": memory("IO", "xy", granule=64, capacity_bits=8 * 4096, read_pj=1.0, write_pj=1.0),
        "dram": memory("WIO", "xy", granule=64, read_pj=20.0, write_pj=20.0),
    }
    return small_array({"x": 4, "y": 4}, memories, host=HOST, **more)


def names(network: NetworkMapping) -> tuple[list[str], list[str]]:
    return [layer.op.name for layer in network.layers], [op.op.name for op in network.host]


def test_multiplications_go_to_the_array_and_the_rest_to_the_host() -> None:
    on_array, on_host = names(map_layers(net(), array(), objective="energy"))
    assert on_array == ["conv2d", "conv2d_1", "linear"]
    # the first relu works on the input, gelu on what the host added: neither passes the array's way out
    assert on_host == ["relu", "add", "gelu", "adaptive_avg_pool2d", "softmax"]


@pytest.mark.parametrize(
    ("epilogue", "more"),
    [((), ["batch_norm", "relu_1"]), (("batch_norm",), ["relu_1"]), (("activation",), ["batch_norm", "relu_1"])],
)
def test_what_the_way_out_cannot_do_goes_to_the_host(epilogue: tuple[str, ...], more: list[str]) -> None:
    _, on_host = names(map_layers(net(), array(epilogue=epilogue), objective="energy"))
    assert on_host == ["relu", *more, "add", "gelu", "adaptive_avg_pool2d", "softmax"]


def test_work_the_array_does_not_take_goes_to_the_host() -> None:
    network = map_layers(net(), array(runs=("conv",)), objective="energy")
    on_array, on_host = names(network)
    assert on_array == ["conv2d"]
    assert {"conv2d_1", "linear"} <= set(on_host)
    why = {op.op.name: op.why for op in network.host}
    assert why["conv2d_1"] == "small does not run depthwise" and why["linear"] == "small does not run matmul"
    assert why["softmax"] == "softmax is not multiplications of two operands"


def test_what_the_host_changed_in_place_is_no_longer_what_the_array_gave() -> None:
    added = Op("add_", "add_", "pointwise", "add_", "float32", (tensor("y", 12), tensor("x", 12)), (tensor("y", 12),), 12)
    work = workload(matmul(4, 3, 5), added, pointwise("relu", 12, "y", "z"))
    assert names(map_layers(work, array(), objective="energy")) == (["linear"], ["add_", "relu"])


def test_host_time_is_the_longer_of_work_and_traffic() -> None:
    # 1000 operations at 1 Gop/s, 2000 elements of 8 bits at 2 GB/s: 1 us both; more of either is what counts.
    busy = pointwise("busy", 1000, "x", "y", "erf")
    network = map_layers(workload(busy), array())
    (op,) = network.host
    assert op.seconds == pytest.approx(1e-6)
    assert op.energy_pj == pytest.approx(1000 * 3 + 2000 * 5)
    (often,) = map_layers(workload(replace(busy, calls=3)), array()).host
    assert (often.seconds, often.energy_pj) == (pytest.approx(3 * op.seconds), pytest.approx(3 * op.energy_pj))
    network = map_layers(workload(busy), array(bits={"O": 32, "F": 32}))
    assert network.host[0].seconds == pytest.approx(4e-6)
    assert (network.cycles, network.utilisation, network.seconds) == (0, 0.0, pytest.approx(4e-6))


def test_layers_are_mapped_as_by_themselves() -> None:
    network = map_layers(net(), array(), dataflow="ws", objective="energy")
    for one in network.layers:
        (layer,) = layers_of(one.op, array().bits)
        assert one.mapped == map_layer(layer, array(), "ws", "energy")
        assert (one.macs, one.cycles, one.energy_pj) == (layer.macs, one.mapped.cost.cycles, one.mapped.cost.energy_pj)


def test_totals_are_sums() -> None:
    network = map_layers(net(), array(), objective="energy")
    cycles = sum(one.mapped.cost.cycles for one in network.layers)
    assert network.cycles == cycles
    assert network.seconds == pytest.approx(cycles / 1e9 + sum(op.seconds for op in network.host))
    assert network.interval_s == pytest.approx(network.seconds)
    assert network.energy_pj == pytest.approx(sum(o.energy_pj for o in network.layers) + sum(o.energy_pj for o in network.host))
    assert network.macs == sum(op.matmul_flops for op in net().ops) // 2
    assert network.utilisation == pytest.approx(network.macs / (cycles * 16))


def test_calls_are_counted() -> None:
    once, often = matmul(4, 6, 5), replace(matmul(4, 6, 5), calls=3)
    one, three = (map_layers(workload(op), array(), objective="energy") for op in (once, often))
    assert (three.cycles, three.macs) == (3 * one.cycles, 3 * one.macs)
    assert three.energy_pj == pytest.approx(3 * one.energy_pj)
    row = three.layers[0].to_json()
    assert (row["calls"], row["cycles"], row["energy_pj"]) == (3, three.cycles, pytest.approx(three.energy_pj))


def test_one_layer_by_name() -> None:
    assert names(map_layers(net(), array(), layer="fc", objective="energy")) == (["linear"], [])
    assert names(map_layers(net(), array(), layer="conv2d_1", objective="energy")) == (["conv2d_1"], [])
    with pytest.raises(RidgelineError) as caught:
        map_layers(net(), array(), layer="fcc")
    assert "unknown layer 'fcc'" in str(caught.value) and "did you mean fc?" in str(caught.value)
    with pytest.raises(RidgelineError):
        map_layers(net(), array(), layer="relu")  # nothing to map


def test_progress_is_told() -> None:
    told: list[str] = []
    map_layers(net(), array(), objective="energy", progress=told.append)
    assert len(told) == len([op for op in net().ops if op.kind != "view"])
    assert told[1] == f"2 of {len(told)}: conv"


def test_layer_that_fits_nowhere_is_an_error_with_its_name() -> None:
    small = array()
    tiny = changed(small, memories=small.model_dump()["memories"] | {"dram": memory("WIO", "xy", granule=64, capacity_bits=256)})
    with pytest.raises(InfeasibleMappingError, match=r"linear.*dram"):
        map_layers(workload(matmul(8, 8, 8)), tiny)


@pytest.mark.parametrize("objective", ["energy", "latency", "edp"])
def test_cores_split_a_layer_along_the_best_dimension(objective: str) -> None:
    work, cores = workload(matmul(12, 10, 5)), 4
    many = array(cores={"count": cores})
    (one,) = map_layers(work, many, objective=objective).layers
    (layer,) = layers_of(work.ops[0], many.bits)
    single, values = array(), {}
    for dim in "GKPB":
        share = -(-layer.dims[dim] // cores)
        if share < layer.dims[dim]:
            cost, used = map_layer(layer.with_dims(**{dim: share}), single, "any", objective).cost, -(-layer.dims[dim] // share)
            ports = max(c for name, c in cost.port_cycles.items() if name.startswith("dram."))
            energy, cycles = cost.energy_pj * used, max(cost.cycles, used * ports)
            values[dim] = ({"energy": energy, "latency": cycles, "edp": energy * cycles}[objective], used, energy, cycles)
    assert set(values) == {"K", "P"}
    best = min(values, key=lambda dim: values[dim][0])
    assert values[one.split][0] == pytest.approx(values[best][0])
    _, used, energy, cycles = values[one.split]
    assert (one.cores, one.cycles) == (used, cycles) and one.energy_pj == pytest.approx(energy)
    assert one.macs == layer.macs
    assert one.to_json()["split"] == one.split


def test_cores_share_the_ports_of_the_outermost_memory() -> None:
    # So much traffic for so little work that four cores are as slow as their common port.
    (one,) = map_layers(workload(matmul(1, 256, 64)), array(cores={"count": 4}), objective="latency").layers
    cost = one.mapped.cost
    assert one.cycles == 4 * max(c for name, c in cost.port_cycles.items() if name.startswith("dram.")) > cost.cycles


def test_layer_with_nothing_to_split_runs_on_one_core() -> None:
    (one,) = map_layers(workload(matmul(1, 1, 64)), array(cores={"count": 4})).layers
    assert (one.cores, one.split) == (1, "") and "split" not in one.to_json()


def leaking(**more: Any) -> SpatialArraySpec:
    """1 W of the multipliers, 2 of the buffer, 4 of the outermost memory."""
    data = array(mac={"energy_pj": 1.0, "static_w": 1 / 16}, **more).model_dump()
    for name, watts in (("buffer", 2.0), ("dram", 4.0)):
        data["memories"][name]["static_w"] = watts
    return SpatialArraySpec.model_validate(data)


@pytest.mark.parametrize("shape", [(12, 10, 5), (1, 256, 64), (1, 1, 64)])  # split; waiting for the common port; nothing to split
def test_several_cores_leak_as_one_chip(shape: tuple[int, int, int]) -> None:
    chip = leaking(cores={"count": 4})
    assert chip.static_w == pytest.approx(4 * (1 + 2) + 4)
    network = map_layers(workload(replace(matmul(*shape), calls=2)), chip, objective="energy")
    (one,) = network.layers
    cost = one.mapped.cost
    dynamic = (cost.energy_pj - cost.energy_by_pj["static"]) * one.cores * 2
    assert one.energy_pj == pytest.approx(dynamic + 16 * one.cycles / 1e9 * 1e12)
    assert one.to_json()["energy_pj"] == one.energy_pj == pytest.approx(sum(energy_terms(one).values()))
    again = replay(network.workload, chip, "linear", mappings_to_json(network), "energy")
    assert again.energy_pj == pytest.approx(network.energy_pj)


def test_a_pipeline_leaks_for_an_interval_a_result() -> None:
    work = workload(*(matmul(m, 8, 8, f"l{i}", source=f"v{i}", result=f"v{i + 1}") for i, m in enumerate((4, 30, 8, 16))))
    chip = leaking(cores={"count": 2, "use": "pipeline"})
    network = map_layers(work, chip, objective="latency")
    costs = [one.mapped.cost for one in network.layers]
    dynamic = sum(cost.energy_pj - cost.energy_by_pj["static"] for cost in costs)
    assert network.energy_pj == pytest.approx(dynamic + chip.static_w * network.interval_s * 1e12)


def test_pipeline_gives_a_result_every_slowest_stage() -> None:
    work = workload(*(matmul(m, 8, 8, f"l{i}", source=f"v{i}", result=f"v{i + 1}") for i, m in enumerate((4, 30, 8, 16))))
    network = map_layers(work, array(cores={"count": 2, "use": "pipeline"}), objective="energy")
    assert all(one.cores == 1 for one in network.layers)
    times = [one.cycles / 1e9 for one in network.layers]
    halves = min(max(sum(times[:cut]), sum(times[cut:])) for cut in range(5))
    assert network.interval_s == pytest.approx(halves)
    assert network.interval_s < network.seconds == pytest.approx(sum(times))


def test_the_port_that_stages_share_can_be_the_slowest() -> None:
    # Nothing but weights that are used once: two cores ask for twice what the only port can bring.
    work = workload(*(replace(matmul(1, 128, 64, f"l{i}", source=f"v{i}", result=f"v{i + 1}"), calls=2) for i in range(2)))
    network = map_layers(work, array(cores={"count": 2, "use": "pipeline"}), objective="latency")
    traffic = sum(2 * one.mapped.cost.port_cycles["dram.all"] for one in network.layers)
    assert network.interval_s == pytest.approx(traffic / 1e9)
    assert traffic > 1.5 * max(one.cycles for one in network.layers)


def test_host_can_be_the_slowest_stage() -> None:
    slow = pointwise("slow", 1_000_000, "y", "z", "erf")
    network = map_layers(workload(matmul(4, 4, 4), slow), array(cores={"count": 2, "use": "pipeline"}))
    assert network.interval_s == pytest.approx(network.host[0].seconds)


@given(st.lists(st.integers(0, 20), max_size=7), st.integers(1, 5))
def test_slowest_stage_of_every_division(times: list[int], stages: int) -> None:
    divisions = []
    for parts in range(1, stages + 1):
        for cuts in combinations(range(1, len(times)), parts - 1):
            edges = (0, *cuts, len(times))
            divisions.append(max(sum(times[a:b]) for a, b in pairwise(edges)))
    assert slowest_stage(times, stages) == min(divisions, default=0)


def test_network_in_json() -> None:
    network = map_layers(net(), array(), objective="energy")
    data = json.loads(json.dumps(network.to_json()))
    assert data["schema"] == SCHEMA == "ridgeline/map/1"
    assert (data["model"], data["batch"], data["target"], data["dataflow"], data["objective"]) == ("Net", 2, "small", "any", "energy")
    total = data["total"]
    assert set(total) >= {"energy_pj", "cycles", "seconds", "interval_s", "macs", "utilisation", "area_mm2", "optimal_within_space"}
    assert total["cycles"] == sum(row["cycles"] for row in data["layers"]) == network.cycles
    assert total["energy_pj"] == pytest.approx(sum(row["energy_pj"] for row in [*data["layers"], *data["host"]]))
    assert total["optimal_within_space"] == all(row["optimal_within_space"] for row in data["layers"])
    assert [row["op"] for row in data["layers"]] == names(network)[0] and [row["op"] for row in data["host"]] == names(network)[1]
    assert all(row["layer"] and row["mapping"]["temporal"] and row["shape"]["dims"] for row in data["layers"])


def test_profile_has_the_same_totals() -> None:
    network = map_layers(net(), array(), objective="energy")
    profile, (on_array, on_host) = profile_of(network), names(network)
    assert sum(row.time_s for row in profile.rows) == pytest.approx(network.seconds)
    assert sum(row.energy_j for row in profile.rows) == pytest.approx(network.energy_pj * 1e-12)
    assert [row.name for row in profile.rows] == [op.name for op in net().ops if op.name in {*on_array, *on_host}]
    assert all(row.limit_s <= row.time_s * (1 + 1e-12) and row.start_s >= 0 for row in profile.rows)
    assert {row.name: row.bottleneck for row in profile.rows}["softmax"] == "host"
    starts = [row.start_s for row in profile.rows]
    assert starts == sorted(starts)


def test_row_of_two_products_holds_the_memories_for_both() -> None:
    q = torch.zeros(1, 2, 6, 8)
    work = capture(Attention(), inputs=(q, q, q))
    network = map_layers(work, array(), objective="energy")
    (row,) = [row for row in profile_of(network).rows if row.loops]
    assert len(network.layers) == 2
    for name in ("reg", "buffer", "dram"):
        busiest = [max(c for port, c in one.mapped.cost.port_cycles.items() if port.startswith(f"{name}.")) for one in network.layers]
        assert row.memory_s[name] == pytest.approx(sum(busiest) / 1e9)


def test_row_of_cores_that_wait_names_what_they_wait_for() -> None:
    network = map_layers(workload(matmul(64, 16, 32)), array(cores={"count": 8}), objective="latency")
    (one,), (row,) = network.layers, profile_of(network).rows
    shared = one.cores * one.mapped.cost.port_cycles["dram.all"]
    assert one.mapped.cost.bottleneck != "dram.all" and one.cycles == shared
    assert row.bottleneck == "dram" and row.cause == f"dram.all takes {shared} of {shared} cycles"
    assert row.memory_s["dram"] == pytest.approx(row.time_s)


@pytest.mark.parametrize(("dtype", "peak"), [("float32", 250), ("float16", 500)])
def test_activations_are_held_as_wide_as_the_array_reads_them(dtype: str, peak: int) -> None:
    work = workload(matmul(4, 4, 4, dtype=dtype), peak_activation_bytes=1000)
    total = profile_of(map_layers(replace(work, dtype=dtype), array(), objective="energy")).total
    assert total.peak_activation_bytes == peak and total.weight_bytes == 16


def test_limit_of_a_stage_is_that_of_one_core() -> None:
    work = workload(matmul(64, 16, 64))
    alone, stage = (profile_of(map_layers(work, array(cores=cores), objective="latency")).rows[0] for cores in (
        {"count": 1}, {"count": 8, "use": "pipeline"}))  # fmt: skip
    assert stage.limit_s == alone.limit_s >= 64 * 16 * 64 / 16 / 1e9


def test_estimate_is_the_profile_of_the_mapping() -> None:
    profile = estimate_on_array(net(), array(), objective="energy")
    assert profile.total.time_s == pytest.approx(map_layers(net(), array(), objective="energy").seconds)
    assert (profile.model, profile.target) == ("Net", "small")
