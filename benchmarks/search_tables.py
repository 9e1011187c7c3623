"""Strategies over NAS-Bench-201's table: what 100 evaluations find, many seeds each; and fronts of accuracy against latency.

python benchmarks/search_tables.py --table nb201_tables.npz     about 6 minutes on two cores; writes results/search-tables-<label>.json
  --seeds 100 --front-seeds 20 --strategies model,evolution,controller,random,tpe,nsga2

An evaluation reveals one cell's 12-epoch validation accuracy on CIFAR-10 (and, for fronts, its latency on an edge GPU). `test`: the
200-epoch test accuracy of the cell each search chose, looked up afterwards. Fronts: hypervolume of all evaluated cells after 200
evaluations, in (accuracy in per cent, -latency in ms) above the reference point, by the accuracy seen and by the 200-epoch test accuracy.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from common import write_results

from ridgeline.measure.environment import machine_name
from ridgeline.search.budget import Budget
from ridgeline.search.front import hypervolume
from ridgeline.search.run import search_table
from ridgeline.search.table import Table, load_table

SEEN, TEST, LATENCY = "c10_val12", "c10_test200", "hw_c10_edgegpu_latency"
REFERENCE = (80.0, -10.0)


def accuracies(table: Table, strategy: str, seeds: int, trials: int) -> dict[str, Any]:
    test, seconds = [], 0.0
    for seed in range(seeds):
        found = search_table(table, strategy, Budget(trials=trials), [SEEN], seed)
        test.append(float(table.column(TEST)[found.winner]))
        seconds += found.seconds
    row = {"part": "accuracy", "strategy": strategy, "seeds": seeds, "trials": trials, "test_mean": float(np.mean(test)),
           "test_std": float(np.std(test)), "test_worst": min(test), "each": test, "seconds_each": seconds / seeds}  # fmt: skip
    print(
        f"{strategy:10} {row['test_mean']:.3f} ± {row['test_std']:.3f}, worst {row['test_worst']:.2f}, {row['seconds_each']:.2f} s",
        flush=True,
    )
    return row


def fronts(table: Table, strategy: str, seeds: int, trials: int) -> dict[str, Any]:
    seen, test = [], []
    for seed in range(seeds):
        found = search_table(table, strategy, Budget(trials=trials), [SEEN, f"-{LATENCY}"], seed)
        signed = found.signed([SEEN, f"-{LATENCY}"])
        seen.append(hypervolume(signed, REFERENCE))
        test.append(hypervolume(np.stack([table.column(TEST)[found.rows], signed[:, 1]], axis=1), REFERENCE))
    row = {"part": "front", "strategy": strategy, "seeds": seeds, "trials": trials, "reference": list(REFERENCE),
           "seen_mean": float(np.mean(seen)), "seen_std": float(np.std(seen)), "test_mean": float(np.mean(test)),
           "test_std": float(np.std(test)), "seen_each": seen, "test_each": test}  # fmt: skip
    told = f"seen {row['seen_mean']:.2f} ± {row['seen_std']:.2f}, test {row['test_mean']:.2f} ± {row['test_std']:.2f}"
    print(f"{strategy:10} hypervolume {told}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--strategies", default="model,evolution,controller,random,tpe,nsga2")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--front-seeds", type=int, default=20)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--front-trials", type=int, default=200)
    parser.add_argument("--label", default="cpu", help="machine's name in the result file")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    options = parser.parse_args()
    table, names = load_table(options.table), options.strategies.split(",")
    rows = [accuracies(table, name, options.seeds, options.trials) for name in names]
    rows += [fronts(table, name, options.front_seeds, options.front_trials) for name in names]
    whole = np.stack([table.column(SEEN), -table.column(LATENCY)], axis=1)
    tested = np.stack([table.column(TEST), -table.column(LATENCY)], axis=1)
    best = {"part": "best", "test": float(table.column(TEST).max()), "seen_hypervolume": hypervolume(whole, REFERENCE),
            "test_hypervolume": hypervolume(tested, REFERENCE), "points": len(table.points)}  # fmt: skip
    print(best)
    print(write_results("search", "tables", options.label, {"device": machine_name("cpu")}, [*rows, best], options.out))


if __name__ == "__main__":
    main()
