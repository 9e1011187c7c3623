"""Kernels of one stream that overlap: the next one is started, and may read what cannot change, while the one before it ends.

    PROMPT: tl.constexpr = False         a parameter of the kernel: `launch` sets it where the GPU can
      promptly(PROMPT)   its first statement: the next kernel may be started as soon as there is room for it, and this one waits
                         until everything queued before has ended and is visible
    or, where there is something to do before:
      begin(PROMPT)      the next kernel may be started
      …                  with weights_are_still(): reads of weights
      wait(PROMPT)       before any other read and before every write

promptness(False), among the constants of a launch, leaves it out: softmax and reductions of LARGE tensors were slower with it on an H200.

Between two kernels a GPU is idle for a microsecond or two: the next one is sent when the last has ended. With programmatic dependent
launch, from Hopper on, its programs are in place by then. Nothing is promised for that and no result changes. Reading before the wait
is another matter: only what nothing queued writes, which the caller has to say. A kernel that is launched without it waits for all
before it, as always, so both sorts mix. It is kept in CUDA graphs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .jit import jit, tl

LARGE = 1 << 25
"""Bytes: of two such tensors an H200's second-level cache, 60 MB, has no room for both."""


class _Thread(threading.local):
    """What one thread has promised for the work it queues."""

    still = False


_thread = _Thread()


@jit
def begin(PROMPT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The next kernel may start."""
    if PROMPT:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def wait(PROMPT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Until the kernels before have ended."""
    if PROMPT:
        tl.extra.cuda.gdc_wait()


@jit
def promptly(PROMPT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The next kernel may start; this one goes on when those before have ended."""
    begin(PROMPT)
    wait(PROMPT)


@contextmanager
def weights_are_still() -> Iterator[None]:
    """Inside, nothing that is queued writes the weights of a gemv, so that it may read them before that work has ended.

    True of a model that generates; said for the calls of this thread. After weights were loaded or changed, synchronise before the
    first such call.
    """
    before, _thread.still = _thread.still, True
    try:
        yield
    finally:
        _thread.still = before


def are_still() -> bool:
    """Whether weights_are_still() was said."""
    return _thread.still


def promptness(wanted: bool) -> dict[str, bool]:
    """Constants of a launch that is to be prompt only if `wanted`; without them it is, where the GPU can."""
    return {} if wanted else {"PROMPT": False}
