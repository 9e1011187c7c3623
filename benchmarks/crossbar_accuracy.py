"""How accurate ResNet-20 and -56 are on memristor arrays: perfect ones, 16 imperfect chips, and after training with the imperfections.

    digital (91.73 / 93.39 %) ──to_crossbar, calibrate_──> 8-bit operands, calibrated 8-bit ADC, nothing random      within 0.5 points
      ──5 % write variation, 1 % stuck cells──> the same weights on 16 chips: mean ± std, worst
      ──fit, every pass on a new chip──> fine-tuned weights on the same 16 chips: at least half of the loss won back

python benchmarks/crossbar_accuracy.py --model resnet20                       all 10,000 images
python benchmarks/crossbar_accuracy.py --images 500 --chips 2 --epochs 0      a quick look, without training
python benchmarks/crossbar_accuracy.py --chip-images 2000 --epochs 0          perfect arrays on all images, each chip on fewer

With --bound-weights 2.5 weights are clamped to that many standard deviations in training, so that cells err by less.
With --keep-norms --settle-norms batch norms stay digital and their statistics are also measured on each chip, before training and after
it: what training brings alone, what settling brings alone, and both are figures of their own, each the share of the loss won back.
Chip: rram-64 with its sigmas and rates set to 0, then write_sigma, stuck_high and stuck_low as given. Chips that are scored are never
among those trained on. Calibration and training use training images only. Data: RIDGELINE_DATA, with cifar10_*.npy and vision/*.th.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, command, write_results
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ridgeline.crossbar.layer.bound import BoundWeights
from ridgeline.crossbar.layer.calibrate import calibrate_
from ridgeline.crossbar.layer.convert import changed_chip, set_chip, to_crossbar
from ridgeline.crossbar.layer.layers import products
from ridgeline.crossbar.layer.settle import settle_norms_
from ridgeline.crossbar.study.subject import without_noise
from ridgeline.measure.environment import machine_name
from ridgeline.target.crossbar import CrossbarSpec
from ridgeline.target.load import load_crossbar
from ridgeline.train.evaluate import as_model, evaluate
from ridgeline.train.fit import fit
from ridgeline.workload.data import Data, Split, load_data
from ridgeline.workload.pretrained import load_pretrained

WANTED = {"points_lost_perfect": 0.5, "share_won_back_by_training": 0.5}


def main() -> None:
    options = parse()
    if options.settle_norms and not options.keep_norms:
        raise SystemExit("--settle-norms needs --keep-norms: folded norms have no statistics")
    if options.still_norms and not options.keep_norms:
        raise SystemExit("--still-norms needs --keep-norms: folded norms stand still anyway")
    data = load_data("cifar10")
    label = machine_name(options.device).lower().removeprefix("nvidia ") if options.device.startswith("cuda") else "cpu"
    folder = options.out or RESULTS
    machine = {"device": machine_name(options.device), "cpu": machine_name("cpu"), "cpu_threads": torch.get_num_threads()}
    kept = earlier(folder / f"crossbar-accuracy-{label}.json", options.model)
    for name in options.model:
        for row in study(name, data, options):  # after every stage: a run that is cut keeps what it has
            path = write_results("crossbar", "accuracy", label, machine, [*kept, row], folder)
        kept.append(row)
    print(path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["resnet20", "resnet56"], choices=("resnet20", "resnet56"))
    parser.add_argument("--images", type=int, default=None, help="test images; default all 10,000")
    parser.add_argument("--chip-images", type=int, default=None, help="test images of each imperfect chip; default as --images")
    parser.add_argument("--chips", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=4, help="of fine-tuning; 0: none")
    parser.add_argument("--train-images", type=int, default=None, help="default all 50,000 (fewer for a quick look only)")
    parser.add_argument("--optimiser", default="adamw", choices=("sgd", "adam", "adamw"))
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--average", type=float, default=None, help="decay of an average of the weights a step, which is what is scored")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient: some chips answer nonsense at first")
    parser.add_argument("--keep-norms", action="store_true", help="batch norms stay digital layers instead of being folded")
    parser.add_argument("--settle-norms", action="store_true", help="with --keep-norms: their statistics are measured on each chip")
    parser.add_argument("--still-norms", action="store_true", help="with --keep-norms: training leaves them as learned, as on a chip")
    parser.add_argument("--bound-weights", type=float, default=None, help="standard deviations weights are clamped to in training")
    parser.add_argument("--train-batch", type=int, default=128)
    parser.add_argument("--batch", type=int, default=250, help="of scoring")
    parser.add_argument("--chip", default="rram-64")
    parser.add_argument("--write-sigma", type=float, default=0.05)
    parser.add_argument("--stuck-high", type=float, default=0.002)
    parser.add_argument("--stuck-low", type=float, default=0.008)
    parser.add_argument("--percentile", default="100", help='of column sums within the ADC range, or "mse"')
    parser.add_argument("--calibration-images", type=int, default=256)
    parser.add_argument("--norm-images", type=int, default=1024, help="training images that norms are settled on")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    return parser.parse_args()


def study(name: str, data: Data, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row, as it grows: digital, perfect arrays, imperfect chips, and the same chips after training."""
    perfect = without_noise(load_crossbar(options.chip))
    faults = {"write_sigma": options.write_sigma, "stuck_high": options.stuck_high, "stuck_low": options.stuck_low}
    imperfect = changed_chip(perfect, faults, "the benchmark")
    model = load_pretrained(name).to(options.device).eval()
    row: dict[str, Any] = {"model": name, "chip": options.chip, "x_bits": perfect.x_bits, "w_bits": perfect.w_bits,
                           "adc_levels": list(perfect.adc_levels), "percentile": options.percentile, "seed": options.seed,
                           "norms_folded": not options.keep_norms, "norms_settled": options.settle_norms,
                           **faults}  # fmt: skip
    row["command"] = command()
    row["digital"] = score(model, data, options)
    if options.chip_images:  # what is lost is lost on the images that chips are shown
        row["digital_on_chip_images"] = score(model, data, options, options.chip_images)
    ideal = converted(model, perfect, data, options)
    row["perfect"] = score(ideal, data, options)
    row["points_lost_perfect"] = 100 * (row["digital"]["accuracy"] - row["perfect"]["accuracy"])
    row["engines"] = sorted({one["engine"] for one in ideal.crossbar_report()["layers"]})  # type: ignore[operator]
    report(name, "perfect arrays", row["perfect"])
    analog = converted(model, imperfect, data, options)
    row["before"] = on_chips(analog, data, options)
    report(name, f"{options.chips} chips", row["before"])
    yield row
    if options.settle_norms:
        learned = {key: value.clone() for key, value in analog.named_buffers() if "running" in key}
        row["settled"] = on_chips(analog, data, options, settle=True)
        for key, value in analog.named_buffers():  # training starts where it would have without settling
            if key in learned:
                value.copy_(learned[key])
        row["share_won_back_settled"] = won_back(row, "before", "settled")
        report(name, f"{options.chips} chips, norms settled", row["settled"])
        yield row
    if options.epochs:
        row["training"] = tuned(analog, data, options)
        row["trained"] = on_chips(analog, data, options)
        row["share_won_back_by_training"] = won_back(row, "before", "trained")
        report(name, f"{options.chips} chips, fine-tuned", row["trained"])
        yield row
        if options.settle_norms:
            row["after"] = on_chips(analog, data, options, settle=True)
            row["share_won_back"] = won_back(row, "before", "after")
            row["share_of_settled_won_back"] = won_back(row, "settled", "after")
            report(name, f"{options.chips} chips, fine-tuned, norms settled", row["after"])
    row |= {"wanted": WANTED, "reached": reached(row)}
    shares = {key: round(value, 3) for key, value in row.items() if key.startswith("share") and value is not None}
    print(f"{name}: {row['points_lost_perfect']:.2f} points lost on perfect arrays; {shares}", flush=True)
    yield row


