"""Gradients through a chip: straight through its converters and noise, with the operands its digits stand for.

    forward   out = the chip's product; kept: x, and the dequantised weights wq
    backward  grad_x = g wq^T (a transposed convolution)        grad_w = xq^T g, patch by patch
              xq is made again from x, a piece at a time: a piece and its copies fit a core's cache; by the engine where it can

A pixel may have other digits in each patch it lies in, so grad_w is summed over patches as they were quantised, not over the image.
Nothing of the noise or of the ADC is in the gradient. Ref: Bengio 2013.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..engine.patches import Piece, patches
from ..numbers import block_scale, step_of, whole_numbers
from ..plan import Plan, Window
from ..tiling import plan as tile

CACHE_BYTES, DEVICE_BYTES = 4 * 2**20, 512 * 2**20  # of a piece and its copies: what a core's cache holds, what keeps a GPU busy
WORKING_COPIES = 4
Inputs = Callable[[Tensor], Tensor | None]
"""An engine's own way from images, or rows, to the values of their patches' digits, (groups, K, b * L); None where it has none for them."""


def piece_bytes(x: Tensor) -> int:
    return (CACHE_BYTES if x.device.type == "cpu" else DEVICE_BYTES) // (WORKING_COPIES * x.element_size())


def quantised(x: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """x (…, M, K) → (q, step): whole numbers in the dtype of x, and the value of one; a matrix is the last two axes.

    Both are in blocks: (…, blocks down, high, blocks across, wide), steps with 1 for high and wide.
    """
    operands, (rows, k) = plan.chip.operands, x.shape[-2:]
    tiling = tile((rows, plan.k), (operands.x_tile_rows, plan.rows), operands.x_granularity)
    (height, width), (high, wide) = tiling.padded, tiling.block
    filled = x if (rows, k) == (height, width) else functional.pad(x, (0, width - k, 0, height - rows))
    values = filled.unflatten(-1, (-1, wide)).unflatten(-3, (-1, high))  # views
    maximum = values.abs().amax(-1, keepdim=True)
    maximum = maximum.amax(-3, keepdim=True) if high > 1 else maximum
    integers = whole_numbers(values, maximum, plan.x.span, operands.format, x.dtype)
    return integers, step_of(block_scale(maximum.double(), operands.format), plan.x.span, operands.format).to(x.dtype)


def as_matrix(blocks: Tensor, rows: int, k: int) -> Tensor:
    """Blocks as `quantised` makes them → (…, M, K)."""
    matrix: Tensor = blocks.flatten(-2).flatten(-3, -2)
    return matrix[..., :rows, :k]


def dequantised(x: Tensor, plan: Plan) -> Tensor:
    """(…, M, K) → the values the chip's input digits stand for, in the dtype of x."""
    integers, step = quantised(x, plan)
    return as_matrix(integers.mul_(step), x.shape[-2], x.shape[-1])


def patches_of(x: Tensor, window: Window, groups: int) -> Tensor:
    """(B, groups * C, *size) → (B, groups, L, C * taps): every patch a row, its columns channel first and then taps."""
    return patches(x, window, groups).permute(2, 0, 3, 1)  # from (groups, K, B, L)


