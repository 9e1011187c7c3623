"""A data set and a net small enough to train in a test, made on the spot."""

from __future__ import annotations

import torch
from torch import nn

from ridgeline.workload.data import Data, Split


def data(rows: int = 256, seed: int = 0) -> Data:
    """Two classes of 1x4x4 images, told apart by the sign of their first half."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 1, 4, 4, generator=generator)
    targets = (inputs[:, 0, :2].sum((1, 2)) > 0).long()
    half = rows // 2
    return Data("toy", "image", 2, Split(inputs[:half], targets[:half]), Split(inputs[half:], targets[half:]))


def net(width: int = 32) -> nn.Sequential:
    """Convolution, linear, linear; all of known kinds."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, width), nn.ReLU(), nn.Linear(width, 2)
    ).eval()
