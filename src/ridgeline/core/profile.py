"""One row an op, estimated, measured or both: what every command prints and every report draws.

    estimate(workload, target) ──┐
    measure(model, inputs) ──────┴──> Profile(rows, total, roofs, advice) ──> .table() .to_json() .to_html() .to_trace()

Renderers live downstream in `report/` and are looked up by import string when asked for, so that `core/` imports
nothing of ours. Times in seconds, sizes in bytes, rates in FLOP/s and B/s, energy in joules.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

RENDERERS = {
    "table": "ridgeline.report.table:render_profile",
    "html": "ridgeline.report.html:render_profile",
    "trace": "ridgeline.report.trace:render_profile",
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Repeated measurements of one thing."""

    median_s: float
    p20_s: float
    p80_s: float
    repeats: int

    def to_dict(self) -> dict[str, Any]:
        return {"median_s": self.median_s, "p20_s": self.p20_s, "p80_s": self.p80_s, "repeats": self.repeats}


@dataclass(frozen=True, slots=True)
class OpRow:
    """What one op costs, where it stands against its roof, and why."""

    name: str
    layer: str
    kind: str
    operator: str
    dtype: str
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    flops: int
    matmul_flops: int
    bytes: int
    bytes_by: Mapping[str, int]  # weights, activations, kv_cache
    intensity: float  # FLOP a compulsory byte
    start_s: float = 0.0  # on the timeline of the whole pass
    time_s: float = 0.0  # expected: limit over efficiency, plus communication and overhead
    limit_s: float = 0.0  # what no implementation on this target can beat
    efficiency: float = 1.0
    compute_s: float = 0.0
    memory_s: Mapping[str, float] = field(default_factory=dict)  # level → seconds, nearest level first
    level_intensity: Mapping[str, float] = field(default_factory=dict)  # level → FLOP a byte moved there
    communication_s: float = 0.0
    overhead_s: float = 0.0
    roof_flops: float = 0.0  # attainable FLOP/s at this op's intensities
    bottleneck: str = ""
    cause: str = ""
    energy_j: float | None = None
    loops: tuple[Mapping[str, Any], ...] = ()
    parts: tuple[str, ...] = ()  # names of the ops fused into this row
    measured: Timing | None = None

    def to_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "name", "layer", "kind", "operator", "dtype", "flops", "matmul_flops", "bytes", "intensity", "start_s", "time_s",
                "limit_s", "efficiency", "compute_s", "communication_s", "overhead_s", "roof_flops", "bottleneck", "cause", "energy_j",
            )
        }  # fmt: skip
        row["input_shapes"] = [list(s) for s in self.input_shapes]
        row["output_shapes"] = [list(s) for s in self.output_shapes]
        row["bytes_by"] = dict(self.bytes_by)
        row["memory_s"] = dict(self.memory_s)
        row["level_intensity"] = dict(self.level_intensity)
        row["loops"] = [dict(loop) for loop in self.loops]
        row["parts"] = list(self.parts)
        row["measured"] = self.measured.to_dict() if self.measured else None
        return row


@dataclass(frozen=True, slots=True)
class Total:
    """The whole pass."""

    flops: int
    matmul_flops: int
    bytes: int
    bytes_by: Mapping[str, int]
    time_s: float
    limit_s: float
    bottleneck: str
    peak_activation_bytes: int
    weight_bytes: int
    parameters: int
    by_bottleneck: Mapping[str, float]  # seconds spent in ops limited by each
    energy_j: float | None = None
    measured: Timing | None = None
    measured_peak_bytes: int | None = None
    kv_cache_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """What must be resident at once: weights and KV cache whole, and the most activations alive together."""
        return self.weight_bytes + self.kv_cache_bytes + self.peak_activation_bytes

    def to_dict(self) -> dict[str, Any]:
        total: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "flops", "matmul_flops", "bytes", "time_s", "limit_s", "bottleneck", "peak_activation_bytes", "weight_bytes",
                "kv_cache_bytes", "parameters", "energy_j", "measured_peak_bytes",
            )
        }  # fmt: skip
        total["bytes_by"] = dict(self.bytes_by)
        total["by_bottleneck"] = dict(self.by_bottleneck)
        total["measured"] = self.measured.to_dict() if self.measured else None
        return total


@dataclass(frozen=True, slots=True)
class Share:
    """Amdahl: how much of the time one kind of op takes, and what the pass would gain if it were free."""

    kind: str
    time_s: float
    fraction: float
    speedup_if_free: float  # infinite when nothing else takes time

    def to_dict(self) -> dict[str, Any]:
        bounded = self.speedup_if_free if isfinite(self.speedup_if_free) else None
        return {"kind": self.kind, "time_s": self.time_s, "fraction": self.fraction, "speedup_if_free": bounded}


def shares_of(rows: Iterable[OpRow]) -> tuple[Share, ...]:
    """Amdahl by kind of op: share of the time, and the speed-up if that kind cost nothing."""
    times: dict[str, float] = {}
    for row in rows:
        times[row.kind] = times.get(row.kind, 0.0) + row.time_s
    total = sum(times.values())
    ranked = sorted(times.items(), key=lambda item: -item[1])
    return tuple(
        Share(kind, seconds, seconds / total, total / (total - seconds) if total > seconds else float("inf"))
        for kind, seconds in ranked
        if seconds > 0
    )


@dataclass(frozen=True, slots=True)
class Roofs:
    """The ceilings to draw: FLOP/s by `unit dtype`, B/s by memory level, nearest level first."""

    compute: Mapping[str, float]
    memory: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Advice:
    """One change, the gain the estimate predicts for it, and the limit that binds next."""

    change: str
    predicted_speedup: float
    next_limit: str
    detail: str = ""
    before_s: float = 0.0
    after_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class Profile:
    """Rows of ops with totals; `workload` and `spec` are kept so that advice can run the estimate again."""

    model: str
    target: str
    batch: int
    dtype: str
    mode: str  # eager or fused
    rows: tuple[OpRow, ...]
    total: Total
    roofs: Roofs
    shares: tuple[Share, ...] = ()
    uncounted: tuple[Mapping[str, Any], ...] = ()
    advice: tuple[Advice, ...] = ()
    notes: tuple[str, ...] = ()
    phase: str | None = None
    context: int | None = None
    workload: Any = field(default=None, compare=False, repr=False)
    spec: Any = field(default=None, compare=False, repr=False)
    settings: Any = field(default=None, compare=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready object; the documented schema of `analyze --json` and `profile --json`."""
        return {
            "schema": 1,
            "model": self.model,
            "target": self.target,
            "batch": self.batch,
            "dtype": self.dtype,
            "mode": self.mode,
            "phase": self.phase,
            "context": self.context,
            "total": self.total.to_dict(),
            "ops": [row.to_dict() for row in self.rows],
            "shares": [s.to_dict() for s in self.shares],
            "roofs": {"compute": dict(self.roofs.compute), "memory": dict(self.roofs.memory)},
            "uncounted": [dict(u) for u in self.uncounted],
            "advice": [a.to_dict() for a in self.advice],
            "notes": list(self.notes),
        }

    def table(self, **options: Any) -> str:
        """The terminal table as text."""
        return str(_renderer("table")(self, **options))

    def to_html(self) -> str:
        """One self-contained HTML page."""
        return str(_renderer("html")(self))

    def to_trace(self) -> dict[str, Any]:
        """Chrome/Perfetto trace events."""
        trace: dict[str, Any] = _renderer("trace")(self)
        return trace


def _renderer(kind: str) -> Any:
    module, _, function = RENDERERS[kind].partition(":")
    return getattr(importlib.import_module(module), function)
