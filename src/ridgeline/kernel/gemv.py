"""Linear layers of decoding: a few rows of x, all of the weight, and what follows in the same launch.

    gemv         x [.., K], weight half [N, K]                     ──> x weight^T + bias + residual           [.., N]
    gemv_int8    x, q int8 [N, K], scale [N]                       ──> the same of q * scale
    gemv_int4    x, packed int32 [N, K'/8], scale [N, G]           ──> the same of weight_only.py's int4
    swiglu=True: the weight's first half of rows is gate, its second up: silu(x gate^T) * (x up^T) [.., N / 2], + residual
    gain [K], eps: of rms_norm(x) instead of x

At one row the weight's bytes are the time: 14336 x 4096 are 117 MB in bfloat16, 27.1 µs at 4.34 TB/s; 13.5 µs in int8, 7.0 in int4.
One row (two of a half weight) and K <= 16384, a multiple of 4, in float16 or bfloat16 go to gemv_kernels.py: epilogue in float32,
rounded once; where x is bfloat16, int8 and int4 are multiplied by x in whole numbers of 15 bits, exactly. Everything else goes to
torch or weight_only.py, with the epilogue in steps of its own: any number of rows works. No gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..core.errors import OptionError
from .case import Case, Inputs, benchmark
from .gemv_kernels import run_gemv, run_nibbles, takes
from .jit import cdiv
from .library import operator
from .overlap import weights_are_still
from .rms_norm import rms_norm
from .swiglu import swiglu_packed
from .weight_only import linear_int4, linear_int8, row_of_nibbles
from .weight_only_kernels import BLOCK

__all__ = ["gemv", "gemv_int4", "gemv_int8", "gemv_swiglu", "weights_are_still"]
Optional = torch.Tensor | None


def _finished(out: torch.Tensor, residual: Optional, swiglu: bool) -> torch.Tensor:
    """The epilogue in steps of its own."""
    if swiglu:
        out = swiglu_packed(out)
    return out if residual is None else out + residual


def _given(x: torch.Tensor, gain: Optional, eps: float) -> torch.Tensor:
    """x, or its norm, in a step of its own."""
    if gain is None:
        return x
    return rms_norm(x, gain, eps) if x.is_cuda else F.rms_norm(x, gain.shape, gain, eps)


def _rows(x: torch.Tensor) -> int:
    k = x.shape[-1]
    return x.numel() // k if k else 0


def _cast(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return out if out.dtype is x.dtype else out.to(x.dtype)


def _launch(x: torch.Tensor, weight: torch.Tensor, bias: Optional, residual: Optional, swiglu: bool, gain: Optional,
            eps: float) -> torch.Tensor:  # fmt: skip
    x, rows = x.contiguous(), _rows(x)
    if weight.dtype is not x.dtype or not weight.is_contiguous() or not takes(16, x, weight, rows, weight.shape[1], gain):
        return _reference(x, weight, bias, residual, swiglu, gain, eps)
    residual = None if residual is None else residual.contiguous()
    return _cast(run_gemv(x, weight, None, bias, residual, swiglu, gain, eps, rows), x)


def _launch_int8(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, bias: Optional, residual: Optional, swiglu: bool,
                 gain: Optional, eps: float) -> torch.Tensor:  # fmt: skip
    x, rows = x.contiguous(), _rows(x)
    if not q.is_contiguous() or not takes(8, x, q, rows, q.shape[1], gain):
        return _reference_int8(x, q, scale, bias, residual, swiglu, gain, eps)
    residual = None if residual is None else residual.contiguous()
    return _cast(run_gemv(x, q, scale, bias, residual, swiglu, gain, eps, rows), x)


def _launch_int4(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, group: int, bias: Optional, residual: Optional,
                 swiglu: bool, gain: Optional, eps: float) -> torch.Tensor:  # fmt: skip
    row = row_of_nibbles(x, packed, scale, group, gain, swiglu)
    if row is None:
        return _reference_int4(x, packed, scale, group, bias, residual, swiglu, gain, eps)
    whole = None if residual is None else residual.contiguous()
    return _cast(run_nibbles(row, packed, scale, group, bias, whole, swiglu, gain, eps), x)


def _reference(x: torch.Tensor, weight: torch.Tensor, bias: Optional, residual: Optional, swiglu: bool, gain: Optional,
               eps: float) -> torch.Tensor:  # fmt: skip
    return _finished(F.linear(_given(x, gain, eps), weight, bias), residual, swiglu).contiguous()


def _reference_int8(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, bias: Optional, residual: Optional,
                    swiglu: bool, gain: Optional, eps: float) -> torch.Tensor:  # fmt: skip
    return _finished(linear_int8(_given(x, gain, eps), q, scale, bias), residual, swiglu).contiguous()


def _reference_int4(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, group: int, bias: Optional, residual: Optional,
                    swiglu: bool, gain: Optional, eps: float) -> torch.Tensor:  # fmt: skip
    return _finished(linear_int4(_given(x, gain, eps), packed, scale, group, bias), residual, swiglu).contiguous()


def _fake(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if rest[-3] else 1)))


_gemv = operator(
    "gemv(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, bool swiglu, Tensor? gain, float eps) -> Tensor",
    launch=_launch, reference=_reference, fake=_fake,
)  # fmt: skip
_gemv_int8 = operator(
    "gemv_int8(Tensor x, Tensor q, Tensor scale, Tensor? bias, Tensor? residual, bool swiglu, Tensor? gain, float eps) -> Tensor",
    launch=_launch_int8, reference=_reference_int8, fake=_fake,
)  # fmt: skip
_gemv_int4 = operator(
    "gemv_int4(Tensor x, Tensor packed, Tensor scale, int group, Tensor? bias, Tensor? residual, bool swiglu, Tensor? gain, "
    "float eps) -> Tensor",
    launch=_launch_int4, reference=_reference_int4, fake=_fake,
)  # fmt: skip


def gemv(
    x: torch.Tensor, weight: torch.Tensor, bias: Optional = None, residual: Optional = None, swiglu: bool = False, gain: Optional = None,
    eps: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """x [.., K], or its rms norm where there is a gain, @ weight [N, K]^T + bias, gated where `swiglu`, + residual [.., N or N / 2]."""
    _check("gemv", x, weight, x.shape[-1:], bias, residual, swiglu, gain)
    out: torch.Tensor = _gemv(x, weight, bias, residual, swiglu, gain, eps)
    return out


def gemv_swiglu(x: torch.Tensor, gate_up: torch.Tensor, bias: Optional = None) -> torch.Tensor:
    """silu(x gate^T) * (x up^T) of gate_up [2 N, K], gate first."""
    return gemv(x, gate_up, bias, None, True)


def gemv_int8(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, bias: Optional = None, residual: Optional = None, swiglu: bool = False,
    gain: Optional = None, eps: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """gemv of q * scale, as quantize_int8 gives them."""
    _check("gemv_int8", x, q, x.shape[-1:], bias, residual, swiglu, gain)
    if q.dtype != torch.int8 or scale.shape != q.shape[:1]:
        raise _mismatch("gemv_int8", x, q, "q is int8 [N, K] and scale [N]")
    out: torch.Tensor = _gemv_int8(x, q, scale, bias, residual, swiglu, gain, eps)
    return out


def gemv_int4(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, group: int = BLOCK, bias: Optional = None, residual: Optional = None,
    swiglu: bool = False, gain: Optional = None, eps: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """gemv of int4 weights as quantize_int4 gives them (no zero points)."""
    _check("gemv_int4", x, packed, (cdiv(x.shape[-1], BLOCK) * 16,), bias, residual, swiglu, gain)
    if packed.dtype != torch.int32 or scale.shape != (packed.shape[0], cdiv(x.shape[-1], group)):
        raise _mismatch("gemv_int4", x, packed, "packed is int32 [N, K'/8] and scale [N, K / group]")
    out: torch.Tensor = _gemv_int4(x, packed, scale, group, bias, residual, swiglu, gain, eps)
    return out


def _check(name: str, x: torch.Tensor, weight: torch.Tensor, width: Any, bias: Optional, residual: Optional, swiglu: bool,
           gain: Optional) -> None:  # fmt: skip
    shape = weight.shape
    rows = shape[0] if len(shape) == 2 else -1
    if x.dim() == 0 or shape[1:] != width or (swiglu and rows % 2) or (bias is not None and bias.shape != (rows,)):
        raise _mismatch(name, x, weight, "x is [.., K], the weight [N, K], bias [N], and N even with swiglu")
    if residual is not None and (residual.shape != (*x.shape[:-1], rows // 2 if swiglu else rows) or residual.dtype != x.dtype):
        raise _mismatch(
            name, x, weight, f"the residual has the shape and dtype of the result, not {tuple(residual.shape)} {residual.dtype}"
        )
    if gain is not None and (gain.shape != x.shape[-1:] or gain.dtype != x.dtype):
        raise _mismatch(name, x, weight, f"the gain is [K] in x's dtype, not {tuple(gain.shape)} {gain.dtype}")


def _mismatch(name: str, x: torch.Tensor, weight: torch.Tensor, wanted: str) -> OptionError:
    return OptionError(f"{name} of {tuple(x.shape)} and {tuple(weight.shape)} {weight.dtype}", why=wanted, do="reshape or quantise again")


def _make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Inputs:
    """shape: (M, N, K)."""
    m, n, k = shape
    return torch.randn((m, k), device=device).to(dtype), (torch.randn((n, k), device=device) * k**-0.5).to(dtype)


BENCH = benchmark(
    Case(
        op="gemv",
        ours=gemv,
        plain=F.linear,
        make=_make,
        moved=lambda inputs, backward: int(sum(t.nbytes for t in inputs) + inputs[0].shape[0] * inputs[1].shape[0] * 2),
        flops=lambda inputs, backward: 2 * inputs[0].shape[0] * inputs[1].numel(),
        dtypes=(torch.bfloat16, torch.float16),
        sizes={"small": ((1, 2048, 5632), (1, 4096, 4096)), "medium": ((1, 14336, 4096), (1, 4096, 14336), (1, 6144, 4096)),
               "large": ((1, 128256, 4096),), "xlarge": ((8, 128256, 4096),), "batch": ((2, 14336, 4096), (8, 14336, 4096))},
        in_graph=True,
        kind=lambda inputs: ("", inputs[1].numel()),
    )
)  # fmt: skip
