"""Dynamic int8: a linear layer whose inputs are rounded row by row as they come; no calibration.

    x [.., K] ──s = max|x| / 127 of each row──> int8 codes ──torch._int_mm, int32──> acc [.., N]
      out = acc · s[row] · w_scale[channel] + bias                                    float32, then x's own type

Weights are int8 (or packed 2 to 7 bits), symmetric, one scale a channel. torch._int_mm takes int8 on the CPU (VNNI) and on CUDA
(tensor cores; sizes must divide by 8); elsewhere, and for other sizes on CUDA, the same integers in float64: storage-only.
A row of zeros stays zeros. A row with NaN or infinity gives no finite number. No gradient.
Ref: Yao 2022 (ZeroQuant), token-wise activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import TransformError
from ..kinds import layer_kind
from .fold import put
from .grid import Quantised, quantise, sqnr_db
from .int8_layers import fits_int_mm, int_mm_works, integer_product
from .packed import PackedWeight
from .static import LayerRow, bits_for, candidates, weight_grid

HIGHEST = 127


def row_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes [M,K] and scales [M,1] of float rows: code = round(x / s), s = max|x| / 127, 1 for a row of zeros."""
    x = x.float()
    largest = x.abs().amax(1, keepdim=True)
    # a row of subnormals must not get a scale of 0, nor one with NaN a scale that hides it
    scale = torch.where(largest == 0, torch.ones_like(largest), (largest / HIGHEST).clamp_min(torch.finfo(torch.float32).tiny))
    return (x / scale).round_().clamp_(-HIGHEST, HIGHEST).to(torch.int8), scale


@layer_kind("linear-int8-dynamic")
class DynamicInt8Linear(PackedWeight):
    """nn.Linear in integers, its input rounded at run time."""

    bias: Tensor | None

    def __init__(self, shape: tuple[int, ...], bits: int, *, bias: bool) -> None:
        super().__init__(shape, weight_grid(bits))
        self.out_features, self.in_features = shape
        self.register_buffer("bias", torch.zeros(shape[0]) if bias else None)
        self._integers: Tensor | None = None

    @classmethod
    def from_quantised(cls, quantised: Quantised, bias: Tensor | None) -> DynamicInt8Linear:
        layer = cls(tuple(quantised.shape), quantised.grid.bits, bias=bias is not None).fill(quantised)
        layer.bias = None if bias is None else bias.detach().float().clone()
        return layer

    def config(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "bits": self.grid.bits, "bias": self.bias is not None}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> DynamicInt8Linear:
        return cls(**{**config, "shape": tuple(int(size) for size in config["shape"])})

    def runs_packed(self, device: str | None = None, dtype: torch.dtype = torch.float32) -> tuple[bool, str]:
        """(whether the device multiplies integers here, which kernel or why not)."""
        kind = device or self.packed.device.type
        if (kind == "cpu" and int_mm_works()) or (kind == "cuda" and fits_int_mm(self.rows, self.columns)):
            return True, "torch._int_mm"
        return (
            False,
            f"torch has no exact int8 product of {self.rows} x {self.columns} on this {kind}: whole numbers in float64, the same answers",
        )

    def integers(self) -> Tensor:
        """int8 [N,K]: a view of the stored bytes at 8 bits, else unpacked once."""
        if self._integers is None:
            self._integers = self.quantised().codes
        return self._integers

    def forward(self, x: Tensor) -> Tensor:
        codes, scale = row_codes(x.reshape(-1, self.in_features))
        out = integer_product(codes, self.integers()).float().mul_(scale).mul_(self.scale.view(1, -1))
        if self.bias is not None:
            out += self.bias
        return out.reshape(*x.shape[:-1], self.out_features).to(x.dtype)

    def kernel_bytes(self) -> int:
        """Bytes held beyond the stored tensors."""
        return 0 if self._integers is None or self.grid.bits == 8 else self._integers.nbytes

    def _forget(self) -> None:
        self._integers = None


@torch.no_grad()
def quantise_dynamic_(
    model: nn.Module, *, bits: int = 8, layer_bits: Mapping[str, int] | None = None, skip: Sequence[str] = ()
) -> tuple[list[LayerRow], list[str]]:
    """Every linear layer in place; returns a row a layer and notes."""
    layers, notes = candidates(model, skip)
    linears: dict[str, Any] = {name: module for name, module in layers.items() if isinstance(module, nn.Linear)}
    if not linears:
        raise TransformError("no linear layer to quantise", why="dynamic int8 is for nn.Linear", do='use method = "static"')
    rows = []
    for name, module in linears.items():
        quantised = quantise(module.weight.detach().float(), weight_grid(bits_for(name, bits, layer_bits or {})), name)
        layer = DynamicInt8Linear.from_quantised(quantised, module.bias)
        put(model, name, layer)
        sqnr = sqnr_db(module.weight.detach(), layer.dequantised())
        rows.append(LayerRow(name, layer.grid.bits, sqnr, layer.packed_bytes()))
    left = len(layers) - len(linears)
    return rows, notes + ([f"{left} convolutions stay in float: dynamic int8 is for linear layers"] if left else [])
