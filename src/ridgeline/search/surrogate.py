"""A Gaussian process over all points of a listed space, one observation at a time.

    features bool [N, F] ──Hamming──> k(a, b) = exp(-(differing features) / length)
    observe(row, y) ──one row more of the Cholesky factor, over all N at once──> mean [N], deviation [N]

With L the factor of K + noise and V = L^-1 K(observed, all), a new observation appends one row to both: O(n N) work, 1 ms for N = 15,625
and n = 100. (Rasmussen 2006, 2.2; path features after White 2021.)
"""

from __future__ import annotations

from typing import Any

import numpy as np

Vector = np.ndarray[Any, np.dtype[np.float64]]


class Surrogate:
    """Mean and deviation of everything, given what was seen."""

    def __init__(self, features: Any, length: float, noise: float, most: int) -> None:
        self.features = features.astype(np.float32)
        self.sizes = self.features.sum(axis=1)
        self.length, self.noise = length, noise
        count = len(self.features)
        self.rows: list[int] = []
        self.values: list[float] = []
        self.factor = np.zeros((most, most))
        self.spread = np.zeros((most, count), dtype=np.float32)  # V
        self.left = np.ones(count)  # prior variance not yet explained

    def kernel(self, row: int) -> Vector:
        """k of one point with all."""
        differing: Vector = np.asarray(self.sizes + self.sizes[row] - 2 * (self.features @ self.features[row]), dtype=np.float64)
        found: Vector = np.exp(-differing / self.length)
        return found

    def observe(self, row: int, value: float) -> None:
        n, k = len(self.rows), self.kernel(row)
        seen = k[self.rows]
        below = np.linalg.solve(self.factor[:n, :n], seen) if n else seen
        self.factor[n, :n] = below
        self.factor[n, n] = max(1.0 + self.noise - float(below @ below), 1e-9) ** 0.5
        self.spread[n] = (k - below @ self.spread[:n]) / self.factor[n, n]
        self.left = np.maximum(self.left - self.spread[n].astype(np.float64) ** 2, 1e-9)
        self.rows.append(row)
        self.values.append(value)

    def posterior(self) -> tuple[Vector, Vector]:
        """(mean, deviation) of all points, in units of the values seen."""
        n, seen = len(self.rows), np.array(self.values)
        middle = float(np.median(seen))
        seen = np.maximum(seen, middle - 2 * (float(seen.max()) - middle))  # how bad the bad ones are says little about the good ones
        centre, scale = float(seen.mean()), float(seen.std()) or 1.0
        weights = np.linalg.solve(self.factor[:n, :n], (seen - centre) / scale)
        mean = np.asarray(weights @ self.spread[:n], dtype=np.float64)
        return centre + scale * mean, scale * np.sqrt(self.left)
