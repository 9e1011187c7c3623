"""Masks that hold while a model trains, and true zeros when they are gone.

    Masks(model, {name: bool}) ──apply──> weight[pruned] = +0.0            after every optimiser step: train.fit(after_step=masks)
                               ──close──> applied once more, forgotten     nothing is left in the model but zeros

The optimiser may keep momentum for a pruned weight and push it off zero at each step; the hook sets it back before the next
forward pass, so it never takes part again. Masks are boolean, one byte a weight, and follow their weights to another device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import TransformError, nearest


class Masks:
    """The pruned places of some parameters of a model; True = pruned."""

    def __init__(self, model: nn.Module, pruned: Mapping[str, Tensor]) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self.pruned: dict[str, Tensor] = {}
        known = dict(model.named_parameters(remove_duplicate=False))
        for name in pruned:
            if name not in known:
                close = nearest(name, known)
                raise TransformError(
                    f"a mask for {name!r}", why="the model has no such parameter", do=f"did you mean {', '.join(close) or 'another model'}?"
                )
            self.parameters[name] = known[name]
        self.update(pruned)

    def update(self, pruned: Mapping[str, Tensor]) -> None:
        """Take new masks for known parameters and apply them."""
        for name, mask in pruned.items():
            if mask.dtype != torch.bool or mask.shape != self.parameters[name].shape:
                raise TransformError(
                    f"mask of {name}: {mask.dtype} {tuple(mask.shape)}",
                    why=f"it must be torch.bool of the weight's shape {tuple(self.parameters[name].shape)}",
                    do="give True where a weight is pruned",
                )
            self.pruned[name] = mask.to(self.parameters[name].device)
        self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        """Zero the pruned weights: +0.0 whatever stood there, NaN too (a product with the mask would leave NaN, and −0.0)."""
        for name, mask in self.pruned.items():
            parameter = self.parameters[name]
            if mask.device != parameter.device:
                mask = self.pruned[name] = mask.to(parameter.device)
            parameter.masked_fill_(mask, 0.0)

    def __call__(self, model: Any = None, step: int | None = None) -> None:
        """The hook of train.fit."""
        self.apply()

    def close(self) -> None:
        """Apply a last time and forget the model."""
        self.apply()
        self.parameters.clear()
        self.pruned.clear()

    @property
    def sparsity(self) -> float:
        """Share of the masked parameters' weights that are pruned."""
        total = sum(mask.numel() for mask in self.pruned.values())
        return sum(int(mask.sum()) for mask in self.pruned.values()) / total if total else 0.0

    def rows(self) -> list[dict[str, Any]]:
        """One JSON-ready row a layer: weights and how many are pruned."""
        return [{"layer": name, "weights": mask.numel(), "pruned": int(mask.sum())} for name, mask in self.pruned.items()]
