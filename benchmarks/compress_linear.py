"""One row through nn.Linear(4096, 1024) with int8 and int4 weights against bfloat16, weights too many for the last cache.

    copies of the layer, together at least 4x the last cache ──taken in turn──> each call reads its weights from memory
    round: bf16 and packed in random order, one pass over all copies each ──paired bootstrap──> ratio with a 95 % interval

    python benchmarks/compress_linear.py [--rounds 30] [--threads 1]        writes results/compress-linear-cpu.json
Limit: bytes a call must read at the bandwidth of a plain sum over as many bytes, measured in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import write_results
from torch import nn

from ridgeline.core.timing import sampler
from ridgeline.measure.ab import ab
from ridgeline.measure.environment import machine_name
from ridgeline.target.machine import cache_sizes
from ridgeline.transform.quantise.grid import Grid, quantise
from ridgeline.transform.quantise.packed import PackedLinear

GRIDS = {"int8": Grid(8), "int4 group 64": Grid(4, False, "group", 64, "zero", "float16")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--label", default="cpu", help="machine in the name of the results file")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    last_cache = max(cache_sizes().values(), default=32 << 20)
    rows = [row for name, grid in GRIDS.items() for row in measured(name, grid, last_cache, options)]
    machine = {"device": machine_name("cpu"), "threads": options.threads, "last_cache_bytes": last_cache}
    print(write_results("compress", "linear", options.label, machine, rows, options.out))


def measured(name: str, grid: Grid, last_cache: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    packed_one = options.rows * options.columns * grid.bits // 8
    copies = -(-4 * last_cache // packed_one)  # of the packed weights, the smaller of the two
    weight = torch.randn(options.rows, options.columns) / options.columns**0.5
    done = quantise(weight, grid)
    plain = [nn.Linear(options.columns, options.rows, bias=False).bfloat16() for _ in range(copies)]
    packed = [PackedLinear.from_quantised(done) for _ in range(copies)]
    for layer in plain:
        layer.weight.data.copy_(weight)
    x = torch.randn(1, options.columns).bfloat16()

    def through(layers: list[Any]) -> Callable[[], None]:
        def call() -> None:
            with torch.inference_mode():
                for layer in layers:
                    layer(x)

        return call

    through(packed)()  # builds the kernels' layouts
    kernels = {layer._layout.kernel for layer in packed if layer._layout is not None}
    if len(kernels) != 1:
        raise SystemExit(f"{name}: no packed kernel ran: {packed[0].runs_packed()[1]}")
    result = ab(through(plain), through(packed), rounds=options.rounds)
    memory = bandwidth(copies * packed_one)
    rows = []
    for variant, timing, size in (("bfloat16", result.a, plain[0].weight.nbytes), (name, result.b, packed[0].packed_bytes())):
        seconds = timing.median_s / copies
        rows.append({
            "variant": variant, "against": name, "kernel": "linear" if variant == "bfloat16" else next(iter(kernels)), "copies": copies,
            "median_s": seconds, "p20_s": timing.p20_s / copies, "p80_s": timing.p80_s / copies, "weight_bytes": size,
            "read_bps": size / seconds, "plain_read_bps": memory, "share_of_bandwidth": size / seconds / memory,
            "speedup": 1.0 if variant == "bfloat16" else 1 / result.ratio,
            "speedup_low": 1.0 if variant == "bfloat16" else 1 / result.high,
            "speedup_high": 1.0 if variant == "bfloat16" else 1 / result.low,
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def bandwidth(size: int) -> float:
    """Bytes a second of summing that many bytes once."""
    source = torch.ones(max(size, 1 << 20) // 4)
    sample = sampler(lambda: source.sum(), "cpu")
    sample()
    return source.nbytes / sorted(sample() for _ in range(7))[3]


if __name__ == "__main__":
    main()
