"""Residual networks for 32x32 images in any width and depth: what a found network is held against.

    image [B,3,32,32] ─conv 3x3─> [B,stem,32,32] ─stage 1─> [B,w1,32,32] ─stage 2─> [B,w2,16,16] ─ … ─norm, relu, mean, linear─> [B,classes]
    block: x + conv2(relu(norm2(conv1(relu(norm1 x)))))      where the width or the size changes: 1x1 conv(relu(norm1 x)) + …

    wrn-D-K      three stages of 16K, 32K, 64K channels, (D - 4) / 6 blocks each, stem 16: wrn-28-10 has 36.5 million parameters
    resnet18     four stages of 64, 128, 256, 512 channels, 2 blocks each, stem 64: 11.2 million;  resnet18-w48: 48, 96, 192, 384

Norms come first ("pre-activation") in both. Ref: He 2016 (Identity mappings), Zagoruyko 2016 (Wide residual networks, without dropout).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor, nn

from ...core.errors import OptionError

CLASSES = 10
FAMILIES = "wrn-<depth>-<width> (wrn-16-4, wrn-28-10), resnet18, resnet34, resnet18-w<channels>"
BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}


class PreBlock(nn.Module):
    """Norm, relu, convolution, twice, beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        same = stride == 1 and channels == width
        self.shortcut = None if same else nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        ready = self.relu1(self.norm1(x))
        beside = x if self.shortcut is None else self.shortcut(ready)
        out: Tensor = self.conv2(self.relu2(self.norm2(self.conv1(ready)))) + beside
        return out


class WideResNet(nn.Module):
    """Stages of blocks; every stage but the first halves the image."""

    def __init__(self, widths: Sequence[int], blocks: Sequence[int], stem: int, classes: int = CLASSES) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, stem, 3, padding=1, bias=False)
        stages, channels = [], stem
        for place, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            first = PreBlock(channels, width, 1 if place == 0 else 2)
            stages.append(nn.Sequential(first, *(PreBlock(width, width, 1) for _ in range(count - 1))))
            channels = width
        self.stages = nn.Sequential(*stages)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu(self.norm(self.stages(self.conv(x)))))
        scores: Tensor = self.linear(x.flatten(1))
        return scores


def wide_resnet(depth: int, width: int, classes: int = CLASSES) -> WideResNet:
    """WRN-depth-width."""
    if depth < 10 or (depth - 4) % 6 or width < 1:
        raise OptionError(f"wrn-{depth}-{width}", why="a depth is 6n + 4 with n >= 1, a width at least 1", do="e.g. wrn-16-4 or wrn-28-10")
    count = (depth - 4) // 6
    return WideResNet((16 * width, 32 * width, 64 * width), (count,) * 3, 16, classes)


def hand_made(name: str, classes: int = CLASSES) -> WideResNet:
    """A network by its name; see above."""
    if wide := re.fullmatch(r"wrn-(\d{1,4})-(\d{1,4})", name):
        return wide_resnet(int(wide[1]), int(wide[2]), classes)
    if (plain := re.fullmatch(r"(resnet18|resnet34)(?:-w(\d{1,5}))?", name)) and (plain[2] is None or int(plain[2]) > 0):
        width = int(plain[2] or 64)
        return WideResNet(tuple(width << stage for stage in range(4)), BLOCKS[plain[1]], width, classes)
    raise OptionError(f"no hand-made network {name!r}", why=f"there are {FAMILIES}", do="give one of these names")
