"""How many ranks to keep: by energy, by an explicit rank, or by one budget over all layers.

    Plan (one layer, one method) ──rungs()──> Rung(ranks, cost, energy): every rank that saves, cost rising
      energy   the first rung that keeps that share of the layer's squared norm (Σ kept σ² / Σ σ² for an SVD)
      rank     that rung, or TransformError where it saves nothing: for a matrix [m,n], rank >= m·n / (m + n)
      budget   allot(): over all layers, the largest sum of energy shares the budget can buy

    allot: a layer's rungs and its dense self are points (cost, energy); their upper hull has falling slopes, so taking hull
    segments by marginal energy per unit of cost is the optimum of the relaxed knapsack (Dantzig 1957): what it misses is at
    most the one segment that no longer fits. What is left over is then spent on single rungs.

Cost is in weights, or in multiply-adds an example where positions are given (layers.Shape).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

from torch import Tensor, nn

from ...core.errors import TransformError

ROUNDING = 1e-12  # of energy: what float32 weights of exact rank 3 have beyond rank 3, and not worth a rank


@dataclass(frozen=True, slots=True)
class Rung:
    """One way to store a layer. No ranks: as it is."""

    ranks: tuple[int, ...]
    cost: int
    energy: float  # share of the squared norm kept, 0 to 1


@dataclass(frozen=True, slots=True)
class Built:
    """The layers that take a layer's place, and what share of its squared norm they keep."""

    layer: nn.Sequential
    energy: float

    @property
    def error(self) -> float:
        """‖W − W'‖ / ‖W‖, in the norm the method minimises."""
        return sqrt(max(0.0, 1.0 - self.energy))


class Plan(ABC):
    """What one method can do to one layer."""

    dense: int  # cost of the layer as it is

    @abstractmethod
    def rungs(self) -> list[Rung]:
        """The ranks that cost less than the layer itself, cost rising."""

    @abstractmethod
    def at(self, rank: int) -> Rung:
        """The rung of an explicit rank, whether or not it saves; ranks beyond the layer's own are cut to it."""

    @abstractmethod
    def build(self, ranks: tuple[int, ...]) -> Built:
        """The factored layers."""

    def for_energy(self, energy: float) -> Rung:
        """The cheapest rung that keeps this share, or an error where none that saves does."""
        rungs = self.rungs()
        found = next((rung for rung in rungs if rung.energy >= energy - ROUNDING), None)
        if found is None:
            most = f"the largest rank that saves keeps {100 * rungs[-1].energy:.1f} %" if rungs else "not even rank 1 saves"
            raise TransformError(
                f"energy {energy:g} cannot be kept for less than the layer costs",
                why=most,
                do="ask for less energy, or leave the layer out",
            )
        return found

    def for_rank(self, rank: int) -> Rung:
        """The rung of this rank, or an error where it saves nothing."""
        rung = self.at(rank)
        if rung.cost >= self.dense:
            rungs = self.rungs()
            do = f"give a rank of at most {max(rungs[-1].ranks)}" if rungs else "leave the layer as it is"
            raise TransformError(
                f"rank {rank} saves nothing", why=f"the factors cost {rung.cost:,}, the layer itself {self.dense:,}", do=do
            )
        return rung

    def for_ratio(self, ratio: float) -> Rung:
        """The rung of most energy that costs at most this share of the layer."""
        return allot({"the layer": [*self.rungs(), Rung((), self.dense, 1.0)]}, ratio * self.dense)["the layer"]


def largest_saving_rank(rows: int, columns: int) -> int:
    """The largest r with r·(rows + columns) < rows·columns; 0 where there is none."""
    return (rows * columns - 1) // (rows + columns)


def energy_shares(squares: Tensor) -> list[float]:
    """Share of the total kept by the first 1, 2, … of these squared singular values; all of it where the total is zero."""
    kept = squares.double().cumsum(0)
    total = float(kept[-1])
    shares: list[float] = (kept / total).clamp(max=1.0).tolist() if total > 0.0 else [1.0] * len(kept)
    return shares


def hull(rungs: Sequence[Rung]) -> list[Rung]:
    """The upper concave hull of (cost, energy), from the cheapest rung on: slopes fall, energy rises."""
    corners: list[Rung] = []
    for rung in sorted(rungs, key=lambda r: (r.cost, -r.energy)):
        if corners and rung.energy <= corners[-1].energy + ROUNDING:
            continue
        while len(corners) > 1 and _slope(corners[-2], rung) >= _slope(corners[-2], corners[-1]):
            corners.pop()
        if corners and rung.cost == corners[-1].cost:
            continue
        corners.append(rung)
    return corners


def _slope(a: Rung, b: Rung) -> float:
    return (b.energy - a.energy) / max(b.cost - a.cost, 1)


def allot(ladders: Mapping[str, Sequence[Rung]], budget: float) -> dict[str, Rung]:
    """One rung a layer, costing at most `budget` together, with the largest sum of energy shares greedy buying reaches."""
    corners = {name: hull(rungs) for name, rungs in ladders.items()}
    chosen = {name: points[0] for name, points in corners.items()}
    left = budget - sum(rung.cost for rung in chosen.values())
    if left < 0:
        raise TransformError(
            f"a budget of {int(budget):,} over {len(chosen)} layers",
            why=f"rank 1 everywhere already costs {sum(rung.cost for rung in chosen.values()):,}",
            do="give a larger ratio, or skip layers",
        )
    segments = [(_slope(a, b), name, a, b) for name, points in corners.items() for a, b in pairwise(points)]
    for _, name, start, end in sorted(segments, key=lambda s: -s[0]):
        if chosen[name] is start and end.cost - start.cost <= left:
            chosen[name] = end
            left -= end.cost - start.cost
    for _, name, start, _ in sorted(segments, key=lambda s: -s[0]):
        if chosen[name] is not start:
            continue
        within = [rung for rung in ladders[name] if rung.cost - start.cost <= left]
        most = max(rung.energy for rung in within)
        if most > start.energy + ROUNDING:
            best = min((rung for rung in within if rung.energy >= most - ROUNDING), key=lambda r: r.cost)
            chosen[name] = best
            left -= best.cost - start.cost
    return chosen
