"""Networks small enough to be mapped in a moment, as `tiny_net.py:build` on the command line."""

from __future__ import annotations

import torch
from torch import nn


def build() -> tuple[nn.Module, torch.Tensor]:
    """Two convolutions with activations, a pool that no array runs, a linear layer."""
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2, 1, 1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 3)), torch.randn(1, 2, 4, 4)


def attention() -> tuple[nn.Module, torch.Tensor]:
    """One op of two products."""

    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x)

    return Net(), torch.randn(1, 2, 4, 8)
