"""Which torch functions ours stand in for, and whether they would win.

    @replaces("softmax", torch.softmax, F.softmax) ──REPLACEMENTS──> use_kernels() calls it instead; NotImplemented lets torch's own run
    worth("softmax", x, size, kind) ──tables/<device>-wins.json──> whether ours beat torch there, measured

A line of the table is `op|kind|dtype`: the size from which ours won in every row measured, against eager (host and GPU time
together) and against torch.compile (GPU time), and the microseconds saved. No line, no replacement.
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
    saved_us: float
    """Host and GPU time saved against eager at the smallest size that wins: larger ones save more."""
    saved_host_us: float
    """The least host time saved, of any size that wins."""


@dataclass(slots=True)
class Saved:
    """What replacements since the start saved at least, by the table."""

    us: float = 0.0
    host_us: float = 0.0


_wins: dict[tuple[str, str, torch.dtype], Win] = {}
_loaded = False
_everywhere = False
saved = Saved()


def replaces(op: str, *functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a stand-in with the same arguments as torch's functions."""

    def register(stand_in: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            REPLACEMENTS[function] = (op, stand_in)
        return stand_in

    return register


def worth(op: str, x: torch.Tensor, size: int, kind: str = "", share: float = 1.0) -> bool:
    """Whether ours is known to be faster than torch's for this operand; torch.compile asks while it traces.

    `share`: the part this call does of what the table's rows were measured with.
    """
    if _everywhere:
        return x.is_cuda or INTERPRETED
    win = _wins.get((op, kind, x.dtype))
    if win is None or not x.is_cuda:
        return False
    if torch.compiler.is_compiling():
        return win.compiled is not None and size >= win.compiled
    if win.eager is None or size < win.eager:
        return False
    saved.us += share * win.saved_us
    saved.host_us += share * win.saved_host_us
    return True


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
        times = float(line.get("saved_us", 0.0)), float(line.get("saved_host_us", 0.0))
        found[op, kind, getattr(torch, dtype)] = Win(line.get("eager"), line.get("compile"), *times)
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
