"""Layers whose weights lie packed, and run packed where a kernel can.

    Quantised + bias ──PackedLinear.from_quantised──> buffers packed uint8 [N, ceil(K b / 8)], scale, zero, codebook; bias
    x [.., K] ──kernel for this device, dtype and row count──> [.., N]       layouts.py
              └─ none: dequantise, then torch's own product: storage-only, and `runs_packed` says why

The state dict is what is stored. A kernel's own layout is built from it at the first call, is not stored, is dropped when the module
moves, and `kernel_bytes` tells its size. Casts (`.half()`, `.to(dtype)`) move the tensors but never change their types: a rounded
scale would be another weight. Gradients reach x and bias; then and for many rows weights are dequantised.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...core.errors import TransformError
from ..kinds import layer_kind
from .grid import Grid, Quantised, dequantise
from .layouts import CPU_ROWS, Layout, build, choose, multiply
from .packing import pack, packed_width, to_signed, to_unsigned, unpack


class PackedWeight(nn.Module):
    """A quantised weight of `shape`: buffers packed, scale and, where the form has them, zero and codebook."""

    packed: Tensor
    scale: Tensor
    zero: Tensor | None
    codebook: Tensor | None

    def __init__(self, shape: tuple[int, ...], grid: Grid, codebook_rows: int = 0) -> None:
        super().__init__()
        self.shape, self.grid = torch.Size(shape), grid
        rows, columns = self.rows, self.columns
        count = (1 if grid.granularity == "tensor" else rows, grid.groups(columns))
        self.register_buffer("packed", torch.zeros(rows, packed_width(grid.bits, columns), dtype=torch.uint8))
        self.register_buffer("scale", torch.ones(count, dtype=grid.dtype))
        shifted = not grid.symmetric and grid.form != "codebook"
        zero_type = grid.dtype if grid.form == "minimum" else torch.uint8
        self.register_buffer("zero", torch.zeros(count, dtype=zero_type) if shifted else None)
        self.register_buffer("codebook", torch.zeros(codebook_rows, 1 << grid.bits) if grid.form == "codebook" else None)

    @property
    def rows(self) -> int:
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def columns(self) -> int:
        return self.shape.numel() // self.rows

    def fill(self, quantised: Quantised) -> Self:
        """Take the codes, scales and zeros of a quantised weight of this shape and grid."""
        if quantised.shape != self.shape or quantised.grid != self.grid:
            raise TransformError(
                f"fill {tuple(self.shape)} from {tuple(quantised.shape)}", why="shapes and grids must agree", do="requantise"
            )
        self.packed = pack(to_unsigned(quantised.codes, self.grid.bits), self.grid.bits)
        self.scale, self.zero, self.codebook = quantised.scale, quantised.zero, quantised.codebook
        return self

    def quantised(self) -> Quantised:
        """Codes as integers again; 8-bit ones are a view."""
        return self._of_rows(self.packed, self.scale, self.zero, self.codebook, self.shape)

    def _of_rows(self, packed: Tensor, scale: Tensor, zero: Tensor | None, codebook: Tensor | None, shape: torch.Size) -> Quantised:
        bits = self.grid.bits
        codes = packed if bits == 8 else unpack(packed, bits, self.columns)
        if self.grid.low < 0:
            codes = to_signed(codes, bits)
        return Quantised(codes, scale, zero, shape, self.grid, codebook)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight, in its shape."""
        return dequantise(self.quantised(), dtype)

    def logical_parameters(self) -> int:
        """How many weights (and biases) the packed bytes stand for."""
        bias = getattr(self, "bias", None)
        return self.shape.numel() + (0 if bias is None else bias.numel())

    def packed_bytes(self) -> int:
        """Bytes of the weight as stored: codes, scales, zeros, codebook."""
        return sum(t.nbytes for t in (self.packed, self.scale, self.zero, self.codebook) if t is not None)

    def weight_config(self) -> dict[str, Any]:
        """What builds an empty twin of the weight: JSON."""
        return {"shape": list(self.shape), "grid": asdict(self.grid), "codebook_rows": 0 if self.codebook is None else len(self.codebook)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_type(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            moved = moved if moved.dtype is tensor.dtype else tensor.to(moved.device)
            return moved if moved.device == tensor.device else _once(tensor, moved)

        self._forget()
        super()._apply(keep_type, recurse)  # type: ignore[no-untyped-call]
        return self

    def _forget(self) -> None:
        """Drop what was derived from the tensors: they are about to change."""

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        self._forget()
        super()._load_from_state_dict(*args, **options)

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, {self.grid.bits} bits, {self.grid.form if not self.grid.symmetric else 'symmetric'}"


def _once(tensor: Tensor, moved: Tensor) -> Tensor:
    """`moved`, or what another layer that shares `tensor` has made of it: a table for input and output stays one table."""
    earlier = getattr(tensor, "_moved", None)
    kept: Tensor | None = earlier() if earlier is not None else None
    if kept is not None and kept.device == moved.device:
        return kept
    tensor._moved = weakref.ref(moved)  # type: ignore[attr-defined]
    return moved


def weight_from(config: dict[str, Any]) -> tuple[tuple[int, ...], Grid, int]:
    """The arguments of PackedWeight that `weight_config` wrote."""
    return tuple(int(size) for size in config["shape"]), Grid(**config["grid"]), int(config["codebook_rows"])


def _bias_config(bias: Tensor | None) -> str | None:
    return None if bias is None else str(bias.dtype).removeprefix("torch.")


def _empty_bias(size: int, dtype: str | None) -> nn.Parameter | None:
    kinds = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
    return None if dtype is None else nn.Parameter(torch.zeros(size, dtype=kinds[dtype]))


def _cast(tensor: Tensor | None, like: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.to(like.dtype)


@layer_kind("linear-packed")
class PackedLinear(PackedWeight):
    """nn.Linear with a packed weight. `input_scale` [K], if any, multiplies x first (awq.py)."""

    input_scale: Tensor | None

    def __init__(
        self, shape: tuple[int, ...], grid: Grid, codebook_rows: int = 0, *, bias: str | None = None, scaled_input: bool = False
    ) -> None:
        super().__init__(shape, grid, codebook_rows)
        self.out_features, self.in_features = shape
        self.bias = _empty_bias(self.out_features, bias)
        self.register_buffer("input_scale", torch.ones(self.in_features) if scaled_input else None)
        self._layout: Layout | None = None
        self._layout_dtype: torch.dtype | None = None

    @classmethod
    def from_quantised(cls, quantised: Quantised, bias: Tensor | None = None, input_scale: Tensor | None = None) -> PackedLinear:
        """The layer of a quantised weight [N, K]."""
        book = 0 if quantised.codebook is None else len(quantised.codebook)
        layer = cls(tuple(quantised.shape), quantised.grid, book, bias=_bias_config(bias), scaled_input=input_scale is not None)
        layer.fill(quantised)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().clone())
        if input_scale is not None:
            layer.input_scale = input_scale.detach().float()
        return layer

    def config(self) -> dict[str, Any]:
        return {**self.weight_config(), "bias": _bias_config(self.bias), "scaled_input": self.input_scale is not None}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PackedLinear:
        return cls(*weight_from(config), bias=config["bias"], scaled_input=config["scaled_input"])

    def runs_packed(self, device: str | None = None, dtype: torch.dtype = torch.bfloat16) -> tuple[bool, str]:
        """(whether a kernel multiplies the packed weight, which one or why not) for x of this dtype on this kind of device."""
        kernel, reason = choose(self.grid, self.rows, self.columns, device or self.packed.device.type, dtype)
        return kernel is not None, reason

    def kernel_bytes(self) -> int:
        """Bytes the kernel's layout holds beyond the stored tensors; 0 before the first call."""
        return 0 if self._layout is None else self._layout.extra_bytes

    def forward(self, x: Tensor) -> Tensor:
        if self.input_scale is not None:
            x = x * self.input_scale.to(x.dtype)
        bias = _cast(self.bias, x)
        layout = self._layout_for(x)
        if layout is None:
            return functional.linear(x, self.dequantised(x.dtype), bias)
        return multiply(layout, x, bias)

    def _layout_for(self, x: Tensor) -> Layout | None:
        cpu = x.device.type == "cpu"
        if cpu and (x.numel() > CPU_ROWS * self.columns or (x.requires_grad and torch.is_grad_enabled())):
            return None
        if self._layout is not None and self._layout_dtype is x.dtype:
            return self._layout
        kernel, _ = choose(self.grid, self.rows, self.columns, x.device.type, x.dtype)
        if kernel is None:
            return None
        self._layout, self._layout_dtype = build(kernel, self.quantised(), x.dtype), x.dtype
        return self._layout

    def _forget(self) -> None:
        self._layout = None


@layer_kind("conv2d-packed")
class PackedConv2d(PackedWeight):
    """nn.Conv2d with a packed weight; dequantised at every call: storage-only."""

    def __init__(
        self, shape: tuple[int, ...], grid: Grid, codebook_rows: int = 0, *, stride: tuple[int, ...] = (1, 1), padding: Any = (0, 0),
        dilation: tuple[int, ...] = (1, 1), groups: int = 1, padding_mode: str = "zeros", bias: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(shape, grid, codebook_rows)
        self.stride, self.dilation, self.groups, self.padding_mode = tuple(stride), tuple(dilation), groups, padding_mode
        self.padding = padding if isinstance(padding, str) else tuple(padding)
        self.out_channels, self.in_channels, self.kernel_size = shape[0], shape[1] * groups, tuple(shape[2:])
        self.bias = _empty_bias(shape[0], bias)

    @classmethod
    def from_quantised(cls, quantised: Quantised, like: nn.Conv2d, bias: Tensor | None = None) -> PackedConv2d:
        """The layer of a quantised weight [out, in / groups, kh, kw] with the geometry of `like` and this bias."""
        book = 0 if quantised.codebook is None else len(quantised.codebook)
        layer = cls(
            tuple(quantised.shape), quantised.grid, book, stride=like.stride, padding=like.padding, dilation=like.dilation,
            groups=like.groups, padding_mode=like.padding_mode, bias=_bias_config(bias),
        )  # fmt: skip
        layer.fill(quantised)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().clone())
        return layer

    def config(self) -> dict[str, Any]:
        padding = self.padding if isinstance(self.padding, str) else list(self.padding)
        return {
            **self.weight_config(), "stride": list(self.stride), "padding": padding, "dilation": list(self.dilation),
            "groups": self.groups, "padding_mode": self.padding_mode, "bias": _bias_config(self.bias),
        }  # fmt: skip

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PackedConv2d:
        names = ("stride", "padding", "dilation", "groups", "padding_mode", "bias")
        return cls(*weight_from(config), **{name: config[name] for name in names})

    def runs_packed(self, device: str | None = None, dtype: torch.dtype = torch.bfloat16) -> tuple[bool, str]:
        return False, "no kernel convolves packed weights; they are dequantised at each call"

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.dequantised(x.dtype), _cast(self.bias, x)
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            x, padding = functional.pad(x, _both_sides(padding, self.kernel_size, self.dilation), mode=self.padding_mode), 0
        return functional.conv2d(x, weight, bias, self.stride, padding, self.dilation, self.groups)


def _both_sides(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> list[int]:
    """What functional.pad takes: left, right, top, bottom; "same" puts an odd one at the end, as nn.Conv2d does."""
    amounts = []
    for axis in reversed(range(len(kernel))):
        if padding == "same":
            total = dilation[axis] * (kernel[axis] - 1)
            amounts += [total // 2, total - total // 2]
        else:
            amounts += [0 if padding == "valid" else padding[axis]] * 2
    return amounts


@layer_kind("embedding-packed")
class PackedEmbedding(PackedWeight):
    """nn.Embedding with packed rows: only the rows asked for are unpacked. `dtype` is what it answers in."""

    def __init__(self, shape: tuple[int, ...], grid: Grid, codebook_rows: int = 0, *, dtype: str = "float32") -> None:
        super().__init__(shape, grid, codebook_rows)
        self.num_embeddings, self.embedding_dim = shape
        self.answer = getattr(torch, dtype)

    @classmethod
    def from_quantised(cls, quantised: Quantised, dtype: torch.dtype = torch.float32) -> PackedEmbedding:
        book = 0 if quantised.codebook is None else len(quantised.codebook)
        return cls(tuple(quantised.shape), quantised.grid, book, dtype=str(dtype).removeprefix("torch.")).fill(quantised)

    def config(self) -> dict[str, Any]:
        return {**self.weight_config(), "dtype": str(self.answer).removeprefix("torch.")}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PackedEmbedding:
        if config["dtype"] not in ("float32", "float16", "bfloat16", "float64"):
            raise ValueError(f"dtype {config['dtype']!r}")
        return cls(*weight_from(config), dtype=config["dtype"])

    def runs_packed(self, device: str | None = None, dtype: torch.dtype = torch.bfloat16) -> tuple[bool, str]:
        return True, "rows are gathered packed, then dequantised"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # a cast of the model changes what the rows are answered in, though not how they are stored
        self.answer = fn(torch.empty(0, dtype=self.answer, device=self.packed.device)).dtype
        return super()._apply(fn, recurse)

    def forward(self, tokens: Tensor) -> Tensor:
        flat = tokens.reshape(-1)
        rows = [t if t is None or len(t) == 1 else t[flat] for t in (self.scale, self.zero, self.codebook)]
        part = self._of_rows(self.packed[flat], rows[0], rows[1], rows[2], torch.Size((len(flat), self.embedding_dim)))  # type: ignore[arg-type]
        return dequantise(part, self.answer).reshape(*tokens.shape, self.embedding_dim)
