"""Which kernel can multiply a packed weight, and the layout that kernel reads.

    Quantised, device, dtype of x ──choose──> int8-cpu | int4-cpu | int8-cuda | int4-cuda | None and why
    Quantised ──build──> Layout(tensors of that kernel) ──multiply(x [M, K])──> [M, N]

    int8-cpu   aten._weight_int8pack_mm            symmetric, one scale a row, 5 to 8 bits      codes as stored, K % 32 = 0
    int4-cpu   aten._weight_int4pack_mm_for_cpu    2 to 4 bits, N % 16 = 0, groups of 32 to 256 repacked: N K / 2 bytes more
    int8-cuda  kernel.weight_only.linear_int8      as int8-cpu                                  codes as stored
    int4-cuda  kernel.weight_only.linear_int4      2 to 4 bits, groups of 16, 32, 64, 128 n     repacked: N K / 2 bytes more

Codes narrower than a kernel's are widened in its layout only: 3-bit weights take 3 bits on disk and 4 in the kernel's memory.
A minimum that is no multiple of the scale goes beside the CUDA kernel as (sums of x over groups) @ (what is left of the minimum).
Measured (AMD EPYC, 1024 x 4096, one core): bfloat16 kernels beat torch's linear below 16 rows and dequantising below 64;
those of float32 are plain loops, 5x slower than linear with dequantised weights and thus not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .grid import Grid, Quantised

CPU_GROUPS = (256, 128, 64, 32)
CPU_COLUMNS = 32
"""torch's int8 kernel on the CPU reads past the end of rows that are no multiple of its vectors: nonsense, or a crash (torch 2.13)."""
CPU_ROWS = 32
"""Rows of x above which a CPU is better off to dequantise once and call its matrix product."""
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Layout:
    """Weights as one kernel reads them. `extra_bytes` is what it holds beyond the stored tensors."""

    kernel: str
    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    rest: Tensor | None  # [N, G] what a minimum adds beyond zero * scale; CUDA only
    group: int
    extra_bytes: int


def choose(grid: Grid, rows: int, columns: int, device: str, dtype: torch.dtype) -> tuple[str | None, str]:
    """(kernel, what it is) for x of this dtype on this kind of device, or (None, why there is none)."""
    if grid.form == "codebook":
        return None, "no kernel looks values up in a codebook"
    if device not in ("cpu", "cuda"):
        return None, f"no packed kernel for {device}"
    if device == "cpu" and dtype is not torch.bfloat16:
        return None, f"the CPU kernels are fast for bfloat16 only, not {str(dtype).removeprefix('torch.')}"
    if device == "cuda" and dtype not in HALVES:
        return None, f"the CUDA kernels take float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if grid.bits > 4:
        if not grid.symmetric or grid.granularity == "group":
            return None, f"{grid.bits}-bit kernels take symmetric weights with one scale a channel"
        if device == "cpu" and columns % CPU_COLUMNS:
            return None, f"the int8 CPU kernel needs rows of a multiple of {CPU_COLUMNS}, not {columns}"
        return f"int8-{device}", "int8 kernel, one byte a weight"
    if device == "cpu" and (rows % 16 or not cpu_group(grid, columns)):
        return None, f"the int4 CPU kernel needs rows in 16s and groups of 32, 64, 128 or 256 that divide a row, not {rows} x {columns}"
    if device == "cuda" and not cuda_group(grid, columns):
        return None, f"the int4 CUDA kernel takes groups of 16, 32, 64 and multiples of 128, not {grid.group}"
    return f"int4-{device}", "int4 kernel, half a byte a weight"


def cpu_group(grid: Grid, columns: int) -> int:
    """The kernel's group: ours, or the largest that divides a row where a row has one scale; 0 if there is none."""
    if grid.granularity == "group" and grid.group < columns:
        return grid.group if grid.group in CPU_GROUPS and columns % grid.group == 0 else 0
    return next((group for group in CPU_GROUPS if columns % group == 0), 0)


