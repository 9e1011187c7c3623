"""ResNet-56 on CIFAR-10 in integers: static int8, and 4-bit weights after a few epochs of quantisation-aware training.

    ResNet-56 (93.39 %) ──static, 512 calibration images──> int8 weights and activations
                        └─qat, at most 5 epochs, taught by the float model──> 4-bit weights, 8-bit activations
    each ──save_model──> model.safetensors ──load_model──> accuracy on all 10,000 test images, bytes of the file against the float file's,
         on the device and, with oneDNN's integer kernels, on the CPU; latency on the CPU against the float model, in alternation

python benchmarks/compress_cifar_quant.py                      both
python benchmarks/compress_cifar_quant.py --only qat --seed 1  one; rows of other runs are kept

Data: RIDGELINE_DATA, with cifar10_*.npy and the published weights (vision/resnet56-4bfd9763.th). Calibration and training use
training images only; settings were fixed beforehand, not chosen on the test images.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, write_results
from torch import nn

from ridgeline.measure.environment import machine_name
from ridgeline.train.evaluate import evaluate
from ridgeline.transform.compare import latencies
from ridgeline.transform.quantise.step import QuantizeSettings
from ridgeline.transform.saved import load_model, save_model
from ridgeline.transform.step import Context, run_step
from ridgeline.workload.data import Data, Split, load_data
from ridgeline.workload.pretrained import load_pretrained

WANTED = {"static": {"accuracy": 0.931, "bytes_ratio": 0.27}, "qat": {"accuracy": 0.925}}


def main() -> None:
    options = parse()
    data = load_data("cifar10")
    if options.images:
        data = replace(data, train=Split(data.train.inputs[: options.images], data.train.targets[: options.images]))
    label = machine_name(options.device).lower().removeprefix("nvidia ") if options.device.startswith("cuda") else "cpu"
    folder = options.out or RESULTS
    model = load_pretrained("resnet56").to(options.device)
    float_row = {"kind": "float", **scored(model, "float", data, options)}
    rows = [float_row]
    for kind in [options.only] if options.only else ["static", "qat"]:
        rows.append(quantised(model, kind, data, options, float_row["bytes"]))
    kept = earlier(folder / f"compress-cifar-quant-{label}.json", rows)
    machine = {"device": machine_name(options.device), "cpu": machine_name("cpu"), "cpu_threads": torch.get_num_threads()}
    print(write_results("compress", "cifar-quant", label, machine, kept + rows, folder))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("static", "qat"), default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calibration", default="mse", choices=("minmax", "percentile", "mse", "entropy"))
    parser.add_argument("--bits", type=int, default=4, help="of weights, in qat")
    parser.add_argument("--epochs", type=int, default=5, help="of qat")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--compile", default="", help="torch.compile's mode for qat, e.g. default")
    parser.add_argument("--images", type=int, default=0, help="of the training set; 0: all (for a quick look only)")
    parser.add_argument("--test-images", type=int, default=None, help="default: all 10,000 (fewer for a quick look only)")
    parser.add_argument("--no-cpu", action="store_true", help="leave out what runs on the CPU where the device is a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", type=Path, default=None, help="folder to keep the quantised models in")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    return parser.parse_args()


def settings_of(kind: str, options: argparse.Namespace) -> QuantizeSettings:
    if kind == "static":
        return QuantizeSettings(method="static", calibration=options.calibration)
    return QuantizeSettings(
        method="qat", bits=options.bits, epochs=options.epochs, batch=options.batch, learning_rate=options.learning_rate,
        weight_decay=options.weight_decay, precision=options.precision, compile=options.compile or False, calibration=options.calibration,
    )  # fmt: skip


def quantised(model: nn.Module, kind: str, data: Data, options: argparse.Namespace, float_bytes: int) -> dict[str, Any]:
    """One row: quantise, save, load, score."""
    settings = settings_of(kind, options)
    start = time.perf_counter()
    done = run_step(model, settings, Context(data=data, name="resnet56", target=options.device, seed=options.seed, report=print))
    seconds = time.perf_counter() - start
    row = {"kind": kind, "seed": options.seed, "name": done.name, "quantise_s": seconds, **scored(done.model, kind, data, options)}
    row |= {"bytes_ratio": row["bytes"] / float_bytes, "notes": list(done.notes), "storage_only": list(done.storage_only)}
    if has_cpu_part(options):
        row["cpu_latency"] = cpu_latency(model, done.model)
    wanted = WANTED[kind]
    reached = row["accuracy"] >= wanted["accuracy"] and row["bytes_ratio"] <= wanted.get("bytes_ratio", 1.0)
    row |= {"wanted": wanted, "reached": reached, "settings": settings.model_dump(mode="json", exclude_defaults=True)}
    worst = min(done.details["layers"], key=lambda layer: layer["sqnr_db"])
    row |= {"weight_sqnr_db_least": worst["sqnr_db"], "weight_sqnr_db_least_layer": worst["name"]}
    print(f"{kind}: {100 * row['accuracy']:.2f} %, {row['bytes_ratio']:.3f}x the bytes, {seconds:.0f} s, reached: {reached}", flush=True)
    return row


def has_cpu_part(options: argparse.Namespace) -> bool:
    return options.device == "cpu" or not options.no_cpu


def scored(model: nn.Module, kind: str, data: Data, options: argparse.Namespace) -> dict[str, Any]:
    """Accuracy of the model loaded from its file, and the file's bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        home = (options.models or Path(scratch)) / f"resnet56-{kind}-{options.seed}"
        save_model(model, home, base="resnet56")
        size = sum(file.stat().st_size for file in home.glob("*.safetensors"))
        scores = evaluate(load_model(home, device=options.device), data, batch=1000, limit=options.test_images)
        row = {"accuracy": scores.accuracy, "loss": scores.loss, "test_images": scores.count, "bytes": size}
        if options.device != "cpu" and has_cpu_part(options) and kind != "float":
            row["cpu_accuracy"] = evaluate(load_model(home), data, batch=250, limit=options.test_images).accuracy
    return row


def cpu_latency(before: nn.Module, after: nn.Module) -> list[dict[str, Any]]:
    """Median time of one pass before and after, alternating, for one image and for 32."""
    home = next(before.parameters()).device
    rows = []
    before.cpu()
    after.cpu()
    for batch in (1, 32):
        context = Context(inputs=(torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(0)),), name="resnet56")
        pair = latencies(before, after, context)
        if pair is not None:
            rows.append({"batch": batch, "float_s": pair[0].to_dict(), "quantised_s": pair[1].to_dict(),
                         "speedup": pair[0].median_s / pair[1].median_s})  # fmt: skip
    before.to(home)
    return rows


def earlier(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of an earlier command that this one has not made again."""
    if not path.is_file():
        return []
    made = {(row["kind"], row.get("seed"), str(row.get("settings"))) for row in rows}
    stored = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [row for row in stored if (row["kind"], row.get("seed"), str(row.get("settings"))) not in made and row["kind"] != "float"]


if __name__ == "__main__":
    main()
