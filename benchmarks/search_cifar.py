"""CIFAR-10 from scratch by one recipe file: a found network, and hand-made residual networks to hold it against.

python benchmarks/search_cifar.py --model searched --space residual --set-space channels=32 --trials 16 --channels 128 --seed 0
    searched: a search of its own first, on the training images less a fifth; --channels and --cells are of the network that is trained,
    whose latency (estimated, a pass of --latency-batch images in bfloat16) --limit bounds;
    found: the same for a genotype made before (--genotype winner/genotype.json --search-seconds 120)
python benchmarks/search_cifar.py --model matched --genotype winner/genotype.json --seconds 300 --seed 0
    matched: the narrowest ResNet-18 that is not faster than the found network, both timed in turn, in evaluation mode
python benchmarks/search_cifar.py --model wrn-28-10 --epochs 60 --set learning_rate=0.3 --set augment.cutout=12 --held-out 5000
    held-out: scores that many training images, never trained on, instead of the test split: for trying settings

All 50,000 training images are trained on (less those held out); the test split is scored once, when training is over, each image as
it is and with its mirror image. One seed a command; rows of other seeds and models in results/search-cifar-<label>.json are kept, and
each (model, recipe, length) with several seeds gets its mean and deviation. Data: cifar10_*.npy under RIDGELINE_DATA.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, commit, write_results
from torch import nn

from ridgeline.kernel.bench.timing import GraphTimer, set_count, time_in_turn
from ridgeline.kernel.use import use_kernels
from ridgeline.measure.environment import machine_name
from ridgeline.search.recipe import Recipe, load_recipe, train_network
from ridgeline.search.spaces.space import load_space, point_of
from ridgeline.search.study.search import search
from ridgeline.workload.data import Data, Split, load_data
from ridgeline.workload.data.digits import split_rows
from ridgeline.workload.models.wide_resnet import hand_made

Row = dict[str, Any]
WIDTHS = range(16, 257, 8)  # of ResNet-18, for matching
SAME = ("model", "recipe_hash", "held_out", "asked_seconds", "asked_epochs", "genotype", "request")  # rows that may be averaged
REQUEST = (
    "space",
    "set_space",
    "strategy",
    "set_strategy",
    "objectives",
    "limit",
    "on",
    "trials",
    "trial_epochs",
    "channels",
    "cells",
    "latency_batch",
)  # what a search is asked


def main() -> None:
    options = parse()
    recipe = changed(load_recipe(options.recipe), options)
    data = prepared(load_data("cifar10"), options.held_out, options.images)
    trials = searched(options, data) if options.model == "searched" else None
    row: Row = {"model": options.model, "seed": options.seed, "held_out": options.held_out, "asked_seconds": options.seconds,
                "asked_epochs": options.epochs, "images": len(data.train), "search_s": options.search_seconds,
                "genotype": genotype_of(options) if options.genotype else None, "trials": trials}  # fmt: skip
    if options.model == "searched":
        row["request"] = {name: getattr(options, name) for name in REQUEST}
    name = options.model
    if name == "matched":
        name, found = matched(options)
        row |= found
    model = found_network(options, options.seed) if name in ("found", "searched") else made_by_hand(name, options.seed)
    kernels = use_kernels(model) if options.kernels else None
    trained = train_network(
        model, data, recipe, device=options.device, seed=options.seed, seconds=options.seconds, epochs=options.epochs,
        report=lambda line: print(f"  {line}", flush=True),
    )  # fmt: skip
    row |= {"network": name, **trained.to_json(), "memory_bytes": trained.history.memory_bytes[-1]}
    row["kernels"] = kernels.report() if kernels else None
    row["total_s"] = trained.seconds + (options.search_seconds or 0.0)
    what = f"of {trained.test_rows} {'held-out training' if options.held_out else 'test'} images"
    print(f"{name} seed {options.seed}: {100 * trained.accuracy:.2f} % {what}, {shown(trained.accuracy_mirrored)} with mirror images; "
          f"{trained.parameters / 1e6:.1f} M parameters, {trained.epochs} epochs")  # fmt: skip
    print(f"search {options.search_seconds or 0:.0f} s, compiling and timing {trained.measure_s:.1f} s, training {trained.train_s:.1f} s, "
          f"scoring {trained.evaluate_s:.1f} s, in all {row['total_s']:.1f} s")  # fmt: skip
    write(options, row)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="wrn-28-10", help="searched, found, matched, or a hand-made one: resnet18, resnet18-w48, wrn-16-4"
    )
    parser.add_argument("--genotype", type=Path, default=None, help="JSON of the found network")
    parser.add_argument("--channels", type=int, default=None, help="of the found network, instead of the genotype's")
    parser.add_argument("--cells", type=int, default=None, help="of the found network, instead of the genotype's")
    parser.add_argument("--search-seconds", type=float, default=None, help="what the search took, added to the total")
    parser.add_argument("--space", default="nb201", help="searched: where")
    parser.add_argument("--set-space", action="append", default=[], metavar="NAME=VALUE", help="searched: a setting of the space")
    parser.add_argument("--strategy", default="model", help="searched: by which strategy")
    parser.add_argument("--set-strategy", action="append", default=[], metavar="NAME=VALUE", help="searched: a setting of the strategy")
    parser.add_argument("--objectives", default="accuracy,latency", help="searched: the first decides")
    parser.add_argument(
        "--limit", action="append", default=[], help="searched: e.g. latency<=0.4ms, so that accuracy is not bought by size"
    )
    parser.add_argument("--on", default="h200", help="searched: whose latency")
    parser.add_argument("--trials", type=int, default=16, help="searched: trainings")
    parser.add_argument("--trial-epochs", type=int, default=3, help="searched: of each")
    parser.add_argument("--recipe", default="cifar10")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change the recipe, e.g. augment.cutout=12")
    parser.add_argument("--graph", action="store_true", help="the same as --set graph=true --set compile=false")
    parser.add_argument("--compile", action="store_true", help="the same as --set compile=true --set graph=false")
    parser.add_argument("--kernels", action="store_true", help="train with use_kernels(model)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=None, help="of training in all, compiling and scoring included")
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--held-out", type=int, default=0, help="training images to score instead of the test split")
    parser.add_argument("--images", type=int, default=0, help="of the training split; 0: all (for a quick look only)")
    parser.add_argument("--latency-batch", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--label", default=None, help="machine's name in the result file (default: the device's)")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    options = parser.parse_args()
    if options.model in ("found", "matched") and options.genotype is None:
        parser.error(f"--model {options.model} needs --genotype")
    return options


def searched(options: argparse.Namespace, data: Data) -> list[Row]:
    """A search; its winner's genotype and its seconds go into the options. Every trial with its objectives."""
    start, folder = time.perf_counter(), Path(tempfile.mkdtemp(prefix="search-"))
    settings, own = (
        {name: value_of(text) for name, text in (one.partition("=")[::2] for one in given)}
        for given in (options.set_space, options.set_strategy)
    )
    front = search(
        options.space, data, options.on, options.objectives, f"{options.trials}trials", settings=settings, strategy=options.strategy,
        strategy_settings=own, limits=options.limit, epochs=options.trial_epochs, seeds=(options.seed,), device=options.device,
        train_winner=False, final=sizes_of(options), batch=options.latency_batch, dtype=pass_dtype(options), folder=folder / "run",
        onnx=False, report=lambda line: print(f"  {line}", flush=True),
    )  # fmt: skip
    options.genotype = folder / "genotype.json"
    options.genotype.write_text(json.dumps(front.genotypes[front.winners[options.seed]]), encoding="utf-8")
    options.search_seconds = time.perf_counter() - start
    print(f"searched in {options.search_seconds:.0f} s: {options.genotype.read_text(encoding='utf-8')}", flush=True)
    return [{"point": list(trial.point), **trial.values, "seconds": trial.seconds} for trial in front.trials]


