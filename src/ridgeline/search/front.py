"""Fronts of two objectives, larger is better, and their hypervolume.

nondominated(points [n, 2]) ──> the front, first objective rising        hypervolume(front, reference)
growth(front, candidates [m, 2], reference) ──> [m]: hypervolume each candidate alone would add
"""

from __future__ import annotations

from typing import Any

import numpy as np

Matrix = np.ndarray[Any, np.dtype[np.float64]]


def nondominated(points: Matrix) -> Matrix:
    """Points no other is at least as good as in both and better in one; sorted by the first objective, rising."""
    order = np.lexsort((points[:, 1], points[:, 0]))[::-1]
    kept, highest = [], -np.inf
    for row in order:
        if points[row, 1] > highest:
            kept.append(row)
            highest = points[row, 1]
    return points[kept[::-1]]


def hypervolume(points: Matrix, reference: Any) -> float:
    """Area between the front and a reference point that all of it should be better than."""
    front = nondominated(points)
    front = front[(front > reference).all(axis=1)]
    left = np.concatenate([[reference[0]], front[:-1, 0]])
    return float(((front[:, 0] - left) * (front[:, 1] - reference[1])).sum())


def growth(front: Matrix, candidates: Matrix, reference: Any) -> Any:
    """What each candidate would add to the hypervolume: its box less the part of it that the front covers."""
    inside = front[(front > reference).all(axis=1)]
    edges = np.concatenate([[reference[0]], inside[:, 0], [np.inf]])
    heights = np.concatenate([inside[:, 1], [reference[1]]])  # of the front's staircase right of each edge
    x, y = candidates[:, 0, None], candidates[:, 1, None]
    widths = np.maximum(np.minimum(x, edges[1:]) - edges[:-1], 0.0)
    return (widths * np.maximum(y - heights, 0.0)).sum(axis=1)
