"""Our kernels in place of torch's, in a model or a block of code, where they win.

    with use_kernels() as kernels: …            a torch function mode: every torch call in the block is looked up in REPLACEMENTS
    kernels = use_kernels(model)                the model's forward runs so from now on, its gated perceptrons, RMS norms and rotary
                                                positions fused (`fuse.py`); kernels.undo() puts everything back.
                                                A copy of it, and one loaded from a file, runs plain torch
    kernels.report()                            {operator: times it ran in place of torch's}

torch.compile traces through both: what wins against compiled code becomes one node of the graph, the rest is left to it.
No aten operator is overridden: code outside the block and other models are untouched. Looking up a call costs the host a few
microseconds, and an operator of ours with a gradient more than torch's. So a model tries its first passes of each kind with and without,
and goes on with what was faster: `Trial`. Ref: torch.overrides, __torch_function__ modes.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from . import replace

Undo = Callable[[], None]
TRIALS = 256
LITTLE = 16


class Kernels(TorchFunctionMode):
    """The block in which torch's functions are looked up; see the module."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced: Counter[str] = Counter()
        self._undo: list[Undo] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = replace.REPLACEMENTS.get(func)
        if found is None or not replace.plain(args) or (kwargs and not replace.plain(kwargs.values())):
            return func(*args, **(kwargs or {}))
        op, stand_in = found
        out = stand_in(*args, **(kwargs or {}))
        if out is NotImplemented:
            return func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling():
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
        kernels._undo.append(InKernels(model, kernels).put())
    return kernels


@lru_cache(maxsize=1)
def load_operators() -> tuple[str, ...]:
    """Import every file of this room, so that its operators, stand-ins and benchmark cases are known: a new kernel is one file."""
    import ridgeline.kernel as room

    names = sorted(info.name for info in pkgutil.iter_modules(room.__path__) if not info.ispkg and info.name != "use")
    for name in names:
        importlib.import_module(f"{room.__name__}.{name}")
    return tuple(names)


class InKernels(replace.Replaced):
    """A model's forward inside the block, except for shapes where that was seen not to pay."""

    def __init__(self, model: torch.nn.Module, kernels: Kernels) -> None:
        super().__init__(model)
        self.kernels = kernels
        self.trials: dict[Any, Trial] = {}
        """Those of the last TRIALS kinds of inputs, the latest last."""
        self.latest: Trial | None = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _capturing():
            with self.kernels:
                return self.before(*args, **kwargs)
        trial = self._trial((torch.is_grad_enabled(), self.holder.training, signature(args), signature(kwargs)))
        if trial.pays is None and not replace._everywhere:
            trial.begin(perf_counter(), again=self.latest is trial)
        self.latest = trial
        if trial.pays is False or trial.plain_turn:
            with replace.nowhere():
                return self.before(*args, **kwargs)
        replaced = self.kernels.replaced.total()
        with self.kernels:
            out = self.before(*args, **kwargs)
        if self.kernels.replaced.total() == replaced:
            trial.pays = False
        return out

    def _trial(self, key: Any) -> Trial:
        trial = self.trials.pop(key, None) or Trial()
        self.trials[key] = trial
        if len(self.trials) > TRIALS:
            self.trials.pop(next(iter(self.trials)), None)
        return trial


def _capturing() -> bool:
    """Whether a CUDA graph is recorded: this pass's time says nothing, and when the graph runs its launches cost the host nothing."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Trial:
    """Whether replacing pays for one shape of a model's inputs, by trying: passes with our kernels, then as many without.

    What is compared is the time from one forward to the next, whatever happens between them: backward, optimiser, waiting for the GPU
    or running ahead of it until its queue is full. Nothing is synchronised. Each half begins with passes that are not counted: the
    first compiles, and the queue of the half before must run out.
    """

    UNCOUNTED, COUNTED = 3, 6

    def __init__(self) -> None:
        self.pays: bool | None = None
        """None until it is known."""
        self.plain_turn = False
        self._passes = 0
        self._before_s = 0.0
        self._periods: tuple[list[float], list[float]] = ([], [])

    def begin(self, now_s: float, again: bool) -> None:
        """A forward starts; `again`: so did the one before, of the same shape."""
        if again and self._passes > self.UNCOUNTED:
            self._periods[self.plain_turn].append(now_s - self._before_s)
        self._before_s = now_s
        self._passes += 1
        if len(self._periods[self.plain_turn]) < self.COUNTED:
            return
        if self.plain_turn:
            with_kernels, plain = (median(times) for times in self._periods)
            self.pays, self.plain_turn = with_kernels <= plain, False
        else:
            self.plain_turn, self._passes = True, 1


def signature(value: Any, deep: int = 4) -> Any:
    """What two inputs have in common that share a trial: shapes and dtypes, names, little values; of larger whole numbers the size."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):  # a position that counts up is not new each time
        return int, value if -LITTLE < value < LITTLE else LITTLE + value.bit_length()
    if deep and isinstance(value, tuple | list):
        return type(value), *[signature(item, deep - 1) for item in value]
    if deep and isinstance(value, Mapping):
        return type(value), *[(name, signature(item, deep - 1)) for name, item in value.items()]
    return type(value)
