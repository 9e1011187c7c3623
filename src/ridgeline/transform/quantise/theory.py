"""What theory says a quantiser of b bits costs, beside what it did cost.

step Δ            noise Δ² / 12                                            (Bennett 1948; values spread evenly over each step)
uniform source    SQNR = 6.02 b dB over its own range                      10 log10 4^b
normal source     uniform steps over ±k σ: error inside and beyond the range by integration; best k for each b
                  best scalar levels: Lloyd-Max, MSE 0.1175 σ² with 4 (Max 1960), √3 π / 2 σ² 4^-b for many (Panter, Dite 1951)
any code          D(R) = σ² 2^(-2R): no code of R bits does better on a normal source (Shannon 1959)

rate_distortion(weight) ──> rows of bits, method, MSE, SQNR, predicted MSE, bound
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.errors import TransformError
from .codebook import quantise_as
from .grid import Grid, Quantised, dequantise, spread, sqnr_db

METHODS = ("symmetric", "asymmetric", "log", "lloyd-max", "nf4")


def step_noise(step: float | Tensor) -> float | Tensor:
    """Mean squared error of rounding to a step: Δ² / 12."""
    return step * step / 12


def uniform_sqnr_db(bits: float) -> float:
    """SQNR of 2**bits equal steps over the range of an evenly spread source: 6.02 dB a bit."""
    return 20 * bits * math.log10(2)


def distortion_bound(variance: float, bits: float) -> float:
    """D(R) = σ² 2^(-2R): the least MSE of any code of R bits a weight, for a normal source."""
    return variance * math.exp2(-2 * bits)


def high_rate_mse(bits: float) -> float:
    """MSE / σ² of the best scalar quantiser of a normal source with many levels: √3 π / 2 · 4^-b."""
    return math.sqrt(3) * math.pi / 2 * math.exp2(-2 * bits)


def _density(x: Tensor) -> Tensor:
    return torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _cells(edges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(mass, first moment, second moment) of the unit normal in each cell between neighbouring edges (±inf at the ends)."""
    density = torch.where(edges.isinf(), 0.0, _density(edges))
    tail = torch.where(edges.isinf(), 0.0, edges * _density(edges))
    mass = torch.special.ndtr(edges).diff()
    return mass, -density.diff(), mass - tail.diff()


def _mse(levels: Tensor, edges: Tensor) -> float:
    mass, first, second = _cells(edges)
    return float((second - 2 * levels * first + levels * levels * mass).sum())


def _edges(levels: Tensor) -> Tensor:
    end = torch.tensor([math.inf], dtype=torch.float64)
    return torch.cat((-end, (levels[1:] + levels[:-1]) / 2, end))


def normal_levels_mse(levels: Tensor) -> float:
    """MSE of a unit normal rounded to the nearest of these ascending levels."""
    levels = levels.double()
    return _mse(levels, _edges(levels))


def normal_uniform_mse(bits: int, limit: float) -> float:
    """MSE of a unit normal on 2**bits levels spread evenly from -limit to limit, values beyond cut."""
    return normal_levels_mse(torch.linspace(-limit, limit, 1 << bits, dtype=torch.float64))


def best_uniform(bits: int) -> tuple[float, float]:
    """(limit / σ, MSE / σ²) of the evenly spaced levels that suit a normal source best: golden-section search."""
    low, high, ratio = 0.5, 8.0, (math.sqrt(5) - 1) / 2
    while high - low > 1e-9:
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        if normal_uniform_mse(bits, a) < normal_uniform_mse(bits, b):
            high = b
        else:
            low = a
    return (low + high) / 2, normal_uniform_mse(bits, (low + high) / 2)


def lloyd_max(levels: int) -> tuple[Tensor, float]:
    """(levels, MSE) of the best scalar quantiser of a unit normal: each level the mean of its cell."""
    if levels < 1:
        raise TransformError(f"{levels} levels", why="a quantiser has at least one", do="give levels >= 1")
    part = (torch.arange(levels, dtype=torch.float64) + 0.5) / levels
    table = torch.special.ndtri(part) * math.sqrt(3)
    for _ in range(200_000 // levels):
        mass, first, _ = _cells(_edges(table))
        moved = first / mass
        if float((moved - table).abs().max()) < 1e-10:
            break
        table = moved
    return table, normal_levels_mse(table)


@dataclass(frozen=True, slots=True)
class RatePoint:
    """One quantiser on one weight. `stored_bits` counts scales, zeros and tables; MSE in the weight's units squared."""

    bits: int
    stored_bits: float
    method: str
    mse: float
    sqnr_db: float
    predicted_mse: float | None  # Δ²/12 over the steps used, or the normal source's figure; None where theory has none
    bound_mse: float  # D(R) at stored_bits

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def rate_distortion(
    weight: Tensor, bits: Iterable[int] = range(2, 9), methods: Iterable[str] = METHODS, name: str = "the weight"
) -> list[RatePoint]:
    """Measured and predicted error of each method at each width, one scale a tensor (nf4: its blocks of 64)."""
    rows = []
    variance = float(weight.double().var(correction=0))
    for width in bits:
        for method in methods:
            if method not in METHODS:
                raise TransformError(f"method {method!r}", why=f"methods are {', '.join(METHODS)}", do="correct the name")
            if method == "nf4" and width != 4:
                continue
            done = _quantised(weight, method, width, name)
            back = dequantise(done, torch.float64)
            mse = float((weight.double() - back).square().mean())
            stored = _stored_bits(done)
            rows.append(
                RatePoint(width, stored, method, mse, sqnr_db(weight, back), _predicted(done, method, variance),
                          distortion_bound(variance, stored))
            )  # fmt: skip
    return rows


def _quantised(weight: Tensor, method: str, bits: int, name: str) -> Quantised:
    if method in ("symmetric", "asymmetric"):
        return quantise_as(weight, "uniform", Grid(bits, method == "symmetric", "tensor"), name)
    form = {"log": "log", "lloyd-max": "codebook", "nf4": "nf4"}[method]
    return quantise_as(weight, form, Grid(bits, True, "group" if method == "nf4" else "tensor"), name)


def _stored_bits(done: Quantised) -> float:
    side = sum(t.nbytes for t in (done.scale, done.zero, done.codebook) if t is not None)
    return done.grid.bits + 8 * side / done.codes.numel()


def _predicted(done: Quantised, method: str, variance: float) -> float | None:
    if done.codebook is None:
        step = spread(done.scale.double(), done.grid, done.codes.shape[1])
        return float(torch.as_tensor(step_noise(step)).mean())
    if method == "lloyd-max":
        return variance * lloyd_max(1 << done.grid.bits)[1]
    return None
