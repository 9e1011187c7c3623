"""Times of one call, on the GPU and on the host, without one hiding the other.

    Sets(make, …) ──> K input sets, K times what a call reads >= 3 L2: every call reads device memory, not the cache
    sleep | event | N calls over the sets | event        the host queues all N while the GPU sleeps
      elapsed / N = GPU time a call        host loop / N = host time a call

That the host was ahead is checked: the first event must not have happened when the loop ends; otherwise the GPU sleeps longer,
then N shrinks. Ops of decoding (`Case.in_graph`) are timed in a CUDA graph of N calls instead, as they are used. Results are kept
until their set comes round again, so that outputs too go to device memory. Functions are sampled in turn, in orders in which each
follows each other equally often: the GPU's clock drifts, and after a function that draws little power it is higher for the next.
Where tensor cores are the limit, the clock follows the power of the last tenth of a second, by up to a sixth: a sample is either short
and comes after a rest (RestedTimer), or follows a tenth of a second of the same function (SteadyTimer).
On the CPU both times are perf_counter's.
Queued kernels must stay under the 1,024 the driver takes: no launch costs the host less than 4 µs, so 3.6 ms of host time are under 900.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from math import ceil
from time import perf_counter
from typing import Any

import torch

from ...core.timing import garbage_collector_off, summarise

QUEUE_S = 3.6e-3
GPU_S = 25e-3
"""Most GPU time of one sample."""
REST_S, BURST_S = 0.05, 5e-3
"""Of a rested sample: how long the GPU all but idles before it, and its most GPU time."""
STEADY_S = 0.1
"""GPU time of the calls before a steady sample."""
CYCLES_PER_S = 2e9
MOST_SETS, MOST_BYTES = 256, 8e9
TRIES = 5
CPU_SAMPLE_S = 2e-3
Step = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Timed:
    """One function's times, or why there are none."""

    gpu_ms: float | None = None
    p20: float | None = None
    p80: float | None = None
    host_us: float | None = None
    error: str | None = None
    ahead: bool = True
    """The host queued all calls before the first ran; if not, `gpu_ms` holds waits for the host (a function that synchronises)."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def on(device: str) -> AbstractContextManager[Any]:
    """The current CUDA device inside; nothing on the CPU."""
    return torch.cuda.device(torch.device(device)) if device.startswith("cuda") else nullcontext()


def failed(error: BaseException) -> Timed:
    """The entry of a function that raised: its error in one line."""
    lines = str(error).strip().splitlines() or [""]
    return Timed(error=f"{type(error).__name__}: {lines[0]}"[:240])


def set_count(read_bytes: int, stored_bytes: int, device: str) -> int:
    """How many input sets to rotate over."""
    if not device.startswith("cuda"):
        return 2
    properties: Any = torch.cuda.get_device_properties(torch.device(device))
    room = min(MOST_BYTES, properties.total_memory / 8)
    wanted = -(-3 * int(properties.L2_cache_size) // max(1, read_bytes))
    fitting = int(room // max(1, stored_bytes))
    return max(1 if 4 * stored_bytes > properties.total_memory else 2, min(wanted, fitting, MOST_SETS))


class CudaTimer:
    """Samples of one function on the current CUDA device."""

    most_s = GPU_S

    def __init__(self, step: Step, sets: int) -> None:
        self.step, self.sets, self.at = step, sets, 0
        self.ahead = True
        cuda: Any = torch.cuda
        self.begin, self.end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        self.calls, self.sleep_s, self.each_s = 1, 1e-3, 1e-3

    def prepare(self) -> None:
        """Compile, fill the allocator's pool, and find how many calls make a sample."""
        for _ in range(3):  # the first compiles
            self._call()
        start = perf_counter()
        for _ in range(self.sets):
            self._call()
            if perf_counter() - start > 1.0:
                break
        torch.cuda.synchronize()
        start = perf_counter()
        for _ in range(5):
            self._call()
        host_s = (perf_counter() - start) / 5
        torch.cuda.synchronize()
        self.each_s = (perf_counter() - start) / 5
        self.calls = max(1, min(int(QUEUE_S / host_s), int(self.most_s / self.each_s), 400))
        self.sleep_s = 1.5 * self.calls * host_s + 1e-4

    def sample(self) -> tuple[float, float]:
        """(GPU seconds, host seconds) a call."""
        for attempt in range(TRIES):
            torch.cuda.synchronize()
            self._occupy(attempt)
            self.begin.record()
            start = perf_counter()
            for _ in range(self.calls):
                self._call()
            host_s = (perf_counter() - start) / self.calls
            self.ahead = not self.begin.query()
            self.end.record()
            self.end.synchronize()
            gpu_s = float(self.begin.elapsed_time(self.end)) / 1e3 / self.calls
            if self.ahead:
                break
            # a pause of the host needs a longer sleep; a full queue, which no sleep helps, fewer calls
            self.sleep_s = min(2 * self.sleep_s, 0.05)
            self.calls = max(1, self.calls // 2) if attempt else self.calls
        return gpu_s, host_s

    def _occupy(self, attempt: int) -> None:
        """Something for the GPU to do while the host queues the calls."""
        torch.cuda._sleep(int(self.sleep_s * CYCLES_PER_S))

    def _call(self) -> None:
        self.step(self.at)
        self.at = (self.at + 1) % self.sets


class RestedTimer(CudaTimer):
    """Samples of one function at the clock of a GPU that was not at work."""

    most_s = BURST_S

    def prepare(self) -> None:
        super().prepare()
        self.sleep_s = max(self.sleep_s, REST_S)


class SteadyTimer(CudaTimer):
    """Samples of one function at the clock that its own power leaves."""

    def _occupy(self, attempt: int) -> None:
        for _ in range(ceil(STEADY_S / self.each_s)):
            self._call()
        if attempt:  # the host is not faster than the GPU
            super()._occupy(attempt)


class GraphTimer(CudaTimer):
    """Samples of one function inside a CUDA graph; the host's time is that of a call outside."""

    def prepare(self) -> None:
        super().prepare()
        self.captured = max(1, self.calls // self.sets) * self.sets
        cuda: Any = torch.cuda
        self.graph = cuda.CUDAGraph()
        with cuda.graph(self.graph):
            for _ in range(self.captured):
                self._call()

    def sample(self) -> tuple[float, float]:
        _, host_s = super().sample()
        torch.cuda.synchronize()
        self.begin.record()
        self.graph.replay()
        self.end.record()
        self.end.synchronize()
        return float(self.begin.elapsed_time(self.end)) / 1e3 / self.captured, host_s


class CpuTimer:
    """Samples of one function on the CPU, where the host does the work."""

    ahead = True

    def __init__(self, step: Step, sets: int) -> None:
        self.step, self.sets, self.calls = step, sets, 1

    def prepare(self) -> None:
        self.step(0)
        start = perf_counter()
        self.step(0)
        self.calls = max(1, min(1000, int(CPU_SAMPLE_S / max(1e-7, perf_counter() - start))))

    def sample(self) -> tuple[float, float]:
        start = perf_counter()
        for place in range(self.calls):
            self.step(place % self.sets)
        each = (perf_counter() - start) / self.calls
        return each, each


def timer(step: Step, sets: int, device: str, kind: type[CudaTimer] = CudaTimer) -> CudaTimer | CpuTimer:
    """For one function, of that kind on a GPU; `prepare` it before the first sample."""
    return kind(step, sets) if device.startswith("cuda") else CpuTimer(step, sets)


def balanced_orders(count: int) -> list[list[int]]:
    """Orders of 0 to count - 1, each number equally often in each place and right after each other one. Ref: Williams 1949."""
    first = [(place + 1) // 2 if place % 2 else -(place // 2) % count for place in range(count)]
    orders = [[(one + shift) % count for one in first] for shift in range(count)]
    return orders if count % 2 == 0 else [*orders, *(order[::-1] for order in orders)]


def time_in_turn(steps: Mapping[str, Step], sets: int, device: str, repeats: int = 7,
                 kind: type[CudaTimer] = CudaTimer) -> dict[str, Timed]:  # fmt: skip
    """Each function's times, sampled in turn; one that raises is out, with its error, and the others go on."""
    timers = {name: timer(step, sets, device, kind) for name, step in steps.items()}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    found: dict[str, Timed] = {}
    names, orders = list(timers), balanced_orders(len(timers))
    with garbage_collector_off():
        for round_ in range(repeats + 1):
            for name in (names[place] for place in orders[round_ % len(orders)]):
                one = timers[name]
                if name in found:
                    continue
                try:
                    if round_ == 0:
                        one.prepare()
                    else:
                        samples[name].append(one.sample())
                except Exception as error:
                    found[name] = failed(error)
                    if device.startswith("cuda") and isinstance(error, torch.cuda.OutOfMemoryError):
                        torch.cuda.empty_cache()
    for name, pairs in samples.items():
        if name not in found:
            gpu, host = summarise([gpu_s for gpu_s, _ in pairs]), summarise([host_s for _, host_s in pairs])
            times = gpu.median_s * 1e3, gpu.p20_s * 1e3, gpu.p80_s * 1e3, host.median_s * 1e6
            found[name] = Timed(*times, ahead=timers[name].ahead)
    return {name: found[name] for name in steps}


def gpu_seconds(step: Step, sets: int, device: str, repeats: int = 3, kind: type[CudaTimer] = CudaTimer) -> float:
    """Median GPU time of a call (the host's on the CPU); raises what the function raises."""
    one = timer(step, sets, device, kind)
    with garbage_collector_off():
        one.prepare()
        return summarise([one.sample()[0] for _ in range(repeats)]).median_s
