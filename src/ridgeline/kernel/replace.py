"""Which torch functions ours stand in for, and whether they would win.

    @replaces("softmax", torch.softmax, F.softmax) ──REPLACEMENTS──> use_kernels() calls it instead; NotImplemented lets torch's own run
    worth("softmax", x, size, kind) ──tables/<device>-wins.json──> whether ours beat torch there, measured

A line of the table is `op|kind|dtype`: the size from which ours won in every row measured, against eager (host and GPU time
together) and against torch.compile (GPU time). No line, no replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .jit import INTERPRETED
from .tuning import TABLES, device_slug, read

REPLACEMENTS: dict[Any, tuple[str, Callable[..., Any]]] = {}


@dataclass(frozen=True, slots=True)
class Win:
    """Where ours are faster: from so many elements on; None: nowhere."""

    eager: int | None
    compiled: int | None


_wins: dict[tuple[str, str, torch.dtype], Win] = {}
_loaded = False
_everywhere = False
_nowhere = False


def replaces(op: str, *functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a stand-in with the same arguments as torch's functions."""

    def register(stand_in: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            REPLACEMENTS[function] = (op, stand_in)
        return stand_in

    return register


def worth(op: str, x: torch.Tensor, size: int, kind: str = "") -> bool:
    """Whether ours is known to be faster than torch's for this operand; torch.compile asks while it traces."""
    if _everywhere:
        return x.is_cuda or INTERPRETED
    win = None if _nowhere else _wins.get((op, kind, x.dtype))
    if win is None or not x.is_cuda:
        return False
    if torch.compiler.is_compiling():
        return win.compiled is not None and size >= win.compiled
    return win.eager is not None and size >= win.eager


def load_wins() -> None:
    """Read the table shipped for this device, once; a device nobody measured has none, and torch runs."""
    global _loaded
    if not _loaded:
        _wins.update(parse_wins(read(TABLES / f"{device_slug()}-wins.json")))
        _loaded = True


def parse_wins(lines: dict[str, Any]) -> dict[tuple[str, str, torch.dtype], Win]:
    """`op|kind|dtype` -> where ours win."""
    found = {}
    for name, line in lines.items():
        op, kind, dtype = name.split("|")
        found[op, kind, getattr(torch, dtype)] = Win(line.get("eager"), line.get("compile"))
    return found


@contextmanager
def everywhere() -> Iterator[None]:
    """Replace wherever we can, whether it pays or not: for tests and benchmarks."""
    global _everywhere
    before, _everywhere = _everywhere, True
    try:
        yield
    finally:
        _everywhere = before


@contextmanager
def nowhere() -> Iterator[None]:
    """Replace nothing by the table, in fused layers neither."""
    global _nowhere
    before, _nowhere = _nowhere, True
    try:
        yield
    finally:
        _nowhere = before
