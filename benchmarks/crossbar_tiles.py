"""Which tile of the fused engine is fastest for each product of ResNet-18: the source of the choice in crossbar/fused.py.

    layer shapes x tiles ──both kernels, GPU time──> rows: layer, tile, ms of quantising and of multiplying, of the latter per cent of the limit

python benchmarks/crossbar_tiles.py [--batch 32] [--rows 64,32] [--dot int8,float16] [--seconds 200]

Limit: dots of all slice pairs at the measured int8 or float16 matmul rate is one, conversions at two float operations a lane and clock
the other; the larger counts. Slices (1,1,2,2), 4096 ADC levels, no negative inputs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from common import write_results

from ridgeline.core.spec import parse_spec
from ridgeline.crossbar.cells import program
from ridgeline.crossbar.fused import FusedEngine, Tile
from ridgeline.crossbar.plan import Draw, Plan, Window
from ridgeline.measure.environment import machine_name
from ridgeline.target.crossbar import CrossbarSpec

LAYERS = {  # name: (channels, columns, size, kernel, stride, padding, how often in ResNet-18)
    "conv1": (3, 64, 224, 7, 2, 3, 1), "layer1": (64, 64, 56, 3, 1, 1, 4), "layer2.0": (64, 128, 56, 3, 2, 1, 1),
    "layer2": (128, 128, 28, 3, 1, 1, 3), "layer3": (256, 256, 14, 3, 1, 1, 3), "layer4": (512, 512, 7, 3, 1, 1, 3),
}  # fmt: skip
TILES = [Tile(64, 32, 4, 2), Tile(64, 32, 4, 3), Tile(64, 32, 4, 2, 128), Tile(64, 32, 4, 3, 128), Tile(64, 32, 4, 3, 168), Tile(64, 64, 4, 2),
         Tile(64, 64, 4, 3), Tile(64, 64, 8, 2, 128), Tile(64, 64, 8, 3, 128), Tile(128, 32, 4, 2)]  # fmt: skip


def chip(rows: int, read_sigma: float = 0.0) -> CrossbarSpec:
    slices = [1, 1, 2, 2]
    data: dict[str, Any] = {
        "version": 1, "kind": "crossbar", "name": f"bench-{rows}", "array": {"rows": rows, "columns": rows},
        "operands": {"x_slices": slices, "w_slices": slices, "x_granularity": [1, 64], "w_granularity": [64, 64]},
        "dac": {"levels": 4, "vread_v": 0.2}, "cell": {"high_s": 1e-5, "low_s": 1e-8, "levels": 4, "read_sigma": read_sigma},
        "adc": {"levels": 4096},
    }  # fmt: skip
    return parse_spec(CrossbarSpec, data, "bench.toml")


def gpu_ms(function: Any, repeats: int = 5) -> float:
    function()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rows", default="64,32")
    parser.add_argument("--dot", default="int8,float16")
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--seconds", type=float, default=200.0, help="no new tile after this")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    started, rows = time.perf_counter(), []
    for array_rows in map(int, options.rows.split(",")):
        for dot in options.dot.split(","):
            for tile in TILES:
                if time.perf_counter() - started > options.seconds:
                    break
                rows += [row for name in options.layers.split(",") if (row := measured(name, array_rows, dot, tile, options.batch))]
    print(write_results("crossbar", "tiles", "h200", {"device": machine_name("cuda")}, rows, options.out))


def measured(name: str, array_rows: int, dot: str, tile: Tile, batch: int) -> dict[str, Any] | None:
    channels, columns, size, kernel, stride, padding, count = LAYERS[name]
    torch.manual_seed(0)
    plan = Plan(chip(array_rows), channels * kernel * kernel, columns)
    window = Window((kernel, kernel), (stride, stride), (padding, padding), (1, 1))
    x = torch.randn(batch, channels, size, size, device="cuda").relu()
    engine = FusedEngine(dot, tile)
    try:
        prepared = engine.prepare(plan, program(torch.randn(1, plan.k, columns, device="cuda"), plan, Draw()))
        with torch.no_grad():
            started = time.perf_counter()
            whole = gpu_ms(lambda: engine.convolution(x, window, plan, prepared, Draw()))
            from ridgeline.crossbar.fused import _quantised

            out_size = window.output_size((size, size))
            m = batch * out_size[0] * out_size[1]
            quantise = gpu_ms(lambda: _quantised(x, window, out_size, m, plan, prepared))
    except Exception as error:
        print(name, array_rows, dot, tile, str(error).splitlines()[0][:100], flush=True)
        return None
    row = {"layer": name, "rows": array_rows, "dot": dot, "tile": [tile.rows, tile.columns, tile.warps, tile.stages, tile.most_registers],
           "whole_ms": whole, "quantise_ms": quantise, "times_in_resnet18": count, "conversions": m * columns * plan.arrays * 12,
           "compile_s": time.perf_counter() - started}  # fmt: skip
    print(f"{name:9} rows {array_rows} {dot:7} {row['tile']!s:24} {whole:.4f} ms  quantise {quantise:.4f}", flush=True)
    return row


if __name__ == "__main__":
    main()