def converted(model: nn.Module, chip: CrossbarSpec, data: Data, options: argparse.Namespace) -> nn.Module:
    analog = to_crossbar(model, chip, engine=options.engine, seed=options.seed, fold=not options.keep_norms)
    calibrated(analog, data, options)
    return analog.eval()


def calibration_images(model: nn.Module, data: Data, options: argparse.Namespace) -> torch.Tensor:
    return as_model(model, data.prepare(data.train.inputs[: options.calibration_images].to(options.device)))


def norm_images(model: nn.Module, data: Data, options: argparse.Namespace, chip: int) -> torch.Tensor:
    """Training images, shifted and mirrored as in training, which is what statistics of norms belong to."""
    images = data.train.inputs[: options.norm_images].to(options.device)
    moved = data.augment(images, torch.Generator().manual_seed(chip)) if data.augment else images
    return as_model(model, data.prepare(moved))


def calibrated(analog: nn.Module, data: Data, options: argparse.Namespace) -> None:
    rule = "mse" if options.percentile == "mse" else float(options.percentile)
    calibrate_(analog, calibration_images(analog, data, options).split(64), percentile=rule)


def tuned(analog: nn.Module, data: Data, options: argparse.Namespace) -> dict[str, Any]:
    """Trained in place, every pass on a chip that was never seen; how. ADC ranges are found anew after it, or after bounding, before it."""
    part = data
    if options.train_images:
        part = replace(data, train=Split(data.train.inputs[: options.train_images], data.train.targets[: options.train_images]))
    still = tuple(name for name, module in analog.named_modules() if isinstance(module, _BatchNorm)) if options.still_norms else ()
    start = time.perf_counter()
    bound = BoundWeights(options.bound_weights) if options.bound_weights else None
    if bound is not None:  # arrays are scaled by smaller weights now: their columns sum to more
        bound(analog, 0)
        calibrated(analog, data, options)
    fit(analog, part, epochs=options.epochs, batch=options.train_batch, optimiser=options.optimiser, learning_rate=options.learning_rate,
        weight_decay=1e-4, clip=options.clip, average=options.average, freeze=still, seed=options.seed, after_step=bound,
        report=print, progress=False)  # fmt: skip
    seconds = time.perf_counter() - start
    if bound is None:  # bounded weights were trained with the ranges they have
        calibrated(analog, data, options)
    passes = max(product.passes for product in products(analog).values())
    analog.eval()
    return {"epochs": options.epochs, "optimiser": options.optimiser, "learning_rate": options.learning_rate, "clip": options.clip,
                "average": options.average,
                "norms_still": options.still_norms, "weights_bound_to_sigmas": options.bound_weights, "batch": options.train_batch,
                "train_s": seconds, "chips_trained_on": passes}  # fmt: skip


