"""Tucker-2 of a convolution: few input channels, a small kxk, back to all output channels.

W [o,i,kh,kw] ≈ Σ_ab  F[o,a] · G[a,b,kh,kw] · S[i,b]        Conv(i,o,kxk) ──> Conv(i,b,1x1), Conv(b,a,kxk), Conv(a,o,1x1)
  HOSVD: F, S = leading left singular vectors of W unfolded along o and along i; G = W ×₁ Fᵀ ×₂ Sᵀ   (De Lathauwer 2000)
  HOOI:  F from W ×₂ Sᵀ, S from W ×₁ Fᵀ, in turn, until the energy ‖G‖² stops rising

F and S have orthonormal columns, so ‖W − W'‖² = ‖W‖² − ‖G‖². With the whole HOSVD core at hand, the energy of every pair of
ranks is a sum over its corner; the ladder climbs from (1,1), each time by the rank of more energy per unit of cost.
Ref: Kim 2016 (compression of networks by Tucker-2).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .layers import Shape, conv_piece, sequence, shape_of, weight_of
from .ranks import Built, Plan, Rung

SWEEPS = 50  # of HOOI, at most
SETTLED = 1e-10  # relative gain of energy below which HOOI stops


class TuckerPlan(Plan):
    """Both channel spectra of one convolution."""

    def __init__(self, layer: nn.Conv2d, positions: tuple[int, int, int] = (1, 1, 1)) -> None:
        self.layer, self.shape = layer, shape_of(layer, positions)
        self.dense = self.shape.dense
        self.weight = weight_of(layer).flatten(3)  # [groups, o, i, kh·kw]
        self.outer = leading(self.weight.flatten(2))  # [groups, o, up to o]
        self.inner = leading(self.weight.transpose(1, 2).flatten(2))  # [groups, i, up to i]
        core = project(self.weight, self.outer, self.inner)
        corner = core.double().square().sum((0, 3)).cumsum(0).cumsum(1)  # [a, b]: energy of ranks up to (a, b)
        total = float(corner[-1, -1])
        self.shares = corner / total if total > 0.0 else torch.ones_like(corner)

    def rungs(self) -> list[Rung]:
        shares: list[list[float]] = self.shares.tolist()  # one trip from the device
        most_out, most_in = len(shares), len(shares[0])
        ranks, path = (1, 1), list[Rung]()
        while (cost := tucker_cost(self.shape, *ranks)) < self.dense:
            here = shares[ranks[0] - 1][ranks[1] - 1]
            path.append(Rung(ranks, cost, min(here, 1.0)))
            steps = [(a, b) for a, b in ((ranks[0] + 1, ranks[1]), (ranks[0], ranks[1] + 1)) if a <= most_out and b <= most_in]
            if not steps:
                break
            ranks = max(steps, key=lambda s: (shares[s[0] - 1][s[1] - 1] - here) / (tucker_cost(self.shape, *s) - cost))
        return path

    def at(self, rank: int) -> Rung:
        a, b = min(rank, self.shares.shape[0]), min(rank, self.shares.shape[1])
        return Rung((a, b), tucker_cost(self.shape, a, b), min(float(self.shares[a - 1, b - 1]), 1.0))

    def build(self, ranks: tuple[int, ...]) -> Built:
        outer, inner, core = hooi(self.weight, self.outer[:, :, : ranks[0]], self.inner[:, :, : ranks[1]])
        total = float(self.weight.double().square().sum())
        energy = min(1.0, float(core.double().square().sum()) / total) if total > 0.0 else 1.0
        shape, layer = self.shape, self.layer
        first = inner.mT.reshape(-1, shape.columns, 1, 1)  # [groups·b, i, 1, 1]
        middle = core.reshape(-1, ranks[1], shape.height, shape.width)  # [groups·a, b, kh, kw]
        last = outer.reshape(-1, ranks[0], 1, 1)  # [groups·o, a, 1, 1]
        pieces = (conv_piece(layer, first, shape.groups), conv_piece(layer, middle, shape.groups, axes="hw"))
        return Built(sequence(layer, *pieces, conv_piece(layer, last, shape.groups, bias=layer.bias)), energy)


def tucker_cost(shape: Shape, rank_out: int, rank_in: int) -> int:
    """Of the three pieces: the first runs at the input's positions, the others at the output's."""
    at_input, _, at_output = shape.positions
    after = rank_in * rank_out * shape.kernel + rank_out * shape.rows
    return shape.groups * (shape.columns * rank_in * at_input + after * at_output)


def leading(unfolded: Tensor) -> Tensor:
    """Left singular vectors, largest first: [groups, m, min(m, n)]."""
    left: Tensor = torch.linalg.svd(unfolded, full_matrices=False)[0]
    return left


def project(weight: Tensor, outer: Tensor, inner: Tensor) -> Tensor:
    """The core [groups, a, b, k] of a weight [groups, o, i, k] in these two bases."""
    return torch.einsum("goik,goa,gib->gabk", weight, outer, inner)


def hooi(weight: Tensor, outer: Tensor, inner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Better bases of the same ranks, and the core in them; the energy never falls."""
    core = project(weight, outer, inner)
    energy = float(core.double().square().sum())
    for _ in range(SWEEPS):
        new_outer = leading(torch.einsum("goik,gib->gobk", weight, inner).flatten(2))[:, :, : outer.shape[2]]
        if new_outer.shape[2] < outer.shape[2]:  # a rank above i·kh·kw of the other side: nothing to gain
            break
        new_inner = leading(torch.einsum("goik,goa->giak", weight, new_outer).flatten(2))[:, :, : inner.shape[2]]
        if new_inner.shape[2] < inner.shape[2]:
            break
        new_core = project(weight, new_outer, new_inner)
        new_energy = float(new_core.double().square().sum())
        if new_energy <= energy * (1.0 + SETTLED):
            break
        outer, inner, core, energy = new_outer, new_inner, new_core, new_energy
    return outer, inner, core
