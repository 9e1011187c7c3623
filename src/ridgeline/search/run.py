"""A search over a table: ask, reveal, tell, until the budget is spent.

search_table(table, strategy, budget, columns, seed) ──> Found: trials in order, the winner
  columns: name, or -name where smaller is better; the first decides the winner
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.errors import OptionError
from .budget import Budget
from .strategies import make_strategy
from .table import Table

MOST_TRIALS = 5000


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


def search_table(table: Table, strategy: str, budget: Budget, columns: Sequence[str], seed: int = 0) -> Found:
    """One search; the same seed and a budget in trials give the same trials."""
    if not 1 <= len(columns) <= 2:
        raise OptionError(f"{len(columns)} objectives", why="a search over a table has one or two", do="name one or two columns")
    trials = min(budget.trials or MOST_TRIALS, MOST_TRIALS, len(table.points))
    names = [name.removeprefix("-") for name in columns]
    for name in names:
        if not np.isfinite(table.column(name)).all():
            raise OptionError(f"column {name}", why="it has no number for some points", do="choose another column")
    signs = [-1.0 if name.startswith("-") else 1.0 for name in columns]
    chooser = make_strategy(strategy, table, len(columns), trials, seed)
    found, start = Found(), time.perf_counter()
    while not budget.spent(len(found.rows), time.perf_counter() - start) and len(found.rows) < trials:
        row = chooser.ask()
        values = table.reveal(table.points[row], names)
        chooser.tell(row, [sign * value for sign, value in zip(signs, values, strict=True)])
        found.rows.append(row)
        found.values.append(values)
    if not found.rows:
        raise OptionError("a search without a trial", why="the budget ends before the first", do="give more time, or trials")
    found.winner, found.seconds = chooser.best(), time.perf_counter() - start
    return found
