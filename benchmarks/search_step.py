"""One first-order search step (architecture on one batch, weights on another) of a DARTS supernet, policy by policy.

python benchmarks/search_step.py                      C=16, 8 cells, 32x32, bf16, batches 64, 256; writes results/search-step-<label>.json
                                                      after every row: a run that is cut keeps those it has
  --device cpu --small                                a tiny one in float32, to see that it runs
  --depthwise cudnn|triton|auto                       which depthwise kernels the policies use; "all" is measured with both on a GPU

step_ms      median over blocks of steps, each from synchronise to synchronise (p20, p80 beside it): host time counts
peak_gb      torch.cuda.max_memory_allocated from before the supernet is made
busy         time some kernel runs, by the profiler, over step_ms; `kernels`: where it goes
plain        one module an edge and op, as DARTS wrote it, the same precision, not captured
top_k        with architecture weights drawn 6 apart, as late in a search: skipped_share of the multiply-adds
architecture one tensor, one softmax, one Adam against a loop over edges, each with its own
The four policies come first, at every batch; the other ways at the first batch only. On a GPU the policies' Triton kernels are compiled
ahead, many at a time. A case that fails, or takes longer than --limit, is a row with its error, one not begun within --whole seconds too.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import write_results
from torch import Tensor
from torch.nn import functional

from ridgeline.kernel import depthwise
from ridgeline.measure.environment import machine_name
from ridgeline.search.spaces import load_space
from ridgeline.search.supernet import mixing
from ridgeline.search.supernet.architecture import Architecture
from ridgeline.search.supernet.draws import packed
from ridgeline.search.supernet.network import Supernet, make_supernet
from ridgeline.search.supernet.plain import PlainSupernet, plain_of
from ridgeline.search.supernet.step import SearchStep, make_optimisers

Row = dict[str, Any]
Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Case:
    way: str
    policy: str = "all"
    depthwise: str = "auto"
    plain: bool = False
    checkpoint: bool = False
    graph: bool | None = None


def cases(way: str, on_cuda: bool, sizes: list[int]) -> list[tuple[Case, int]]:
    """(case, batch) in the order they are measured."""
    policies = [Case(policy, policy, way) for policy in ("all", "top_k", "sample", "partial")]
    others = [Case("all, checkpointed", depthwise=way, checkpoint=True)]
    if on_cuda:
        others.append(Case("all, triton", depthwise="triton") if way == "torch" else Case("all, cudnn", depthwise="torch"))
    others.append(Case("plain", plain=True))
    if on_cuda:
        others.append(Case("all, not captured", depthwise=way, graph=False))
    return [(case, count) for count in sizes for case in policies] + [(case, sizes[0]) for case in others]


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """TimeoutError after that long, as soon as Python runs again."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def batches(count: int, image: int, device: str) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(count, 3, image, image, device=device), torch.randint(0, 10, (count,), device=device)) for _ in range(2)]


def plain_step(net: PlainSupernet, precision: str, data: list[tuple[Tensor, Tensor]]) -> Step:
    """As DARTS's loop: each pass computes all gradients."""
    weights = [p for name, p in net.named_parameters() if not name.startswith("architecture.")]
    first = torch.optim.SGD(weights, lr=0.025, momentum=0.9, weight_decay=3e-4)
    second = torch.optim.Adam(net.architecture.parameters(), lr=3e-4, betas=(0.5, 0.999), weight_decay=1e-3)

    def half(optimiser: torch.optim.Optimizer, x: Tensor, y: Tensor, clip: bool) -> None:
        net.zero_grad(set_to_none=True)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16"):
            logits = net(x)
        functional.cross_entropy(logits.float(), y).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(weights, 5.0)
        optimiser.step()

    def step() -> None:
        half(second, *data[1], clip=False)
        half(first, *data[0], clip=True)

    return step


def made_net(case: Case, space: Any, device: str) -> Supernet:
    supernet = make_supernet(space, policy=case.policy, depthwise=case.depthwise, checkpoint=case.checkpoint).to(device)
    if case.policy == "top_k":
        drawn = 6 * torch.randn(supernet.architecture.weights.shape, generator=torch.Generator().manual_seed(0))
        supernet.architecture.weights.data.copy_(drawn)
    return supernet


