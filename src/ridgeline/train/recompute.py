"""Activation checkpointing: a block keeps its inputs only, and computes its activations again in the backward pass.

    model ──checkpoint_blocks──> blocks: children of Sequential and ModuleList that have layers of their own; long runs of plain
                                 layers are cut into about √n parts
    with checkpoint_activations(model): …      n blocks of equal size: activations of all blocks ──> inputs of all + inside of one

Inside the context a block's class is a subclass whose forward goes through torch.utils.checkpoint (not re-entrant); names in the
state dict stay. Gradients are those without: random numbers are replayed, and the second pass starts from the buffers the first
one found and leaves no trace in them, so that BatchNorm's running statistics and observers move once a step, not twice.
recompute_cost measures both ways: peak bytes and seconds of forward and backward. Ref: Chen 2016 (sublinear memory).
"""

from __future__ import annotations

import copy
import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..core.errors import OptionError
from ..core.profile import Timing
from ..core.timing import time_callable
from ..measure.memory import StorageTracker
from .evaluate import device_of

CONTAINERS = (nn.Sequential, nn.ModuleList)
LONG = 8  # plain layers in a row from which one block would be too much to hold at a time


@contextmanager
def checkpoint_activations(model: nn.Module, every: int = 1, names: Iterable[str] | None = None) -> Iterator[list[str]]:
    """Inside, every `every`-th block, or each module that matches a pattern of `names`, is recomputed; gives the blocks' names."""
    blocks = checkpoint_blocks(model, every, names)
    own = [(module, type(module)) for _, module in blocks]
    try:
        for name, module in blocks:
            if "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule):
                raise OptionError(
                    f"block {name!r}", why="its forward is not its class's own, so it cannot be replaced", do="leave it out of names="
                )
            module.__class__ = _checkpointed(type(module), _is_run(module))
        yield [name for name, _ in blocks]
    finally:
        for module, before in own:
            module.__class__ = before


def checkpoint_blocks(model: nn.Module, every: int = 1, names: Iterable[str] | None = None) -> list[tuple[str, nn.Module]]:
    """(name, module) of what would be recomputed."""
    if every < 1:
        raise OptionError(f"every = {every}", why="every first, second, … block is recomputed", do="give at least 1")
    if names is not None:
        found = _named(model, list(names))
    elif _is_run(model):
        found = [("", model)]
    else:
        found = list(_blocks(model, ""))
    if not found:
        raise OptionError(
            f"no blocks to recompute in {type(model).__name__}",
            why="it has no Sequential or ModuleList of blocks, and one layer alone keeps its inputs anyway",
            do="give names=, patterns of the modules to recompute",
        )
    return found[::every]


