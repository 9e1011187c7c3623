"""Rotary positions: x * cos + rotate_half(x) * sin of query and key become one kernel on GPUs.

    q * cos + cat(-q2, q1) * sin,  k * cos + cat(-k2, k1) * sin     q1, q2: halves of the last dimension (slice, chunk or split)
        -> graph_rope(q, k, cos, sin)         q [B,H,T,D] (seq_dim 2) or [B,T,H,D] (seq_dim 1); cos, sin [T,D] or [B,T,D]

Where the minus already stands in sin (`signed`), the halves are only swapped. Both halves turn the same way as in the model: the
interleaved convention does not match. Replaced where the shipped table says the kernel wins; on CPUs it stays torch. Ref: Su 2021.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import fx

from ..edit import argument, insert, is_op, same_size, tidy
from ..manager import PassContext, PassResult, register, site
from ..patterns import Input, Match, Scene, aten, below, between, erase, given, loosen_views, product, total

if TYPE_CHECKING:
    from ..capture import Captured

TURNED = total(product(Input("x"), Input("cos")), product(Input("halves"), Input("sin")))


@dataclass(frozen=True, slots=True)
class Rotation:
    """One tensor turned by its positions."""

    match: Match
    signed: bool  # the minus is already in sin
    seq_dim: int
    tables: tuple[fx.Node, ...]  # cos, sin as the graph has them


def rotation(scene: Scene, node: fx.Node) -> Rotation | None:
    """The rotation whose result `node` is."""
    for match in scene.matches(TURNED, node):
        found = _halves(match.names["halves"], match.names["x"])
        if found is None:
            continue
        inside, signed = found
        whole = Match(match.names, (*match.inside, *(one for one in inside if one not in match.inside)), match.outside)
        tables = (match.names["cos"], match.names["sin"])
        seq_dim = _seq_dim(match.names["x"], *tables)
        return Rotation(whole, signed, seq_dim, tables) if seq_dim else None
    return None


def _halves(joined: fx.Node, x: fx.Node) -> tuple[tuple[fx.Node, ...], bool] | None:
    """The nodes of cat(-x2, x1), and whether the minus is missing."""
    if not is_op(joined, aten.cat) or len(given(joined, 0)) != 2 or not _last(joined, argument(joined, "dim", 0)):
        return None
    left, right = given(joined, 0)
    signed = not is_op(left, aten.neg)
    second = left if signed else given(left, 0)
    parts = _part(second, x, 1), _part(right, x, 0)
    if parts[0] is None or parts[1] is None:
        return None
    return (joined, *(() if signed else (left,)), *parts[0], *parts[1]), signed


def _last(node: fx.Node, dim: object) -> bool:
    return dim in (-1, node.meta["val"].dim() - 1)


def _part(node: fx.Node, x: fx.Node, which: int) -> tuple[fx.Node, ...] | None:
    """The nodes that cut half `which` of x's last dimension; None where `node` is something else."""
    width = x.meta["val"].shape[-1]
    if not isinstance(width, int) or width % 2:
        return None
    if is_op(node, aten.slice) and below(given(node, 0), narrowing=False)[0] is x and _last(x, argument(node, "dim", 0)):
        start, end = argument(node, "start") or 0, argument(node, "end")
        end = width if end is None else min(int(end), width)
        wanted = (width // 2 * which, width // 2 * (which + 1))
        return (node,) if (start, end) == wanted and argument(node, "step", 1) == 1 else None
    if not is_op(node, operator.getitem) or given(node, 1) != which:
        return None
    cut = given(node, 0)
    if not is_op(cut, aten.chunk, aten.split, aten.split_with_sizes, aten.tensor_split):
        return None
    halves = cut.meta["val"]
    even = len(halves) == 2 and all(half.shape[-1] == width // 2 and half.dim() == x.meta["val"].dim() for half in halves)
    source = below(given(cut, 0), narrowing=False)[0]
    return (node, cut) if even and source is x and _last(x, argument(cut, "dim", 0)) else None


def _seq_dim(x: fx.Node, cos: fx.Node, sin: fx.Node) -> int:
    """Which dimension the positions run along: 1 or 2; 0 where cos and sin are no tables of x's positions."""
    shape = x.meta["val"].shape
    tables = [node.meta["val"] for node in (cos, sin) if isinstance(node.meta.get("val"), torch.Tensor)]
    if len(shape) != 4 or len(tables) != 2 or tables[0].shape != tables[1].shape or not same_size(tables[0].shape[-1], shape[3]):
        return 0
    table = tables[0]
    if table.dim() == 2:
        return 2 if same_size(table.shape[0], shape[2]) else 0
    if table.dim() != 4 or not (same_size(table.shape[0], 1) or same_size(table.shape[0], shape[0])):
        return 0
    for seq_dim in (2, 1):
        if same_size(table.shape[3 - seq_dim], 1) and same_size(table.shape[seq_dim], shape[seq_dim]):
            return seq_dim
    return 0


@register("rope")
@dataclass(frozen=True)
class FuseRope:
    """See the module."""

    name: ClassVar[str] = "rope"

    def run(self, graph: Captured, context: PassContext) -> PassResult:
        """Rotations with the same tables in pairs, the rest alone."""
        result = PassResult()
        scene = Scene(graph)
        waiting: Rotation | None = None
        for node in list(scene.order):
            found = rotation(scene, node)
            if found is None:
                continue
            reason = _objection(scene, found)
            if reason is not None:
                result.refused.append(site(tuple(reversed(found.match.inside)), reason))
            elif waiting is not None and _pair(scene, waiting, found):
                _replace(scene, (waiting, found), result)
                waiting = None
            else:
                if waiting is not None:
                    _replace(scene, (waiting,), result)
                waiting = rotation(scene, node)  # again: what it reads may have just been replaced
        if waiting is not None:
            _replace(scene, (waiting,), result)
        if result.changed:
            tidy(graph)
        return result


def _objection(scene: Scene, found: Rotation) -> str | None:
    from .. import fused_ops

    names, value = found.match.names, found.match.root.meta["val"]
    if any(names[name].meta["val"].dtype != value.dtype for name in ("x", "cos", "sin")):
        return "cos, sin and the tensor turned differ in dtype"
    return scene.objection(found.match, "x", "cos", "sin") or fused_ops.no_win(scene.graph, "rope", names["x"])


def _pair(scene: Scene, first: Rotation, second: Rotation) -> bool:
    """Whether one call may do both: the same tables, and nobody reads the first result before the second is there."""
    shapes = [found.match.names["x"].meta["val"].shape for found in (first, second)]
    heads = 3 - first.seq_dim
    same = all(same_size(a, b) for dim, (a, b) in enumerate(zip(*shapes, strict=True)) if dim != heads)
    alike = (first.tables, first.signed, first.seq_dim) == (second.tables, second.signed, second.seq_dim)
    late = all(scene.order.get(user, -1) > scene.order[second.match.root] for user in first.match.root.users)
    moved = Match({}, (second.match.root, *first.match.inside), ())
    return same and alike and late and scene.disturbed(moved, [first.match.names["x"], *first.tables]) is None


def _replace(scene: Scene, found: tuple[Rotation, ...], result: PassResult) -> None:
    from .. import fused_ops

    graph, last = scene.graph, found[-1]
    place = last.match.root
    inside = tuple(node for one in found for node in reversed(one.match.inside))
    saved = sum(between(graph, one.match) for one in found)
    cos, sin = (_table(graph, node, last.seq_dim, place) for node in last.tables)
    rest = (cos, sin, last.signed, last.seq_dim)
    turned = [one.match.names["x"] for one in found]
    if len(found) == 2:
        result.changed.append(site(inside, "rotary positions of query and key -> rope", saved))
        both = insert(graph, place, fused_ops.graph_rope, (*turned, *rest), like=place)
        new = [insert(graph, place, operator.getitem, (both, index), like=place) for index in range(2)]
    else:
        result.changed.append(site(inside, "rotary positions -> rope", saved))
        new = [insert(graph, place, fused_ops.graph_rope_one, (*turned, *rest), like=place)]
    for one, node in zip(found, new, strict=True):
        one.match.root.replace_all_uses_with(node)
    erase(graph, (node for one in found for node in (*one.match.inside, *one.match.outside, *one.tables)))
    loosen_views(graph, new)
    scene.refresh()


def _table(graph: Captured, node: fx.Node, seq_dim: int, place: fx.Node) -> fx.Node:
    """cos or sin without the dimension of the heads."""
    if node.meta["val"].dim() == 2:
        return node
    if is_op(node, aten.unsqueeze) and given(node, 1) in (3 - seq_dim, -1 - seq_dim) and given(node, 0).meta["val"].dim() == 3:
        table: fx.Node = given(node, 0)
        return table
    return insert(graph, place, aten.select.int, (node, 3 - seq_dim, 0), like=place)
