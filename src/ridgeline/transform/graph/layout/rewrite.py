"""Carry a plan out: constants in the order of their op, a copy where a tensor changes order, no conversions by hand.

    weight ──laid out once──> new constant          tensor ──clone(memory_format)──> its readers in the other order
    contiguous / clone / to by hand ──> their input

A copy stands just before its first reader and serves all of them; of a tensor that is written in between, each reader has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from ..edit import attribute, constant, insert, put_constant, tidy, update_value
from ..manager import Site, op_name, site
from .order import Seen, constant_order, laid_out, orders
from .plan import Edge, Plan, is_laid_out
from .regions import Kind

if TYPE_CHECKING:
    from ..capture import Captured

aten: Any = torch.ops.aten
NAMES = ("the plain order", "channels-last")


def carry_out(graph: Captured, plan: Plan) -> list[Site]:
    """Edit the graph; gives back one site for each copy that was put in and each conversion by hand that went."""
    by_hand = [node for node in plan.region.inside if plan.region.kinds[node] is Kind.BY_HAND]
    removed = [site([node], f"{op_name(node)} by hand removed", _copied_bytes(plan, node)) for node in by_hand]
    _lay_out_constants(graph, plan)
    sites = _convert(graph, plan) + removed
    for node in by_hand:
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.module.graph.erase_node(node)
    refresh(graph)
    return sites


def _copied_bytes(plan: Plan, node: fx.Node) -> int:
    """Bytes a conversion by hand read and wrote; none where it found the order it wanted."""
    source, result = plan.seen[node.all_input_nodes[0]], plan.seen[node]
    return 0 if source.strides == result.strides else 2 * prod(result.shape) * result.dtype.itemsize


def refresh(graph: Captured) -> None:
    """Fake values again, so that their strides are those of the new graph."""
    tidy(graph)
    for node in graph.module.graph.nodes:
        if node.op == "call_function" and "val" in node.meta:
            update_value(graph, node)


def _lay_out_constants(graph: Captured, plan: Plan) -> None:
    """Weights and image-shaped constants in the order of the op that reads them; one copy for all ops of an order."""
    made: dict[tuple[str, tuple[int, ...]], fx.Node] = {}
    for node, frame in plan.region.inside.items():
        label = plan.choice.labels[plan.taken[node]]
        for source in list(node.all_input_nodes):
            value = constant(graph, source)
            if value is None or not is_laid_out(source, plan.seen[source], frame):
                continue
            ordered = laid_out(value, constant_order(value.shape, frame, label))
            if ordered is value:
                continue
            key = str(source.target), ordered.stride()
            if key not in made:
                made[key] = put_constant(graph, f"{source.target}_laid_out", ordered)
            node.replace_input_with(source, made[key])
            if not source.users:
                graph.module.graph.erase_node(source)


def _convert(graph: Captured, plan: Plan) -> list[Site]:
    """Copies on the edges whose ends have different orders."""
    position = {node: number for number, node in enumerate(graph.module.graph.nodes)}
    groups: dict[Any, list[Edge]] = {}
    for edge in sorted(plan.converted, key=lambda edge: position[edge.user]):
        alone = edge.user if edge.source in plan.region.written else None
        groups.setdefault((edge.source, edge.frame, alone), []).append(edge)
    sites = []
    for edges in groups.values():
        first = edges[0]
        label = plan.choice.labels[first.consumed]
        order = orders(first.frame)[label]
        sites.append(site([first.source, *(edge.user for edge in edges)], f"copy to {NAMES[label]} for {op_name(first.user)}"))
        copy = put_copy(graph, first.source, first.user, order)
        for edge in edges:
            edge.user.replace_input_with(edge.source, copy)
    return sites


def put_copy(graph: Captured, source: fx.Node, before: fx.Node, order: Sequence[int]) -> fx.Node:
    """A copy of a tensor whose memory is in `order`."""
    rank, order = len(order), tuple(order)
    if order == tuple(range(rank)):
        return insert(graph, before, aten.clone.default, (source,), {"memory_format": torch.contiguous_format}, like=source)
    if order == (0, *range(2, rank), 1):
        memory_format = torch.channels_last if rank == 4 else torch.channels_last_3d
        return insert(graph, before, aten.clone.default, (source,), {"memory_format": memory_format}, like=source)
    turned = insert(graph, before, aten.permute.default, (source, list(order)), like=source)
    copied = insert(graph, before, aten.clone.default, (turned,), {"memory_format": torch.contiguous_format}, like=source)
    back = [order.index(dimension) for dimension in range(rank)]
    return insert(graph, before, aten.permute.default, (copied, back), like=source)


def restore_outputs(graph: Captured, before: Sequence[Any], now: dict[fx.Node, Any]) -> list[Site]:
    """Copies for outputs whose strides are no longer exactly those the user got before."""
    output = graph.module.graph.output_node()
    sites: list[Site] = []
    for node, old in zip(output_arguments(graph), before, strict=True):
        new = now.get(node)
        if isinstance(new, Seen) and isinstance(old, Seen) and new.strides != old.strides and node in output.all_input_nodes:
            order = sorted(range(len(old.shape)), key=old.strides.__getitem__, reverse=True)
            sites.append(site([node], "copy to the strides the output had"))
            output.replace_input_with(node, put_copy(graph, node, output, order))
    if sites:
        refresh(graph)
    return sites


def output_arguments(graph: Captured) -> list[Any]:
    """The flat outputs of the graph."""
    return list(tree_leaves(graph.module.graph.output_node().args, is_leaf=lambda leaf: isinstance(leaf, fx.Node)))


def drop_unused_constants(graph: Captured, names: set[str]) -> None:
    """Remove constants of the graph module (never of the user's model) that no node reads any more."""
    used = {str(node.target) for node in graph.module.graph.nodes if node.op == "get_attr"}
    for name in names - used:
        owner, _, last = name.rpartition(".")
        delattr(attribute(graph.module, owner) if owner else graph.module, last)


def constant_names(graph: Captured) -> set[str]:
    return {str(node.target) for node in graph.module.graph.nodes if node.op == "get_attr"}
