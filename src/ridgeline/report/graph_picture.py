"""Drawings of a rewritten graph: the region a pass changed, before and after, and where each tensor lies over time.

    {"nodes": [{name, op, marked}], "edges": [[from, to]]} ──draw_region──> boxes in layers, what the pass took or made filled
    plan's intervals [{node, bytes, offset, first, last}] ──draw_memory──> one rectangle a tensor: offset [B] over steps

Weights are left out of a region, and one of more than MOST_NODES boxes shows the first ones and says how many are missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from . import format as fmt
from .svg import Frame, LinearScale, drawing, element, group

BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, MARGIN = 132.0, 26.0, 14.0, 22.0, 8.0
MOST_NODES, MOST_INTERVALS = 24, 3000
WIDTH, HEIGHT = 1200.0, 420.0
COLOURS = 8
HIDDEN = ("get_attr",)


def draw_region(region: Mapping[str, Any], described: str, *, new: bool) -> Markup:
    """One side of a picture; `new`: the filled boxes are what the pass made, otherwise what it took away."""
    shown = [node for node in region["nodes"] if node["op"] not in HIDDEN]
    left_out, shown = max(0, len(shown) - MOST_NODES), shown[:MOST_NODES]
    names = {node["name"] for node in shown}
    edges = [(source, target) for source, target in region["edges"] if source in names and target in names]
    layers = _layers([node["name"] for node in shown], edges)
    places = _places(shown, layers)
    across = max((sum(1 for at in layers.values() if at == layer) for layer in set(layers.values())), default=1)
    width = max(2, across) * (BOX_WIDTH + GAP_X) - GAP_X + 2 * MARGIN
    height = (max(layers.values(), default=0) + 1) * (BOX_HEIGHT + GAP_Y) - GAP_Y + 2 * MARGIN + (16.0 if left_out else 0.0)
    parts = [_edge(places[source], places[target], layers[target] - layers[source]) for source, target in edges]
    parts += [_box(node, places[node["name"]], "k0" if new else "k1") for node in shown]
    if left_out:
        parts.append(element("text", f"{fmt.many(left_out, 'more node')}", class_="label", x=MARGIN, y=height - 6))
    # the width is fixed, so that a box is as large in a narrow region as in a wide one
    return drawing(width, height, described, *parts, class_="chart region-picture", style=f"width:{width:.0f}px;min-width:0")


def _layers(names: Sequence[str], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """The longest way from an input to each node; names are in an order that follows the edges."""
    layer = dict.fromkeys(names, 0)
    into: dict[str, list[str]] = {name: [] for name in names}
    for source, target in edges:
        into[target].append(source)
    for name in names:
        layer[name] = max((layer[source] + 1 for source in into[name]), default=0)
    return layer


def _places(nodes: Sequence[Mapping[str, Any]], layers: Mapping[str, int]) -> dict[str, tuple[float, float]]:
    """The upper left corner of each box."""
    used: dict[int, int] = {}
    places = {}
    for node in nodes:
        layer = layers[node["name"]]
        column = used.get(layer, 0)
        used[layer] = column + 1
        places[node["name"]] = (MARGIN + column * (BOX_WIDTH + GAP_X), MARGIN + layer * (BOX_HEIGHT + GAP_Y))
    return places


def _box(node: Mapping[str, Any], place: tuple[float, float], colour: str) -> Markup:
    x, y = place
    title = element("title", f"{fmt.plain(node['name'])}: {fmt.plain(node['op'])}")
    fill = f"mapped {colour}" if node["marked"] else "stage-box"
    shape = element(
        "rect", title, class_=fill, x=x, y=y, width=BOX_WIDTH, height=BOX_HEIGHT, rx=6,
        fill_opacity="0.35" if node["marked"] else "0", stroke="currentColor", stroke_opacity="0.45",
    )  # fmt: skip
    text = fmt.crop(fmt.plain(node["op"] if node["op"] not in ("placeholder", "output") else node["name"]), 20)
    label = element("text", text, class_="label used", x=x + BOX_WIDTH / 2, y=y + BOX_HEIGHT / 2 + 4, text_anchor="middle")
    return group([shape, label])


def _edge(start: tuple[float, float], end: tuple[float, float], layers: int) -> Markup:
    """An arrow downwards; one that passes other layers in its own column goes round them."""
    x1, y1 = start[0] + BOX_WIDTH / 2, start[1] + BOX_HEIGHT
    x2, y2 = end[0] + BOX_WIDTH / 2, end[1]
    bend = (y2 - y1) / 2
    aside = BOX_WIDTH * 0.85 if layers > 1 and x1 == x2 else 0.0
    path = f"M{x1:.1f} {y1:.1f}C{x1 + aside:.1f} {y1 + bend:.1f} {x2 + aside:.1f} {y2 - bend:.1f} {x2:.1f} {y2:.1f}m-3 -5l3 5l3 -5"
    return element("path", d=path, fill="none", stroke="currentColor", stroke_opacity="0.5", stroke_width="1.2")


def draw_memory(plan: Mapping[str, Any]) -> Markup | None:
    """Offsets over time, a rectangle for each tensor from its first step to its last; None where nothing is planned."""
    intervals = sorted(plan["intervals"], key=lambda one: -one["bytes"])[:MOST_INTERVALS]
    if not intervals or not plan["arena_bytes"]:
        return None
    begin, steps = min(one["first"] for one in intervals), max(one["last"] for one in intervals) + 1
    left, right, top, bottom = 80.0, WIDTH - 20, 28.0, HEIGHT - 46
    frame = Frame(
        left,
        top,
        right,
        bottom,
        LinearScale(float(begin), float(steps), left, right),
        LinearScale(0.0, float(plan["arena_bytes"]), bottom, top),
    )
    parts: list[Markup] = [frame.axes("step of the graph", "offset in the arena", lambda value: f"{value:,.0f}", fmt.size)]
    for place, one in enumerate(sorted(intervals, key=lambda one: one["first"])):
        x1, x2 = frame.x(one["first"]), frame.x(one["last"] + 1)
        y1, y2 = frame.y(one["offset"] + one["bytes"]), frame.y(one["offset"])
        said = f"{fmt.plain(one['node'])}: {fmt.size(one['bytes'])} at {one['offset']:,}, steps {one['first']} to {one['last']}"
        parts.append(
            element("rect", element("title", said), class_=f"mapped k{place % COLOURS}", x=x1, y=y1, width=max(x2 - x1, 0.5),
                    height=max(y2 - y1, 0.4), fill_opacity="0.75")
        )  # fmt: skip
    bound = frame.y(plan["lower_bound_bytes"])
    parts.append(element("line", class_="roof used", x1=left, x2=right, y1=bound, y2=bound))
    parts.append(
        element("text", f"lower bound {fmt.size(plan['lower_bound_bytes'])}", class_="label used", x=right, y=bound - 5, text_anchor="end")
    )
    said = f"Memory map: {len(intervals)} tensors in an arena of {fmt.size(plan['arena_bytes'])} over {steps - begin} steps"
    return drawing(WIDTH, HEIGHT, said, *parts)
