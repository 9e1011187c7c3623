"""Spaces of categorical choices, all of whose points can be listed, and the cells of NAS-Bench-201.

    points uint8 [N, decisions]; a point that computes the same as another has the same `canonical` form
    features(points) ──> bool [N, F]: which op each live edge has, and which ops each path from input to output has

A cell (Dong 2020) has four nodes and an op on each of six edges: 0 skip, 1 none, 2 conv3x3, 3 conv1x1, 4 avgpool. An edge whose source the
input does not reach, or from whose target the output is not reached, computes nothing: its op makes no difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Points = np.ndarray[Any, np.dtype[np.uint8]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
EDGES = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
PATHS = ((2,), (0, 4), (1, 5), (0, 3, 5))
"""From node 0 to node 3, as edges."""
OPS = ("skip", "none", "conv3x3", "conv1x1", "avgpool")
NONE = 1


@dataclass(frozen=True, slots=True)
class CellSpace:
    """Cells of NAS-Bench-201."""

    decisions: int = len(EDGES)
    choices: int = len(OPS)

    def random(self, random: np.random.Generator, count: int) -> Points:
        return random.integers(0, self.choices, (count, self.decisions), dtype=np.uint8)

    def mutated(self, point: Points, random: np.random.Generator) -> Points:
        """One decision other than it was."""
        child = point.copy()
        place = random.integers(self.decisions)
        child[place] = (child[place] + random.integers(1, self.choices)) % self.choices
        return child

    def crossed(self, first: Points, second: Points, random: np.random.Generator) -> Points:
        """Each decision from one of the two."""
        return np.where(random.random(self.decisions) < 0.5, first, second).astype(np.uint8)

    def canonical(self, points: Points) -> Points:
        """Edges that compute nothing become none; a cell whose output is never reached is none throughout."""
        live = np.zeros(points.shape, dtype=bool)
        for path in PATHS:
            whole = (points[:, path] != NONE).all(axis=1)
            for edge in path:
                live[:, edge] |= whole
        return np.where(live, points, NONE).astype(np.uint8)

    def features(self, points: Points) -> Flags:
        """One-hot ops of the canonical form, and one-hot sequences of ops along each path."""
        cells = self.canonical(points)
        edges = cells[:, :, None] == np.arange(self.choices)
        found = [edges.reshape(len(cells), -1)]
        for path in PATHS:
            code = (cells[:, path] * self.choices ** np.arange(len(path))).sum(axis=1)
            found.append(code[:, None] == np.arange(self.choices ** len(path)))
        return np.concatenate(found, axis=1)

    def name(self, point: Points) -> str:
        """NAS-Bench-201's own string: the edges into each node."""
        nodes = []
        for node in (1, 2, 3):
            into = [f"{OPS[point[place]]}~{source}" for place, (source, target) in enumerate(EDGES) if target == node]
            nodes.append("|" + "|".join(into) + "|")
        return "+".join(nodes)
