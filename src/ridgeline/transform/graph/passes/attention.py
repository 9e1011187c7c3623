"""Attention written by hand becomes scaled_dot_product_attention.

    softmax(q k' * scale + mask) v          matmul, bmm, baddbmm or einsum; scale by mul or div, before or after the product; masks added,
      -> sdpa(q, k, v, mask, scale)         or filled in where a boolean says so; dropout outside training; softmax in float32 and back

    walk (attention_walk.py) ──> Attention(q, k, v, scale, masks) ──masks.kind_of──> none, is_causal, or kept ──> one node
    repeated key-value heads (unsqueeze, expand, reshape; repeat_interleave) are not repeated: enable_gqa

Exact up to rounding: the same sums in another order. Not for softmax in fewer digits than the scores (float32 in a float64 model), nor
where something else reads scores or probabilities. A row that may see nothing gives 0, where softmax of nothing but -inf gives NaN.
On CUDA a kept mask and grouped heads together have no fast kernel, so heads stay repeated there. Ref: Dao 2022 (FlashAttention).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx

from ..attention_walk import Attention, Mask, Operand, find_attention
from ..edit import argument, insert, is_op, same_size, tidy
from ..manager import PassContext, PassResult, register, site
from ..masks import kind_of, nothing_left
from ..patterns import Scene, aten, below, between, given, narrower, replace

if TYPE_CHECKING:
    from ..capture import Captured


@register("attention")
@dataclass(frozen=True)
class FuseAttention:
    """See the module."""

    name: ClassVar[str] = "attention"

    def run(self, graph: Captured, context: PassContext) -> PassResult:
        """Every product that ends an attention."""
        result = PassResult()
        scene = Scene(graph)
        kinds: dict[fx.Node, str] = {}
        for node in list(scene.order):
            found = find_attention(scene, node)
            if found is None:
                continue
            inside = tuple(reversed(found.inside))
            reason = objection(scene, found) or _mask_objection(graph, found, kinds)
            if reason is not None:
                result.refused.append(site(inside, reason))
                continue
            match = found.match
            result.changed.append(site(inside, "attention by hand -> scaled_dot_product_attention", between(graph, match)))
            replace(scene, match, _rewrite(graph, found, kinds))
        if result.changed:
            tidy(graph)
        return result


def objection(scene: Scene, found: Attention) -> str | None:
    """Why an attention must stay, its masks aside."""
    if found.reason is not None:
        return found.reason
    values = [operand.node.meta["val"] for operand in (found.query, found.key, found.value)]
    if len({value.dtype for value in values}) > 1 or found.inside[0].meta["val"].dtype != values[0].dtype:
        return "query, key and value differ in dtype"
    shapes = [operand.shape for operand in (found.query, found.key, found.value)]
    if not 2 <= len(shapes[0]) <= 4 or len({len(shape) for shape in shapes}) > 1:
        return f"its tensors have {len(shapes[0])} dimensions"
    for shape in shapes[1:]:
        if not all(same_size(a, b) for a, b in zip(shapes[0][:-2], shape[:-2], strict=True)):
            return "query, key and value are broadcast against each other"
    leaves = [operand.node for operand in (found.query, found.key, found.value)]
    match = found.match
    masks = [mask.node for mask in found.masks]
    return scene.consumers(match.inside) or scene.disturbed(match, leaves + masks) or narrower(match.inside, leaves[:1])


def _mask_objection(graph: Captured, found: Attention, kinds: dict[fx.Node, str]) -> str | None:
    """A fill that softmax would not make zero, or a mask of another dtype."""
    dtype = found.query.node.meta["val"].dtype
    for mask in found.masks:
        if mask.node not in kinds:
            kinds[mask.node] = _kind(graph, mask)
        value = mask.node.meta["val"]
        if mask.fill is None and value.dtype != dtype and kinds[mask.node] == "kept":
            return f"{mask.node.name} is {value.dtype}, the scores {dtype}"
        if mask.fill is not None and kinds[mask.node] == "kept" and mask.fill > min(nothing_left(dtype), -1e30):
            return f"{mask.node.name} fills in {mask.fill:g}, which a row that sees nothing would not treat as a mask"
        if mask.fill is not None and mask.fill > nothing_left(dtype):
            return f"{mask.node.name} fills in {mask.fill:g}, which may leave something of a score"
    return None


def _kind(graph: Captured, mask: Mask) -> str:
    if mask.fill is None or not mask.inverted:
        return kind_of(graph, mask.node)
    with torch.no_grad():
        return _inverted_kind(graph, mask.node)


def _inverted_kind(graph: Captured, node: fx.Node) -> str:
    """The kind of a boolean mask that is True where attention must not look."""
    seen = insert(graph, _after(node), aten.logical_not.default, (node,), like=node)
    kind = kind_of(graph, seen)
    graph.module.graph.erase_node(seen)
    return kind


def _after(node: fx.Node) -> fx.Node:
    return node.next


def _rewrite(graph: Captured, found: Attention, kinds: dict[fx.Node, str]) -> fx.Node:
    root = found.inside[0]
    kept = [mask for mask in found.masks if kinds[mask.node] == "kept"]
    causal = not kept and any(kinds[mask.node] == "causal" for mask in found.masks)
    if kept:  # a causal mask beside one that is kept is added to it
        kept += [mask for mask in found.masks if kinds[mask.node] == "causal"]
    operands = [found.query, found.key, found.value]
    grouped = _without_repeats(found, bool(kept))
    if grouped is not None:
        operands[1:] = grouped
    query, key, value = (_placed(graph, operand, root) for operand in operands)
    mask = _mask(graph, found, kept, root)
    missing = 4 - query.meta["val"].dim()
    for _ in range(missing):
        query, key, value = (insert(graph, root, aten.unsqueeze.default, (node, 0), like=root) for node in (query, key, value))
    if mask is not None and missing and mask.meta["val"].dim() > 2:
        mask = insert(graph, root, aten.unsqueeze.default, (mask, 0), like=root)
    options = {"scale": found.scale, "enable_gqa": grouped is not None}
    new = insert(graph, root, aten.scaled_dot_product_attention.default, (query, key, value, mask, 0.0, causal), options, like=root)
    for _ in range(missing):
        new = insert(graph, root, aten.squeeze.dim, (new, 0), like=root)
    if found.result_order != tuple(range(len(found.result_order))):
        new = insert(graph, root, aten.permute.default, (new, list(found.result_order)), like=root)
    return new


def _placed(graph: Captured, operand: Operand, before: fx.Node) -> fx.Node:
    """The operand as [..., tokens, features]: permuted if it lies otherwise."""
    if operand.order == tuple(range(len(operand.order))):
        return operand.node
    if operand.order == (*range(len(operand.order) - 2), len(operand.order) - 1, len(operand.order) - 2):
        return insert(graph, before, aten.transpose.int, (operand.node, -2, -1), like=before)
    return insert(graph, before, aten.permute.default, (operand.node, list(operand.order)), like=before)


def _mask(graph: Captured, found: Attention, kept: list[Mask], before: fx.Node) -> fx.Node | None:
    """One mask of all that are kept: a boolean one alone stays boolean, several are added."""
    if not kept:
        return None
    if len(kept) == 1 and kept[0].fill == float("-inf"):
        mask = kept[0]
        return insert(graph, before, aten.logical_not.default, (mask.node,), like=before) if mask.inverted else mask.node
    terms = [_additive(graph, mask, found, before) for mask in kept]
    whole = terms[0]
    for term in terms[1:]:
        whole = insert(graph, before, aten.add.Tensor, (whole, term), like=before)
    return whole


def _additive(graph: Captured, mask: Mask, found: Attention, before: fx.Node) -> fx.Node:
    if mask.fill is None:
        return mask.node
    value = found.query.node.meta["val"]
    options = {"dtype": value.dtype, "device": value.device}
    fill, zero = (insert(graph, before, aten.full.default, ([], number), options, like=before) for number in (mask.fill, 0.0))
    chosen = (fill, zero) if mask.inverted else (zero, fill)
    return insert(graph, before, aten.where.self, (mask.node, *chosen), like=before)


def _without_repeats(found: Attention, masked: bool) -> list[Operand] | None:
    """Key and value before their heads were repeated for the query's; None where they were not, or where repeating is faster."""
    if len(found.query.shape) != 4 or (masked and found.query.node.meta["val"].is_cuda):
        return None
    single = [_unrepeated(operand) for operand in (found.key, found.value)]
    if single[0] is None or single[1] is None:
        return None
    heads = [one.shape[1] for one in single if one is not None]
    return [one for one in single if one is not None] if same_size(*heads) else None


def _unrepeated(operand: Operand) -> Operand | None:
    """[B,H,T,D] of which [B,H*n,T,D] was made by repeating every head n times."""
    node, _ = below(operand.node, narrowing=False)
    if operand.order[1] != 1 or operand.order[0] != 0:
        return None
    if is_op(node, aten.repeat_interleave) and argument(node, "dim") in (1, -3) and isinstance(given(node, 1), int):
        return Operand(given(node, 0), operand.order)
    if not is_op(node, aten.reshape, aten.view, aten._unsafe_view) or not is_op(given(node, 0), aten.expand):
        return None
    expanded = given(node, 0)
    single = given(expanded, 0)
    if not is_op(single, aten.unsqueeze) or given(single, 1) not in (2, -3):
        return None
    source: Any = given(single, 0)
    before, repeated, after = source.meta["val"].shape, expanded.meta["val"].shape, node.meta["val"].shape
    if len(before) != 4 or len(repeated) != 5 or len(after) != 4:
        return None
    kept = all(same_size(before[dim], after[dim]) for dim in (0, 2, 3)) and same_size(repeated[1] * repeated[2], after[1])
    return Operand(source, operand.order) if kept else None
