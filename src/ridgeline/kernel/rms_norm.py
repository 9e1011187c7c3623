"""RMS normalisation over the trailing dims, alone or of a sum with a residual, forward and backward.

    x [rows, cols] ──rms_norm──> y = x rstd w            rstd = 1 / sqrt(mean x² + eps), saved [rows]
    x, residual ──add_rms_norm──> y = s rstd w, s = x + residual, rounded to the dtype before it is normalised
    backward: g of y (and gs of s) -> d = rstd (g w - n mean(g w n)) [+ gs], n = x rstd; dw = sum over rows of g n
      d is the gradient of x, and of the residual too

The kernels are layer norm's with no mean taken off. Products with the weight in float32, rounded once, as torch's.
Least bytes: forward 2 passes over x, backward 3 (with a residual 4 and 4); 16384x4096 bfloat16 on 4.26 TB/s: 0.063 ms + 0.095 ms.
eps None is that of the dtype computed in (float32 for the half types), as torch's CPU and compiled versions do; its CUDA kernels
have differed, so the stand-in leaves half tensors without eps to torch. Ref: Zhang and Sennrich 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from ..core.errors import OptionError
from . import layer_norm as shared
from .case import Anchor, Case, Function, Inputs, benchmark
from .layer_norm import OptionalTensor, check_fits, fake_backward, reference_backward, replaceable
from .library import operator, without_gradient
from .norm_kernels import KERNELS
from .replace import replaces
from .softmax import HALVES, columns_kind
from .tuning import space

space("rms_norm", KERNELS, shared.FORWARD_SPACE)
space("add_rms_norm", KERNELS, shared.FORWARD_SPACE)
space("rms_norm_backward", KERNELS, shared.BACKWARD_SPACE)


def _launch(x: torch.Tensor, weight: OptionalTensor, cols: int, eps: float) -> Any:
    y, _, _, rstd = shared.forward("rms_norm", x, None, weight, None, cols, eps, False)
    return y, rstd


def _launch_add(x: torch.Tensor, residual: torch.Tensor, weight: OptionalTensor, cols: int, eps: float) -> Any:
    y, total, _, rstd = shared.forward("add_rms_norm", x, residual, weight, None, cols, eps, False)
    return y, total, rstd


def _launch_backward(grad: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: OptionalTensor, grad_sum: OptionalTensor,
                     needs: Sequence[bool], cols: int) -> Any:  # fmt: skip
    return shared.backward("rms_norm_backward", grad, x, None, rstd, weight, None, grad_sum, (*needs, False), cols)[:2]


def _reference(x: torch.Tensor, weight: OptionalTensor, cols: int, eps: float) -> Any:
    wide = torch.promote_types(x.dtype, torch.float32)
    flat = x.reshape(x.numel() // cols if cols else 0, cols).to(wide)
    rstd = _inverse(flat, eps)
    y = flat * rstd[:, None]
    y = y if weight is None else y * weight.reshape(-1).to(wide)
    return y.to(x.dtype).reshape(x.shape).contiguous(), rstd


def _inverse(flat: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean x² + eps) of every row."""
    return (flat.square().mean(1) + eps).rsqrt()


def _connected(ctx: Any, x: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """What was saved of x; under create_graph made again, as what was saved knows nothing of x."""
    return _inverse(x.reshape(rstd.numel(), ctx.cols).to(rstd.dtype), ctx.eps) if torch.is_grad_enabled() else rstd


def _reference_add(x: torch.Tensor, residual: torch.Tensor, weight: OptionalTensor, cols: int, eps: float) -> Any:
    total = (x + residual).contiguous()
    y, rstd = _reference(total, weight, cols, eps)
    return y, total, rstd


def _reference_backward(grad: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: OptionalTensor, grad_sum: OptionalTensor,
                        needs: Sequence[bool], cols: int) -> Any:  # fmt: skip
    return reference_backward(grad, x, None, rstd, weight, None, grad_sum, (*needs, False), cols)[:2]


def _fake(x: torch.Tensor, weight: OptionalTensor, cols: int, eps: float) -> Any:
    rstd = x.new_empty(x.numel() // cols if cols else 0, dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.empty_like(x, memory_format=torch.contiguous_format), rstd


def _fake_add(x: torch.Tensor, residual: torch.Tensor, weight: OptionalTensor, cols: int, eps: float) -> Any:
    y, rstd = _fake(x, weight, cols, eps)
    return y, torch.empty_like(y), rstd


def _fake_backward(grad: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: OptionalTensor, grad_sum: OptionalTensor,
                   needs: Sequence[bool], cols: int) -> Any:  # fmt: skip
    return fake_backward(x, weight, None, (*needs, False))[:2]


def _setup(ctx: Any, args: tuple[Any, ...], output: Any) -> None:
    x, weight, ctx.cols, ctx.eps = args
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: OptionalTensor, *_: Any) -> tuple[OptionalTensor, ...]:
    if grad is None:
        return None, None, None, None
    x, weight, rstd = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:2])
    dx, dw = rms_norm_backward_op(grad, x, _connected(ctx, x, rstd), weight, None, needs, ctx.cols)
    return dx if needs[0] else None, dw if needs[1] else None, None, None


