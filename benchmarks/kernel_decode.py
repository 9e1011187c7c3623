"""Kernels of one decoding step, every launch configuration of each, against the bytes they must read.

python benchmarks/kernel_decode.py            3 to 5 minutes on an H200; writes results/kernel-decode-<machine>.json
  --only gemv_16,gemv_8,gemv_4,attention,layer_16,layer_8,layer_4     some of it;  --quick: as configured only
  --write    the fastest right configuration of every product, overlapping, becomes a line of src/ridgeline/kernel/tables/; with layer_*
             those of a layer's products are tried one after another in the layer, where what runs before and after shares the GPU

Weights rotate over three times the L2 cache. Each number is the time of a call inside a CUDA graph of many, medians of --repeats.
`overlap`: kernels start before the one before them has ended (kernel/overlap.py), as decoding runs them. `of_limit`: time of the least
bytes at the read bandwidth measured in this run, over the time taken. A configuration that gives another result than torch is marked.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from common import write_results

from ridgeline.core.files import write_json
from ridgeline.kernel.decode_attention import decode_attention
from ridgeline.kernel.gemv import gemv, gemv_int4, gemv_int8, weights_are_still
from ridgeline.kernel.gemv_kernels import CANDIDATES
from ridgeline.kernel.paged_attention import paged_attention, paged_write
from ridgeline.kernel.rms_norm import add_rms_norm
from ridgeline.kernel.rope import rope
from ridgeline.kernel.swiglu import swiglu_packed
from ridgeline.kernel.tuning import TABLES, device_slug, forced, placed, read, spaces
from ridgeline.kernel.weight_only import linear_int4, linear_int8, quantize_int4, quantize_int8
from ridgeline.measure.environment import machine_name

SHAPES = (
    (14336, 4096, False, False), (4096, 14336, False, False), (6144, 4096, False, True), (4096, 4096, False, False),
    (14336, 4096, True, True), (128256, 4096, False, True), (2560, 2048, False, True), (2048, 2048, False, False),
    (5632, 2048, True, True), (2048, 5632, False, False),
)  # fmt: skip
"""Outputs, K, gated, of a norm: the products of Llama 3 8B and TinyLlama 1.1B, the first two also by themselves."""
L2_BYTES = 60e6
EPS = 1e-5
Call = Callable[[int], torch.Tensor]


def graph_seconds(call: Call, sets: int, repeats: int) -> float:
    """Seconds a call, in a graph of at least 60 over all input sets."""
    for index in range(min(sets, 3)):
        call(index)
    torch.cuda.synchronize()
    calls = max(1, 60 // sets) * sets
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(index % sets) for index in range(calls)]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(repeats + 1):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / calls)
    del kept
    return median(found[1:])


def read_bps(repeats: int) -> float:
    """Bytes a second of our own sum over 1 GiB, as in the other kernel benchmarks."""
    from ridgeline.kernel.reduce import sum as own_sum

    data = torch.randn(1 << 28, device="cuda")
    return data.nbytes / graph_seconds(lambda _: own_sum(data), 1, repeats)


def stored(bits: int, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (weight,) if bits == 16 else quantize_int8(weight) if bits == 8 else quantize_int4(weight)


def ways(bits: int, held: list[tuple[torch.Tensor, ...]], x: torch.Tensor, gated: bool, gain: torch.Tensor | None,
         quick: bool) -> Iterator[tuple[str, Any, bool, Call]]:  # fmt: skip
    """(name, configuration, overlapping, call) of a product."""
    ours: Any = {16: gemv, 8: gemv_int8, 4: gemv_int4}[bits]
    plain: Any = {16: F.linear, 8: linear_int8, 4: linear_int4}[bits]
    rest = (*((128,) if bits == 4 else ()), None, None, gated, gain, EPS)
    if not gated and gain is None:
        yield "torch" if bits == 16 else f"linear_int{bits}", None, False, lambda index: plain(x, *held[index])
    for overlap in (False, True):
        yield "gemv", None, overlap, lambda index: ours(x, *held[index], *rest)
    for chosen in () if quick else CANDIDATES[bits]:
        yield "gemv", chosen, True, lambda index: ours(x, *held[index], *rest)


def timed(op: str, shape: list[int], name: str, chosen: Any, overlap: bool, call: Call, sets: int, moved: int, best: float, repeats: int,
          expected: torch.Tensor | None = None) -> dict[str, Any]:  # fmt: skip
    """One row; an error is a row too."""
    row: dict[str, Any] = {"op": op, "shape": shape, "way": name, "config": None if chosen is None else dict(chosen), "overlap": overlap}
    setting: AbstractContextManager[Any] = nullcontext() if chosen is None else forced(op, chosen)
    try:
        with setting, weights_are_still() if overlap else nullcontext():
            if expected is not None:
                error = float((call(0).float() - expected).norm() / expected.norm())
                row |= {"error": error, "right": error < 1e-2}
            seconds = graph_seconds(call, sets, repeats)
        row |= {"us": seconds * 1e6, "bps": moved / seconds, "of_limit": moved / best / seconds}
    except Exception as problem:
        row["failed"] = str(problem).splitlines()[0][:200]
    what = f"{op} {shape} {name} {'overlap ' if overlap else ''}{row['config'] or ''}"
    wrong = "" if row.get("right", True) else " WRONG"
    print(f"{what} {row.get('us', 0):.2f} us {100 * row.get('of_limit', 0):.1f} % {row.get('failed', '')}{wrong}", flush=True)
    return row


def products(bits: int, best: float, repeats: int, quick: bool) -> list[dict[str, Any]]:
    rows = []
    for n, k, gated, norm in SHAPES:
        x = torch.randn(1, k, device="cuda").bfloat16()
        gain = torch.rand(k, device="cuda").bfloat16() if norm else None
        first = (torch.randn(2 * n if gated else n, k, device="cuda") * k**-0.5).bfloat16()
        sets = max(2, int(3 * L2_BYTES // (first.numel() * bits // 8)) + 1)
        held = [stored(bits, first)]
        held += [tuple(t.clone() for t in held[0]) for _ in range(sets - 1)]
        moved = sum(t.nbytes for t in held[0]) + x.nbytes + 2 * n
        torch.cuda.synchronize()
        normed = x if gain is None else F.rms_norm(x, gain.shape, gain, EPS)
        expected = {16: F.linear, 8: linear_int8, 4: linear_int4}[bits](normed, *held[0]).float()
        expected = swiglu_packed(expected) if gated else expected
        for name, chosen, overlap, call in ways(bits, held, x, gated, gain, quick):
            rows.append(timed(f"gemv_{bits}", [1, n, k], name, chosen, overlap, call, sets, moved, best, repeats, expected))
            rows[-1]["gated"] = gated
        if bits == 16 and not gated and not norm:
            for m in (2, 4, 8):
                many = torch.randn(m, k, device="cuda").bfloat16()
                for name, function in (("torch", F.linear), ("gemv", gemv)):
                    call = lambda index, function=function, many=many, held=held: function(many, *held[index])  # noqa: E731
                    rows.append(timed("gemv_16", [m, n, k], name, None, name == "gemv", call, sets, moved, best, repeats))
    return rows


def attention(best: float, repeats: int, quick: bool) -> list[dict[str, Any]]:
    rows = []
    for batch, tokens in ((1, 256), (1, 4096), (32, 1024), (64, 2048)):
        pages = batch * tokens // 16
        query = torch.randn(batch, 32, 128, device="cuda").bfloat16()
        table = torch.randperm(pages, device="cuda").int().view(batch, -1)
        lengths = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
        turn = torch.rand(batch, 128, device="cuda"), torch.rand(batch, 128, device="cuda")
        wide = [torch.randn(pages, 16, 8, 128, device="cuda").bfloat16() for _ in range(2)]
        small = [torch.randint(-127, 128, (pages, 16, 8, 128), device="cuda", dtype=torch.int8) for _ in range(2)]
        scales = [torch.rand(pages, 16, 8, device="cuda").half() / 64 for _ in range(2)]
        for op, stores, given in (("paged_attention", wide, []), ("paged_attention_int8", small, scales)):
            moved = sum(t.nbytes for t in [*stores, *given])
            inputs = (query, *stores, table, lengths, None, None, *given)
            for chosen in [None, *spaces()[op]][: 1 if quick else None]:
                call = lambda _, inputs=inputs: paged_attention(*inputs)  # noqa: E731
                rows.append(timed(op, [batch, tokens, 32, 8, 128], "ours", chosen, True, call, 1, moved, best, repeats))
            qkv = torch.randn(batch, 48, 128, device="cuda").bfloat16()
            places = (table[:, -1] * 16 + 15).long()
            tickets = torch.zeros(batch * 8, dtype=torch.int32, device="cuda")
            whole = (qkv, *turn, places, *stores, table, lengths, tickets, None, None, *given)
            for chosen in [None, *spaces()[op]][: 1 if quick else None]:
                call = lambda _, whole=whole: decode_attention(*whole)  # noqa: E731
                rows.append(timed(op, [batch, tokens, 32, 8, 128], "with rope and write", chosen, True, call, 1, moved, best, repeats))
    return rows


class Layer:
    """One decoder layer of one token, 256 tokens back, as its kernels in a row."""

    def __init__(self, bits: int, hidden: int, heads: int, shared: int, inner: int, width: int) -> None:
        self.heads, self.shared, self.width = heads, shared, width
        shapes = (((heads + 2 * shared) * width, hidden), (hidden, heads * width), (2 * inner, hidden), (hidden, inner))
        self.sets = max(2, int(3 * L2_BYTES // (sum(n * k for n, k in shapes) * bits // 8)) + 1)
        self.weights = [
            [stored(bits, (torch.randn(n, k, device="cuda") * k**-0.5).bfloat16()) for n, k in shapes] for _ in range(self.sets)
        ]
        self.moved = sum(t.nbytes for held in self.weights[0] for t in held)
        self.product: Any = {16: gemv, 8: gemv_int8, 4: gemv_int4}[bits]
        self.extra = (128,) if bits == 4 else ()
        self.x, self.gain = torch.randn(1, hidden, device="cuda").bfloat16(), torch.ones(hidden, device="cuda").bfloat16()
        self.caches = [torch.randn(64, 16, shared, width, device="cuda").bfloat16() for _ in range(2)]
        self.table, self.lengths = torch.arange(32, device="cuda").int()[None], torch.tensor([256], device="cuda").int()
        self.slots, self.turn = torch.tensor([255], device="cuda"), torch.rand(1, width, device="cuda")
        self.tickets = torch.zeros(shared, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()

    def step(self, index: int, fused: bool) -> torch.Tensor:
        """fused: five launches; else a launch for every part."""
        qkv, out, up, down = self.weights[index]
        if fused:
            parts = self.product(self.x, *qkv, *self.extra, None, None, False, self.gain, 1e-5).view(1, -1, self.width)
            table = (self.slots, *self.caches, self.table, self.lengths, self.tickets)
            seen = decode_attention(parts, self.turn, self.turn, *table)
            total = self.product(seen.view(1, -1), *out, *self.extra, None, self.x)
            gated = self.product(total, *up, *self.extra, None, None, True, self.gain, 1e-5)
        else:
            normed, total = add_rms_norm(self.x, self.x, self.gain, 1e-5)
            parts = self.product(normed, *qkv).view(1, self.heads + 2 * self.shared, self.width)
            query, key, value = parts.split((self.heads, self.shared, self.shared), 1)
            query, key = (y[0] for y in rope(query[None], key[None], self.turn, self.turn))
            paged_write(key, value, *self.caches, self.slots)
            seen = paged_attention(query, *self.caches, self.table, self.lengths).view(1, -1)
            normed, total = add_rms_norm(self.product(seen, *out), total, self.gain, 1e-5)
            gated = self.product(normed, *up, *self.extra, None, None, True)
        last: torch.Tensor = self.product(gated, *down, *self.extra, None, total)
        return last


MODELS = {"8b": (4096, 32, 8, 14336, 128), "1.1b": (2048, 32, 4, 5632, 64)}


def layers(bits: int, best: float, repeats: int, quick: bool) -> list[dict[str, Any]]:
    """The least time of a layer is that of its weights' bytes."""
    rows = []
    for name, sizes in MODELS.items():
        one = Layer(bits, *sizes)
        ways: list[tuple[str, bool, bool, Any]] = [("apart", False, False, None), ("fused", True, False, None)]
        ways += [("fused", True, True, chosen) for chosen in ([None] if quick else [None, *CANDIDATES[bits]])]
        for way, fused, overlap, chosen in ways:
            call = lambda index, one=one, fused=fused: one.step(index, fused)  # noqa: E731
            setting: AbstractContextManager[Any] = nullcontext() if chosen is None else forced(f"gemv_{bits}", chosen)
            with setting:
                shape = [bits, *sizes]
                rows.append(timed("layer", shape, f"{name} {way}", None, overlap, call, one.sets, one.moved, best, repeats))
            rows[-1]["config"] = None if chosen is None else dict(chosen)
            print(rows[-1]["config"], flush=True)
        del one, call
        torch.cuda.empty_cache()
    return rows


