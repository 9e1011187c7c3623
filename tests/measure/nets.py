"""Small models with known properties, for the tests of this room."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

SLOW_S = 0.02


class Convolutional(nn.Module):
    """A few ops of different kinds, large enough that arithmetic outweighs Python."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.second = nn.Conv2d(32, 32, 3, padding=1)
        self.head = nn.Linear(32, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(image)))
        hidden = torch.relu(self.second(hidden))
        return self.head(hidden.mean((2, 3)))


class Blocks(nn.Module):
    """Keyword inputs, a constant input, an in-place buffer, and blocks under no_grad and autocast that export nests."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("offset", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, times: int = 2) -> dict[str, torch.Tensor]:
        self.count.add_(1)
        with torch.no_grad():
            x = x + torch.ones(8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
        first, second = y.float().split(4, 1)
        return {"first": first * scale * times, "second": second + self.offset}


class Branching(nn.Module):
    """Cannot be exported: which ops run depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.sum() > 1e9:
            y = y + 1
        return self.linear(y).relu()


class Pointwise(nn.Module):
    """Three results of the input's size, two alive at once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu().exp().neg()


class Tokens(nn.Module):
    """A language model in miniature: ids [B, T] to scores [B, T, V]."""

    def __init__(self, vocabulary: int = 50) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 16)
        self.head = nn.Linear(16, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


@torch.library.custom_op("ridgeline_tests::slow", mutates_args=())
def slow(x: torch.Tensor) -> torch.Tensor:
    """An op that takes SLOW_S whatever its input."""
    time.sleep(SLOW_S)
    return x.clone()


@slow.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Planted(nn.Module):
    """Two quick ops around a slow one, and Python time that no op holds."""

    def __init__(self, python_s: float = 0.0) -> None:
        super().__init__()
        self.python_s = python_s

    def forward(self, x: torch.Tensor) -> Any:
        time.sleep(self.python_s)
        return torch.ops.ridgeline_tests.slow(x.relu()).neg()
