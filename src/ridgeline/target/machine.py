"""Timing this machine's roofs and probes.

    identity(device) ──> what it is          roofs(device) ──> spec without probes          time_probes ──> probes

Bandwidths: the fastest of copy, add and sum over a working set of half the level; caches below 64 kB a core by the slope between two
sizes, which takes the call's own cost out. Times on CUDA come from graph replays, so that launches stay out of them.
"""

from __future__ import annotations

import copy
import mmap
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..core.errors import MeasureError
from ..workload.capture import capture_case
from ..workload.case import ModelCase
from .probes import ProbeCase, probe_cases, quick_cases

Progress = Callable[[str], None]
SOURCE = "calibration of this machine"


def identity(device: str) -> dict[str, str]:
    """Facts that would change the numbers."""
    if device == "cuda":
        if not torch.cuda.is_available():
            raise MeasureError("no CUDA device", why="torch sees none", do="use --on cpu, or a catalog target such as h200")
        return {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    return {
        "device": cpu_name(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "isa": torch.backends.cpu.get_cpu_capability(),
    }


def cpu_name() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def cache_sizes() -> dict[str, int]:
    """Bytes of L1d, L2, L3 that one core sees; typical sizes where the system does not tell."""
    sizes: dict[str, int] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind, level, size = ((index / n).read_text(encoding="utf-8").strip() for n in ("type", "level", "size"))
        except OSError:
            continue
        if kind != "Instruction" and re.fullmatch(r"\d+[KM]", size):
            sizes[f"l{level}"] = int(size[:-1]) * (1024 if size.endswith("K") else 1024 * 1024)
    return sizes or {"l1": 32 * 1024, "l2": 1024 * 1024, "l3": 16 * 1024 * 1024}


def busy(watch_s: float = 0.5) -> dict[str, str]:
    """Whether other work is running: on busy cores everything measured is too slow, by a factor where threads must meet."""

    def ticks() -> tuple[float, float]:
        values = [float(v) for v in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]]
        return sum(values), values[3] + values[4]  # all, idle and waiting for disks

    try:
        before = ticks()
        time.sleep(watch_s)
        after = ticks()
    except (OSError, ValueError, IndexError):
        return {}
    used = 1 - (after[1] - before[1]) / max(after[0] - before[0], 1.0)
    return {"busy": f"{used:.0%} of the cores taken"} if used > 0.2 else {}


def seconds_per_call(function: Callable[[], Any], device: str, budget_s: float = 0.1, best: bool = False) -> float:
    """Time of one call: the median of short bursts, or the shortest of them for a ceiling that nothing beats."""
    for _ in range(3):
        function()
    if device == "cuda":
        return _cuda_seconds(function, budget_s, best)
    start = time.perf_counter()
    function()
    once = max(time.perf_counter() - start, 1e-7)
    burst = max(int(0.002 / once), 1)
    samples: list[float] = []
    stop = time.perf_counter() + budget_s
    while len(samples) < 5 or (time.perf_counter() < stop and len(samples) < 200):
        start = time.perf_counter()
        for _ in range(burst):
            function()
        samples.append((time.perf_counter() - start) / burst)
    return min(samples) if best else median(samples)


def _cuda_seconds(function: Callable[[], Any], budget_s: float, best: bool) -> float:
    torch.cuda.synchronize()
    calls, graph = 20, torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    samples: list[float] = []
    stop = time.perf_counter() + budget_s
    while len(samples) < 5 or (time.perf_counter() < stop and len(samples) < 200):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3 / calls)
    return min(samples) if best else median(samples)


def _constant(value: float, unit: str, source: str = SOURCE, status: str = "measured") -> dict[str, Any]:
    return {"value": value, "unit": unit, "source": source, "status": status}


