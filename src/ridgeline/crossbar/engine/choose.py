"""Which engine computes a product, and why that one.

    wanted, plan, device ──choose──> (engine, why)
      "auto"            on a GPU fused, on a CPU native; blocked where that one is unable
      a name            that engine; blocked, with the reason in `why`, where it is unable
      "exactly:NAME"    that engine or an error

An engine's module is imported when it is first asked for: one needs Triton, another a C compiler. What is missing is a reason, never
silence.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import cast

from ...core.errors import OptionError, unknown_name
from ..plan import Engine, Plan

HOMES = {
    "reference": (".reference", "ReferenceEngine"),
    "blocked": (".blocked", "BlockedEngine"),
    "native": (".native", "NativeEngine"),
    "fused": (".fused", "FusedEngine"),
}
FALLBACK = "blocked"
FASTEST = {"cuda": "fused", "cpu": "native"}
EXACTLY = "exactly:"


def check_wanted(wanted: str) -> str:
    """The name itself, if it is one."""
    if wanted.removeprefix(EXACTLY) not in (*HOMES, "auto") or wanted == f"{EXACTLY}auto":
        raise unknown_name("engine", wanted, (*HOMES, "auto"), 'the docs, crossbar; "exactly:NAME" allows no other')
    return wanted


@cache
def load(name: str) -> tuple[Engine | None, str]:
    """(engine, "") or (None, why it cannot be loaded here)."""
    home, kind = HOMES[name]
    try:
        engine = getattr(importlib.import_module(home, __package__), kind)()
    except (ImportError, AttributeError, OSError) as error:
        return None, f"{name} cannot be loaded: {error}"
    return cast(Engine, engine), ""


def choose(plan: Plan, device: str, wanted: str = "auto") -> tuple[Engine, str]:
    """The engine for a product on a device ("cpu", "cuda", "cuda:1"), and why it."""
    check_wanted(wanted)
    first = FASTEST.get(device.partition(":")[0], FALLBACK) if wanted == "auto" else wanted.removeprefix(EXACTLY)
    engine, refusal = able(first, plan, device)
    if engine is not None:
        return engine, f"fastest on {device}" if wanted == "auto" else "asked for"
    if wanted.startswith(EXACTLY):
        raise OptionError(f"engine {wanted}", why=str(refusal), do=f'give "{first}", which falls back to {FALLBACK}, or change the chip')
    other, refusal_of_other = able(FALLBACK, plan, device)
    if other is None:
        raise OptionError(f"no engine for {plan.k} x {plan.n} weights on {device}", why=f"{refusal}; {refusal_of_other}", do="see the chip")
    return other, str(refusal)


def able(name: str, plan: Plan, device: str) -> tuple[Engine | None, str | None]:
    """(engine, None), or (None, why not)."""
    engine, missing = load(name)
    if engine is None:
        return None, missing
    refusal = engine.unable(plan, device)
    return (None, f"{name}: {refusal}") if refusal else (engine, None)
