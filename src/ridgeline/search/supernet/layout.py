"""The shape of a supernet's cells: edges in groups that can be computed at once.

edges (source, target) ──group_edges──> Group(sources, targets, rows): all edges from states that are known at the same time
  DARTS: {0, 1} -> 2..5, {2} -> 3..5, {3} -> 4, 5, {4} -> 5        NAS-Bench-201: {0} -> 1..3, {1} -> 2, 3, {2} -> 3
a group's edges are counted source first: edge = source place * targets + target place; rows[edge] is its architecture row
Active: for every architecture row the ops that are computed, known to Python
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Edges = Sequence[tuple[int, int]]
Active = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Group:
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def edges(self) -> int:
        return len(self.rows)

    def source_place(self, edge: int) -> int:
        return edge // len(self.targets)

    def target_place(self, edge: int) -> int:
        return edge % len(self.targets)


def group_edges(edges: Edges, inputs: int, first_row: int = 0) -> list[Group]:
    """`inputs` states are there from the start; every later state becomes known by itself."""
    rows = {edge: first_row + row for row, edge in enumerate(edges)}
    last = max(target for _, target in edges)
    groups = []
    for sources in (tuple(range(inputs)), *((state,) for state in range(inputs, last))):
        targets = tuple(sorted({target for source, target in edges if source in sources}))
        found = tuple(rows[source, target] for source in sources for target in targets)  # a KeyError is a cell this cannot compute
        groups.append(Group(sources, targets, found))
    return groups
