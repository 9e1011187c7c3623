"""Which channels of a model belong together: what must grow when one layer does.

    model ──torch.fx──> nodes; each value has channels [C], each channel an id
      convolution, linear: take channels in, give new ones        batch norm, depthwise, activation, pool: pass them on
      a + b, a * b: channel by channel the same        cat: side by side        anything else: its channels cannot grow

A channel that is doubled is doubled in place, c ──> c, c', everywhere its id is: then sums, products and concatenations still match.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.fx
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..core.errors import TransformError
from .spaces.ops import shifted

Ids = np.ndarray[Any, np.dtype[np.int64]]
PASS_MODULES = (
    nn.ReLU, nn.ReLU6, nn.Hardswish, nn.Hardsigmoid, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.LeakyReLU, nn.ELU, nn.Identity, nn.Dropout,
    nn.Dropout2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
)  # fmt: skip
PASS_FUNCTIONS = {
    torch.relu, F.relu, F.relu6, F.hardswish, F.silu, F.gelu, torch.sigmoid, torch.tanh, F.dropout, F.max_pool2d, F.avg_pool2d,
    F.adaptive_avg_pool2d, F.adaptive_max_pool2d, shifted, "relu", "sigmoid", "tanh", "contiguous", "clone",
}  # fmt: skip
JOIN_FUNCTIONS = {operator.add, operator.iadd, operator.mul, operator.imul, torch.add, torch.mul, "add", "add_", "mul", "mul_"}
LOOK_FUNCTIONS = {getattr, "size", "dim"}


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor's channels: along dimension 1 of a "map", the last of a "row"; `flat` where places were folded into the channels."""

    ids: Ids
    kind: Literal["map", "row"]
    flat: bool = False


@dataclass(slots=True)
class Layer:
    """A module with weights, and the channels it takes and gives."""

    module: nn.Module
    taken: Value | None
    given: Ids


@dataclass(slots=True)
class Channels:
    """What was found; `frozen` says of a channel why it cannot grow."""

    layers: dict[str, Layer] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)  # by path of the module that gave it
    parents: list[int] = field(default_factory=list)
    frozen: dict[int, str] = field(default_factory=dict)

    def fresh(self, count: int) -> Ids:
        first = len(self.parents)
        self.parents += range(first, first + count)
        return np.arange(first, first + count)

    def root(self, index: int) -> int:
        while self.parents[index] != index:
            self.parents[index] = self.parents[self.parents[index]]
            index = self.parents[index]
        return index

    def roots(self, ids: Ids) -> Ids:
        return np.array([self.root(int(index)) for index in ids], dtype=np.int64)

    def join(self, first: Ids, second: Ids) -> None:
        for one, other in zip(self.roots(first), self.roots(second), strict=True):
            one, other = self.root(int(one)), self.root(int(other))
            if one != other:
                self.parents[other] = one
                if other in self.frozen:
                    self.frozen.setdefault(one, self.frozen[other])

    def freeze(self, value: Value | None, why: str) -> None:
        if value is not None:
            for root in self.roots(value.ids):
                self.frozen.setdefault(int(root), why)


def find_channels(model: nn.Module) -> Channels:
    training = [module for module in model.modules() if module.training]
    try:
        graph = torch.fx.Tracer().trace(model.eval())  # in eval mode nothing is drawn
    except Exception as error:
        raise TransformError(
            f"growth of {type(model).__name__}",
            why=f"its structure cannot be followed: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            do="write its forward without branches on values, or grow a part of it",
        ) from None
    finally:
        for module in training:
            module.training = True
    modules, channels = dict(model.named_modules()), Channels()
    values: dict[torch.fx.Node, Value | None] = {}
    for node in graph.nodes:
        values[node] = _visit(node, modules, channels, values)
    return channels


def _visit(
    node: torch.fx.Node, modules: dict[str, nn.Module], channels: Channels, values: dict[torch.fx.Node, Value | None]
) -> Value | None:
    if node.op == "call_module":
        path, taken = str(node.target), values.get(node.all_input_nodes[0]) if node.all_input_nodes else None
        value = _through_module(path, modules[path], taken, channels)
        if value is not None:
            channels.values[path] = value
        return value
    if node.op in ("call_function", "call_method"):
        return _through_function(node, modules, channels, values)
    if node.op == "output":
        _freeze_all(node, channels, values, "it is in the model's output")
    return None


def _through_module(path: str, module: nn.Module, taken: Value | None, channels: Channels) -> Value | None:
    if isinstance(module, PASS_MODULES):
        return taken
    if isinstance(module, nn.Flatten) and module.start_dim == 1 and module.end_dim == -1 and taken is not None and taken.kind == "map":
        return Value(taken.ids, "row", flat=True)
    if isinstance(module, _BatchNorm) and taken is not None and module.num_features == len(taken.ids):
        return _passing(path, module, taken, channels)
    if isinstance(module, _ConvNd) and not module.transposed:
        return _through_conv(path, module, taken, channels)
    if isinstance(module, nn.Linear):
        return _through_linear(path, module, taken, channels)
    channels.freeze(taken, f"{path} ({type(module).__name__}) uses it, which growth does not know")
    return None


