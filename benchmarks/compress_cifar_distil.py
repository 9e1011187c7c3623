"""ResNet-20 taught by ResNet-56 on CIFAR-10, against the same training without a teacher.

    seed ──> plain:     fit(ResNet-20)                          the same weights to start from, batches, crops, steps and schedule
         └─> distilled: teach(ResNet-20, ResNet-56)             α·T²·KL + (1 − α)·CE + β·attention maps of the three stages
    each ──save_model──> model.safetensors ──load_model──> accuracy on all 10,000 test images

python benchmarks/compress_cifar_distil.py --seeds 0,1,2     all six trainings, each a process of its own, side by side
python benchmarks/compress_cifar_distil.py --seed 0          one seed; rows of other seeds with the same settings are kept

ResNet-20 keeps a GPU waiting for launches, so several processes share it well. Data: RIDGELINE_DATA, with cifar10_*.npy and the
published ResNet-56 weights (vision/resnet56-4bfd9763.th, 93.39 %).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, write_results
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ridgeline.core.files import write_json
from ridgeline.measure.environment import machine_name
from ridgeline.train.evaluate import evaluate
from ridgeline.train.fit import fit
from ridgeline.transform.distil import DistilSettings, teach
from ridgeline.transform.saved import load_model, save_model
from ridgeline.workload.data import Data, Split, load_data
from ridgeline.workload.models.cifar_resnet import BLOCKS, CifarResNet
from ridgeline.workload.pretrained import load_pretrained

KINDS = ("plain", "distilled")
STAGES = {"layer1": "layer1", "layer2": "layer2", "layer3": "layer3"}
WANTED_POINTS = 0.4


def main() -> None:
    options = parse()
    if options.only:
        write_json(options.row, train_one(options))
        return
    seeds = [options.seed] if options.seed is not None else [int(seed) for seed in options.seeds.split(",")]
    label = machine_name(options.device).lower().removeprefix("nvidia ") if options.device.startswith("cuda") else "cpu"
    folder = options.out or RESULTS
    kept = earlier(folder / f"compress-cifar-distil-{label}.json", options, seeds)
    start = time.perf_counter()
    found = side_by_side(options, seeds)
    rows = sorted(kept + joined(found, options), key=lambda row: row["seed"])
    machine = {"device": machine_name(options.device), "processes": options.parallel, "seconds": time.perf_counter() - start}
    print(write_results("compress", "cifar-distil", label, machine, [*rows, summary(rows)], folder))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--seed", type=int, default=None, help="one seed instead")
    parser.add_argument("--parallel", type=int, default=6, help="trainings at once")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=0.2)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--warmup", type=int, default=200, help="steps")
    parser.add_argument("--temperature", type=float, default=4.0)
    parser.add_argument("--alpha", type=float, default=0.9)
    parser.add_argument("--beta", type=float, default=10.0, help="of the attention maps; 0: logits alone")
    parser.add_argument("--precision", default=None, help="default: bfloat16 on a GPU, float32 elsewhere")
    parser.add_argument("--compile", default="", help="torch.compile's mode, e.g. reduce-overhead; pays from about 100 epochs on")
    parser.add_argument("--images", type=int, default=0, help="of the training set; 0: all (for a quick look only)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", type=Path, default=None, help="folder to keep the trained models in")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    parser.add_argument("--only", choices=KINDS, default=None, help="one training in this process, its row written to --row")
    parser.add_argument("--row", type=Path, default=None)
    options = parser.parse_args()
    options.precision = options.precision or ("bfloat16" if options.device.startswith("cuda") else "float32")
    return options


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What both trainings share, and what the teacher adds: equal for rows that may be averaged."""
    shared = ("epochs", "batch", "learning_rate", "weight_decay", "warmup", "precision")
    taught = {"temperature": options.temperature, "alpha": options.alpha, "beta": options.beta}
    return {**{name: getattr(options, name) for name in shared}, "momentum": 0.9, "schedule": "cosine", "images": options.images, **taught}


