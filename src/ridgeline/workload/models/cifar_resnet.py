"""ResNet for 32x32 images, 6n+2 layers, whose shortcuts have no parameters.

    image [B,3,32,32] ─conv1 3x3, bn1, relu─> [B,16,32,32] ─layer1─> [B,16,32,32] ─layer2─> [B,32,16,16] ─layer3─> [B,64,8,8]
      ─avgpool─> [B,64] ─linear─> [B,10]
    block: relu(bn2(conv2(relu(bn1(conv1 x)))) + shortcut x)

Where a block halves the image and doubles the width, its shortcut takes every second pixel and adds channels of zeros on both
sides (option A). Layer names are those of the published weights (conv1, bn1, layer1.0.conv1, …, linear). Initial weights are
normal with variance 2 / fan-in. Ref: He 2015 (Deep residual learning, section 4.2; Delving deep into rectifiers).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import Example

BLOCKS = {"resnet20": 3, "resnet56": 9}  # blocks in each of the three layers
CLASSES = 10


def build(name: str, example: Example) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The module and one batch of images."""
    return CifarResNet(BLOCKS[name]), (torch.randn(example.batch, 3, 32, 32),), {}


class PadShortcut(nn.Module):
    """Every second pixel, with channels of zeros added half before and half after."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.before = (out_channels - channels) // 2
        self.after = out_channels - channels - self.before
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU(inplace=True)  # of its own, so that a hook on a layer sees one place of the network
        same = stride == 1 and channels == width
        self.shortcut: nn.Module = nn.Identity() if same else PadShortcut(channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu1(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        out = self.relu2(out)
        return out


class CifarResNet(nn.Module):
    """`blocks` blocks in each of three layers, halving the image and doubling the width between them."""

    def __init__(self, blocks: int, classes: int = CLASSES) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = self._layer(16, 16, blocks, stride=1)
        self.layer2 = self._layer(16, 32, blocks, stride=2)
        self.layer3 = self._layer(32, 64, blocks, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def _layer(self, channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
        return nn.Sequential(Block(channels, width, stride), *(Block(width, width, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        scores: Tensor = self.linear(self.avgpool(x).flatten(1))
        return scores
