"""Layers that compute in integers: int8 weights, uint8 activations, int32 sums.

    x float ──code = clamp(round(x / s) + z, 0, 255)──> uint8 ──int8 kernel──> acc int32
      out = (acc · s) · w_scale[channel] + bias        float32, in this order: what oneDNN's kernel does, so every path agrees bit by bit
      a linked layer adds: ReLU where the graph has one, then the next layer's codes, uint8, instead of floats   (static.py links)

CPU with VNNI or AMX: onednn.qconv_pointwise, onednn.qlinear_pointwise. Elsewhere the same integers: torch._int_mm on CUDA
for a linear layer of more than 16 rows, else products of whole numbers in float64, exact below 2^53 and labelled storage-only.
Weights of 2 to 7 bits are stored packed and run as int8. No gradient. torch.quantize_per_tensor is deprecated and not used.
Ref: Jacob 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from ..kinds import layer_kind
from .grid import Grid, Quantised
from .packed import PackedWeight

MOST_TERMS = 65_000  # of one sum: 255 * 128 * 65,000 < 2^31
ACTIVATION_LEVELS = 256


def activation_codes(x: Tensor, scale: float, zero: int) -> Tensor:
    """uint8 codes of a float tensor, round half to even; the layout in memory is kept."""
    # float to uint8 takes 7x as long as float to int8 on an x86 CPU, so codes go through int8, 128 lower
    shifted = (x.float() / scale).round_().add_(zero - 128).clamp_(-128, 127).to(torch.int8)
    return shifted.view(torch.uint8).bitwise_xor_(128)


@cache
def onednn_works() -> bool:
    """Whether torch has oneDNN's integer kernels here and they are exact.

    On CPUs without VNNI oneDNN adds two byte products in 16 bits, which saturates: the largest codes are tried to find out.
    """
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qconv_pointwise")):
        return False
    codes, weight = torch.full((1, 64, 1, 1), 255, dtype=torch.uint8), torch.full((16, 64, 1, 1), 127, dtype=torch.int8)
    scale, zeros, ones = torch.ones(16), torch.zeros(16, dtype=torch.int32), [1, 1]
    try:
        with _disable_current_modes():
            packed = torch.ops.onednn.qconv_prepack(weight, scale, 1.0, 0, ones, [0, 0], ones, 1, None)
            out = torch.ops.onednn.qconv_pointwise(
                codes, 1.0, 0, packed, scale, zeros, None, ones, [0, 0], ones, 1, 1.0, 0, torch.float32, "none", [], ""
            )
            return bool((out == 64 * 255 * 127).all())
    except (RuntimeError, NotImplementedError):
        return False


@cache
def int_mm_works() -> bool:
    """Whether torch._int_mm is exact on this CPU: the same trap."""
    with _disable_current_modes():
        sums = torch._int_mm(torch.full((17, 64), 127, dtype=torch.int8), torch.full((64, 16), 127, dtype=torch.int8))
        return bool((sums == 64 * 127 * 127).all())


@dataclass(frozen=True, slots=True)
class Activation:
    """An affine uint8 grid: x' = (code − zero) · scale."""

    scale: float
    zero: int

    @property
    def low(self) -> float:
        """The least value it holds."""
        return -self.zero * self.scale

    @property
    def high(self) -> float:
        """The greatest value it holds."""
        return (ACTIVATION_LEVELS - 1 - self.zero) * self.scale


@dataclass(slots=True)
class Prepared:
    """What a call needs beside x, derived from the stored tensors once."""

    weight: Tensor  # the kernel's own layout, or int8 [out, ...] where there is no kernel
    entry: Activation
    exit: Activation | None
    scale: Tensor  # float32 [out]
    zeros: Tensor  # int32 [out]: symmetric weights


