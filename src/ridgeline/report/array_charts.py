"""Drawings of a mapped network: what each layer spends, where its cycles go, each memory's roof with the layers under it.

    [Bar(layer, {part: value})] ──draw_bars──> one stacked bar a layer, the whole of it named at its end
    [MappedOp], SpatialArraySpec ──draw_levels──> log-log: operations a byte through a memory's busiest port, operations a second

Elements of a layer carry its place in the network (data-i), which ties them to its line in the table. Colours by class: `classes` gives
each part or memory its own, the last for all the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ..estimate.spatial.breakdown import PortRoof, level_roofs, peak_ops, port_roofs
from ..estimate.spatial.network import MappedOp
from ..target.array import SpatialArraySpec
from . import format as fmt
from .roofline import BOTTOM, HEIGHT, LEFT, LINE_HEIGHT, RIGHT, TOP, WIDTH, slanted
from .svg import Frame, LogScale, drawing, element, fitted, group, log_domain, spread

COLOURS = 8  # k0 to k7 in the style sheet
ROW, BAR_HEIGHT, NAME_WIDTH, NAME_CHARACTERS, END_WIDTH = 20.0, 13.0, 212.0, 32, 150.0
NAME_GAP = 24.0  # from the plot to the name of a memory, its dot between them


@dataclass(frozen=True, slots=True)
class Bar:
    """One layer: its place in the network, its name, its parts in drawing order, and what to write at its end."""

    index: int
    name: str
    parts: Mapping[str, float]
    end: str

    @property
    def whole(self) -> float:
        return sum(self.parts.values())


def classes(names: Iterable[str]) -> dict[str, str]:
    """A colour class for every name, the last shared by all that are too many."""
    return {name: f"k{min(place, COLOURS - 1)}" for place, name in enumerate(dict.fromkeys(names))}


def draw_bars(bars: Sequence[Bar], colours: Mapping[str, str], text: Callable[[float], str], described: str) -> Markup:
    """Horizontal bars under each other, all to one scale."""
    longest = max((bar.whole for bar in bars), default=0.0) or 1.0
    scale = (WIDTH - NAME_WIDTH - END_WIDTH) / longest
    drawn = []
    for place, bar in enumerate(bars):
        top, at = 4 + place * ROW, NAME_WIDTH
        name = fmt.crop(fmt.plain(bar.name), NAME_CHARACTERS, keep="end")
        drawn.append(element("text", name, class_="label used", x=NAME_WIDTH - 10, y=top + 11, text_anchor="end"))
        for part, value in bar.parts.items():
            if value > 0:
                title = element("title", f"{fmt.plain(bar.name)}, {fmt.plain(part)}: {text(value)}")
                drawn.append(
                    element("rect", title, class_=f"mapped {colours.get(part, 'k7')}", data_i=bar.index, x=at, y=top,
                            width=max(value * scale, 0.3), height=BAR_HEIGHT)
                )  # fmt: skip
                at += value * scale
        drawn.append(element("text", bar.end, class_="label", x=at + 8, y=top + 11))
    return drawing(WIDTH, 8 + len(bars) * ROW, described, *drawn, class_="chart layer-bars")


def draw_levels(layers: Sequence[MappedOp], array: SpatialArraySpec, model: str) -> Markup | None:
    """One circle a layer and memory, under that memory's roof; None where nothing moved."""
    levels = level_roofs(layers, array)
    if not levels:
        return None
    points = [(index, layer, roof) for index, layer in enumerate(layers) for roof in _same_ports([layer], levels, array)]
    peak = peak_ops(array)
    frame = _frame([roof for *_, roof in points], levels, peak)
    colours = classes(array.memories)
    roofs = [part for level in levels for part in _roof(level, frame, peak, colours[level.memory])]
    cycles = sum(layer.cycles for layer in layers) or 1
    circles = [
        _circle(index, layer, roof, frame, colours[roof.memory], layer.cycles / cycles)
        for index, layer, roof in sorted(points, key=lambda point: -point[1].cycles)
    ]
    flat = element("line", class_="roof compute used", x1=frame.left, x2=frame.right, y1=frame.y(peak), y2=frame.y(peak))
    top = element("text", f"peak {fmt.scaled(peak, 'op/s')}", class_="label used", x=frame.left + 6, y=frame.y(peak) - 6)
    described = (
        f"Roofline of {fmt.plain(model)} on {fmt.plain(array.name)}: {len(layers)} layers against the ports of {len(levels)} memories"
    )
    return drawing(
        WIDTH,
        HEIGHT,
        described,
        frame.axes("operations per byte through the port", "op/s", fmt.significant, fmt.count),
        group([*roofs, flat], class_="roofs"),
        group(circles, class_="ops"),
        group([top, *_names(levels, frame, peak, colours)], class_="roof-labels"),
        class_="chart roofline",
        id="roofline-chart",
        tabindex="0",
    )


