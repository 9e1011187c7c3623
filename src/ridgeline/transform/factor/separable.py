"""Convolution to depthwise-separable: a kxk of its own for each input channel, then a 1x1 that mixes them.

    y_o = Σ_i P[o,i] · (D_i ∗ x_i)        so the dense weight it stands for is W'[o,i,:] = P[o,i] · D[i,:]
      for each input channel i the slice W[:,i,:] is an [out, kh·kw] matrix; the best P[:,i] D[i,:] is its first singular pair:
      u₁ σ₁ v₁ᵀ, and ‖W − W'‖² = Σ_i Σ_{j>1} σ_ij²     (Eckart & Young 1936, slice by slice)
    With m kernels a channel (the depth multiplier) the first m pairs are kept: rank m.

    Conv(i,o,kxk) ──> depthwise Conv(i, i·m, kxk), Conv(i·m, o, 1x1)                         i·m·(kh·kw + o) weights

A start, not an end: one kernel a channel keeps less than half of most trained 3x3's energy. step.py trains the pair against the
original layer's outputs and the original model's logits. Ref: Guo 2018 (pointwise and depthwise terms of a convolution).
"""

from __future__ import annotations

import torch
from torch import nn

from .layers import conv_piece, sequence, shape_of, weight_of
from .ranks import Built, Plan, Rung, energy_shares


class SeparablePlan(Plan):
    """The singular pairs of each input channel's slice; the rank is the depth multiplier."""

    def __init__(self, layer: nn.Conv2d, positions: tuple[int, int, int] = (1, 1, 1)) -> None:
        self.layer, self.shape = layer, shape_of(layer, positions)
        self.dense = self.shape.dense
        slices = weight_of(layer).flatten(3).transpose(1, 2)  # [groups, i, o, kh·kw]
        self.left, self.singular, self.right = torch.linalg.svd(slices, full_matrices=False)
        self.shares = energy_shares(self.singular.double().square().sum((0, 1)))

    def rungs(self) -> list[Rung]:
        each = (self.at(multiplier) for multiplier in range(1, len(self.shares) + 1))
        return [rung for rung in each if rung.cost < self.dense]

    def at(self, rank: int) -> Rung:
        rank, shape = min(rank, len(self.shares)), self.shape
        cost = shape.groups * shape.columns * rank * (shape.kernel + shape.rows) * shape.positions[2]
        return Rung((rank,), cost, self.shares[rank - 1])

    def build(self, ranks: tuple[int, ...]) -> Built:
        multiplier, layer, shape = ranks[0], self.layer, self.shape
        scale = self.singular[:, :, :multiplier].sqrt()  # [groups, i, m]
        kernels = self.right[:, :, :multiplier] * scale.unsqueeze(3)  # [groups, i, m, kh·kw]
        mixes = self.left[:, :, :, :multiplier] * scale.unsqueeze(2)  # [groups, i, o, m]
        depthwise = kernels.reshape(-1, 1, shape.height, shape.width)  # [in·m, 1, kh, kw]
        pointwise = mixes.permute(0, 2, 1, 3).reshape(shape.groups * shape.rows, -1, 1, 1)  # [out, i·m, 1, 1]
        pieces = (
            conv_piece(layer, depthwise, layer.in_channels, axes="hw"),
            conv_piece(layer, pointwise, shape.groups, bias=layer.bias),
        )
        return Built(sequence(layer, *pieces), self.shares[multiplier - 1])
