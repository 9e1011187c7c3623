"""One self-contained HTML file: style, script, drawings and data inside it, nothing fetched from anywhere.

    Profile ──charts (SVG made here), tables (jinja2, autoescaped), data (JSON in a script tag)──> page
    sweep points ──render_sweep_html──> page        [Profile, …] ──render_comparison_html──> page

Everything can be read without JavaScript; the script adds the tooltip, sorting, filtering, zoom and the theme button. A
content security policy forbids every request and every script but the page's own, so a hostile model name cannot run.
Size grows by about 1.3 kB an op.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..core.profile import OpRow, Profile
from . import format as fmt
from . import summary
from .basis import basis_lines, fastest_s, headline, ranked
from .charts import draw_scatter, draw_sweep, draw_targets
from .roofline import draw_roofline
from .svg import LogScale, log_domain
from .timeline import draw_timeline

KIND_COLOURS = 8  # k0 to k7 in the style sheet; the last stands for all the rest
HEAVIEST, LAYERS = 12, 10
SINGLE = ("array", "adc", "host")  # bottlenecks of arrays and crossbars whose ops are not split into parts
FILTERS = ("seconds", "size", "flop", "energy", "count", "rate", "percent", "signed_percent", "speedup", "shape", "plain", "many",
           "significant", "fixed", "crop")  # fmt: skip


def render_profile(profile: Profile) -> str:
    """The whole report of one profile."""
    kinds = kind_classes(profile)
    measured = [
        (index, row) for index, row in enumerate(profile.rows) if row.measured and summary.finite(row.time_s) and summary.spent_s(row)
    ]
    return _page(
        "profile.html",
        title=f"{profile.model} on {profile.target}",
        data=_data(profile),
        profile=profile,
        kinds=kinds,
        roofline=draw_roofline(profile, kinds),
        timeline=draw_timeline(profile, kinds),
        scatter=draw_scatter(profile, measured, kinds) if measured else None,
        measured=[row for _, row in measured],
        anatomy=_anatomy(profile),
        layers=summary.by_layer(profile)[:LAYERS],
        kind_limits=_limits(profile, lambda row: row.kind),
        layer_limits=_limits(profile, summary.label),
        table=_table(profile),
        counted=sum(row.flops > 0 for row in profile.rows),
    )


def render_sweep_html(points: Sequence[Mapping[str, Any]], parameter: str, model: str, target: str) -> str:
    """Time, throughput and bottleneck regions against one parameter; points are those of `table.render_sweep`."""
    usable = [point for point in points if isinstance(point.get("value"), int | float) and math.isfinite(point["value"])]
    ordered = sorted(usable, key=lambda point: float(point["value"]))
    data = [{name: _json_value(value) for name, value in point.items()} for point in ordered]
    chart = draw_sweep(ordered, parameter) if ordered else None
    changes = [(before, after) for before, after in pairwise(ordered) if before.get("bottleneck") != after.get("bottleneck")]
    return _page(
        "sweep.html",
        title=f"{parameter} sweep of {model} on {target}",
        data={"parameter": parameter, "points": data},
        points=ordered,
        parameter=parameter,
        model=model,
        target=target,
        chart=chart,
        changes=changes,
        best_rate=max((summary.finite(point.get("throughput_per_s")) for point in ordered), default=0.0),
        left_out=len(points) - len(ordered),
    )


def render_comparison_html(profiles: Sequence[Profile]) -> str:
    """One model on several targets, fastest first."""
    ordered = ranked(profiles)
    data = [{"target": profile.target, "total": _json_value(profile.total.to_dict()), "notes": list(profile.notes)} for profile in ordered]
    models = " and ".join(dict.fromkeys(profile.model for profile in ordered)) or "nothing"
    return _page(
        "comparison.html",
        title=f"{models} on {fmt.many(len(ordered), 'target')}",
        data={"model": models, "targets": data},
        profiles=ordered,
        model=models,
        chart=draw_targets(ordered),
        basis=basis_lines(ordered),
        headline=headline(ordered),
        race=_race(ordered),
        fastest_s=fastest_s(ordered),
    )


def _race(profiles: Sequence[Profile]) -> dict[str, Any]:
    """Limit, expected and measured time of each target as places (per cent) on one logarithmic axis, with its ticks."""
    entries = []
    for profile in profiles:
        timing = profile.total.measured
        times = [profile.total.limit_s, profile.total.time_s, timing.median_s if timing else None]
        entries.append((profile, [summary.finite(time) for time in times]))
    scale = LogScale(*log_domain([time for _, times in entries for time in times], margin=1.25, decades=1.0), 0.0, 100.0)
    places = [(profile, [scale(time) if time else None for time in times]) for profile, times in entries]
    return {"entries": places, "ticks": [(scale(value), fmt.seconds(value)) for value in scale.ticks()]}


def kind_classes(profile: Profile) -> dict[str, str]:
    """A colour class for every kind: the heaviest get their own, the rest share the last."""
    timed = [share.kind for share in summary.shares(profile) if summary.finite(share.time_s)]
    found = dict.fromkeys(timed + [row.kind for row in profile.rows if not summary.is_view(row)])
    return {kind: f"k{min(position, KIND_COLOURS - 1)}" for position, kind in enumerate(found)}


def _page(template: str, *, title: str, data: Any, **context: Any) -> str:
    folder = Path(__file__).parent / "templates"
    script, style = ((folder / name).read_text(encoding="utf-8") for name in ("report.js", "report.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # `<` never appears in the JSON, so no string in it can close the script tag or open a comment.
    embedded = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return _environment().get_template(template).render(
        title=fmt.plain(title), script=Markup(script), style=Markup(style), script_hash=digest, data=Markup(embedded), **context
    )  # fmt: skip


@cache
def _environment() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    for name in FILTERS:
        environment.filters[name] = getattr(fmt, name)
    environment.globals["summary"] = summary
    environment.globals["min"], environment.globals["max"] = min, max
    return environment


def _table(profile: Profile) -> list[tuple[int, OpRow, float, bool]]:
    """(execution order, row, share of time, is it a view), longest first and views last."""
    whole = sum(map(summary.spent_s, profile.rows)) or 1.0
    rows = [(index, row, summary.spent_s(row) / whole, summary.is_view(row)) for index, row in enumerate(profile.rows)]
    return sorted(rows, key=lambda entry: (entry[3], -entry[2]))


def _limits(profile: Profile, name: Callable[[OpRow], str]) -> dict[str, list[summary.Slice]]:
    """For each name (kind or layer), its time by bottleneck."""
    rows: dict[str, list[OpRow]] = {}
    for row in profile.rows:
        rows.setdefault(name(row), []).append(row)
    return {key: summary.slices((row.bottleneck, row) for row in members) for key, members in rows.items()}


def _anatomy(profile: Profile) -> dict[str, Any]:
    """The parts of the heaviest ops' times, in per cent of the longest thing drawn."""
    rows = [row for row in summary.shown_rows(profile) if summary.spent_s(row)][:HEAVIEST]
    levels = list(dict.fromkeys(level for row in rows for level in row.memory_s))
    names = [(name, name, 1.0) for name in SINGLE] + [("compute", "compute", 1.0)]
    # Nearest level lightest: the outermost memory is the one that mostly binds.
    names += [(level, "memory", round(0.4 + 0.6 * (at + 1) / len(levels), 2)) for at, level in enumerate(levels)]
    entries, largest = [], 0.0
    for row in rows:
        single = [row.time_s if row.bottleneck == name else 0.0 for name in SINGLE]
        compute_s, memory_s = 0.0 if any(single) else row.compute_s, [row.memory_s.get(level, 0.0) for level in levels]
        times = [*single, compute_s, *memory_s, row.communication_s, row.overhead_s]
        times = [summary.finite(time) for time in times]
        largest = max(largest, *times, summary.finite(row.time_s), summary.spent_s(row))
        entries.append((row, times))
    names += [("communication", "communication", 1.0), ("overhead", "overhead", 1.0)]
    used = [index for index in range(len(names)) if any(times[index] for _, times in entries)]
    drawn = [(row, [(*names[index], times[index]) for index in used]) for row, times in entries]
    return {"entries": drawn, "legend": [names[index] for index in used], "largest_s": largest}


def _data(profile: Profile) -> dict[str, Any]:
    """What the script sorts and filters by, and enough to take the numbers elsewhere; one list an op, in execution order."""
    names = ("name", "layer", "kind", "flops", "bytes", "intensity", "start_s", "limit_s", "time_s", "bottleneck", "cause")
    rows = []
    for row in profile.rows:
        measured = row.measured.median_s if row.measured else None
        rows.append([*(_json_value(getattr(row, name)) for name in names), _json_value(measured), _json_value(summary.spent_s(row))])
    settings = {name: getattr(profile, name) for name in ("model", "target", "batch", "dtype", "mode", "phase", "context")}
    return {**settings, "total": _json_value(profile.total.to_dict()), "columns": [*names, "measured_s", "spent_s"], "rows": rows}


def _json_value(value: Any) -> Any:
    """Floats at six digits, None for what JSON cannot say."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _json_value(item) for name, item in value.items()}
    return value if isinstance(value, str | int | bool | None) else str(value)
