"""Timing for regions of one's own code.

    @profile_op("attention")          with profile_op("load", bytes=n):        ──> per thread: a stack of open regions
    def attention(...): ...               ...                                  ──> region_report() rows, region_table() text

A region inside another gets the path `outer/inner`; a region's self time is its total less what its own inner regions took
(on the same thread). Regions nest, repeat and recurse, run in threads, and are recorded when an exception leaves them.
`sync=True` times with CUDA events when CUDA is in use, and waits for the device at the end. Counts and totals are exact;
percentiles come from at most SAMPLES calls of each path, drawn evenly (Vitter 1985, algorithm R).

RIDGELINE_PROFILE=0, read at first use and again after reset_regions(), turns regions off: decorators made meanwhile return
the function itself, a `with` costs two method calls. Coroutines and generators are refused: their body runs later.
"""

from __future__ import annotations

import functools
import inspect
import os
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal, ParamSpec, TypeVar

from ..core.errors import OptionError
from ..core.timing import summarise

SAMPLES = 4096
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class RegionRow:
    """What all calls of one path took; `flops` and `bytes` are a call's, as the user gave them."""

    name: str
    calls: int
    total_s: float
    self_s: float
    median_s: float
    p20_s: float
    p80_s: float
    path: str
    flops: float | None = None
    bytes: float | None = None

    @property
    def flops_per_s(self) -> float | None:
        return self.flops * self.calls / self.total_s if self.flops and self.total_s else None

    @property
    def bytes_per_s(self) -> float | None:
        return self.bytes * self.calls / self.total_s if self.bytes and self.total_s else None


@dataclass(slots=True)
class _Record:
    order: int
    calls: int = 0
    total_s: float = 0.0
    self_s: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    samples_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Open:
    path: tuple[str, ...]
    events: tuple[Any, Any] | None
    start_s: float = 0.0
    inner_s: float = 0.0


class _Collector:
    """All records, and the open regions of each thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.local = threading.local()
        self.records: dict[tuple[str, ...], _Record] = {}
        self.random = random.Random(0)
        self.enabled: bool | None = None

    def on(self) -> bool:
        if self.enabled is None:
            self.enabled = os.environ.get("RIDGELINE_PROFILE", "1") != "0"
        return self.enabled

    def stack(self) -> list[_Open | None]:
        if not hasattr(self.local, "stack"):
            self.local.stack = []
        found: list[_Open | None] = self.local.stack
        return found

    def add(self, region: _Open, spent_s: float, flops: float, moved: float) -> None:
        with self.lock:
            record = self.records.setdefault(region.path, _Record(len(self.records)))
            record.calls += 1
            record.total_s += spent_s
            record.self_s += max(spent_s - region.inner_s, 0.0)
            record.flops += flops
            record.bytes += moved
            if len(record.samples_s) < SAMPLES:
                record.samples_s.append(spent_s)
            elif (place := self.random.randrange(record.calls)) < SAMPLES:
                record.samples_s[place] = spent_s


_collector = _Collector()


class profile_op:
    """Time a region: `@profile_op("name")` or `with profile_op("name"):`."""

    __slots__ = ("bytes", "flops", "name", "sync")

    def __init__(self, name: str, *, sync: bool = False, flops: float | None = None, bytes: float | None = None) -> None:
        if not isinstance(name, str) or not name:
            raise OptionError(f"profile_op({name!r})", why="a region needs a name to be reported under", do='write @profile_op("name")')
        self.name, self.sync, self.flops, self.bytes = name.replace("/", "∕"), sync, flops, bytes

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise OptionError(
                f"profile_op({self.name!r}) on {function.__qualname__}",
                why="its body runs after the call returns, so the time would be wrong",
                do="use `with profile_op(...)` around the work inside it",
            )
        if not _collector.on():
            return function

        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return timed

    def __enter__(self) -> profile_op:
        if not _collector.on():
            _collector.stack().append(None)
            return self
        stack = _collector.stack()
        outer = stack[-1] if stack else None
        region = _Open(((*outer.path, self.name) if outer else (self.name,)), _cuda_events() if self.sync else None)
        stack.append(region)
        if region.events:
            region.events[0].record()
        region.start_s = perf_counter()
        return self

    def __exit__(self, *error: object) -> Literal[False]:
        stop_s = perf_counter()
        stack = _collector.stack()
        region = stack.pop()
        if region is None:
            return False
        spent_s = stop_s - region.start_s
        if region.events:
            first, last = region.events
            last.record()
            last.synchronize()
            spent_s = first.elapsed_time(last) / 1e3
        if stack and (outer := stack[-1]) is not None:
            outer.inner_s += spent_s
        _collector.add(region, spent_s, self.flops or 0.0, self.bytes or 0.0)
        return False


def _cuda_events() -> tuple[Any, Any] | None:
    """A pair of events when this process has used CUDA; torch is not imported for it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def region_report() -> list[RegionRow]:
    """A row a path, in the order the regions first ended, each after the one that holds it."""
    with _collector.lock:
        held = dict(_collector.records)
        rows = {path: _row(path, record) for path, record in held.items()}
    first = {path: record.order for path, record in held.items()}
    return [rows[path] for path in sorted(rows, key=lambda path: [first.get(path[: n + 1], -1) for n in range(len(path))])]


def _row(path: tuple[str, ...], record: _Record) -> RegionRow:
    timing = summarise(record.samples_s)
    return RegionRow(
        path[-1], record.calls, record.total_s, record.self_s, timing.median_s, timing.p20_s, timing.p80_s, "/".join(path),
        record.flops / record.calls or None, record.bytes / record.calls or None,
    )  # fmt: skip


def reset_regions() -> None:
    """Forget everything recorded and read RIDGELINE_PROFILE again; regions open now are recorded when they end."""
    with _collector.lock:
        _collector.records.clear()
        _collector.enabled = None


def region_table() -> str:
    """The report as text: inner regions indented under the one that holds them."""
    rows = region_report()
    if not rows:
        return "no regions recorded\n" if _collector.on() else "no regions recorded: RIDGELINE_PROFILE=0\n"
    rates = any(row.flops or row.bytes for row in rows)
    titles = ["region", "calls", "total ms", "self ms", "median ms", "p20 ms", "p80 ms", *(["GFLOP/s", "GB/s"] if rates else [])]
    lines = [titles, *(_cells(row, rates) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    return "".join(_line(line, widths) for line in lines)


def _cells(row: RegionRow, rates: bool) -> list[str]:
    times = [f"{seconds * 1e3:.3f}" for seconds in (row.total_s, row.self_s, row.median_s, row.p20_s, row.p80_s)]
    reached = [f"{rate / 1e9:.3g}" if rate else "-" for rate in (row.flops_per_s, row.bytes_per_s)] if rates else []
    return ["  " * row.path.count("/") + row.name, str(row.calls), *times, *reached]


def _line(cells: list[str], widths: list[int]) -> str:
    numbers = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
    return "  ".join([cells[0].ljust(widths[0]), *numbers]).rstrip() + "\n"
