"""What the host knows of a small tensor on a device, without waiting for it.

    HostCopy(lag).of(weights): CPU ──> the values now
                               CUDA ──> starts a copy into pinned memory and gives the values of `lag` calls ago

The delay is a fixed number of calls, not of milliseconds: a run is the same each time. Until there are enough copies, the first values.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor


class HostCopy:
    """With a lag of 2 the device may be a whole pass behind without the host waiting."""

    def __init__(self, lag: int = 2) -> None:
        self.lag = lag
        self.copies: deque[tuple[Tensor, Any]] = deque()

    def of(self, weights: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
        weights = weights.detach()
        if not weights.is_cuda:
            return weights.double().numpy().copy()
        here = torch.empty(weights.shape, dtype=weights.dtype, pin_memory=True)
        here.copy_(weights, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self.copies.append((here, done))
        if len(self.copies) > self.lag + 1:
            self.copies.popleft()
        oldest, done = self.copies[0]
        done.synchronize()
        values: np.ndarray[Any, np.dtype[np.float64]] = oldest.double().numpy().copy()
        return values
