"""Products with weights as they are, or in 8 or 4 bits; before them a norm, after them a residual or silu(gate) · up.

    Linear        weight [N, K] in the model's dtype
    Int8Linear    codes int8 [N, K], a scale a row                         1 byte a weight
    Int4Linear    4-bit codes, a scale for `group` neighbours of a row     0.5 + 2 / group bytes a weight (CPU: 0.5 + 4 / group)
    quantise_decoder_(decoder, "int8" | "int4") ──layer by layer, each dense weight let go──> the same decoder

Activations stay as they are, sums are float32, rounding is to nearest. Codes lie only in the layout of the kernel that
multiplies them (transform/quantise/layouts.py):
  CUDA, halves     up to 8 rows (int4: 1) kernel.gemv, with norm, gate and residual; more: kernel.weight_only, on tensor cores
  CPU, bfloat16    torch's packed kernels; int8 of many rows: codes as bfloat16, then torch's product, then the scales
  CPU, float32     codes widened at each call: smaller, not faster
The input table stays dense; an output matrix tied to it becomes a packed copy of its own, for a step reads all of it.
Layouts belong to one device and dtype: casting or moving a quantised decoder is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ...core.errors import OptionError
from ...kernel.gemv import gemv, gemv_int4, gemv_int8
from ...kernel.weight_only import dequantize_int4
from ...transform.quantise.grid import Grid, Quantised, dequantise, quantise
from ...transform.quantise.layouts import Layout, build, choose, multiply
from ...transform.quantise.packing import pack, to_signed, to_unsigned, unpack
from .kernels import norm, runs_kernels, silu_gated

if TYPE_CHECKING:
    from .decoder import Decoder

BLOCK_WEIGHTS = 1 << 26
"""Weights quantised at a time on CUDA: packing takes some 20 bytes each for a moment."""
FEW_ROWS = 8
"""Rows up to which the weight's bytes are the time on CUDA, and kernel.gemv multiplies."""
CPU_ROWS = 12
"""Rows of bfloat16 above which the CPU's int8 kernel is slower than widening the codes (measured: AMD EPYC, 3072 x 576)."""


def _few(x: Tensor, rows: int = FEW_ROWS) -> bool:
    return runs_kernels(x) and x.shape[0] <= rows


