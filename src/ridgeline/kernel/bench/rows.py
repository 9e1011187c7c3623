"""Which rows a run measures, what a row holds, and what its numbers mean.

    planned(cases, sizes, dtype, backward) ──> [Wanted(case, shape, dtype, backward, size, anchor)]
    numbers ──judged──> BenchRow: share of the ceiling, status, primary issue, times as fast as the others, anchor held

vs_eager, vs_compile, vs_best are the other's GPU time over ours: above 1, ours is faster. Status by share of the ceiling: at the
roof from 90 %, good from 75 %, fair from 50 %, slow below; `reference` on the CPU, where there is no kernel. An anchor holds
when ours takes at most 1.03x the best other's time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from ...core.errors import OptionError, unknown_name
from ..case import Anchor, Case
from .launches import KernelUse
from .timing import Timed

SIZE_CLASSES = ("small", "medium", "large", "xlarge", "batch", "anchors")
ROOF, GOOD, FAIR = 0.90, 0.75, 0.50
HELD = 1.03
LOW_OCCUPANCY = 0.25


@dataclass(frozen=True, slots=True)
class Wanted:
    """One row to measure."""

    case: Case
    shape: tuple[int, ...]
    dtype: torch.dtype
    backward: bool
    size: str
    anchor: Anchor | None = None

    @property
    def key(self) -> tuple[str, tuple[int, ...], str, bool]:
        return self.case.op, self.shape, dtype_name(self.dtype), self.backward

    def __str__(self) -> str:
        op, shape, dtype, backward = self.key
        return f"{op} {'x'.join(map(str, shape))} {dtype}{' forward + backward' if backward else ''}"


@dataclass(slots=True)
class BenchRow:
    """One measured row."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    backward: bool
    size: str
    device: str
    ours: Timed
    eager: Timed | None = None
    compile: Timed | None = None
    peers: dict[str, Timed] = field(default_factory=dict)
    kind: str = ""
    elements: int = 0
    """Where the row stands in the dispatch table: (kind, elements) by Case.kind."""
    bytes: int = 0
    flops: int = 0
    gbps: float | None = None
    tflops: float | None = None
    ceiling: str | None = None
    """copy, read or compute: what sets `ceiling_ms`."""
    ceiling_ms: float | None = None
    fraction: float | None = None
    """Of the ceiling: ceiling_ms / our GPU time."""
    vs_eager: float | None = None
    vs_compile: float | None = None
    vs_best: float | None = None
    best: str | None = None
    error_ours: float | None = None
    error_eager: float | None = None
    """Relative norm against float64, the worst of the results (backward: of the gradients)."""
    kernels: list[KernelUse] = field(default_factory=list)
    status: str | None = None
    issue: str | None = None
    limit_ms: float | None = None
    within_limit: bool | None = None
    holds: bool | None = None
    regression: float | None = None
    """Times the median of earlier runs, where that is a regression."""
    tuned: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Timed):
                value = value.to_json()
            elif one.name == "peers":
                value = {name: timed.to_json() for name, timed in value.items()}
            elif one.name == "kernels":
                value = [kernel.to_json() for kernel in value]
            elif one.name == "shape":
                value = list(value)
            data[one.name] = value
        return data


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str | None) -> torch.dtype | None:
    """The dtype of that name; None stays None."""
    if name is None:
        return None
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        known = {dtype_name(one) for one in vars(torch).values() if isinstance(one, torch.dtype)}
        raise unknown_name("dtype", name, known, "`ridgeline bench --help`")
    return found


def planned(cases: Iterable[Case], sizes: Sequence[str], dtype: torch.dtype | None = None, backward: bool = False) -> list[Wanted]:
    """Rows by op, anchors first (forward or backward as they are), each (shape, dtype, direction) once."""
    for size in sizes:
        if size not in SIZE_CLASSES:
            raise unknown_name("size", size, (*SIZE_CLASSES, "all"), "`ridgeline bench --help`")
    found: dict[Any, Wanted] = {}
    for case in cases:
        rows = [Wanted(case, a.shape, a.dtype, a.backward, "anchors", a) for a in case.anchors] if "anchors" in sizes else []
        for size in (size for size in SIZE_CLASSES if size in sizes):
            for shape in case.sizes.get(size, ()):
                for each in case.dtypes:
                    rows.append(Wanted(case, tuple(shape), each, False, size))
                    rows += [Wanted(case, tuple(shape), each, True, size)] if backward and case.differentiable else []
        for row in rows:
            if dtype is None or row.dtype == dtype:
                found.setdefault(row.key, row)
    return list(found.values())


def forward_only(rows: Iterable[Wanted]) -> list[str]:
    """Ops among the rows that have no backward to measure."""
    return list(dict.fromkeys(row.case.op for row in rows if not row.case.differentiable))


def nothing_planned(op: str, sizes: Sequence[str], dtype: torch.dtype | None) -> OptionError:
    """The error for options that leave no row."""
    kind = f" of {dtype_name(dtype)}" if dtype else ""
    return OptionError(
        f"no row{kind} of {op} in {', '.join(sizes)}",
        why="the op has no shapes of that size class, or not that dtype",
        do="see `ridgeline bench` for what each op has, or give --size all",
    )


def judge(row: BenchRow, forward: BenchRow | None = None) -> BenchRow:
    """Fill in what follows from the times; `forward` is the forward row of a backward one."""
    ours = row.ours.gpu_ms
    others = {"eager": row.eager, "compile": row.compile, **row.peers}
    times = {name: timed.gpu_ms for name, timed in others.items() if timed is not None and timed.gpu_ms}
    if ours is None:
        row.status, row.issue = "failed", "error"
        row.within_limit = False if row.limit_ms is not None else None
        row.holds = False if row.size == "anchors" else None
        return row
    row.gbps, row.tflops = row.bytes / ours / 1e6, (row.flops / ours / 1e9 if row.flops else None)
    row.vs_eager, row.vs_compile = (times[name] / ours if name in times else None for name in ("eager", "compile"))
    if times:
        row.best = min(times, key=lambda name: times[name] or 0.0)
        row.vs_best = (times[row.best] or 0.0) / ours
    row.within_limit = ours <= row.limit_ms if row.limit_ms is not None else None
    if row.size == "anchors" and row.vs_best is not None:
        row.holds = row.vs_best * HELD >= 1
    if row.ceiling_ms is not None:
        row.fraction = row.ceiling_ms / ours
        on_gpu = row.device.startswith("cuda")
        row.status = status_of(row.fraction) if on_gpu else "reference"
        row.issue = _issue(row, ours, row.fraction, forward) if on_gpu else None
    return row


def status_of(fraction: float) -> str:
    if fraction >= ROOF:
        return "at the roof"
    return "good" if fraction >= GOOD else "fair" if fraction >= FAIR else "slow"


def _issue(row: BenchRow, ours_ms: float, fraction: float, forward: BenchRow | None) -> str | None:
    """What to look at first; None at the roof."""
    if row.ours.host_us is not None and row.ours.host_us > ours_ms * 1e3:
        return "launch"
    if fraction >= ROOF:
        return None
    if row.backward and forward is not None and (forward.fraction or 0) >= GOOD and (row.vs_best or 1) < (forward.vs_best or 1):
        return "autograd"
    filled = [kernel.occupancy for kernel in row.kernels if kernel.occupancy is not None]
    if filled and min(filled) < LOW_OCCUPANCY and fraction < GOOD:
        return "occupancy"
    return "compute" if row.ceiling == "compute" else "bandwidth"
