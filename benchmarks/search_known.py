"""What it is worth to know a network's latency before asking for it, as a search with a latency table does: NAS-Bench-201's cells.

python benchmarks/search_known.py --table nb201_tables.npz     some minutes on two cores; writes results/search-known-<label>.json
  --seeds 30 --trials 16,40 --devices edgegpu,eyeriss

    accuracy (12 epochs, CIFAR-10, validation) of a cell: told when it is asked for
    latency on the device: told with it (`guessed` until then), or known of every cell beforehand (`known`)
      ──strategy, trials──> cells ──> hypervolume on the device it was searched for, and on the other

Hypervolume of accuracy against latency, reference point the accuracy that three cells in ten miss and the slowest cell's latency, as a
share of that of all cells. Strategies draw their candidates as they do in spaces too large to list, unlike in search_tables.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from common import write_results

from ridgeline.measure.environment import machine_name
from ridgeline.search.front import hypervolume
from ridgeline.search.strategies import make_strategy
from ridgeline.search.table import Table, load_table

SEEN, MISSED = "c10_val12", 0.3
WAYS = (("random", False), ("tpe", False), ("evolution", False), ("evolution", True), ("model", False), ("model", True))
Row = dict[str, Any]


def searched(table: Table, strategy: str, known: bool, latency: Any, trials: int, seed: int) -> list[int]:
    """Rows of the cells it asked for."""
    accuracy, asked = table.column(SEEN), []
    options: dict[str, Any] = {"proxy": ()} if strategy == "evolution" else {}  # a table's cells are not built
    if known:
        options["known"] = lambda point: ((None, -float(latency[table.rows[point]])), True)
    chooser = make_strategy(strategy, table.space, objectives=2, budget_trials=trials, seed=seed, **options)
    while len(asked) < trials:
        ask = chooser.ask()
        row = table.rows[ask.point]
        chooser.tell(ask, [accuracy[row], -latency[row]])
        asked.append(row)
    return asked


def share(table: Table, rows: list[int], latency: Any) -> float:
    """Of the hypervolume of all cells."""
    points = np.stack([table.column(SEEN), -latency], axis=1)
    reference = (float(np.quantile(table.column(SEEN), MISSED)), -float(latency.max()))
    return hypervolume(points[rows], reference) / hypervolume(points, reference)


def measured(table: Table, device: str, strategy: str, known: bool, trials: int, options: argparse.Namespace) -> Row:
    latencies = {name: table.column(f"hw_c10_{name}_latency") for name in options.devices.split(",")}
    found = [searched(table, strategy, known, latencies[device], trials, seed) for seed in range(options.seeds)]
    row: Row = {"device": device, "strategy": strategy, "known": known, "trials": trials, "seeds": options.seeds}
    row["shares"] = {name: [share(table, rows, latency) for rows in found] for name, latency in latencies.items()}
    told = ", ".join(f"{name} {np.mean(each):.3f} ± {np.std(each):.3f}" for name, each in row["shares"].items())
    print(f"for {device}: {strategy:10}{'known' if known else 'guessed':8} {trials:3} trials: {told}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--devices", default="edgegpu,eyeriss")
    parser.add_argument("--trials", default="16,40")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--label", default="cpu", help="machine's name in the result file")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    options = parser.parse_args()
    table = load_table(options.table)
    rows = [measured(table, device, strategy, known, int(trials), options)
            for trials in options.trials.split(",") for device in options.devices.split(",") for strategy, known in WAYS]  # fmt: skip
    print(write_results("search", "known", options.label, {"device": machine_name("cpu")}, rows, options.out))


if __name__ == "__main__":
    main()
