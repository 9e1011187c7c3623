"""The page of a search: every trial as a dot, the front joined, the winner's cell drawn, seeds and trials in tables.

    Front.to_json() ──draw_trials──> accuracy against the second objective, or against the order of trials ──> page

Self-contained as every page of ours: drawn here, nothing fetched, readable without its script. The cell is drawn from the genotype,
which is checked on the way; a drawing found in a folder is never taken into the page.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ..core.change import finite
from ..core.errors import RidgelineError
from . import format as fmt
from .html import _page
from .roofline import WIDTH
from .search_table import (
    front_headings,
    front_rows,
    heading,
    seed_headings,
    seed_rows,
    shown,
    summary_lines,
    tried,
    winners_lead,
)
from .svg import Frame, LinearScale, LogScale, Scale, drawing, element, group, log_domain

HEIGHT, LEFT, TOP = 460.0, 84.0, 30.0
DECADE = 10.0
MOST_ROWS = 1000
"""Trials in the page's table."""


def render_search_html(data: Mapping[str, Any]) -> str:
    """The whole page."""
    trials: Sequence[Mapping[str, Any]] = data["trials"]
    return _page(
        "search.html",
        title=heading(data),
        data=finite(data),
        request=data["request"],
        settings=heading(data).split(" · ")[1:],
        verdict=_verdict(data),
        tried=tried(data),
        chart=draw_trials(data) if any("accuracy" in trial["values"] for trial in trials) else None,
        cell=_cell(data),
        front_headings=front_headings(data),
        front_lines=front_rows(data),
        winners_lead=winners_lead(data),
        seed_headings=seed_headings(data),
        seed_lines=seed_rows(data),
        summary=summary_lines(data),
        trial_headings=["trial", "seed", "training", *data["objectives"], "seconds", "", ""],
        trial_lines=[_trial(data, trial) for trial in trials[:MOST_ROWS]],
        left_out=max(len(trials) - MOST_ROWS, 0),
        notes=list(data["notes"]),
    )


def _verdict(data: Mapping[str, Any]) -> str:
    told = [line for line in summary_lines(data) if line.startswith("test accuracy:")]
    if told:
        return f"{told[0]} on the test split, touched once"
    if data["front"]:
        best = data["trials"][data["front"][0]]["values"]
        return f"{shown(data['objectives'][0], best.get(data['objectives'][0]))} {data['objectives'][0]} at best, on held-out images"
    return "no network within the limits yet"


def _trial(data: Mapping[str, Any], trial: Mapping[str, Any]) -> list[str]:
    said = "on the front" if trial["number"] in data["front"] else trial["why"]
    same = f"same as {trial['same_as']}" if trial["same_as"] is not None else ""
    figures = [shown(name, trial["values"].get(name)) for name in data["objectives"]]
    return [str(trial["number"]), str(trial["seed"]), fmt.percent(trial["fidelity"]), *figures, fmt.seconds(trial["seconds"]), same, said]


def _cell(data: Mapping[str, Any]) -> str | None:
    """The winner's drawing as an image of its own, so that its style is not the page's; None where there is nothing to draw."""
    from ..search.study.final import draw_genotype

    genotype = data["genotypes"].get(str(data["winner"]))
    try:
        made = draw_genotype(genotype) if genotype else None
    except RidgelineError:
        return None
    return f"data:image/svg+xml;base64,{base64.b64encode(made.encode()).decode()}" if made else None


def draw_trials(data: Mapping[str, Any]) -> Markup:
    """Accuracy over the second objective (over the order of trials where there is one only); the front joined and on top."""
    other = next((name for name in data["objectives"] if name != "accuracy"), None)
    trials = [trial for trial in data["trials"] if "accuracy" in trial["values"] and (other is None or other in trial["values"])]
    places: list[float] = [float(trial["number"]) if other is None else trial["values"][other] for trial in trials]
    accuracies = [trial["values"]["accuracy"] for trial in trials]
    margin = (max(accuracies) - min(accuracies)) * 0.1 or 0.01
    right, bottom = WIDTH - 40.0, HEIGHT - 56.0
    x, y = _scale(places, LEFT, right), LinearScale(min(accuracies) - margin, max(accuracies) + margin, bottom, TOP)
    frame = Frame(LEFT, TOP, right, bottom, x, y)
    text: Callable[[float], str] = (lambda value: f"{value:.0f}") if other is None else (lambda value: shown(other, value))
    on_front = set(data["front"])
    dots = [
        element(
            "circle", element("title", f"trial {trial['number']}: {shown('accuracy', trial['values']['accuracy'])}, {text(place)}"),
            class_=f"target {_colour(data, trial, on_front)}", cx=x(place), cy=y(trial["values"]["accuracy"]),
            r=8.0 if trial["number"] == data["winner"] else 6.0 if trial["number"] in on_front else 4.0,
        )
        for place, trial in sorted(zip(places, trials, strict=True), key=lambda pair: pair[1]["number"] in on_front)
    ]  # fmt: skip
    joined = sorted(
        (place, trial["values"]["accuracy"]) for place, trial in zip(places, trials, strict=True) if trial["number"] in on_front
    )
    line = element("polyline", class_="curve", points=" ".join(f"{x(px):.1f},{y(py):.1f}" for px, py in joined)) if other else Markup()
    axes = frame.axes(other or "trial", "held-out accuracy", text, lambda value: f"{100 * value:.4g} %")
    described = f"Held-out accuracy against {other or 'the order'} of {fmt.many(len(trials), 'trial')}"
    return drawing(WIDTH, HEIGHT, described, axes, line, group(dots), class_="chart")


def _colour(data: Mapping[str, Any], trial: Mapping[str, Any], on_front: set[int]) -> str:
    if trial["number"] == data["winner"]:
        return "k1"
    return "k0" if trial["number"] in on_front else "k7"


def _scale(values: Sequence[float], start: float, end: float) -> Scale:
    """Logarithmic over a decade and more, else linear."""
    low, high = min(values), max(values)
    if low > 0 and high / low >= DECADE:
        return LogScale(*log_domain(values, margin=1.3, decades=1.0), start, end)
    margin = (high - low) * 0.12 or abs(high) * 0.1 or 1.0
    return LinearScale(low - margin, high + margin, start, end)
