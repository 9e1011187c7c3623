"""Dropout of skip connections while a supernet trains, so that other ops get to learn before skips make the race.

shares [edges, ops] ──skip columns · mask / (1 - p), mask drawn for each edge from (seed, step) on the host──> shares

Whole edges are dropped, for a whole batch: the mean over steps is the plain share. Derivation reads the weights, not these shares.
Ref: Chen 2019 (P-DARTS), who drop single elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...train.seeds import mix
from ..supernet.architecture import Architecture
from ..supernet.network import Supernet
from .derive import SKIPS

STREAM = 105


class DroppedSkips(Architecture):
    """An architecture that takes over another's parameters; `draw` before every step."""

    gain: Tensor

    def __init__(self, given: Architecture, columns: Sequence[int], share: float, seed: int) -> None:
        super().__init__(*given.weights.shape)
        self.weights, self.edge_weights = given.weights, given.edge_weights
        self.same_target, self.temperature = given.same_target, given.temperature
        self.columns, self.share, self.seed = list(columns), share, seed
        self.register_buffer("gain", torch.ones_like(given.weights, requires_grad=False), persistent=False)

    def draw(self, step: int) -> None:
        """New masks; a small copy from the host that does not wait for the device."""
        random = torch.Generator().manual_seed(mix(self.seed, STREAM, step))
        gain = torch.ones(self.weights.shape)
        gain[:, self.columns] = (torch.rand(len(gain), len(self.columns), generator=random) >= self.share) / (1 - self.share)
        self.gain.copy_(gain.pin_memory() if self.gain.is_cuda else gain, non_blocking=True)

    def shares(
        self, temperature: float | Tensor | None = None, hard: bool = False, generator: torch.Generator | None = None, *,
        noise: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return super().shares(temperature, hard, generator, noise=noise) * self.gain


def drop_skips_(supernet: Supernet, share: float, seed: int) -> DroppedSkips:
    """Set the dropout into a supernet; `sample` runs one op an edge and has no skips to drop beside others."""
    columns = [column for column, name in enumerate(supernet.ops) if name in SKIPS]
    made = DroppedSkips(supernet.architecture, columns, share, seed)
    supernet.architecture = made
    return made