def _through_conv(path: str, module: _ConvNd, taken: Value | None, channels: Channels) -> Value | None:
    if module.groups == 1:
        return _giving(path, module, taken, module.out_channels, "map", channels)
    if module.groups == module.in_channels == module.out_channels and taken is not None:
        return _passing(path, module, taken, channels)
    channels.freeze(taken, f"{path} is a grouped convolution")
    return None


def _through_linear(path: str, module: nn.Linear, taken: Value | None, channels: Channels) -> Value | None:
    if taken is not None and (taken.kind == "map" or module.in_features % len(taken.ids)):
        channels.freeze(taken, f"{path} (Linear) takes it along another dimension")
        taken = None
    return _giving(path, module, taken, module.out_features, "row", channels)


def _giving(path: str, module: nn.Module, taken: Value | None, count: int, kind: Literal["map", "row"], channels: Channels) -> Value:
    """A layer that mixes channels: what it gives is new. One used twice takes and gives the same both times."""
    before = channels.layers.get(path)
    if before is None:
        before = channels.layers[path] = Layer(module, taken, channels.fresh(count))
    else:
        _same(path, before.taken, taken, channels)
    return Value(before.given, kind)


def _passing(path: str, module: nn.Module, taken: Value, channels: Channels) -> Value:
    before = channels.layers.get(path)
    if before is None:
        channels.layers[path] = Layer(module, None, taken.ids)
    else:
        channels.join(before.given, taken.ids)
    return taken


def _same(path: str, first: Value | None, second: Value | None, channels: Channels) -> None:
    if first is not None and second is not None and len(first.ids) == len(second.ids):
        channels.join(first.ids, second.ids)
        return
    for value in (first, second):
        channels.freeze(value, f"{path} is used twice, on different things")


def _through_function(
    node: torch.fx.Node, modules: dict[str, nn.Module], channels: Channels, values: dict[torch.fx.Node, Value | None]
) -> Value | None:
    target: Any = node.target
    first = values.get(node.args[0]) if node.args and isinstance(node.args[0], torch.fx.Node) else None
    if target in LOOK_FUNCTIONS:
        return None
    if target in PASS_FUNCTIONS:
        return first
    if target in JOIN_FUNCTIONS:
        return _joined(node, modules, channels, values)
    if target in (torch.cat, torch.concat) and _dimension(node) == 1:
        pieces = [values.get(piece) for piece in node.all_input_nodes]
        if all(piece is not None and piece.kind == "map" for piece in pieces):
            return Value(np.concatenate([piece.ids for piece in pieces if piece is not None]), "map")
    if first is not None and first.kind == "map":
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        if target in ("mean", "amax", torch.mean, torch.amax) and isinstance(dims, list | tuple) and set(dims) in ({2, 3}, {-1, -2}):
            return first if node.kwargs.get("keepdim") or True in node.args[2:] else Value(first.ids, "row")
        if target in (torch.flatten, "flatten") and (node.args[1:] == (1,) or node.kwargs == {"start_dim": 1}):
            return Value(first.ids, "row", flat=True)
    _freeze_all(node, channels, values, f"{getattr(target, '__name__', target)} uses it, which growth does not know")
    return None


def _joined(
    node: torch.fx.Node, modules: dict[str, nn.Module], channels: Channels, values: dict[torch.fx.Node, Value | None]
) -> Value | None:
    tensors = [entry for entry in node.all_input_nodes if not _scalar(entry, modules)]
    found = [value for value in map(values.get, tensors) if value is not None]
    if len(found) != len(tensors) or len({(value.kind, value.flat, len(value.ids)) for value in found}) != 1:
        _freeze_all(node, channels, values, "it is added to or multiplied by something of another shape")
        return None
    for value in found[1:]:
        channels.join(found[0].ids, value.ids)
    return found[0]


def _scalar(node: torch.fx.Node, modules: dict[str, nn.Module]) -> bool:
    """A parameter of one number, such as a branch's gain."""
    if node.op != "get_attr":
        return False
    path, _, name = str(node.target).rpartition(".")
    return int(getattr(modules[path], name).numel()) == 1


def _dimension(node: torch.fx.Node) -> Any:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)


def _freeze_all(node: torch.fx.Node, channels: Channels, values: dict[torch.fx.Node, Value | None], why: str) -> None:
    for entry in node.all_input_nodes:
        channels.freeze(values.get(entry), why)
