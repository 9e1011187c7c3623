"""Strategies by name, over any space: each asks for a point and is told what it gave.

make_strategy(name, space, objectives=, budget_trials=, seed=, …) ──> Strategy: ask() ──> Ask     tell(ask, objectives, feasible)     best()

model       (default) a Gaussian process an objective; expected improvement, or the growth of the front
evolution   regularised, crossover and mutation; first parents by zero-cost proxies, children screened by the same process
controller  policy gradient over the decisions
halving     many points with little training, the best with more
nsga2, tpe  Optuna's
random      without repeats

Objectives are all "larger is better"; a point that breaks a hard limit is told with feasible=False, and its like is avoided.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core.errors import OptionError, unknown_name
from .settings import checked_settings
from .strategy.base import Ask, Base, Known, Strategy
from .strategy.chance import RandomSearch
from .strategy.controller import Controller
from .strategy.engines import GeneticSearch, TreeSearch
from .strategy.evolution import Evolution
from .strategy.halving import Halving
from .strategy.model import ModelSearch

if TYPE_CHECKING:
    from .spaces.space import Space

__all__ = ["STRATEGIES", "Ask", "Strategy", "make_strategy", "own_settings"]

STRATEGIES: dict[str, type[Base]] = {
    "model": ModelSearch,
    "evolution": Evolution,
    "controller": Controller,
    "halving": Halving,
    "nsga2": GeneticSearch,
    "tpe": TreeSearch,
    "random": RandomSearch,
}


def make_strategy(
    name: str, space: Space, /, *, objectives: int, budget_trials: int | None, seed: int, known: Known | None = None, **settings: Any
) -> Strategy:  # fmt: skip
    """`settings` are the strategy's own; one it does not have is an error. `known`: what costs no training to know (base.py)."""
    own = own_settings(name, settings)
    if objectives < 1 or (budget_trials is not None and budget_trials < 1) or seed < 0:
        raise OptionError(
            f"{objectives} objectives, {budget_trials} trials, seed {seed}",
            why="objectives and trials start at 1, seeds at 0",
            do="give such",
        )
    make: Any = STRATEGIES[name]
    strategy: Base = make(space, objectives, budget_trials, seed, **own)
    if known is not None:
        strategy.know(known)
    return strategy


def own_settings(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the strategy of that name, checked."""
    if name not in STRATEGIES:
        raise unknown_name("strategy", name, STRATEGIES, see="`ridgeline search --help`")
    return checked_settings(STRATEGIES[name], given, owner=f"strategy {name}")
