"""What a mask of attention really is: nothing, causal, or something to keep.

    mask ──reads no input's values?──> run it alone, at batch 1, 2, 3 and the example's ──> all zero: none; lower triangle: causal
         ──reads them──> kept as it is

Hugging Face models build their masks from positions and the batch size, in twenty nodes: the values are the same at every call. A mask
counts as causal only if every element says so: exactly zero on and below the diagonal, and a value above it that leaves nothing of
any score after softmax. Masks that depend on the batch size are decided from four of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .edit import is_op, is_random, mutates
from .patterns import given

if TYPE_CHECKING:
    from .capture import Captured

aten = torch.ops.aten
MOST_ELEMENTS = 1 << 26


def kind_of(graph: Captured, mask: fx.Node) -> str:
    """ "none", "causal", or "kept" of an additive mask, or of a boolean one that is True where attention may look."""
    values = mask_values(graph, mask)
    if not values:
        return "kept"
    kinds = {_kind(value) for value in values}
    return kinds.pop() if len(kinds) == 1 else "kept"


def _kind(value: torch.Tensor) -> str:
    seen = value if value.dtype == torch.bool else value == 0
    if bool(seen.all()):
        return "none"
    if value.dim() < 2 or value.shape[-1] != value.shape[-2]:
        return "kept"
    lower = torch.ones(value.shape[-2:], dtype=torch.bool, device=value.device).tril()
    if not torch.equal(seen, lower.expand_as(seen)):
        return "kept"
    hidden = None if value.dtype == torch.bool else value.masked_select(~seen)
    return "causal" if hidden is None or bool((hidden <= nothing_left(value.dtype)).all()) else "kept"


def nothing_left(dtype: torch.dtype) -> float:
    """The largest number that, added to any score of this dtype, leaves a probability of exactly zero beside one that is seen."""
    return max(torch.finfo(dtype).min, -1e30)


def mask_values(graph: Captured, mask: fx.Node) -> list[torch.Tensor]:
    """The mask at several batch sizes; empty where it depends on what the inputs hold, or is too large to look at."""
    needed = _needed(mask)
    if needed is None:
        return []
    sizes = sorted({1, 2, 3, graph.batch}) if any(is_op(node, aten.sym_size) for node in needed) else [graph.batch]
    shape = mask.meta["val"].shape
    if len(sizes) * max(sizes) * torch.Size([size for size in shape if isinstance(size, int)]).numel() > MOST_ELEMENTS:
        return []
    return [_run(graph, needed, mask, size) for size in sizes]


def _needed(mask: fx.Node) -> list[fx.Node] | None:
    """The nodes a mask is computed from, in order; None where the values of an input are among them."""
    found: set[fx.Node] = set()
    stack = [mask]
    while stack:
        node = stack.pop()
        if node in found:
            continue
        if node.op == "placeholder" or mutates(node) or is_random(node):
            return None
        found.add(node)
        if not _is_batch_size(node):
            stack.extend(node.all_input_nodes)
        elif given(node, 1) != 0:
            return None
    return [node for node in mask.graph.nodes if node in found]


def _is_batch_size(node: fx.Node) -> bool:
    return is_op(node, aten.sym_size) and given(node, 0).op == "placeholder"


def _run(graph: Captured, needed: list[fx.Node], mask: fx.Node, batch: int) -> torch.Tensor:
    values: dict[fx.Node, Any] = {}
    attributes = fx.Interpreter(graph.module)
    with torch.no_grad():
        for node in needed:
            if node.op == "get_attr":
                values[node] = attributes.fetch_attr(str(node.target))
            elif _is_batch_size(node):
                values[node] = batch
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                target: Any = node.target
                values[node] = target(*args, **kwargs)
    found: torch.Tensor = values[mask]
    return found
