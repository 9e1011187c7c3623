"""Graph passes on the CPU: optimised against eager torch, torch.compile and Inductor's freezing, all in turn in one run; memory plans.

python benchmarks/graph_cpu.py                  15 to 20 minutes on two cores; writes results/graph-passes-<label>.json
  --parts latency,layout,arena,planning         some of it;  --models resnet50,mobilenet-v2,bert-base --rounds 30 --threads 2

latency   batch 1, float32: each way once a round, in random order; `ratio` is the median over rounds of eager's time over this way's
layout    nets in the wrong layout (NCHW; both layouts by turns): conversions left in the graph, time against eager
arena     the twelve models of the suite at their own sizes: arena against the lower bound (peak live bytes)
planning  seconds to plan a graph of 2,000 nodes
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import write_results
from torch import Tensor, nn

from ridgeline.core.timing import garbage_collector_off, median_ratio_interval, summarise
from ridgeline.measure.environment import machine_name
from ridgeline.transform.graph.capture import Captured, capture_graph
from ridgeline.transform.graph.manager import PassContext, run_passes
from ridgeline.transform.graph.memory.lifetimes import lifetimes
from ridgeline.transform.graph.memory.plan import plan
from ridgeline.transform.graph.optimize import optimize
from ridgeline.transform.graph.suite import SUITE, suite_case
from ridgeline.workload.capture import resolve
from ridgeline.workload.case import CaseOptions

Call = Callable[[], Any]
Row = dict[str, Any]
CONVERSIONS = ("clone", "contiguous", "_to_copy", "to", "to_memory_format")


def in_turn(calls: dict[str, Call], rounds: int, warmup: int = 3) -> dict[str, list[float]]:
    """Seconds of every call, one each a round, the order drawn anew."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, names = random.Random(0), list(calls)
    with torch.inference_mode(), garbage_collector_off():
        for _ in range(warmup):
            for call in calls.values():
                call()
        for _ in range(rounds):
            order.shuffle(names)
            for name in names:
                start = time.perf_counter()
                calls[name]()
                times[name].append(time.perf_counter() - start)
    return times


def compared(part: str, model: str, calls: dict[str, Call], made_s: dict[str, float], rounds: int) -> list[Row]:
    """One row a way, each against the first."""
    with torch.inference_mode():
        results = {name: first_tensor(call()).double() for name, call in calls.items()}
    times = in_turn(calls, rounds)
    first = next(iter(calls))
    rows = []
    for name, samples in times.items():
        timing = summarise(samples)
        ratio, low, high = median_ratio_interval(times[first], samples, paired=True) if name != first else (1.0, 1.0, 1.0)
        error = float((results[name] - results[first]).abs().max() / results[first].abs().max())
        rows.append(
            {"part": part, "model": model, "way": name, "threads": torch.get_num_threads(), "median_s": timing.median_s,
             "p20_s": timing.p20_s, "p80_s": timing.p80_s, "ratio": ratio, "ratio_low": low, "ratio_high": high, "rounds": rounds,
             "difference": error, "made_s": made_s.get(name, 0.0)}
        )  # fmt: skip
        print(f"{part:9}{model:16}{name:22}{timing.median_s * 1e3:9.2f} ms{ratio:7.2f}x ({low:.2f} to {high:.2f})", flush=True)
    return rows


def first_tensor(result: Any) -> Tensor:
    found: Tensor = next(leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor))
    return found


