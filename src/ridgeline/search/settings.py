"""Settings that come as words and numbers (--strategy-set, JSON), checked against what a function takes.

checked_settings(Evolution, {"proxy": "synflow"}, owner="strategy evolution") ──> {"proxy": ("synflow",)}
  a keyword-only int, float, bool, str, tuple[str, ...], Literal of words, or | None of these      is a setting
  one of any other type (a guard, a table's points)                                                is none: only objects of ours pass

A name that is no setting, another type, and a number beyond its bounds (NaN is beyond any) are errors.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from ..core.errors import OptionError, unknown_name

WORDS = "tuple[str, ...]"
MOST_WORDS = 16
NAMES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a word",
    WORDS: f"a list of at most {MOST_WORDS} words",
    "None": "null",
}
JSON_TYPES = (str, int, float, bool, list, tuple, dict, type(None))
BOUNDS: dict[str, tuple[float, float]] = {
    "population": (2, 1000), "tournament": (2, 1000), "first": (1, 1000), "eta": (2, 10), "rungs": (1, 8),
    "rate": (1e-9, 100), "entropy": (0, 100), "memory": (0, 1),
    "epochs": (1, 100_000), "batch": (1, 65536), "cycles": (1, 1000), "seconds": (1e-3, 1_000_000_000), "warmup": (0, 1), "order": (1, 2),
    "learning_rate": (1e-9, 100), "architecture_rate": (1e-9, 100), "cost_weight": (0, 1_000_000_000), "k": (1, 255), "threshold": (0, 1),
    "parts": (2, 64), "cells": (1, 1000), "channels": (1, 4096), "depth": (1, 1000), "max_channels": (1, 4096), "max_depth": (1, 1000),
    "max_branches": (1, 64),
}  # fmt: skip
"""Least and most of a number by its name: beyond the most a search would not end, or not fit."""
USUAL = (0, 1_000_000)
"""Of any other number."""


def checked_settings(
    make: Callable[..., Any] | Sequence[Callable[..., Any]],
    given: Mapping[str, Any],
    *,
    owner: str,
    hidden: Collection[str] = (),
    bounds: Mapping[str, tuple[float, float]] = BOUNDS,
) -> dict[str, Any]:
    """`given` as `make` (or several functions together) takes it; `hidden`: keyword arguments that are the caller's own."""
    functions = make if isinstance(make, Sequence) else (make,)
    kinds = {
        name: _kinds(one.annotation, function)
        for function in functions
        for name, one in inspect.signature(function).parameters.items()
        if one.kind is inspect.Parameter.KEYWORD_ONLY and name not in hidden
    }
    known = [name for name, found in kinds.items() if found]
    checked: dict[str, Any] = {}
    for name, value in given.items():
        if name not in kinds or (isinstance(value, JSON_TYPES) and name not in known):
            raise unknown_name(f"setting of {owner}", name, known, see="docs/search.md")
        checked[name] = _checked(name, value, kinds[name], bounds.get(name, USUAL), owner) if name in known else value
    return checked


def _kinds(annotation: Any, function: Callable[..., Any]) -> tuple[Any, ...]:
    """What may be given: names of NAMES, and words; () where it is nothing that can be written down."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    found: list[Any] = []
    for part in text.split(" | "):
        alias = getattr(function, "__globals__", {}).get(part)
        if get_origin(alias) is Literal:
            found += [(word,) for word in get_args(alias)]
        elif part in NAMES:
            found.append(part)
        else:
            return ()
    return tuple(found)


def _checked(name: str, value: Any, kinds: tuple[Any, ...], bounds: tuple[float, float], owner: str) -> Any:
    """The value as the function takes it."""
    if WORDS in kinds and isinstance(value, str):
        value = [value]
    for kind in kinds:
        if _fits(value, kind, bounds):
            return {"float": float, WORDS: tuple}.get(kind, _same)(value)
    span = f" of {bounds[0]:,} to {bounds[1]:,}"
    wanted = [f"{NAMES[kind]}{span if kind in ('int', 'float') else ''}" if isinstance(kind, str) else kind[0] for kind in kinds]
    raise OptionError(
        f"{name} = {reprlib.repr(value)} of {owner}",
        why=f"{' or '.join(wanted)} is wanted",
        do="change or leave out the setting; docs/search.md says what each does",
    )


def _fits(value: Any, kind: Any, bounds: tuple[float, float]) -> bool:
    if isinstance(kind, tuple):
        return isinstance(value, str) and value in kind
    if kind in ("int", "float"):
        number = isinstance(value, int) and not isinstance(value, bool)
        return (number or (kind == "float" and isinstance(value, float))) and bounds[0] <= value <= bounds[1]
    if kind == WORDS:
        return isinstance(value, list | tuple) and len(value) <= MOST_WORDS and all(isinstance(word, str) for word in value)
    return isinstance(value, {"bool": bool, "str": str, "None": type(None)}[kind])


def _same(value: Any) -> Any:
    return value
