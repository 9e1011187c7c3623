"""Linear layers with weights in 8 or 4 bits and activations as they are.

    weight [N, K] ──quantize_int8──> q int8 [N, K], scale [N]               weight ≈ q * scale
    weight [N, K] ──quantize_int4──> packed int32 [N, K'/8], scale [N, G]   weight ≈ (nibble - zero) * scale, zero 8 where none is given
    x [.., K] ──linear_int8, linear_int4──> [.., N]      accumulates in float32

Packing: K is padded to K', a multiple of 128; of each 128 weights, nibble j of word i holds weight 16 j + i. One mask then yields
16 neighbours of K for 16 neighbouring words, so that x is read in runs and nothing is shuffled. Words are rotated left by 3: nibble 4
then lies on top of a float32's mantissa, nibbles 0 and 4 of a bfloat16's. G = ceil(K / group) groups.
float16 and bfloat16 x go to the kernels (weight_only_kernels.py; one bfloat16 row of int8, or of int4 without zero points, to
gemv_kernels.py); wider x multiplies dequantised weights, by torch.
Least bytes, N x K = 14336 x 4096: int8 58.7 MB, 13.5 µs at 4.34 TB/s; int4 29.4 + 0.9 MB, 7.0 µs. Gradients reach x and bias only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..core.errors import OptionError
from .case import Anchor, Case, Inputs, benchmark
from .gemv_kernels import nibbles_config, run_gemv, run_nibbles, takes
from .jit import cdiv
from .library import operator
from .weight_only_kernels import BLOCK, run_int4, run_int8

Optional = torch.Tensor | None
HALVES = (torch.float16, torch.bfloat16)


def _launch_int8(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, bias: Optional) -> torch.Tensor:
    if (row := row_of_bytes(x, q)) is not None:
        out = run_gemv(row, q, scale, bias, None, False, None, 0.0, 1)
    else:
        out = (run_int8 if x.dtype in HALVES else _reference_int8)(x, q, scale, bias)
    return out if out.dtype is x.dtype else out.to(x.dtype)


def _launch_int4(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, group: int, bias: Optional, zero: Optional) -> torch.Tensor:
    if zero is None and (row := row_of_nibbles(x, packed, scale, group)) is not None:
        out = run_nibbles(row, packed, scale, group, bias, None, False, None, 0.0)
    else:
        out = (run_int4 if x.dtype in HALVES else _reference_int4)(x, packed, scale, group, bias, zero)
    return out if out.dtype is x.dtype else out.to(x.dtype)


def row_of_bytes(x: torch.Tensor, q: torch.Tensor) -> Optional:
    """x without gaps if it is one row and gemv_kernels.py's tensor cores do this product; else None."""
    k = q.shape[1]
    if x.dtype is not torch.bfloat16 or x.numel() != k or not q.is_contiguous():
        return None
    row = x.contiguous()
    return row if takes(8, row, q, 1, k, None) else None


