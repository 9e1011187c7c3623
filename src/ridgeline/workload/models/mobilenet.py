"""MobileNetV2 with torchvision's layer names.

    image [B,3,224,224] ─conv 3x3/2─> [B,32,112,112] ─17 inverted residuals─> [B,320,7,7] ─conv 1x1─> [B,1280,7,7] ─pool, linear─> [B,1000]
      inverted residual: 1x1 up `expand` times, 3x3 depthwise, 1x1 down without activation; a shortcut where shapes allow

Ref: Sandler 2018.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import Example

STAGES = (  # expand, channels, blocks, stride of the first block
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def build(name: str, example: Example) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The module and one batch of images."""
    return MobileNetV2(), (torch.randn(example.batch, 3, 224, 224),), {}


def _conv(channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out_channels, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU6(inplace=True),
    )


class InvertedResidual(nn.Module):
    """Expand, filter each channel, project."""

    def __init__(self, channels: int, out_channels: int, stride: int, expand: int) -> None:
        super().__init__()
        width = channels * expand
        self.shortcut = stride == 1 and channels == out_channels
        self.conv = nn.Sequential(
            *([_conv(channels, width, 1)] if expand > 1 else []),
            _conv(width, width, 3, stride, groups=width),
            nn.Conv2d(width, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return x + out if self.shortcut else out


class MobileNetV2(nn.Module):
    """Width multiplier 1."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv(3, 32, 3, stride=2)]
        channels = 32
        for expand, out_channels, blocks, stride in STAGES:
            for block in range(blocks):
                layers.append(InvertedResidual(channels, out_channels, stride if block == 0 else 1, expand))
                channels = out_channels
        layers.append(_conv(channels, 1280, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.classifier(functional.adaptive_avg_pool2d(self.features(x), 1).flatten(1))
        return scores
