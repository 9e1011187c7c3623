"""Casts that cancel, and casts made where there is less to cast. Only exact rewrites: no number changes.

    to(to(x, float64), float32)          ──> x              x float32: float64 holds every float32
    to(to(x: bfloat16, float32), float16) ──> to(x, float16)
    to(view(to(x, wide)), narrow)        ──> the same, through views between the two
    to(expand(x, big), dtype)            ──> expand(to(x, dtype), big)        fewer elements
    slice(to(x, dtype))                  ──> to(slice(x), dtype)              when the slice is all that is used

Two equal casts of one tensor are the `common` pass's; a cast to the same dtype is the `identities` pass's. A cast whose
memory some op writes is left alone, and so is one whose result is viewed again after it would be expanded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..capture import Captured
from ..edit import aliases, argument, bytes_of, insert, is_op, only_user, replace_all, returned, storages, tidy, written
from ..manager import PassContext, PassResult, Site, register, site
from .identity_rules import same_layout, source_of, tensor

_aten = torch.ops.aten
VIEWS = (_aten.view, _aten.reshape, _aten.permute, _aten.transpose, _aten.unsqueeze, _aten.squeeze, _aten.t, _aten.flatten, _aten.unflatten)
"""Ops that move elements and change none; a cast may go before or after."""
FEWER = (_aten.slice, _aten.select, _aten.narrow)
FLOATS = {torch.float16: (11, 5), torch.bfloat16: (8, 8), torch.float32: (24, 8), torch.float64: (53, 11)}  # digits, exponent bits
INTEGERS = {torch.bool: 1, torch.uint8: 8, torch.int8: 7, torch.int16: 15, torch.int32: 31, torch.int64: 63}  # bits of the magnitude


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of `narrow` is a value of `wide`."""
    if wide == narrow:
        return True
    if narrow in FLOATS:
        return wide in FLOATS and all(a >= b for a, b in zip(FLOATS[wide], FLOATS[narrow], strict=True))
    if narrow not in INTEGERS:
        return False
    if wide in FLOATS:
        return FLOATS[wide][0] >= INTEGERS[narrow]
    return wide in INTEGERS and wide != torch.bool and INTEGERS[wide] >= INTEGERS[narrow] and (wide != torch.uint8 or narrow == torch.bool)


def is_cast(node: Any) -> bool:
    """A call that changes the dtype and nothing else."""
    if not is_op(node, _aten.to, _aten._to_copy):
        return False
    ours, source = tensor(node), source_of(node)
    if ours is None or source is None or argument(node, "memory_format") not in (None, torch.preserve_format):
        return False
    theirs = source.meta["val"]
    return bool(ours.device == theirs.device and ours.dtype != theirs.dtype and ours.layout == theirs.layout)


@register("casts")
@dataclass(frozen=True, slots=True)
class Casts:
    """Precision casts moved or removed."""

    name: str = "casts"

    def run(self, graph: Captured, context: PassContext) -> PassResult:
        result = PassResult()
        changed, where, outputs = written(graph), storages(graph), returned(graph)
        for node in list(graph.module.graph.nodes):
            if not is_cast(node):
                continue
            touched = where[node] | {base for source in node.all_input_nodes for base in where.get(source, frozenset())}
            if touched & changed:
                result.refused.append(site([node], "an op writes what it reads or gives"))
                continue
            kept = bool(where[node] & outputs)
            done = _cancel(graph, node, kept, where, changed) or (
                None if kept else _before_expand(graph, node) or _after_slice(graph, node)
            )
            if done is not None:
                result.changed.append(done)
                where, outputs = storages(graph), returned(graph)
        if result.changed:
            tidy(graph)
        return result


Storages = dict[fx.Node, frozenset[fx.Node]]


def _cancel(graph: Captured, node: fx.Node, is_output: bool, where: Storages, changed: set[fx.Node]) -> Site | None:
    """cast(views(cast(x))) with an exact first cast: the views of x itself, and one cast or none."""
    views: list[fx.Node] = []
    inner = source_of(node)
    while inner is not None and is_op(inner, *VIEWS) and inner.target is not _aten.view.dtype and only_user(inner) is not None:
        views.append(inner)
        inner = source_of(inner)
    if inner is None or not is_cast(inner):
        return None
    source = source_of(inner)
    if source is None or where[source] & changed:
        return None
    first, middle, last = (tensor(one) for one in (source, inner, node))
    assert first is not None and middle is not None and last is not None
    if not holds(middle.dtype, first.dtype) or not (last.dtype == first.dtype or last.dtype in FLOATS):
        return None
    if last.dtype == first.dtype and is_output:
        return None  # the caller would get the argument itself
    if not same_layout(middle.to(first.dtype), first):
        return None  # the cast also changed the strides, which a view after it may need
    place = site(
        [inner, *reversed(views), node],
        f"{_short(first)} -> {_short(middle)} -> {_short(last)} is exact: one cast or none",
        bytes_of(graph, inner),
    )
    value = source
    for view in reversed(views):
        value = insert(graph, node, _called(view), (value, *view.args[1:]), view.kwargs, like=view)
    if last.dtype != first.dtype:
        value = insert(graph, node, _aten.to.dtype, (value, last.dtype), like=node)
    replace_all(node, value)
    graph.module.graph.erase_node(node)
    return place


def _called(node: fx.Node) -> Any:
    """The op a node calls; a view becomes a reshape, which takes any strides."""
    return _aten.reshape.default if is_op(node, _aten.view) else node.target


def _short(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _before_expand(graph: Captured, node: fx.Node) -> Site | None:
    """cast(expand(x)) -> expand(cast(x))."""
    wide = source_of(node)
    if wide is None or not is_op(wide, _aten.expand) or only_user(wide) is not node or any(aliases(user) for user in node.users):
        return None
    source = source_of(wide)
    if source is None or bytes_of(graph, source) >= bytes_of(graph, wide):
        return None
    dtype = node.meta["val"].dtype
    place = site([wide, node], "the cast goes before the expand", bytes_of(graph, node))
    cast = insert(graph, node, _aten.to.dtype, (source, dtype), like=node)
    replace_all(node, insert(graph, node, _called(wide), (cast, *wide.args[1:]), wide.kwargs, like=wide))
    graph.module.graph.erase_node(node)
    return place


def _after_slice(graph: Captured, node: fx.Node) -> Site | None:
    """slice(cast(x)) -> cast(slice(x))."""
    part, source = only_user(node), source_of(node)
    if part is None or source is None or not is_op(part, *FEWER) or any(aliases(user) for user in part.users):
        return None
    if bytes_of(graph, part) >= bytes_of(graph, node):
        return None
    place = site([node, part], "the cast goes after the slice", bytes_of(graph, node) - bytes_of(graph, part))
    smaller = insert(graph, part, _called(part), (source, *part.args[1:]), part.kwargs, like=part)
    replace_all(part, insert(graph, part, _aten.to.dtype, (smaller, node.meta["val"].dtype), like=node))
    graph.module.graph.erase_node(part)
    graph.module.graph.erase_node(node)
    return place
