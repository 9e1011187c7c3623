"""Kernels of one stream that overlap: the next one starts, and reads what cannot change, while the one before it ends.

    with weights_are_still():            kernels that know how are launched with **early(device)
      begin(EARLY)   the next kernel may be started as soon as there is room for it
      …              reads of weights only
      wait(EARLY)    until everything queued before has ended and is visible; before any other read and before every write

Between two kernels a GPU is idle for a microsecond or two; one layer of a decoder is eight kernels of 2 to 30 µs. Programmatic
dependent launch, from Hopper on; elsewhere, interpreted, and outside the context nothing changes. A kernel that is launched without
it waits for all before it, as always, so both sorts mix. It is kept in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from .jit import INTERPRETED, jit, tl

_still = False


@jit
def begin(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """The next kernel may start."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def wait(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Until the kernels before have ended."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@contextmanager
def weights_are_still() -> Iterator[None]:
    """Inside, nothing that is queued writes the weights of a gemv, so that it may read them before that work has ended.

    True of a model that generates. After weights were loaded or changed, synchronise before the first such call.
    """
    global _still
    before, _still = _still, True
    try:
        yield
    finally:
        _still = before


def are_still() -> bool:
    """Whether weights_are_still() was said: what `early` depends on besides its arguments."""
    return _still


@lru_cache(maxsize=16)
def _able(device: int) -> bool:
    return not INTERPRETED and torch.cuda.get_device_capability(device)[0] >= 9


def early(device: int, wanted: bool = True) -> dict[str, Any]:
    """Constants of a launch: EARLY, and the launch attribute that goes with it."""
    return {"EARLY": True, "launch_pdl": True} if _still and wanted and _able(device) else {"EARLY": False}
