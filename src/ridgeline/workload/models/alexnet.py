"""AlexNet as published in 2012: two towers, written as grouped convolutions, with local response normalisation.

    image [B,3,227,227] ─conv 11x11/4, relu, norm, pool/2─> [B,96,27,27] ─conv 5x5 g2, relu, norm, pool/2─> [B,256,13,13]
      ─conv 3x3─> [B,384,13,13] ─conv 3x3 g2─> [B,384,13,13] ─conv 3x3 g2, pool/2─> [B,256,6,6] ─4096, 4096, 1000─> [B,1000]

Not torchvision's `alexnet`, which is the one-tower network of 2014. torch's local response norm does not run in
16-bit floats on the CPU (it can be captured in them). Ref: Krizhevsky 2012.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import Example


def build(name: str, example: Example) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The module and one batch of images."""
    return AlexNet(), (torch.randn(example.batch, 3, 227, 227),), {}


def _norm() -> nn.LocalResponseNorm:
    # The paper scales the sum over 5 channels by 1e-4; torch scales their mean, so its alpha is 5 times that.
    return nn.LocalResponseNorm(5, alpha=5e-4, beta=0.75, k=2.0)


class AlexNet(nn.Module):
    """Five convolutions and three linears."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 96, 11, stride=4), nn.ReLU(inplace=True), _norm(), nn.MaxPool2d(3, 2),
            nn.Conv2d(96, 256, 5, padding=2, groups=2), nn.ReLU(inplace=True), _norm(), nn.MaxPool2d(3, 2),
            nn.Conv2d(256, 384, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(384, 384, 3, padding=1, groups=2), nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1, groups=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Dropout(0.5), nn.Linear(256 * 6 * 6, 4096), nn.ReLU(inplace=True),
            nn.Dropout(0.5), nn.Linear(4096, 4096), nn.ReLU(inplace=True),
            nn.Linear(4096, 1000),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(x).flatten(1))
        return scores
