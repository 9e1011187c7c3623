"""Predicted against measured whole-model latency on this machine.

python benchmarks/analyze.py cpu            calibrates if needed, then times each model; ten minutes on two cores
python benchmarks/analyze.py cuda --label h200 [--target h200]

per model, batch, dtype: estimate(capture(model), target) beside the median of eager runs, error, limit
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import write_results

from ridgeline import capture, estimate, load_target
from ridgeline.core.timing import summarise
from ridgeline.measure.environment import machine_name
from ridgeline.workload.capture import resolve
from ridgeline.workload.case import CaseOptions

MODELS = ("resnet18", "mobilenet-v2", "vit-b16", "bert-base")


def samples(model: str, batch: int, dtype: str, device: str, rounds: int, budget_s: float) -> list[float]:
    """Latencies of eager runs, warm."""
    case = resolve(model, CaseOptions(batch=batch, dtype=dtype, device=device))
    found: list[float] = []
    with torch.inference_mode():
        for _ in range(3):
            case.module(*case.args, **case.kwargs)
        stop = time.perf_counter() + budget_s
        while len(found) < 5 or (len(found) < rounds and time.perf_counter() < stop):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            case.module(*case.args, **case.kwargs)
            if device == "cuda":
                torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
    return found


def fresh_samples(model: str, batch: int, dtype: str, device: str, rounds: int, budget_s: float) -> list[float]:
    """The same in a process of its own, as a user would start it: what ran before changes what the allocator gives back."""
    given = json.dumps([model, batch, dtype, device, rounds, budget_s])
    done = subprocess.run([sys.executable, __file__, "--samples", given], capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout)
    return found


def row(model: str, batch: int, dtype: str, device: str, target: str, rounds: int, budget_s: float) -> dict[str, Any]:
    predicted = estimate(capture(model, batch=batch, dtype=dtype), load_target(target)).total
    measured = summarise(fresh_samples(model, batch, dtype, device, rounds, budget_s))
    return {
        "model": model,
        "batch": batch,
        "dtype": dtype,
        "target": target,
        "predicted_s": predicted.time_s,
        "limit_s": predicted.limit_s,
        "bottleneck": predicted.bottleneck,
        "measured_s": measured.median_s,
        "p20_s": measured.p20_s,
        "p80_s": measured.p80_s,
        "repeats": measured.repeats,
        "error": predicted.time_s / measured.median_s - 1,
    }


def line(found: dict[str, Any]) -> str:
    times = f"{found['predicted_s'] * 1e3:>9.3f} ms{found['measured_s'] * 1e3:>9.3f} ms{found['error']:>+9.1%}"
    return f"{found['model']:<14}{found['batch']:>6} {found['dtype']:<10}{times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("device", choices=("cpu", "cuda"), nargs="?", default="cpu")
    parser.add_argument("--label", default=None, help="machine's name in the result file (default: the device)")
    parser.add_argument("--target", default=None, help="target to predict with (default: this machine, calibrated)")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--dtypes", default=None)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--budget", type=float, default=15.0, help="seconds a row")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--samples", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.samples:
        print(json.dumps(samples(*json.loads(options.samples))))
        return
    dtypes = (options.dtypes or ("float32" if options.device == "cpu" else "float32,bfloat16")).split(",")
    target = options.target or options.device
    load_target(target, progress=lambda message: print(message, flush=True))
    rows = []
    print(f"{'model':<14}{'batch':>6} {'dtype':<10}{'predicted':>12}{'measured':>12}{'error':>9}")
    for dtype in dtypes:
        for model in MODELS:
            for batch in map(int, options.batches.split(",")):
                found = row(model, batch, dtype, options.device, target, options.rounds, options.budget)
                rows.append(found)
                print(line(found), flush=True)
    errors = [abs(r["error"]) for r in rows]
    print(f"mean absolute error {sum(errors) / len(errors):.1%}, median {median(errors):.1%}, worst {max(errors):.1%}")
    machine = {"device": machine_name(options.device), "threads": torch.get_num_threads()}
    print(write_results("analyze", "latency", options.label or options.device, machine, rows, options.out))


if __name__ == "__main__":
    main()
