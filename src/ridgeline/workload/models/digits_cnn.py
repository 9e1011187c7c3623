"""A small convolutional network for 8x8 digits: trained in seconds on a CPU, for demonstrations and tests.

    image [B,1,8,8] ─conv1, bn1, relu─> [B,16,8,8] ─conv2, bn2, relu, pool/2─> [B,32,4,4] ─conv3, bn3, relu, pool/2─> [B,32,2,2]
      ─flatten─> [B,128] ─fc1, relu─> [B,48] ─fc2─> [B,10]

Our own; not a published model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import Example


def build(name: str, example: Example) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The module and one batch of images."""
    return DigitsCNN(), (torch.randn(example.batch, 1, 8, 8),), {}


class DigitsCNN(nn.Module):
    """Three convolutions and two linears."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(32)
        self.relu2 = nn.ReLU(inplace=True)
        self.pool2 = nn.MaxPool2d(2)
        self.conv3 = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(32)
        self.relu3 = nn.ReLU(inplace=True)
        self.pool3 = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(128, 48)
        self.relu4 = nn.ReLU(inplace=True)
        self.fc2 = nn.Linear(48, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.bn1(self.conv1(x)))
        x = self.pool2(self.relu2(self.bn2(self.conv2(x))))
        x = self.pool3(self.relu3(self.bn3(self.conv3(x))))
        scores: Tensor = self.fc2(self.relu4(self.fc1(x.flatten(1))))
        return scores
