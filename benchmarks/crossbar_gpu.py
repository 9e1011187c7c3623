"""Whole networks on simulated arrays on a GPU: images a second, end to end, and peak memory, beside digital and the limit.

    model ──to_crossbar──> analog model ──passes of one batch, alone and as one CUDA graph──> images/s, peak bytes, shortcuts taken

python benchmarks/crossbar_gpu.py [--cases resnet18-64,resnet18-32,…] [--out FOLDER]        five minutes, most of it compiling kernels
    the file is written after every case

Chip: slices (1,1,2,2) of both operands, 4096 ADC levels (it loses something, so no slice collapses), granularity 64. Everything counts:
quantisation, im2col, noise, folded batch norms, the digital layers between. `limit`: the dots of all slice pairs at the measured dense
rate of the dtype they run in, plus conversions at 2 operations a lane and clock, as if neither overlapped with the other.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from common import write_results
from crossbar_tiles import chip, gpu_ms

from ridgeline.crossbar.layer.convert import to_crossbar
from ridgeline.crossbar.layer.layers import products
from ridgeline.measure.environment import machine_name
from ridgeline.workload.case import CaseOptions
from ridgeline.workload.models import build_named

CASES = {  # name: (model, batch, array rows, read sigma)
    "resnet18-64": ("resnet18", 32, 64, 0.0), "resnet18-64-noise": ("resnet18", 32, 64, 0.05),
    "resnet18-32": ("resnet18", 32, 32, 0.0), "resnet18-32-noise": ("resnet18", 32, 32, 0.05),
    "resnet18-256": ("resnet18", 256, 64, 0.0), "resnet50-64": ("resnet50", 32, 64, 0.0), "mobilenet-v2-64": ("mobilenet-v2", 32, 64, 0.0),
}  # fmt: skip
LANES_PER_CLOCK = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--layers", action="store_true", help="GPU time of each kernel of the first case, by the profiler")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    rates = ceilings()
    machine = {"device": machine_name("cuda"), **rates}
    rows = []
    for name in options.cases.split(","):
        rows.append(measured(name, rates))
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in rows[-1].items()}, flush=True)
        path = write_results("crossbar", "gpu", "h200", machine, rows, options.out)
    if options.layers:
        profiled(options.cases.split(",")[0])
    print(path)


def ceilings() -> dict[str, float]:
    """Operations a second of dense products here, and lane-operations a second of the multiprocessors at their highest clock."""
    a = torch.randint(-3, 4, (8192, 8192), device="cuda", dtype=torch.int8)
    half, eighth = a.to(torch.float16), a.to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    operations = 2 * 8192**3
    properties = torch.cuda.get_device_properties(0)
    clock_hz = 1.98e9 if not hasattr(properties, "clock_rate") else properties.clock_rate * 1e3
    return {
        "int8_ops": operations / gpu_ms(lambda: torch._int_mm(a, a.t())) * 1e3,
        "float8_e4m3fn_ops": operations
        / gpu_ms(lambda: torch._scaled_mm(eighth, eighth.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True))
        * 1e3,
        "float16_ops": operations / gpu_ms(lambda: half @ half) * 1e3,
        "lane_ops": properties.multi_processor_count * LANES_PER_CLOCK * clock_hz,
    }


def model_and_input(name: str) -> tuple[Any, Any, torch.Tensor]:
    model_name, batch, rows, sigma = CASES[name]
    torch.manual_seed(0)
    digital = build_named(model_name, CaseOptions(device="cpu")).module.eval().cuda()
    x = torch.randn(batch, 3, 224, 224, device="cuda")
    return digital, to_crossbar(digital, chip(rows, sigma), engine="auto"), x


@torch.inference_mode()
def measured(name: str, rates: dict[str, float]) -> dict[str, Any]:
    model_name, batch, rows, sigma = CASES[name]
    with torch.inference_mode(False):
        digital, analog, x = model_and_input(name)
    digital_ms = gpu_ms(lambda: digital(x))
    started = time.perf_counter()
    analog(x)
    torch.cuda.synchronize()
    first_s = time.perf_counter() - started
    torch.cuda.reset_peak_memory_stats()
    eager_ms = gpu_ms(lambda: analog(x), 10)
    peak = torch.cuda.max_memory_allocated()
    graph_ms = graphed(analog, x)
    best = min(eager_ms, graph_ms or eager_ms)
    limit_ms = limit(analog, x, rates) * 1e3
    reports = [product.report() for product in products(analog).values()]
    shortcuts: dict[str, int] = {}
    engines: dict[str, int] = {}
    for report in reports:
        engines[report["engine"]] = engines.get(report["engine"], 0) + 1
        for shortcut in report["shortcuts"]:
            shortcuts[shortcut] = shortcuts.get(shortcut, 0) + 1
    return {
        "case": name, "model": model_name, "batch": batch, "rows": rows, "read_sigma": sigma, "images_per_s": batch / best * 1e3,
        "eager_images_per_s": batch / eager_ms * 1e3, "graph_images_per_s": batch / graph_ms * 1e3 if graph_ms else None,
        "peak_gib": peak / 2**30, "digital_images_per_s": batch / digital_ms * 1e3, "limit_images_per_s": batch / limit_ms * 1e3,
        "percent_of_limit": 100 * limit_ms / best, "first_call_s": first_s, "engines": engines, "shortcuts": shortcuts,
    }  # fmt: skip


def graphed(analog: Any, x: torch.Tensor) -> float | None:
    """ms of the pass as one CUDA graph; None where it cannot be one."""
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            analog(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            analog(x)
        return gpu_ms(graph.replay, 10)
    except RuntimeError as error:
        print(f"no graph: {str(error).splitlines()[0]}")
        return None


def limit(analog: Any, x: torch.Tensor, rates: dict[str, float]) -> float:
    """Seconds of a pass: every dot of every slice pair, and every conversion."""
    shapes: dict[str, int] = {}
    handles = [
        product.register_forward_hook(lambda module, given, out, name=name: shapes.update({name: out.numel()}))
        for name, product in products(analog).items()
    ]
    analog(x)
    for handle in handles:
        handle.remove()
    seconds = 0.0
    for name, product in products(analog).items():
        plan, report = product.plan, product.report()
        skipped = any("skipped" in shortcut for shortcut in report["shortcuts"])
        pairs = (len(plan.x.widths) - skipped) * len(plan.w.widths)
        rate = rates[next(shortcut.split()[2] for shortcut in report["shortcuts"] if shortcut.startswith("dots of")) + "_ops"]
        seconds += 2 * shapes[name] * plan.k * pairs / rate + 2 * shapes[name] * plan.arrays * pairs / rates["lane_ops"]
    return seconds


@torch.inference_mode()
def profiled(name: str) -> None:
    with torch.inference_mode(False):
        _, analog, x = model_and_input(name)
    for _ in range(2):
        analog(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        analog(x)
        torch.cuda.synchronize()
    print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=60))


if __name__ == "__main__":
    main()
