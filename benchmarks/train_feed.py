"""What it costs to bring batches to the GPU, and what recomputing activations saves.

python benchmarks/train_feed.py     two minutes on a CUDA GPU with 30 GB free; writes results/compress-train-feed-<machine>.json

feed       training in bfloat16 from each of the three ways of train/feed.py, which take turns:
             step_ms  wall time of a step      wait_ms  the host waited for a batch
             gap_ms   the GPU between the last kernel of a step and the first of the next: gather, copy, preparation
             copy_ms  the batch's bytes at the measured rate of a pinned copy: what a transfer takes at least, hidden or not
recompute  peak memory and time of forward and backward as they are and with every block recomputed

`--device cpu --small` tries the script out on any machine; its times say nothing about transfers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import write_results
from torch import Tensor, nn

from ridgeline.core.profile import Timing
from ridgeline.core.timing import summarise, time_callable
from ridgeline.measure.environment import machine_name
from ridgeline.train.feed import Batch, Mode, batches
from ridgeline.train.loss import cross_entropy
from ridgeline.train.recompute import recompute_cost
from ridgeline.train.seeds import epoch_order
from ridgeline.workload.case import CaseOptions
from ridgeline.workload.data import Split
from ridgeline.workload.models import build_named

MODES: tuple[Mode, ...] = ("resident", "prefetch", "blocking")
WARM_UP, STEPS, ROUNDS = 10, 60, 3


@dataclass(frozen=True, slots=True)
class Case:
    """One model on images of one size."""

    model: str
    rows: int
    pixels: int
    batch: int


FEED = (Case("resnet20", 50_000, 32, 512), Case("resnet18", 8_192, 224, 256))
RECOMPUTE = (("resnet50", {"batch": 128}), ("smollm2-135m", {"batch": 8, "context": 1024}))
SMALL_FEED = (Case("resnet20", 64, 32, 8),)
SMALL_RECOMPUTE = (("resnet20", {"batch": 4}),)


class Trainer:
    """A model with what a step needs."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.model = build_named(case.model, CaseOptions(device=str(device))).module.requires_grad_().train()
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, fused=device.type == "cuda")
        self.device = device

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = cross_entropy(self.model(inputs), targets)
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)


def normalised(images: Tensor) -> Tensor:
    return images.to(torch.float32).div_(127.5).sub_(1.0)


def feed_rows(case: Case, device: torch.device, steps: int) -> list[dict[str, Any]]:
    """One row a mode; the modes take turns, so that the machine's clocks are the same for all."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (case.rows, 3, case.pixels, case.pixels), dtype=torch.uint8, generator=generator)
    split = Split(images, torch.randint(10, (case.rows,), generator=generator))
    trainer = Trainer(case, device)
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for _ in range(ROUNDS):
        for mode in MODES:
            fed = batches(
                split, lambda epoch: epoch_order(case.rows, 0, epoch), batch=case.batch, steps=WARM_UP + steps, device=device, mode=mode,
                prepare=normalised,
            )  # fmt: skip
            found[mode].append(timed(trainer, fed, steps))
    batch_bytes = case.batch * (images[0].numel() + 8)
    copy_s = pinned_copy(batch_bytes, device).median_s
    rows = []
    for mode in MODES:
        medians = {name: statistics.median(one[name] for one in found[mode]) for name in found[mode][0]}
        rows.append({
            "kind": "feed", "model": case.model, "pixels": case.pixels, "batch": case.batch, "mode": mode, "batch_bytes": batch_bytes,
            "rounds": ROUNDS, "steps": steps, **medians, "copy_ms": copy_s * 1e3, "samples_per_s": case.batch / medians["step_ms"] * 1e3,
        })  # fmt: skip
    return rows


def timed(trainer: Trainer, fed: Iterator[Batch], steps: int) -> dict[str, float]:
    """Milliseconds of the steps after the warm-up."""
    mark = marks(trainer.device)
    waits, gaps, start, before = [], [], 0.0, None
    for batch in fed:
        ready = mark()
        if batch.step >= WARM_UP:
            waits.append(batch.wait_s)
            gaps.append((before, ready))
        trainer.step(batch.inputs, batch.targets)
        if batch.step == WARM_UP - 1:
            synchronise(trainer.device)
            start = time.perf_counter()
        before = mark()
    synchronise(trainer.device)
    wall_s = time.perf_counter() - start
    between = [seconds(first, last, trainer.device) for first, last in gaps]
    return {"step_ms": wall_s / steps * 1e3, "wait_ms": statistics.median(waits) * 1e3, "gap_ms": statistics.median(between) * 1e3}


def marks(device: torch.device) -> Callable[[], Any]:
    if device.type != "cuda":
        return time.perf_counter

    def mark() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    return mark


def seconds(first: Any, last: Any, device: torch.device) -> float:
    return float(first.elapsed_time(last)) / 1e3 if device.type == "cuda" else float(last - first)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pinned_copy(size: int, device: torch.device) -> Timing:
    """One copy of `size` bytes from pinned memory with nothing else to do."""
    if device.type != "cuda":
        return summarise([0.0])
    host, there = torch.empty(size, dtype=torch.uint8).pin_memory(), torch.empty(size, dtype=torch.uint8, device=device)
    return time_callable(lambda: there.copy_(host, non_blocking=True), device=str(device), min_repeats=20)


def recompute_row(name: str, options: dict[str, int], device: torch.device) -> dict[str, Any]:
    case = build_named(name, CaseOptions(device=str(device), dtype="bfloat16" if device.type == "cuda" else "float32", **options))
    model: nn.Module = case.module.requires_grad_()
    return {"kind": "recompute", "model": name, **options, "dtype": case.dtype, **recompute_cost(model, case.args).to_dict()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a few steps of small models, to try the script out")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("needs CUDA: transfers to a GPU are what is measured; --device cpu --small only tries the script out")
    device = torch.device(options.device)
    torch.manual_seed(0)
    rows = []
    for case in SMALL_FEED if options.small else FEED:
        rows += feed_rows(case, device, options.steps)
        for row in rows[-3:]:
            times = (
                f"step {row['step_ms']:8.3f} ms  wait {row['wait_ms']:7.3f} ms  gap {row['gap_ms']:7.3f} ms  copy {row['copy_ms']:6.3f} ms"
            )
            print(f"{row['model']:12} {row['mode']:9} {times}  {row['samples_per_s']:,.0f} samples/s", flush=True)
    for name, sizes in SMALL_RECOMPUTE if options.small else RECOMPUTE:
        row = recompute_row(name, sizes, device)
        rows.append(row)
        memory = f"{row['before_bytes'] / 2**30:.2f} to {row['after_bytes'] / 2**30:.2f} GiB ({row['memory_ratio']:.2f})"
        took = f"{row['before']['median_s'] * 1e3:.1f} to {row['after']['median_s'] * 1e3:.1f} ms ({row['time_ratio']:.2f})"
        print(f"{name:12} recompute of {row['blocks']} blocks: {memory}, {took}", flush=True)
    label = machine_name(options.device).lower().removeprefix("nvidia ") if device.type == "cuda" else "cpu"
    print(write_results("compress", "train-feed", label, {"device": machine_name(options.device)}, rows, options.out))


if __name__ == "__main__":
    main()
