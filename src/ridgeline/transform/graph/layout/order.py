"""The two memory orders of an image tensor, also where its dimensions have been permuted.

    frame: what each dimension is, by its number in the NCHW (NCDHW) order   (0, 1, 2, 3) for [N, C, H, W]
                                                                              (0, 2, 3, 1) for [N, H, W, C], a permute of it
    orders(frame) ──> dimensions from outermost to innermost in memory, plain (N C H W) and last (N H W C)
    label_of(shape, strides, frame) ──> PLAIN, LAST, EITHER (one channel or one pixel: the same bytes) or OTHER

see(graph) runs the graph once on its example inputs: real strides, as the ops of this machine give them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from .choose import LAST, PLAIN

if TYPE_CHECKING:
    from ..capture import Captured

EITHER, OTHER = -1, -2
Frame = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of a tensor without its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def natural(rank: int) -> Frame:
    """The frame of [N, C, H, W] or [N, C, D, H, W]."""
    return tuple(range(rank))


def orders(frame: Frame) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dimensions from outermost to innermost, plain and channels-last."""
    place = {what: dimension for dimension, what in enumerate(frame)}
    plain = tuple(place[what] for what in range(len(frame)))
    return plain, (plain[0], *plain[2:], plain[1])


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor without gaps whose dimensions lie in this order."""
    strides, step = [0] * len(shape), 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= shape[dimension]
    return tuple(strides)


def constant_order(shape: Sequence[int], frame: Frame, label: int) -> tuple[int, ...]:
    """The order a constant is kept in for an op that runs in `label`: plain where both are the same bytes (1x1 and depthwise weights)."""
    plain, last = orders(frame)
    same = shape[plain[1]] == 1 or all(shape[dimension] == 1 for dimension in plain[2:])
    return last if label == LAST and not same else plain


def label_of(shape: Sequence[int], strides: Sequence[int], frame: Frame) -> int:
    """In which of its two orders a tensor lies; gaps (a slice) do not matter, repeated memory (an expand) is OTHER."""
    if len(shape) != len(frame) or any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True)):
        return OTHER
    plain, last = orders(frame)
    if shape[plain[1]] == 1 or all(shape[dimension] == 1 for dimension in plain[2:]):
        return EITHER if _falls(shape, strides, plain) else OTHER
    if _falls(shape, strides, plain):
        return PLAIN
    return LAST if _falls(shape, strides, last) else OTHER


def _falls(shape: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    """Whether strides fall from the outermost dimension to the innermost; dimensions of size 1 lie anywhere."""
    real = [strides[dimension] for dimension in order if shape[dimension] > 1]
    return all(outer >= inner for outer, inner in pairwise(real))


def laid_out(tensor: Tensor, order: Sequence[int], *, exactly: bool = True) -> Tensor:
    """The tensor with its memory in this order, itself where it is so already; `exactly`: without gaps, and in size-1 dimensions too."""
    strides = dense_strides(tensor.shape, order)
    if tensor.stride() == strides or (not exactly and _falls(tensor.shape, tensor.stride(), order)):
        return tensor
    return torch.empty_strided(tuple(tensor.shape), strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def see(graph: Captured) -> dict[fx.Node, Any]:
    """Shapes and strides of every node's value (numbers and lists as they are) in one run on the example inputs."""
    found: dict[fx.Node, Any] = {}

    class Watch(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            found[n] = tree_map_only(Tensor, seen_of, value)
            return value

    inputs = [tensor.clone() if isinstance(tensor, Tensor) else tensor for tensor in graph.inputs]
    with torch.no_grad():
        Watch(graph.module).run(*inputs, enable_io_processing=False)
    return found


def seen_of(tensor: Tensor) -> Seen:
    """A tensor without its values."""
    return Seen(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)