def _blocks(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        full = f"{path}.{name}" if path else name
        if not _has_children(child):
            continue
        if isinstance(child, CONTAINERS) and any(_has_children(grandchild) for grandchild in child.children()):
            yield from _blocks(child, full)
        elif isinstance(module, CONTAINERS) or isinstance(child, nn.Sequential):
            yield full, child
        else:
            yield from _blocks(child, full)


def _named(model: nn.Module, patterns: list[str]) -> list[tuple[str, nn.Module]]:
    """Outermost modules that match: a block inside a block would be computed three times."""
    there = dict(model.named_modules())
    for pattern in patterns:
        if not fnmatch.filter(there, pattern):
            raise OptionError(
                f"no module matches {pattern!r}", why=f"the model's are {', '.join(list(there)[1:9])}, …", do="correct the pattern"
            )
    chosen: list[tuple[str, nn.Module]] = []
    for name, module in there.items():
        inside = any(name.startswith(f"{outer}.") for outer, _ in chosen)
        if not inside and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            chosen.append((name, module))
    return chosen


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _is_run(module: nn.Module) -> bool:
    """A Sequential of plain layers only, long enough to be cut."""
    return isinstance(module, nn.Sequential) and len(module) >= LONG and not any(_has_children(child) for child in module)


_CLASSES: dict[tuple[type, bool], type] = {}


def _checkpointed(kind: type, run: bool) -> type:
    """A subclass whose forward is recomputed. A class and not a function on the instance: a deep copy stays a module of its own."""
    if (kind, run) not in _CLASSES:
        plain: Any = kind.forward  # type: ignore[attr-defined]

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return plain(self, *args, **kwargs)
            if run:
                return _in_parts(self, *args)
            return _recomputed(lambda *a, **k: plain(self, *a, **k), list(self.modules()), *args, **kwargs)

        _CLASSES[kind, run] = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return _CLASSES[kind, run]


def _in_parts(run: Any, value: Any) -> Any:
    """A long Sequential in about √n parts; the last is not recomputed: its activations are what the backward pass asks for first."""
    layers = list(run)
    length = math.ceil(math.sqrt(len(layers)))
    for start in range(0, len(layers), length):
        part = layers[start : start + length]
        value = _recomputed(_chain(part), part, value) if start + length < len(layers) else _chain(part)(value)
    return value


def _chain(layers: list[nn.Module]) -> Callable[[Any], Any]:
    def through(value: Any) -> Any:
        for layer in layers:
            value = layer(value)
        return value

    return through


def _recomputed(function: Callable[..., Any], modules: list[nn.Module], *args: Any, **kwargs: Any) -> Any:
    # torch.compile traces a block once and moves its side effects out of the part that runs again: no buffers to look after.
    if torch.compiler.is_compiling():
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    buffers = [(module, name, held) for module in modules for name, held in module._buffers.items() if _may_move(held)]
    if not buffers:
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _Buffers([(module, name, held.detach().clone()) for module, name, held in buffers if held is not None])

    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _may_move(buffer: Tensor | None) -> bool:
    """Statistics and counters; packed weights (uint8, int8) are large and never move."""
    return buffer is not None and buffer.dtype not in (torch.uint8, torch.int8)


class _Buffers:
    """Inside: modules hold the buffers as they were before the first pass. After: the present ones, untouched."""

    def __init__(self, found: list[tuple[nn.Module, str, Tensor]]) -> None:
        self.found = found
        self.present: list[Tensor | None] = []

    def __enter__(self) -> None:
        self.present = [module._buffers[name] for module, name, _ in self.found]
        for module, name, before in self.found:
            module._buffers[name] = before.clone()  # again a copy: retain_graph=True may come here twice

    def __exit__(self, *problem: object) -> None:
        for (module, name, _), held in zip(self.found, self.present, strict=True):
            module._buffers[name] = held


@dataclass(frozen=True, slots=True)
class RecomputeCost:
    """One forward and backward pass, as it is and with its blocks recomputed."""

    blocks: int
    before_bytes: int  # peak beyond weights and inputs, gradients included
    after_bytes: int
    before: Timing
    after: Timing

    @property
    def memory_ratio(self) -> float:
        """Peak after over before; below 1 is a gain."""
        return self.after_bytes / self.before_bytes

    @property
    def time_ratio(self) -> float:
        """Median time after over before; the price."""
        return self.after.median_s / self.before.median_s

    def to_dict(self) -> dict[str, Any]:
        return {
            "blocks": self.blocks, "before_bytes": self.before_bytes, "after_bytes": self.after_bytes, "memory_ratio": self.memory_ratio,
            "before": self.before.to_dict(), "after": self.after.to_dict(), "time_ratio": self.time_ratio,
        }  # fmt: skip


def recompute_cost(
    model: nn.Module, inputs: tuple[Any, ...], *, every: int = 1, names: Iterable[str] | None = None, repeats: int = 5
) -> RecomputeCost:
    """Measured on a copy in training mode; the loss is the mean of the first output. CPU peaks count tensors, CUDA's every byte."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise OptionError(
            "a model without a trained parameter", why="there is no backward pass to measure", do="call model.requires_grad_()"
        )
    one = copy.deepcopy(model).train()
    one.zero_grad(set_to_none=True)
    device = device_of(one)
    peaks, timings, blocks = [], [], 0
    chosen = list(names) if names is not None else None
    for context in (nullcontext(), checkpoint_activations(one, every, chosen)):
        with context as found:
            blocks = len(found or ())
            peaks.append(_peak_bytes(one, inputs, device))
            timings.append(
                time_callable(lambda: _pass(one, inputs), device=str(device), warmup=1, min_repeats=repeats, max_repeats=repeats)
            )
            one.zero_grad(set_to_none=True)
    return RecomputeCost(blocks, peaks[0], peaks[1], timings[0], timings[1])


def _pass(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    model.zero_grad(set_to_none=True)
    outputs = model(*inputs)
    first = next(leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad)
    first.float().mean().backward()


def _peak_bytes(model: nn.Module, inputs: tuple[Any, ...], device: torch.device) -> int:
    if device.type != "cuda":
        tracker = StorageTracker()
        with tracker:
            _pass(model, inputs)
        return tracker.peak_bytes
    _pass(model, inputs)  # workspaces of the libraries are made once
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    _pass(model, inputs)
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)
