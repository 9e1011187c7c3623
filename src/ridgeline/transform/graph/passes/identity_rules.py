"""The rules of the identities pass, each a question about one node.

same_memory(node)     -> the argument it returns as it is, or None      view, to, dropout(eval), slice of all, permute(0, 1, …)
equal_value(g, node, …) -> the argument it copies unchanged, or None    clone, x + 0, x * 1, cat of one
join_permutes, join_reshapes, infer_size: rewrite in place, say what was done, or None
"""

from __future__ import annotations

import operator
from collections.abc import Set
from typing import Any

import torch
from torch import fx

from ..capture import Captured
from ..edit import DROPOUTS, argument, constant, insert, is_op, only_user, replace_all, same_size, same_sizes
from ..manager import PassResult, site

_aten = torch.ops.aten
RESHAPES = (_aten.view, _aten.reshape, _aten._unsafe_view, _aten.flatten, _aten.unflatten, _aten.squeeze, _aten.unsqueeze)
"""Ops that keep the elements in order and change the sizes."""
PERMUTES = (_aten.permute, _aten.transpose, _aten.t, _aten.numpy_T, _aten.mT)
KEEPERS = (_aten.slice, _aten.expand, _aten.expand_as, _aten.view_as, _aten.reshape_as, _aten.alias, _aten.detach)
"""Ops that give their argument itself when the sizes are the same."""
SMALL = 4096  # elements of a constant worth reading to see whether it is all 0 or all 1


