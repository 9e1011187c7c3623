"""Matrix product with its epilogue in one kernel: activation(x @ w + bias) + residual.

    x [.., M, K], w [K, N] or a transposed view ──matmul──> [.., M, N]     linear: weight [N, K], as torch's
    a [M, K] int8, b [K, N] int8 ──int8_matmul──> int32

Products accumulate in float32 and are rounded once, after the epilogue. float64, and float32 unless
torch.backends.cuda.matmul.allow_tf32 is set, are left to torch: cuBLAS's error was a third of ours (512 x 768 x 1024, H200).
Gradients: d = dy * activation'(pre), one kernel; dx = d @ w^T, dw = x^T @ d in w's own layout, by the same matmul; dbias = sum of d.
The pre-activation is kept only where a gradient will need it, and made again where that is to be differentiated.
bf16 4096³ on an H200: 137 GFLOP, 0.172 ms at 797 TFLOP/s; least bytes 100 MB, 24 µs: bound by the tensor cores.
Kernels and their choice: matmul_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from ..core.errors import OptionError, unknown_name
from .activation import pulled
from .case import Anchor, Case, Function, Inputs, benchmark
from .library import operator
from .matmul_kernels import ACTIVATIONS, STORED, by_torch, run_matmul
from .replace import replaces, worth

Optional = torch.Tensor | None
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _launch(x: torch.Tensor, w: torch.Tensor, bias: Optional, residual: Optional, activation: str, pre: Optional = None) -> torch.Tensor:
    if by_torch(x.dtype):
        return _reference(x, w, bias, residual, activation)
    k, n = w.shape
    if x.dim() == 2:
        a_strides = (x.stride(0), x.stride(1))
    else:
        x = x.contiguous()
        a_strides = (k, 1)
    out = torch.empty((*x.shape[:-1], n), dtype=STORED.get(x.dtype, x.dtype), device=x.device)
    if out.numel() == 0:
        return _rounded(out, x)
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    residual_strides = (n, 1)
    if residual is not None and not residual.is_contiguous():
        if residual.dim() == 2:
            residual_strides = (residual.stride(0), residual.stride(1))
        else:
            residual = residual.contiguous()
    run_matmul(x, w, out, (out.numel() // n, n, k), a_strides, bias, residual, residual_strides, pre, activation)
    return _rounded(out, x)


def _rounded(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return out if out.dtype is x.dtype else out.to(x.dtype)


def _launch_kept(
    x: torch.Tensor, w: torch.Tensor, bias: Optional, residual: Optional, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if by_torch(x.dtype):
        return _reference_kept(x, w, bias, residual, activation)
    pre = torch.empty((*x.shape[:-1], w.shape[1]), dtype=STORED.get(x.dtype, x.dtype), device=x.device)
    return _launch(x, w, bias, residual, activation, pre), _rounded(pre, x)


def _launch_int8(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    m, k, n = *a.shape, b.shape[1]
    out = torch.empty((m, n), dtype=torch.int32, device=a.device)
    if out.numel():
        run_matmul(a, b, out, (m, n, k), (a.stride(0), a.stride(1)))
    return out


_FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _reference_kept(
    x: torch.Tensor, w: torch.Tensor, bias: Optional, residual: Optional, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = _wide(x.dtype)
    pre = F.linear(x.to(wide), w.to(wide).t(), None if bias is None else bias.to(wide))
    out = _FORMULAS[activation](pre)
    if residual is not None:
        out = out + residual
    kept = pre.to(x.dtype)
    return (out.clone() if out is pre else out).to(x.dtype).contiguous(), kept.contiguous()


def _reference(x: torch.Tensor, w: torch.Tensor, bias: Optional, residual: Optional, activation: str) -> torch.Tensor:
    return _reference_kept(x, w, bias, residual, activation)[0]


def _reference_int8(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # float64 holds every sum of int8 products exactly, and has a matmul on every device.
    return (a.double() @ b.double()).to(torch.int32)


def _fake(x: torch.Tensor, w: torch.Tensor, bias: Optional, residual: Optional, activation: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[1]))


def _fake_kept(x: torch.Tensor, w: torch.Tensor, bias: Optional, residual: Optional, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake(x, w, bias, residual, activation), _fake(x, w, bias, residual, activation)


def _setup(ctx: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, bias, _, activation = args
    ctx.save_for_backward(x, w, bias if activation != "none" else None)
    ctx.activation = activation


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, w, bias = ctx.saved_tensors
    d = dy
    if ctx.activation != "none" and any(ctx.needs_input_grad[:3]):
        d = pulled(ctx.activation, dy, _matmul(x, w, bias, None, "none"))
    return _gradients(ctx.needs_input_grad, x, w, dy, d)


def _setup_kept(ctx: Any, args: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, w, bias, _, activation = args
    ctx.save_for_backward(x, w, bias, output[1])
    ctx.activation = activation
    ctx.mark_non_differentiable(output[1])


def _backward_kept(ctx: Any, dy: torch.Tensor, _: Any) -> tuple[Any, ...]:
    x, w, bias, pre = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph: what was kept knows nothing of x, w and bias
        pre = _matmul(x, w, bias, None, "none")
    d = pulled(ctx.activation, dy, pre) if any(ctx.needs_input_grad[:3]) else dy
    return _gradients(ctx.needs_input_grad, x, w, dy, d)


def _gradients(needed: tuple[bool, ...], x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, d: torch.Tensor) -> tuple[Any, ...]:
    """Of (x, w, bias, residual, activation), from d, the gradient of x @ w + bias."""
    (k, n), rows = w.shape, prod(x.shape[:-1])
    dx = _matmul(d, w.t(), None, None, "none") if needed[0] else None
    dw = None
    if needed[1]:
        x2, d2 = x.reshape(rows, k), d.reshape(rows, n)
        if w.stride(0) == 1 and w.stride(1) != 1:
            # `linear`'s weight is [N, K]: a gradient laid out otherwise would be copied when it is accumulated
            dw = _matmul(d2.t(), x2, None, None, "none").t()
        else:
            dw = _matmul(x2.t(), d2, None, None, "none")
    dbias = d.reshape(rows, n).sum(0) if needed[2] else None
    return dx, dw, dbias, dy if needed[3] else None, None


_ARGUMENTS = "(Tensor x, Tensor w, Tensor? bias, Tensor? residual, str activation)"
_matmul = operator(
    f"matmul{_ARGUMENTS} -> Tensor", launch=_launch, reference=_reference, fake=_fake, setup=_setup, backward=_backward
)  # fmt: skip
_matmul_kept = operator(
    f"matmul_kept{_ARGUMENTS} -> (Tensor, Tensor)", launch=_launch_kept, reference=_reference_kept, fake=_fake_kept,
    setup=_setup_kept, backward=_backward_kept,
)  # fmt: skip
_int8_matmul = operator(
    "int8_matmul(Tensor a, Tensor b) -> Tensor", launch=_launch_int8, reference=_reference_int8,
    fake=lambda a, b: a.new_empty((a.shape[0], b.shape[1]), dtype=torch.int32),
)  # fmt: skip


def matmul(
    x: torch.Tensor, w: torch.Tensor, bias: Optional = None, activation: str | None = None, residual: Optional = None
) -> torch.Tensor:
    """activation(x @ w + bias) + residual, x [.., K], w [K, N], bias [N], residual broadcast to the result."""
    if w.dim() != 2 or x.dim() == 0 or x.shape[-1] != w.shape[0] or x.dtype != w.dtype or (bias is not None and bias.shape != w.shape[1:]):
        raise OptionError(
            f"matmul of {tuple(x.shape)} {x.dtype} and {tuple(w.shape)} {w.dtype}, bias {None if bias is None else tuple(bias.shape)}",
            why="it takes x [.., K], w [K, N] of the same dtype and bias [N]",
            do="reshape or cast the operands",
        )
    if activation is not None and activation not in ACTIVATIONS:
        raise unknown_name("activation", activation, ACTIVATIONS, "kernel/matmul.py")
    name = activation or "none"
    if x.dim() == 1:
        return matmul(x.unsqueeze(0), w, bias, activation, residual).squeeze(0)
    if residual is not None and residual.shape != (*x.shape[:-1], w.shape[1]):
        residual = residual.expand(*x.shape[:-1], w.shape[1])
    if name != "none" and torch.is_grad_enabled() and (x.requires_grad or w.requires_grad or (bias is not None and bias.requires_grad)):
        out: torch.Tensor = _matmul_kept(x, w, bias, residual, name)[0]
    else:
        out = _matmul(x, w, bias, residual, name)
    return out


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: Optional = None, activation: str | None = None, residual: Optional = None
) -> torch.Tensor:
    """activation(x @ weight^T + bias) + residual, weight [N, K]."""
    return matmul(x, weight.t(), bias, activation, residual)


def int8_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] @ b [K, N], int8, summed in int32; b a transposed view of [N, K] is the fast layout."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype != torch.int8 or b.dtype != torch.int8:
        raise OptionError(
            f"int8_matmul of {tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}",
            why="it takes int8 [M, K] and [K, N]",
            do="cast or reshape",
        )
    out: torch.Tensor = _int8_matmul(a, b)
    return out


def kind_of(m: int, n: int, k: int) -> tuple[str, int]:
    """(kind, size) of a product in the dispatch table."""
    return ("tall" if 8 * min(m, n, k) < max(m, n, k) else "square"), m * n * k


def _wins(x: Any, w: Any, k: int, n: int) -> bool:
    if not isinstance(x, torch.Tensor) or not isinstance(w, torch.Tensor) or w.dim() != 2 or x.dim() < 2 or x.numel() == 0:
        return False
    if x.dtype not in DTYPES or w.dtype != x.dtype or x.device != w.device or x.shape[-1] != k or torch.is_autocast_enabled(x.device.type):
        return False
    kind, size = kind_of(x.numel() // k, n, k)
    return worth("matmul", x, size, kind)


@replaces("matmul", F.linear)
def _linear_stand_in(input: torch.Tensor, weight: torch.Tensor, bias: Optional = None) -> Any:
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not _wins(input, weight, weight.shape[1], weight.shape[0]):
        return NotImplemented
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != input.dtype):
        return NotImplemented
    return linear(input, weight, bias)


@replaces("matmul", torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
def _matmul_stand_in(input: torch.Tensor, other: torch.Tensor, *, out: Any = None) -> Any:
    if (
        out is not None
        or not isinstance(other, torch.Tensor)
        or other.dim() != 2
        or not _wins(input, other, other.shape[0], other.shape[1])
    ):
        return NotImplemented
    return matmul(input, other)


@replaces("matmul", torch.mm, torch.Tensor.mm)
def _mm_stand_in(input: torch.Tensor, mat2: torch.Tensor, *args: Any, out: Any = None, **kwargs: Any) -> Any:
    if args or kwargs or input.dim() != 2:
        return NotImplemented
    return _matmul_stand_in(input, mat2, out=out)


def _leaf(shape: tuple[int, ...], dtype: torch.dtype, device: str, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=device) * scale).to(dtype).requires_grad_()


def _make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Inputs:
    m, n, k = shape
    return _leaf((m, k), dtype, device), _leaf((k, n), dtype, device, k**-0.5)


def _make_linear(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Inputs:
    m, n, k = shape
    return _leaf((m, k), dtype, device), _leaf((n, k), dtype, device, k**-0.5), _leaf((n,), dtype, device)


def _mnk(inputs: Inputs) -> tuple[int, int, int]:
    return inputs[0].shape[0], inputs[1].numel() // inputs[0].shape[1], inputs[0].shape[1]


def _moved(inputs: Inputs, backward: bool) -> int:
    """Forward reads x and w and writes the output; forward and backward read dy too and write dx and dw."""
    m, n, k = _mnk(inputs)
    once: int = (m * k + k * n + m * n) * inputs[0].element_size()
    return 3 * once if backward else once


def _flops(inputs: Inputs, backward: bool) -> int:
    m, n, k = _mnk(inputs)
    return 2 * m * n * k * (3 if backward else 1)


def _peer_mm() -> Function:
    return import_module("flag_gems.ops").mm  # type: ignore[no-any-return]


_SIZES = {
    "small": ((256, 256, 256), (512, 512, 512)),
    "medium": ((2048, 2048, 2048),),
    "large": ((4096, 4096, 4096),),
    "xlarge": ((8192, 8192, 8192),),
    "batch": ((16, 4096, 4096), (16384, 1024, 4096)),
}
BENCH = benchmark(
    Case(
        op="matmul",
        ours=matmul,
        plain=torch.matmul,
        make=_make,
        moved=_moved,
        flops=_flops,
        sizes=_SIZES,
        anchors=(
            Anchor((2048, 2048, 2048), torch.bfloat16, limit_ms=0.026),
            Anchor((4096, 4096, 4096), torch.bfloat16, limit_ms=0.183),
            Anchor((8192, 8192, 8192), torch.bfloat16, limit_ms=1.453),
        ),
        differentiable=True,
        peers={"flag_gems": _peer_mm},
        kind=lambda inputs: kind_of(*_mnk(inputs)),
    )
)
BENCH_GELU = benchmark(
    Case(
        op="matmul_gelu",
        ours=lambda x, weight, bias: linear(x, weight, bias, "gelu"),
        plain=lambda x, weight, bias: F.gelu(F.linear(x, weight, bias)),
        make=_make_linear,
        moved=_moved,
        flops=_flops,
        sizes=_SIZES,
        differentiable=True,
        kind=lambda inputs: kind_of(*_mnk(inputs)),
    )
)
