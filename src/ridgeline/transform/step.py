"""One shape for every transform: settings and a context in, a new module and what was done out; then measured into a Change.

    @step("prune", PruneSettings)                                      settings: a Spec (TOML, unknown fields are errors)
    def run(model, settings, context) -> Done(model, notes, ...)       `model` is a copy of the user's: free to change

    transform(model, settings, context) ──copy──> run ──measured──> (model, Change)
    recipe: [[step]] kind = "prune" ... ──> the same, one after another   (recipe.py)

Context carries what any step may need: example inputs, data, the quality function, device, seed. A step that needs what the
context lacks raises TransformError and names it.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from ..core.change import Change
from ..core.errors import TransformError, unknown_name
from ..core.spec import Spec

if TYPE_CHECKING:
    from ..workload.data import Data

Quality = Callable[[nn.Module], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Context:
    """What is known beside the model. `inputs` are the arguments of one forward pass, on the model's device."""

    inputs: tuple[Any, ...] | None = None
    data: Data | None = None
    quality: Quality | None = None  # scores of a model, e.g. {"accuracy": 0.93}; measured before and after
    teacher: nn.Module | None = None
    name: str = "model"
    target: str = "cpu"
    seed: int = 0
    latency: bool = True  # False: do not time (the Change then says so)
    report: Callable[[str], None] = lambda message: None  # progress

    def need(self, what: str, who: str) -> Any:
        """The context's `what`, or an error that says `who` needs it."""
        value = getattr(self, what)
        if value is None:
            raise TransformError(f"{who} without {what}", why=f"it needs {what} to work from", do=f"give {what}=")
        return value


@dataclass(frozen=True, slots=True)
class Done:
    """What a step made."""

    model: nn.Module
    name: str  # e.g. "prune magnitude global 80 %"
    notes: tuple[str, ...] = ()
    target_sparsity: float | None = None
    storage_only: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


Run = Callable[[nn.Module, Any, Context], Done]
HOMES = {
    "quantize": ".quantise.step",
    "prune": ".prune.step",
    "low_rank": ".factor.step",
    "distill": ".distil",
    "finetune": ".finetune",
    "cast": ".simple",
    "layout": ".simple",
    "compile": ".simple",
    "optimize": ".graph.optimize",
}
"""Kind of step → module that registers it, relative to this package."""
_STEPS: dict[str, tuple[type[Spec], Run]] = {}
Settings = TypeVar("Settings", bound=type[Spec])


def step(kind: str, settings: type[Spec]) -> Callable[[Run], Run]:
    """Register `run` for the settings class of one kind of step."""

    def register(run: Run) -> Run:
        if kind in _STEPS and _STEPS[kind][1] is not run:
            raise ValueError(f"step {kind!r} is registered twice")
        _STEPS[kind] = (settings, run)
        return run

    return register


def find_step(kind: str) -> tuple[type[Spec], Run]:
    """The settings class and the function of a kind of step."""
    if kind not in _STEPS:
        if kind not in HOMES:
            raise unknown_name("step", kind, {*HOMES, *_STEPS}, see="docs/compress.md")
        importlib.import_module(HOMES[kind], __package__)
    return _STEPS[kind]


def run_step(model: nn.Module, settings: Spec, context: Context) -> Done:
    """The step that `settings` belong to, on a copy of the model; nothing is measured."""
    for own, run in _STEPS.values():
        if own is type(settings):
            return run(copy.deepcopy(model), settings, context)
    raise TransformError(f"no step takes {type(settings).__name__}", why="it is not registered with @step", do="import its module first")


def transform(model: nn.Module, settings: Spec, context: Context, *, require_gain: bool = True) -> tuple[nn.Module, Change]:
    """Run one step on a copy of the model and measure both; a result that is neither smaller nor faster is an error."""
    from .compare import change_between

    done = run_step(model, settings, context)
    change = change_between(model, done, settings.model_dump(mode="json"), context)
    return done.model, change.require_gain() if require_gain else change