def tensor(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node, or None."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def source_of(node: fx.Node) -> fx.Node | None:
    """The first argument, if it is a node with a tensor."""
    first = node.args[0] if node.args else None
    return first if isinstance(first, fx.Node) and tensor(first) is not None else None


def same_memory(node: fx.Node) -> fx.Node | None:
    """The argument a call returns as it is: the same memory, sizes and dtype."""
    source, ours = source_of(node), tensor(node)
    if source is None or ours is None:
        return None
    theirs = source.meta["val"]
    if is_op(node, *DROPOUTS):
        return None if node.args[2] else source
    if ours.dtype != theirs.dtype or ours.device != theirs.device or not same_sizes(ours, theirs):
        return None
    if is_op(node, *RESHAPES, *KEEPERS):  # a slice as large as its argument is all of it, whatever its step
        return source if node.target is not _aten.view.dtype else None
    if is_op(node, *PERMUTES):
        order = permutation(node)
        return source if order == sorted(order or [-1]) else None
    if is_op(node, _aten.to, _aten.type_as, _aten.contiguous):
        return source if _to_does_nothing(node, ours, theirs) else None
    return None


def _to_does_nothing(node: fx.Node, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """`to` and `contiguous` that find what they ask for."""
    if argument(node, "copy", False):
        return False
    asked = argument(node, "memory_format")
    if is_op(node, _aten.contiguous) and not isinstance(asked, torch.memory_format):
        asked = torch.contiguous_format  # a schema gives its default as a number
    if asked in (None, torch.preserve_format):
        return same_layout(ours, theirs)
    return isinstance(asked, torch.memory_format) and bool(theirs.is_contiguous(memory_format=asked))


def same_layout(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal sizes, strides and dtype, for every batch size."""
    if ours.dtype != theirs.dtype or ours.device != theirs.device or not same_sizes(ours, theirs):
        return False
    return all(same_size(a, b) for a, b in zip(ours.stride(), theirs.stride(), strict=True))


def equal_value(graph: Captured, node: fx.Node, changed: Set[fx.Node]) -> fx.Node | None:
    """The argument a call copies without changing a number; constants in `changed` hold other numbers in the next run."""
    ours = tensor(node)
    found = _copied(graph, node, changed) if ours is not None else None
    theirs = tensor(found)
    return found if ours is not None and theirs is not None and same_layout(ours, theirs) else None


def _copied(graph: Captured, node: fx.Node, changed: Set[fx.Node]) -> fx.Node | None:
    if is_op(node, _aten.clone, _aten.lift_fresh_copy, _aten._to_copy):
        return source_of(node)
    if is_op(node, _aten.cat, _aten.concat):
        parts = node.args[0]
        return parts[0] if isinstance(parts, list | tuple) and len(parts) == 1 and isinstance(parts[0], fx.Node) else None
    first, second = (*node.args, None, None)[:2]

    def all_are(value: Any, number: int) -> bool:
        return value not in changed and _is_all(graph, value, number)

    if is_op(node, _aten.add, _aten.sub):
        right = all_are(second, 0)
        left = is_op(node, _aten.add) and all_are(first, 0) and argument(node, "alpha", 1) == 1
    else:
        right, left = _multiplies(node) and all_are(second, 1), is_op(node, _aten.mul) and all_are(first, 1)
    kept = first if right else second if left else None
    return kept if isinstance(kept, fx.Node) else None


def _multiplies(node: fx.Node) -> bool:
    if is_op(node, _aten.div):
        return argument(node, "rounding_mode") is None
    return is_op(node, _aten.mul) or node.target is _aten.pow.Tensor_Scalar


def _is_all(graph: Captured, value: Any, number: int) -> bool:
    """Whether an argument is this number, or a small constant of nothing else."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int | float):
        return value == number
    known = constant(graph, value)
    return known is not None and not known.is_meta and 0 < known.numel() <= SMALL and bool((known == number).all())


def permutation(node: fx.Node) -> list[int] | None:
    """Where each dimension of the result comes from."""
    source = source_of(node)
    if source is None:
        return None
    count = source.meta["val"].dim()
    order = list(range(count))
    if is_op(node, _aten.permute):
        asked = node.args[1]
        return [int(str(dim)) % count for dim in asked] if isinstance(asked, list | tuple) else None
    if is_op(node, _aten.transpose):
        if not count or not all(isinstance(dim, int) for dim in node.args[1:3]):
            return None
        first, second = (int(str(dim)) % count for dim in node.args[1:3])
        order[first], order[second] = order[second], order[first]
    elif is_op(node, _aten.mT):
        order[-2:] = order[-2:][::-1]
    elif is_op(node, _aten.t, _aten.numpy_T):
        order.reverse()
    else:
        return None
    return order


def join_permutes(graph: Captured, node: fx.Node) -> str | None:
    """permute(permute(x)) as one permute, or x. Views both, so in-place ops see the same memory as before."""
    if not is_op(node, *PERMUTES):
        return None
    inner = source_of(node)
    if inner is None or not is_op(inner, *PERMUTES):
        return None
    first, second, source = permutation(inner), permutation(node), source_of(inner)
    if first is None or second is None or source is None:
        return None
    order = [first[dim] for dim in second]
    if order == sorted(order):
        replace_all(node, source)
    else:
        replace_all(node, insert(graph, node, _aten.permute.default, (source, order), like=node))
    graph.module.graph.erase_node(node)
    return "two permutes -> " + ("none" if order == sorted(order) else "one")


def join_reshapes(graph: Captured, node: fx.Node) -> str | None:
    """reshape(reshape(x)) as one reshape, or x; the caller has seen that no op writes this memory."""
    inner = source_of(node)
    if not is_op(node, *RESHAPES) or inner is None or not is_op(inner, *RESHAPES) or _aten.view.dtype in (node.target, inner.target):
        return None
    source, copies = source_of(inner), any(is_op(one, _aten.reshape, _aten.flatten, _aten._unsafe_view) for one in (node, inner))
    if source is None or (copies and only_user(inner) is not node):
        return None
    if same_layout(node.meta["val"], source.meta["val"]):
        replace_all(node, source)
        what = "two reshapes -> none"
    else:
        sizes = written_sizes(node.meta["val"])
        if sizes is None or _only_ones(node, inner):
            return None
        target = _aten.reshape.default if copies else _aten.view.default
        replace_all(node, insert(graph, node, target, (source, sizes), like=node))
        what = "two reshapes -> one"
    graph.module.graph.erase_node(node)
    return what


def _only_ones(node: fx.Node, inner: fx.Node) -> bool:
    """squeeze and unsqueeze work on any strides; joined with each other they may have no single view."""
    return is_op(node, _aten.squeeze, _aten.unsqueeze) or is_op(inner, _aten.squeeze, _aten.unsqueeze)


def written_sizes(value: torch.Tensor) -> list[int] | None:
    """The sizes as numbers, -1 for the one that depends on the batch; None where two do, or a 0 makes -1 unclear."""
    sizes = [-1 if isinstance(size, torch.SymInt) else int(size) for size in value.shape]
    return sizes if sizes.count(-1) <= 1 and 0 not in sizes else None


def infer_size(graph: Captured, node: fx.Node) -> str | None:
    """A size computed from the batch is left to the op: view(x, [size, 4]) -> view(x, [-1, 4])."""
    ours, source = tensor(node), source_of(node)
    asked = node.args[1] if len(node.args) > 1 else None
    if ours is None or source is None or not isinstance(asked, list | tuple) or not any(isinstance(one, fx.Node) for one in asked):
        return None
    if is_op(node, _aten.view, _aten.reshape) and node.target is not _aten.view.dtype:
        sizes = written_sizes(ours)
    elif is_op(node, _aten.expand):
        sizes = _expanded(ours, source.meta["val"])
    else:
        return None
    if sizes is None:
        return None
    node.update_arg(1, sizes)
    return "a computed size -> -1"


def _expanded(ours: torch.Tensor, theirs: torch.Tensor) -> list[int] | None:
    """Sizes for expand where every size that depends on the batch is one the argument has already."""
    new = ours.dim() - theirs.dim()
    sizes: list[int] = []
    for dim, size in enumerate(ours.shape):
        if not isinstance(size, torch.SymInt):
            sizes.append(int(size))
        elif dim >= new and same_size(size, theirs.shape[dim - new]):
            sizes.append(-1)
        else:
            return None
    return sizes


def join_batch_sizes(graph: Captured, result: PassResult) -> None:
    """Every size that is the batch itself is read from the first input that has it; sizes that are numbers become numbers."""
    nodes = graph.module.graph
    first = next((node for node in nodes.nodes if node.op == "placeholder" and _opens(tensor(node))), None)
    kept: fx.Node | None = None
    for node in list(nodes.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.SymInt | int) or isinstance(value, bool):
            continue
        if first is None or not same_size(value, first.meta["val"].shape[0]):
            continue
        if kept is None and is_op(node, _aten.sym_size) and node.args == (first, 0):
            kept = node
            continue
        if kept is None:
            head = next(one for one in nodes.nodes if one.op not in ("placeholder", "get_attr"))
            kept = insert(graph, head, _aten.sym_size.int, (first, 0), like=node)
            kept.meta["val"] = first.meta["val"].shape[0]
        if node.users and node.target is not operator.getitem:
            result.changed.append(site([node], "the batch size, read from the input"))
            replace_all(node, kept)
            nodes.erase_node(node)


def _opens(value: torch.Tensor | None) -> bool:
    return value is not None and value.dim() > 0 and isinstance(value.shape[0], torch.SymInt)
