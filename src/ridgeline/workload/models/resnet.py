"""ResNet with torchvision's layer names.

    image [B,3,224,224] ─conv1 7x7/2, bn1, relu, maxpool/2─> [B,64,56,56] ─layer1..layer4─> [B,512e,7,7] ─avgpool, fc─> [B,1000]
      e = 1 for basic blocks (two 3x3), 4 for bottlenecks (1x1, 3x3, 1x1)

A bottleneck's stride sits in its 3x3 convolution, as torchvision has it, not in the first 1x1. Ref: He 2015.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import Example

BLOCKS: dict[str, tuple[bool, tuple[int, int, int, int]]] = {  # bottleneck?, blocks in each layer
    "resnet18": (False, (2, 2, 2, 2)),
    "resnet34": (False, (3, 4, 6, 3)),
    "resnet50": (True, (3, 4, 6, 3)),
    "resnet101": (True, (3, 4, 23, 3)),
}


def build(name: str, example: Example) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The module and one batch of images."""
    bottleneck, blocks = BLOCKS[name]
    return ResNet(bottleneck, blocks), (torch.randn(example.batch, 3, 224, 224),), {}


def _downsample(channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and channels == out_channels:
        return None
    return nn.Sequential(nn.Conv2d(channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _downsample(channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        out = self.relu(out)
        return out


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up to four times the width, and a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(channels, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        out = self.relu(out)
        return out


class ResNet(nn.Module):
    """`blocks` residual blocks in each of four layers, halving the image and doubling the width between them."""

    def __init__(self, bottleneck: bool, blocks: tuple[int, int, int, int]) -> None:
        super().__init__()
        self.bottleneck = bottleneck
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        expansion = 4 if bottleneck else 1
        self.layer1 = self._layer(64, 64, blocks[0], stride=1)
        self.layer2 = self._layer(64 * expansion, 128, blocks[1], stride=2)
        self.layer3 = self._layer(128 * expansion, 256, blocks[2], stride=2)
        self.layer4 = self._layer(256 * expansion, 512, blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * expansion, 1000)

    def _layer(self, channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
        block, out_channels = (Bottleneck, 4 * width) if self.bottleneck else (BasicBlock, width)
        return nn.Sequential(block(channels, width, stride), *(block(out_channels, width, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: Tensor = self.fc(self.avgpool(x).flatten(1))
        return scores
