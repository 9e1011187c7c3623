"""Which ops may run in either layout, and in which frame: regions that grow from convolutions, pools and norms.

    anchors: conv, pool, batch norm, resize …             frame natural (N, C, H, W)
      ──grow along tensors of the same rank──> computing ops (add, cat, gelu, layer_norm, linear …), views that keep the order
        (slice, chunk), permutes (which turn the frame), in-place ops, and layout conversions by hand (contiguous, clone, to)
      ──stop at──> rigid nodes: inputs, outputs, views and reshapes, ops with integer inputs, unknown ops

A rigid node gets every tensor in the order it had before. Tensors that some op writes into are free only where the sharing is
plain: a fresh result and in-place ops on it, no views. Every value of a computing op is independent of strides, so only time is at stake.
"""

from __future__ import annotations

import operator
from collections import deque
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..edit import aliases, argument, is_op, is_random, mutates, schema_of, written_arguments
from .order import EITHER, OTHER, Frame, Seen, label_of, natural

if TYPE_CHECKING:
    from ..capture import Captured

aten: Any = torch.ops.aten
CONVOLUTIONS = (
    "conv2d",
    "conv3d",
    "conv_transpose2d",
    "conv_transpose3d",
    "convolution",
    "_convolution",
    "_convolution_pointwise",
    "onednn_conv",
)
ANCHORS = {
    *CONVOLUTIONS,
    *("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "max_pool3d", "avg_pool3d", "adaptive_avg_pool3d"),
    *("batch_norm", "instance_norm", "group_norm", "pixel_shuffle", "pixel_unshuffle"),
    *("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_nearest3d", "upsample_trilinear3d"),
}
NAMESPACES = ("aten", "mkldnn")
OURS = ("onednn_conv", "onednn_linear")  # our operators that take any strides
SAME_ORDER_VIEWS = ("slice", "chunk", "split", "split_with_sizes", "narrow", "alias", "detach", "dropout")


class Kind(Enum):
    """What a node is to the choice of layouts."""

    COMPUTE = "compute"
    VIEW = "view"
    PERMUTE = "permute"
    IN_PLACE = "in place"
    BY_HAND = "conversion by hand"
    RIGID = "rigid"


@dataclass(slots=True)
class Region:
    """The nodes that may be laid out either way; everything else is rigid."""

    kinds: dict[fx.Node, Kind]
    inside: dict[fx.Node, Frame]  # the frame of a node's inputs
    outside: dict[fx.Node, Frame]  # the frame of its result, where that has the rank of its inputs
    written: set[fx.Node]  # nodes of the region whose memory is written after it was made: copies are not shared

    def inputs(self, node: fx.Node, seen: dict[fx.Node, Any]) -> list[fx.Node]:
        """The tensors whose order matters to a node: of the frame's rank, no weights, more than one channel and pixel."""
        return [source for source in node.all_input_nodes if image(source, seen, self.inside[node]) is not None]


def image(source: fx.Node, seen: dict[fx.Node, Any], frame: Frame) -> Seen | None:
    """The tensor behind a node (the largest of a list), if it has the frame's rank, two orders, and is no constant."""
    found = main_tensor(seen.get(source))
    if found is None or source.op == "get_attr" or len(found.shape) != len(frame):
        return None
    return None if label_of(found.shape, found.strides, frame) == EITHER else found


def main_tensor(value: Any) -> Seen | None:
    """The tensor of a value, or the largest of a list of tensors (a split: all lie alike)."""
    found = [one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, Seen)]
    return max(found, key=lambda one: prod(one.shape)) if found else None


def name_of(node: fx.Node) -> str:
    """The op's name without namespace and overload; "" for what is no op."""
    schema = schema_of(node)
    return schema.name.split("::")[-1] if schema is not None else ""


def is_convolution(node: fx.Node) -> bool:
    return name_of(node) in CONVOLUTIONS


def find_region(graph: Captured, seen: dict[fx.Node, Any], pinned: frozenset[str] = frozenset()) -> Region:
    """Grow from the anchors; `pinned` names nodes that stay rigid."""
    kinds = {node: Kind.RIGID if node.name in pinned else _kind(node, seen) for node in graph.module.graph.nodes}
    while True:
        written = _free_writes(graph, kinds)
        region = Region(kinds, {}, {}, written)
        refused = _grow(region, seen)
        if not refused:
            return region
        for node in refused:
            kinds[node] = Kind.RIGID


def _kind(node: fx.Node, seen: dict[fx.Node, Any]) -> Kind:
    """What a node could be, by its op and operands alone."""
    if node.target is operator.getitem:
        return Kind.VIEW if name_of(node.args[0]) in SAME_ORDER_VIEWS else Kind.RIGID  # type: ignore[arg-type]
    schema = schema_of(node)
    if schema is None or is_random(node) or not _floating(node, seen):
        return Kind.RIGID
    namespace, name = schema.name.split("::")
    if mutates(node):
        return Kind.IN_PLACE if _plainly_in_place(node) else Kind.RIGID
    if is_op(node, aten.permute) or node.target is aten.transpose.int:
        return Kind.PERMUTE
    if name in SAME_ORDER_VIEWS:
        return Kind.VIEW
    if _by_hand(node, seen):
        return Kind.BY_HAND
    computes = namespace in NAMESPACES or name in OURS
    fresh = name in ANCHORS or not aliases(node)
    return Kind.COMPUTE if computes and fresh and isinstance(seen.get(node), Seen) else Kind.RIGID


def _plainly_in_place(node: fx.Node) -> bool:
    """Whether an op writes its first argument and nothing else, and leaves that its sizes."""
    schema, tags = schema_of(node), getattr(node.target, "tags", ())
    if schema is None or not schema.name.endswith("_") or name_of(node) in ("resize_", "set_") or torch.Tag.inplace_view in tags:
        return False
    return written_arguments(node) == [node.args[0]] and len(schema.returns) == 1