def bandwidth(size: int, device: str) -> float:
    """B/s of the fastest of copy, add and sum over `size` bytes in all."""
    rates = []
    for arrays, function in ((2, lambda a: a[0].copy_(a[1])), (3, lambda a: torch.add(a[1], a[2], out=a[0])), (1, lambda a: a[0].sum())):
        n = max(size // (4 * arrays), 64)
        data = [torch.rand(n, device=device) for _ in range(arrays)]
        rates.append(4 * n * arrays / seconds_per_call(lambda function=function, data=data: function(data), device, best=True))  # type: ignore[misc]
    return max(rates)


def small_cache_bandwidth(size: int) -> float:
    """B/s of one thread in a cache too small to time directly: extra bytes over extra time."""

    def rate() -> float:
        times = []
        sizes = (size // 8, size // 2)
        for total in sizes:
            a, b = torch.rand(total // 8), torch.rand(total // 8)
            times.append(seconds_per_call(lambda a=a, b=b: a.copy_(b), "cpu", 0.05))  # type: ignore[misc]
        return (sizes[1] - sizes[0]) / max(times[1] - times[0], 1e-12)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return median(rate() for _ in range(5))
    finally:
        torch.set_num_threads(threads)


def matmul_peak(dtype: str, device: str) -> float | None:
    """FLOP/s of the best of several square products; None where the machine has no such product."""
    best = 0.0
    for n in (512, 1024, 2048) if device == "cpu" else (4096, 8192):
        try:
            function = _product(n, dtype, device)
            seconds = seconds_per_call(function, device, 0.3, best=True)
        except RuntimeError:
            return best or None
        best = max(best, 2 * n**3 / seconds)
        if seconds > 0.05 and device == "cpu":  # no fast path for this type: larger sizes would take seconds
            break
    return best


def _product(n: int, dtype: str, device: str) -> Callable[[], Any]:
    if dtype == "int8":
        a, b = (torch.randint(-100, 100, (n, n), dtype=torch.int8, device=device) for _ in range(2))
        columns = b.t().contiguous().t()  # cuBLAS takes int8 only with B stored by columns
        return lambda: torch._int_mm(a, columns)
    if dtype == "tfloat32":
        x, y = (torch.randn(n, n, device=device) for _ in range(2))

        def product() -> Any:
            before = torch.backends.cuda.matmul.allow_tf32
            torch.backends.cuda.matmul.allow_tf32 = True
            try:
                return x @ y
            finally:
                torch.backends.cuda.matmul.allow_tf32 = before

        return product
    x, y = (torch.randn(n, n, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    return lambda: torch.mm(x, y)


def fault_seconds_per_byte(size: int = 64 << 20) -> float:
    """What a fresh byte of memory costs beyond writing it: first touch less second touch of a new mapping."""
    samples = []
    for _ in range(7):
        with mmap.mmap(-1, size) as mapping:
            fresh = torch.frombuffer(mapping, dtype=torch.uint8)
            times = []
            for _ in range(2):
                start = time.perf_counter()
                fresh.fill_(1)  # by all threads, as ops touch their results
                times.append(time.perf_counter() - start)
            del fresh
            samples.append(max(times[0] - times[1], 0.0) / size)
    return median(samples)


def dispatch_costs(device: str) -> tuple[float, float]:
    """Host seconds of one small op and of one view, as modules in a chain call them."""
    chain = torch.nn.Sequential(*(torch.nn.ReLU() for _ in range(64)))
    x = torch.rand(4, 4, device=device)

    def views() -> None:
        y = x
        for _ in range(64):
            y = y.transpose(0, 1)

    def host(function: Callable[[], Any]) -> float:
        samples = []
        for _ in range(60):
            start = time.perf_counter()
            function()
            samples.append((time.perf_counter() - start) / 64)
            if device == "cuda":
                torch.cuda.synchronize()
        return median(samples[10:])

    with torch.inference_mode():
        return host(lambda: chain(x)), host(views)


def roofs(device: str, journal: Any, say: Progress) -> dict[str, Any]:
    """Everything of the spec but its probes."""
    journal.once("busy", busy)
    say("dispatch cost")
    op_s, view_s = journal.once("dispatch", lambda: dispatch_costs(device))
    dtypes = ("float32", "bfloat16", "float16", "float64", "int8") + (("tfloat32",) if device == "cuda" else ())
    peaks: dict[str, float] = {}
    for dtype in dtypes:
        say(f"matmul peak, {dtype}")
        if rate := journal.once(f"peak {dtype}", lambda dtype=dtype: matmul_peak(dtype, device)):
            peaks[dtype] = rate
    data: dict[str, Any] = {
        "version": 1,
        "kind": "processor",
        "name": device,
        "description": f"this machine: {identity(device)['device']}",
        "machine": {**identity(device), "python": platform.python_version(), "cores": str(os.cpu_count()), **journal.once("busy", busy)},
        "units": _units(peaks, device),
        "memories": _cuda_memories(journal, say) if device == "cuda" else _cpu_memories(journal, say),
        "dispatch": {
            "per_op_s": _constant(op_s, "s"),
            "per_view_s": _constant(view_s, "s"),
            "asynchronous": device == "cuda",
        },
    }
    if device == "cpu" and platform.libc_ver()[0] == "glibc":
        say("page faults")
        data["fault_s_per_byte"] = _constant(journal.once("faults", fault_seconds_per_byte), "s/B")
    if device == "cuda":
        data["dispatch"]["in_graph_s"] = _constant(1.1e-6, "s", "one small kernel in a CUDA graph on an H200", "assumed")
        data["links"] = {"host": _host_link(journal, say)}
    return data


def _units(peaks: dict[str, float], device: str) -> dict[str, Any]:
    vector = {d: _constant(rate / 2, "FLOP/s", "half the matmul peak: one operation where it does a multiply and an add", "assumed")
              for d, rate in peaks.items() if d in ("float32", "float64", "bfloat16", "float16")}  # fmt: skip
    if "bfloat16" in vector:  # reduced types are widened to float32 for element-wise work
        vector["bfloat16"] = vector["float32"]
    if "float16" in vector:
        vector["float16"] = vector["float32"]
    units: dict[str, Any] = {
        "matrix": {"serves": ["matrix"], "peak_flops": {d: _constant(rate, "FLOP/s") for d, rate in peaks.items()}},
        "vector": {"serves": ["vector"], "peak_flops": vector},
    }
    if device == "cuda" and "tfloat32" in peaks and torch.backends.cudnn.allow_tf32:
        tf32 = _constant(peaks["tfloat32"], "FLOP/s", "torch runs float32 convolutions in TF32 unless told not to")
        units["convolution"] = {"serves": ["conv"], "peak_flops": {"float32": tf32}}
    return units


def _cpu_memories(journal: Any, say: Progress) -> dict[str, Any]:
    threads, caches = torch.get_num_threads(), cache_sizes()
    memories: dict[str, Any] = {}
    for level, size in caches.items():
        say(f"bandwidth of {level}")
        private = level in ("l1", "l2")
        if size <= 64 * 1024:
            rate = journal.once(f"bandwidth {level}", lambda size=size: small_cache_bandwidth(size)) * threads
        else:
            total = size * threads if private else size
            rate = journal.once(f"bandwidth {level}", lambda total=total: bandwidth(total // 2, "cpu"))
        memories[level] = {
            "bandwidth_bps": _constant(rate, "B/s"),
            "capacity_bytes": _constant(size * (threads if private else 1), "B", "operating system", "read"),
            "copies": threads if private else 1,
            "retains": True,
        }
    say("bandwidth of memory")
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rate = journal.once("bandwidth dram", lambda: bandwidth(max(4 * max(caches.values()), 256 << 20), "cpu"))
    memories["dram"] = {"bandwidth_bps": _constant(rate, "B/s"), "capacity_bytes": _constant(pages, "B", "operating system", "read")}
    return memories


def _cuda_memories(journal: Any, say: Progress) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    l2 = int(getattr(properties, "L2_cache_size", 40 << 20))
    say("bandwidth of l2")
    l2_rate = journal.once("bandwidth l2", lambda: bandwidth(l2 // 4, "cuda"))
    say("bandwidth of memory")
    rate = journal.once("bandwidth hbm", lambda: bandwidth(4 << 30, "cuda"))
    return {
        "l2": {
            "bandwidth_bps": _constant(max(l2_rate, rate), "B/s"),
            "capacity_bytes": _constant(l2, "B", "driver", "read"),
            "retains": True,
        },
        "hbm": {"bandwidth_bps": _constant(rate, "B/s"), "capacity_bytes": _constant(properties.total_memory, "B", "driver", "read")},
    }


def _host_link(journal: Any, say: Progress) -> dict[str, Any]:
    say("host link")

    def measure() -> list[float]:
        times = []
        for size in (4096, 64 << 20):
            host = torch.empty(size, dtype=torch.uint8).pin_memory()
            there = torch.empty(size, dtype=torch.uint8, device="cuda")
            samples = []
            for _ in range(20):
                torch.cuda.synchronize()
                start = time.perf_counter()
                there.copy_(host, non_blocking=True)
                torch.cuda.synchronize()
                samples.append(time.perf_counter() - start)
            times.append(median(samples))
        return [times[0], (64 << 20) / max(times[1] - times[0], 1e-9)]

    latency, rate = journal.once("host link", measure)
    return {"latency_s": _constant(latency, "s"), "bandwidth_bps": _constant(rate, "B/s")}


def time_probes(device: str, data: dict[str, Any], journal: Any, say: Progress, quick: bool) -> list[dict[str, Any]]:
    """Time every probe; its dispatch cost is taken off where the device waits for it."""
    launch_s = 0.0 if device == "cuda" else data["dispatch"]["per_op_s"]["value"]
    cases = probe_cases(device, ("float32", "bfloat16"))
    cases = quick_cases(cases) if quick else cases
    last_cache = max(cache_sizes().values()) if device == "cpu" else 64 << 20
    records: dict[str, dict[str, Any]] = {}
    for turn in ("first", "second"):  # a burst of other work on the machine hits a probe once, not twice
        for number, case in enumerate(cases, 1):
            say(f"probe {number}/{len(cases)}, {turn} time: {case.name}, {case.dtype}")
            key = f"probe {case.dtype} {case.name}"
            record = journal.once(f"{key} {turn}", lambda case=case, key=key: _time_probe(case, device, last_cache, records.get(key)))
            records[key] = min(records.get(key, record), record, key=lambda r: float(r["seconds"]))
    return [{**r, "seconds": max(r["seconds"] - launch_s, r["seconds"] / 10)} for r in records.values()]


def _time_probe(case: ProbeCase, device: str, last_cache: int, known: dict[str, Any] | None = None) -> dict[str, Any]:
    """Time one probe; what it computes is captured unless `known` from an earlier time."""
    module, inputs = case.build()
    module.eval().requires_grad_(False)
    weight_bytes = max(sum(p.numel() * p.element_size() for p in module.parameters()), 1)
    copies = min(max(2 * last_cache // weight_bytes, 1), 64) if any(True for _ in module.parameters()) else 1
    modules = [module] + [copy.deepcopy(module) for _ in range(copies - 1)]  # of the weights alone: inputs may be large
    state = {"next": 0}

    def call() -> None:
        state["next"] = (state["next"] + 1) % len(modules)
        modules[state["next"]](*inputs)

    with torch.inference_mode():
        seconds = seconds_per_call(call, device, 0.06)
        host_s = _host_seconds(call) if device == "cuda" else None
    facts = known or probe_record(case, module, inputs)
    return {**facts, "seconds": seconds, "host_s": host_s}


def _host_seconds(function: Callable[[], Any], calls: int = 20) -> float:
    """Host time of handing one op to a device that is kept busy meanwhile."""
    samples = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        samples.append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return median(samples)


def probe_record(case: ProbeCase, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """What the spec keeps of a probe besides its times."""
    workload = capture_case(ModelCase(case.name, module, inputs, 1, case.dtype))
    op = max((op for op in workload.ops if op.kind != "view"), key=lambda op: op.bytes)
    taps = 1
    if op.kind == "conv":
        taps = max(int(op.loops[0].dims.get("R", 1) * op.loops[0].dims.get("S", 1)), 1)
    return {
        "family": case.family,
        "dtype": case.dtype,
        "flops": op.flops,
        "read_bytes": [o.bytes for o in op.inputs],
        "write_bytes": sum(o.bytes for o in op.outputs),
        "matmul": list(op.loops[0].as_matmul()) if op.loops else None,
        "taps": taps,
    }
