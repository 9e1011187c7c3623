"""The estimate: parts, overlap, dispatch, bottlenecks, communication, and the figures the issue of a roofline must give."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline import capture, estimate, load_target, map_layers
from ridgeline.core.errors import OptionError
from ridgeline.estimate.processor import Settings
from ridgeline.target.load import catalog_names, load_array
from ridgeline.workload.graph import Op
from tests.estimate.support import LEVELS, matmul, pointwise, processor, workload


def test_resnet50_first_convolution_on_a_two_teraflop_machine() -> None:
    row = estimate(capture("resnet50", dtype="float16"), processor()).rows[0]
    assert row.compute_s == pytest.approx(118.0e-6, rel=1e-3)
    assert row.memory_s["dram"] == pytest.approx(1.93e-6, rel=3e-3)
    assert row.bottleneck == "compute" and row.roof_flops == 2e12
    assert row.time_s == row.limit_s == row.compute_s


def test_llama_decode_is_bound_by_weights_on_h200() -> None:
    profile = estimate(capture("llama-3-8b", phase="decode", context=192), load_target("h200"))
    weights_s = sum(r.bytes_by["weights"] for r in profile.rows) / 4.8e12
    assert weights_s == pytest.approx(3.13e-3, rel=1e-3)
    assert profile.total.limit_s == pytest.approx(weights_s, rel=0.01)
    assert profile.total.time_s > profile.total.limit_s  # launched from Python one op at a time


@pytest.mark.parametrize(("overlap", "expected"), [(1.0, 4.0), (0.0, 5.0), (0.25, 4.75)])
def test_overlap_adds_the_hidden_parts(overlap: float, expected: float) -> None:
    op = pointwise("relu", 1_000_000_000, "x", "y")  # 1 GFLOP, 8 GB
    spec = processor(peak=1e9, bandwidth=2e9, overlap=overlap)
    assert estimate(workload(op), spec).rows[0].time_s == pytest.approx(expected)


def test_bottleneck_joins_two_within_ten_per_cent() -> None:
    op = pointwise("relu", 1_000_000, "x", "y")
    assert estimate(workload(op), processor(peak=1e6, bandwidth=8e6)).rows[0].bottleneck in ("compute+memory", "memory+compute")
    assert estimate(workload(op), processor(peak=0.89e6, bandwidth=8e6)).rows[0].bottleneck == "compute"


def test_tensor_core_raises_the_ceiling_and_never_lowers_it() -> None:
    units = {
        "vector": {"peak_flops": {"float32": 4e12}},
        "tensor": {"serves": ["matrix"], "peak_flops": {"float32": 1e12, "float16": 16e12}},
    }
    spec = processor(units=units)
    assert estimate(workload(matmul(512, 512, 512)), spec).rows[0].compute_s == pytest.approx(2 * 512**3 / 4e12)
    assert estimate(workload(matmul(512, 512, 512, dtype="float16")), spec).rows[0].compute_s == pytest.approx(2 * 512**3 / 16e12)


def test_lacking_dtype_is_the_named_cause() -> None:
    spec = processor(units={"alu": {"peak_flops": {"float32": 1e9}}})
    row = estimate(workload(matmul(512, 512, 512, dtype="int8")), spec).rows[0]
    assert "no int8" in row.cause and "float32" in row.cause


def test_padding_and_waves_are_counted() -> None:
    def row(m: int, copies: int = 1) -> object:
        units = {"tensor": {"peak_flops": {"float32": 1e9}, "tiles": [[128, 128]], "copies": copies}}
        return estimate(workload(matmul(m, 128, 128)), processor(units=units)).rows[0]

    full, padded = row(128), row(129)
    assert full.compute_s == pytest.approx(2 * 128**3 / 1e9)  # type: ignore[attr-defined]
    assert padded.compute_s == pytest.approx(2 * full.compute_s)  # type: ignore[attr-defined]
    assert "padding" in padded.cause  # type: ignore[attr-defined]
    assert row(128 * 5, copies=4).compute_s == pytest.approx(row(128 * 8, copies=4).compute_s)  # type: ignore[attr-defined]


def test_synchronous_dispatch_is_always_paid_asynchronous_only_when_exposed() -> None:
    ops = [pointwise(f"relu{i}", 1_000_000, f"v{i}", f"v{i + 1}") for i in range(4)]  # 8 µs each at 1 TB/s
    cpu = processor(dispatch={"per_op_s": 5e-6})
    gpu = processor(dispatch={"per_op_s": 5e-6, "asynchronous": True})
    slow_host = processor(dispatch={"per_op_s": 20e-6, "asynchronous": True})
    assert estimate(workload(*ops), cpu).total.time_s == pytest.approx(4 * 13e-6)
    assert estimate(workload(*ops), gpu).total.time_s == pytest.approx(5e-6 + 4 * 8e-6)
    total = estimate(workload(*ops), slow_host).total
    assert total.time_s == pytest.approx(4 * 20e-6 + 8e-6) and total.bottleneck == "overhead"
    assert "launch" in estimate(workload(*ops), slow_host).rows[-1].cause


def test_power_roof_binds_where_energy_says_so() -> None:
    power = {"limit_w": 110.0, "idle_w": 10.0, "energy_j_per_flop": {"float32": 1e-9}}
    row = estimate(workload(matmul(1024, 1024, 1024)), processor(power=power)).rows[0]
    seconds = 2 * 1024**3 * 1e-9 / 100
    assert row.time_s == pytest.approx(seconds) and "power" in row.cause and row.bottleneck == "compute"
    assert row.energy_j == pytest.approx(2 * 1024**3 * 1e-9 + 10 * seconds)


def test_working_set_over_a_level_is_named_with_its_excess() -> None:
    memories = {"l1": {**LEVELS["l1"], "retains": True}, "dram": LEVELS["dram"]}
    row = estimate(workload(pointwise("relu", 1_000_000, "x", "y")), processor(memories=memories)).rows[0]
    assert "7,900,000 B over l1" in row.cause


def test_levels_that_retain_keep_results_for_the_next_op() -> None:
    ops = (pointwise("a", 10_000, "x", "y"), pointwise("b", 10_000, "y", "z"))
    memories = {"l2": {"bandwidth_bps": 4e12, "capacity_bytes": 1e6, "retains": True}, "dram": LEVELS["dram"]}
    first, second = estimate(workload(*ops), processor(memories=memories)).rows
    assert first.memory_s["dram"] == pytest.approx(40_000 / 1e12)  # its input comes from outside
    assert second.memory_s["dram"] == 0.0 and second.memory_s["l2"] == pytest.approx(80_000 / 4e12)
    cold = {**memories, "l2": {**memories["l2"], "retains": False}}
    assert estimate(workload(*ops), processor(memories=cold)).rows[1].memory_s["dram"] == pytest.approx(80_000 / 1e12)


def test_devices_share_the_work_and_pay_for_the_link() -> None:
    spec = processor(links={"peer": {"latency_s": 1e-6, "bandwidth_bps": 1e11}})
    pair = workload(matmul(64, 4096, 1024, "up", result="h"), matmul(64, 1024, 4096, "down", source="h", result="y"))
    one, four = estimate(pair, spec), estimate(pair, spec, devices=4)
    assert four.total.flops * 4 == one.total.flops and four.total.bytes_by["weights"] * 4 == one.total.bytes_by["weights"]
    up, down = four.rows
    size = 64 * 1024 * 4
    assert up.communication_s == 0.0
    assert down.communication_s == pytest.approx(2 * 3 * 1e-6 + 2 * 3 / 4 * size / 1e11)
    hidden = estimate(pair, spec, settings=Settings(devices=4, communication_overlap=1.0))
    assert hidden.total.time_s == pytest.approx(four.total.time_s - down.communication_s)


@pytest.mark.parametrize("mode", ["eager", "fused"])
def test_a_split_result_is_gathered_whatever_views_follow(mode: str) -> None:
    spec = processor(links={"peer": {"latency_s": 1e-6, "bandwidth_bps": 1e11}})
    view = Op("view", "", "view", "view", "float32", (), (), 0)
    for ops in ((matmul(64, 4096, 1024),), (matmul(64, 4096, 1024), view)):
        row = estimate(workload(*ops), spec, devices=4, mode=mode).rows[0]
        assert row.communication_s == pytest.approx(3 * 1e-6 + 3 / 4 * 64 * 4096 * 4 / 1e11)


def test_host_copies_are_rows_of_their_own() -> None:
    spec = processor(links={"host": {"latency_s": 1e-5, "bandwidth_bps": 1e10}})
    work = workload(pointwise("relu", 1000, "x", "y"), input_bytes=4000, output_bytes=4000)
    rows = estimate(work, spec, host_copy=True).rows
    assert [r.kind for r in rows] == ["host_copy", "pointwise", "host_copy"]
    assert rows[0].communication_s == pytest.approx(1e-5 + 4000 / 1e10) and rows[0].cause == "host copy"


@pytest.mark.parametrize("options", [{"mode": "faster"}, {"devices": 0}, {"devices": 2}, {"host_copy": True}])
def test_bad_settings_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        estimate(workload(pointwise("relu", 10, "x", "y")), processor(), **options)  # type: ignore[arg-type]


def test_amdahl_and_timeline_add_up() -> None:
    profile = estimate(capture("resnet18"), load_target("a100"))
    assert sum(s.fraction for s in profile.shares) == pytest.approx(1.0)
    for share in profile.shares:
        assert share.speedup_if_free == pytest.approx(1 / (1 - share.fraction))
    for before, after in zip(profile.rows, profile.rows[1:], strict=False):
        assert after.start_s == pytest.approx(before.start_s + before.time_s)
    assert profile.total.time_s == pytest.approx(profile.rows[-1].start_s + profile.rows[-1].time_s)


@given(
    m=st.integers(1, 3000), n=st.integers(1, 3000), k=st.integers(1, 3000), peak=st.floats(1e9, 1e15), bandwidth=st.floats(1e9, 1e13),
    factor=st.floats(1.0, 100.0), overlap=st.floats(0, 1),
)  # fmt: skip
def test_time_is_bounded_and_monotone(m: int, n: int, k: int, peak: float, bandwidth: float, factor: float, overlap: float) -> None:
    op = matmul(m, n, k)

    def row(p: float, b: float) -> object:
        memories = {"l2": {"bandwidth_bps": 4 * b, "capacity_bytes": 1e5}, "dram": {"bandwidth_bps": b, "capacity_bytes": 1e12}}
        return estimate(workload(op), processor(p, memories=memories, overlap=overlap)).rows[0]

    base, quicker, wider = row(peak, bandwidth), row(peak * factor, bandwidth), row(peak, bandwidth * factor)
    parts = [base.compute_s, *base.memory_s.values()]  # type: ignore[attr-defined]
    assert max(parts) <= base.time_s * (1 + 1e-12) <= sum(parts) * (1 + 1e-9)  # type: ignore[attr-defined]
    assert base.memory_s["dram"] >= op.bytes / bandwidth * (1 - 1e-12)  # type: ignore[attr-defined]
    assert quicker.time_s <= base.time_s * (1 + 1e-9) and wider.time_s <= base.time_s * (1 + 1e-9)  # type: ignore[attr-defined]
    assert base.roof_flops <= peak * (1 + 1e-12)  # type: ignore[attr-defined]


@pytest.mark.parametrize("target", catalog_names("processor"))
def test_every_catalog_target_takes_every_kind_of_model(target: str) -> None:
    for model in ("mobilenet-v2", "bert-base"):
        profile = estimate(capture(model), load_target(target))
        assert 0 < profile.total.limit_s <= profile.total.time_s
        assert all(row.bottleneck and row.cause for row in profile.rows)


def test_an_array_is_mapped_by_name_or_spec() -> None:
    workload = capture("alexnet")
    network = map_layers(workload, load_array("tpu-v1"))
    for target in ("tpu-v1", load_target("tpu-v1")):
        profile = estimate(workload, target)
        assert (profile.target, profile.mode, profile.dtype) == ("tpu-v1", "mapped", "int8")
        assert profile.total.time_s == pytest.approx(network.seconds) and profile.total.energy_j == pytest.approx(network.energy_pj * 1e-12)
        assert sum(row.time_s for row in profile.rows) == pytest.approx(network.seconds)


@pytest.mark.parametrize(
    "option", [{"mode": "fused"}, {"devices": 2}, {"host_copy": True}, {"graph": True}, {"settings": Settings(channels_last=True)}]
)
def test_options_of_a_processor_are_refused_for_an_array(option: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"on tpu-v1[\s\S]*spatial array"):
        estimate(capture("alexnet"), "tpu-v1", **option)


def test_mapping_tells_its_progress() -> None:
    said: list[str] = []
    estimate(capture("alexnet"), "tpu-v1", progress=said.append)
    assert len(said) > 5 and said[0] == f"1 of {len(said)}: features.0"
