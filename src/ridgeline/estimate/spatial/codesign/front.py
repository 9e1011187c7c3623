"""Pareto fronts: which points no other beats, in which order the rest follow, and the one to recommend.

    points (n x m, every column to be small) ──front──> indices of the points no other dominates
                                             ──ranks──> 0 for the front, 1 for the front without it, …
                                             ──crowding──> room around each point of a front, ends infinite
    a dominates b: a <= b everywhere and a < b somewhere; equal points do not dominate each other, so all of them stay

The knee is the point nearest to the best of every column at once, on logarithmic scales: a factor counts the same in every column,
and a column in which all are about as good hardly counts.
Ref: Deb et al., NSGA-II, 2002.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, inf, log

import numpy as np
import numpy.typing as npt

Points = npt.NDArray[np.float64]
PAIRS = 1 << 20  # compared at once: keeps memory small however many points there are


def dominated(points: Points, by: Points) -> npt.NDArray[np.bool_]:
    """Of each point, whether any of `by` dominates it."""
    found = np.zeros(len(points), dtype=bool)
    step = max(1, PAIRS // max(1, len(by)))
    for start in range(0, len(points) if len(by) else 0, step):
        some = points[start : start + step, None, :]
        nowhere_worse, somewhere_better = np.all(by[None] <= some, axis=2), np.any(by[None] < some, axis=2)
        found[start : start + step] = np.any(nowhere_worse & somewhere_better, axis=1)
    return found


def front(points: Points) -> list[int]:
    """Indices of the points that no other dominates, rising."""
    return [int(index) for index in np.flatnonzero(~dominated(points, points))]


def ranks(points: Points) -> list[int]:
    """Of each point, in which front it is when fronts are taken away one after another."""
    found = [0] * len(points)
    left = np.arange(len(points))
    for rank in range(len(points)):
        if not len(left):
            break
        best = ~dominated(points[left], points[left])
        for index in left[best]:
            found[int(index)] = rank
        left = left[~best]
    return found


def crowding(points: Points) -> list[float]:
    """Distance between each point's neighbours, summed over the columns, each as a share of its range; ends are infinite."""
    room = [0.0] * len(points)
    for column in range(points.shape[1] if len(points) else 0):
        order = np.argsort(points[:, column], kind="stable")
        values = points[order, column]
        span = float(values[-1] - values[0])
        room[int(order[0])] = room[int(order[-1])] = inf
        for place in range(1, len(order) - 1):
            room[int(order[place])] += float(values[place + 1] - values[place - 1]) / span if span else 0.0
    return room


def knee(points: Sequence[Sequence[float]]) -> tuple[int, float]:
    """(index of the point nearest to the best of all columns, its distance); the first of equals."""
    best = [min(column) for column in zip(*points, strict=True)]
    worst = [max(column) for column in zip(*points, strict=True)]
    distances = [hypot(*map(_away, point, best, worst)) for point in points]
    nearest = min(range(len(points)), key=lambda index: distances[index])
    return nearest, distances[nearest]


def _away(value: float, best: float, worst: float) -> float:
    """Logarithm of the factor to the best; of a column with zeros, the share of its range."""
    if best > 0:
        return log(value / best)
    return (value - best) / (worst - best) if worst > best else 0.0
