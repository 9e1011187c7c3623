"""The same search for two machines: are the networks it finds different ones, and is each machine's front the better one there?

python benchmarks/search_fronts.py                  h200 and eyeriss, residual at 16 channels, 24 trainings each; a GPU makes it quick
  --targets h200,eyeriss --space residual --set-space channels=16 --trials 24 --trial-epochs 8 --seed 0
  --tables FOLDER   keeps the latency tables (one to two minutes on a CPU) and takes those it has
  --together        the searches at the same time, a process each: small networks leave most of a large GPU idle

    target ──estimated latency table, one image a pass──> search for accuracy and latency (same data, seed, budget) ──> front
    every network of both fronts ──both tables──> accuracy, latency here and there ──> hypervolume of each front on each machine

Accuracy is on the fifth of the training images that no candidate is trained on; the test split is not touched. Hypervolume: of accuracy
against latency, reference point the least accuracy and the largest latency of all networks of both fronts, as a share of the box from
there to the best of both. Data: cifar10_*.npy under RIDGELINE_DATA.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import write_results
from search_cifar import prepared, value_of

from ridgeline.measure.environment import machine_name
from ridgeline.search.front import hypervolume
from ridgeline.search.latency import LatencyTable, build_table
from ridgeline.search.spaces.space import Space
from ridgeline.search.study.search import search, space_for
from ridgeline.workload.data import Data, load_data

Row = dict[str, Any]


def main() -> None:
    options = parse()
    targets = options.targets.split(",")
    with tempfile.TemporaryDirectory() as folder:
        options.tables = options.tables or Path(folder)
        space = space_of(options, load_data("cifar10"))
        for target in targets:
            table_of(space, target, options.tables)
        if options.together:
            with ProcessPoolExecutor(len(targets), get_context("spawn")) as pool:
                rows = list(pool.map(partial(searched, options), targets))
        else:
            rows = [searched(options, target) for target in targets]
    compare(rows, targets)
    for row in rows:
        print(line(row, targets))
    shared = len(set.intersection(*({tuple(net["point"]) for net in row["front"]} for row in rows)))
    print(f"{shared} networks on both fronts")
    rows.append({"summary": True, "shared": shared, "networks": [len(row["front"]) for row in rows]})
    label = options.label or ("cpu" if options.device == "cpu" else "cuda")
    print(write_results("search", "fronts", label, {"device": machine_name(options.device)}, rows, options.out))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="h200,eyeriss")
    parser.add_argument("--space", default="residual")
    parser.add_argument("--set-space", action="append", default=None, metavar="NAME=VALUE", help="default: channels=16")
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--trial-epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--together", action="store_true", help="all searches at the same time")
    parser.add_argument("--tables", type=Path, default=None, help="folder of latency tables")
    parser.add_argument("--images", type=int, default=0, help="of the training split; 0: all (for a quick look only)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--label", default=None, help="machine's name in the result file (default: the device)")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    options = parser.parse_args()
    options.set_space = options.set_space or ["channels=16"]
    return options


def space_of(options: argparse.Namespace, data: Data) -> Space:
    return space_for(options.space, data, {name: value_of(text) for name, text in (one.partition("=")[::2] for one in options.set_space)})


def table_file(space: Space, target: str, folder: Path) -> Path:
    return folder / f"{space.name}-{target}.json"


def table_of(space: Space, target: str, folder: Path) -> LatencyTable:
    """The one in the folder; where there is none, it is made and kept there."""
    path = table_file(space, target, folder)
    if not path.is_file():
        build_table(space, target, batch=1).save(path)
    return LatencyTable.load(path)


def searched(options: argparse.Namespace, target: str) -> Row:
    """A search for one machine; its front, with every machine's latency of each network."""
    start, data = time.perf_counter(), prepared(load_data("cifar10"), 0, options.images)
    space = space_of(options, data)
    tables = {name: table_of(space, name, options.tables) for name in options.targets.split(",")}
    found = search(
        space, data, target, "accuracy,latency", f"{options.trials}trials", table=str(table_file(space, target, options.tables)),
        epochs=options.trial_epochs, seeds=(options.seed,), device=options.device, train_winner=False, onnx=False,
        report=lambda text: print(f"  {target}: {text}", flush=True) if "epoch" not in text else None,
    )  # fmt: skip
    nets = [{"point": list(space.canonical(trial.point)), "accuracy": trial.values["accuracy"], "genotype": found.genotypes[trial.number],
             "latency_s": {name: table.predict(space, trial.point) for name, table in tables.items()}}
            for trial in found.front]  # fmt: skip
    return {"target": target, "seed": options.seed, "trials": len(found.trials), "search_s": time.perf_counter() - start, "front": nets}


def compare(rows: list[Row], targets: list[str]) -> None:
    """Adds to each row the hypervolume of its front on every machine, and how many of its networks another front beats there."""
    every = [net for row in rows for net in row["front"]]
    for target in targets:
        worst = (min(net["accuracy"] for net in every), -max(net["latency_s"][target] for net in every))
        best = (max(net["accuracy"] for net in every), -min(net["latency_s"][target] for net in every))
        box = (best[0] - worst[0]) * (best[1] - worst[1])
        for row in rows:
            points = np.array([(net["accuracy"], -net["latency_s"][target]) for net in row["front"]])
            row.setdefault("hypervolume", {})[target] = hypervolume(points, worst) / box if box > 0 else 0.0
            others = [net for other in rows if other is not row for net in other["front"]]
            row.setdefault("beaten", {})[target] = sum(any(beats(one, net, target) for one in others) for net in row["front"])


def beats(first: Row, second: Row, target: str) -> bool:
    """At least as accurate and fast, and better in one."""
    gains = (first["accuracy"] - second["accuracy"], second["latency_s"][target] - first["latency_s"][target])
    return min(gains) >= 0 and max(gains) > 0


def line(row: Row, targets: list[str]) -> str:
    held = ", ".join(f"{target} {row['hypervolume'][target]:.3f} ({row['beaten'][target]} beaten)" for target in targets)
    return f"front of {row['target']}: {len(row['front'])} networks; hypervolume on {held}; {row['search_s']:.0f} s"


if __name__ == "__main__":
    main()