def cuda_group(grid: Grid, columns: int) -> int:
    """As cpu_group; one group may hold a whole row."""
    if grid.granularity == "group" and grid.group < columns:
        return grid.group if grid.group in (16, 32, 64) or grid.group % 128 == 0 else 0
    return -(-columns // 128) * 128


def build(kernel: str, quantised: Quantised, dtype: torch.dtype) -> Layout:
    """The layout of one kernel for x of this dtype."""
    if kernel == "int4-cpu":
        return _int4_cpu(quantised, dtype)
    if kernel == "int4-cuda":
        return _int4_cuda(quantised)
    rows = quantised.codes.shape[0]
    scale = quantised.scale[:, 0].expand(rows).to(dtype if kernel == "int8-cpu" else torch.float32).contiguous()
    widened = quantised.codes.nbytes if quantised.grid.bits < 8 else 0
    return Layout(kernel, quantised.codes, scale, None, None, 0, widened + scale.nbytes)


def _nibbles(quantised: Quantised) -> tuple[Tensor, int]:
    """(codes 0..15 as int32, what was added to each): narrow codes lie around 8, where the kernels' own zero is."""
    added = 8 if quantised.grid.symmetric else 8 - (1 << (quantised.grid.bits - 1))
    return quantised.codes.to(torch.int32) + added, added


def _int4_cpu(quantised: Quantised, dtype: torch.dtype) -> Layout:
    """The kernel's weight is (nibble - 8) * scale + zero, scale and zero in x's dtype, [K / group, N, 2]."""
    grid, (rows, columns) = quantised.grid, quantised.codes.shape
    group = cpu_group(grid, columns)
    nibbles, added = _nibbles(quantised)
    scale = quantised.scale.float().expand(rows, -1)
    if quantised.zero is None:
        zero = torch.zeros_like(scale)
    elif grid.form == "minimum":
        zero = quantised.zero.float().expand(rows, -1) + (8 - added) * scale
    else:
        zero = (8 - added - quantised.zero.float().expand(rows, -1)) * scale
    both = torch.stack((scale, zero), -1)  # [N, G, 2]
    both = both.repeat_interleave(columns // group // both.shape[1], 1).transpose(0, 1).to(dtype).contiguous()
    codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, 1)
    return Layout("int4-cpu", codes, both, None, None, group, codes.nbytes + both.nbytes)


def _int4_cuda(quantised: Quantised) -> Layout:
    """The kernel's weight is (nibble - zero) * scale with a whole zero, [N, G]."""
    from ...kernel.weight_only import pack_nibbles as pack_words

    grid, (rows, columns) = quantised.grid, quantised.codes.shape
    nibbles, added = _nibbles(quantised)
    scale = quantised.scale.float().expand(rows, -1).contiguous()
    zero, rest = None, None
    if quantised.zero is not None and grid.form == "zero":
        zero = (quantised.zero.expand(rows, -1) + added).contiguous()
    elif quantised.zero is not None:
        minimum = quantised.zero.double().expand(rows, -1) - added * scale.double()  # w = nibble * scale + minimum
        whole = torch.where(scale == 0, 0.0, -minimum / scale.double()).nan_to_num(0.0).round().clamp(0, 15)
        zero, rest = whole.to(torch.uint8), (minimum + whole * scale.double()).float()
    words = pack_words(nibbles, columns, pad=8 if zero is None else 0)
    held = sum(tensor.nbytes for tensor in (words, scale, zero, rest) if tensor is not None)
    return Layout("int4-cuda", words, scale, zero, rest, cuda_group(grid, columns), held)


def multiply(layout: Layout, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [.., K] → [.., N]."""
    if layout.kernel.endswith("cuda"):
        return _multiply_cuda(layout, x, bias)
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    if layout.kernel == "int8-cpu":
        out: Tensor = torch.ops.aten._weight_int8pack_mm(flat, layout.codes, layout.scale)
    else:
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, layout.codes, layout.group, layout.scale)
    if bias is not None:
        out = out + bias
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _multiply_cuda(layout: Layout, x: Tensor, bias: Tensor | None) -> Tensor:
    from ...kernel.weight_only import linear_int4, linear_int8

    if layout.kernel == "int8-cuda":
        return linear_int8(x, layout.codes, layout.scale, bias)
    out = linear_int4(x, layout.codes, layout.scale, layout.group, bias, layout.zero)
    if layout.rest is None:
        return out
    short = layout.rest.shape[1] * layout.group - x.shape[-1]
    sums = torch.nn.functional.pad(x.float(), (0, short)).unflatten(-1, (-1, layout.group)).sum(-1)  # [.., G]
    return out + torch.nn.functional.linear(sums, layout.rest).to(x.dtype)
