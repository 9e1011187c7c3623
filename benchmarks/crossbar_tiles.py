"""Which tile of the fused engine is fastest for each product of ResNet-18: the source of the choice in crossbar/fused.py.

    layer shapes x tiles ──each kernel alone, many launches in a row──> rows: layer, tile, ms a launch

python benchmarks/crossbar_tiles.py [--batch 32] [--rows 64,32] [--dot float8,int8,float16] [--seconds 200]

Slices (1,1,2,2), 4096 ADC levels, no negative inputs. The whole product is timed with the default patch tile; what quantising takes of
it is in rows of their own.
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
from ridgeline.crossbar.engine.fused import FusedEngine, quantised
from ridgeline.crossbar.engine.fused_settings import PatchTile, Tile
from ridgeline.crossbar.plan import Draw, Plan, Window
from ridgeline.measure.environment import machine_name
from ridgeline.target.crossbar import CrossbarSpec

LAYERS = {  # name: (channels, columns, size, kernel, stride, padding, how often in ResNet-18)
    "conv1": (3, 64, 224, 7, 2, 3, 1), "layer1": (64, 64, 56, 3, 1, 1, 4), "layer2.0": (64, 128, 56, 3, 2, 1, 1),
    "layer2": (128, 128, 28, 3, 1, 1, 3), "layer3": (256, 256, 14, 3, 1, 1, 3), "layer4": (512, 512, 7, 3, 1, 1, 3),
}  # fmt: skip
TILES = [Tile(64, 32, 4, 2), Tile(64, 32, 4, 3), Tile(64, 32, 4, 2, 128), Tile(64, 32, 4, 3, 128), Tile(64, 32, 4, 3, 168),
         Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), Tile(64, 64, 8, 2, 128), Tile(64, 64, 8, 3, 128), Tile(128, 32, 4, 2),
         Tile(128, 32, 8, 2), Tile(128, 64, 8, 2), Tile(128, 64, 8, 3)]  # fmt: skip

PATCH_TILES = [
    PatchTile(32, 1),
    PatchTile(32, 1, 1),
    PatchTile(32, 2),
    PatchTile(32, 4),
    PatchTile(64, 2),
    PatchTile(64, 4),
    PatchTile(128, 4),
]


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


def kernel_ms(function: Any, launches: int = 20) -> float:
    """Of one launch, when launches follow each other and the GPU does not wait for the host."""

    def many() -> None:
        for _ in range(launches):
            function()

    return gpu_ms(many, 3) / launches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rows", default="64,32")
    parser.add_argument("--dot", default="float8,int8,float16")
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--seconds", type=float, default=200.0, help="no new tile after this")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    started, rows, names = time.perf_counter(), [], options.layers.split(",")
    for array_rows in map(int, options.rows.split(",")):
        for patch_tile in PATCH_TILES:
            rows += [quantise_row(name, array_rows, patch_tile, options.batch) for name in names]
        for dot in options.dot.split(","):
            for tile in TILES:
                if time.perf_counter() - started < options.seconds:
                    rows += [row for name in names if (row := product_row(name, array_rows, dot, tile, options.batch))]
    print(write_results("crossbar", "tiles", "h200", {"device": machine_name("cuda")}, rows, options.out))


def case(name: str, array_rows: int, batch: int) -> tuple[Plan, Window, torch.Tensor]:
    channels, columns, size, kernel, stride, padding, _ = LAYERS[name]
    torch.manual_seed(0)
    window = Window((kernel, kernel), (stride, stride), (padding, padding), (1, 1))
    x = torch.randn(batch, channels, size, size, device="cuda").relu()
    return Plan(chip(array_rows), channels * kernel * kernel, columns), window, x


def quantise_row(name: str, array_rows: int, tile: PatchTile, batch: int) -> dict[str, Any]:
    plan, window, x = case(name, array_rows, batch)
    prepared = FusedEngine().prepare(plan, program(torch.randn(1, plan.k, plan.n, device="cuda"), plan, Draw()))
    size = window.output_size((x.shape[2], x.shape[3]))
    m = batch * size[0] * size[1]
    ms = kernel_ms(lambda: quantised(x, window, size, m, plan, prepared, tile))
    row = {"kernel": "quantise", "layer": name, "rows": array_rows, "tile": [tile.patches, tile.warps, tile.blocks], "ms": ms,
           "elements": m * plan.arrays * plan.rows, "times_in_resnet18": LAYERS[name][-1]}  # fmt: skip
    print(f"quantise {name:9} rows {array_rows} {row['tile']!s:14} {ms:.4f} ms", flush=True)
    return row


def product_row(name: str, array_rows: int, dot: str, tile: Tile, batch: int) -> dict[str, Any] | None:
    plan, window, x = case(name, array_rows, batch)
    engine = FusedEngine(dot, tile)
    try:
        prepared = engine.prepare(plan, program(torch.randn(1, plan.k, plan.n, device="cuda"), plan, Draw()))
        ms = kernel_ms(lambda: engine.convolution(x, window, plan, prepared, Draw()))
    except Exception as error:  # a tile the compiler or the machine refuses is a result too
        print(name, array_rows, dot, tile, str(error).splitlines()[0][:100], flush=True)
        return None
    row = {"kernel": "product", "layer": name, "rows": array_rows, "dot": dot, "ms": ms, "times_in_resnet18": LAYERS[name][-1],
           "tile": [tile.rows, tile.columns, tile.warps, tile.stages, tile.most_registers]}  # fmt: skip
    print(f"product  {name:9} rows {array_rows} {dot:7} {row['tile']!s:24} {ms:.4f} ms", flush=True)
    return row


if __name__ == "__main__":
    main()
