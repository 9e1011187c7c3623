"""Emitted C against itself: what tiling, vectorising and unrolling the loop nest of a layer are worth on this machine.

python benchmarks/npu_lowering.py             all layers, ten minutes at most; writes results/npu-lowering-cpu.json
python benchmarks/npu_lowering.py --quick     one small layer, seconds; writes nothing unless --out is given

plain -> tiled -> tiled, vectorised -> recommended (unrolled as well)

per layer and nest: gcc -O3 -march=native, one thread, runs of all nests interleaved; median, ratio to the plain loops with a
95 % interval, GMAC/s and its fraction of the machine's measured multiply-add rate. torch's conv2d on one thread runs along.
Every nest is first compared with torch on whole numbers: exactly equal, or the benchmark stops.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy
import torch
from common import write_results

from ridgeline.core.timing import garbage_collector_off, median_ratio_interval, summarise
from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.lowering import CompiledLayer, Nest, compile_layers, naive, recommended, reorder, shapes, tile, vectorise
from ridgeline.estimate.spatial.lowering.run_c import FLAGS, build, registers
from ridgeline.measure.environment import machine_name

PLAIN, BEST, TORCH = "plain", "recommended", "torch"
LAYERS = (
    Layer("conv 3x3, 256 to 256, 14 x 14", {"K": 256, "C": 256, "P": 14, "Q": 14, "R": 3, "S": 3}, padding=(1, 1)),
    Layer("conv 3x3, 256 to 256, 28 x 28", {"K": 256, "C": 256, "P": 28, "Q": 28, "R": 3, "S": 3}, padding=(1, 1)),
    Layer("conv 3x3, 64 to 64, 56 x 56", {"K": 64, "C": 64, "P": 56, "Q": 56, "R": 3, "S": 3}, padding=(1, 1)),
    Layer("conv 3x3 stride 2, 128 to 256", {"K": 256, "C": 128, "P": 28, "Q": 28, "R": 3, "S": 3}, (2, 2), (1, 1), (1, 1), (56, 56)),
    Layer("conv 7x7 stride 2, 3 to 64", {"K": 64, "C": 3, "P": 112, "Q": 112, "R": 7, "S": 7}, (2, 2), (1, 1), (3, 3), (224, 224)),
    Layer("conv 1x1, 512 to 512, 28 x 28", {"K": 512, "C": 512, "P": 28, "Q": 28}),
    Layer("depthwise 3x3, 256, 28 x 28", {"G": 256, "P": 28, "Q": 28, "R": 3, "S": 3}, padding=(1, 1), kind="depthwise"),
    Layer("matmul 512 x 768 x 768", {"P": 512, "K": 768, "C": 768}, kind="matmul"),
    Layer("linear 1024 to 1024, one row", {"K": 1024, "C": 1024}, kind="matmul"),
)
QUICK = Layer("conv 3x3, 64 to 64, 14 x 14", {"K": 64, "C": 64, "P": 14, "Q": 14, "R": 3, "S": 3}, padding=(1, 1))


def variants(layer: Layer) -> dict[str, Nest]:
    """The plain nest, then one transform more at a time; those that a layer has no use for are left out."""
    best = recommended(layer)
    found = {PLAIN: naive(layer, "k p q c r s")}
    if layer.dims["Q"] > 1:
        tiled = tile(naive(layer, "b g c k p q r s"), "c", best.loop("ci").extent)
        found["tiled"] = reorder(tiled, "b g co k p q ci r s")
        width = best.loops[-1].extent
        found["tiled, vectorised"] = vectorise(reorder(tile(tiled, "q", width), "b g co k p qo ci r s qi"), "qi", width)
    found[BEST] = best
    if layer.dims["P"] * layer.dims["Q"] == 1:
        found["recommended, sum reordered"] = recommended(layer, reassociate=True)
    return found


def checked_operands(layer: Layer, compiled: dict[str, CompiledLayer]) -> tuple[Any, Any, Any]:
    """(W, I, O) of whole numbers, once every function has given exactly what torch gives."""
    drawn = numpy.random.default_rng(0)
    weights, inputs = (drawn.integers(-3, 4, shapes(layer)[operand]).astype("float32") for operand in ("W", "I"))
    expected = convolution(layer, torch.from_numpy(weights).double(), torch.from_numpy(inputs).double())().numpy()
    for name, function in compiled.items():
        if not numpy.array_equal(function(weights, inputs), expected):
            raise SystemExit(f"{layer.name}, {name}: not what torch computes")
    return weights, inputs, numpy.empty(shapes(layer)["O"], "float32")


def convolution(layer: Layer, weights: torch.Tensor, inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        with torch.inference_mode():
            return torch.nn.functional.conv2d(
                inputs, weights, stride=layer.stride, padding=layer.padding, dilation=layer.dilation, groups=layer.dims["G"]
            )

    return run


def interleaved(runs: dict[str, Callable[[], object]], rounds: int, budget_s: float) -> dict[str, list[float]]:
    """Seconds of every run, one after the other round by round, so that what else the machine does meets all alike."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    stop = perf_counter() + budget_s
    with garbage_collector_off():
        for name in runs:
            runs[name]()
        while len(samples[PLAIN]) < 5 or (len(samples[PLAIN]) < rounds and perf_counter() < stop):
            for name, run in runs.items():
                start = perf_counter()
                run()
                samples[name].append(perf_counter() - start)
    return samples


