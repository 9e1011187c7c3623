"""How blocks add up to a network, fitted on calibration networks; and how far the sum is off on others.

    seconds of a net ≈ overhead_s + per_block_s · blocks + alone · Σ alone_s + cold · Σ cold_s          all coefficients >= 0

A block by itself finds its weights in the cache it just filled; inside a network others have run since. The truth lies between the two
measured ends, where exactly depends on machine and caches: the fit finds it. Relative errors are minimised, so that small nets count
as much as large ones. With four terms every active set is tried: the exact non-negative least squares (Lawson, Hanson 1974).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import MeasureError
from .table import Errors, Missed

Values = NDArray[np.float64]
NAMED, NAME_LENGTH = 3, 500


def fit_nonnegative(features: Values, seconds: Values) -> Values:
    """Coefficients >= 0 of the least relative squared error."""
    if not (seconds > 0).all():
        raise MeasureError("a network of 0 s", why="nothing runs in no time", do="build again, without the journal beside --out")
    scaled = features / seconds[:, None]
    best, least = np.zeros(features.shape[1]), float(len(seconds))
    for size in range(1, features.shape[1] + 1):
        for chosen in combinations(range(features.shape[1]), size):
            part = scaled[:, chosen]
            found, _, rank, _ = np.linalg.lstsq(part, np.ones(len(seconds)), rcond=None)
            off = float(((part @ found - 1) ** 2).sum())
            if rank == size and (found >= 0).all() and off < least:
                best, least = np.zeros(features.shape[1]), off
                best[list(chosen)] = found
    return best


def spearman(first: Values, second: Values) -> float:
    """Rank correlation, ties sharing their mean rank; 0 where one side is constant."""
    ranks = [_ranks(np.asarray(values, dtype=float)) for values in (first, second)]
    spread = [rank - rank.mean() for rank in ranks]
    scale = float(np.sqrt((spread[0] ** 2).sum() * (spread[1] ** 2).sum()))
    return float((spread[0] * spread[1]).sum() / scale) if scale > 0 else 0.0


def _ranks(values: Values) -> Values:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: Values = (last - (counts - 1) / 2)[inverse]
    return mean


def errors_of(predicted: Values, by_flops: Values, measured: Values, points: Sequence[Any]) -> Errors:
    """What both predictions miss on networks the fit has not seen."""
    off, flops_off = np.abs(predicted / measured - 1), np.abs(by_flops / measured - 1)
    return Errors(
        nets=len(measured), mean=float(off.mean()), p90=float(np.quantile(off, 0.9)), worst=float(off.max()),
        spearman=spearman(predicted, measured), flops_mean=float(flops_off.mean()), flops_worst=float(flops_off.max()),
        flops_spearman=spearman(by_flops, measured),
        missed_most=tuple(
            Missed(point=str(points[at])[:NAME_LENGTH], predicted_s=float(predicted[at]), measured_s=float(measured[at]))
            for at in np.argsort(-off)[:NAMED]
        ),
    )  # fmt: skip