def made(case: Case, space: Any, device: str, precision: str, data: list[tuple[Tensor, Tensor]]) -> tuple[Step, Supernet | None]:
    supernet = made_net(case, space, device)
    if case.plain:
        return plain_step(plain_of(supernet), precision, data), None
    step = SearchStep(supernet, *make_optimisers(supernet), precision=precision, graph=case.graph)
    return lambda: step(*data), supernet


def kind_of(argument: Any) -> Any:
    """What of a kernel's argument Triton compiles for."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return (argument == 1, argument % 16 == 0) if isinstance(argument, int) else type(argument)


def compile_ahead(chosen: list[tuple[Case, int]], space: Any, device: str, precision: str, seconds: float) -> int:
    """Kernels the policies launch, found by a step that starts none of them; compiled in threads, for so long at most."""
    found: dict[tuple[Any, ...], tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = {}

    def note(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if 0 not in grid:
            found.setdefault((id(kernel), *map(kind_of, args), *constants.items()), (kernel, grid, args, constants))

    with patch.object(depthwise, "launch", note), patch.object(mixing, "launch", note):
        for case, count in chosen:
            if case.way == case.policy and case.depthwise != "torch":
                net = made_net(case, space, device)
                step = SearchStep(net, *make_optimisers(net), precision=precision, graph=False)
                draws = [net.sample(), net.sample()] if case.policy == "sample" else []
                train, valid = batches(count, space.image, device)
                step.run(train, valid, packed(draws, net.architecture.weights).to(device).unbind(0) if draws else ())
    pool = ThreadPoolExecutor(min(16, os.cpu_count() or 1))
    begun = [pool.submit(kernel.warmup, *args, grid=grid, **constants) for kernel, grid, args, constants in found.values()]
    done, _ = wait(begun, timeout=seconds)
    pool.shutdown(wait=False, cancel_futures=True)  # the rest is compiled where it is first used
    return len(done)


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def block_ms(step: Step, device: str, seconds: float) -> list[float]:
    """Milliseconds a step, block by block, for about that long."""
    for _ in range(5):
        step()
    synchronise(device)
    begun = time.perf_counter()
    step()
    synchronise(device)
    one = time.perf_counter() - begun
    in_block = max(1, min(10, round(seconds / 10 / one)))
    blocks = max(3, min(15, round(seconds / (one * in_block))))
    found = []
    for _ in range(blocks):
        begun = time.perf_counter()
        for _ in range(in_block):
            step()
        synchronise(device)
        found.append(1e3 * (time.perf_counter() - begun) / in_block)
    return sorted(found)


def busy_ms(step: Step, device: str, steps: int = 3) -> tuple[float, list[Row]]:
    """(milliseconds a step with a kernel running, the kernels that take most)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    spans, names = [], {}
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            begin, end = event.time_range.start, event.time_range.end  # µs
            spans.append((begin, end))
            taken, count = names.get(event.name, (0.0, 0))
            names[event.name] = (taken + end - begin, count + 1)
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    most = sorted(names.items(), key=lambda item: -item[1][0])[:12]
    return total / steps / 1e3, [{"name": name[:120], "ms": taken / steps / 1e3, "count": count / steps} for name, (taken, count) in most]


