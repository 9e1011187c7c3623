"""A data set a small network learns in seconds: a class is a pattern, an image is its pattern and noise."""

from __future__ import annotations

import torch

from ridgeline.workload.data import Data, Split


def toy_data(rows: int = 256, classes: int = 4, size: int = 8, noise: float = 0.7, seed: int = 0) -> Data:
    random = torch.Generator().manual_seed(seed)
    patterns = torch.randn(classes, 3, size, size, generator=random)
    parts = []
    for count in (rows, rows // 4):
        targets = torch.randint(classes, (count,), generator=random)
        parts.append(Split(patterns[targets] + noise * torch.randn(count, 3, size, size, generator=random), targets))
    return Data("toy", "image", classes, *parts)
