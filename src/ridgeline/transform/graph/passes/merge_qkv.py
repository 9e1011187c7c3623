"""Linears of one input become one linear and a split: query, key and value; gate and up; key and value of cross-attention.

    q = x Wq' + bq,  k = x Wk' + bk,  v = x Wv' + bv     ->     split(x [Wq; Wk; Wv]' + [bq; bk; bv])

Exact: the same sums, by one product. Widths may differ; a missing bias is zeros. Left alone: a weight somebody else reads (the merged
copy would not follow it, and memory would grow), a linear whose only reader is an activation (`epilogue` does better), on CPUs
products of more than a few rows, where one wide product is no faster than three (measured 0.94x to 1.05x, best at one row), on GPUs
products that fill every processor one by one, and gate and up where silu(gate) * up is not our kernel. The merged weight is a copy: a
model kept beside the graph keeps its own.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx

from ..edit import argument, bytes_of, constant, insert, is_op, only_user, put_constant, shape_of, tidy
from ..manager import PassContext, PassResult, register, site
from ..patterns import Match, Scene, aten, below, erase, given, loosen_views
from .gated import gated

if TYPE_CHECKING:
    from ..capture import Captured

ACTIVATIONS = (
    aten.relu, aten.relu_, aten.gelu, aten.silu, aten.silu_, aten.tanh, aten.tanh_, aten.sigmoid, aten.sigmoid_, aten.hardswish,
    aten.hardswish_, aten.hardtanh, aten.hardtanh_, aten.leaky_relu, aten.leaky_relu_, aten.relu6, aten.mish, aten.elu, aten.hardsigmoid,
)  # fmt: skip
CPU_ROWS = 4
TILE, FILLED = 128, 0.9  # a tile of a GPU's product, and the share of processors with one that leaves nothing to gain by merging


def groups(scene: Scene) -> list[list[fx.Node]]:
    """Linears that take the same tensor, two or more, in the order of the graph."""
    found: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    gates = gate_linears(scene)
    for node in scene.order:
        if is_op(node, aten.linear) and (node in gates or not is_op(only_user(node), *ACTIVATIONS)):
            found[below(given(node, 0), narrowing=False)[0] if _same_dtype(node) else node].append(node)
    return [linears for linears in found.values() if len(linears) > 1]


def _same_dtype(node: fx.Node) -> bool:
    source, _ = below(given(node, 0), narrowing=False)
    return bool(source.meta["val"].dtype == given(node, 0).meta["val"].dtype)


def gate_linears(scene: Scene) -> set[fx.Node]:
    """Linears under the silu of silu(gate) * up: merged with `up`, they still feed one fused kernel."""
    matches = (gated(scene, node) for node in scene.order)
    return {match.names["gate"] for match in matches if match is not None}


@register("merge_qkv")
@dataclass(frozen=True)
class MergeLinears:
    """See the module. `always`: merge on CPUs too, whatever the number of rows."""

    always: bool = False
    name: ClassVar[str] = "merge_qkv"

    def run(self, graph: Captured, context: PassContext) -> PassResult:
        """One merged linear for each group that may be merged."""
        result = PassResult()
        scene = Scene(graph)
        for linears in groups(scene):
            reason = objection(scene, linears, self.always)
            if reason is not None:
                result.refused.append(site(linears, reason))
                continue
            result.changed.append(site(linears, f"{len(linears)} linears of one input -> linear + split", input_read_again(graph, linears)))
            _merge(graph, linears)
            scene.refresh()
        if result.changed:
            tidy(graph)
        return result


def input_read_again(graph: Captured, linears: list[fx.Node]) -> int:
    """The input is read once, not once for each."""
    return (len(linears) - 1) * bytes_of(graph, given(linears[0], 0))


def objection(scene: Scene, linears: list[fx.Node], always: bool = False) -> str | None:
    """Why a group must stay; None where it may be merged."""
    graph = scene.graph
    weights = [constant(graph, given(node, 1)) for node in linears]
    if any(weight is None for weight in weights):
        return "a weight is computed, not a constant"
    shared = next((given(node, 1) for node in linears if len(given(node, 1).users) > 1 or _twice(graph, given(node, 1))), None)
    if shared is not None:
        return f"{shared.target} is read elsewhere too"
    biases = [argument(node, "bias") for node in linears]
    if any(bias is not None and constant(graph, bias) is None for bias in biases):
        return "a bias is computed, not a constant"
    if len({(weight.dtype, weight.device) for weight in weights if weight is not None}) > 1:
        return "the weights differ in dtype or device"
    for node in linears:
        reason = scene.disturbed(Match({}, (node, linears[0]), ()), [given(node, 0)])
        if reason is not None:
            return reason
    return None if always else _no_faster(scene, linears)


def _no_faster(scene: Scene, linears: list[fx.Node]) -> str | None:
    """Why one product would not pay on this device."""
    rows = torch.Size(shape_of(scene.graph, linears[0])[:-1]).numel()
    processors = processors_of(linears[0].meta["val"].device)
    if processors is None:
        return f"one wide product of {rows} rows is no faster than {len(linears)} on CPUs" if rows > CPU_ROWS else None
    gate = next(iter(gate_linears(scene).intersection(linears)), None)
    if gate is None:
        narrowest = min(int(shape_of(scene.graph, node)[-1]) for node in linears)
        tiles = -(-rows // TILE) * -(-narrowest // TILE)
        return f"each product fills the GPU by itself, with {tiles} tiles or more" if tiles >= FILLED * processors else None
    from .. import fused_ops

    # halves of wider rows: torch's own silu and product of them are slower than of whole tensors, our kernel is not
    reason = fused_ops.no_win(scene.graph, "swiglu", gate)
    return None if reason is None else f"torch would read gate and up from wider rows: {reason}"


def processors_of(device: torch.device) -> int | None:
    """Processors of a GPU that share a product; None elsewhere."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else None


def _twice(graph: Captured, weight: fx.Node) -> bool:
    """Whether another get_attr reads the same tensor, under this name or another."""
    own = constant(graph, weight)
    others = (node for node in graph.module.graph.nodes if node.op == "get_attr" and node is not weight)
    return any(_same_memory(own, constant(graph, other)) for other in others)


def _same_memory(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.data_ptr() == other.data_ptr() and one.numel() > 0


def _merge(graph: Captured, linears: list[fx.Node]) -> None:
    first = linears[0]
    weights: list[Any] = [constant(graph, given(node, 1)) for node in linears]
    widths = [int(weight.shape[0]) for weight in weights]
    names = [str(given(node, 1).target) for node in linears]
    args = [given(first, 0), put_constant(graph, f"{names[0]}_merged", torch.cat(weights))]
    biases = [constant(graph, argument(node, "bias")) for node in linears]
    if any(bias is not None for bias in biases):
        filled = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in zip(weights, biases, strict=True)]
        args.append(put_constant(graph, f"{names[0]}_merged_bias", torch.cat(filled)))
    merged = insert(graph, first, aten.linear.default, args, like=first)
    parts = insert(graph, first, aten.split_with_sizes.default, (merged, widths, -1), like=first)
    new = [insert(graph, first, operator.getitem, (parts, index), like=node) for index, node in enumerate(linears)]
    for node, part in zip(linears, new, strict=True):
        node.replace_all_uses_with(part)
    erase(graph, linears)
    loosen_views(graph, new)