def _floating(node: fx.Node, seen: dict[fx.Node, Any]) -> bool:
    """Whether the op works on floating tensors (masks beside them are fine): others cannot be timed on made-up values."""
    tensors = [found for source in node.all_input_nodes if (found := main_tensor(seen.get(source))) is not None]
    return bool(tensors) and all(one.dtype.is_floating_point or one.dtype is torch.bool for one in tensors)


def _by_hand(node: fx.Node, seen: dict[fx.Node, Any]) -> bool:
    """Whether a node changes nothing but the order in memory; results that go to the user stay copies of their own."""
    if not is_op(node, aten.contiguous, aten.clone, aten.to, aten._to_copy) or any(user.op == "output" for user in node.users):
        return False
    source, result = seen[node.all_input_nodes[0]], seen[node]
    return isinstance(source, Seen) and isinstance(result, Seen) and (source.dtype, source.device) == (result.dtype, result.device)


def _free_writes(graph: Captured, kinds: dict[fx.Node, Kind]) -> set[fx.Node]:
    """Nodes in memory that is written, where that is harmless; the others become rigid."""
    memory: dict[fx.Node, frozenset[fx.Node]] = {}
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.module.graph.nodes:
        shares = aliases(node) and kinds[node] is not Kind.COMPUTE
        memory[node] = frozenset().union(*(memory[source] for source in node.all_input_nodes)) if shares else frozenset((node,))
        for base in memory[node]:
            members.setdefault(base, []).append(node)
    found: set[fx.Node] = set()
    for base in {base for node in graph.module.graph.nodes for target in written_arguments(node) for base in memory[target]}:
        allowed = all(kinds[one] is (Kind.COMPUTE if one is base else Kind.IN_PLACE) and memory[one] == {base} for one in members[base])
        if allowed:
            found.update(members[base])
        else:
            kinds.update(dict.fromkeys(members[base], Kind.RIGID))
    return found - {node for node in found if kinds[node] is Kind.RIGID}


def _grow(region: Region, seen: dict[fx.Node, Any]) -> set[fx.Node]:
    """Give frames to all nodes reached from the anchors; gives back nodes that cannot be part of it."""
    waiting: deque[fx.Node] = deque()
    for node, kind in region.kinds.items():
        found = main_tensor(seen.get(node.args[0])) if name_of(node) in ANCHORS and isinstance(node.args[0], fx.Node) else None
        if kind is Kind.COMPUTE and found is not None and len(found.shape) in (4, 5):
            _place(region, node, natural(len(found.shape)), seen)
            waiting.append(node)
    while waiting:
        node = waiting.popleft()
        for source in region.inputs(node, seen):
            if region.kinds[source] is not Kind.RIGID and source not in region.inside:
                frame = region.inside[node]
                _place(region, source, _before(source, frame), seen)
                waiting.append(source)
        if node in region.outside and image(node, seen, region.outside[node]) is not None:
            for user in node.users:
                if region.kinds[user] is not Kind.RIGID and user not in region.inside:
                    _place(region, user, region.outside[node], seen)
                    waiting.append(user)
    return {node for node in region.inside if _misfit(region, node, seen)}


def _place(region: Region, node: fx.Node, frame: Frame, seen: dict[fx.Node, Any]) -> None:
    region.inside[node] = frame
    result = main_tensor(seen.get(node))
    if result is not None and len(result.shape) == len(frame):
        region.outside[node] = _after(node, frame)


def _permutation(node: fx.Node, rank: int) -> tuple[int, ...]:
    """Which dimension of its input each dimension of a permute's result is."""
    if is_op(node, aten.permute):
        return tuple(dimension % rank for dimension in argument(node, "dims"))
    swapped = list(range(rank))
    first, second = argument(node, "dim0") % rank, argument(node, "dim1") % rank
    swapped[first], swapped[second] = second, first
    return tuple(swapped)


def _after(node: fx.Node, frame: Frame) -> Frame:
    """The frame of a node's result."""
    if is_op(node, aten.permute) or node.target is aten.transpose.int:
        return tuple(frame[dimension] for dimension in _permutation(node, len(frame)))
    return frame


def _before(node: fx.Node, frame: Frame) -> Frame:
    """The frame a node's inputs must have for its result to have `frame`."""
    if is_op(node, aten.permute) or node.target is aten.transpose.int:
        turned = _permutation(node, len(frame))
        return tuple(frame[turned.index(dimension)] for dimension in range(len(frame)))
    return frame


def _misfit(region: Region, node: fx.Node, seen: dict[fx.Node, Any]) -> bool:
    """Whether frames disagree at a node, or a tensor around it lies in neither order or is open in other sizes than its batch."""
    frame = region.inside[node]
    for source in region.inputs(node, seen):
        found = image(source, seen, frame)
        if found is None or label_of(found.shape, found.strides, frame) == OTHER or not _only_batch_open(source, frame):
            return True
        if region.outside.get(source, frame) != frame:
            return True
    if node not in region.outside:
        return region.kinds[node] is not Kind.COMPUTE
    result, frame = main_tensor(seen.get(node)), region.outside[node]
    return result is None or label_of(result.shape, result.strides, frame) == OTHER or not _only_batch_open(node, frame)


def _only_batch_open(node: fx.Node, frame: Frame) -> bool:
    """Whether no size but the batch may vary: the others tell the two orders apart."""
    value = node.meta.get("val")
    value = value[0] if isinstance(value, list | tuple) and value else value
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return all(what == 0 for size, what in zip(sizes, frame, strict=False) if isinstance(size, torch.SymInt))
