"""A genotype as a picture: cells as arcs between nodes in a row, layered nets as a list of bars. SVG text, no script, light and dark.

draw(genotype) ──point_of (checks it)──> cells: nodes left to right, an arc an op, labelled  |  layers: bar length = channels or width

Arcs never share a label's place: two with one middle have different spans, and the span is the height.
"""

from __future__ import annotations

from html import escape
from typing import Any

from .genotype import CellGenotype
from .space import point_of

STEP, RISE, MARGIN, RADIUS = 132, 30, 24, 17
ROW, BAR_LONGEST, BAR_LEFT = 22, 220, 56
STYLE = """text{font:12px system-ui,sans-serif;fill:#1c2733}.title{font-size:14px;font-weight:600}.side{fill:#5b6876}
.node{fill:#e8eef5;stroke:#47617c}.op{fill:none;stroke:#2f6fb0;stroke-width:1.6}.join{fill:none;stroke:#9aa7b4}.back{fill:#ffffff}
.bar{fill:#bcd4ec;stroke:#2f6fb0}.paper{fill:#ffffff}
@media(prefers-color-scheme:dark){text{fill:#e6ebf0}.side{fill:#9fadba}.node{fill:#25384b;stroke:#86a5c4}.op{stroke:#79b0e6}.join{stroke:#63717f}
.back,.paper{fill:#12181f}.bar{fill:#27496b;stroke:#79b0e6}}"""


def draw(genotype: dict[str, Any]) -> str:
    """A complete SVG document; a broken genotype is an OptionError."""
    space, _ = point_of(genotype)
    if "cells" in genotype:
        return _cells(genotype["cells"], space.name)
    if "stages" in genotype:
        return _stages(genotype, space.name)
    return _layers(genotype, space.name)


def _cells(cells: dict[str, CellGenotype], space: str) -> str:
    parts, top, widest = [], MARGIN, 0
    for kind, nodes in cells.items():
        first = 2 if space == "darts" else 1
        picture, width, height = _cell(f"{kind} cell" if kind != "cell" else "cell", nodes, first, top)
        parts.append(picture)
        top, widest = top + height + MARGIN, max(widest, width)
    return _document("".join(parts), widest, top, f"{space} cells")


def _cell(title: str, nodes: CellGenotype, first: int, top: int) -> tuple[str, int, int]:
    """`first` nodes are the cell's inputs. None computes nothing and is left out."""
    edges = [(source, first + place, name) for place, into in enumerate(nodes) for name, source in into if name != "none"]
    joined = first == 2  # the output is all inner nodes side by side; else it is the last node
    count = first + len(nodes) + joined
    highest = max((target - source for source, target, _ in edges), default=1)
    middle = top + 28 + highest * RISE + RADIUS
    parts = [_text(MARGIN, top + 6, title, "title", "start")]
    if joined:
        for node in range(first, count - 1):
            parts.append(_arc(node, count - 1, middle, -0.45, "join"))
    parts += [_arc(source, target, middle, 1, "op") for source, target, _ in edges]
    for source, target, name in edges:
        x, y = (_x(source) + _x(target)) // 2, middle - RADIUS - (target - source) * RISE
        width = 6.6 * len(name) + 8
        parts.append(f'<rect class="back" x="{x - width / 2:.1f}" y="{y - 9}" width="{width:.1f}" height="18"/>')
        parts.append(_text(x, y + 4, name))
    for node in range(count):
        parts.append(f'<circle class="node" cx="{_x(node)}" cy="{middle}" r="{RADIUS}"/>')
        parts.append(_text(_x(node), middle + 4, _node_name(node, first, count, joined)))
    below = int((count - 1 - first) * RISE * 0.45) + RADIUS if joined else RADIUS
    return "".join(parts), _x(count - 1) + RADIUS + MARGIN, middle + below + 10 - top


def _node_name(node: int, first: int, count: int, joined: bool) -> str:
    if node < first:
        return "in" if first == 1 else ("k−2", "k−1")[node]
    return "out" if node == count - 1 else str(node - first if joined else node)


def _x(node: int) -> int:
    return MARGIN + RADIUS + 8 + node * STEP


def _arc(source: int, target: int, middle: int, lift: float, style: str) -> str:
    """A cubic whose top is |span| x RISE from the nodes' edge; control points lie a third further."""
    start, end, side = _x(source), _x(target), RADIUS if lift > 0 else -RADIUS
    control = middle - side - 4 / 3 * lift * (target - source) * RISE
    return f'<path class="{style}" d="M{start} {middle - side}C{start} {control:.1f} {end} {control:.1f} {end} {middle - side}"/>'


def _layers(genotype: dict[str, Any], space: str) -> str:
    layers: list[dict[str, Any]] = genotype["layers"]
    widths = [layer.get("channels", genotype.get("width", 1)) for layer in layers]
    size, told = genotype["settings"]["image"], []
    for layer, width in zip(layers, widths, strict=True):
        size = -(-size // layer.get("stride", 1))
        told.append(_describe(layer, width, size))
    return _bars(space, "layers", widths, told)


def _stages(genotype: dict[str, Any], space: str) -> str:
    """Bars of residual stages: as wide as their channels, in units of the stem's."""
    stages: list[dict[str, str]] = genotype["stages"]
    size, told = genotype["settings"]["image"], []
    for place, stage in enumerate(stages):
        size = -(-size // 2) if place else size
        gate = "" if stage["attention"] == "none" else f", {stage['attention']}"
        width = round(genotype["settings"]["channels"] * float(stage["width"]))
        told.append(f"{stage['blocks']} x {stage['kind']}, {genotype['activation']}{gate} → {width} @ {size}x{size}")
    return _bars(space, "stages", [float(stage["width"]) for stage in stages], told)


def _bars(space: str, what: str, widths: list[float], told: list[str]) -> str:
    """One below the other, each with what it is."""
    parts = [_text(MARGIN, MARGIN, f"{space}, {len(told)} {what}", "title", "start")]
    for place, (width, text) in enumerate(zip(widths, told, strict=True)):
        y = MARGIN + 20 + place * ROW
        length = max(2.0, BAR_LONGEST * width / max(widths))
        parts.append(_text(BAR_LEFT - 8, y + 12, str(place), "side", "end"))
        parts.append(f'<rect class="bar" x="{BAR_LEFT}" y="{y}" width="{length:.1f}" height="{ROW - 6}" rx="2"/>')
        parts.append(_text(BAR_LEFT + BAR_LONGEST + 12, y + 12, text, "", "start"))
    return _document("".join(parts), BAR_LEFT + BAR_LONGEST + 400, MARGIN + 30 + len(told) * ROW, f"{space} network")


def _describe(layer: dict[str, Any], width: int, size: int) -> str:
    if "kind" not in layer:
        return f"width {width}, {layer['heads']} heads, feed-forward x {layer['ratio']}"
    attention = "" if layer["attention"] == "none" else f", {layer['attention']}/{layer['reduction']}"
    stride = ", stride 2" if layer["stride"] == 2 else ""
    skip = ", skip" if layer["skip"] else ""
    return f"{layer['kind']} {layer['kernel']}x{layer['kernel']}, {layer['activation']}{attention}{stride}{skip} → {width} @ {size}x{size}"


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{style}">{escape(text)}</text>'


def _document(body: str, width: int, height: int, title: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
    paper = f'<rect class="paper" width="{width}" height="{height}"/>'
    return f"{head}<title>{escape(title)}</title><style>{STYLE}</style>{paper}{body}</svg>\n"
