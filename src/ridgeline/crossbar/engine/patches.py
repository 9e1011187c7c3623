"""Patches of images, only those asked for.

    x (B, groups * C, *size) ──pad only the lines needed──> ──strided view──> (B, groups, C, *taps, *out) ──copy──> (groups, K, B, L)
      K = channel, then taps;  L = output positions;  a piece has some images, and of a single image some lines (first output axis)

K lies outermost and positions innermost: at stride 1 whole lines are copied, and products need no transposition afterwards.
A product of matrices x (B, M, K) is the convolution of (B, K, M) with a window of one tap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ...core.errors import OptionError
from ..plan import Window

ONE_TAP = Window((1,), (1,), (0,), (1,))


@dataclass(frozen=True, slots=True)
class Piece:
    """Images `first` to before `last`, and of them output lines `top` to before `bottom`."""

    first: int
    last: int
    top: int
    bottom: int


def output_size(x: Tensor, window: Window) -> tuple[int, ...]:
    """Of the window over x (B, C, *size)."""
    size = window.output_size(tuple(x.shape[2:]))
    if min(size) < 1:
        why = "the kernel is larger than the padded image"
        raise OptionError(f"a kernel of {window.kernel} on an image of {tuple(x.shape[2:])}", why=why, do="pad more or dilate less")
    return size


def pieces(images: int, size: tuple[int, ...], most_positions: int) -> list[Piece]:
    """All of it in pieces of at most so many positions, but at least one line."""
    line, lines = math.prod(size[1:]), size[0]
    if lines * line <= most_positions:
        count = max(1, most_positions // max(lines * line, 1))
        return [Piece(first, min(first + count, images), 0, lines) for first in range(0, images, count)]
    count = max(1, most_positions // max(line, 1))
    return [Piece(image, image + 1, top, min(top + count, lines)) for image in range(images) for top in range(0, lines, count)]


def patches(x: Tensor, window: Window, groups: int, piece: Piece | None = None, into: Tensor | None = None) -> Tensor:
    """(B, groups * C, *size) → (groups, K, images, positions); `into`: a contiguous tensor of (groups, K or more, images * positions)."""
    whole = output_size(x, window)
    piece = piece or Piece(0, x.shape[0], 0, whole[0])
    lines = _padded_lines(x[piece.first : piece.last], window, piece)
    size = (piece.bottom - piece.top, *whole[1:])
    images, channels = lines.shape[0], lines.shape[1] // groups
    strides, axes = lines.stride(), range(len(size))
    view = lines.as_strided(
        (groups, channels, *window.kernel, images, *size),
        (strides[1] * channels, strides[1], *(strides[2 + i] * window.dilation[i] for i in axes),
         strides[0], *(strides[2 + i] * window.stride[i] for i in axes)),
    )  # fmt: skip
    k, positions = channels * math.prod(window.kernel), math.prod(size)
    if into is None:
        return view.reshape(groups, k, images, positions)
    into[:, k:].zero_()
    into[:, :k].view(view.shape).copy_(view)
    return into[:, :k].view(groups, k, images, positions)


def _padded_lines(x: Tensor, window: Window, piece: Piece) -> Tensor:
    """The input lines those output lines see, with zeros around them where the window hangs over."""
    start = piece.top * window.stride[0] - window.padding[0]
    stop = (piece.bottom - 1) * window.stride[0] + window.dilation[0] * (window.kernel[0] - 1) + 1 - window.padding[0]
    low, high = min(max(start, 0), x.shape[2]), max(min(stop, x.shape[2]), 0)
    around = [(low - start, stop - high) if high > low else (0, stop - start), *((pad, pad) for pad in window.padding[1:])]
    used = x[:, :, low : max(high, low)]
    if not any(before or after for before, after in around):
        return used
    return functional.pad(used, [length for pair in reversed(around) for length in pair])


def as_one_tap(x: Tensor) -> Tensor:
    """x (B, M, K) → (B, K, M), a view, for ONE_TAP."""
    return torch.transpose(x, 1, 2)