def rows_of(layer: Layer, peak_macs: float, rounds: int, budget_s: float) -> list[dict[str, Any]]:
    nests = variants(layer)
    compiled = dict(zip(nests, compile_layers(list(nests.values())), strict=True))
    weights, inputs, output = checked_operands(layer, compiled)
    runs: dict[str, Callable[[], object]] = {
        name: (lambda function=function: function.run_into(weights, inputs, output)) for name, function in compiled.items()
    }
    runs[TORCH] = convolution(layer, torch.from_numpy(weights), torch.from_numpy(inputs))
    samples = interleaved(runs, rounds, budget_s)
    return [row(layer, name, samples[name], samples[PLAIN], peak_macs) for name in runs]


def row(layer: Layer, name: str, samples: list[float], plain: list[float], peak_macs: float) -> dict[str, Any]:
    timing = summarise(samples)
    ratio, low, high = median_ratio_interval(plain, samples)
    return {
        "layer": layer.name,
        "dims": dict(layer.dims),
        "stride": list(layer.stride),
        "padding": list(layer.padding),
        "nest": name,
        "median_s": timing.median_s,
        "p20_s": timing.p20_s,
        "p80_s": timing.p80_s,
        "repeats": timing.repeats,
        "gmac_per_s": layer.macs / timing.median_s / 1e9,
        "fraction_of_peak": layer.macs / timing.median_s / peak_macs,
        "speedup": ratio,
        "speedup_low": low,
        "speedup_high": high,
        "equals_torch": True,
    }


def peak_macs_per_s() -> float:
    """Multiply-adds a second with nothing to load: twelve independent chains in registers, the best of ten runs."""
    lanes, turns, chains = registers()[0], 200_000, 12
    names = [f"a{i}" for i in range(chains)]
    source = "\n".join(
        [
            f"typedef float vec __attribute__((vector_size({4 * lanes}), aligned(4), may_alias));",
            "void peak(const float *w, const float *x, float *o) {",
            "  vec " + ", ".join(f"{a} = {{{i}}}" for i, a in enumerate(names)) + ";",
            f"  for (long n = 0; n < {turns}; ++n) {{ " + " ".join(f"{a} = {a} * w[0] + x[0];" for a in names) + " }",
            "  *(vec *)o = " + " + ".join(names) + ";",
            "}",
        ]
    )
    function, arrays = build(source).peak, (numpy.full(1, 0.5, "float32"), numpy.ones(1, "float32"), numpy.zeros(lanes, "float32"))
    function.argtypes, function.restype = [ctypes.c_void_p] * 3, None
    times = []
    for _ in range(10):
        start = perf_counter()
        function(*(array.ctypes.data for array in arrays))
        times.append(perf_counter() - start)
    return turns * chains * lanes / min(times)


def line(found: dict[str, Any]) -> str:
    interval = f"{found['speedup_low']:.1f} to {found['speedup_high']:.1f}"
    numbers = (
        f"{found['median_s'] * 1e3:>9.3f} ms{found['gmac_per_s']:>8.1f} GMAC/s{found['fraction_of_peak']:>7.1%}{found['speedup']:>8.1f}x"
    )
    return f"{found['layer']:<32}{found['nest']:<29}{numbers}  ({interval})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small layer, few rounds, nothing written")
    parser.add_argument("--label", default="cpu", help="machine's name in the result file")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds a layer")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    peak_macs = peak_macs_per_s()
    print(f"multiply-adds in registers: {peak_macs / 1e9:.1f} GMAC/s")
    rows = []
    for layer in (QUICK,) if options.quick else LAYERS:
        found = rows_of(layer, peak_macs, 5 if options.quick else options.rounds, 2.0 if options.quick else options.budget)
        rows += found
        print(*map(line, found), sep="\n", flush=True)
    if options.quick and options.out is None:
        return
    machine = {"device": machine_name("cpu"), "threads": 1, "compiler": "gcc " + " ".join(FLAGS), "peak_gmac_per_s": peak_macs / 1e9}
    print(write_results("npu", "lowering", options.label, machine, rows, options.out))


if __name__ == "__main__":
    main()
