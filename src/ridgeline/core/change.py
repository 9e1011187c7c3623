"""What a transform did to a model: a module goes in, a module and a Change come out.

    transform(model, ...) ──> (model, Change(before, after, settings, notes, steps)) ──> .table() .to_json() .to_html()
      State = bytes on disk, parameters, non-zeros, latency [s], peak memory [B], quality (named scores)

A Change that is neither smaller on disk nor faster is an error, not a success: `require_gain()`. A recipe is a Change whose
`steps` are the Changes of its parts. Renderers live downstream in `report/` and are looked up by import string.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from .errors import NoGainError
from .profile import Timing

RENDERERS = {"table": "ridgeline.report.change_table:render_change", "html": "ridgeline.report.change_html:render_change"}
FASTER = 1.02  # a smaller difference than this is the clock's, not the model's


@dataclass(frozen=True, slots=True)
class State:
    """One model as it stands: what it weighs, how long it takes, how well it does. None: not measured."""

    bytes_on_disk: int
    parameters: int
    nonzero: int
    latency: Timing | None = None
    peak_bytes: int | None = None  # of one pass beyond weights and inputs
    quality: Mapping[str, float] = field(default_factory=dict)  # e.g. accuracy 0.9339, perplexity 29.0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> State:
        """What to_dict gave."""
        latency = Timing(**data["latency"]) if data["latency"] else None
        return cls(data["bytes_on_disk"], data["parameters"], data["nonzero"], latency, data["peak_bytes"], dict(data["quality"]))

    @property
    def sparsity(self) -> float:
        """Share of the parameters that are zero."""
        return 1.0 - self.nonzero / self.parameters if self.parameters else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "bytes_on_disk": self.bytes_on_disk,
            "parameters": self.parameters,
            "nonzero": self.nonzero,
            "sparsity": self.sparsity,
            "latency": self.latency.to_dict() if self.latency else None,
            "peak_bytes": self.peak_bytes,
            "quality": dict(self.quality),
        }


@dataclass(frozen=True, slots=True)
class Change:
    """Before and after, side by side."""

    name: str  # the transform or the recipe, e.g. "quantize int8 static"
    model: str
    target: str  # where latency was measured, e.g. "cpu"
    before: State
    after: State
    settings: Mapping[str, Any] = field(default_factory=dict)
    target_sparsity: float | None = None
    predicted_speedup: float | None = None  # what the advice that named this change promised
    speedup_interval: tuple[float, float] | None = None  # of the measured one, 95 %
    storage_only: tuple[str, ...] = ()  # formats the target has no kernel for: they save bytes, not time
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)  # per-layer rows, curves: JSON-ready
    steps: tuple[Change, ...] = ()

    @property
    def compression_ratio(self) -> float:
        """Bytes before over bytes after."""
        return self.before.bytes_on_disk / self.after.bytes_on_disk

    @property
    def speedup(self) -> float | None:
        """Median latency before over after, where both were measured."""
        if self.before.latency is None or self.after.latency is None:
            return None
        return self.before.latency.median_s / self.after.latency.median_s

    @property
    def faster(self) -> bool:
        """Whether the clock says so: by 2 %, and not by chance where an interval is known."""
        surely = self.speedup_interval is None or self.speedup_interval[0] > 1.0
        return (self.speedup or 0.0) >= FASTER and surely

    def require_gain(self) -> Change:
        """Itself, or an error where the result is neither smaller on disk nor faster."""
        if self.after.bytes_on_disk < self.before.bytes_on_disk or self.faster:
            return self
        speed = "its latency was not measured" if self.speedup is None else f"it runs at {self.speedup:.2f}x the speed"
        raise NoGainError(
            f"{self.name} gained nothing on {self.model}",
            why=f"the file held {self.before.bytes_on_disk:,} bytes and now {self.after.bytes_on_disk:,}, and {speed}",
            do="choose fewer bits, a higher sparsity or a lower rank, or leave the step out",
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Change:
        """What to_json gave."""
        names = ("name", "model", "target", "settings", "target_sparsity", "predicted_speedup", "details")
        return cls(
            before=State.from_dict(data["before"]),
            after=State.from_dict(data["after"]),
            speedup_interval=tuple(data["speedup_interval"]) if data["speedup_interval"] else None,
            storage_only=tuple(data["storage_only"]),
            notes=tuple(data["notes"]),
            steps=tuple(map(cls.from_json, data["steps"])),
            **{name: data[name] for name in names},
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready object; the documented schema of `compress --json`. What is not finite is null."""
        whole: dict[str, Any] = finite(
            {
                "schema": 1,
                "name": self.name,
                "model": self.model,
                "target": self.target,
                "before": self.before.to_dict(),
                "after": self.after.to_dict(),
                "compression_ratio": self.compression_ratio,
                "speedup": self.speedup,
                "speedup_interval": self.speedup_interval,
                "predicted_speedup": self.predicted_speedup,
                "target_sparsity": self.target_sparsity,
                "storage_only": list(self.storage_only),
                "settings": dict(self.settings),
                "notes": list(self.notes),
                "details": dict(self.details),
                "steps": [step.to_json() for step in self.steps],
            }
        )
        return whole

    def table(self, **options: Any) -> str:
        """The terminal table as text."""
        return str(_renderer("table")(self, **options))

    def to_html(self) -> str:
        """One self-contained HTML page."""
        return str(_renderer("html")(self))


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become None, in everything inside too."""
    if isinstance(value, Mapping):
        return {str(name): finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _renderer(kind: str) -> Any:
    module, _, function = RENDERERS[kind].partition(":")
    return getattr(importlib.import_module(module), function)
