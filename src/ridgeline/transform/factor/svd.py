"""Low rank by singular values: a linear layer becomes two, a convolution a kxk to few channels and a 1x1 back.

    W [m,n] ──> B [m,r] · A [r,n]        Linear(n,m) ──> Linear(n,r, no bias), Linear(r,m)      saves where r·(m+n) < m·n
      U Σ Vᵀ = W          A = U_rᵀ W, B = U_r         ‖W − BA‖² = Σ discarded σ²       (Eckart & Young 1936)

    activation-aware: with X the inputs the layer meets and L Lᵀ = XᵀX / count (Cholesky), what counts is the output's error
      ‖X (W − BA)ᵀ‖² / count = ‖(W − BA) L‖²          U Σ Vᵀ = W L,  A = U_rᵀ W, B = U_r     error² = Σ discarded σ²
      the best rank-r matrix for these inputs. Ref: whitening of SVD-LLM (Wang 2024), scaling of ASVD (Yuan 2023).

U_r U_rᵀ W equals the textbook U_r Σ_r V_rᵀ L⁻¹ without the inverse. A and B are balanced, so that row j of A and column j of B
have one norm. Groups of a convolution are factored one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...core.errors import TransformError
from .layers import Factorable, conv_piece, linear_piece, sequence, shape_of, weight_of
from .ranks import Built, Plan, Rung, energy_shares, largest_saving_rank

DAMPING = 1e-9  # of the mean of the moment's diagonal: inputs that never vary leave it singular


class SvdPlan(Plan):
    """Singular values of one layer, weighted by its inputs' second moment [groups, n, n] where given."""

    def __init__(self, layer: Factorable, positions: tuple[int, int, int] = (1, 1, 1), moment: Tensor | None = None) -> None:
        self.layer, self.shape = layer, shape_of(layer, positions)
        self.dense = self.shape.dense
        self.matrix = weight_of(layer).flatten(2)  # [groups, m, n]
        root = None if moment is None else cholesky_root(moment.to(self.matrix))
        weighted = self.matrix if root is None else self.matrix @ root
        self.left, singular, _ = torch.linalg.svd(weighted, full_matrices=False)  # [groups, m, k], [groups, k]
        self.shares = energy_shares(singular.double().square().sum(0))

    def rungs(self) -> list[Rung]:
        most = min(largest_saving_rank(*self.matrix.shape[1:]), len(self.shares))
        return [self.at(rank) for rank in range(1, most + 1)]

    def at(self, rank: int) -> Rung:
        rank = min(rank, len(self.shares))
        groups, rows, columns = self.matrix.shape
        return Rung((rank,), groups * rank * (rows + columns) * self.shape.positions[2], self.shares[rank - 1])

    def build(self, ranks: tuple[int, ...]) -> Built:
        rank = ranks[0]
        left = self.left[:, :, :rank]
        right = left.mT @ self.matrix  # [groups, r, n]
        scale = right.norm(dim=2).sqrt()  # [groups, r]: √σ of a plain SVD
        left, right = left * scale[:, None], right / scale.clamp(min=1e-30)[:, :, None]
        return Built(self._pieces(left, right), self.shares[rank - 1])

    def _pieces(self, left: Tensor, right: Tensor) -> nn.Sequential:
        layer = self.layer
        if isinstance(layer, nn.Linear):
            return sequence(layer, linear_piece(layer, right[0], None), linear_piece(layer, left[0], layer.bias))
        shape = self.shape
        first = right.reshape(-1, shape.columns, shape.height, shape.width)  # [groups·r, in/groups, kh, kw]
        last = left.reshape(-1, left.shape[2], 1, 1)  # [out, r, 1, 1]
        return sequence(layer, conv_piece(layer, first, shape.groups, axes="hw"), conv_piece(layer, last, shape.groups, bias=layer.bias))


def cholesky_root(moment: Tensor) -> Tensor:
    """The lower triangular L of L Lᵀ = moment [groups, n, n], damped just enough to exist."""
    if not torch.isfinite(moment).all():
        raise TransformError("a second moment that is not finite", why="the calibration inputs hold NaN or overflow", do="check the data")
    size = moment.shape[-1]
    mean = moment.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(moment.dtype).tiny)
    damping = DAMPING
    while damping < 1.0:
        root: Tensor
        root, failed = torch.linalg.cholesky_ex(moment + (damping * mean)[:, None, None] * torch.eye(size).to(moment))
        if not failed.any():
            return root
        damping *= 10.0
    raise TransformError("a second moment that is not positive", why="it has negative eigenvalues", do="calibrate with more inputs")
