"""Which batch norm follows which convolution, found by running the model once.

    model, inputs ──hooks on layers, a mode under every op──> (convolution, norm) whose output nobody else reads

For models torch.fx cannot trace (their forward branches on values). Every op that takes a convolution's output counts as a reader,
and so does the model's own output; one reader, the norm, and one call each: the pair may be folded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ...train.evaluate import device_of, scoring
from ...transform.quantise.fold import CONVOLUTIONS, Pair, has_statistics

_LOOKS = {"size", "dim", "is_floating_point", "__get__"}  # ask a tensor about itself, not for its values


class _Readers(TorchFunctionMode):
    """Counts the ops that read each tensor of interest."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in _LOOKS:
            for leaf in {id(one) for one in tree_leaves((args, kwargs or {})) if isinstance(one, Tensor)}:
                if leaf in self.count:
                    self.count[leaf] += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def pairs_by_running(model: nn.Module, inputs: tuple[Any, ...]) -> list[Pair]:
    """(convolution, norm) by name, for every pair that may be folded."""
    readers, made, calls, read = _Readers(), dict[int, str](), dict[str, int](), list[tuple[Tensor, str]]()
    kept: list[Tensor] = []  # so that no two outputs share an address
    hooks = []

    def after_convolution(name: str, out: Tensor) -> None:
        made[id(out)], readers.count[id(out)] = name, 0
        calls[name] = calls.get(name, 0) + 1
        kept.append(out)

    def before_norm(name: str, x: Tensor) -> None:
        calls[name] = calls.get(name, 0) + 1
        read.append((x, name))

    for name, module in model.named_modules():
        if type(module) in CONVOLUTIONS:
            hooks.append(module.register_forward_hook(lambda _m, _i, out, name=name: after_convolution(name, out)))
        elif type(module) in CONVOLUTIONS.values() and has_statistics(module):
            hooks.append(module.register_forward_pre_hook(lambda _m, given, name=name: before_norm(name, given[0])))
    try:
        with scoring([model], device_of(model)), readers:
            outputs = model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    for leaf in tree_leaves(outputs):
        readers.count[id(leaf)] = readers.count.get(id(leaf), 0) + 1
    found = [(made[id(x)], name) for x, name in read if id(x) in made and readers.count[id(x)] == 1]
    return [pair for pair in found if calls[pair[0]] == calls[pair[1]] == 1]
