"""Strategies over a listed space: each asks for a point and is told what it gave.

ask() ──> row of the table          tell(row, objectives [larger is better])          best() ──> the row it would ship

model      (default) a Gaussian process over ops and paths; one objective: expected improvement; several: the largest growth of the
           hypervolume by an optimistic guess. Ships the point whose smoothed value is best among those it evaluated
evolution  regularised (Real 2019): the oldest of 30 dies, the best of 10 drawn ones has a child by mutation or crossover
random     without repeats
tpe        Optuna's TPE, the same choices; several objectives: its multi-objective form
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..core.errors import OptionError, unknown_name
from .front import growth, nondominated
from .surrogate import Surrogate
from .table import Table

FIRST = 12
"""Random points before the model is asked."""
LENGTH, NOISE = 12.0, 0.2
"""Of the kernel, and the share of an accuracy that is chance: chosen on CIFAR-100, among six pairs."""


class Strategy(Protocol):
    """What a search talks to."""

    def ask(self) -> int: ...
    def tell(self, row: int, objectives: Sequence[float]) -> None: ...
    def best(self) -> int: ...


class _Listed:
    """What is known of a table without looking anything up: its points."""

    def __init__(self, table: Table, objectives: int, trials: int, seed: int) -> None:
        self.space, self.points, self.objectives, self.trials = table.space, table.points, objectives, trials
        self.row_of = table.row
        self.random = np.random.default_rng(seed)
        self.told: dict[int, tuple[float, ...]] = {}

    def tell(self, row: int, objectives: Sequence[float]) -> None:
        self.told[row] = tuple(objectives)

    def best(self) -> int:
        return max(self.told, key=lambda row: self.told[row][0])


class RandomSearch(_Listed):
    def ask(self) -> int:
        while True:
            row = int(self.random.integers(len(self.points)))
            if row not in self.told or len(self.told) == len(self.points):
                return row


class Evolution(_Listed):
    population, tournament = 30, 10

    def __init__(self, table: Table, objectives: int, trials: int, seed: int) -> None:
        super().__init__(table, objectives, trials, seed)
        self.alive: deque[int] = deque()

    def tell(self, row: int, objectives: Sequence[float]) -> None:
        super().tell(row, objectives)
        self.alive.append(row)
        if len(self.alive) > self.population:
            self.alive.popleft()

    def ask(self) -> int:
        if len(self.alive) < self.population:
            return self.row_of(self.space.random(self.random, 1)[0])
        weight = self.random.dirichlet(np.ones(self.objectives))
        first, second = (self._parent(weight) for _ in range(2))
        child = self.points[first]
        if self.random.random() < 0.25:
            child = self.space.crossed(child, self.points[second], self.random)
        return self.row_of(self.space.mutated(child, self.random))

    def _parent(self, weight: Any) -> int:
        values = np.array([self.told[row] for row in self.alive])
        scaled = (values - values.mean(axis=0)) / (values.std(axis=0) + 1e-12)
        drawn = self.random.choice(len(self.alive), self.tournament, replace=False)
        return self.alive[int(drawn[np.argmax((scaled @ weight)[drawn])])]


class ModelSearch(_Listed):
    """A surrogate an objective; points that compute the same are one."""

    def __init__(self, table: Table, objectives: int, trials: int, seed: int) -> None:
        super().__init__(table, objectives, trials, seed)
        cells = self.space.canonical(self.points)
        _, self.group = np.unique(cells, axis=0, return_inverse=True)
        self.group = self.group.reshape(-1)
        features = self.space.features(self.points)
        self.models = [Surrogate(features, LENGTH, NOISE, trials + 1) for _ in range(objectives)]
        self.closed = np.zeros(len(self.points), dtype=bool)  # evaluated, or the same as one that was

    def ask(self) -> int:
        open_rows = np.flatnonzero(~self.closed)
        if not len(open_rows):
            return int(self.random.integers(len(self.points)))
        if len(self.told) < FIRST:
            return int(self.random.choice(open_rows))
        guesses = [model.posterior() for model in self.models]
        if self.objectives == 1:
            mean, deviation = (part[open_rows] for part in guesses[0])
            return int(open_rows[np.argmax(_expected_improvement(mean, deviation, max(self.models[0].values)))])
        hope = np.stack([mean[open_rows] + deviation[open_rows] for mean, deviation in guesses], axis=1)
        seen = np.array(list(self.told.values()))
        low = seen.min(axis=0) - 0.1 * (seen.max(axis=0) - seen.min(axis=0) + 1e-12)
        return int(open_rows[np.argmax(growth(nondominated(seen), hope, low))])

    def tell(self, row: int, objectives: Sequence[float]) -> None:
        super().tell(row, objectives)
        if len(self.models[0].rows) < self.trials + 1:
            for model, value in zip(self.models, objectives, strict=True):
                model.observe(row, float(value))
        self.closed |= self.group == self.group[row]

    def best(self) -> int:
        mean, _ = self.models[0].posterior()
        return max(self.told, key=lambda row: mean[row])


def _expected_improvement(mean: Any, deviation: Any, best: float) -> Any:
    z = (mean - best) / deviation
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    # the normal distribution function by Abramowitz & Stegun 26.2.17: 7.5e-8, and no SciPy
    t = 1 / (1 + 0.2316419 * np.abs(z))
    tail = density * t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    return (mean - best) * np.where(z > 0, 1 - tail, tail) + deviation * density


class OptunaSearch(_Listed):
    """Optuna's TPE with its defaults."""

    def __init__(self, table: Table, objectives: int, trials: int, seed: int) -> None:
        super().__init__(table, objectives, trials, seed)
        try:
            import optuna
        except ImportError as error:
            raise OptionError("strategy tpe", why="Optuna is not installed", do="pip install optuna, or use another strategy") from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.study = optuna.create_study(directions=["maximize"] * objectives, sampler=optuna.samplers.TPESampler(seed=seed))
        self.trial: Any = None

    def ask(self) -> int:
        self.trial = self.study.ask()
        chosen = [self.trial.suggest_categorical(f"edge{place}", range(self.space.choices)) for place in range(self.space.decisions)]
        return self.row_of(np.array(chosen, dtype=np.uint8))

    def tell(self, row: int, objectives: Sequence[float]) -> None:
        super().tell(row, objectives)
        self.study.tell(self.trial, list(objectives))


STRATEGIES: dict[str, Callable[[Table, int, int, int], Strategy]] = {
    "model": ModelSearch,
    "evolution": Evolution,
    "random": RandomSearch,
    "tpe": OptunaSearch,
}


def make_strategy(name: str, table: Table, objectives: int, trials: int, seed: int) -> Strategy:
    if name not in STRATEGIES:
        raise unknown_name("strategy", name, STRATEGIES, see="`ridgeline search --help`")
    return STRATEGIES[name](table, objectives, trials, seed)
