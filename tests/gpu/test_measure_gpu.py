"""Measurement on a real CUDA device: op times without launch gaps, memory, energy, regions, pipeline."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from ridgeline.core.timing import time_callable
from ridgeline.measure.ab import ab, ab_models
from ridgeline.measure.clocks import CHUNK, CudaClock
from ridgeline.measure.environment import environment, machine_name
from ridgeline.measure.pipeline import measure_pipeline
from ridgeline.measure.power import EnergyMeter, GpuReading, power_reading
from ridgeline.measure.profiler import measure
from ridgeline.measure.regions import profile_op, region_report, reset_regions
from ridgeline.search.latency.clock import Conditions, block_turn, under
from ridgeline.workload.capture import capture
from tests.measure.nets import Branching, Convolutional, Pointwise

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SIZE = 4096


class Product(nn.Module):
    """One large matrix product between two small ops."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.neg()).relu()


def product_inputs() -> tuple[Product, torch.Tensor]:
    return Product().to("cuda", torch.bfloat16), torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)


def test_rows_are_the_captured_ops_and_all_are_measured() -> None:
    module, image = Convolutional(), torch.randn(8, 3, 64, 64)
    found = measure(module, image, device="cuda", repeats=5)
    workload = capture(module, image)
    assert [row.name for row in found.rows] == [op.name for op in workload.ops]
    assert all(row.measured is not None for row in found.rows)
    assert found.target == torch.cuda.get_device_name() and next(module.parameters()).device.type == "cpu"
    assert any(note.startswith("host launch ") for note in found.notes)


def test_device_time_of_an_op_is_what_a_graph_of_it_takes() -> None:
    module, x = product_inputs()
    found = measure(module, x, repeats=10)
    linear_s = next(row.time_s for row in found.rows if row.kind == "linear")
    graph, calls = torch.cuda.CUDAGraph(), 20
    with torch.inference_mode():
        module.linear(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                module.linear(x)
    expected_s = time_callable(graph.replay, device="cuda").median_s / calls
    assert 0.7 < linear_s / expected_s < 1.4


def test_ops_that_launch_nothing_take_no_device_time() -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.transpose(0, 1).unsqueeze(0).squeeze(0) * 2

    found = measure(Views(), torch.randn(2048, 2048), device="cuda", repeats=10)
    views = [row.time_s for row in found.rows if row.kind == "view"]
    assert views and max(views) < 3e-6 < sum(row.time_s for row in found.rows)


def test_launch_gaps_stay_out_of_op_times() -> None:
    chain = nn.Sequential(*(nn.Tanh() for _ in range(64)))
    found = measure(chain, torch.randn(16), device="cuda", repeats=10)
    # Tiny kernels: the device needs a few µs each, the host longer, so the whole model is bound by the host.
    assert sum(row.time_s for row in found.rows) < found.total.time_s
    assert not any("launch gaps" in note for note in found.notes)


def test_more_ops_than_one_chunk() -> None:
    chain = nn.Sequential(*(nn.Tanh() for _ in range(CHUNK + 50)))
    found = measure(chain, torch.randn(1 << 20), device="cuda", repeats=5)
    times = sorted(row.time_s for row in found.rows)
    assert len(times) == CHUNK + 50
    assert times[-1] < 5 * times[len(times) // 2]


def test_an_op_that_waits_is_named() -> None:
    found = measure(Branching().cuda(), torch.randn(64, 16, device="cuda"), repeats=5)
    assert any("the host waits for the device" in note for note in found.notes)


def test_peak_memory_is_the_allocators() -> None:
    found = measure(Pointwise(), torch.randn(1 << 22), device="cuda", repeats=1)
    assert found.total.measured_peak_bytes == 2 * 4 * (1 << 22)


def test_channels_last_and_half_precision_run() -> None:
    found = measure("resnet18", device="cuda", batch=4, dtype="float16", channels_last=True, repeats=3)
    assert (found.dtype, found.batch) == ("float16", 4)
    assert 0.05 < sum(row.time_s for row in found.rows) / found.total.time_s < 2


def test_the_clock_calibrates_itself() -> None:
    clock = CudaClock()
    assert 1e8 < clock.cycles_per_s < 1e10
    assert 0 <= clock.event_cost_s < 2e-5


def test_time_callable_uses_the_devices_clock() -> None:
    module, x = product_inputs()
    with torch.inference_mode():
        timing = time_callable(lambda: module(x), device="cuda")
    assert 2 * SIZE**3 / timing.median_s > 1e13


def test_ab_sees_twice_the_work() -> None:
    module, x = product_inputs()
    with torch.inference_mode():
        found = ab(lambda: module.linear(x), lambda: module.linear(module.linear(x)), device="cuda", rounds=20)
    assert found.verdict == "a faster" and found.ratio == pytest.approx(2, rel=0.25)
    assert ab_models("resnet18@dtype=float32,batch=256", "resnet18@dtype=float16,batch=256", device="cuda", rounds=10).verdict == "b faster"


def test_synced_regions_hold_the_devices_work() -> None:
    module, x = product_inputs()
    with torch.inference_mode():
        module(x)
    torch.cuda.synchronize()
    expected_s = time_callable(lambda: [module.linear(x) for _ in range(20)], device="cuda").median_s
    reset_regions()
    for name, sync in (("queued", False), ("done", True)):
        with torch.inference_mode(), profile_op(name, sync=sync):
            for _ in range(20):
                module.linear(x)
        torch.cuda.synchronize()
    rows = {row.name: row for row in region_report()}
    assert rows["done"].total_s == pytest.approx(expected_s, rel=0.5)
    assert rows["queued"].total_s < rows["done"].total_s


def test_energy_and_power_are_read() -> None:
    readings = power_reading()
    assert isinstance(readings, list) and isinstance(readings[0], GpuReading)
    assert readings[0].power_w is None or 1 < readings[0].power_w < 2000
    assert readings[0].memory_total_bytes and readings[0].memory_total_bytes > 2**30
    module, x = product_inputs()
    with EnergyMeter("cuda") as meter, torch.inference_mode():
        stop = time.perf_counter() + 1.0
        while time.perf_counter() < stop:
            for _ in range(50):
                module(x)
            torch.cuda.synchronize()
    if meter.energy_j is None:
        pytest.skip(str(meter.why))
    assert meter.source == "NVML" and 10 < meter.energy_j / meter.duration_s < 2000


def test_the_pipeline_copies_to_the_device() -> None:
    found = measure_pipeline("resnet18", device="cuda", batch=8, repeats=5)
    stages = {stage.name: stage for stage in found.stages}
    assert stages["host copy"].timing.median_s > 0 and stages["host copy"].detail == ""
    assert found.device.startswith("cuda")


def test_the_environment_lists_the_device() -> None:
    found = environment()
    assert found["gpus"][0]["name"] == torch.cuda.get_device_name(0) == machine_name("cuda:0")
    assert found["counters"]["nvml"].startswith("available")


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_block_without_kernels_adds_next_to_nothing(mode: str) -> None:
    """75 skips of a cell network are no 40 µs: what a replay and its wait take is not theirs."""
    conditions = Conditions("cuda", mode=mode)  # type: ignore[arg-type]
    with under(conditions):
        nothing, one = (block_turn(module, (16, 32, 32), conditions) for module in (nn.Identity(), nn.ReLU()))
        seconds, kernel = (min(sample[0] for _ in range(20) for sample in turn()) for turn in (nothing, one))
    assert seconds < (1e-7 if mode == "graph" else 5e-6) and kernel > 5e-7
