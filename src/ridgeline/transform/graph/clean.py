"""Take out of an exported graph what is there for export's sake, not for the answer.

    wrap_with_set_grad_enabled(flag, sub, x) ─┐
    wrap_with_autocast(…, enabled=False, …)  ─┴─> the ops of `sub`, in place
    _assert_*, sym_constrain_*, guards        ──> gone        detach, alias, lift_fresh ──> their argument
    attributes without consumers              ──> gone; placeholders come first

A region with autocast switched on is refused: its casts happen below the level this graph is at.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ...core.errors import TransformError
from .edit import attribute

_aten = torch.ops.aten
_higher = torch.ops.higher_order
CHECKS = ("_assert_async", "_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size", "_print")
SAME = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default, _aten.detach_.default}
"""Ops that hand on their argument: for inference they are nothing."""


def clean_graph(module: fx.GraphModule) -> None:
    """Clean the graph of an unlifted program in place."""
    while _inline_one(module):
        pass
    graph = module.graph
    for node in list(graph.nodes):
        if _is_check(node):
            graph.erase_node(node)
        elif node.op == "call_function" and node.target in SAME:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if not node.users and (node.op == "get_attr" or _is_number(node)):
            graph.erase_node(node)
    _inputs_first(graph)
    _join_attributes(module)
    module.recompile()


def _is_check(node: fx.Node) -> bool:
    if node.op == "call_module":
        return not node.users and "guards" in str(node.target)
    if node.op != "call_function" or node.users:
        return False
    packet = getattr(node.target, "overloadpacket", node.target)
    return getattr(packet, "__name__", "") in CHECKS or node.target is torch._check


def _is_number(node: fx.Node) -> bool:
    """Whether a call gives a size or a truth value: such calls have no effect."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool | int | bool)


def _inline_one(module: fx.GraphModule) -> bool:
    """Replace the first wrapped region by its ops; whether there was one."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is _higher.wrap_with_set_grad_enabled:
            _inline(module, node, body=1)
            return True
        if node.target is _higher.wrap_with_autocast:
            if node.args[2]:
                raise TransformError(
                    "a region under torch.autocast inside the model",
                    why="its casts are made below the level of the graph, so passes cannot see them",
                    do="convert the model to the dtype itself, e.g. model.bfloat16(), and take the autocast out",
                )
            _inline(module, node, body=4)
            return True
    return False


def _inline(module: fx.GraphModule, call: fx.Node, body: int) -> None:
    """Copy the ops of the nested graph in front of `call`, and give its results to `call`'s consumers."""
    nested_node = call.args[body]
    assert isinstance(nested_node, fx.Node)
    nested = attribute(module, str(nested_node.target))
    placeholders = [node for node in nested.graph.nodes if node.op == "placeholder"]
    values: dict[fx.Node, Any] = dict(zip(placeholders, call.args[body + 1 :], strict=True))
    with module.graph.inserting_before(call):
        for node in nested.graph.nodes:
            if node.op == "get_attr":
                path = f"{nested_node.target}.{node.target}"
                values[node] = module.graph.get_attr(path)
                values[node].meta = dict(node.meta)
            elif node.op not in ("placeholder", "output"):
                values[node] = module.graph.node_copy(node, lambda argument: values[argument])
    result = next(node for node in nested.graph.nodes if node.op == "output").args[0]
    outputs = fx.node.map_arg(result, lambda argument: values[argument])
    for user in list(call.users):
        if user.target is operator.getitem and isinstance(outputs, list | tuple):
            picked = outputs[int(str(user.args[1]))]
            user.replace_all_uses_with(picked)
            module.graph.erase_node(user)
    if call.users:
        call.replace_all_uses_with(outputs)
    module.graph.erase_node(call)
    if not nested_node.users:
        module.graph.erase_node(nested_node)


def _inputs_first(graph: fx.Graph) -> None:
    """Placeholders first, then attributes, then the calls in their order."""
    nodes = list(graph.nodes)
    first = next(node for node in nodes if node.op not in ("placeholder", "get_attr"))
    for kind in ("placeholder", "get_attr"):
        for node in nodes:
            if node.op == kind:
                first.prepend(node)


def _join_attributes(module: fx.GraphModule) -> None:
    """One node for one tensor: a weight shared under two names is seen to be shared."""
    seen: dict[int, fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            kept = seen.setdefault(id(attribute(module, str(node.target))), node)
            if kept is not node:
                node.replace_all_uses_with(kept)
                module.graph.erase_node(node)
