"""A norm with what follows it, said in one call, so that `use_kernels()` can do it in one operator.

Only plain tensors inside a function mode are announced: tracers and torch.compile see the modules.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function


def normed(x: Tensor, norm: nn.Module, activation: nn.Module, residual: Tensor | None = None) -> Tensor:
    """activation(norm(x) + residual)."""
    if not torch.compiler.is_compiling() and type(x) is Tensor and torch._C._len_torch_function_stack():
        out: Tensor = handle_torch_function(normed, (x,), x, norm, activation, residual)
        return out
    out = norm(x)
    out = activation(out if residual is None else out + residual)
    return out
