"""ResNet-18 on a crossbar, computed by a CPU, beside the same network in plain torch: ratio of times, and memory above the loaded model.

python benchmarks/crossbar_cpu.py [--threads 2] [--rounds 5] [--starts 3]            a few minutes

times   rounds of digital, blocked, native in turn, medians; a ratio compares passes of the same round. The same program differs from start
        to start (where its memory happens to lie): the start with the median ratio counts, the ratios of all are kept
memory  a process for each: highest resident size in a pass, less the loaded model (its weights, and the cells programmed from them)
224 x 224, batch 1, slices (1,1,2,2) both, 4096 ADC levels, granularity (1,64) and (64,64), arrays of 32 x 32, 4 levels, noise-free.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, median_low
from typing import Any

import torch
from common import write_results
from torch import Tensor, nn

from ridgeline.core.spec import parse_spec
from ridgeline.crossbar.layer.convert import to_crossbar
from ridgeline.crossbar.layer.product import CrossbarProduct
from ridgeline.measure.environment import machine_name
from ridgeline.target.crossbar import CrossbarSpec
from ridgeline.workload.capture import resolve
from ridgeline.workload.case import CaseOptions

CHIP = {
    "version": 1, "kind": "crossbar", "name": "benchmark", "array": {"rows": 32, "columns": 32},
    "operands": {"x_slices": [1, 1, 2, 2], "w_slices": [1, 1, 2, 2], "x_granularity": [1, 64], "w_granularity": [64, 64]},
    "dac": {"levels": 4, "vread_v": 0.2}, "cell": {"high_s": 1e-5, "low_s": 1e-8, "levels": 4}, "adc": {"levels": 4096},
}  # fmt: skip
ENGINES = ("digital", "blocked", "native")
STATUS, CLEAR_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def network(engine: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """ResNet-18, and its input."""
    case = resolve("resnet18", CaseOptions(batch=1, device="cpu"))
    if engine == "digital":
        return case.module.eval(), case.args
    spec = parse_spec(CrossbarSpec, CHIP, "benchmark.toml")
    return to_crossbar(case.module.eval(), spec, engine=f"exactly:{engine}", fold=False).eval(), case.args


def resident_bytes(field: str) -> int:
    line = next(line for line in STATUS.read_text(encoding="utf-8").splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def cell_bytes(model: nn.Module) -> int:
    """Of what was programmed from the weights and is kept: part of the loaded model."""
    kept: set[int] = set()
    total = 0
    for module in model.modules():
        for tensor in _tensors(module._prepared.state) if isinstance(module, CrossbarProduct) and module._prepared else ():
            if tensor.untyped_storage().data_ptr() not in kept:
                kept.add(tensor.untyped_storage().data_ptr())
                total += tensor.untyped_storage().nbytes()
    return total


def _tensors(state: Any, depth: int = 3) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    names = getattr(type(state), "__slots__", ()) or vars(state) if hasattr(state, "__dict__") or hasattr(type(state), "__slots__") else ()
    return [tensor for name in names for tensor in _tensors(getattr(state, name, None), depth - 1)] if depth else []


def memory_of(engine: str) -> dict[str, int]:
    """In this process: the peak of a pass above the loaded model, after a first pass that programs cells."""
    model, args = network(engine)
    before = resident_bytes("VmRSS")
    with torch.inference_mode():
        model(*args)
        ctypes.CDLL(None).malloc_trim(0)  # what programming took and freed is not the pass's
        CLEAR_PEAK.write_text("5", encoding="utf-8")
        for _ in range(3):
            model(*args)
    cells = cell_bytes(model)
    return {"cell_bytes": cells, "peak_above_model_bytes": resident_bytes("VmHWM") - before - cells}


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def times_of(engines: tuple[str, ...], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round; the digital network runs three times a round, as it is so short."""
    found: dict[str, list[float]] = {engine: [] for engine in engines}
    made = {engine: network(engine) for engine in engines}
    with torch.inference_mode():
        for model, args in made.values():
            model(*args)
        for _ in range(rounds):
            for engine, (model, args) in made.items():
                found[engine].append(
                    median(timed(lambda model=model, args=args: model(*args)) for _ in range(3 if engine == "digital" else 1))
                )
    return found


def in_a_process(given: argparse.Namespace, *asked: str) -> Any:
    """What this script prints last when asked so."""
    command = [sys.executable, __file__, *asked, "--threads", str(given.threads), "--rounds", str(given.rounds)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def ratio(times: dict[str, list[float]], engine: str) -> float:
    """Of an engine's passes to the digital ones of the same round."""
    return median(mine / digital for mine, digital in zip(times[engine], times["digital"], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory-of", choices=ENGINES)
    parser.add_argument("--times", action="store_true", help="of one start, as JSON")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.memory_of or given.times:
        print(json.dumps(memory_of(given.memory_of) if given.memory_of else times_of(ENGINES, given.rounds)))
        return
    starts, rows = [in_a_process(given, "--times") for _ in range(given.starts)], list[dict[str, Any]]()
    for engine in ENGINES:
        ratios = [ratio(times, engine) for times in starts]
        times, memory = starts[ratios.index(median_low(ratios))][engine], in_a_process(given, "--memory-of", engine)
        row = {"model": "resnet18", "batch": 1, "engine": engine, "threads": given.threads, "median_s": median(times),
               "least_s": min(times), "times_digital": median_low(ratios), "times_digital_of_starts": ratios, **memory}  # fmt: skip
        rows.append(row)
        row["memory_times_digital"] = row["peak_above_model_bytes"] / max(1, rows[0]["peak_above_model_bytes"])
        speed = f"{1e3 * row['median_s']:8.1f} ms {row['times_digital']:6.1f}x ({min(ratios):.1f} to {max(ratios):.1f}x)"
        print(f"{engine:8} {speed}   {row['peak_above_model_bytes'] / 2**20:6.1f} MiB {row['memory_times_digital']:6.2f}x")
    print(f"written: {write_results('crossbar', 'cpu', 'cpu', {'name': machine_name('cpu'), 'threads': given.threads}, rows, given.out)}")


if __name__ == "__main__":
    main()
