"""Batch norm of branches, their gains, and the sum into targets: one pass over the branches instead of four.

    y [B, R*C, H, W], gain [R], Routes: the target of each branch ──normalise──> [B, T*C, H, W]
      out[t] = Σ over the branches of t of gain · (y - mean) / √(var + 1e-5)       no Routes: each branch by itself

torch: batch_norm with the gain as its weight, then sums. Triton: the sums over a channel, then one kernel that reads y and writes the
targets only; backward the same. Flags `on` [R], on the device: branches that are off are zeros and are not read (torch computes them:
there their gains are zeros). Batch statistics always; variance as mean of squares less square of the mean, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ...kernel.depthwise import chosen_way
from ...kernel.jit import cdiv, launch, next_power_of_2
from . import mixing_kernels as kernels

EPSILON = 1e-5
TILE = 1024
PROGRAMS = 1024
"""Of the sums, about: 8 a processor of an H200."""
MOST_SHARES = 64
"""Of the images that are summed apart; a power of two."""


@dataclass(frozen=True, slots=True)
class Routes:
    targets: tuple[int, ...]
    """Of each branch."""
    count: int
    whole: bool
    """Branches are count after count, in the order of targets."""
    target: Tensor
    """`targets` [R], int32 on the device."""
    order: Tensor
    """Branches by target [R], `starts` [T+1] where each target's start."""
    starts: Tensor


def normalise(
    y: Tensor, channels: int, gain: Tensor | None = None, routes: Routes | None = None, way: str = "auto", on: Tensor | None = None
) -> Tensor:  # fmt: skip
    """[B, R*C, H, W] -> [B, T*C, H, W]; without routes T = R."""
    if chosen_way(y, way) == "triton":
        out: Tensor = _Mix.apply(y, gain, channels, routes, on)  # type: ignore[no-untyped-call]
        return out
    wide = None if gain is None else gain[:, None].expand(-1, channels).reshape(-1)
    z = functional.batch_norm(y, None, None, wide, None, True, 0.0, EPSILON)
    return z if routes is None else _summed(z, channels, routes)


def _summed(z: Tensor, channels: int, routes: Routes) -> Tensor:
    if routes.whole:
        return z.view(z.shape[0], -1, routes.count * channels, *z.shape[2:]).sum(1)
    sums: list[Tensor | None] = [None] * routes.count
    for one, target in zip(z.split(channels, dim=1), routes.targets, strict=True):
        before = sums[target]
        sums[target] = one if before is None else before + one
    zero = z.new_zeros(z.shape[0], channels, *z.shape[2:])
    return torch.cat([zero if one is None else one for one in sums], dim=1)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, gain: Tensor | None, channels: int, routes: Routes | None, on: Tensor | None) -> Tensor:
        y = y.contiguous()
        batch, wide, places = y.shape[0], y.shape[1], y.shape[2] * y.shape[3]
        targets = wide if routes is None else routes.count * channels
        sums, shares = _sums(y, channels, on=on)
        out = torch.empty(batch, targets, *y.shape[2:], dtype=y.dtype, device=y.device)
        rows, cols = _tile(places)
        none = sums
        launch(kernels.mix, (targets, cdiv(batch, rows), cdiv(places, cols)), y, out, sums, none if gain is None else gain,
               none if routes is None else routes.order, none if routes is None else routes.starts, none if on is None else on, batch, wide,
               y.stride(0), out.stride(0), float(shares), float(batch * places), EPSILON, C=channels, P=places, GAIN=gain is not None,
               MAPPED=routes is not None, MASKED=on is not None, WIDTH=MOST_SHARES, ROWS=rows, COLS=cols, num_warps=4)  # fmt: skip
        ctx.save_for_backward(y, gain, sums)
        ctx.channels, ctx.routes, ctx.on = channels, routes, on
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        y, gain, sums = ctx.saved_tensors
        channels, routes, on, grad = ctx.channels, ctx.routes, ctx.on, grad.contiguous()
        batch, wide, places = y.shape[0], y.shape[1], y.shape[2] * y.shape[3]
        g_sums, shares = _sums(y, channels, grad, sums, routes, on)
        out = None
        if ctx.needs_input_grad[0]:
            out = torch.empty_like(y)
            rows, cols = _tile(places)
            launch(kernels.grad_input, (wide, cdiv(batch, rows), cdiv(places, cols)), y, grad, out, sums, g_sums,
                   sums if gain is None else gain, sums if routes is None else routes.target, sums if on is None else on, batch,
                   y.stride(0), grad.stride(0), float(shares), float(batch * places), EPSILON, C=channels, P=places, GAIN=gain is not None,
                   MAPPED=routes is not None, MASKED=on is not None, WIDTH=MOST_SHARES, ROWS=rows, COLS=cols, num_warps=4)  # fmt: skip
        grad_gain = None
        if gain is not None and ctx.needs_input_grad[1]:
            grad_gain = g_sums[:, 1].reshape(shares, -1, channels).sum((0, 2)).to(gain.dtype)
        return out, grad_gain, None, None, None


def _tile(places: int) -> tuple[int, int]:
    cols = min(next_power_of_2(places), TILE)
    return TILE // cols, cols


def _sums(
    y: Tensor, channels: int, grad: Tensor | None = None, y_sums: Tensor | None = None, routes: Routes | None = None,
    on: Tensor | None = None,
) -> Any:  # fmt: skip
    """([shares, 2, R*C] in float32, shares): of y and y², or of the gradient and its product with the normalised y."""
    batch, wide, places = y.shape[0], y.shape[1], y.shape[2] * y.shape[3]
    rows, cols = _tile(places)
    images = rows * cdiv(batch, min(cdiv(PROGRAMS, wide), MOST_SHARES) * rows)
    shares = cdiv(batch, images)
    out = torch.empty(shares, 2, wide, dtype=torch.float32, device=y.device)
    g = y if grad is None else grad
    launch(kernels.sums, (wide, shares), y, out, g, out if y_sums is None else y_sums, out if routes is None else routes.target,
           out if on is None else on, batch, images, y.stride(0), g.stride(0), float(shares), float(batch * places), EPSILON, C=channels,
           P=places, BACKWARD=grad is not None, MAPPED=routes is not None, MASKED=on is not None, WIDTH=MOST_SHARES,
           ROWS=rows, COLS=cols, num_warps=4)  # fmt: skip
    return out, shares
