"""ResNet-56 on CIFAR-10, pruned two ways; every accuracy is that of the model read back from its file, on all 10,000 test images.

python benchmarks/compress_cifar_prune.py --variant channels     half the FLOPs, channels really gone, fine-tuned against the original
  widths multiples of 8, the same share of every block; --variant channels-any-width ranks all blocks together
python benchmarks/compress_cifar_prune.py --variant magnitude    80 % of all weights zero, gradually (cubic schedule), stored sparse
  --variant channels,magnitude --seed 1 --epochs 20 --compile reduce-overhead       rows of other variants and seeds are kept

RIDGELINE_DATA must hold the CIFAR-10 arrays and vision/resnet56-4bfd9763.th. About two minutes a variant on an H200.
Writes results/compress-cifar-prune-<machine>.json. Latency: one pass of `--latency-batch` images, both models in alternation.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, write_results
from torch import nn

from ridgeline.core.change import Change
from ridgeline.measure.environment import machine_name
from ridgeline.train.evaluate import evaluate
from ridgeline.transform.prune.step import prune
from ridgeline.transform.saved import load_model, save_model
from ridgeline.workload.data import Data, load_data
from ridgeline.workload.pretrained import load_pretrained

VARIANTS: dict[str, dict[str, Any]] = {
    "channels": {"method": "channels", "flops": 0.5, "scope": "layer", "round_to": 8, "learning_rate": 0.05, "weight_decay": 5e-4},
    "channels-any-width": {"method": "channels", "flops": 0.5, "scope": "global", "learning_rate": 0.05, "weight_decay": 5e-4},
    "magnitude": {"method": "magnitude", "sparsity": 0.8, "scope": "global", "ramp": 0.6, "learning_rate": 0.05, "weight_decay": 1e-4},
}
WANTED = {"channels": 0.923, "channels-any-width": 0.923, "magnitude": 0.925}  # accuracy each is held to


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="channels,magnitude")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=float, default=40.0)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=None)
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--compile", default="", help="a mode of torch.compile for the training, e.g. reduce-overhead")
    parser.add_argument("--no-teacher", action="store_true", help="train on the labels alone")
    parser.add_argument("--latency-batch", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", type=Path, default=None, help="keep the models in this folder")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    options = parser.parse_args()
    data, original = load_data("cifar10"), load_pretrained("resnet56").to(options.device)
    if options.device == "cuda":
        original = original.to(memory_format=torch.channels_last)
    rows = [measured(name, original, data, options) for name in options.variant.split(",")]
    label = machine_name(options.device).lower().removeprefix("nvidia ") if options.device == "cuda" else "cpu"
    kept = other_rows((options.out or RESULTS) / f"compress-cifar-prune-{label}.json", rows)
    print(write_results("compress", "cifar-prune", label, {"device": machine_name(options.device)}, kept + rows, options.out))


def other_rows(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows already in the file that this run does not replace."""
    known = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return [row for row in known if (row["variant"], row["seed"]) not in {(new["variant"], new["seed"]) for new in rows}]


def measured(name: str, original: nn.Module, data: Data, options: argparse.Namespace) -> dict[str, Any]:
    """One variant: pruned, trained, saved, read back, scored."""
    settings = {**VARIANTS[name], "epochs": options.epochs, "batch": options.batch, "precision": options.precision}
    settings |= {"compile": options.compile or False, "distil": not options.no_teacher}
    settings |= {"learning_rate": options.learning_rate} if options.learning_rate else {}
    inputs = (data.prepare(data.test.inputs[: options.latency_batch].to(options.device)),)
    start = time.perf_counter()
    pruned, change = prune(original, inputs=inputs, data=data, seed=options.seed, name="resnet56", **settings)
    took_s = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.save or Path(scratch)) / f"resnet56-{name}-{options.seed}"
        save_model(pruned, folder, base="resnet56", change=change)
        stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        after = evaluate(load_model(folder).to(options.device), data, batch=1000).accuracy
    before = evaluate(original, data, batch=1000).accuracy
    row = summary(name, change, settings, options) | {
        "accuracy_before": before, "accuracy": after, "accuracy_wanted": WANTED[name], "bytes_stored": stored, "seconds": took_s,
    }  # fmt: skip
    print(
        f"{name}: accuracy {before:.4f} → {after:.4f} (wanted {WANTED[name]}), {row['bytes_before']:,} → {stored:,} B, "
        f"{row['speedup']:.2f}x faster at batch {options.latency_batch}, {took_s:.0f} s"
    )
    return row


def summary(name: str, change: Change, settings: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """What the Change says, flat."""
    first, second = change.before.latency, change.after.latency
    assert first is not None and second is not None
    row = {
        "variant": name, "model": "resnet56", "data": "cifar10", "seed": options.seed, "settings": settings,
        "latency_batch": options.latency_batch,
        "parameters_before": change.before.parameters, "parameters": change.after.parameters, "nonzero": change.after.nonzero,
        "sparsity": change.after.sparsity, "target_sparsity": change.target_sparsity, "bytes_before": change.before.bytes_on_disk,
        "latency_before_s": first.median_s, "latency_s": second.median_s, "speedup": change.speedup,
    }  # fmt: skip
    if "flops" in change.details:
        flops = change.details["flops"]
        row |= {"flops_ratio": flops[1] / flops[0], "widths": [layer["after"] for layer in change.details["layers"]]}
    return row


if __name__ == "__main__":
    main()
