"""CP of a convolution: one rank-1 kernel a channel, run as four thin layers.

    W [o,i,kh,kw] ≈ Σ_r  A[o,r] · B[i,r] · C[kh,r] · D[kw,r]
      Conv(i,o,kxk) ──> Conv(i,r,1x1), depthwise kh x 1, depthwise 1 x kw, Conv(r,o,1x1)       r·(i + o + kh + kw) weights a group

    ALS: each factor in turn is the least-squares answer to the others: A = W₍₁₎ (B ⊙ C ⊙ D) [(BᵀB)∗(CᵀC)∗(DᵀD)]⁻¹, and so on;
    one start from the singular vectors, the others random and seeded; the best of them is kept. Groups and starts are one batch.

The best CP of a rank is not found by any known fast algorithm, and need not exist: the error reported is the error reached.
Ref: Carroll & Chang 1970, Harshman 1970 (ALS); Lebedev 2015 (CP of convolutions).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .layers import Shape, conv_piece, sequence, shape_of, weight_of
from .ranks import Built, Plan, Rung

LADDER = 8  # ranks tried on the way to the largest that saves; each is an ALS of its own
QUICK_SWEEPS = 20
SWEEPS = 100
STARTS = 3
SETTLED = 1e-6  # change of relative squared error a sweep below which ALS stops
RIDGE = 1e-11  # of the Gram's mean diagonal: columns that grow parallel make it singular


@dataclass(frozen=True, slots=True)
class Factors:
    """A [g,o,r], B [g,i,r], C [g,kh,r], D [g,kw,r] and the share of squared norm they keep."""

    out: Tensor
    into: Tensor
    vertical: Tensor
    horizontal: Tensor
    energy: float

    def dense(self) -> Tensor:
        """The weight they stand for: [g,o,i,kh,kw]."""
        return torch.einsum("gor,gir,ghr,gwr->goihw", self.out, self.into, self.vertical, self.horizontal)


class CpPlan(Plan):
    """A short ladder of ranks, each with the energy a quick ALS reaches."""

    def __init__(self, layer: nn.Conv2d, positions: tuple[int, int, int] = (1, 1, 1), seed: int = 0) -> None:
        self.layer, self.shape, self.seed = layer, shape_of(layer, positions), seed
        self.dense = self.shape.dense
        self.weight = weight_of(layer)
        self._rungs: list[Rung] | None = None

    def rungs(self) -> list[Rung]:
        if self._rungs is None:
            most = (self.dense - 1) // cp_cost(self.shape, 1)
            ranks = sorted({-(-most * step // LADDER) for step in range(1, LADDER + 1)} - {0})
            self._rungs = [self._rung(rank, QUICK_SWEEPS) for rank in ranks]
        return self._rungs

    def at(self, rank: int) -> Rung:
        return self._rung(rank, QUICK_SWEEPS)

    def _rung(self, rank: int, sweeps: int) -> Rung:
        return Rung((rank,), cp_cost(self.shape, rank), als(self.weight, rank, starts=1, seed=self.seed, sweeps=sweeps).energy)

    def build(self, ranks: tuple[int, ...]) -> Built:
        rank, layer, groups = ranks[0], self.layer, self.shape.groups
        factors = als(self.weight, rank, starts=STARTS, seed=self.seed)
        thin = groups * rank
        first = factors.into.mT.reshape(thin, -1, 1, 1)  # [g·r, i, 1, 1]
        down = factors.vertical.mT.reshape(thin, 1, -1, 1)  # [g·r, 1, kh, 1]
        across = factors.horizontal.mT.reshape(thin, 1, 1, -1)  # [g·r, 1, 1, kw]
        last = factors.out.reshape(-1, rank, 1, 1)  # [g·o, r, 1, 1]
        pieces = (
            conv_piece(layer, first, groups),
            conv_piece(layer, down, thin, axes="h"),
            conv_piece(layer, across, thin, axes="w"),
            conv_piece(layer, last, groups, bias=layer.bias),
        )
        return Built(sequence(layer, *pieces), factors.energy)


def cp_cost(shape: Shape, rank: int) -> int:
    """Of the four pieces, each at the positions it runs at."""
    at_input, between, at_output = shape.positions
    return shape.groups * rank * (shape.columns * at_input + shape.height * between + (shape.width + shape.rows) * at_output)


def als(weight: Tensor, rank: int, *, starts: int = STARTS, seed: int = 0, sweeps: int = SWEEPS) -> Factors:
    """The best of several alternating least-squares fits of `rank` terms to weight [g,o,i,kh,kw]."""
    groups, largest = len(weight), float(weight.abs().max()) or 1.0
    weight = weight / largest  # products of four factors: neither overflow nor underflow
    total = float(weight.double().square().sum())
    modes = _first_factors(weight, rank, starts, seed)
    w = weight.repeat_interleave(starts, dim=0)  # [g·starts, o,i,kh,kw]
    norms = w.square().sum((1, 2, 3, 4))
    before = torch.full_like(norms, torch.inf)
    for _ in range(sweeps):
        modes, squared_error = _sweep(w, norms, modes)
        if bool(((before - squared_error).abs() <= SETTLED * norms).all()):
            break
        before = squared_error
    a, b, c, d = modes
    errors = (w - torch.einsum("gor,gir,ghr,gwr->goihw", a, b, c, d)).square().sum((1, 2, 3, 4)).view(groups, starts)
    best = errors.argmin(1) + starts * torch.arange(groups, device=errors.device)
    energy = 1.0 - float(errors.min(1).values.sum()) / total if total > 0.0 else 1.0
    return Factors(largest * a[best], b[best], c[best], d[best], max(0.0, energy))


Modes = tuple[Tensor, Tensor, Tensor, Tensor]


def _sweep(w: Tensor, norms: Tensor, modes: Modes) -> tuple[Modes, Tensor]:
    """Each factor once; the columns of all but the first are unit vectors afterwards. Also ‖W − W'‖² of each batch entry."""
    a, b, c, d = modes
    kernel = _gram(c) * _gram(d)
    a = _solve(torch.einsum("goihw,gir,ghr,gwr->gor", w, b, c, d), kernel * _gram(b))
    b, a = _unit(_solve(torch.einsum("goihw,gor,ghr,gwr->gir", w, a, c, d), kernel * _gram(a)), a)
    joined = torch.einsum("goihw,gor,gir->ghwr", w, a, b)  # shared by the two short modes
    channels = _gram(a) * _gram(b)
    c, a_c = _unit(_solve(torch.einsum("ghwr,gwr->ghr", joined, d), channels * _gram(d)), a)
    # `joined` was taken with the old a: the scale that c handed to it must multiply it too
    moved = (a_c.norm(dim=1) / a.norm(dim=1).clamp(min=torch.finfo(a.dtype).tiny)).unsqueeze(1)
    channels = channels * moved * moved.mT
    right = torch.einsum("ghwr,ghr->gwr", joined, c) * moved
    d_free = _solve(right, channels * _gram(c))
    model = (channels * _gram(c) * _gram(d_free)).sum((1, 2))
    squared_error = norms - 2.0 * (right * d_free).sum((1, 2)) + model
    d, a = _unit(d_free, a_c)
    return (a, b, c, d), squared_error


