"""A table made on the spot: every cell, with an accuracy that its ops and paths decide, and a latency that adds up."""

from __future__ import annotations

from itertools import product

import numpy as np

from ridgeline.search.spaces.cells201 import canonical_rows, feature_rows
from ridgeline.search.table import Table


def made_table(seed: int = 0, noise: float = 0.3) -> Table:
    """Columns seen (noisy), true (what it is worth) and latency."""
    random = np.random.default_rng(seed)
    points = np.array(list(product(range(5), repeat=6)), dtype=np.uint8)
    features = feature_rows(points)
    weights = random.normal(0, 1, features.shape[1]) * np.where(np.arange(features.shape[1]) < 30, 1.0, 0.5)
    true = 80 + 2 * (features @ weights)
    latency = np.array([0.2, 0.0, 2.0, 1.0, 0.5])[canonical_rows(points)].sum(axis=1) + 1
    return Table(points, {"seen": true + random.normal(0, noise, len(points)), "true": true, "latency": latency})
