"""The page of a Change: what it gained and cost, bytes and latency of each step as bars, the tables, what was found layer by layer.

    Change ──rows, bars, details that are tables──> page

Self-contained as every page of ours: drawn here, nothing fetched, readable without its script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import Markup

from ..core.change import Change, State
from . import format as fmt
from .array_charts import Bar, draw_bars
from .change_table import HEADINGS, notes, rows, step_headings, step_rows, summary
from .html import _page

MOST_LINES = 400
COLOURS = {"before": "k1", "after": "k0"}


def render_change(change: Change) -> str:
    """The whole page."""
    data = change.to_json()
    return _page(
        "change.html",
        title=f"{change.name} of {change.model}",
        data=data,
        change=change,
        verdict=summary(change),
        settings=_settings(change),
        bytes_bars=_bars(change, lambda state: float(state.bytes_on_disk), fmt.size, "Bytes on disk"),
        latency_bars=_bars(change, lambda state: state.latency.median_s if state.latency else None, fmt.seconds, "Latency"),
        colours=COLOURS,
        headings=HEADINGS,
        lines=rows(change),
        step_headings=step_headings(change) if change.steps else [],
        step_lines=step_rows(change) if change.steps else [],
        details=_details(change),
        most=MOST_LINES,
        notes=notes(change),
    )


def _states(change: Change) -> list[tuple[str, State]]:
    """The model before, and what each step left."""
    steps = change.steps or (change,)
    return [(change.model, change.before), *((step.name, step.after) for step in steps)]


def _bars(change: Change, value: Callable[[State], float | None], text: Callable[[float | None], str], what: str) -> Markup | None:
    found = [(name, value(state)) for name, state in _states(change)]
    bars = [
        Bar(place, name, {"after" if place else "before": amount}, text(amount))
        for place, (name, amount) in enumerate(found)
        if amount is not None
    ]
    return draw_bars(bars, COLOURS, text, f"{what}: {len(bars)} states of the model") if len(bars) > 1 else None


def _settings(change: Change) -> list[str]:
    """The steps in a line each; every setting of theirs is in the page's data."""
    return [f"{place}. {step.name}" for place, step in enumerate(change.steps, 1)] + [f"measured on {change.target}"]


def _details(change: Change) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, headings, lines) of every list of rows a step found; other details stay in the page's data."""
    found = []
    for step in change.steps or (change,):
        for name, value in step.details.items():
            if isinstance(value, list | tuple) and value and all(isinstance(row, Mapping) for row in value):
                headings = list(dict.fromkeys(str(key) for row in value for key in row))
                lines = [[_cell(row.get(key)) for key in headings] for row in value]
                found.append((f"{step.name}: {name}", headings, lines))
    return found


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float) or value is None:
        return fmt.significant(value, 4)
    return fmt.crop(fmt.plain(value), 80)