def _setup_add(ctx: Any, args: tuple[Any, ...], output: Any) -> None:
    _, _, weight, ctx.cols, ctx.eps = args
    _, total, rstd = output
    ctx.save_for_backward(total, weight, rstd)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _backward_add(ctx: Any, grad: OptionalTensor, grad_sum: OptionalTensor, *_: Any) -> tuple[OptionalTensor, ...]:
    if grad is None:  # only the sum was used
        return *(grad_sum if needed else None for needed in ctx.needs_input_grad[:2]), None, None, None
    total, weight, rstd = ctx.saved_tensors
    needs = [ctx.needs_input_grad[0] or ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
    rstd = _connected(ctx, total, rstd)
    dx, dw = rms_norm_backward_op(grad, total, rstd, weight, grad_sum if needs[0] else None, needs, ctx.cols)
    return *(dx if needed else None for needed in ctx.needs_input_grad[:2]), dw if needs[1] else None, None, None


rms_norm_backward_op = operator(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor rstd, Tensor? weight, Tensor? grad_sum, bool[] needs, int cols) -> (Tensor, Tensor)",
    launch=_launch_backward, reference=_reference_backward, fake=_fake_backward, twice=True)  # fmt: skip
rms_norm_op = operator("rms_norm(Tensor x, Tensor? weight, int cols, float eps) -> (Tensor, Tensor)", launch=_launch,
                       reference=_reference, fake=_fake, setup=_setup, backward=_backward)  # fmt: skip
add_rms_norm_op = operator("add_rms_norm(Tensor x, Tensor residual, Tensor? weight, int cols, float eps) -> (Tensor, Tensor, Tensor)",
                           launch=_launch_add, reference=_reference_add, fake=_fake_add, setup=_setup_add,
                           backward=_backward_add)  # fmt: skip


def _epsilon(x: torch.Tensor, eps: float | None) -> float:
    if eps is not None:
        return eps
    return torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps


def _columns(x: torch.Tensor, weight: OptionalTensor) -> int:
    """Columns to normalise over: the dims of the weight, the last dim without one."""
    shape = tuple(x.shape[-1:] if weight is None else weight.shape)
    check_fits(x, shape, weight)
    return prod(shape)


def rms_norm(x: torch.Tensor, weight: OptionalTensor = None, eps: float | None = None) -> torch.Tensor:
    """x / sqrt(mean x² + eps) * weight over the trailing dims of the weight's shape (the last dim without a weight)."""
    return _normed(x, weight, _columns(x, weight), _epsilon(x, eps))


def _normed(x: torch.Tensor, weight: OptionalTensor, cols: int, eps: float) -> torch.Tensor:
    if without_gradient(x, weight):
        return shared.forward("rms_norm", x, None, weight, None, cols, eps, False, stats=False)[0]
    y: torch.Tensor = rms_norm_op(x, weight, cols, eps)[0]
    return y


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: OptionalTensor = None,
                 eps: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(rms_norm(x + residual), x + residual) in one pass."""
    if x.shape != residual.shape or x.dtype != residual.dtype or x.get_device() != residual.get_device():
        given = f"{tuple(residual.shape)} {residual.dtype} on {residual.device} for x of {tuple(x.shape)} {x.dtype} on {x.device}"
        raise OptionError(f"a residual of {given}", why="both are added value by value and keep their dtype",
                          do="expand, convert or move one of them first")  # fmt: skip
    y, total, _ = add_rms_norm_op(x, residual, weight, _columns(x, weight), _epsilon(x, eps))
    return y, total


@replaces("rms_norm", F.rms_norm, torch.rms_norm)
def _stand_in(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    if eps is None and isinstance(input, torch.Tensor) and input.dtype in HALVES:
        return NotImplemented
    if not replaceable("rms_norm", input, normalized_shape, weight):
        return NotImplemented
    return _normed(input, weight, prod(normalized_shape), _epsilon(input, eps))


def _make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Inputs:
    def leaf(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=torch.float32).to(dtype).requires_grad_()

    return leaf(*shape), leaf(shape[-1])


def _make_add(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Inputs:
    x, weight = _make(shape, dtype, device)
    return x, _make(shape, dtype, device)[0], weight


def _plain_add(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, 1e-6), total


def _liger() -> Function:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6)


BENCH = benchmark(
    Case(
        op="rms_norm",
        ours=lambda x, w: rms_norm(x, w, 1e-6),
        plain=lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
        make=_make,
        moved=lambda inputs, backward: (5 if backward else 2) * inputs[0].numel() * inputs[0].element_size(),
        anchors=(
            Anchor((16384, 4096), torch.bfloat16, limit_ms=0.067),
            Anchor((16384, 4096), torch.bfloat16, backward=True, limit_ms=0.27),
        ),
        differentiable=True,
        peers={"liger": _liger},
        kind=lambda inputs: (columns_kind(inputs[0].shape[-1]), inputs[0].numel()),
    )
)
BENCH_ADD = benchmark(
    Case(
        op="add_rms_norm",
        ours=lambda x, r, w: add_rms_norm(x, r, w, 1e-6),
        plain=_plain_add,
        make=_make_add,
        moved=lambda inputs, backward: 4 * inputs[0].numel() * inputs[0].element_size(),
        kind=lambda inputs: (columns_kind(inputs[0].shape[-1]), inputs[0].numel()),
    )
)
