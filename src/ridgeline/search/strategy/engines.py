"""Optuna's samplers behind ask and tell: TPE (Watanabe 2023) and NSGA-II (Deb 2002).

    ask: study.ask(), one categorical a decision ──> point     tell: study.tell(values); infeasible ones through Optuna's constraints

A told point that is not the one asked for is added as a finished trial of its own. An infeasible point without numbers gets the worst seen:
Optuna ranks it below every feasible one by the constraint, whatever its numbers are.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import MissingExtraError
from .base import Ask, Base

if TYPE_CHECKING:
    from ..spaces.space import Space

BROKEN = "broken limits"


class _Optuna(Base):
    def __init__(self, space: Space, objectives: int, budget_trials: int | None, seed: int) -> None:
        super().__init__(space, objectives, budget_trials, seed)
        try:
            import optuna
        except ImportError as error:
            raise MissingExtraError(
                "strategies tpe and nsga2", why="Optuna is not installed", do="pip install optuna, or use another strategy"
            ) from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.names = [f"{place} {decision.name}" for place, decision in enumerate(space.decisions)]
        self.choices = [optuna.distributions.CategoricalDistribution(range(len(one.choices))) for one in space.decisions]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna 4: constraints are experimental
            # Optuna 5: a trial holds its constraints itself
            told = {} if hasattr(optuna.trial.Trial, "set_constraint") else {"constraints_func": _broken}
            self.study = optuna.create_study(directions=["maximize"] * objectives, sampler=self.sampler(optuna, seed=seed, **told))
        self.trial: Any = None

    def sampler(self, optuna: Any, **settings: Any) -> Any:
        raise NotImplementedError

    def propose(self) -> Ask:
        self.trial = self.study.ask()
        chosen = (self.trial.suggest_categorical(name, one.choices) for name, one in zip(self.names, self.choices, strict=True))
        return Ask(tuple(int(choice) for choice in chosen))

    def tell(self, ask: Ask, objectives: Sequence[float], feasible: bool = True) -> None:
        self.ask()  # Optuna draws from one generator: a replay of tells alone must draw what the asks drew
        super().tell(ask, objectives, feasible)

    def learn(self, ask: Ask, values: tuple[float, ...], feasible: bool) -> None:
        import optuna

        chosen = dict(zip(self.names, ask.point, strict=True))
        if self.trial.params != chosen:
            self.study.tell(self.trial, state=optuna.trial.TrialState.FAIL)
            self.study.enqueue_trial(chosen)
            self.trial = self.study.ask(dict(zip(self.names, self.choices, strict=True)))
        if not feasible and (len(values) != self.objectives or not np.isfinite(values).all()):
            told = np.array(list(self.told.values()) or [(0.0,) * self.objectives])
            values = tuple(float(value) for value in told.min(axis=0))
        broken = 0.0 if feasible else 1.0
        if hasattr(self.trial, "set_constraint"):
            self.trial.set_constraint(BROKEN, broken)
        else:
            self.trial.set_user_attr(BROKEN, broken)
        self.study.tell(self.trial, list(values))


def _broken(trial: Any) -> tuple[float]:
    return (float(trial.user_attrs.get(BROKEN, 0.0)),)


class TreeSearch(_Optuna):
    """The tree-structured Parzen estimator with Optuna's defaults."""

    def sampler(self, optuna: Any, **settings: Any) -> Any:
        return optuna.samplers.TPESampler(**settings)


class GeneticSearch(_Optuna):
    """NSGA-II; its generations are a fifth of the budget, 50 at most."""

    def sampler(self, optuna: Any, **settings: Any) -> Any:
        size = min(50, max(4, (self.budget_trials or 250) // 5))
        return optuna.samplers.NSGAIISampler(population_size=size, **settings)