def measured(case: Case, space: Any, count: int, options: argparse.Namespace, limit_s: float) -> Row:
    device, precision = options.device, "float32" if options.small else "bf16"
    row: Row = {"way": case.way, "policy": case.policy, "batch": count, "channels": space.channels, "cells": space.cells,
                "precision": precision,
                "depthwise": "torch" if case.plain else case.depthwise, "error": None}  # fmt: skip
    step, supernet = None, None
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        if limit_s < 1:
            raise TimeoutError("not begun: the time for the whole run is over")
        with limited(limit_s):
            torch.manual_seed(0)
            data = batches(count, space.image, device)
            step, supernet = made(case, space, device, precision, data)
            times = block_ms(step, device, options.seconds)
            row |= {"step_ms": statistics.median(times), "p20_ms": times[len(times) // 5], "p80_ms": times[len(times) * 4 // 5]}
            row["skipped_share"] = supernet.skipped_share if supernet else 0.0
            if device.startswith("cuda"):
                row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
                row["kernel_ms"], row["kernels"] = busy_ms(step, device, 1)
                row["busy"] = row["kernel_ms"] / row["step_ms"]
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
    del step, supernet
    shown = f"{row['step_ms']:9.2f} ms" if "step_ms" in row else row["error"]
    rest = (
        f"  {row['peak_gb']:.2f} GB  busy {row['busy']:.2f}" if "busy" in row else f"  {row['peak_gb']:.2f} GB" if "peak_gb" in row else ""
    )
    print(f"batch {count:4} {case.way:20}{shown}{rest}  skipped {row.get('skipped_share', 0):.2f}", flush=True)
    return row


def architecture_row(edges: int, ops: int, device: str) -> Row:
    """Shares, gradient and update of all edges: one tensor against one parameter, softmax and optimiser an edge."""
    costs = torch.randn(edges, ops, device=device)
    whole = Architecture(edges, ops).to(device)
    adam = torch.optim.Adam(whole.parameters(), lr=3e-4)

    def at_once() -> None:
        (whole.weights.grad,) = torch.autograd.grad((whole.shares() * costs).sum(), [whole.weights])
        adam.step()

    single = [torch.zeros(ops, device=device, requires_grad=True) for _ in range(edges)]
    optimisers = [torch.optim.Adam([one], lr=3e-4) for one in single]

    def loop() -> None:
        loss = torch.stack([(torch.softmax(one, 0) * cost).sum() for one, cost in zip(single, costs, strict=True)]).sum()
        for one, gradient in zip(single, torch.autograd.grad(loss, single), strict=True):
            one.grad = gradient
        for optimiser in optimisers:
            optimiser.step()

    first, second = (statistics.median(block_ms(step, device, 0.5)) for step in (at_once, loop))
    print(f"architecture update {first:.3f} ms, loop {second:.3f} ms: {second / first:.1f}x", flush=True)
    return {
        "way": "architecture update",
        "edges": edges,
        "ops": ops,
        "step_ms": first,
        "loop_ms": second,
        "ratio": second / first,
        "error": None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--depthwise", default="auto", choices=("auto", "cudnn", "triton"))
    parser.add_argument("--seconds", type=float, default=1.5, help="timing of each case, about")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds a case may take, its compilation included")
    parser.add_argument("--whole", type=float, default=140.0, help="seconds after which no case is begun, and those begun are cut")
    parser.add_argument("--ways", default=None, help="only these, by name, separated by ;")
    parser.add_argument("--batches", default="64,256")
    parser.add_argument("--label", default=None, help="machine's name in the result file (default: the device's)")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    options = parser.parse_args()
    name = machine_name(options.device.partition(":")[0])
    label = options.label or ("cpu" if options.device == "cpu" else name.lower().removeprefix("nvidia ").replace(" ", "-"))
    sizes = {"channels": 8, "cells": 3, "image": 8} if options.small else {"channels": 16, "cells": 8, "image": 32}
    space = load_space("darts", **sizes)
    options.seconds = 0.2 if options.small else options.seconds
    end = time.perf_counter() + options.whole
    way = "torch" if options.depthwise == "cudnn" else options.depthwise
    on_cuda = options.device.startswith("cuda")
    chosen = cases(way, on_cuda, [4] if options.small else [int(one) for one in options.batches.split(",")])
    if options.ways:
        chosen = [(case, count) for case, count in chosen if case.way in options.ways.split(";")]
    rows: list[Row] = []
    if on_cuda:
        begun = time.perf_counter()
        try:
            with limited(options.whole / 2):
                ready = compile_ahead(chosen, space, options.device, "float32" if options.small else "bf16", options.whole / 3)
            print(f"{ready} kernels compiled ahead in {time.perf_counter() - begun:.1f} s", flush=True)
        except Exception as error:  # a case then compiles what it needs
            print(f"kernels were not compiled ahead: {type(error).__name__}: {error}", flush=True)
    rows.append(architecture_row(28, 8, options.device))
    for case, count in chosen:
        row = measured(case, space, count, options, min(options.limit, end - time.perf_counter()))
        rows.insert(len(rows) - 1, row)
        plain = {one["batch"]: one.get("step_ms") for one in rows[:-1] if one["way"] == "plain"}
        for one in rows[:-1]:
            slow = plain.get(one["batch"])
            one["against_plain"] = slow / one["step_ms"] if slow and one.get("step_ms") else None
        written = write_results("search", "step", label, {"device": name}, rows, options.out)
    print(written)


if __name__ == "__main__":
    main()
