"""Whether weights are finite, seen without making the host wait for the device.

    eval       programming looks at once, and waits: OptionError before anything is computed
    training   a kernel sets a flag on the device; every EVERY passes it is copied to the host behind the work already queued, and a pass
               that finds such a copy done and set raises the same OptionError

Until then nothing of it looks like a number: steps and values of a block with such a weight are nan, so are the products, the loss and the
gradients. Plain torch, on a CPU, looks at once in training too.
Training passes cannot be captured as a CUDA graph: as nothing waits, torch would not say so, so it is said here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.errors import OptionError

EVERY = 16  # passes: a copy and an event are some 10 µs of host time


def not_finite() -> OptionError:
    return OptionError("a weight that is not finite", why="no digit stands for inf or nan", do="look for an overflow in training")


def captured(device: torch.device) -> bool:
    """Whether what is launched now is recorded in a graph instead of run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class WeightCheck:
    """Of one product's training passes."""

    def __init__(self) -> None:
        self._flag: Tensor | None = None
        self._copy: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._passes = 0

    def flag(self, device: torch.device) -> Tensor:
        """int32 (1,): where a kernel says that a weight was not finite; it stays said."""
        if self._flag is None or self._flag.device != device:
            self._flag, self._copy = torch.zeros(1, dtype=torch.int32, device=device), None
        return self._flag

    def look(self, device: torch.device) -> None:
        """Before a pass: raises if a copy that has arrived says so; never waits."""
        if captured(device):
            raise OptionError(
                "training on chips in a CUDA graph", why="every replay would be on the chip that was captured", do="train with graph=False"
            )
        if self._copy is None or (self._copied is not None and not self._copied.query()):
            return
        said = bool(self._copy)
        self._copy = None
        if said:
            self._flag, self._passes = None, 0  # weights that were repaired train on
            raise not_finite()

    def written(self) -> None:
        """To be called when a pass has queued its kernels: now and then the flag sets out for the host."""
        if self._flag is not None and self._copy is None and self._passes % EVERY == 0:
            if self._flag.is_cuda:
                self._copy = torch.empty(1, dtype=torch.int32, pin_memory=True)
                self._copy.copy_(self._flag, non_blocking=True)
                self._copied = torch.cuda.Event()
                self._copied.record()
            else:
                self._copy, self._copied = self._flag.clone(), None
        self._passes += 1
