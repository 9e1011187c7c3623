"""The page of a study on a chip: every chip's accuracy as a dot, the layers' error and converters as bars, a sweep as a scatter.

    {"run": …, "diagnosis": …, "sweep": …} (JSON, each optional) ──draw_chips, draw_layers, draw_sweep──> page

Self-contained as every page of ours: drawn here, nothing fetched, readable without its script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ..core.change import finite
from . import format as fmt
from .array_charts import Bar, draw_bars
from .crossbar_table import (
    LAYER_HEADINGS,
    decibel,
    heading,
    layer_rows,
    notes,
    points,
    run_rows,
    setting,
    share,
    sweep_headings,
    sweep_rows,
)
from .html import _page
from .roofline import WIDTH
from .svg import Frame, LinearScale, LogScale, Scale, drawing, element, group, log_domain

CHIPS_HEIGHT, SWEEP_HEIGHT, LEFT, TOP = 300.0, 460.0, 74.0, 30.0
DECADE = 10.0
COLOURS = {"SNR": "k0", "codes that occur": "k0", "range not reached": "k7", "beyond the range": "k1"}


def render_crossbar_html(data: Mapping[str, Any]) -> str:
    """The whole page."""
    run, diagnosis, sweep = data.get("run"), data.get("diagnosis"), data.get("sweep")
    return _page(
        "crossbar.html",
        title=heading(data),
        data=finite(data),
        study=run or sweep or diagnosis,
        settings=heading(data).split(" · ")[1:],
        verdict=_verdict(data),
        run_lines=run_rows(run) if run else [],
        chips=draw_chips(run) if run else None,
        snr=draw_snr(diagnosis) if diagnosis else None,
        codes=draw_codes(diagnosis) if diagnosis else None,
        layer_headings=LAYER_HEADINGS,
        layer_lines=layer_rows(diagnosis) if diagnosis else [],
        scatter=draw_sweep(sweep) if sweep else None,
        sweep_headings=sweep_headings(sweep) if sweep else [],
        sweep_lines=sweep_rows(sweep) if sweep else [],
        notes=notes(data),
    )


def _verdict(data: Mapping[str, Any]) -> str:
    if run := data.get("run"):
        mean = f"{100 * run['mean']:.2f} ± {100 * run['std']:.2f} %"
        return f"{share(run['digital'])} digital, {mean} on the chips, {share(run['worst'])} on the worst of them"
    if sweep := data.get("sweep"):
        best = max(sweep["rows"], key=lambda row: float(row["accuracy"]))
        return f"{share(sweep['digital'])} digital, {share(best['accuracy'])} at best of {fmt.many(len(sweep['rows']), 'variant')}"
    diagnosis = data["diagnosis"]
    return f"{share(diagnosis['digital'])} digital, {share(diagnosis['analog'])} on the chip"


def draw_chips(run: Mapping[str, Any]) -> Markup:
    """One dot a chip, with lines where the digital network and the chip built perfectly stand, and a band of one deviation."""
    values = [*run["accuracies"], run["digital"], run["ideal"], run["mean"] - run["std"], run["mean"] + run["std"]]
    margin = (max(values) - min(values)) * 0.12 or 0.005
    right, bottom = WIDTH - 190.0, CHIPS_HEIGHT - 50.0
    count = len(run["accuracies"])
    x, y = LinearScale(-0.5, max(count - 0.5, 0.5), LEFT, right), _accuracy_scale(values, margin, bottom)
    frame = Frame(LEFT, TOP, right, bottom, _Whole(x, count), y)
    low, high = y(run["mean"] - run["std"]), y(run["mean"] + run["std"])
    band = element("rect", class_="band", x=LEFT, y=high, width=right - LEFT, height=max(low - high, 0.5))
    lines, at = [], -100.0
    named = [("digital", run["digital"]), ("built perfectly", run["ideal"]), ("mean", run["mean"])]
    for name, value in sorted(named, key=lambda item: -item[1]):
        at = max(y(value) + 3.5, at + 14)  # names of lines that nearly touch stand under each other
        lines.append(element("line", class_="diagonal", x1=LEFT, x2=right, y1=y(value), y2=y(value)))
        lines.append(element("text", f"{name} {share(value)}", class_="label", x=right + 10, y=at))
    dots = [
        element("circle", element("title", f"chip {place}: {share(value)}"), class_="target k0", cx=x(place), cy=y(value), r=5.5)
        for place, value in enumerate(run["accuracies"])
    ]
    described = f"Accuracy of {fmt.many(count, 'chip')} beside the digital network's"
    axes = frame.axes("chip", "accuracy", lambda value: f"{value:.0f}", lambda value: f"{100 * value:.4g} %")
    return drawing(WIDTH, CHIPS_HEIGHT, described, axes, band, group(lines), group(dots), class_="chart")


def _accuracy_scale(values: Sequence[float], margin: float, bottom: float) -> LinearScale:
    """The values with a margin, within what an accuracy can be."""
    return LinearScale(max(min(values) - margin, 0.0), min(max(values) + margin, 1.0), bottom, TOP)


class _Whole:
    """A scale whose ticks are chips."""

    def __init__(self, scale: Scale, count: int) -> None:
        self.scale, self.count = scale, count

    def __call__(self, value: float) -> float:
        return self.scale(value)

    def ticks(self) -> list[float]:
        return [float(place) for place in range(0, self.count, max(1, self.count // 16))]


def draw_snr(diagnosis: Mapping[str, Any]) -> Markup:
    """One bar a layer, decibels; a layer without any error has none."""
    bars = [
        Bar(place, layer["name"], {"SNR": max(layer["snr_db"] or 0.0, 0.0)}, decibel(layer["snr_db"]))
        for place, layer in enumerate(diagnosis["layers"])
    ]
    return draw_bars(bars, COLOURS, lambda value: f"{value:.1f} dB", f"Signal to noise of {len(bars)} layers against the digital ones")


def draw_codes(diagnosis: Mapping[str, Any]) -> Markup:
    """One bar a layer: codes that occur, then the share of conversions beyond the range."""
    bars = [
        Bar(
            place, layer["name"], {"codes that occur": layer["codes_used"], "beyond the range": layer["clipped"]},
            f"{fmt.percent(layer['codes_used'])}, {fmt.percent(layer['clipped'])} clipped",
        )
        for place, layer in enumerate(diagnosis["layers"])
    ]  # fmt: skip
    return draw_bars(bars, COLOURS, fmt.percent, f"ADC codes of {len(bars)} layers")


def draw_sweep(sweep: Mapping[str, Any]) -> Markup:
    """Accuracy over energy (over simulated images/s where no prices are stated); the Pareto front joined."""
    rows: Sequence[Mapping[str, Any]] = sweep["rows"]
    priced = all(row["energy_j"] is not None for row in rows)
    key, title = ("energy_j", "energy of an image on the chip") if priced else ("images_per_s", "images/s simulated")
    text = fmt.energy if priced else fmt.significant
    right, bottom = WIDTH - 40.0, SWEEP_HEIGHT - 56.0
    accuracies = [*(row["accuracy"] for row in rows), sweep["digital"]]
    margin = (max(accuracies) - min(accuracies)) * 0.1 or 0.01
    x, y = _scale([row[key] for row in rows], LEFT, right), _accuracy_scale(accuracies, margin, bottom)
    frame = Frame(LEFT, TOP, right, bottom, x, y)
    front = sorted((row for row in rows if row["pareto"]), key=lambda row: float(row[key]))
    line = element("polyline", class_="curve", points=" ".join(f"{x(row[key]):.1f},{y(row['accuracy']):.1f}" for row in front))
    digital = element("line", class_="diagonal", x1=LEFT, x2=right, y1=y(sweep["digital"]), y2=y(sweep["digital"]))
    dots = [
        element(
            "circle", element("title", _told(row, sweep["digital"], text(row[key]))),
           
            class_=f"target {'k1' if row['pareto'] else 'k0'}", cx=x(row[key]), cy=y(row["accuracy"]), r=7.0 if row["pareto"] else 5.0,
        )
        for row in sorted(rows, key=lambda row: bool(row["pareto"]))  # the front on top
    ]  # fmt: skip
    axes = frame.axes(title, "accuracy", text, lambda value: f"{100 * value:.4g} %")
    described = f"Accuracy against {title} of {fmt.many(len(rows), 'variant')}"
    return drawing(WIDTH, SWEEP_HEIGHT, described, axes, digital, line, group(dots), class_="chart")


def _told(row: Mapping[str, Any], digital: float, price: str) -> str:
    """A variant in a line."""
    named = ", ".join(f"{name} {setting(value)}" for name, value in row["settings"].items()) or "as it is"
    return f"{named}: {share(row['accuracy'])} ({points(row['accuracy'], digital)}), {price}"


def _scale(values: Sequence[float], start: float, end: float) -> Scale:
    """Logarithmic over a decade and more, else linear: a short logarithmic axis has too few round numbers."""
    low, high = min(values), max(values)
    if low > 0 and high / low >= DECADE:
        return LogScale(*log_domain(values, margin=1.3, decades=1.0), start, end)
    margin = (high - low) * 0.12 or abs(high) * 0.1 or 1.0
    return LinearScale(low - margin, high + margin, start, end)
