"""Weights of CPU linears and convolutions in the layout oneDNN computes in, reordered once instead of at every call.

    conv2d, linear, and what `epilogue` made of them ──> the same call, packed
    packed convolutions answer in channels-last:  view of such a result ──> reshape;   an output of the model ──> its old layout;
    a copy into another layout that only packed convolutions read ──> gone

The graph keeps the plain weights (see ..onednn): it copies, compiles and exports as before, and holds each packed weight twice.
Runs last. Each layer is timed both ways first (`measure`). Refused, with the reason: layers torch's own code does faster, weights that
are not constants, and all convolutions of a graph that looks at memory as such (as_strided, views that are written through).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from .. import onednn
from ..capture import Captured
from ..chains import Chain
from ..edit import aliases, constant, insert, is_op, mutates, replace_all, storages, tidy, update_value, written, written_arguments
from ..manager import PassContext, PassResult, op_name, register, site
from .epilogue import layer_refused, to_onednn

aten = torch.ops.aten
FUSED = (onednn.conv, onednn.linear)
VIEWS = (aten.view.default, aten._unsafe_view.default)
COPIES = (aten.clone.default, aten.contiguous.default, aten._to_copy.default)
ALWAYS_VIEWS = (
    aten.slice, aten.select, aten.narrow, aten.transpose, aten.t, aten.permute, aten.unsqueeze, aten.squeeze, aten.expand, aten.alias,
    aten.detach, aten.split, aten.split_with_sizes, aten.chunk, aten.unbind, aten.movedim, aten.swapaxes, aten.diagonal,
)  # fmt: skip
"""Views in every layout."""
LAYOUT_SENSITIVE = (aten.as_strided, aten.view_as_complex, aten.view_as_real, aten.unfold, aten.resize_)


@register("prepack")
@dataclass(frozen=True, slots=True)
class Prepack:
    """Reordered weights for CPU layers; last, after every pass that looks at layers."""

    measure: bool = True
    most_bytes: int = 4 << 30  # of packed weights, all together
    name = "prepack"
    last = True

    def run(self, graph: Captured, context: PassContext) -> PassResult:
        result = PassResult()
        against = _looks_at_memory(graph)
        plain_outputs = _plain_outputs(graph)
        packed: list[fx.Node] = []
        for node in list(graph.module.graph.nodes):
            if not is_op(node, aten.conv2d, aten.linear, *FUSED) or node.meta["val"].device.type != "cpu" or _is_packed(node):
                continue
            convolution = is_op(node, aten.conv2d, onednn.conv)
            why = against if convolution else ""
            if not why and not is_op(node, *FUSED):
                why = layer_refused(graph, Chain([node]), measure=self.measure)
            if not why and _weight_bytes(graph, [*packed, node]) > self.most_bytes:
                why = f"packed weights would take more than {self.most_bytes / 2**30:.1f} GiB beside the plain ones"
            if why:
                result.refused.append(site([node], why))
                continue
            result.changed.append(site([node], f"{op_name(node)} -> {op_name(node)} with a packed weight"))
            packed.append(_pack(graph, node))
        if result.changed:
            if any(is_op(node, onednn.conv) for node in packed):
                _settle(graph, packed, plain_outputs)
            context.report(f"prepack: {_weight_bytes(graph, packed) / 2**20:.1f} MiB of weights are held a second time, packed")
            tidy(graph)
        return result


def _is_packed(node: fx.Node) -> bool:
    return is_op(node, *FUSED) and bool(node.args[-1])


def _weight_bytes(graph: Captured, layers: list[fx.Node]) -> int:
    weights = {str(node.args[1]): constant(graph, node.args[1]) for node in layers}
    return sum(weight.numel() * weight.element_size() for weight in weights.values() if weight is not None)


def _pack(graph: Captured, node: fx.Node) -> fx.Node:
    """The packed form of a layer, in its place."""
    if is_op(node, *FUSED):
        node.args = (*node.args[:-1], True)
        update_value(graph, node)
        return node
    new = to_onednn(graph, Chain([node]), packed=True)
    replace_all(node, new)
    graph.module.graph.erase_node(node)
    return new


def _looks_at_memory(graph: Captured) -> str:
    """Why the layout of values may not change in this graph; "" where it may.

    A reshape is a view in one layout and a copy in another: which of the two shows when its memory is written after it.
    """
    where = storages(graph)
    reshaped: set[fx.Node] = set()
    for node in graph.module.graph.nodes:
        if is_op(node, *LAYOUT_SENSITIVE):
            return f"the graph looks at memory by {op_name(node)}, and packed convolutions change its layout"
        if any(base in reshaped for target in written_arguments(node) for base in where[target]):
            return f"{op_name(node)} writes memory that was reshaped before, and packed convolutions may turn that into a copy"
        if aliases(node) and not mutates(node) and node.target is not operator.getitem and not is_op(node, *ALWAYS_VIEWS):
            reshaped |= where[node]
    return ""


def _plain_outputs(graph: Captured) -> list[bool]:
    """For each output of the model: whether it is contiguous."""
    found: list[bool] = []

    def note(node: fx.Node) -> fx.Node:
        value = node.meta.get("val")
        found.append(isinstance(value, torch.Tensor) and value.is_contiguous())
        return node

    fx.node.map_arg(graph.module.graph.output_node().args, note)
    return found


def _settle(graph: Captured, packed: list[fx.Node], plain_outputs: list[bool]) -> None:
    """Follow the new layouts down the graph: drop copies for convolutions only, mend views, give outputs in their old layout."""
    nodes, where, unsafe = graph.module.graph, storages(graph), written(graph)
    moved = set(packed)
    for node in [node for node in nodes.nodes if node.op == "call_function"]:
        if is_op(node, *COPIES) and _only_changes_layout(node) and not where[node.args[0]] & unsafe:
            replace_all(node, node.args[0])
            nodes.erase_node(node)
        elif node not in moved and any(source in moved for source in node.all_input_nodes):
            if is_op(node, *VIEWS) and not node.args[0].meta["val"].is_contiguous():
                node.target = aten.reshape.default
            update_value(graph, node)
            moved.add(node)
    output, plain = nodes.output_node(), iter(plain_outputs)

    def as_before(node: fx.Node) -> fx.Node:
        value = node.meta.get("val")
        if not next(plain) or not isinstance(value, torch.Tensor) or value.is_contiguous():
            return node
        return insert(graph, output, aten.contiguous.default, [node], like=node)

    output.args = fx.node.map_arg(output.args, as_before)


def _only_changes_layout(node: fx.Node) -> bool:
    """Whether a copy is read by packed convolutions only, as their x, which take any layout."""
    source, value = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    if source.dtype != value.dtype or source.device != value.device:
        return False
    return bool(node.users) and all(is_op(user, onednn.conv) and _is_packed(user) and node not in user.args[1:] for user in node.users)