def _gram(factor: Tensor) -> Tensor:
    return factor.mT @ factor


def _unit(factor: Tensor, carrier: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of `factor` at length 1, their lengths moved to `carrier`; a zero column stays zero."""
    length = factor.norm(dim=1, keepdim=True)
    return factor / length.clamp(min=torch.finfo(factor.dtype).tiny), carrier * length


def _solve(right: Tensor, gram: Tensor) -> Tensor:
    """right · gram⁻¹ for a symmetric Gram [g,r,r], ridged just above singular."""
    mean = gram.diagonal(dim1=1, dim2=2).mean(1)
    mean = torch.where(mean > 0.0, mean, 1.0)  # all columns zero: so is the answer
    ridge = max(RIDGE, 10.0 * torch.finfo(gram.dtype).eps)
    ridged = gram + (ridge * mean)[:, None, None] * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    solved: Tensor = torch.linalg.solve(ridged, right.mT).mT
    return solved


def _first_factors(weight: Tensor, rank: int, starts: int, seed: int) -> Modes:
    """Start 0 from singular vectors of each unfolding (random columns beyond them), the rest random: [g·starts, size, rank]."""
    random = torch.Generator().manual_seed(seed)
    factors = []
    for mode in range(1, 5):
        size = weight.shape[mode]
        drawn = torch.randn(len(weight), starts, size, rank, generator=random, dtype=torch.float64).to(weight)
        left = torch.linalg.svd(weight.movedim(mode, 1).flatten(2), full_matrices=False)[0][:, :, :rank]
        # a kernel axis has 3 vectors for many ranks: repeat them with a little noise, so that no two columns are equal
        columns = torch.arange(rank, device=weight.device) % left.shape[2]
        drawn[:, 0] = left[:, :, columns] + (0.1 * drawn[:, 0] if rank > left.shape[2] else 0.0)
        factors.append(drawn.flatten(0, 1))
    a, b, c, d = factors
    return a, b, c, d