class Int8Layer(PackedWeight):
    """A weight of `bits` bits with one scale a channel, the grid of the layer's input and, where linked, of its output.

    takes_codes: the layer before hands over codes of this layer's grid. relu: applied before an output grid.
    """

    bias: Tensor | None
    input_scale: Tensor
    input_zero: Tensor
    output_scale: Tensor | None
    output_zero: Tensor | None

    def __init__(
        self, shape: tuple[int, ...], bits: int, *, bias: bool, takes_codes: bool = False, gives_codes: bool = False, relu: bool = False
    ) -> None:
        super().__init__(shape, Grid(bits, symmetric=True, granularity="channel"))
        self.takes_codes, self.relu = takes_codes, relu
        self.register_buffer("bias", torch.zeros(shape[0]) if bias else None)
        self.register_buffer("input_scale", torch.ones(()))
        self.register_buffer("input_zero", torch.zeros((), dtype=torch.uint8))
        self.register_buffer("output_scale", torch.ones(()) if gives_codes else None)
        self.register_buffer("output_zero", torch.zeros((), dtype=torch.uint8) if gives_codes else None)
        self._prepared: dict[tuple[torch.device, bool], Prepared] = {}

    def take(self, quantised: Quantised, bias: Tensor | None, entry: Activation) -> Self:
        """Codes and scales of the weight, a float32 bias, the grid of the input."""
        self.fill(quantised)
        device = quantised.codes.device
        self.bias = None if bias is None else bias.detach().float().clone()
        self.input_scale, self.input_zero = _stored(entry, device)
        return self

    def link_to(self, following: Int8Layer, *, relu: bool) -> None:
        """Hand over codes of the following layer's grid instead of floats."""
        self.output_scale, self.output_zero = following.input_scale.clone(), following.input_zero.clone()
        self.relu, following.takes_codes = relu, True
        self._forget()

    @property
    def entry(self) -> Activation:
        return Activation(self.input_scale.item(), int(self.input_zero.item()))

    @property
    def exit(self) -> Activation | None:
        if self.output_scale is None or self.output_zero is None:
            return None
        return Activation(self.output_scale.item(), int(self.output_zero.item()))

    def whole_config(self) -> dict[str, Any]:
        """JSON for a layer of the same form."""
        return {
            "shape": list(self.shape), "bits": self.grid.bits, "bias": self.bias is not None, "takes_codes": self.takes_codes,
            "gives_codes": self.output_scale is not None, "relu": self.relu,
        }  # fmt: skip

    def runs_packed(self, device: str | None = None, dtype: torch.dtype = torch.float32) -> tuple[bool, str]:
        """(whether the device multiplies integers here, which kernel or why not)."""
        kind = device or self.packed.device.type
        if kind == "cpu" and onednn_works():
            return True, f"onednn {self.kernel_name}"
        return self._runs_elsewhere(kind)

    kernel_name = ""

    def _runs_elsewhere(self, kind: str) -> tuple[bool, str]:
        return False, f"torch has no exact int8 kernel for this layer on this {kind}: whole numbers in float64, the same answers"

    def integers(self) -> Tensor:
        """The weight's codes as int8, in its shape."""
        return self.quantised().codes.reshape(self.shape)

    def prepared(self, device: torch.device, with_kernel: bool) -> Prepared:
        key = (device, with_kernel)
        if key not in self._prepared:
            weight = self.integers()
            scale = self.scale.reshape(-1).contiguous()
            zeros = torch.zeros(len(scale), dtype=torch.int32, device=device)
            packed = self._kernel_weight(weight, scale) if with_kernel else weight
            self._prepared[key] = Prepared(packed, self.entry, self.exit, scale, zeros)
        return self._prepared[key]

    def _kernel_weight(self, weight: Tensor, scale: Tensor) -> Tensor:
        raise NotImplementedError

    def codes_of(self, x: Tensor, ready: Prepared) -> Tensor:
        """x as this layer's codes."""
        if x.dtype is torch.uint8 and self.takes_codes:
            return x
        return activation_codes(x, ready.entry.scale, ready.entry.zero)

    def finish(self, sums: Tensor, ready: Prepared, channel_shape: tuple[int, ...]) -> Tensor:
        """Exact sums (float64 whole numbers) to the layer's answer, in the kernel's own order of operations."""
        out = (sums.float() * ready.entry.scale) * ready.scale.view(channel_shape)
        if self.bias is not None:
            out = out + self.bias.view(channel_shape)
        if self.relu:
            out = out.relu_()
        return out if ready.exit is None else activation_codes(out, ready.exit.scale, ready.exit.zero)

    def kernel_output(self, ready: Prepared) -> tuple[float, int, torch.dtype]:
        """What oneDNN's kernels want to know of the output."""
        return (1.0, 0, torch.float32) if ready.exit is None else (ready.exit.scale, ready.exit.zero, torch.uint8)

    def kernel_bytes(self) -> int:
        """Bytes held beyond the stored tensors: the kernel's layout; 0 before the first call."""
        return sum(self.shape.numel() for one in self._prepared.values() if one.weight.layout is not torch.strided or self.grid.bits != 8)

    def _forget(self) -> None:
        self._prepared = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": {}}  # a kernel's layout can be neither copied nor pickled