def train_one(options: argparse.Namespace) -> dict[str, Any]:
    """One training, saved, loaded again and scored."""
    data = load_data("cifar10")
    if options.images:
        data = replace(data, train=Split(data.train.inputs[: options.images], data.train.targets[: options.images]))
    torch.manual_seed(options.seed)
    model = CifarResNet(BLOCKS["resnet20"]).to(options.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    start = time.perf_counter()
    fit_to(model, data, options)
    seconds = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as scratch:
        home = (options.models or Path(scratch)) / f"resnet20-{options.only}-{options.seed}"
        save_model(model, home, base="resnet20")
        scores = evaluate(load_model(home, device=options.device), data, batch=1000)
        size = sum(file.stat().st_size for file in home.glob("*.safetensors"))
    row = {"seed": options.seed, "kind": options.only, "accuracy": scores.accuracy, "loss": scores.loss, "test_images": scores.count,
           "bytes": size, "train_s": seconds}  # fmt: skip
    print(f"seed {options.seed} {options.only:10} {100 * scores.accuracy:.2f} %  {seconds:.0f} s", flush=True)
    return row


def fit_to(model: nn.Module, data: Data, options: argparse.Namespace) -> None:
    shared: dict[str, Any] = {
        "epochs": options.epochs, "batch": options.batch, "learning_rate": options.learning_rate, "momentum": 0.9, "schedule": "cosine",
        "weight_decay": options.weight_decay, "warmup": options.warmup, "precision": options.precision, "compile": options.compile or False,
    }  # fmt: skip
    if options.only == "plain":
        fit(model, data, **shared, seed=options.seed, progress=False)
        return
    teacher = folded(load_pretrained("resnet56")).to(options.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if options.precision != "float32":
        teacher = teacher.to(getattr(torch, options.precision))  # as autocast would do at every step
    inside: dict[str, Any] = {"features": "attention", "layers": STAGES} if options.beta else {}
    lesson = DistilSettings(**shared, temperature=options.temperature, alpha=options.alpha, beta=options.beta, **inside)
    teach(model, teacher, data, lesson, seed=options.seed, progress=False)


def folded(teacher: nn.Module) -> nn.Module:
    """The same function with each batch norm folded into its convolution: half the launches of a pass."""
    for part in teacher.modules():
        for conv, norm in (("conv1", "bn1"), ("conv2", "bn2")):
            if hasattr(part, conv):
                setattr(part, conv, fuse_conv_bn_eval(getattr(part, conv), getattr(part, norm)))
                setattr(part, norm, nn.Identity())
    return teacher


def side_by_side(options: argparse.Namespace, seeds: list[int]) -> list[dict[str, Any]]:
    """Every (seed, kind) in a process of its own, at most `parallel` at once; the longer kind first."""
    waiting = [(kind, seed) for kind in reversed(KINDS) for seed in seeds]
    threads = max(1, (os.cpu_count() or 1) // max(1, min(options.parallel, len(waiting))))
    running: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as scratch:
        files = []
        try:
            while waiting or running:
                while waiting and len(running) < options.parallel:
                    kind, seed = waiting.pop(0)
                    files.append(Path(scratch) / f"{kind}-{seed}.json")
                    own = [*passed_on(options), "--only", kind, "--seed", str(seed), "--row", str(files[-1])]
                    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
                    running.append(subprocess.Popen([sys.executable, __file__, *own], env=environment))
                failed = [process for process in running if process.poll() not in (None, 0)]
                if failed:
                    raise SystemExit(f"a training ended with code {failed[0].returncode}")
                running = [process for process in running if process.poll() is None]
                time.sleep(0.2)
        finally:
            for process in running:
                process.kill()
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def passed_on(options: argparse.Namespace) -> list[str]:
    """The options a child needs, as words."""
    names = ("epochs", "batch", "learning_rate", "weight_decay", "warmup", "temperature", "alpha", "beta", "precision", "compile",
             "images", "device", "models")  # fmt: skip
    return [word for name in names if getattr(options, name) not in (None, "")
            for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]  # fmt: skip


def joined(found: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a seed."""
    rows = []
    for seed in sorted({one["seed"] for one in found}):
        plain, distilled = (next(one for one in found if one["seed"] == seed and one["kind"] == kind) for kind in KINDS)
        row = {"seed": seed, "plain_accuracy": plain["accuracy"], "distilled_accuracy": distilled["accuracy"],
               "gain_points": 100 * (distilled["accuracy"] - plain["accuracy"]), "plain_train_s": plain["train_s"],
               "distilled_train_s": distilled["train_s"], "bytes": distilled["bytes"], "test_images": distilled["test_images"],
               "settings": settings_of(options)}  # fmt: skip
        rows.append(row)
    return rows


def earlier(path: Path, options: argparse.Namespace, seeds: list[int]) -> list[dict[str, Any]]:
    """Rows of other seeds from an earlier command with the same settings."""
    if not path.is_file():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row.get("settings") == settings_of(options) and row.get("seed") not in seeds]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean over seeds, beside what was asked for."""
    means = {name: sum(row[name] for row in rows) / len(rows) for name in ("plain_accuracy", "distilled_accuracy", "gain_points")}
    print(f"mean of {len(rows)} seeds: plain {100 * means['plain_accuracy']:.2f} %, distilled {100 * means['distilled_accuracy']:.2f} %, "
          f"gain {means['gain_points']:+.2f} points (wanted {WANTED_POINTS})")  # fmt: skip
    return {"what": "mean", "seeds": [row["seed"] for row in rows], **means, "wanted_points": WANTED_POINTS,
            "reached": means["gain_points"] >= WANTED_POINTS}  # fmt: skip


if __name__ == "__main__":
    main()
