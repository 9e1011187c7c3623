"""A layer as the tensor that is factored, and the layers that take its place.

    Linear [m,n], Conv2d [out, in/groups, kh, kw] ──weight_of──> [groups, rows, columns, kh, kw]      one tensor a group
    pieces (weights of 1x1, kx1, 1xk and kxk convolutions, or of linear layers) ──sequence──> nn.Sequential of plain layers

Stride, padding and dilation go to the piece that has the kernel's axis, the bias to the last piece; a piece of kernel 1 in front
has no bias, so padding after it is the padding before it. Groups stay groups: each is factored alone, to the same rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from ...core.errors import TransformError

Factorable = nn.Linear | nn.Conv2d
Piece = TypeVar("Piece", nn.Linear, nn.Conv2d)
EXACT_WEIGHTS = 1 << 22  # up to here the maths is done in float64; a larger SVD would take minutes and float32 is enough for weights


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one layer. `positions`: where its pieces run, (input, after the vertical kernel, output); ones count weights."""

    groups: int
    rows: int  # outputs of a group
    columns: int  # inputs of a group
    height: int
    width: int
    positions: tuple[int, int, int] = (1, 1, 1)

    @property
    def kernel(self) -> int:
        return self.height * self.width

    @property
    def dense(self) -> int:
        """Cost of the layer as it is."""
        return self.groups * self.rows * self.columns * self.kernel * self.positions[2]


def shape_of(layer: Factorable, positions: tuple[int, int, int] = (1, 1, 1)) -> Shape:
    """The sizes of a linear layer or a convolution."""
    if isinstance(layer, nn.Linear):
        return Shape(1, layer.out_features, layer.in_features, 1, 1, positions)
    height, width = layer.kernel_size
    return Shape(layer.groups, layer.out_channels // layer.groups, layer.in_channels // layer.groups, height, width, positions)


def weight_of(layer: Factorable) -> Tensor:
    """[groups, rows, columns, kh, kw] in the precision the maths is done in; weights that are not finite are refused."""
    weight, shape = layer.weight.detach(), shape_of(layer)
    if not torch.isfinite(weight).all():
        raise TransformError(
            "a weight that is not finite", why="NaN and infinity have no factors", do="mend the weights, or skip the layer"
        )
    dtype = torch.float64 if weight.numel() <= EXACT_WEIGHTS else torch.float32
    return weight.to(dtype).reshape(shape.groups, shape.rows, shape.columns, shape.height, shape.width)


def linear_piece(layer: nn.Linear, weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer of this weight, in the dtype and on the device of `layer`."""
    piece = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device=layer.weight.device, dtype=layer.weight.dtype)
    return _filled(piece, weight, bias, layer.weight.requires_grad)


def conv_piece(layer: nn.Conv2d, weight: Tensor, groups: int, axes: str = "", bias: Tensor | None = None) -> nn.Conv2d:
    """A convolution of this weight [out, in/groups, kh, kw] that strides, pads and dilates as `layer` does along `axes` ("h", "w")."""
    taken = tuple(axis in axes for axis in "hw")

    def along(values: tuple[int, ...], otherwise: int) -> tuple[int, int]:
        first, second = (value if take else otherwise for value, take in zip(values, taken, strict=True))
        return first, second

    if isinstance(layer.padding, str):
        padding: str | tuple[int, int] = layer.padding if axes else (0, 0)  # "same" pads nothing along an axis of kernel 1
    else:
        padding = along(layer.padding, 0)
    piece = nn.Conv2d(
        weight.shape[1] * groups,
        weight.shape[0],
        (weight.shape[2], weight.shape[3]),
        stride=along(layer.stride, 1),
        padding=padding,
        dilation=along(layer.dilation, 1),
        groups=groups,
        bias=bias is not None,
        padding_mode=layer.padding_mode if axes else "zeros",
        device=layer.weight.device,
        dtype=layer.weight.dtype,
    )
    return _filled(piece, weight, bias, layer.weight.requires_grad)


def sequence(layer: Factorable, *pieces: nn.Module) -> nn.Sequential:
    """The pieces one after another, training where `layer` was."""
    return nn.Sequential(*pieces).train(layer.training)


def _filled(piece: Piece, weight: Tensor, bias: Tensor | None, trained: bool) -> Piece:
    with torch.no_grad():
        piece.weight.copy_(weight)
        if bias is not None and piece.bias is not None:
            piece.bias.copy_(bias)
    piece.requires_grad_(trained)
    return piece
