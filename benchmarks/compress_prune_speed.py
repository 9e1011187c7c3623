"""ResNet-56 with half its FLOPs removed as channels, against the original, on the CPU: both in alternation, in one run.

python benchmarks/compress_prune_speed.py                 a few minutes; writes results/compress-prune-speed-cpu.json
  --batches 1,32,128 --threads 1,2 --rounds 15

One row a (widths, layout, batch, threads): the ratio of the medians of pairs with its 95 % interval, and the FLOPs that are left.
Plain eager float32, batch norms not folded, as a user's model is. Widths: the same share of every block in multiples of
8 (what compress_cifar_prune.py trains), or any, ranked over all blocks. Convolutions work in blocks of 8 or 16 channels, so odd widths
save FLOPs that cost no time. Fine-tuning changes no shape, so the weights are those left by pruning.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from common import write_results
from torch import Tensor, nn

from ridgeline.measure.ab import ab
from ridgeline.measure.environment import machine_name
from ridgeline.transform.prune.structured import Removed, prune_channels
from ridgeline.workload.pretrained import load_pretrained

WIDTHS: tuple[tuple[Literal["layer", "global"], int], ...] = (("layer", 8), ("global", 1))
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,32,128")
    parser.add_argument("--threads", default=",".join(map(str, sorted({1, torch.get_num_threads()}))))
    parser.add_argument("--layouts", default="contiguous,channels_last")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    options = parser.parse_args()
    original = load_pretrained("resnet56").eval()
    rows = []
    for scope, round_to in WIDTHS:
        pruned = copy.deepcopy(original)
        removed = prune_channels(pruned, (torch.randn(1, 3, 32, 32),), 0.5, scope=scope, round_to=round_to)
        for threads in numbers(options.threads):
            torch.set_num_threads(threads)
            for layout in options.layouts.split(","):
                for batch in numbers(options.batches):
                    rows.append(compared(original, pruned, removed, (scope, round_to), threads, layout, batch, options.rounds))
    print(write_results("compress", "prune-speed", "cpu", {"device": machine_name("cpu")}, rows, options.out))


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def compared(
    original: nn.Module, pruned: nn.Module, removed: Removed, widths: tuple[str, int], threads: int, layout: str, batch: int, rounds: int
) -> dict[str, Any]:
    """One row: both models on the same images."""
    scope, round_to = widths
    images = torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(memory_format=LAYOUTS[layout])
    first, second = (forward(copy.deepcopy(model).to(memory_format=LAYOUTS[layout]), images) for model in (original, pruned))
    result = ab(second, first, rounds=rounds)  # ratio: the original's time over the pruned model's
    row = {
        "model": "resnet56", "scope": scope, "round_to": round_to, "threads": threads, "layout": layout, "batch": batch, "dtype": "float32",
        "flops_ratio": removed.flops[1] / removed.flops[0], "parameters_before": removed.parameters[0], "parameters": removed.parameters[1],
        "widths": [after for _, after in removed.widths.values()], "original_s": result.b.median_s, "pruned_s": result.a.median_s,
        "speedup": result.ratio, "speedup_low": result.low, "speedup_high": result.high, "rounds": rounds,
    }  # fmt: skip
    before_ms, after_ms = result.b.median_s * 1e3, result.a.median_s * 1e3
    print(f"{scope} round_to {round_to}  {threads} threads  {layout:13}  batch {batch:4}  {before_ms:8.1f} → {after_ms:8.1f} ms"
          f"  {result.ratio:.2f}x ({result.low:.2f}–{result.high:.2f})", flush=True)  # fmt: skip
    return row


def forward(model: nn.Module, images: Tensor) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with torch.inference_mode():
            out: Tensor = model(images)
            return out

    return call


if __name__ == "__main__":
    main()
