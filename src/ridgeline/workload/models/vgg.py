"""VGG-16 with torchvision's layer names.

    image [B,3,224,224] ─13 convs 3x3, 5 pools/2─> [B,512,7,7] ─4096, 4096, 1000─> [B,1000]

torchvision's adaptive pooling before the classifier is left out: at 224x224 it copies [B,512,7,7] onto itself.
Ref: Simonyan 2014, configuration D.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import Example

WIDTHS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))  # a pool after each group


def build(name: str, example: Example) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The module and one batch of images."""
    return VGG(), (torch.randn(example.batch, 3, 224, 224),), {}


class VGG(nn.Module):
    """Thirteen convolutions and three linears."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for group in WIDTHS:
            for width in group:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5),
            nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5),
            nn.Linear(4096, 1000),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(x).flatten(1))
        return scores