def clocked(make: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    made = make()
    return made, time.perf_counter() - start


def compiled(module: nn.Module, inputs: tuple[Any, ...]) -> Call:
    """torch.compile's module, compiled now, in the mode it is timed in: another one would compile it again."""
    torch._dynamo.reset()
    made: Any = torch.compile(module)
    with torch.inference_mode():
        made(*inputs)
    return lambda: made(*inputs)


def latency(models: str, rounds: int) -> list[Row]:
    """Eager, ours and torch.compile in turn; then eager and Inductor's freezing, which must not meet the code compiled before it."""
    import torch._inductor.config as inductor

    rows = []
    for name in models.split(","):
        case = resolve(name, CaseOptions(batch=1, device="cpu", dtype="float32"))
        module, inputs = case.module.eval(), case.args
        (best, change), optimised_s = clocked(lambda module=module, inputs=inputs: best_of(module, inputs))
        eager: Call = lambda module=module, inputs=inputs: module(*inputs)  # noqa: E731
        plain, plain_s = clocked(lambda module=module, inputs=inputs: compiled(module, inputs))
        calls = {"eager": eager, "optimised": lambda best=best, inputs=inputs: best(*inputs), "torch.compile": plain}
        found = compared("latency", name, calls, {"optimised": optimised_s, "torch.compile": plain_s}, rounds)
        found[1]["passes"] = {one["name"]: one["changed_sites"] for one in change.details["passes"] if one["changed_sites"]}
        rows += found
        with inductor.patch(freezing=True):
            frozen, frozen_s = clocked(lambda module=module, inputs=inputs: compiled(module, inputs))
            again = {"eager": eager, "torch.compile freezing": frozen}
            rows += compared("latency", name, again, {"torch.compile freezing": frozen_s}, rounds)[1:]
        torch._dynamo.reset()
    return rows


def best_of(module: nn.Module, inputs: tuple[Any, ...], **options: Any) -> Any:
    return optimize(module, inputs, measure=False, predict=False, memory="none", require_gain=False, **options)


class Plain(nn.Module):
    """Convolutions in torch's default layout."""

    def __init__(self, width: int, blocks: int, alternate: bool) -> None:
        super().__init__()
        self.alternate = alternate
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for place, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            if self.alternate:
                x = x.contiguous(memory_format=torch.channels_last if place % 2 else torch.contiguous_format)
            x = torch.relu(norm(conv(x))) + x
        return x.mean((2, 3))


def layout(rounds: int) -> list[Row]:
    rows = []
    for name, alternate in (("nchw", False), ("both-by-turns", True)):
        torch.manual_seed(0)
        module, inputs = Plain(64, 12, alternate).eval().requires_grad_(False), (torch.randn(1, 3, 56, 56),)
        calls: dict[str, Call] = {"eager": lambda m=module, i=inputs: m(*i)}
        told = {}
        for way, passes in (("layout alone", ["identities", "common", "layout"]), ("optimised", None)):
            made, _ = best_of(module, inputs, passes=passes)
            nodes = list(made.graph.nodes)
            told[way] = {"nodes": len(nodes), "conversions": sum(is_conversion(node) for node in nodes)}
            calls[way] = lambda m=made, i=inputs: m(*i)
        found = compared("layout", name, calls, {}, rounds)
        for row in found:
            row |= told.get(row["way"], {})
            if row["way"] in told:
                print(f"          {row['way']}: {row['conversions']} conversions in {row['nodes']} nodes")
        rows += found
    return rows


def is_conversion(node: Any) -> bool:
    """A node that copies a tensor into another memory format."""
    packet = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    formats = [one for one in (*node.args, *node.kwargs.values()) if isinstance(one, torch.memory_format)]
    return packet in CONVERSIONS and any(one is not torch.preserve_format for one in formats)


def arena(names: str, effort_s: float) -> list[Row]:
    rows = []
    for name in names.split(","):
        case = suite_case(name, small=False)
        captured = capture_graph(case.module, case.inputs)
        before = planned(captured, effort_s)
        run_passes(captured, None, PassContext(), check=False)
        after = planned(captured, effort_s)
        row = {"part": "arena", "model": name, "before": before, "after": after}
        rows.append(row)
        for way in ("before", "after"):
            found = row[way]
            sizes = f"{found['arena_bytes']:14,} B arena{found['lower_bound_bytes']:14,} B bound{100 * found['over_bound']:7.2f} %"
            print(f"arena     {name:16}{way:8}{found['nodes']:6} nodes {sizes}{found['seconds']:7.2f} s", flush=True)
        del case, captured
    return rows


def planned(captured: Captured, effort_s: float) -> Row:
    start = time.perf_counter()
    found = plan(lifetimes(captured), time_limit_s=effort_s)
    seconds = time.perf_counter() - start
    return {
        "nodes": len(captured.module.graph.nodes), "tensors": len(found.intervals), "arena_bytes": found.arena_bytes,
        "lower_bound_bytes": found.lower_bound_bytes, "over_bound": found.over_bound, "seconds": seconds, "method": found.method,
    }  # fmt: skip


class Many(nn.Module):
    """About 2,000 nodes: tensors of many sizes, read again near and far."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        chance = random.Random(8)
        self.choices = [(chance.randrange(4), chance.randrange(1, 64), chance.randrange(1, 12)) for _ in range(steps)]

    def forward(self, x: Tensor) -> Tensor:
        kept = [x]
        for kind, width, back in self.choices:
            old = kept[-min(back, len(kept))]
            new = torch.relu(kept[-1]) if kind == 0 else kept[-1] * 0.5 if kind == 1 else torch.tanh(old)
            kept.append(torch.cat((new, new[:, :width]), 1)[:, width:] if kind == 3 else new + old)
        return kept[-1]


def planning() -> list[Row]:
    captured = capture_graph(Many(670), (torch.randn(4, 256),))
    found = planned(captured, 2.0)
    print(f"planning  {found['nodes']} nodes, {found['tensors']} tensors: {found['seconds']:.2f} s, {100 * found['over_bound']:.2f} % over")
    return [{"part": "planning", "model": "many", **found}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="latency,layout,arena,planning")
    parser.add_argument("--models", default="resnet50,mobilenet-v2,bert-base")
    parser.add_argument("--suite", default=",".join(SUITE), help="models of the arena part")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--effort", type=float, default=2.0, help="most seconds of search for a plan")
    parser.add_argument("--label", default="cpu", help="machine's name in the result file")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    parts: dict[str, Callable[[], list[Row]]] = {
        "latency": lambda: latency(options.models, options.rounds),
        "layout": lambda: layout(options.rounds),
        "arena": lambda: arena(options.suite, options.effort),
        "planning": planning,
    }
    rows = [row for part in options.parts.split(",") for row in parts[part]()]
    machine = {"device": machine_name("cpu"), "threads": torch.get_num_threads()}
    print(write_results("graph", "passes", options.label, machine, rows, options.out))


if __name__ == "__main__":
    main()
