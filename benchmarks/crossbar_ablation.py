"""What each step from a naive crossbar simulation to the engines brings in time and memory, and what the naive mode's tensors weigh.

    ResNet-18, 224 x 224 ──crossbar_naive.py, one habit after another given up──> ──the package's engines──> rows "step"
    its distinct layers  ──footprint.materialised_bytes | the same tensors of the naive mode──>             rows "layer": bytes, ratio

python benchmarks/crossbar_ablation.py [--threads 2] [--rounds 3]                CPU, batch 1, 32-row arrays, some 5 minutes a round
python benchmarks/crossbar_ablation.py --device cuda --batch 8 32                GPU, 64-row arrays

times   rounds of all steps in turn, medians; a ratio compares passes of the same round. Two rows read noisy cells, only to be compared
        with each other. A step that does not fit the memory has a row that says so. On a CPU each pass has a process of its own.
memory  peak of a pass above the loaded model and what was prepared from it: torch.cuda.max_memory_allocated on a GPU; on a CPU the
        highest resident size (VmHWM) of the pass's process
Slices (1,1,2,2) both, 4096 ADC levels, granularity (1,64) and (64,64), 4 levels. Batch norms stay layers of their own. At the start, on a
small layer: the naive mode's codes are those of the reference, and every step's outputs too.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import write_results
from crossbar_cpu import CHIP, CLEAR_PEAK, cell_bytes, resident_bytes
from crossbar_naive import Habits, NaiveLayer, forget, layers, naive, prepared_bytes
from torch import Tensor, nn

from ridgeline.core.spec import parse_spec
from ridgeline.crossbar.engine import reference
from ridgeline.crossbar.footprint import materialised_bytes
from ridgeline.crossbar.layer.convert import to_crossbar
from ridgeline.measure.environment import machine_name
from ridgeline.target.crossbar import CrossbarSpec
from ridgeline.workload.case import CaseOptions
from ridgeline.workload.models import build_named

READ_SIGMA = 0.05
SHORTEST_S = 0.2  # a GPU's passes are repeated for so long in each round
MOST_PASSES = 20
SMALL = 64  # pixels of an image that is run first, to have everything loaded
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Found = tuple[dict[str, list[float]], dict[str, dict[str, int]]]


@dataclass(frozen=True, slots=True)
class Step:
    """One row."""

    name: str
    before: str | None
    """What it is compared with; the row above but where that was no gain."""
    habits: Habits | None = None
    engine: str = ""
    read_sigma: float = 0.0


def steps_on(device: str) -> dict[str, Step]:
    full = Habits()
    dropped = replace(full, copies=False)
    no_graph = replace(dropped, graph=False)
    quiet = replace(no_graph, zero_noise=False)
    vectorised = replace(quiet, level_loop=False)
    pairs = replace(vectorised, pairs_at_once=False)
    prepared = replace(pairs, weights_each_call=False)
    compiled = replace(prepared, compiled=True)
    on_gpu = device.startswith("cuda")
    found = [
        Step("naive", None, full),
        Step("training copies dropped", "naive", dropped),
        Step("autograd bypassed", "training copies dropped", no_graph),
        Step("zero noise skipped", "autograd bypassed", quiet),
        Step("noisy reads, level by level", None, quiet, read_sigma=READ_SIGMA),
        Step("noisy reads, vectorised", "noisy reads, level by level", vectorised, read_sigma=READ_SIGMA),
        Step("one slice pair at a time", "zero noise skipped", pairs),
        Step("prepared weights", "one slice pair at a time", prepared),
        Step("torch.compile", "prepared weights", compiled),
        Step("float16 dots", "torch.compile", replace(compiled, half=True)),
        Step("engine blocked", "float16 dots" if on_gpu else "torch.compile", engine="blocked"),
        Step(f"engine {'fused' if on_gpu else 'native'}", "engine blocked", engine="fused" if on_gpu else "native"),
    ]
    return {step.name: step for step in found}


def chip(rows: int, read_sigma: float = 0.0) -> CrossbarSpec:
    data = {**CHIP, "array": {"rows": rows, "columns": rows}, "cell": {**CHIP["cell"], "read_sigma": read_sigma}}  # type: ignore[dict-item]
    return parse_spec(CrossbarSpec, data, "benchmark.toml")


def made(step: Step, rows: int, device: str) -> nn.Module:
    """ResNet-18 as the step computes it."""
    torch.manual_seed(0)
    digital = build_named("resnet18", CaseOptions(device="cpu")).module.eval().to(device)
    if step.habits is not None:
        return naive(digital, chip(rows, step.read_sigma), step.habits)
    return to_crossbar(digital, chip(rows, step.read_sigma), engine=f"exactly:{step.engine}", fold=False).eval()


def images(batch: int, device: str) -> Tensor:
    return torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0)).to(device)


def one_pass(step: Step, model: nn.Module, x: Tensor) -> None:
    with torch.set_grad_enabled(step.habits is not None and step.habits.graph):
        model(x)
    if x.is_cuda:
        torch.cuda.synchronize()


def check(steps: dict[str, Step], rows: int, device: str) -> None:
    """The naive mode's codes, and what every step without noise makes of them, are the reference's."""
    torch.manual_seed(0)
    layer = nn.Conv2d(12, 40, 3, padding=1).to(device)
    x = torch.randn(2, 12, 9, 9, device=device)
    weight, bias = (parameter.detach().cpu() for parameter in layer.parameters())
    patches = nn.functional.unfold(x.cpu(), 3, padding=1).transpose(1, 2).flatten(0, 1)
    exact = reference.matmul(patches, weight.flatten(1).T, chip(rows))
    image = exact.out.unflatten(0, (2, -1)).transpose(1, 2).unflatten(2, (9, 9)) + bias[:, None, None]
    for step in steps.values():
        if step.habits is None or step.read_sigma:
            continue
        on_arrays = NaiveLayer(layer, chip(rows), step.habits)
        on_arrays.codes = torch.empty(0)
        with torch.no_grad():
            out = on_arrays(x).cpu()
        if step.habits.pairs_at_once and not torch.equal(on_arrays.codes.cpu(), exact.codes):
            raise SystemExit(f"{step.name}: codes differ from the reference's")
        if float((out - image).abs().max()) > 1e-5 * float(image.abs().max()):
            raise SystemExit(f"{step.name}: outputs differ from the reference's")


def gpu_peak(step: Step, model: nn.Module, x: Tensor) -> int:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    one_pass(step, model, x)
    return torch.cuda.max_memory_allocated() - before


def resident_peak(call: Callable[[], Any]) -> int:
    """Highest resident size while it runs, above what there was before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR_PEAK.write_text("5", encoding="utf-8")
    before = resident_bytes("VmRSS")
    call()
    return resident_bytes("VmHWM") - before


