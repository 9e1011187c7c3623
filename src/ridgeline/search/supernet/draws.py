"""What `sample` drew: one op an edge, on the host, and the same as a tensor for a graph that is the same for every draw.

    make_draw(weights known to the host, seed, number) ──> Draw(noise, columns)      Gumbel-max; counter-based: no state but the number
      one path    Supernet(x, Draw)                      kernels of the drawn ops only, other kernels for every draw
      masked      packed([Draw, …]) ──one copy──> [passes, 2, edges, ops] ──> Supernet(x, its slice)
                  kernels of all ops; flag and gain of an op that was not drawn are an exact 0, its Triton kernels write zeros and return

Both forms give the same loss and the same gradients but for rounding; those of weights of ops that were not drawn are zeros in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .layout import Active

Values = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Draw:
    noise: Values
    """[edges, ops], Gumbel."""
    columns: tuple[int, ...]
    """Of each edge, the op."""

    @property
    def active(self) -> Active:
        return tuple((column,) for column in self.columns)

    def noise_like(self, weights: Tensor) -> Tensor:
        """On the weights' device; pinned and asynchronous on CUDA."""
        here = torch.from_numpy(self.noise).to(weights.dtype)
        return (here.pin_memory() if weights.is_cuda else here).to(weights.device, non_blocking=True)


def make_draw(known: Values, seed: int, number: int) -> Draw:
    random = np.random.Generator(np.random.Philox(key=seed, counter=number))
    noise: Values = np.asarray(random.gumbel(size=known.shape))
    return Draw(noise, tuple(int(column) for column in (known + noise).argmax(axis=1)))


def packed(draws: Sequence[Draw], weights: Tensor) -> Tensor:
    """[passes, (1 where drawn, noise), edges, ops] on the host, pinned where the weights are on CUDA: fresh each time, since the copy of
    the one before may still be under way."""
    values = np.stack([np.stack((np.eye(one.noise.shape[1])[list(one.columns)], one.noise)) for one in draws])
    here = torch.from_numpy(values).to(weights.dtype)
    return here.pin_memory() if weights.is_cuda else here
