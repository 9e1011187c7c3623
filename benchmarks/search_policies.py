"""How searches inside a supernet converge by policy, and what their networks are worth: `all`, `top_k`, `sample`, `partial` side by side.

    data.train less held-out ──search_differentiable(policy)──> losses, skipped work and seconds of every epoch ──derive──> cell
      ──train_network(recipe), from scratch, the same for all──> accuracy on the held-out part of the training split

python benchmarks/search_policies.py                                    CIFAR-10 on a GPU: darts, 16 channels, 8 cells, batch 64
python benchmarks/search_policies.py --data digits --space nb201 --set channels=4 --set cells=1 --epochs 12 --recipe digits --device cpu
  --policies all,top_k --seeds 3 --final channels=24

A seed is a row for each policy; every policy of a seed begins with the same weights and sees the same batches. The test split is not used.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import write_results
from search_cifar import prepared, value_of

from ridgeline.measure.environment import machine_name
from ridgeline.search.differentiable.search import search_differentiable
from ridgeline.search.recipe import train_network
from ridgeline.search.spaces.space import Space, load_space
from ridgeline.workload.data import Data, load_data

Row = dict[str, Any]
CURVE = ("train_loss", "valid_loss", "entropy", "skips", "skipped_share", "seconds")


def main() -> None:
    options = parse()
    data = load_data(options.data)
    held_out = prepared(data, options.held_out or len(data.train) // 10, options.images)
    given = dict(one.partition("=")[::2] for one in options.set)
    shape = held_out.train.inputs.shape[1:]
    sizes = {"classes": data.classes, "image": int(shape[-1]), "image_channels": int(shape[0])}
    space = load_space(options.space, **sizes, **{name: value_of(text) for name, text in given.items()})
    final = {**sizes, **{name: value_of(text) for name, text in (*given.items(), *(one.partition("=")[::2] for one in options.final))}}
    rows: list[Row] = []
    name = machine_name(options.device)
    label = options.label or ("cpu" if options.device == "cpu" else name.lower().removeprefix("nvidia ").replace(" ", "-"))
    for seed in range(options.seeds):
        for policy in options.policies.split(","):
            rows.append(measured(space, final, held_out, policy, seed, options))
            path = write_results("search", "policies", label, {"device": name}, rows, options.out)
    print(path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--space", default="darts")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of the space searched, e.g. channels=16")
    parser.add_argument("--final", action="append", default=[], metavar="NAME=VALUE", help="of the network trained, where it differs")
    parser.add_argument("--policies", default="all,top_k")
    parser.add_argument("--epochs", type=int, default=6, help="of the search")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--recipe", default="cifar10-quick", help="that trains the derived network")
    parser.add_argument("--final-epochs", type=int, default=None)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--held-out", type=int, default=0, help="training images that score the derived network; 0: a tenth")
    parser.add_argument("--images", type=int, default=0, help="of the training split; 0: all (for a quick look only)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--label", default=None, help="machine's name in the result file (default: the device's)")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    return parser.parse_args()


def measured(space: Space, final: dict[str, Any], data: Data, policy: str, seed: int, options: argparse.Namespace) -> Row:
    """One search, and the training of what it found."""
    if options.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    searched_on = replace(data, test=data.train)  # what scores the result is not there while searching
    start = time.perf_counter()
    found = search_differentiable(
        space, searched_on, device=options.device, epochs=options.epochs, batch=options.batch, policy=policy, seed=seed,
        report=lambda line: print(f"  {policy}, seed {seed}: {line}", flush=True),
    )  # fmt: skip
    search_s = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if options.device.startswith("cuda") else None
    model = load_space(space.name, **final).build(found.point, seed=seed)
    trained = train_network(model, data, options.recipe, device=options.device, seed=seed, epochs=options.final_epochs)
    row: Row = {
        "policy": policy, "seed": seed, "data": data.name, "space": space.name, "settings": space.genotype(found.point)["settings"],
        "final": final, "epochs": options.epochs, "batch": options.batch, "search_s": search_s, "search_peak_bytes": peak,
        "stopped": found.stopped, "point": list(found.point), "curve": [{name: one[name] for name in CURVE} for one in found.history],
        "accuracy": trained.accuracy, "test_rows": trained.test_rows, "parameters": trained.parameters, "final_epochs": trained.epochs,
        "recipe": trained.recipe, "recipe_hash": trained.recipe_hash,
    }  # fmt: skip
    last = found.history[-1]
    told = f"searched in {search_s:.1f} s, last losses {last['train_loss']:.3f} and {last['valid_loss'] or math.nan:.3f}"
    print(f"{policy}, seed {seed}: {told}, {last['skipped_share']:.0%} of the op work skipped", flush=True)
    print(f"  its network: {trained.accuracy:.2%} of {trained.test_rows} held-out images", flush=True)
    return row


if __name__ == "__main__":
    main()
