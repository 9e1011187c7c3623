"""Two operators that do a layer and what follows it in one oneDNN call on the CPU.

    ridgeline::onednn_conv    x [B, C, H, W], weight [O, C/groups, h, w] ──> activation(conv2d(x, weight, bias) + other)
    ridgeline::onednn_linear  x [.., K], weight [N, K]                   ──> activation(x @ weight^T + bias + other)

`packed`: the weight is reordered once into oneDNN's blocked layout and kept beside the plain one, for as long as that lives and is
not written to; a packed convolution works and answers in channels-last, whatever layout it is given. The graph holds plain weights
only, so a module copies, saves, compiles and exports as before, and packs again where it wakes up: packing costs the packed weights'
bytes once more. Where oneDNN cannot (other dtypes, no oneDNN, another device) the same op is computed by the plain formula.
The underlying torch.ops.mkldnn calls are those that Inductor's freezing uses. Differentiable: no.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Optional = Tensor | None
ACTIVATIONS: dict[str, Callable[[Tensor, Sequence[float]], Tensor]] = {
    "none": lambda x, scalars: x,
    "relu": lambda x, scalars: torch.relu(x),
    "sigmoid": lambda x, scalars: torch.sigmoid(x),
    "tanh": lambda x, scalars: torch.tanh(x),
    "silu": lambda x, scalars: F.silu(x),
    "hardswish": lambda x, scalars: F.hardswish(x),
    "gelu": lambda x, scalars: F.gelu(x),
    "gelu_tanh": lambda x, scalars: F.gelu(x, approximate="tanh"),
    "leaky_relu": lambda x, scalars: F.leaky_relu(x, scalars[0]),
    "hardtanh": lambda x, scalars: torch.clamp(x, scalars[0], scalars[1]),
}
_ATTRIBUTE = {"silu": ("swish", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}
"""(attribute, algorithm) as torch.ops.mkldnn spells an activation, where it is not (name, "")."""
AFTER_SUM = ("relu",)
"""What a convolution with a sum can end in; other activations after a sum are a call of their own."""
_ops: Any = torch.ops.mkldnn


@cache
def available() -> bool:
    """Whether this torch has oneDNN and the fused calls."""
    names = ("_convolution_pointwise", "_linear_pointwise", "_reorder_convolution_weight", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(hasattr(_ops, name) for name in names)


def supported(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes in this dtype here: float32; bfloat16 and float16 where the processor has them."""
    if not available() or not torch.backends.mkldnn.enabled:
        return False
    if dtype is torch.bfloat16:
        return bool(_ops._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(_ops._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def _usable(x: Tensor, weight: Tensor) -> bool:
    return weight.dtype is x.dtype and supported(x.dtype) and x.numel() > 0 and not torch.is_autocast_enabled("cpu")


@dataclass(slots=True)
class _Packed:
    """What was made of one plain weight."""

    weight: weakref.ref[Tensor]
    state: tuple[Any, ...]  # of the weight, when it was packed
    by_use: dict[tuple[Any, ...], Tensor]


_packed: dict[int, _Packed] = {}
"""id of a plain weight → its packed forms; an entry goes with its weight. (WeakTensorKeyDictionary costs 2 µs a look.)"""


def _once(weight: Tensor, use: tuple[Any, ...], pack: Callable[[Tensor], Tensor]) -> Tensor:
    """The packed weight, packed now if it never was for this use, or if the plain one was written to or replaced since."""
    state = (0 if weight.is_inference() else weight._version, weight.data_ptr(), weight.dtype)
    key = id(weight)
    known = _packed.get(key)
    if known is None or known.weight() is not weight or known.state != state:
        known = _packed[key] = _Packed(weakref.ref(weight, partial(_forget, key)), state, {})
    packed = known.by_use.get(use)
    if packed is None:
        with torch.no_grad():
            packed = known.by_use[use] = pack(weight.detach().contiguous())
    return packed


def _forget(key: int, dead: weakref.ref[Tensor]) -> None:
    """Drop what belonged to a weight that is gone, unless a new weight has taken its place."""
    known = _packed.get(key)
    if known is not None and known.weight is dead:
        del _packed[key]


def conv_formula(
    x: Tensor, weight: Tensor, bias: Optional, other: Optional, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    activation: str, scalars: list[float], packed: bool,
) -> Tensor:  # fmt: skip
    """What `onednn_conv` computes, in plain torch."""
    out = torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return ACTIVATIONS[activation](out if other is None else out + other, scalars)


def _conv(
    x: Tensor, weight: Tensor, bias: Optional, other: Optional, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    activation: str, scalars: list[float], packed: bool,
) -> Tensor:  # fmt: skip
    if not _usable(x, weight):
        out = conv_formula(x, weight, bias, other, stride, padding, dilation, groups, activation, scalars, packed)
        return out.contiguous(memory_format=torch.channels_last) if packed else out
    if packed:
        use, sizes = (*stride, *padding, *dilation, groups), list(x.shape)
        weight = _once(weight, use, lambda plain: _ops._reorder_convolution_weight(plain, padding, stride, dilation, groups, sizes))
    attribute, algorithm = _ATTRIBUTE.get(activation, (activation, ""))
    if other is None:
        return _ops._convolution_pointwise.default(  # type: ignore[no-any-return]
            x, weight, bias, padding, stride, dilation, groups, attribute, scalars, algorithm
        )
    # where torch's call falls back on its own add and relu in one, it has that for float32 only
    fused = attribute if activation in AFTER_SUM and x.dtype is torch.float32 else None
    out = _ops._convolution_pointwise.binary(x, other, weight, bias, padding, stride, dilation, groups, "add", 1.0, fused, [], "")
    return out if fused else ACTIVATIONS[activation](out, scalars)


def _conv_fake(
    x: Tensor, weight: Tensor, bias: Optional, other: Optional, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    activation: str, scalars: list[float], packed: bool,
) -> Tensor:  # fmt: skip
    out = torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return torch.empty_like(out, memory_format=torch.channels_last) if packed else out


def linear_formula(
    x: Tensor, weight: Tensor, bias: Optional, other: Optional, activation: str, scalars: list[float], packed: bool
) -> Tensor:
    """What `onednn_linear` computes, in plain torch."""
    out = F.linear(x, weight, bias)
    return ACTIVATIONS[activation](out if other is None else out + other, scalars)


def _linear(x: Tensor, weight: Tensor, bias: Optional, other: Optional, activation: str, scalars: list[float], packed: bool) -> Tensor:
    if not _usable(x, weight):
        return linear_formula(x, weight, bias, other, activation, scalars, packed).contiguous()
    if packed:
        rows = x.numel() // x.shape[-1]
        weight = _once(weight, (), lambda plain: _ops._reorder_linear_weight(plain, rows))
    attribute, algorithm = _ATTRIBUTE.get(activation, (activation, ""))
    if other is None:
        return _ops._linear_pointwise.default(x, weight, bias, attribute, scalars, algorithm)  # type: ignore[no-any-return]
    out: Tensor = _ops._linear_pointwise.binary(x, other, weight, bias, "add")
    return ACTIVATIONS[activation](out, scalars)


def _linear_fake(x: Tensor, weight: Tensor, bias: Optional, other: Optional, activation: str, scalars: list[float], packed: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_library = torch.library.Library("ridgeline", "FRAGMENT")
_EPILOGUE = "str activation, float[] scalars, bool packed"
_OPERANDS = "Tensor x, Tensor weight, Tensor? bias, Tensor? other"
_library.define(f"onednn_conv({_OPERANDS}, int[] stride, int[] padding, int[] dilation, int groups, {_EPILOGUE}) -> Tensor")
_library.define(f"onednn_linear({_OPERANDS}, {_EPILOGUE}) -> Tensor")
for _name, _run, _formula, _fake in (
    ("onednn_conv", _conv, conv_formula, _conv_fake),
    ("onednn_linear", _linear, linear_formula, _linear_fake),
):
    _library.impl(_name, _run, "CPU")
    _library.impl(_name, _formula, "CUDA")
    torch.library.register_fake(f"ridgeline::{_name}", _fake, lib=_library)
conv = torch.ops.ridgeline.onednn_conv.default
linear = torch.ops.ridgeline.onednn_linear.default
