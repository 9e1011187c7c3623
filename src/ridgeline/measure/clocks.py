"""Clocks that split one pass into ops, on the host and on the GPU.

    begin() ─> start() op stop("conv1") ─> start() op stop("relu") ─> … ─> end() ──> [OpTime("conv1", seconds, host_s), …]

HostClock reads perf_counter on both sides of an op and takes off what an empty start/stop costs.

CudaClock measures the device alone. A sleep kernel holds the stream while the host queues up to CHUNK ops with an event
after each; then the device runs them back to back and the distance between events is the op's own time, less the cost of
an event. If the device had finished its sleep before the host finished queueing, gaps would be in the numbers: the pass
is marked `dry` and the next sleep is twice as long. An op that waits for the device (item, nonzero) ends its chunk.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, Protocol

CHUNK = 200  # a stream takes about 1,000 launches before the host has to wait
FIRST_SLEEP_S = 0.01
LONGEST_SLEEP_S = 0.64


class OpTime(NamedTuple):
    """One op of one pass."""

    name: str
    seconds: float
    host_s: float  # what the host spent: the launch on CUDA, everything on the CPU


class Clock(Protocol):
    """What a pass needs of a clock."""

    def begin(self) -> None: ...
    def start(self) -> None: ...
    def stop(self, name: str) -> None: ...
    def end(self) -> list[OpTime]: ...


class HostClock:
    """perf_counter around each op."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._spent: list[float] = []
        self._started = 0.0
        self.cost_s = 0.0
        self.begin()
        for _ in range(1001):
            self.start()
            self.stop("")
        self.cost_s = median(self._spent)

    def begin(self) -> None:
        self._names, self._spent = [], []

    def start(self) -> None:
        self._started = perf_counter()

    def stop(self, name: str) -> None:
        self._spent.append(perf_counter() - self._started)
        self._names.append(name)

    def end(self) -> list[OpTime]:
        times = [max(spent - self.cost_s, 0.0) for spent in self._spent]
        return [OpTime(name, time, time) for name, time in zip(self._names, times, strict=True)]


class CudaClock:
    """Events between ops on the current stream of the current device."""

    def __init__(self) -> None:
        import torch

        self._cuda: Any = torch.cuda  # parts of it are untyped
        self.cycles_per_s = self._calibrate_sleep()
        self.sleep_s = FIRST_SLEEP_S
        self.event_cost_s = 0.0
        self.waiting: set[str] = set()  # ops that waited for the device
        self.dry = False
        self._pool: list[Any] = []
        self.begin()
        for _ in range(CHUNK):
            self.start()
            self.stop("")
        self.event_cost_s = median(time.seconds for time in self.end())
        self.waiting.clear()

    def _calibrate_sleep(self) -> float:
        first, last = self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True)
        for cycles in (1_000, 10_000_000):  # the first loads the kernel
            first.record()
            self._cuda._sleep(cycles)
            last.record()
            last.synchronize()
        return 10_000_000 / (float(first.elapsed_time(last)) / 1e3)

    def begin(self) -> None:
        self.dry = False
        self._names: list[str] = []
        self._hosts: list[float] = []
        self._fences: dict[int, int] = {}  # index of the first op of a chunk → event before it
        self._marks: list[int] = []  # event after each op
        self._used = 0
        self._open = 0  # ops in the open chunk; 0 means none is open

    def _record(self) -> int:
        if self._used == len(self._pool):
            self._pool.append(self._cuda.Event(enable_timing=True))
        self._pool[self._used].record()
        self._used += 1
        return self._used - 1

    def start(self) -> None:
        if self._open == 0:
            self._cuda.synchronize()
            self._cuda._sleep(int(self.sleep_s * self.cycles_per_s))
            self._fences[len(self._names)] = self._record()
        self._started = perf_counter()

    def stop(self, name: str) -> None:
        host_s = perf_counter() - self._started
        self._marks.append(self._record())
        self._names.append(name)
        self._hosts.append(host_s)
        self._open += 1
        if host_s > self.sleep_s / 4 and self._passed_fence():
            self.waiting.add(name)
            self._open = 0  # the device is idle now: hold it again before the next op
        elif self._open == CHUNK:
            self._close()

    def _passed_fence(self) -> bool:
        return bool(self._pool[self._fences[max(self._fences)]].query())

    def _close(self) -> None:
        self.dry |= self._passed_fence()
        self._open = 0

    def end(self) -> list[OpTime]:
        if self._open:
            self._close()
        self._cuda.synchronize()
        if self.dry:
            self.sleep_s = min(self.sleep_s * 2, LONGEST_SLEEP_S)
        return [OpTime(name, self._elapsed(index), host) for index, (name, host) in enumerate(zip(self._names, self._hosts, strict=True))]

    def _elapsed(self, index: int) -> float:
        before = self._fences.get(index, self._marks[index - 1] if index else 0)
        between_s = self._pool[before].elapsed_time(self._pool[self._marks[index]]) / 1e3
        return float(max(between_s - self.event_cost_s, 0.0))


def make_clock(device: str) -> HostClock | CudaClock:
    """The clock for a device; for CUDA, call it with that device current."""
    return CudaClock() if device.partition(":")[0] == "cuda" else HostClock()