def _same_ports(layers: Sequence[MappedOp], levels: Sequence[PortRoof], array: SpatialArraySpec) -> list[PortRoof]:
    wanted = {(level.memory, level.port) for level in levels}
    return [roof for roof in port_roofs(layers, array) if (roof.memory, roof.port) in wanted]


def _frame(points: Sequence[PortRoof], levels: Sequence[PortRoof], peak: float) -> Frame:
    ridges = [peak / level.bandwidth_bps for level in levels]
    x_low, x_high = log_domain([*(roof.intensity for roof in points), *ridges], decades=2.0)
    y_low, y_high = log_domain([*(roof.achieved for roof in points), peak], decades=2.0)
    return Frame(LEFT, TOP, RIGHT, BOTTOM, LogScale(x_low, x_high, LEFT, RIGHT), LogScale(y_low, y_high, BOTTOM, TOP))


def _roof(level: PortRoof, frame: Frame, peak: float, colour: str) -> list[Markup]:
    ends = slanted(level.bandwidth_bps, frame, peak)
    if ends is None:
        return []
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (ends[:2], ends[2:]))
    return [element("polyline", class_=f"target-roof {colour}", points=path)]


def _names(levels: Sequence[PortRoof], frame: Frame, peak: float, colours: Mapping[str, str]) -> list[Markup]:
    """Memories to the right of the plot, by the height at which their roofs leave it."""
    heights = {level: frame.y(min(peak, level.bandwidth_bps * _right_end(frame))) for level in levels}
    ordered = sorted(levels, key=lambda level: (heights[level], -level.bandwidth_bps))
    places = spread([heights[level] for level in ordered], LINE_HEIGHT, frame.bottom)
    texts = []
    for level, y in zip(ordered, places, strict=True):
        text = f"{fmt.plain(level.memory)}.{fmt.plain(level.port)} {fmt.byte_rate(level.bandwidth_bps)}"
        dot = element("circle", class_=f"target {colours[level.memory]}", cx=frame.right + 14, cy=y, r=5.0)
        shown = (element("title", text), fitted(text, WIDTH - frame.right - NAME_GAP, bold=True))
        texts += [dot, element("text", *shown, class_="label used", x=frame.right + NAME_GAP, y=y + 3.5)]
    return texts


def _right_end(frame: Frame) -> float:
    assert isinstance(frame.x, LogScale)
    return frame.x.high


def _circle(index: int, layer: MappedOp, roof: PortRoof, frame: Frame, colour: str, share: float) -> Markup:
    where = f"{fmt.plain(roof.memory)}.{fmt.plain(roof.port)}"
    title = f"{fmt.plain(layer.mapped.cost.layer.name)} at {where}: {fmt.significant(roof.intensity)} op/B, busy {fmt.percent(roof.busy)}"
    return element(
        "circle",
        element("title", title),
        class_=f"op mapped {colour}",
        data_i=index,
        cx=round(frame.x(roof.intensity), 1),
        cy=round(frame.y(roof.achieved), 1),
        r=round(min(3 + 16 * math.sqrt(share), 14.0), 1),
    )
