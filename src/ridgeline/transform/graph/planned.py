"""The memory of an optimised graph: under a budget, planned into an arena, or run inside it.

    Captured ──(rematerialise, a budget)──> Captured ──lifetimes, plan──> memory map            memory = "plan"
                                                     ──StaticModule──> module in one arena      memory = "static"

Both give the same JSON: arena, lower bound, intervals with offsets; the workspace is known where the arena really runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from ...core.errors import TransformError
from .capture import Captured


def planned(
    captured: Captured, memory: str, budget_bytes: int | None, report: Callable[[str], None], notes: list[str]
) -> tuple[nn.Module, dict[str, Any] | None]:
    """The module to return, and the plan as JSON (None where nothing can be planned: a note says why)."""
    again = None
    if budget_bytes is not None:
        report(f"fitting intermediate tensors into {budget_bytes:,} bytes")
        again = _recomputed(captured, budget_bytes)
    if memory == "static":
        from .memory.static import StaticModule

        report("planning memory and measuring what ops allocate beside it")
        static = StaticModule(captured)
        notes.append("the arena is for the example's shapes; other shapes are an error")
        return static, {**static.to_json(), "used": True, "recomputed": again}
    if memory == "none":
        return captured.module, None
    from .memory.lifetimes import lifetimes
    from .memory.plan import plan

    report("planning memory")
    try:
        found = plan(lifetimes(captured))
    except TransformError as error:
        notes.append(f"no memory plan: {error.what}")
        return captured.module, None
    return captured.module, {**found.to_json(), "workspace_bytes": None, "used": False, "recomputed": again}


def _recomputed(captured: Captured, budget_bytes: int) -> dict[str, Any]:
    from .memory.remat import rematerialise

    found = rematerialise(captured, budget_bytes)
    return {**dataclasses.asdict(found), "said": str(found)}
