"""Cells in a genotype: for each node, the ops into it and the nodes they come from.

{"normal": [[["sep_conv_3x3", 0], ["skip_connect", 1]], …], "reduction": […]}     node ──> [[op, source], …]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CellGenotype = list[list[tuple[str, int]]]


def write_nodes(nodes: CellGenotype) -> list[list[list[Any]]]:
    return [[[name, source] for name, source in into] for into in nodes]


def read_nodes(cells: Any, kinds: Sequence[str], count: int, *, first: int) -> dict[str, CellGenotype]:
    """The cells of these kinds, `count` nodes each; the node at place p comes after `first + p` others, its possible sources."""
    if not isinstance(cells, dict) or set(cells) != set(kinds):
        raise ValueError(f"cells must be an object with {', '.join(kinds)}")
    return {kind: _read_cell(cells[kind], count, first) for kind in kinds}


def _read_cell(nodes: Any, count: int, first: int) -> CellGenotype:
    if not isinstance(nodes, list) or len(nodes) != count:
        raise ValueError(f"a cell has {count} nodes")
    found: CellGenotype = []
    for place, into in enumerate(nodes):
        if not isinstance(into, list):
            raise ValueError("a node is a list of [op, source]")
        found.append([_read_edge(edge, first + place) for edge in into])
    return found


def _read_edge(edge: Any, sources: int) -> tuple[str, int]:
    if not isinstance(edge, list) or len(edge) != 2:
        raise ValueError("an edge is [op, source]")
    name, source = edge
    if not isinstance(name, str) or not isinstance(source, int) or isinstance(source, bool) or not 0 <= source < sources:
        raise ValueError(f"edge {str(edge)[:60]}: the op is a name, the source a node before this one")
    return name, source
