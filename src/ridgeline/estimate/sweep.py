"""The same estimate along one parameter: where does the bottleneck change?

    "batch=1..256" ──parse_sweep──> ("batch", [1, 2, 4, …, 256]) ──estimate each──> [{value, time_s, throughput_per_s, bottleneck, …}]

`batch` and `context` capture the model again at every value; `bandwidth` scales the outermost memory's bandwidth by the value.
A point that the memory does not hold has `fits` false.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Any

from ..core.errors import OptionError
from ..target.spec import ProcessorSpec
from ..workload.capture import capture
from ..workload.graph import Workload
from .fits import misfit
from .processor import Settings, estimate

PARAMETERS = ("batch", "context", "bandwidth")
MOST_POINTS = 64


def parse_sweep(text: str) -> tuple[str, list[float]]:
    """`batch=1..256` doubles from 1 to 256; `batch=1,3,9` takes the values as they are."""
    name, _, values = text.partition("=")
    if name not in PARAMETERS:
        raise OptionError(f"sweep {text!r}", why=f"{name!r} cannot be swept", do=f"use one of {', '.join(PARAMETERS)}, e.g. batch=1..256")
    try:
        points = _doubling(values) if ".." in values else [float(v) for v in values.split(",")]
    except ValueError as error:
        raise OptionError(f"sweep {text!r}", why="the values are not numbers", do=f"write {name}=1..256 or {name}=1,2,4") from error
    whole = name == "bandwidth" or all(p.is_integer() for p in points)
    if not points or not all(0 < p < inf for p in points) or len(points) > MOST_POINTS or not whole:
        raise OptionError(
            f"sweep {text!r}",
            why=f"needs 1 to {MOST_POINTS} positive values" + ("" if whole else ", whole ones"),
            do=f"write {name}=1..256",
        )
    return name, points


def _doubling(values: str) -> list[float]:
    low, high = (float(v) for v in values.split(".."))
    if low <= 0 or high < low or high > low * 2.0**MOST_POINTS:
        return []
    points = [low]
    while points[-1] * 2 <= high:
        points.append(points[-1] * 2)
    return points if points[-1] == high else [*points, high]


def sweep(
    model: str,
    spec: ProcessorSpec,
    parameter: str,
    values: list[float],
    settings: Settings,
    options: dict[str, Any],
    progress: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """One point a value; `options` are capture's (batch, dtype, phase, context)."""
    points = []
    for value, workload, target in _cases(model, spec, parameter, values, options):
        if progress:
            progress(f"{parameter} {value:g}")
        total = estimate(workload, target, settings=settings).total
        points.append(
            {
                "value": value,
                "time_s": total.time_s,
                "limit_s": total.limit_s,
                "throughput_per_s": workload.batch / total.time_s if total.time_s else 0.0,
                "bottleneck": total.bottleneck,
                "by_bottleneck": dict(total.by_bottleneck),
                "roof_fraction": total.limit_s / total.time_s if total.time_s else 0.0,
                "peak_activation_bytes": total.peak_activation_bytes,
                "held_bytes": total.held_bytes,
                "fits": misfit(workload, target, settings.devices) is None,
            }
        )
    return points


def _cases(
    model: str, spec: ProcessorSpec, parameter: str, values: list[float], options: dict[str, Any]
) -> Iterator[tuple[float, Workload, ProcessorSpec]]:
    if parameter == "bandwidth":
        workload = capture(model, **options)
        for value in values:
            yield value, workload, scale_bandwidth(spec, value)
        return
    for value in values:
        yield value, capture(model, **{**options, parameter: int(value)}), spec


def scale_bandwidth(spec: ProcessorSpec, factor: float) -> ProcessorSpec:
    """The target with its outermost memory `factor` times as fast."""
    memory = spec.memories[spec.outermost]
    rate = memory.bandwidth_bps.model_copy(
        update={"value": memory.bandwidth_bps.value * factor, "source": f"{factor:g} x the target's own", "status": "assumed"}
    )
    memories = {**spec.memories, spec.outermost: memory.model_copy(update={"bandwidth_bps": rate})}
    return spec.model_copy(update={"memories": memories})