def on_chips(analog: nn.Module, data: Data, options: argparse.Namespace, settle: bool = False) -> dict[str, Any]:
    found = []
    for number in range(options.chips):
        set_chip(analog, number)
        if settle:
            settle_norms_(analog, norm_images(analog, data, options, number).split(256))
        found.append(score(analog, data, options, options.chip_images or options.images)["accuracy"])
    spread = statistics.stdev(found) if len(found) > 1 else 0.0
    images = options.chip_images or options.images
    return {"mean": statistics.mean(found), "std": spread, "worst": min(found), "accuracy_of_chip": found, "images": images}


def score(model: nn.Module, data: Data, options: argparse.Namespace, images: int | None = None) -> dict[str, Any]:
    start = time.perf_counter()
    scores = evaluate(model, data, batch=options.batch, limit=images or options.images)
    return {
        "accuracy": scores.accuracy,
        "loss": scores.loss,
        "images": scores.count,
        "images_per_s": scores.count / (time.perf_counter() - start),
    }


def report(name: str, what: str, row: dict[str, Any]) -> None:
    told = (
        f"{100 * row['accuracy']:.2f} %"
        if "accuracy" in row
        else f"{100 * row['mean']:.2f} ± {100 * row['std']:.2f} %, worst {100 * row['worst']:.2f}"
    )
    print(f"{name}, {what}: {told}", flush=True)


def won_back(row: dict[str, Any], before: str, after: str) -> float | None:
    """Share of the points lost against digital."""
    lost = row.get("digital_on_chip_images", row["digital"])["accuracy"] - row[before]["mean"]
    return (row[after]["mean"] - row[before]["mean"]) / lost if lost > 0 else None


def reached(row: dict[str, Any]) -> bool:
    won = row.get("share_won_back_by_training")
    return row["points_lost_perfect"] <= WANTED["points_lost_perfect"] and (won is None or won >= WANTED["share_won_back_by_training"])


def earlier(path: Path, models: list[str]) -> list[dict[str, Any]]:
    """Rows of an earlier command for other models."""
    if not path.is_file():
        return []
    return [row for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if row["model"] not in models]


if __name__ == "__main__":
    main()