def tuned_layers(bits: int, best: float, repeats: int) -> list[dict[str, Any]]:
    """Every configuration of one product after another in a layer; the fastest stays while the next product's are tried."""
    rows = []
    for name, (hidden, heads, shared, inner, width) in MODELS.items():
        one = Layer(bits, hidden, heads, shared, inner, width)
        call = lambda index, one=one: one.step(index, True)  # noqa: E731
        expected = one.step(0, False).float()  # every part apart
        products = (
            ((heads + 2 * shared) * width, hidden, False),
            (hidden, heads * width, False),
            (inner, hidden, True),
            (hidden, inner, False),
        )
        with ExitStack() as kept:
            for n, k, gated in products:
                bucket = (1, n, k, gated, *((128,) if bits == 4 else ()))
                tried = []
                for chosen in CANDIDATES[bits]:
                    with placed(f"gemv_{bits}", bucket, chosen):
                        shape = [bits, *MODELS[name]]
                        tried.append(
                            timed("layer", shape, f"{name} {n}x{k}", None, True, call, one.sets, one.moved, best, repeats, expected)
                        )
                    tried[-1] |= {"config": dict(chosen), "line": f"gemv_{bits}|{','.join(map(str, bucket))}"}
                first = min((row for row in tried if row.get("right") and "us" in row), key=lambda row: float(row["us"]))
                kept.enter_context(placed(f"gemv_{bits}", bucket, first["config"]))
                rows += tried
    return rows