def changed(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    """The recipe with what --set, --graph and --compile say; values are written as in TOML."""
    given = dict(one.partition("=")[::2] for one in options.set)
    for name, other in (("graph", "compile"), ("compile", "graph")):
        given |= {name: "true", other: "false"} if getattr(options, name) else {}
    fields = {name.replace(".", "__"): value_of(text) for name, text in given.items()}
    return recipe.changed(**fields) if fields else recipe


def value_of(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word, e.g. optimiser=muon


def prepared(data: Data, held_out: int, images: int) -> Data:
    """Fewer training images, or some of them (the same of every class, always the same) to score."""
    if images:
        data = replace(data, train=part(data.train, torch.arange(images)), test=part(data.test, torch.arange(min(images, 10_000))))
    if not held_out:
        return data
    kept, out = split_rows(data.train.targets, held_out / len(data.train), seed=0)
    return replace(data, train=part(data.train, kept), test=part(data.train, out))


def part(split: Split, rows: torch.Tensor) -> Split:
    return Split(split.inputs[rows], split.targets[rows])


def genotype_of(options: argparse.Namespace) -> dict[str, Any]:
    """As the file has it, with --channels and --cells."""
    read: dict[str, Any] = json.loads(options.genotype.read_text(encoding="utf-8"))
    sizes = sizes_of(options)
    return {**read, "settings": {**read["settings"], **sizes}} if sizes else read


def sizes_of(options: argparse.Namespace) -> dict[str, int]:
    """Of the network that is trained, where they differ from the searched one's."""
    return {name: getattr(options, name) for name in ("channels", "cells") if getattr(options, name) is not None}


def pass_dtype(options: argparse.Namespace) -> str:
    """Of the passes whose latency is meant."""
    return "bfloat16" if options.device.startswith("cuda") else "float32"


def found_network(options: argparse.Namespace, seed: int) -> nn.Module:
    genotype = genotype_of(options)
    if genotype.get("space") == "aso-se":
        from ridgeline.search.study.final import build_genotype

        return build_genotype(genotype, seed)
    _, point = point_of(json.loads(options.genotype.read_text(encoding="utf-8")))
    return load_space(genotype["space"], **genotype["settings"]).build(point, seed=seed)


def made_by_hand(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return hand_made(name)


def matched(options: argparse.Namespace) -> tuple[str, Row]:
    """The narrowest ResNet-18 whose latency is not below the found network's, by halving the widths; each is timed in turn with it."""
    low, high, times = 0, len(WIDTHS) - 1, {}
    while low < high:
        middle = (low + high) // 2
        times[middle] = latencies(options, f"resnet18-w{WIDTHS[middle]}")
        low, high = (low, middle) if times[middle][0] >= times[middle][1] else (middle + 1, high)
    name = f"resnet18-w{WIDTHS[low]}"
    own_ms, found_ms = times.get(low) or latencies(options, name)
    print(f"matched: {name}, {own_ms:.3f} ms beside {found_ms:.3f} ms")
    return name, {"latency_ms": own_ms, "found_latency_ms": found_ms, "latency_batch": options.latency_batch}


def latencies(options: argparse.Namespace, name: str) -> tuple[float, float]:
    """Milliseconds of a hand-made network and of the found one; in a CUDA graph, whatever the host's share of many small launches."""
    nets = {name: made_by_hand(name, 0), "found": found_network(options, 0)}
    dtype = getattr(torch, pass_dtype(options))
    images = torch.randn(options.latency_batch, 3, 32, 32, device=options.device, dtype=dtype).to(memory_format=torch.channels_last)
    sets = set_count(images.nbytes, 4 * images.nbytes, options.device)
    inputs = [torch.randn_like(images) for _ in range(sets)]
    for net in nets.values():
        net.eval().requires_grad_(False).to(options.device, dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    steps = {one: (lambda at, net=net: net(inputs[at])) for one, net in nets.items()}
    timed = time_in_turn(steps, sets, options.device, 7, GraphTimer)
    for one, taken in timed.items():
        if taken.gpu_ms is None:
            raise SystemExit(f"{one} could not be timed: {taken.error}")
    first, second = (timed[one].gpu_ms or 0.0 for one in (name, "found"))
    print(f"  {name}: {first:.3f} ms, found: {second:.3f} ms at batch {options.latency_batch}", flush=True)
    return first, second


def write(options: argparse.Namespace, row: Row) -> None:
    """The result file with this row in place of the one it repeats, and a summary of every group of seeds."""
    name = machine_name(options.device)
    label = options.label or ("cpu" if options.device == "cpu" else name.lower().removeprefix("nvidia ").replace(" ", "-"))
    folder = options.out or RESULTS
    path = folder / f"search-cifar-{label}.json"
    row |= {"commit": commit()}
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"commit": "", "rows": []}
    rows = [{"commit": before["commit"], **one} for one in before["rows"]]
    kept = [one for one in rows if "seed" in one and (key(one), one["seed"]) != (key(row), row["seed"])]
    rows = sorted([*kept, row], key=lambda one: (key(one), one["seed"]))
    print(write_results("search", "cifar", label, {"device": name}, [*rows, *summaries(rows)], folder))


def key(row: Row) -> str:
    """Of what rows must share; each seed's search finds a network of its own."""
    return json.dumps([None if name == "genotype" and row["model"] == "searched" else row.get(name) for name in SAME], sort_keys=True)


def summaries(rows: list[Row]) -> list[Row]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    found = []
    for group in groups.values():
        first = {name: group[0].get(name) for name in SAME if name != "genotype" or group[0]["model"] != "searched"}
        made: Row = {"summary": True, **first, "recipe": group[0]["recipe"], "seeds": [row["seed"] for row in group]}
        for score in ("accuracy", "accuracy_mirrored", "total_s"):
            values = [row[score] for row in group if row[score] is not None]
            if values:
                made[f"{score}_mean"] = statistics.fmean(values)
                made[f"{score}_deviation"] = statistics.stdev(values) if len(values) > 1 else None
        print(f"{made['model']} by {made['recipe']}: {shown(made['accuracy_mean'])} mean of seeds {made['seeds']}")
        found.append(made)
    return found


def shown(accuracy: float | None) -> str:
    return "-" if accuracy is None else f"{100 * accuracy:.2f} %"


if __name__ == "__main__":
    main()
