"""Where our kernels take over from plain torch: CUDA, or any device under Triton's interpreter.

    add_norm(x, residual)   (norm of the sum, the sum)       turned(query, key, cos, sin)   rotary positions of both
    norm(x)                 over the last dimension          silu_gated(x)                  silu(first half) · second half

Beside these: products (linear.py) and decode attention (attend.py). float64 always goes to torch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ...kernel.jit import HAVE_TRITON, INTERPRETED
from ...kernel.rms_norm import add_rms_norm, rms_norm
from ...kernel.rope import rope
from ...kernel.swiglu import swiglu_packed


def runs_kernels(x: Tensor) -> bool:
    """Whether our kernels compute with this tensor."""
    return HAVE_TRITON and (x.is_cuda or INTERPRETED) and x.dtype is not torch.float64


def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual); RMS without a bias, else layer norm."""
    if residual is not None and bias is None and runs_kernels(x):
        return add_rms_norm(x, residual, weight, eps)
    total = x if residual is None else residual + x
    return norm(total, weight, bias, eps), total


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """RMS norm over the last dimension, or layer norm where there is a bias."""
    if bias is not None:
        return functional.layer_norm(x, weight.shape, weight, bias, eps)
    return rms_norm(x, weight, eps) if runs_kernels(x) else functional.rms_norm(x, weight.shape, weight, eps)


def turned(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key [T, heads, head_dim] at their positions; cos and sin float32 [T, head_dim], results rounded once."""
    if not runs_kernels(query):
        return _rotated(query, cos, sin), _rotated(key, cos, sin)
    query, key = rope(query[None], key[None], cos, sin)
    return query[0], key[0]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Feature i turns with i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]).to(x.dtype)


def silu_gated(x: Tensor) -> Tensor:
    """silu(gate) · up of gate and up side by side, [.., 2 N] → [.., N]."""
    if runs_kernels(x):
        return swiglu_packed(x)
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up
