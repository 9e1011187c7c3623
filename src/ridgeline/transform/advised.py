"""Advice applied by name: what the estimate promised and what was measured stand side by side.

    Advice("weight-only int8", predicted 1.9x) ──ADVISED──> a step and its settings ──transform──> (model, Change)
      Change.predicted_speedup 1.9, Change.speedup what the clock says

Advice about another machine, a larger batch or the process (graph capture, memory) changes no model and is not applied here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..core.change import Change
from ..core.errors import UnknownNameError
from ..core.profile import Advice
from .recipe import parse_step
from .step import Context, transform

ADVISED: dict[str, Mapping[str, Any]] = {
    "precision bfloat16": {"kind": "cast", "dtype": "bfloat16"},
    "precision float16": {"kind": "cast", "dtype": "float16"},
    "precision int8": {"kind": "quantize", "method": "static"},
    "weight-only int8": {"kind": "quantize", "method": "weight-only", "bits": 8},
    "weight-only int4": {"kind": "quantize", "method": "weight-only", "bits": 4},
    "2:4 sparsity": {"kind": "prune", "method": "n:m", "pattern": "2:4"},
    "channels-last": {"kind": "layout", "layout": "channels-last"},
    "fusion": {"kind": "compile"},
    "fold_norm": {"kind": "optimize", "passes": ["fold_norm"], "memory": "none"},
    "epilogue": {"kind": "optimize", "passes": ["fold_norm", "epilogue"], "memory": "none"},
    "attention": {"kind": "optimize", "passes": ["attention"], "memory": "none"},
}
"""Name of the advice → the step that does it."""


def find_advised(name: str) -> Mapping[str, Any]:
    """The step behind a piece of advice, or an error that lists those that have one."""
    if name not in ADVISED:
        raise UnknownNameError(
            f"advice {name!r} cannot be applied to a model",
            why="it is about the machine, the batch or the process, or no such advice exists",
            do=f"apply one of: {', '.join(ADVISED)}",
        )
    return ADVISED[name]


def apply_advice(
    model: nn.Module, advice: Advice | str, context: Context, *, require_gain: bool = True, **settings: Any
) -> tuple[nn.Module, Change]:
    """Do what the advice says; `settings` are further ones of its step, e.g. skip patterns."""
    name = advice if isinstance(advice, str) else advice.change
    one = parse_step({**find_advised(name), **settings}, f"advice {name!r}")
    made, change = transform(model, one.settings, context, require_gain=False)
    predicted = None if isinstance(advice, str) else advice.predicted_speedup
    change = dataclasses.replace(change, predicted_speedup=predicted)
    return made, change.require_gain() if require_gain else change
