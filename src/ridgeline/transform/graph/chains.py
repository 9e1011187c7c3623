"""What follows a layer and could be computed with it: a sum, an activation.

    conv2d | linear ──one consumer──> add(other) ──one consumer──> activation      grow(layer)
    conv2d | linear ──one consumer──> activation ──one consumer──> add(other)      grow(layer, activation_first=True)

A chain may be computed where it ends if no op in between writes what its layer reads: `blocked`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from . import onednn
from .capture import Captured
from .edit import argument, is_op, only_user, same_sizes, storages, written_arguments
from .manager import op_name

aten = torch.ops.aten
PLAIN = {
    aten.relu: "relu", aten.relu_: "relu", aten.sigmoid: "sigmoid", aten.sigmoid_: "sigmoid", aten.tanh: "tanh", aten.tanh_: "tanh",
    aten.silu: "silu", aten.silu_: "silu", aten.hardswish: "hardswish", aten.hardswish_: "hardswish",
}  # fmt: skip
CLAMPED = (aten.hardtanh, aten.hardtanh_, aten.clamp, aten.clamp_, aten.relu6, aten.relu6_)


@dataclass(slots=True)
class Chain:
    """A layer and what can be computed with it; `nodes` in order, the layer first."""

    nodes: list[fx.Node]
    other: fx.Node | None = None
    activation: str = "none"
    scalars: tuple[float, ...] = ()
    reason: str = ""  # why nothing more was taken

    @property
    def layer(self) -> fx.Node:
        return self.nodes[0]

    @property
    def last(self) -> fx.Node:
        return self.nodes[-1]


def grow(layer: fx.Node, *, activation_first: bool = False) -> Chain:
    """The longest chain one call can do: sum then activation (oneDNN), or activation then sum (our kernel)."""
    chain = Chain([layer])
    for kind in ("activation", "sum") if activation_first else ("sum", "activation"):
        if kind == "sum":
            _take_sum(chain)
        else:
            _take_activation(chain)
    return chain


def _next(chain: Chain) -> fx.Node | None:
    user = only_user(chain.last)
    if user is None and any(is_op(one, aten.add, aten.add_, *PLAIN, *CLAMPED, aten.gelu) for one in chain.last.users):
        chain.reason = f"its output has {len(chain.last.users)} consumers"
    return user


def _take_sum(chain: Chain) -> None:
    """out + other, where other has out's own shape; in place only into out."""
    user, out = _next(chain), chain.last
    if user is None or not is_op(user, aten.add.Tensor, aten.add_.Tensor) or argument(user, "alpha") != 1:
        return
    left, right = user.args[:2]
    other = right if left is out else left
    if not isinstance(other, fx.Node) or other is out or (is_op(user, aten.add_) and left is not out):
        return
    value, own = other.meta.get("val"), out.meta["val"]
    if isinstance(value, torch.Tensor) and value.dtype == own.dtype and value.device == own.device and same_sizes(value, own):
        chain.other = other
        chain.nodes.append(user)


def _take_activation(chain: Chain) -> None:
    user = _next(chain)
    found = None if user is None else activation_of(user)
    if user is None or found is None or user.args[0] is not chain.last:
        return
    if chain.other is not None and (found[0] not in onednn.AFTER_SUM or is_op(chain.layer, aten.linear)):
        return
    chain.activation, chain.scalars = found
    chain.nodes.append(user)


def activation_of(node: fx.Node) -> tuple[str, tuple[float, ...]] | None:
    """(name in onednn.ACTIVATIONS, its numbers) of an activation's node."""
    for packet, name in PLAIN.items():
        if is_op(node, packet):
            return name, ()
    if is_op(node, aten.gelu):
        return ("gelu_tanh" if argument(node, "approximate") == "tanh" else "gelu"), ()
    if is_op(node, aten.leaky_relu, aten.leaky_relu_):
        return "leaky_relu", (float(argument(node, "negative_slope")),)
    if is_op(node, aten.relu6, aten.relu6_):
        return "hardtanh", (0.0, 6.0)
    if is_op(node, *CLAMPED):
        names = ("min_val", "max_val") if is_op(node, aten.hardtanh, aten.hardtanh_) else ("min", "max")
        low, high = (argument(node, name) for name in names)
        if isinstance(low, int | float) and isinstance(high, int | float) and low <= high:
            return "hardtanh", (float(low), float(high))
    return None


def blocked(graph: Captured, chain: Chain) -> str:
    """Why the layer may not move down to the end of its chain: an op in between writes what it reads."""
    where = storages(graph)
    sources = [source for node in chain.nodes for source in node.all_input_nodes if source not in chain.nodes]
    read = {base for source in sources for base in where[source]}
    node = chain.layer.next
    while node is not chain.last:
        if node not in chain.nodes and any(base in read for target in written_arguments(node) for base in where[target]):
            return f"{op_name(node)} writes one of its inputs in between"
        node = node.next
    return ""