def fastest(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Line of the table -> the fastest right row of a configuration, of one row of x; in a layer before by itself."""
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["op"] == "layer"):
        name = row.get("line") if row.get("right") else None
        if row["op"].startswith("gemv_") and row["config"] and row.get("right"):
            name = f"{row['op']}|{','.join(map(str, row['shape']))},{row['gated']}{',128' if row['op'] == 'gemv_4' else ''}"
        if name and "us" in row:
            before = found.get(name, row)
            found[name] = row if before["op"] != row["op"] else min(row, before, key=lambda one: float(one["us"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="gemv_16,gemv_8,gemv_4,attention,layer_16,layer_8,layer_4")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true", help="write the table of configurations")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    options = parser.parse_args()
    torch.manual_seed(0)
    best = read_bps(options.repeats)
    print(f"read {best / 1e12:.3f} TB/s")
    rows: list[dict[str, Any]] = []
    for part in options.only.split(","):
        if part == "attention":
            rows += attention(best, options.repeats, options.quick)
        elif part.startswith("layer_") and options.write:
            rows += tuned_layers(int(part.removeprefix("layer_")), best, options.repeats)
        elif part.startswith("layer_"):
            rows += layers(int(part.removeprefix("layer_")), best, options.repeats, options.quick)
        else:
            rows += products(int(part.removeprefix("gemv_")), best, options.repeats, options.quick)
    lines = fastest(rows)
    for name, row in lines.items():
        print(f"best {name}: {row['us']:.2f} us, {100 * row['of_limit']:.1f} % {row['config']}")
    if options.write:
        path = TABLES / f"{device_slug()}-configs.json"
        write_json(path, dict(sorted({**read(path), **{name: row["config"] for name, row in lines.items()}}.items())))
    name = machine_name("cuda")
    machine = {"device": name, "read_bps": best}
    print(write_results("kernel", "decode", name.lower().removeprefix("nvidia ").replace(" ", "-"), machine, rows, options.out))


if __name__ == "__main__":
    main()
