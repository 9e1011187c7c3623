"""Our kernels in place of torch's, in a model or a block of code, where they win.

    with use_kernels() as kernels: …            a torch function mode: every torch call in the block is looked up in REPLACEMENTS
    kernels = use_kernels(model)                the model's forward runs so from now on, its gated perceptrons, RMS norms and rotary
                                                positions fused (`fuse.py`); kernels.undo() puts everything back
    kernels.report()                            {operator: times it ran in place of torch's}

torch.compile traces through both: what wins against compiled code becomes one node of the graph, the rest is left to it.
No aten operator is overridden: code outside the block and other models are untouched. Looking up a call costs about 1 µs on
the host. A model remembers, for each shape of its inputs, whether replacing saved more than looking up cost, by the table, and if
not it runs without. A step limited by the host can still lose: docs/kernels.md. Ref: torch.overrides, __torch_function__ modes.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from . import replace

LOOK_UP_US = 1.5
"""Host time a torch call costs more inside the block; 1.2 measured."""
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
        if found is None:
            if not torch.compiler.is_compiling():
                self.calls += 1
            return func(*args, **(kwargs or {}))
        op, stand_in = found
        out = stand_in(*args, **(kwargs or {}))
        if out is NotImplemented:
            return func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling():
            _note_compiled(op)
        else:
            self.calls += 1
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
    pays: dict[Any, bool] = {}

    def with_kernels(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            with kernels:
                return forward(*args, **kwargs)
        key = (torch.is_grad_enabled(), model.training, *(_signature(arg) for arg in args), *(_signature(arg) for arg in kwargs.values()))
        known = pays.get(key)
        if known is False:
            return forward(*args, **kwargs)
        calls, saved = kernels.calls, replace.saved_us()
        with kernels:
            out = forward(*args, **kwargs)
        if known is None:
            pays[key] = replace._everywhere or replace.saved_us() - saved > (kernels.calls - calls) * LOOK_UP_US
        return out

    own = "forward" in vars(model)
    model.forward = with_kernels

    def undo() -> None:
        if own:
            model.forward = forward
        else:
            del model.forward

    return undo


def _signature(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value)