def _stored(grid: Activation, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor(grid.scale, dtype=torch.float32, device=device), torch.tensor(grid.zero, dtype=torch.uint8, device=device)


def run_kernel(kernel: Any, *arguments: Any) -> Tensor:
    """The kernel's answer, also under a TorchDispatchMode (a memory or FLOP counter).

    oneDNN's own weight layout has no storage, which such modes ask for. They see a copy of the answer instead of the call.
    """
    if not torch._C._len_torch_dispatch_stack():
        answer: Tensor = kernel(*arguments)
        return answer
    with _disable_current_modes():
        answer = kernel(*arguments)
    return answer.clone()


def _answer(out: Tensor, x: Tensor) -> Tensor:
    """Floats in x's own type."""
    return out.to(x.dtype) if x.is_floating_point() and out.is_floating_point() else out


@layer_kind("conv2d-int8")
class Int8Conv2d(Int8Layer):
    """nn.Conv2d in integers, zero padding."""

    kernel_name = "qconv_pointwise"

    def __init__(
        self, shape: tuple[int, ...], bits: int, *, stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...],
        groups: int, **form: Any,
    ) -> None:  # fmt: skip
        super().__init__(shape, bits, **form)
        self.stride, self.padding, self.dilation, self.groups = tuple(stride), tuple(padding), tuple(dilation), groups
        self.out_channels, self.in_channels, self.kernel_size = shape[0], shape[1] * groups, tuple(shape[2:])

    @classmethod
    def from_quantised(cls, quantised: Quantised, like: nn.Conv2d, bias: Tensor | None, entry: Activation) -> Int8Conv2d:
        """The layer of a quantised weight, with the geometry of `like`."""
        layer = cls(
            tuple(quantised.shape), quantised.grid.bits, stride=like.stride, padding=int_padding(like), dilation=like.dilation,
            groups=like.groups, bias=bias is not None,
        )  # fmt: skip
        return layer.take(quantised, bias, entry)

    def config(self) -> dict[str, Any]:
        geometry = {"stride": list(self.stride), "padding": list(self.padding), "dilation": list(self.dilation), "groups": self.groups}
        return {**self.whole_config(), **geometry}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Int8Conv2d:
        return cls(**{**config, "shape": tuple(int(size) for size in config["shape"])})

    def _kernel_weight(self, weight: Tensor, scale: Tensor) -> Tensor:
        grid = self.entry
        packed: Tensor = torch.ops.onednn.qconv_prepack(
            weight, scale, grid.scale, grid.zero, self.stride, self.padding, self.dilation, self.groups, None
        )
        return packed

    def forward(self, x: Tensor) -> Tensor:
        kernel = x.device.type == "cpu" and onednn_works()
        ready = self.prepared(x.device, kernel)
        codes = self.codes_of(x, ready)
        if not kernel:
            sums = functional.conv2d(
                codes.double() - ready.entry.zero, ready.weight.double(), None, self.stride, self.padding, self.dilation, self.groups
            )
            return _answer(self.finish(sums.round_(), ready, (1, -1, 1, 1)), x)
        scale, zero, dtype = self.kernel_output(ready)
        relu = "relu" if self.relu else "none"
        out = run_kernel(
            torch.ops.onednn.qconv_pointwise, codes.contiguous(memory_format=torch.channels_last), ready.entry.scale, ready.entry.zero,
            ready.weight, ready.scale, ready.zeros, self.bias, self.stride, self.padding, self.dilation, self.groups, scale, zero, dtype,
            relu, [], "",
        )  # fmt: skip
        return _answer(out, x)


