"""The clocks against known times: the host's against sleeps, the device's against a simulated GPU that keeps a queue."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from ridgeline.measure.clocks import CHUNK, CudaClock, HostClock, make_clock

EVENT_S = 2e-6


class SimulatedGpu:
    """A queue on a device that works on its own: what CudaClock needs of torch.cuda, in real time."""

    cycles_per_s = 1e9

    def __init__(self) -> None:
        self.free_at = 0.0

    def launch(self, seconds: float) -> None:
        self.free_at = max(time.perf_counter(), self.free_at) + seconds

    def _sleep(self, cycles: int) -> None:
        self.launch(cycles / self.cycles_per_s)

    def synchronize(self) -> None:
        while time.perf_counter() < self.free_at:
            pass

    def Event(self, enable_timing: bool) -> Any:
        gpu = self

        class Event:
            done_at = 0.0

            def record(self) -> None:
                gpu.launch(EVENT_S)
                self.done_at = gpu.free_at

            def synchronize(self) -> None:
                gpu.synchronize()

            def query(self) -> bool:
                return time.perf_counter() >= self.done_at

            def elapsed_time(self, other: Any) -> float:
                return float(other.done_at - self.done_at) * 1e3

        return Event()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    simulated = SimulatedGpu()
    for name in ("_sleep", "synchronize", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(simulated, name))
    return simulated


def clean_pass(clock: CudaClock, ops: Any) -> list[Any]:
    """A pass in which the host stayed ahead: the sleep outlasts what a busy machine may take from this process."""
    clock.sleep_s = 0.1
    for _ in range(4):
        clock.begin()
        for name, op in ops:
            clock.start()
            op()
            clock.stop(name)
        times = clock.end()
        if not clock.dry:
            return times
    raise AssertionError("the host never stayed ahead")


def test_host_clock_finds_the_slow_op() -> None:
    clock = HostClock()
    clock.begin()
    for name, seconds in (("quick", None), ("slow", 0.01)) * 5:
        clock.start()
        if seconds:
            time.sleep(seconds)
        clock.stop(name)
    times = clock.end()
    assert [op.name for op in times] == ["quick", "slow"] * 5
    quickest = {name: min(op.seconds for op in times if op.name == name) for name in ("quick", "slow")}
    assert 0.0099 < quickest["slow"] < 1 and quickest["quick"] < 0.001


def test_host_clock_takes_off_its_own_cost() -> None:
    clock = HostClock()
    assert 0 < clock.cost_s < 1e-4
    clock.begin()
    for _ in range(2001):
        clock.start()
        clock.stop("empty")
    times = sorted(time.seconds for time in clock.end())
    assert times[1000] < clock.cost_s


def test_device_times_are_found_without_launch_gaps(gpu: SimulatedGpu) -> None:
    clock = CudaClock()
    assert clock.cycles_per_s == pytest.approx(SimulatedGpu.cycles_per_s, rel=0.01)
    assert clock.event_cost_s == pytest.approx(EVENT_S, rel=0.01)

    def slow_launch() -> None:
        until = time.perf_counter() + 2e-4
        while time.perf_counter() < until:
            pass
        gpu.launch(5e-5)

    times = clean_pass(clock, [("a", lambda: gpu.launch(3e-5)), ("view", lambda: None), ("b", slow_launch)] * 3)
    assert [round(op.seconds * 1e6, 2) for op in times] == [30, 0, 50] * 3
    assert all(op.host_s >= 2e-4 for op in times if op.name == "b")
    assert clock.waiting == set()


def test_more_ops_than_a_queue_holds_are_split(gpu: SimulatedGpu) -> None:
    times = clean_pass(CudaClock(), [(f"op{i}", lambda: gpu.launch(1e-5)) for i in range(2 * CHUNK + 7)])
    assert len(times) == 2 * CHUNK + 7
    assert {round(op.seconds * 1e6, 2) for op in times} == {10}


def test_a_pass_the_device_catches_up_with_is_marked_and_the_next_sleeps_longer(gpu: SimulatedGpu) -> None:
    clock = CudaClock()
    clock.sleep_s = 1e-3
    clock.begin()
    for _ in range(30):
        clock.start()
        time.sleep(1e-4)
        gpu.launch(1e-6)
        clock.stop("late")
    clock.end()
    assert clock.dry and clock.sleep_s == 2e-3


def test_an_op_that_waits_for_the_device_is_named_and_does_not_spoil_the_rest(gpu: SimulatedGpu) -> None:
    clock = CudaClock()

    def item() -> None:
        gpu.launch(1e-5)
        gpu.synchronize()

    times = clean_pass(clock, [("a", lambda: gpu.launch(3e-5)), ("item", item), ("b", lambda: gpu.launch(4e-5))])
    assert clock.waiting == {"item"}
    found = {op.name: op.seconds for op in times}
    assert found["a"] == pytest.approx(3e-5, rel=0.01) and found["b"] == pytest.approx(4e-5, rel=0.01)


def test_the_cpu_gets_the_host_clock() -> None:
    assert isinstance(make_clock("cpu"), HostClock)
