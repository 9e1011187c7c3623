"""The page of a benchmark run: a roofline of the rows that count FLOPs, a bar a row for its share of the ceiling, the table.

    {"machine", "ceilings", "rows"} ──> draw_bench_roofline, draw_bars ──> page

Self-contained as every page of ours: drawn here, nothing fetched, readable without its script.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from . import format as fmt
from .array_charts import Bar, classes, draw_bars
from .bench_table import HEADINGS, NOT_KERNELS, cells, heading, notes, summary
from .html import _json_value, _page
from .roofline import BOTTOM, HEIGHT, LEFT, LINE_HEIGHT, RIGHT, TOP, WIDTH, slanted
from .svg import Frame, LogScale, drawing, element, group, log_domain, spread

MOST_BARS = 120
STATUS_CLASSES = {"at the roof": "k2", "good": "k0", "fair": "k3", "slow": "k1"}


def render_bench_html(data: Mapping[str, Any]) -> str:
    """The whole page."""
    rows: Sequence[Mapping[str, Any]] = data["rows"]
    placed = [(index, row) for index, row in enumerate(rows) if row["flops"] and row["bytes"] and row["tflops"]]
    bars = [(index, row) for index, row in enumerate(rows) if row["fraction"]]
    lines = [cells(row) for row in rows]
    telling = [place for place in range(len(HEADINGS)) if {line[place] for line in lines} - {fmt.MISSING}]
    return _page(
        "bench.html",
        title=f"kernels on {data['machine']['name']}",
        data=_clean(data),
        machine=data["machine"],
        heading=heading(data),
        verdict=summary(data),
        warning=None if data["machine"].get("kernels", True) else NOT_KERNELS,
        roofline=draw_bench_roofline(placed, data["ceilings"]) if placed else None,
        colours=classes(row["op"] for _, row in placed),
        left_out=len(rows) - len(placed),
        bars=_bars(bars[:MOST_BARS]) if bars else None,
        bars_left_out=max(0, len(bars) - MOST_BARS),
        statuses=STATUS_CLASSES,
        headings=[HEADINGS[place] for place in telling],
        lines=[[line[place] for place in telling] for line in lines],
        kernels=[(_name(row), kernel) for row in rows for kernel in row["kernels"]],
        notes=notes(data),
    )


def draw_bench_roofline(placed: Sequence[tuple[int, Mapping[str, Any]]], ceilings: Mapping[str, Any]) -> Markup:
    """Every row with FLOPs under the measured ceilings, log-log."""
    points = [(row["flops"] / row["bytes"], row["tflops"] * 1e12) for _, row in placed]
    peak = max(ceilings["flops"].values())
    ridge = peak / ceilings["copy_bps"]
    x = LogScale(*log_domain([*(point[0] for point in points), ridge], decades=3.0), LEFT, RIGHT)
    y = LogScale(*log_domain([*(point[1] for point in points), *ceilings["flops"].values()], decades=3.0), BOTTOM, TOP)
    frame = Frame(LEFT, TOP, RIGHT, BOTTOM, x, y)
    colours = classes(row["op"] for _, row in placed)
    circles = [
        element(
            "circle",
            element("title", f"{_name(row)}: {fmt.flop_rate(rate)}, {fmt.percent(row['fraction'])} of the ceiling"),
            class_=f"op mapped {colours[row['op']]}",
            data_i=index,
            cx=round(x(intensity), 1),
            cy=round(y(rate), 1),
            r=5.0,
        )
        for (index, row), (intensity, rate) in zip(placed, points, strict=True)
    ]
    return drawing(
        WIDTH,
        HEIGHT,
        f"Roofline of {len(placed)} kernel rows against the measured ceilings",
        frame.axes("intensity: FLOP per byte of device memory", "FLOP/s", fmt.significant, fmt.count),
        group(_memory_roof(frame, ceilings, peak), class_="roofs"),
        group(_compute_roofs(frame, ceilings), class_="roofs"),
        group(circles, class_="ops"),
        class_="chart roofline",
        id="roofline-chart",
    )


def _memory_roof(frame: Frame, ceilings: Mapping[str, Any], peak: float) -> Iterator[Markup]:
    if (ends := slanted(ceilings["copy_bps"], frame, peak)) is not None:
        x1, y1, x2, y2 = ends
        yield element("line", class_="roof memory outermost", x1=x1, y1=y1, x2=x2, y2=y2)
        angle = math.degrees(math.atan2(y2 - y1, x2 - x1))
        at = (x1 + 0.1 * (x2 - x1), y1 + 0.1 * (y2 - y1) - 7)
        turn = f"rotate({angle:.2f} {at[0]:.2f} {at[1]:.2f})"
        text = f"copy {fmt.byte_rate(ceilings['copy_bps'])}"
        yield element("text", text, class_="label memory outermost", x=at[0], y=at[1], transform=turn)


def _compute_roofs(frame: Frame, ceilings: Mapping[str, Any]) -> Iterator[Markup]:
    ordered = sorted(ceilings["flops"].items(), key=lambda item: -item[1])
    heights = spread([frame.y(rate) for _, rate in ordered], LINE_HEIGHT, frame.bottom)
    for (name, rate), text_y in zip(ordered, heights, strict=True):
        y = frame.y(rate)
        yield element("line", class_="roof compute used", x1=frame.x(rate / ceilings["copy_bps"]), y1=y, x2=frame.right, y2=y)
        text = f"{fmt.flop_rate(rate)} {fmt.plain(name)} matmul"
        yield element("text", text, class_="label compute used", x=frame.right + 16, y=text_y + 3.5)


def _bars(rows: Sequence[tuple[int, Mapping[str, Any]]]) -> Markup:
    bars = [
        Bar(index, _name(row), {row["status"]: min(row["fraction"], 1.5)}, f"{fmt.percent(row['fraction'])} of {row['ceiling']}")
        for index, row in rows
    ]
    return draw_bars(bars, STATUS_CLASSES, fmt.percent, f"Share of the ceiling of {len(bars)} kernel rows")


def _name(row: Mapping[str, Any]) -> str:
    return " ".join(cells(row)[:4])


def _clean(value: Any) -> Any:
    """JSON with floats at six digits."""
    if isinstance(value, Mapping):
        return {str(name): _clean(item) for name, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list | tuple) else _json_value(value)
