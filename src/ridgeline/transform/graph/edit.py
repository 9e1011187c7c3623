"""Small helpers every pass uses: constants, consumers, sizes, and what an op does to memory.

    constant(graph, node)        tensor behind a get_attr           put_constant(graph, "folded", value) -> get_attr node
    insert(graph, op, args)      new call with its meta["val"]      replace_all(old, new), tidy(graph)
    shape_of, bytes_of           at the example inputs              same_sizes: for every batch size
    refresh_values(graph, new)   meta["val"] after new nodes        is_op, aliases, mutates, written, …: from effects.py

Constants are shared with the user's model: never write into one, put a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from .effects import (
    COMPUTES,
    DROPOUTS,
    aliases,
    argument,
    has_mutation,
    is_op,
    is_random,
    mutates,
    returned,
    schema_of,
    storages,
    written,
    written_arguments,
)

if TYPE_CHECKING:
    from .capture import Captured

__all__ = [
    "COMPUTES",
    "DROPOUTS",
    "aliases",
    "argument",
    "attribute",
    "bytes_of",
    "constant",
    "example_int",
    "fake_mode",
    "fake_of",
    "has_mutation",
    "insert",
    "is_op",
    "is_random",
    "layer_of",
    "mutates",
    "only_user",
    "put_constant",
    "refresh_values",
    "replace_all",
    "returned",
    "same_size",
    "same_sizes",
    "schema_of",
    "shape_of",
    "storages",
    "tidy",
    "update_value",
    "written",
    "written_arguments",
]

NodeArgs = Sequence[Any]


def attribute(module: torch.nn.Module, path: str) -> Any:
    """`module.a.b.c` for "a.b.c"."""
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def constant(graph: Captured, node: Any) -> torch.Tensor | None:
    """The tensor behind a get_attr, or None."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value = attribute(graph.module, str(node.target))
    return value.detach() if isinstance(value, torch.Tensor) else None


def put_constant(graph: Captured, hint: str, value: torch.Tensor) -> fx.Node:
    """A new buffer named after `hint`, and its get_attr node at the top of the graph."""
    stem = "".join(letter if letter.isalnum() else "_" for letter in hint).strip("_") or "constant"
    if stem[0].isdigit():
        stem = f"constant_{stem}"
    name, number = stem, 0
    while hasattr(graph.module, name):
        number += 1
        name = f"{stem}_{number}"
    value = value.detach()
    graph.module.register_buffer(name, value)
    nodes = graph.module.graph
    with nodes.inserting_before(_after_attributes(nodes)):
        node = nodes.get_attr(name)
    node.meta["val"] = fake_of(graph, value)
    return node


def _after_attributes(nodes: fx.Graph) -> fx.Node:
    """The first node that is neither an input nor an attribute: new attributes go before it."""
    nodes_after = (node for node in nodes.nodes if node.op not in ("placeholder", "get_attr"))
    first: fx.Node = next(nodes_after)
    return first


def fake_of(graph: Captured, value: torch.Tensor) -> torch.Tensor:
    """A FakeTensor like `value`, of the mode the graph was captured in."""
    mode = fake_mode(graph)
    return value if mode is None else mode.from_tensor(value, static_shapes=True)


def fake_mode(graph: Captured) -> Any:
    """The FakeTensorMode of the graph's values; None where there is none."""
    for node in graph.module.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode
    return None