def measured_here(step: Step, rows: int, batch: int, clock: str) -> dict[str, float]:
    """On a CPU, in this process: a pass, after one that prepares, compiles and lets libraries take what they keep."""
    model, x = made(step, rows, "cpu"), images(batch, "cpu")
    compiled = step.habits is not None and step.habits.compiled
    one_pass(step, model, x if compiled else x[..., :SMALL, :SMALL])  # what is compiled fits one size only
    forget(model)
    seconds: list[float] = []
    peak = resident_peak(lambda: seconds.append(timed(step, model, x, 1, CLOCKS[clock])))
    return {"seconds": seconds[0], "peak_bytes": peak, "prepared_bytes": prepared_bytes(model) or cell_bytes(model)}


def in_a_process(step: Step, given: argparse.Namespace, batch: int) -> dict[str, Any]:
    asked = [sys.executable, __file__, "--only", step.name, "--threads", str(given.threads), "--rows", str(given.rows)]
    asked += ["--clock", given.clock, "--batch", str(batch)]
    found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    return dict(json.loads(found))


def timed(step: Step, model: nn.Module, x: Tensor, passes: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one pass."""
    start = clock()
    for _ in range(passes):
        one_pass(step, model, x)
    return (clock() - start) / passes


def measured(steps: dict[str, Step], given: argparse.Namespace, batch: int) -> list[dict[str, Any]]:
    """Rows of all steps at one batch size."""
    find = found_on_gpu if given.device.startswith("cuda") else found_on_cpu
    times, memory = find(steps, given, batch)
    return [row_of(step, times, memory, batch) for step in steps.values()]


def found_on_cpu(steps: dict[str, Step], given: argparse.Namespace, batch: int) -> Found:
    times: dict[str, list[float]] = {name: [] for name in steps}
    memory: dict[str, dict[str, int]] = {}
    for _ in range(given.rounds):
        for name, step in steps.items():
            told = in_a_process(step, given, batch)
            times[name].append(told.pop("seconds"))
            memory[name] = told
            print(f"{name:28} {times[name][-1]:8.2f} s {told['peak_bytes'] / 2**20:8.1f} MiB", flush=True)
    return times, memory


def found_on_gpu(steps: dict[str, Step], given: argparse.Namespace, batch: int) -> Found:
    x, models = images(batch, given.device), {}
    memory: dict[str, dict[str, int]] = {}
    passes: dict[str, int] = {}
    for name, step in steps.items():
        model = None  # what did not fit goes first
        gc.collect()
        torch.cuda.empty_cache()
        try:
            model = made(step, given.rows, given.device)
            one_pass(step, model, x)  # prepares and compiles
            forget(model)
            passes[name] = max(1, min(MOST_PASSES, int(SHORTEST_S / timed(step, model, x, 1))))
            forget(model)
            memory[name] = {"peak_bytes": gpu_peak(step, model, x), "prepared_bytes": prepared_bytes(model) or cell_bytes(model)}
            forget(model)
            models[name] = model
        except torch.OutOfMemoryError:
            print(f"{name}: out of memory at batch {batch}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(given.rounds):
        for name, model in models.items():
            times[name].append(timed(steps[name], model, x, passes[name]))
            forget(model)
    return times, memory


def row_of(step: Step, times: dict[str, list[float]], memory: dict[str, dict[str, int]], batch: int) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": "step", "step": step.name, "before": step.before, "read_sigma": step.read_sigma, "batch": batch}
    if step.name not in times:
        return row | {"why": "out of memory", "ms": None, "images_per_s": None, "peak_bytes": None, "prepared_bytes": None}
    mine = times[step.name]

    def faster_than(other: str | None) -> float | None:
        return median(theirs / ours for theirs, ours in zip(times[other], mine, strict=True)) if other in times else None

    def share_of(other: str | None) -> float | None:
        return memory[step.name]["peak_bytes"] / max(1, memory[other]["peak_bytes"]) if other in memory else None

    noisy = step.read_sigma > 0
    row |= {"ms": 1e3 * median(mine), "least_ms": 1e3 * min(mine), "images_per_s": batch / median(mine), **memory[step.name]}
    row |= {"times_as_fast_as_before": faster_than(step.before), "times_as_fast_as_naive": None if noisy else faster_than("naive")}
    row |= {"peak_over_before": share_of(step.before), "peak_over_naive": None if noisy else share_of("naive")}
    print(f"{step.name:28} batch {batch:3} {row['ms']:10.1f} ms {row['peak_bytes'] / 2**20:10.1f} MiB", flush=True)
    return row


def layer_rows(rows: int, batch: int, device: str) -> list[dict[str, Any]]:
    """Of each distinct shape: bytes by formula, and of the tensors the naive mode makes, without graph and copies."""
    habits = Habits(copies=False, graph=False, zero_noise=False)
    model = made(Step("layers", None, habits), rows, device)
    inputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, given: inputs.update({name: given[0]})

    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, layer in layers(model).items():
        layer.register_forward_pre_hook(keep(name))
    with torch.no_grad():
        model(images(batch, device))
    for name, layer in layers(model).items():
        x = inputs.pop(name)
        layer._forward_pre_hooks.clear()
        layer.bytes = {}
        with torch.no_grad():
            m = layer(x).numel() // layer.plan.n
        key = (m, layer.plan.k, layer.plan.n)
        if key in found:
            found[key]["times"] += 1
            continue
        predicted, sizes = materialised_bytes(layer.plan, m), dict(layer.bytes)
        peak = layer_peak(layer, x)
        found[key] = {"kind": "layer", "layer": name, "times": 1, "batch": batch, "m": m, "k": layer.plan.k, "n": layer.plan.n,
                      "arrays": layer.plan.arrays, "predicted_bytes": predicted, "measured_bytes": sizes,
                      "measured_over_predicted": sum(sizes.values()) / sum(predicted.values()), "peak_bytes": peak,
                      "peak_over_predicted": peak / sum(predicted.values())}  # fmt: skip
    return list(found.values())


def layer_peak(layer: NaiveLayer, x: Tensor) -> int:
    layer.bytes = None

    def call() -> None:
        with torch.no_grad():
            layer(x)

    if not x.is_cuda:
        return resident_peak(call)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=None, help="default 1 on a CPU, 8 on a GPU")
    parser.add_argument("--rows", type=int, default=None, help="of an array; default 32 on a CPU, 64 on a GPU")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="cpu: processor time, for one thread where others compute too")
    parser.add_argument("--only", default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    on_gpu = given.device.startswith("cuda")
    given.rows, given.batch = given.rows or (64 if on_gpu else 32), given.batch or [8 if on_gpu else 1]
    torch.set_num_threads(given.threads)
    steps = steps_on(given.device)
    if given.only:
        print(json.dumps(measured_here(steps[given.only], given.rows, given.batch[0], given.clock)))
        return
    check(steps, given.rows, given.device)
    rows = layer_rows(given.rows, given.batch[0], given.device)
    for batch in given.batch:
        rows += measured(steps, given, batch)
    label = machine_name(given.device).lower().removeprefix("nvidia ").replace(" ", "-") if on_gpu else "cpu"
    peak = "torch.cuda.max_memory_allocated" if on_gpu else "VmHWM of a process of its own"
    machine = {
        "name": machine_name(given.device),
        "threads": given.threads,
        "array_rows": given.rows,
        "peak_bytes_by": peak,
        "clock": given.clock,
    }
    print(f"written: {write_results('crossbar', 'ablation', label, machine, rows, given.out)}")


if __name__ == "__main__":
    main()
