"""Guesses for any candidates of any space, from what was told: one process an objective, one for being feasible.

Screen.add(point, values or None) ...     guesses(candidates) ──> [(mean, deviation)], chance of being feasible [m]
  known(point): costs that a latency table states take the place of guesses, and a limit they break makes the chance 0

Length and noise are chosen anew whenever a tenth more is known, as it is told. Of more than MOST answers, the best and the latest are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..surrogate import fit, posterior
from .acquisition import Guess, normal_share
from .base import Known, ordered

if TYPE_CHECKING:
    from ..spaces.space import Point, Space

MOST = 400
FIRST, FIRST_NOISE = 8, 0.1
"""Answers before a fit, and the noise until then."""
SURE = 1e-9
"""Deviation of what is known, as a share of its size."""


class Screen:
    def __init__(self, space: Space) -> None:
        self.space = space
        self.values: dict[Point, tuple[float, ...]] = {}
        self.refused: dict[Point, None] = {}
        self.flags: dict[Point, Any] = {}
        self.fits: list[tuple[float, float]] = []
        self.fitted = 0
        self.known: Known | None = None

    def add(self, point: Point, values: tuple[float, ...] | None) -> None:
        self.flags[point] = self.space.features([point])[0]
        if values is None:
            self.refused[point] = None
        else:
            self.values[point] = values
            if len(self.values) >= max(FIRST, 1.1 * self.fitted):
                points, kept = self._kept()
                flags = np.stack([self.flags[one] for one in points])
                self.fits, self.fitted = [fit(flags, column) for column in kept.T], len(self.values)

    def guesses(self, candidates: Sequence[Point]) -> tuple[list[Guess], Any]:
        points, values = self._kept()
        flags, asked = np.stack([self.flags[point] for point in points]), self.space.features(candidates)
        fits = self.fits or [(self.usual(), FIRST_NOISE)] * values.shape[1]
        found = [posterior(flags, column, asked, *constants) for column, constants in zip(values.T, fits, strict=True)]
        for place, column in self._known_columns(candidates):
            found[place] = column, np.full(len(column), SURE * (1 + float(np.abs(column).max())))
        return found, chance_to_fit(self.flags, self.refused, asked, fits[0][0]) * self._kept_limits(candidates)

    def feasible(self, candidates: Sequence[Point]) -> Any:
        """The chance of each to keep the limits, [m]."""
        length = self.fits[0][0] if self.fits else self.usual()
        return chance_to_fit(self.flags, self.refused, self.space.features(candidates), length) * self._kept_limits(candidates)

    def _known_columns(self, candidates: Sequence[Point]) -> list[tuple[int, Any]]:
        """(place, values [m]) of the objectives that need no guess."""
        if self.known is None:
            return []
        columns = enumerate(zip(*(self.known(point)[0] for point in candidates), strict=True))
        return [(place, np.array(column)) for place, column in columns if None not in column]

    def _kept_limits(self, candidates: Sequence[Point]) -> Any:
        """[m]: 0 where a known cost breaks a limit, else 1."""
        return 1.0 if self.known is None else np.array([float(self.known(point)[1]) for point in candidates])

    def usual(self) -> float:
        """A length before there is enough to fit one: that of all decisions differing."""
        return 2.0 * len(self.space.decisions)

    def _kept(self) -> tuple[list[Point], Any]:
        points = list(self.values)
        values = np.array([self.values[point] for point in points])
        if len(points) <= MOST:
            return points, values
        rows = sorted({*ordered(values)[: MOST // 2], *range(len(points) - MOST // 2, len(points))})
        return [points[row] for row in rows], values[rows]


def chance_to_fit(flags: dict[Point, Any], refused: dict[Point, None], asked: Any, length: float) -> Any:
    """[m]: by a process over 1 (fits) and 0 (refused); all 1 before the first refusal."""
    if not refused:
        return np.ones(len(asked))
    points = list(flags)[-2 * MOST :]
    labels = np.array([0.0 if point in refused else 1.0 for point in points])
    if labels.min() == labels.max():
        return np.ones(len(asked))
    mean, deviation = posterior(np.stack([flags[point] for point in points]), labels, asked, length, 0.1)
    return normal_share((mean - 0.5) / deviation)