def row_of_nibbles(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, group: int, gain: Optional = None,
                   gated: bool = False) -> Optional:  # fmt: skip
    """x without gaps if it is one row and gemv_kernels.py's int4 kernel does this product; else None."""
    k = x.shape[-1]
    if x.dtype is not torch.bfloat16 or x.numel() != k or group < BLOCK or not (packed.is_contiguous() and scale.is_contiguous()):
        return None
    row = x.contiguous()
    fits = takes(4, row, packed, 1, k, gain) and nibbles_config(packed.shape[0] // (2 if gated else 1), k, group, gated)["half"]
    return row if fits else None


def _reference_int8(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, bias: Optional) -> torch.Tensor:
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    out = F.linear(x.to(wide), q.to(wide)) * scale.to(wide)
    return (out if bias is None else out + bias).to(x.dtype)


def _reference_int4(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, group: int, bias: Optional, zero: Optional) -> torch.Tensor:
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    out = F.linear(x.to(wide), dequantize_int4(packed, scale, group, x.shape[-1], zero, wide))
    return (out if bias is None else out + bias).to(x.dtype)


def _setup(ctx: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.depth = args[0].shape[-1]
    ctx.save_for_backward(*(None if isinstance(a, int) else a for a in args[1:]))
    ctx.group = args[3] if len(args) == 6 else 0


def _backward_int8(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    q, scale, _ = ctx.saved_tensors
    dx = dy @ dequantize_int8(q, scale, dy.dtype) if ctx.needs_input_grad[0] else None
    return dx, None, None, dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[3] else None


def _backward_int4(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    packed, scale, _, _, zero = ctx.saved_tensors
    dx = dy @ dequantize_int4(packed, scale, ctx.group, ctx.depth, zero, dy.dtype) if ctx.needs_input_grad[0] else None
    return dx, None, None, None, dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[4] else None, None


_linear_int8 = operator(
    "linear_int8(Tensor x, Tensor q, Tensor scale, Tensor? bias) -> Tensor", launch=_launch_int8, reference=_reference_int8,
    fake=lambda x, q, scale, bias: x.new_empty((*x.shape[:-1], q.shape[0])), setup=_setup, backward=_backward_int8,
)  # fmt: skip
_linear_int4 = operator(
    "linear_int4(Tensor x, Tensor packed, Tensor scale, int group, Tensor? bias, Tensor? zero) -> Tensor", launch=_launch_int4,
    reference=_reference_int4, fake=lambda x, packed, scale, group, bias, zero: x.new_empty((*x.shape[:-1], packed.shape[0])),
    setup=_setup, backward=_backward_int4,
)  # fmt: skip


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(q int8 [N, K], scale [N] in weight's dtype): the largest of each row becomes 127."""
    wide = weight.detach().float()
    scale = (wide.abs().amax(1, keepdim=True) / 127).to(weight.dtype).clamp_min(torch.finfo(weight.dtype).tiny)
    return torch.round(wide / scale.float()).clamp(-127, 127).to(torch.int8), scale[:, 0].contiguous()


def dequantize_int8(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weight [N, K]; rounded once."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    return (q.to(wide) * scale.to(wide)[:, None]).to(dtype)


def quantize_int4(weight: torch.Tensor, group: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed int32 [N, K'/8], scale [N, G] in weight's dtype): the largest of each group becomes 7."""
    grouped = _grouped(weight, group)
    scale = (grouped.abs().amax(2, keepdim=True) / 7).to(weight.dtype).clamp_min(torch.finfo(weight.dtype).tiny)
    nibbles = torch.round(grouped / scale.float()).clamp(-8, 7) + 8
    return pack_nibbles(nibbles, weight.shape[1], pad=8), scale[:, :, 0].contiguous()


def quantize_int4_zero(weight: torch.Tensor, group: int = 128) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed, scale [N, G], zero uint8 [N, G]): each group's own range, widened to hold 0, on 0..15."""
    grouped = _grouped(weight, group)
    low, high = grouped.amin(2, keepdim=True).clamp_max(0), grouped.amax(2, keepdim=True).clamp_min(0)
    scale = ((high - low) / 15).to(weight.dtype).clamp_min(torch.finfo(weight.dtype).tiny)
    zero = torch.round(-low / scale.float()).clamp(0, 15)
    nibbles = (torch.round(grouped / scale.float()) + zero).clamp(0, 15)
    return pack_nibbles(nibbles, weight.shape[1], pad=0), scale[:, :, 0].contiguous(), zero[:, :, 0].to(torch.uint8).contiguous()


def _grouped(weight: torch.Tensor, group: int) -> torch.Tensor:
    """float32 [N, G, group], padded with zeros."""
    _check_group(group)
    n, k = weight.shape
    return F.pad(weight.detach().float(), (0, -k % group)).reshape(n, cdiv(k, group), group)


def pack_nibbles(nibbles: torch.Tensor, k: int, pad: int) -> torch.Tensor:
    n = nibbles.shape[0]
    padded = cdiv(k, BLOCK) * BLOCK
    flat = F.pad(nibbles.reshape(n, -1)[:, :k].long(), (0, padded - k), value=pad).reshape(n, padded // BLOCK, 8, 16)
    words = (flat << (4 * torch.arange(8, device=flat.device))[:, None]).sum(2).reshape(n, padded // 8)
    words = ((words << 3) | (words >> 29)) & 0xFFFFFFFF
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def dequantize_int4(packed: torch.Tensor, scale: torch.Tensor, group: int, k: int, zero: Optional, dtype: torch.dtype) -> torch.Tensor:
    """weight [N, K]; rounded once."""
    n, words = packed.shape
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    shifts = 4 * torch.arange(8, device=packed.device)[:, None]
    turned = packed.long() & 0xFFFFFFFF
    turned = (turned >> 3) | ((turned & 7) << 29)
    nibbles = ((turned.reshape(n, words // 16, 1, 16) >> shifts) & 15).reshape(n, words * 8)[:, :k].to(wide)
    repeated = scale.to(wide).repeat_interleave(group, 1)[:, :k]
    return ((nibbles - (8 if zero is None else zero.to(wide).repeat_interleave(group, 1)[:, :k])) * repeated).to(dtype)


def _check_group(group: int) -> None:
    if group not in (16, 32, 64) and (group < BLOCK or group % BLOCK):
        raise OptionError(f"group = {group}", why=f"groups are 16, 32, 64 or multiples of {BLOCK} weights", do="use 128")


def linear_int8(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, bias: Optional = None) -> torch.Tensor:
    """x [.., K] @ (q * scale)^T + bias; gradients reach x and bias only."""
    shape = q.shape
    if len(shape) != 2 or x.shape[-1:] != shape[1:] or scale.shape != shape[:1] or q.dtype != torch.int8:
        raise _mismatch("linear_int8", x, q, scale, "x [.., K], q int8 [N, K] and scale [N]")
    out: torch.Tensor = _linear_int8(x, q, scale, bias)
    return out


def linear_int4(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, group: int = 128, bias: Optional = None, zero: Optional = None
) -> torch.Tensor:
    """x [.., K] @ ((nibbles - zero) * scale)^T + bias; gradients reach x and bias only."""
    _check_group(group)
    k = x.shape[-1] if x.dim() else 0
    fits = packed.dim() == 2 and packed.shape[1] == cdiv(k, BLOCK) * 16 and scale.shape == (packed.shape[0], cdiv(k, group))
    if not fits or packed.dtype != torch.int32 or (zero is not None and zero.shape != scale.shape):
        raise _mismatch("linear_int4", x, packed, scale, "x [.., K], packed int32 [N, K'/8], scale and zero [N, K/group]")
    out: torch.Tensor = _linear_int4(x, packed, scale, group, bias, zero)
    return out


def _mismatch(name: str, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, wanted: str) -> OptionError:
    shapes = f"{tuple(x.shape)}, {tuple(q.shape)} {q.dtype}, {tuple(scale.shape)}"
    return OptionError(f"{name} of {shapes}", why=f"it takes {wanted}", do="quantise the weight again, or reshape x")


def _make(bits: int) -> Any:
    """(x, quantised weight, scale, dequantised weight) for shape (M, N, K)."""

    def make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Inputs:
        m, n, k = shape
        x, weight = torch.randn((m, k), device=device).to(dtype), (torch.randn((n, k), device=device) * k**-0.5).to(dtype)
        q, scale = quantize_int8(weight) if bits == 8 else quantize_int4(weight)
        return x, q, scale, dequantize_int8(q, scale, dtype) if bits == 8 else dequantize_int4(q, scale, BLOCK, k, None, dtype)

    return make


def _moved(inputs: Inputs, backward: bool) -> int:
    x, q, scale, weight = inputs
    return sum(int(t.nbytes) for t in (x, q, scale)) + int(x.shape[0] * weight.shape[0] * x.element_size())


def _case(bits: int, ours: Any) -> Case:
    return Case(
        op=f"int{bits}_linear",
        ours=lambda x, q, scale, weight: ours(x, q, scale),
        plain=lambda x, q, scale, weight: F.linear(x, weight),
        make=_make(bits),
        moved=_moved,
        flops=lambda inputs, backward: 2 * inputs[0].shape[0] * inputs[3].numel(),
        dtypes=(torch.bfloat16, torch.float16),
        sizes={"small": ((1, 4096, 4096),), "medium": ((1, 14336, 4096), (1, 4096, 14336)), "large": ((16, 14336, 4096),),
               "xlarge": ((512, 14336, 4096),), "batch": ((4, 14336, 4096), (64, 4096, 14336))},
        anchors=tuple(Anchor(s, torch.bfloat16, limit_ms=0.018 if bits == 8 else 0.0116) for s in ((1, 14336, 4096), (1, 4096, 14336))),
        exact=lambda x, q, scale, weight: x.double() @ (
            dequantize_int8(q, scale, torch.float64) if bits == 8 else dequantize_int4(q, scale, BLOCK, x.shape[1], None, torch.float64)
        ).t(),
        in_graph=True,
        kind=lambda inputs: ("gemv" if inputs[0].shape[0] == 1 else "dot", inputs[3].numel() * inputs[0].shape[0]),
    )  # fmt: skip


BENCH_INT8 = benchmark(_case(8, linear_int8))
BENCH_INT4 = benchmark(_case(4, linear_int4))