class Product(nn.Module):
    """x [T, K], or its RMS norm where a gain is given, → [T, N], plus a residual; `gated`: silu(first half of that) · second half.

    With few rows on CUDA all of it is one launch; else the product is, and the rest are steps of their own.
    """

    few_rows = FEW_ROWS

    def forward(self, x: Tensor, residual: Tensor | None = None, gain: Tensor | None = None, eps: float = 0.0) -> Tensor:
        if _few(x, self.few_rows) and self.fused:
            return self._at_once(x, residual, False, gain, eps)
        out = self._product(x if gain is None else norm(x, gain, None, eps))
        return out if residual is None else out + residual

    def gated(self, x: Tensor, gain: Tensor | None = None, eps: float = 0.0) -> Tensor:
        """silu(first half of the result) · second half."""
        if _few(x, self.few_rows) and self.fused:
            return self._at_once(x, None, True, gain, eps)
        return silu_gated(self._product(x if gain is None else norm(x, gain, None, eps)))

    @property
    def fused(self) -> bool:
        """Whether a kernel takes these weights with what comes before and after."""
        return True

    def _at_once(self, x: Tensor, residual: Tensor | None, gated: bool, gain: Tensor | None, eps: float) -> Tensor:
        raise NotImplementedError

    def _product(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Linear(Product):
    """A dense weight."""

    bias: nn.Parameter | None

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    def _at_once(self, x: Tensor, residual: Tensor | None, gated: bool, gain: Tensor | None, eps: float) -> Tensor:
        return gemv(x, self.weight, self.bias, residual, gated, gain, eps)

    def _product(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class QuantisedLinear(Product):
    """What Int8Linear and Int4Linear share: the weight on a grid."""

    def __init__(self, weight: Tensor, bias: Tensor | None, grid: Grid) -> None:
        super().__init__()
        self.shape, self.grid, self.dtype, self.device, self.bias = weight.shape, grid, weight.dtype, weight.device, bias
        self.kernel, self.reason = choose(grid, weight.shape[0], weight.shape[1], weight.device.type, weight.dtype)

    @property
    def runs_packed(self) -> bool:
        """Whether a kernel multiplies the codes as they lie; `reason` says which, or why not."""
        return self.kernel is not None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        wanted = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        if wanted.dtype is not self.dtype or wanted.device != self.device:
            raise OptionError(
                f"a quantised decoder to {wanted.dtype} on {wanted.device}",
                why=f"its codes are laid out for {self.dtype} on {self.device}",
                do="move or cast first, then quantise; or load it with device= and dtype=",
            )
        return self


class Int8Linear(QuantisedLinear):
    """One scale a row; on the CPU in the model's dtype, as the kernel there reads it."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, name: str = "the weight") -> None:
        super().__init__(weight, bias, Grid(8, scale_type=_scale_type(weight) if weight.device.type == "cpu" else "float32"))
        self._layout = _laid_out(self.kernel or "int8-cpu", weight, self.grid, name)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales: what a product reads."""
        return self._layout.codes.nbytes + self._layout.scale.nbytes

    def dequantised(self) -> Tensor:
        """The weight the codes stand for, [N, K]."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return (self._layout.codes.to(wide) * self._layout.scale.to(wide)[:, None]).to(self.dtype)

    def _at_once(self, x: Tensor, residual: Tensor | None, gated: bool, gain: Tensor | None, eps: float) -> Tensor:
        return gemv_int8(x, self._layout.codes, self._layout.scale, self.bias, residual, gated, gain, eps)

    def _product(self, x: Tensor) -> Tensor:
        layout = self._layout
        if self.kernel is not None and (x.is_cuda or x.shape[0] <= CPU_ROWS):
            return multiply(layout, x, self.bias)
        out = linear(x, layout.codes.to(x.dtype)) * layout.scale  # codes up to 127 are exact in any float
        return out if self.bias is None else out + self.bias


class Int4Linear(QuantisedLinear):
    """One scale for `group` neighbours of a row, in the model's dtype; on the CPU a minimum too, which its kernel reads anyway."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, name: str = "the weight", group: int = 64) -> None:
        symmetric = weight.device.type != "cpu"
        super().__init__(weight, bias, Grid(4, symmetric, "group", group, "zero" if symmetric else "minimum", _scale_type(weight)))
        self._layout: Layout | None = None
        self._stored: Quantised | None = None  # where no kernel fits: two codes a byte
        if self.kernel is not None:
            self._layout = _laid_out(self.kernel, weight, self.grid, name)
        else:
            found = quantise(weight, self.grid, name)
            self._stored = replace(found, codes=pack(to_unsigned(found.codes, 4), 4))

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and minima: what a product reads."""
        held = self._layout or self._stored
        assert held is not None
        return sum(tensor.nbytes for tensor in (held.codes, held.scale, held.zero) if tensor is not None)

    def dequantised(self) -> Tensor:
        """The weight the codes stand for, [N, K]; slow on the CPU, where only the kernel can read its layout."""
        if self._stored is not None:
            codes = unpack(self._stored.codes, 4, self.shape[1])
            return dequantise(replace(self._stored, codes=to_signed(codes, 4) if self.grid.symmetric else codes), self.dtype)
        assert self._layout is not None
        if self._layout.kernel == "int4-cuda":
            return dequantize_int4(self._layout.codes, self._layout.scale, self._layout.group, self.shape[1], None, self.dtype)
        return multiply(self._layout, torch.eye(self.shape[1], dtype=self.dtype), None).t()

    few_rows = 1

    @property
    def fused(self) -> bool:
        return self._layout is not None and self._layout.kernel == "int4-cuda"

    def _at_once(self, x: Tensor, residual: Tensor | None, gated: bool, gain: Tensor | None, eps: float) -> Tensor:
        layout = self._layout
        assert layout is not None
        return gemv_int4(x, layout.codes, layout.scale, layout.group, self.bias, residual, gated, gain, eps)

    def _product(self, x: Tensor) -> Tensor:
        return linear(x, self.dequantised(), self.bias) if self._layout is None else multiply(self._layout, x, self.bias)


def _scale_type(weight: Tensor) -> str:
    return "float32" if weight.dtype is torch.float64 else str(weight.dtype).removeprefix("torch.")


def _laid_out(kernel: str, weight: Tensor, grid: Grid, name: str) -> Layout:
    """The layout of a whole weight; on CUDA made in blocks of rows, which no layout there mixes."""
    if not kernel.endswith("cuda"):
        return build(kernel, quantise(weight, grid, name), weight.dtype)
    blocks = [build(kernel, quantise(rows, grid, name), weight.dtype) for rows in weight.split(max(1, BLOCK_WEIGHTS // weight.shape[1]))]
    codes, scale = torch.cat([block.codes for block in blocks]), torch.cat([block.scale for block in blocks])
    scale = scale.to(grid.dtype)  # the layout widens them; they were rounded to this type
    return replace(blocks[0], codes=codes, scale=scale, extra_bytes=sum(block.extra_bytes for block in blocks))


def quantise_decoder_(decoder: Decoder, weights: str, group: int | None = None) -> Decoder:
    """Every product of the decoder to "int8" or "int4", in place; dense weights are let go one by one.

    `group`: weights to an int4 scale. None: 128 on CUDA, for which its fastest kernel is made; 32 on the CPU, where blocks of a
    Q4_1 file then keep their values but for the rounding of their scales.
    """
    if weights not in ("int8", "int4"):
        raise OptionError(f"weights = {weights!r}", why="a decoder's weights become int8 or int4", do="give one of them, or None")
    group = group or (128 if decoder.device.type == "cuda" else 32)
    for name, module in list(decoder.named_modules()):
        if not isinstance(module, Linear):
            continue
        parent, _, attribute = name.rpartition(".")
        bias = None if module.bias is None else module.bias.detach()
        dense = module.weight.detach()
        packed = Int8Linear(dense, bias, name) if weights == "int8" else Int4Linear(dense, bias, name, group)
        setattr(decoder.get_submodule(parent), attribute, packed)
        module.weight = nn.Parameter(dense.new_empty(0), requires_grad=False)  # the list above still holds the module
        del dense
    if decoder.device.type == "cuda":
        torch.cuda.synchronize(decoder.device)  # decoder.forward reads weights ahead of what is queued
    return decoder