def int_padding(conv: nn.Conv2d) -> tuple[int, ...]:
    """Padding of each side in pixels; "same" only where both sides get as much."""
    if isinstance(conv.padding, str):
        return tuple(d * (k - 1) // 2 if conv.padding == "same" else 0 for d, k in zip(conv.dilation, conv.kernel_size, strict=True))
    return tuple(conv.padding)


@layer_kind("linear-int8")
class Int8Linear(Int8Layer):
    """nn.Linear in integers."""

    kernel_name = "qlinear_pointwise"

    def __init__(self, shape: tuple[int, ...], bits: int, **form: Any) -> None:
        super().__init__(shape, bits, **form)
        self.out_features, self.in_features = shape

    @classmethod
    def from_quantised(cls, quantised: Quantised, bias: Tensor | None, entry: Activation) -> Int8Linear:
        return cls(tuple(quantised.shape), quantised.grid.bits, bias=bias is not None).take(quantised, bias, entry)

    def config(self) -> dict[str, Any]:
        return self.whole_config()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Int8Linear:
        return cls(**{**config, "shape": tuple(int(size) for size in config["shape"])})

    def _runs_elsewhere(self, kind: str) -> tuple[bool, str]:
        if kind == "cuda" and fits_int_mm(self.rows, self.columns):
            return True, "torch._int_mm, for more than 16 rows"
        return super()._runs_elsewhere(kind)

    def _kernel_weight(self, weight: Tensor, scale: Tensor) -> Tensor:
        packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, None)
        return packed

    def forward(self, x: Tensor) -> Tensor:
        kernel = x.device.type == "cpu" and onednn_works()
        ready = self.prepared(x.device, kernel)
        codes = self.codes_of(x, ready)
        flat = codes.reshape(-1, self.in_features)
        if kernel:
            scale, zero, dtype = self.kernel_output(ready)
            relu = "relu" if self.relu else "none"
            out = run_kernel(
                torch.ops.onednn.qlinear_pointwise, flat.contiguous(), ready.entry.scale, ready.entry.zero, ready.weight, ready.scale,
                ready.zeros, self.bias, scale, zero, dtype, relu, [], "",
            )  # fmt: skip
        else:
            signed = flat.bitwise_xor(128).view(torch.int8)  # codes − 128
            sums = integer_product(signed, ready.weight) + (128 - ready.entry.zero) * ready.weight.sum(1, dtype=torch.int32)
            out = self.finish(sums, ready, (1, -1))
        return _answer(out.reshape(*x.shape[:-1], self.out_features), x)


def fits_int_mm(rows: int, columns: int) -> bool:
    """Whether CUDA's int8 product takes a weight of this shape."""
    return rows % 8 == 0 and columns % 8 == 0


def integer_product(codes: Tensor, weight: Tensor) -> Tensor:
    """int8 [M,K] times int8 [N,K] transposed: exact int32 sums [M,N]."""
    kind = codes.device.type
    if (kind == "cpu" and int_mm_works()) or (kind == "cuda" and fits_int_mm(*weight.shape)):
        rows = len(codes)
        if kind == "cuda" and rows <= 16:  # cuBLAS refuses fewer rows
            codes = functional.pad(codes, (0, 0, 0, 17 - rows))
        return torch._int_mm(codes, weight.t())[:rows]
    return (codes.double() @ weight.double().t()).round_().to(torch.int32)
