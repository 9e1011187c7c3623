"""Layers in integers seen as quantise-dequantise pairs around float ones: the form ONNX runtimes turn into their own int8 kernels.

    Int8Conv2d, Int8Linear ──qdq_view──> x ─quantise─dequantise─> conv | linear ─relu, quantise, dequantise where linked─>
                                                       weight int8 ─dequantise─┘

The three operators live in torch.library's namespace ridgeline_onnx, are made when first asked for, and are traced by torch.export as
they stand, so that onnx_ops.py can write each as one ONNX node. Rounding is to even and saturating on both sides.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .quantise.int8_layers import Int8Conv2d, Int8Layer, Int8Linear

NAMESPACE = "ridgeline_onnx"


@cache
def operators() -> Any:
    """quantize(x, scale, zero) → uint8, dequantize(codes, scale, zero) → float, dequantize_channels(codes int8, scales) → float."""

    @torch.library.custom_op(f"{NAMESPACE}::quantize", mutates_args=())
    def quantize(x: Tensor, scale: float, zero: int) -> Tensor:
        return ((x / scale).round() + zero).clamp(0, 255).to(torch.uint8)

    @torch.library.custom_op(f"{NAMESPACE}::dequantize", mutates_args=())
    def dequantize(codes: Tensor, scale: float, zero: int) -> Tensor:
        return (codes.float() - zero) * scale

    @torch.library.custom_op(f"{NAMESPACE}::dequantize_channels", mutates_args=())
    def dequantize_channels(codes: Tensor, scales: Tensor) -> Tensor:
        return codes.float() * scales.view(-1, *[1] * (codes.dim() - 1))

    quantize.register_fake(lambda x, scale, zero: torch.empty_like(x, dtype=torch.uint8))
    dequantize.register_fake(lambda codes, scale, zero: torch.empty_like(codes, dtype=torch.float32))
    dequantize_channels.register_fake(lambda codes, scales: torch.empty_like(codes, dtype=torch.float32))
    return getattr(torch.ops, NAMESPACE)


class QdqLayer(nn.Module):
    """One layer in integers, said in floats that lie on its grids."""

    def __init__(self, layer: Int8Layer) -> None:
        super().__init__()
        self.register_buffer("weight", layer.integers().clone())  # int8 [out, ...]
        self.register_buffer("scales", layer.scale.detach().reshape(-1).clone())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())
        self.entry, self.exit, self.relu = layer.entry, layer.exit, layer.relu
        self.geometry = (layer.stride, layer.padding, layer.dilation, layer.groups) if isinstance(layer, Int8Conv2d) else None
        self.ops = operators()

    def forward(self, x: Tensor) -> Tensor:
        x = self._on_grid(x, self.entry)
        weight = self.ops.dequantize_channels(self.weight, self.scales)
        bias: Any = self.bias
        out = functional.linear(x, weight, bias) if self.geometry is None else functional.conv2d(x, weight, bias, *self.geometry)
        if self.relu:
            out = out.relu()
        return out if self.exit is None else self._on_grid(out, self.exit)

    def _on_grid(self, x: Tensor, grid: Any) -> Tensor:
        out: Tensor = self.ops.dequantize(self.ops.quantize(x, grid.scale, grid.zero), grid.scale, grid.zero)
        return out


def qdq_view(layer: nn.Module) -> nn.Module | None:
    """The layer in a form ONNX can hold, or None where there is none."""
    return QdqLayer(layer) if isinstance(layer, Int8Conv2d | Int8Linear) else None
