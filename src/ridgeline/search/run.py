"""A search over a table: ask, reveal, tell, until the budget is spent.

search_table(table, strategy, budget, columns, seed) ──> Found: rows in order, the winner
report_table(table, …, seeds) ──> one JSON object: each seed's winner and front, mean and deviation of what is shown
  columns: name, or -name where smaller is better; the first decides the winner

A point the table lacks is told as infeasible and costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.errors import OptionError
from .budget import Budget, parse_budget
from .front import nondominated
from .strategies import make_strategy
from .table import Table

MOST_TRIALS = 5000
MOST_MISSES = 20_000


@dataclass(slots=True)
class Found:
    """What a search saw, and what it chose."""

    rows: list[int] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)  # as the columns have them
    winner: int = -1
    seconds: float = 0.0

    def signed(self, columns: Sequence[str]) -> Any:
        """[trials, objectives], larger is better."""
        return np.array(self.values) * [-1.0 if name.startswith("-") else 1.0 for name in columns]


def search_table(table: Table, strategy: str, budget: Budget, columns: Sequence[str], seed: int = 0, **settings: Any) -> Found:
    """One search; the same seed and a budget in trials give the same trials. `settings` are the strategy's."""
    if not 1 <= len(columns) <= 3:
        raise OptionError(f"{len(columns)} objectives", why="a search over a table has one to three", do="name one to three columns")
    if strategy == "halving":
        raise OptionError(
            "strategy halving over a table", why="a table holds finished trainings, and halving breaks some off", do="use another"
        )
    trials = min(budget.trials or MOST_TRIALS, MOST_TRIALS, len(table.points))
    names = [name.removeprefix("-") for name in columns]
    for name in names:
        if not np.isfinite(table.column(name)).all():
            raise OptionError(f"column {name}", why="it has no number for some points", do="choose another column")
    signs = [-1.0 if name.startswith("-") else 1.0 for name in columns]
    # a table's cells are not built: evolution begins without proxies, and the model has every point before it
    given: dict[str, dict[str, Any]] = {"model": {"listed": table.listed}, "evolution": {"proxy": ()}}
    settings = given.get(strategy, {}) | settings
    chooser = make_strategy(strategy, table.space, objectives=len(columns), budget_trials=trials, seed=seed, **settings)
    found, start, misses = Found(), time.perf_counter(), 0
    while not budget.spent(len(found.rows), time.perf_counter() - start) and len(found.rows) < trials:
        ask = chooser.ask()
        if ask.point not in table.rows:
            misses += 1
            if misses > MOST_MISSES:
                raise OptionError(
                    f"strategy {strategy}", why=f"{misses} of its points are not in the table", do="use model, or a whole table"
                )
            chooser.tell(ask, [], feasible=False)
            continue
        values = table.reveal(ask.point, names)
        chooser.tell(ask, [sign * value for sign, value in zip(signs, values, strict=True)])
        found.rows.append(table.rows[ask.point])
        found.values.append(values)
    if not found.rows:
        raise OptionError("a search without a trial", why="the budget ends before the first", do="give more time, or trials")
    found.winner, found.seconds = table.rows[chooser.best()], time.perf_counter() - start
    return found


def _summary(values: list[float]) -> dict[str, float]:
    """Mean and deviation of the sample."""
    return {"mean": float(np.mean(values)), "std": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0}


def report_table(
    table: Table,
    *,
    strategy: str = "model",
    budget: str = "100trials",
    columns: Sequence[str] = ("c10_val12",),
    shown: Sequence[str] = ("c10_test200",),
    seeds: int = 5,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Seeds 0, 1, …; `shown` are columns of each winner, looked up afterwards."""
    most = parse_budget(budget)
    for name in shown:
        table.column(name)
    rows: list[dict[str, Any]] = []
    for seed in range(seeds):
        found = search_table(table, strategy, most, columns, seed)
        row: dict[str, Any] = {"seed": seed, "trials": len(found.rows), "seconds": found.seconds, "cell": table.name(found.winner)}
        row |= {name: float(table.column(name)[found.winner]) for name in [*(one.removeprefix("-") for one in columns), *shown]}
        if len(columns) == 2:
            row["front"] = nondominated(found.signed(columns)).tolist()
        rows.append(row)
        report(f"seed {seed}: {row['cell']}")
    summary = {name: _summary([row[name] for row in rows]) for name in shown}
    return {"schema": 1, "strategy": strategy, "budget": budget, "objectives": list(columns), "seeds": rows, "summary": summary}
