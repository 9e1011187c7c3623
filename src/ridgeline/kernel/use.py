"""Our kernels in place of torch's, in a model or a block of code, where they win.

    with use_kernels() as kernels: …            a torch function mode: every torch call in the block is looked up in REPLACEMENTS
    kernels = use_kernels(model)                the model's forward runs so from now on, its gated perceptrons, RMS norms and rotary
                                                positions fused (`fuse.py`); kernels.undo() puts everything back
    kernels.report()                            {operator: times it ran in place of torch's}

torch.compile traces through both: what wins against compiled code becomes one node of the graph, the rest is left to it.
No aten operator is overridden: code outside the block and other models are untouched. Looking up a call costs the host a microsecond
or two. A model finds out in its first passes, for each shape of its inputs, whether replacing saves more than looking up costs, and
if not it runs without: `Trial`. Ref: torch.overrides, __torch_function__ modes.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from time import perf_counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from . import replace

GPU_BEHIND = 1.2
"""A pass that takes the GPU so many times as long as the host is one in which the host does not matter."""
Undo = Callable[[], None]


class Kernels(TorchFunctionMode):
    """The block in which torch's functions are looked up; see the module."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced: Counter[str] = Counter()
        self.calls = 0
        self._undo: list[Undo] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = replace.REPLACEMENTS.get(func)
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self.calls += 1
        if found is None:
            return func(*args, **(kwargs or {}))
        op, stand_in = found
        out = stand_in(*args, **(kwargs or {}))
        if out is NotImplemented:
            return func(*args, **(kwargs or {}))
        if compiling:
            _note_compiled(op)
        else:
            self.replaced[op] += 1
        return out

    def report(self) -> dict[str, int]:
        """How often each operator ran in place of torch's; `compiled …` counts nodes put into compiled graphs, of all models."""
        return {**self.replaced, **{f"compiled {op}": times for op, times in _compiled.items()}}

    def undo(self) -> None:
        """Put back what `use_kernels(model)` changed."""
        while self._undo:
            self._undo.pop()()


_compiled: Counter[str] = Counter()


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _note_compiled(op: str) -> bool:
    """Run by Dynamo itself when it traces, so once a graph."""
    _compiled[op] += 1
    return True


def use_kernels(model: torch.nn.Module | None = None, *, fuse: bool = True) -> Kernels:
    """Use as `with use_kernels():`, or give a model, whose forward then uses our kernels by itself."""
    load_operators()
    replace.load_wins()
    kernels = Kernels()
    if model is not None:
        if fuse:
            from .fuse import fuse_

            kernels._undo += fuse_(model, kernels.replaced)
        kernels._undo.append(_wrap(model, kernels))
    return kernels


@lru_cache(maxsize=1)
def load_operators() -> tuple[str, ...]:
    """Import every file of this room, so that its operators, stand-ins and benchmark cases are known: a new kernel is one file."""
    import ridgeline.kernel as room

    names = sorted(info.name for info in pkgutil.iter_modules(room.__path__) if not info.ispkg and info.name != "use")
    for name in names:
        importlib.import_module(f"{room.__name__}.{name}")
    return tuple(names)


def _wrap(model: torch.nn.Module, kernels: Kernels) -> Undo:
    """Run the model's forward inside the block, except for shapes where that was seen not to pay."""
    forward = model.forward
    trials: dict[Any, Trial] = {}

    def with_kernels(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            with kernels:
                return forward(*args, **kwargs)
        key = (torch.is_grad_enabled(), model.training, *(_signature(arg) for arg in args), *(_signature(arg) for arg in kwargs.values()))
        trial = trials.get(key)
        if trial is None:
            trial = trials[key] = Trial()
        if trial.pays() is False:
            return forward(*args, **kwargs)
        with trial.watched(kernels), kernels:
            return forward(*args, **kwargs)

    own = "forward" in vars(model)
    model.forward = with_kernels

    def undo() -> None:
        if own:
            model.forward = forward
        else:
            del model.forward

    return undo


class Trial:
    """Whether a forward of one shape pays, found out in its first passes without waiting for the GPU.

    The first pass, which compiles, tells what the table says was saved and how many calls were looked up. The next are timed, on the
    host and, by two events, on the GPU. Where the GPU takes longer, replacing pays if GPU and host time saved exceed the look-ups;
    where it keeps up with the host, only if host time saved does.
    """

    PASSES = 3

    def __init__(self) -> None:
        self.known: bool | None = None
        self.passes = 0
        self.saved_us = self.host_us = self.looked_up_us = 0.0
        self.spans: list[tuple[float, Any, Any]] = []

    def pays(self) -> bool | None:
        """None until it is known."""
        if self.known is None and len(self.spans) >= self.PASSES and self.spans[-1][2].query():
            timed = [(host_ms, begin.elapsed_time(end)) for host_ms, begin, end in self.spans]
            self.known = self.judged(any(gpu_ms > GPU_BEHIND * host_ms for host_ms, gpu_ms in timed))
            self.spans = []
        return self.known

    def judged(self, gpu_is_behind: bool) -> bool:
        """The rule itself."""
        return (self.saved_us if gpu_is_behind else self.host_us) > self.looked_up_us

    @contextmanager
    def watched(self, kernels: Kernels) -> Iterator[None]:
        """Around a pass with our kernels, while nothing is known."""
        if self.known is not None or replace._everywhere:
            yield
            return
        self.passes += 1
        calls, us, host_us = kernels.calls, replace.saved.us, replace.saved.host_us
        timing = self.passes > 1 and len(self.spans) < self.PASSES and _can_time()
        begin, end = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) if timing else (None, None)
        start = perf_counter()
        if begin is not None:
            begin.record()
        yield
        if end is not None:
            end.record()
            self.spans.append(((perf_counter() - start) * 1e3, begin, end))
        self.saved_us, self.host_us = replace.saved.us - us, replace.saved.host_us - host_us
        self.looked_up_us = (kernels.calls - calls) * look_up_us()
        if self.saved_us <= self.looked_up_us and self.host_us <= self.looked_up_us:
            self.known = False  # whoever is behind


def _can_time() -> bool:
    return torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=1)
def look_up_us() -> float:
    """Host time a torch call costs more inside the block, on this machine."""
    x, kernels = torch.zeros(()), Kernels()

    def spent_us() -> float:
        start = perf_counter()
        for _ in range(100):
            x.dim()
        return (perf_counter() - start) * 1e4

    outside = min(spent_us() for _ in range(5))
    with kernels:
        return max(0.0, min(spent_us() for _ in range(5)) - outside)


def _signature(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value)