def insert(
    graph: Captured, before: fx.Node, target: Callable[..., Any], args: NodeArgs, kwargs: Mapping[str, Any] | None = None, *, like: fx.Node
) -> fx.Node:
    """A call of `target` placed before `before`; its meta["val"] is computed, its module path is that of `like`."""
    with graph.module.graph.inserting_before(before):
        node = graph.module.graph.call_function(target, tuple(args), dict(kwargs or {}))
    for key in ("nn_module_stack", "stack_trace", "torch_fn"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    update_value(graph, node)
    return node


def update_value(graph: Captured, node: fx.Node) -> None:
    """Compute meta["val"] of a call again from the fake values of its arguments."""

    def value(argument: fx.Node) -> Any:
        return argument.meta["val"]

    mode = fake_mode(graph)
    args, kwargs = fx.node.map_arg(node.args, value), fx.node.map_arg(node.kwargs, value)
    if mode is None or not callable(node.target):
        return
    with enable_python_dispatcher(), mode, torch.no_grad():  # torch 2.11: linear of symbolic sizes has no other fake form
        node.meta["val"] = node.target(*args, **kwargs)


def refresh_values(graph: Captured, fresh: set[str]) -> None:
    """Compute meta["val"] again for what follows the nodes named `fresh`, as far as sizes, strides or dtypes differ."""
    moved = {node for node in graph.module.graph.nodes if node.name in fresh}
    for node in graph.module.graph.nodes:
        if node.op != "call_function" or node in moved or not any(source in moved for source in node.all_input_nodes):
            continue
        before = node.meta.get("val")
        try:
            update_value(graph, node)
        except Exception:  # an op without a fake form, or a view that no longer fits: the check runs the real one
            continue
        if not _alike(before, node.meta.get("val")):
            moved.add(node)


def _alike(before: Any, after: Any) -> bool:
    """Whether two fake values agree in sizes, strides and dtype."""
    if isinstance(before, list | tuple) and isinstance(after, list | tuple):
        return len(before) == len(after) and all(_alike(a, b) for a, b in zip(before, after, strict=True))
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return isinstance(before, torch.SymInt | int) and isinstance(after, torch.SymInt | int) and same_size(before, after)
    same_strides = all(same_size(a, b) for a, b in zip(before.stride(), after.stride(), strict=False))
    return before.dtype == after.dtype and same_sizes(before, after) and same_strides


def replace_all(old: fx.Node, new: fx.Node) -> None:
    """Every use of `old` uses `new`; `old` is left without consumers (erase it, or let `dead` do it)."""
    old.replace_all_uses_with(new)


def tidy(graph: Captured) -> None:
    """Check the graph and generate its code again: the end of every pass that changed something."""
    graph.module.graph.lint()
    graph.module.recompile()


def only_user(node: fx.Node) -> fx.Node | None:
    """The one consumer of a node, or None when there are none or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def layer_of(node: fx.Node) -> str:
    """The module path a node came from, "" where unknown (or the model itself)."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return path.split("@")[0].removeprefix("L__self__").removeprefix(".")


def example_int(graph: Captured, value: Any) -> int:
    """A size as a number at the example inputs: the batch symbol stands for the example's batch."""
    if isinstance(value, torch.SymInt):
        expression = value.node.expr
        return int(expression.subs({symbol: graph.batch for symbol in expression.free_symbols}))
    return int(value)


def shape_of(graph: Captured, node: fx.Node) -> tuple[int, ...]:
    """The sizes of a node's tensor at the example inputs."""
    return tuple(example_int(graph, size) for size in node.meta["val"].shape)


def bytes_of(graph: Captured, node: fx.Node) -> int:
    """Bytes of a node's tensor(s) at the example inputs; 0 for numbers."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, list | tuple) else (value,)
    total = 0
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            count = 1
            for size in tensor.shape:
                count *= example_int(graph, size)
            total += count * tensor.element_size()
    return total


def same_sizes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two shapes are equal for every batch size: symbols are compared as formulas, no guard is made."""
    return len(left.shape) == len(right.shape) and all(same_size(a, b) for a, b in zip(left.shape, right.shape, strict=True))


def same_size(left: Any, right: Any) -> bool:
    """Whether two sizes are the same formula."""
    if isinstance(left, torch.SymInt) or isinstance(right, torch.SymInt):
        return bool(_formula(left) == _formula(right))
    return int(left) == int(right)


def _formula(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)
