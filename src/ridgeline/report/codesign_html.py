"""The co-design page: the front in three pictures, one a pair of objectives, the recommended chip, a table of all.

    Codesign.to_json() ──> scatter time x energy, time x area, energy x area (recommended chip marked) ──> page

Self-contained as every page of ours: drawn here, nothing fetched, readable without its script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from . import format as fmt
from .codesign_table import HEADINGS, chip_cells, coverage, worth_cells
from .html import _page
from .svg import Frame, Labels, LinearScale, LogScale, Scale, drawing, element, group, log_domain

SIZE, LEFT, TOP, RIGHT, BOTTOM = 520.0, 74.0, 30.0, 506.0, 466.0
DECADE = 10.0
TOUCHING = 10.0  # px
Axis = tuple[str, str, Callable[[float], str]]


def axes_of(goal: str) -> tuple[Axis, Axis, Axis]:
    """(field, title, how its values read) of the three objectives."""
    time = ("latency_s", "latency of a pass") if goal == "latency" else ("sample_s", "time a sample")
    return (*time, fmt.seconds), ("energy_j", "energy a sample", fmt.energy), ("area_mm2", "area", _area)


def _area(value: float) -> str:
    return f"{fmt.significant(value)} mm²"


def render_codesign_html(data: Mapping[str, Any]) -> str:
    """The whole page."""
    time, energy, area = axes_of(data["goal"])
    pairs = ((time, energy), (time, area), (energy, area))
    cells = [chip_cells(row) + worth_cells(row, data["goal"]) for row in data["front"]]
    used = [place for place in range(len(HEADINGS) - 1) if {row[place] for row in cells} != {fmt.MISSING}]
    return _page(
        "codesign.html",
        title=f"co-design for {', '.join(data['models'])}",
        data=data,
        run=data,
        best=data["front"][data["best"]],
        charts=[draw_front(data, x, y) for x, y in pairs],
        headings=[HEADINGS[place + 1] for place in used],
        cells=[[row[place] for place in used] for row in cells],
        facts=_facts(data["front"][data["best"]]),
        coverage=coverage(data),
        shown=[(title, text(data["front"][data["best"]][name])) for name, title, text in (time, energy, area)],
    )


def _facts(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the recommended chip is made of."""
    chip = row["chip"]
    kinds = (("register_bits", " a PE"), ("local_bits", " a PE"), ("buffer_bits", ""))
    sizes = [(f"{name}{each}", fmt.size(bits / 8)) for kind, each in kinds for name, bits in chip[kind].items()]
    widths = ", ".join(f"{name} {bits}" for name, bits in chip["bits"].items())
    return [
        ("PEs", " x ".join(f"{size} {axis}" for axis, size in reversed(chip["axes"].items()))),
        *sizes,
        ("outermost memory", f"{chip['bandwidth_bits']} bits a cycle"),
        ("network", f"{chip['noc_bits']} bits a cycle" if chip["noc_bits"] else "no limit"),
        ("operand bits", widths),
        ("cores", f"{chip['cores']['count']}" + (f", {chip['cores']['use']}" if chip["cores"]["count"] > 1 else "")),
        ("schedule", f"batch {row['batch']}, dataflow {row['dataflow']}"),
    ]


def draw_front(data: Mapping[str, Any], x_axis: Axis, y_axis: Axis) -> Markup:
    """Every chip of the front on two objectives; those no other beats in these two alone are joined by a line."""
    rows: Sequence[Mapping[str, Any]] = data["front"]
    (x_name, x_title, x_text), (y_name, y_title, y_text) = x_axis, y_axis
    x, y = _scale([row[x_name] for row in rows], LEFT, RIGHT), _scale([row[y_name] for row in rows], BOTTOM, TOP)
    frame = Frame(LEFT, TOP, RIGHT, BOTTOM, x, y)
    at = [(x(row[x_name]), y(row[y_name])) for row in rows]
    points = []
    for place, row in enumerate(rows):
        best = place == data["best"]
        title = f"chip {place + 1}{', recommended' if best else ''}: {x_text(row[x_name])}, {y_text(row[y_name])}"
        look = {"class_": f"target {'k1' if best else 'k0'}", "cx": at[place][0], "cy": at[place][1], "r": 8.0 if best else 5.0}
        points.append(element("circle", element("title", title), **look))
    described = f"{y_title} against {x_title} of {len(rows)} chips"
    line = element("polyline", class_="curve", points=" ".join(f"{px:.1f},{py:.1f}" for px, py in _steps(rows, x_name, y_name, x, y)))
    axes = frame.axes(x_title, y_title, x_text, y_text)
    return drawing(
        SIZE,
        SIZE,
        described,
        axes,
        line,
        group(points),
        group(_numbers(at), class_="roof-labels", aria_hidden="true"),
        class_="chart scatter",
    )


def _numbers(at: Sequence[tuple[float, float]]) -> list[Markup]:
    """The chips' numbers beside their points, once for those that lie on each other."""
    together: dict[tuple[int, int], list[int]] = {}
    for place, (x, y) in enumerate(at):
        together.setdefault((round(x / TOUCHING), round(y / TOUCHING)), []).append(place)
    labels = Labels(at)
    texts = []
    for places in together.values():
        x, y = at[places[0]]
        text = ", ".join(str(place + 1) for place in places)
        beside = [(x + dx, y + dy) for dx, dy in ((15, -9), (15, 19), (-24, -9), (-24, 19), (15, 9))]
        texts.append(labels.place(text, beside, class_="label"))
    return texts


def _scale(values: Sequence[float], start: float, end: float) -> Scale:
    """Logarithmic over a decade and more, else linear: a short logarithmic axis has too few round numbers."""
    low, high = min(values), max(values)
    if low > 0 and high / low >= DECADE:
        return LogScale(*log_domain(values, margin=1.3, decades=1.0), start, end)
    margin = (high - low) * 0.12 or abs(high) * 0.1 or 1.0
    return LinearScale(low - margin, high + margin, start, end)


def _steps(rows: Sequence[Mapping[str, Any]], x_name: str, y_name: str, x: Scale, y: Scale) -> list[tuple[float, float]]:
    """The staircase under which no chip lies, in pixels."""
    corners: list[tuple[float, float]] = []
    lowest = float("inf")
    for row in sorted(rows, key=lambda row: (row[x_name], row[y_name])):
        if row[y_name] < lowest:
            if corners:
                corners.append((x(row[x_name]), corners[-1][1]))
            lowest = row[y_name]
            corners.append((x(row[x_name]), y(lowest)))
    return corners
