"""Which torch functions ours stand in for, whether they would win, and functions of modules that ours take the place of.

    @replaces("softmax", torch.softmax, F.softmax) ──REPLACEMENTS──> use_kernels() calls it instead; NotImplemented lets torch's own run
    worth("softmax", x, size, kind) ──tables/<device>-wins.json──> whether ours beat torch there, measured
    Replaced(module).put()          ──> the module's forward, until undo(); a copy of the module has its own again

A line of the table is `op|kind|dtype`: the size from which ours won in every row measured, against eager (host and GPU time
together) and against torch.compile (GPU time). No line, no replacement. None either while saved tensors go through hooks: gradient
checkpointing computes that part once more in backward, outside of our blocks, and must find the same operators there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import update_wrapper
from types import MethodType
from typing import Any

import torch
from torch import Tensor, strided
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .jit import INTERPRETED
from .tuning import TABLES, device_slug, read

REPLACEMENTS: dict[Any, tuple[str, Callable[..., Any]]] = {}
PLAIN = frozenset({Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor})
"""Types of tensors that kernels know; the last two stand for them in tracing."""


@dataclass(frozen=True, slots=True)
class Win:
    """Where ours are faster: from so many elements on; None: nowhere."""

    eager: int | None
    compiled: int | None


class _Thread(threading.local):
    """What holds in one thread alone."""

    nowhere = False


_wins: dict[tuple[str, str, torch.dtype], Win] = {}
_loaded = False
_thread = _Thread()
_everywhere: int = 0
"""Blocks of everywhere() in the process."""
_counting = threading.Lock()


def replaces(op: str, *functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a stand-in with the same arguments as torch's functions."""

    def register(stand_in: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            REPLACEMENTS[function] = (op, stand_in)
        return stand_in

    return register


def plain(values: Any) -> bool:
    """Whether all tensors among the values are torch's own and laid out by strides: no subclass, nothing sparse or nested."""
    for value in values:
        if isinstance(value, Tensor) and (type(value) not in PLAIN or value.layout is not strided or value.is_nested):
            return False
    return True


def worth(op: str, x: Tensor, size: int, kind: str = "") -> bool:
    """Whether ours is known to be faster than torch's for this operand; torch.compile asks while it traces."""
    if _everywhere:
        return (x.is_cuda or INTERPRETED) and (torch.compiler.is_compiling() or not _hooked())
    win = _wins.get((op, kind, x.dtype))
    if win is None or not x.is_cuda or _thread.nowhere:
        return False
    if torch.compiler.is_compiling():
        return win.compiled is not None and size >= win.compiled
    return win.eager is not None and size >= win.eager and not _hooked()


def _hooked() -> bool:
    """Whether tensors saved for backward go through hooks: torch.utils.checkpoint's, in forward and when it computes that part again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def load_wins() -> None:
    """Read the table shipped for this device, once; a device nobody measured has none, and torch runs."""
    global _loaded
    if not _loaded:
        _wins.update(parse_wins(read(TABLES / f"{device_slug()}-wins.json")))
        _loaded = True


def parse_wins(lines: dict[str, Any]) -> dict[tuple[str, str, torch.dtype], Win]:
    """`op|kind|dtype` -> where ours win."""
    found = {}
    for name, line in lines.items():
        op, kind, dtype = name.split("|")
        found[op, kind, getattr(torch, dtype)] = Win(line.get("eager"), line.get("compile"))
    return found


@contextmanager
def everywhere() -> Iterator[None]:
    """Replace wherever we can, whether it pays or not, in every thread: for tests and benchmarks."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(blocks: int) -> None:
    global _everywhere
    with _counting:
        _everywhere += blocks


@contextmanager
def nowhere() -> Iterator[None]:
    """Replace nothing by the table, in fused layers neither; in this thread alone."""
    before, _thread.nowhere = _thread.nowhere, True
    try:
        yield
    finally:
        _thread.nowhere = before


class Replaced:
    """What stands in a module for its forward, or in a file for one of its functions; `before` is what stood there.

    It acts on the module it was put into. A copy of the module, or one loaded from a file, gets what was there before.
    """

    def __init__(self, holder: Any, name: str = "forward") -> None:
        self.holder, self.name = holder, name
        self.before: Callable[..., Any] = getattr(holder, name)
        self.undone = False
        update_wrapper(self, self.before, updated=())  # signature, name, docstring
        self.__code__ = getattr(self.before, "__code__", None)  # torch.export asks where a forward was written

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.before(*args, **kwargs) if self.undone else self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What to do instead."""
        raise NotImplementedError

    def put(self) -> Callable[[], None]:
        """Stand there from now on; returns how to put back what was there."""
        setattr(self.holder, self.name, self)
        return self.undo

    def undo(self) -> None:
        """Also where somebody else replaced it after us: they call this, and it does what was done before."""
        self.undone = True
        if vars(self.holder).get(self.name) is not self:
            return
        before = self.before
        while isinstance(before, Replaced) and before.undone:
            before = before.before
        delattr(self.holder, self.name)
        if getattr(self.holder, self.name, None) != before:
            setattr(self.holder, self.name, before)

    def __reduce__(self) -> Any:
        return copy, (self.before,)  # pickled and copied as that; no function of ours, so that ridgeline is not needed to load it


def overridden(module: torch.nn.Module) -> bool:
    """Whether the module itself was given a forward; its class's own, as copies have it, is none."""
    forward = vars(module).get("forward")
    return forward is not None and forward != MethodType(type(module).forward, module)