def weight_as_matrices(weight: Tensor, groups: int) -> Tensor:
    """(groups * N, …) as torch's layers hold it → (groups, K, N)."""
    return weight.reshape(groups, weight.shape[0] // groups, -1).transpose(1, 2)


class StraightThrough(torch.autograd.Function):
    """out = run(); the gradient is that of the dequantised product. With a window x is (B, groups * C, *size), else (B, M, K)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, values: Tensor, plan: Plan, window: Window | None, run: Callable[[], Tensor],
        inputs: Inputs | None = None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, values)  # values (groups, K, N) are the chip's, made once for as long as the weight stays
        ctx.inputs = inputs
        ctx.plan, ctx.window, ctx.weight_shape, ctx.weight_dtype = plan, window, weight.shape, weight.dtype
        return run()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        x, values = ctx.saved_tensors
        gradient, grad_x, grad_w = gradients[0].to(x.dtype), None, None
        with torch.autocast(x.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                grad_x = input_gradient(gradient, x, values.to(x.dtype), ctx.plan, ctx.window, ctx.weight_shape)
            if ctx.needs_input_grad[1]:
                by_matrix = weight_gradient(gradient, x, ctx.plan, ctx.window, ctx.inputs)  # (groups, K, N)
                grad_w = by_matrix.transpose(1, 2).reshape(ctx.weight_shape).to(ctx.weight_dtype)
        return grad_x, grad_w, None, None, None, None, None


def input_gradient(gradient: Tensor, x: Tensor, values: Tensor, plan: Plan, window: Window | None, weight_shape: torch.Size) -> Tensor:
    """The shape of x."""
    if window is None:
        return gradient @ values[0].T
    kernel = values.transpose(1, 2).reshape(weight_shape)
    none = [0] * len(window.kernel)
    found: Tensor = torch.ops.aten.convolution_backward(
        gradient, x, kernel, None, window.stride, window.padding, window.dilation, False, none, plan.groups, [True, False, False]
    )[0]
    return found


def weight_gradient(gradient: Tensor, x: Tensor, plan: Plan, window: Window | None, inputs: Inputs | None = None) -> Tensor:
    """(groups, K, N), summed over pieces of the batch."""
    total: Tensor | None = None
    if window is None:
        for entries, rows in pieces_of_rows(x, plan):
            made = None if inputs is None else inputs(x[entries, rows])  # (1, K, b * rows)
            columns = dequantised(x[entries, rows], plan).flatten(0, 1).T if made is None else made[0]
            total = _added(total, columns @ gradient[entries, rows].flatten(0, 1))
        return x.new_zeros(plan.groups, plan.k, plan.n) if total is None else total[None]
    outputs = gradient.unflatten(1, (plan.groups, plan.n)).flatten(3)  # (B, groups, N, L)
    places, block = outputs.shape[-1], input_block(plan, outputs.shape[-1])[1]
    width = -(-plan.k // block) * block
    at_once = max(1, piece_bytes(x) // (plan.groups * width * max(1, places)))
    lines = window.output_size(tuple(x.shape[2:]))[0]
    for first in range(0, x.shape[0], at_once):
        last = min(first + at_once, x.shape[0])
        rows_of_group = None if inputs is None else inputs(x[first:last])  # (groups, K, b * L)
        if rows_of_group is None:
            taken = x.new_empty(plan.groups, width, (last - first) * places)  # K outermost, as `patches` makes them: no copy turns it
            patches(x, window, plan.groups, Piece(first, last, 0, lines), taken)
            used = dequantised(taken.view(plan.groups, width, -1, places).permute(2, 0, 3, 1), plan)  # (b, groups, L, K')
            rows_of_group = used.permute(1, 3, 0, 2).flatten(2)[:, : plan.k]
        total = _added(total, torch.bmm(rows_of_group, outputs[first:last].permute(1, 0, 3, 2).flatten(1, 2)))
    return x.new_zeros(plan.groups, plan.k, plan.n) if total is None else total


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)


def input_block(plan: Plan, rows: int) -> tuple[int, int]:
    """Rows and columns of x that share one scale."""
    operands = plan.chip.operands
    return tile((rows, plan.k), (operands.x_tile_rows, plan.rows), operands.x_granularity).block


def pieces_of_rows(x: Tensor, plan: Plan) -> list[tuple[slice, slice]]:
    """(entries, rows) of x (B, M, K) within the budget: whole entries, or rows of one that share no scale with other pieces."""
    entries, rows = x.shape[:2]
    rows_at_once = max(1, piece_bytes(x) // plan.k)
    if rows_at_once >= rows:
        several = rows_at_once // max(1, rows)
        return [(slice(first, first + several), slice(None)) for first in range(0, entries, several)]
    block = input_block(plan, rows)[0]
    step = max(1, rows_at_once // block) * block
    return [(slice(entry, entry + 1), slice(first, first + step)) for entry in range(entries) for first in range(0, rows, step)]
