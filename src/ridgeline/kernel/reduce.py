"""Reductions over any axes: sum, mean, amax, argmax, var, and sum_to_shape, the backward of broadcasting.

    x ──plan──> [b, s, k, r] ──schedule──> tiles ──fold | position | spread──> partial results ──last program, or a 2nd launch──> out
      reduce_plan.py             reduce_launch.py, reduce_kernels.py

x is read once and nothing as large as x is written: n * itemsize bytes forward. Accumulates in float32 (float64 for float64 input,
int64 for sums of integers); the order of summation depends on shape, strides and configuration only, so results repeat bit by bit.
Result dtypes are torch's. x is copied first only where its strides fit no plan (see reduce_plan.py), or where `dtype` is narrower.
Empty tensors, complex numbers and fractional corrections of var go to plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from .case import Anchor, Case, benchmark
from .library import operator
from .reduce_launch import FLOATS, INTEGERS, directly, find, run, sum_dtype
from .reduce_plan import kind_of, normalize, reduced_shape
from .replace import replaces, worth
from .softmax import HALVES

Dims = int | Sequence[int] | None


def _launch_sum(x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is not None and not directly(x.dtype, dtype):
        x = x.to(dtype)
    call = find("sum", x, dim, keepdim, dtype)
    return _reference_sum(x, dim, keepdim, dtype) if call is None else run(call, x)


def _launch_mean(x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is not None and not directly(x.dtype, dtype):
        x = x.to(dtype)
    call = find("mean", x, dim, keepdim, dtype)
    return _reference_mean(x, dim, keepdim, dtype) if call is None else run(call, x)


def _launch_amax(x: torch.Tensor, dim: Sequence[int], keepdim: bool) -> torch.Tensor:
    call = find("amax", x, dim, keepdim)
    if call is None:
        return _reference_amax(x, dim, keepdim)
    out = run(call, x)
    return out.view(torch.bool) if x.dtype == torch.bool else out


def _launch_argmax(x: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
    call = find("argmax", x, dim, keepdim)
    return _reference_argmax(x, dim, keepdim) if call is None else run(call, x)


def _launch_var(x: torch.Tensor, dim: Sequence[int] | None, correction: float, keepdim: bool) -> torch.Tensor:
    call = find("var", x, dim, keepdim, correction)
    return _reference_var(x, dim, correction, keepdim) if call is None else run(call, x)


def _reference_sum(x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
    return torch.sum(x, None if dim is None else list(dim), keepdim, dtype=dtype)


def _reference_mean(x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
    return torch.mean(x, None if dim is None else list(dim), keepdim, dtype=dtype)


def _reference_amax(x: torch.Tensor, dim: Sequence[int], keepdim: bool) -> torch.Tensor:
    return torch.amax(x, list(dim), keepdim)


def _reference_argmax(x: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
    return torch.argmax(x, dim, keepdim)


def _reference_var(x: torch.Tensor, dim: Sequence[int] | None, correction: float, keepdim: bool) -> torch.Tensor:
    return torch.var(x, None if dim is None else list(dim), correction=correction, keepdim=keepdim)


def _fake(x: torch.Tensor, dim: Dims, keepdim: bool, dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty(reduced_shape(x.shape, normalize(dim, x.ndim), keepdim), dtype=dtype)


def _fake_sum(x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
    return _fake(x, dim, keepdim, dtype or sum_dtype(x.dtype))


def _fake_mean(x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
    result = dtype or x.dtype
    if not (result.is_floating_point or result.is_complex):
        raise RuntimeError(
            f"mean(): could not infer output dtype. Input dtype must be either a floating point or complex dtype. Got: {result}"
        )
    return _fake(x, dim, keepdim, result)


def _fake_amax(x: torch.Tensor, dim: Sequence[int], keepdim: bool) -> torch.Tensor:
    return _fake(x, dim, keepdim, x.dtype)


def _fake_argmax(x: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
    return _fake(x, dim, keepdim, torch.int64)


def _fake_var(x: torch.Tensor, dim: Sequence[int] | None, correction: float, keepdim: bool) -> torch.Tensor:
    return _fake(x, dim, keepdim, x.real.dtype if x.is_complex() else x.dtype)


def _widened(grad: torch.Tensor, dims: tuple[int, ...], keepdim: bool) -> torch.Tensor:
    """The gradient with the reduced dimensions back, of size 1."""
    if not keepdim:
        for d in dims:
            grad = grad.unsqueeze(d)
    return grad


def _save_shape(ctx: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
    x, dim, keepdim = args[:3]
    ctx.shape, ctx.dtype, ctx.dims, ctx.keepdim = x.shape, x.dtype, normalize(dim, x.ndim), keepdim


def _sum_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return _widened(grad.to(ctx.dtype), ctx.dims, ctx.keepdim).expand(ctx.shape), None, None, None


def _mean_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    count = prod(ctx.shape[d] for d in ctx.dims)
    return _widened(grad.to(ctx.dtype) / count, ctx.dims, ctx.keepdim).expand(ctx.shape), None, None, None


def _amax_setup(ctx: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
    _save_shape(ctx, args, output)
    ctx.save_for_backward(args[0], output)


def _amax_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, top = ctx.saved_tensors
    ties = x == _widened(top, ctx.dims, ctx.keepdim)
    share = _widened(grad, ctx.dims, ctx.keepdim) / sum(ties, ctx.dims, True)
    return share * ties, None, None


def _var_setup(ctx: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
    x, dim, correction, keepdim = args
    ctx.dims, ctx.keepdim, ctx.correction = normalize(dim, x.ndim), keepdim, correction
    ctx.save_for_backward(x)


def _var_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    freedom = prod(x.shape[d] for d in ctx.dims) - ctx.correction
    scale = 2.0 / freedom if freedom != 0 else float("nan")
    return _widened(grad * scale, ctx.dims, ctx.keepdim) * (x - mean(x, ctx.dims, True)), None, None, None


_sum = operator(
    "sum(Tensor x, int[]? dim, bool keepdim, ScalarType? dtype) -> Tensor",
    launch=_launch_sum, reference=_reference_sum, fake=_fake_sum, setup=_save_shape, backward=_sum_backward,
)  # fmt: skip
_mean = operator(
    "mean(Tensor x, int[]? dim, bool keepdim, ScalarType? dtype) -> Tensor",
    launch=_launch_mean, reference=_reference_mean, fake=_fake_mean, setup=_save_shape, backward=_mean_backward,
)  # fmt: skip
_amax = operator(
    "amax(Tensor x, int[] dim, bool keepdim) -> Tensor",
    launch=_launch_amax, reference=_reference_amax, fake=_fake_amax, setup=_amax_setup, backward=_amax_backward,
)  # fmt: skip
_argmax = operator(
    "argmax(Tensor x, int? dim, bool keepdim) -> Tensor", launch=_launch_argmax, reference=_reference_argmax, fake=_fake_argmax
)
_var = operator(
    "var(Tensor x, int[]? dim, float correction, bool keepdim) -> Tensor",
    launch=_launch_var, reference=_reference_var, fake=_fake_var, setup=_var_setup, backward=_var_backward,
)  # fmt: skip


def sum(x: torch.Tensor, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Sum over `dim` (all by default); integers add up in int64 unless `dtype` says otherwise."""
    out: torch.Tensor = _sum(x, (dim,) if isinstance(dim, int) else dim, keepdim, dtype)
    return out


def mean(x: torch.Tensor, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Mean over `dim`; of floating point numbers only, as torch's."""
    out: torch.Tensor = _mean(x, (dim,) if isinstance(dim, int) else dim, keepdim, dtype)
    return out


def amax(x: torch.Tensor, dim: int | Sequence[int] = (), keepdim: bool = False) -> torch.Tensor:
    """Maximum over `dim`; NaN where there is one. The gradient is shared evenly by equal maxima."""
    out: torch.Tensor = _amax(x, (dim,) if isinstance(dim, int) else dim, keepdim)
    return out


def argmax(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
    """Index of the first maximum along `dim`, of the flattened tensor without one; a NaN counts as the largest."""
    out: torch.Tensor = _argmax(x, dim, keepdim)
    return out


def var(x: torch.Tensor, dim: Dims = None, correction: float = 1, keepdim: bool = False) -> torch.Tensor:
    """Variance over `dim`, with the sum of squares divided by the count less `correction`."""
    out: torch.Tensor = _var(x, (dim,) if isinstance(dim, int) else dim, float(correction), keepdim)
    return out


def sum_to_shape(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Sum x over what broadcasting `shape` to x's shape would repeat: the gradient of the broadcast tensor."""
    extra = x.ndim - len(shape)
    wrong = extra < 0 or any(size != 1 and size != whole for size, whole in zip(shape, x.shape[extra:], strict=False))
    if wrong:
        raise ValueError(f"a tensor of shape {tuple(shape)} does not broadcast to {tuple(x.shape)}")
    dims = [d for d in range(x.ndim) if d < extra or (shape[d - extra] == 1 and x.shape[d] != 1)]
    if not dims:
        return x
    return sum(x, dims, True, x.dtype).reshape(shape)


def _kind(x: Any, dim: Any) -> str | None:
    """The kind of a reduction; None where the arguments are not for us, and torch's own answers or says why not."""
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.dtype not in FLOATS + INTEGERS:
        return None
    dims = () if dim is None else (dim,) if isinstance(dim, int) else dim
    reach = max(x.ndim, 1)
    if not isinstance(dims, (tuple, list)) or not all(isinstance(d, int) and -reach <= d < reach for d in dims):
        return None
    if len({d % reach for d in dims}) != len(dims):
        return None
    return kind_of(x.shape, normalize(dims, x.ndim))


def _sum_line(kind: str, dim: Any) -> str:
    """The benchmark row that measured a kind of sum."""
    if kind == "full":
        return "sum_all"
    if kind != "outer":
        return "sum_last"
    first = dim if isinstance(dim, int) else dim[0]
    return "sum_first_two" if first == 0 else "sum_middle"


@replaces("sum", torch.sum, torch.Tensor.sum)
def _stand_in_sum(input: Any, dim: Any = None, keepdim: Any = False, *, dtype: Any = None, **other: Any) -> Any:
    kind = None if other or not isinstance(keepdim, bool) else _kind(input, dim)
    if kind is None or not worth(_sum_line(kind, dim), input, input.numel(), kind):
        return NotImplemented
    if dtype is None and input.dtype in HALVES and input.is_cuda and torch.is_autocast_enabled("cuda"):
        dtype = torch.float32  # what CUDA's autocast does
    return sum(input, dim, keepdim, dtype)


@replaces("mean", torch.mean, torch.Tensor.mean)
def _stand_in_mean(input: Any, dim: Any = None, keepdim: Any = False, *, dtype: Any = None, **other: Any) -> Any:
    kind = None if other or not isinstance(keepdim, bool) else _kind(input, dim)
    if kind is None or (dtype or input.dtype) not in FLOATS or not worth("mean", input, input.numel(), kind):
        return NotImplemented
    return mean(input, dim, keepdim, dtype)


@replaces("amax", torch.amax, torch.Tensor.amax)
def _stand_in_amax(input: Any, dim: Any = (), keepdim: Any = False, **other: Any) -> Any:
    kind = None if other or dim is None or not isinstance(keepdim, bool) else _kind(input, dim)
    if kind is None or not worth("amax", input, input.numel(), kind):
        return NotImplemented
    return amax(input, dim, keepdim)


@replaces("argmax", torch.argmax, torch.Tensor.argmax)
def _stand_in_argmax(input: Any, dim: Any = None, keepdim: Any = False, **other: Any) -> Any:
    usable = not other and (dim is None or isinstance(dim, int)) and isinstance(keepdim, bool)
    kind = _kind(input, dim) if usable else None
    if kind is None or input.dtype == torch.bool or not worth("argmax", input, input.numel(), kind):
        return NotImplemented
    return argmax(input, dim, keepdim)


@replaces("var", torch.var, torch.Tensor.var)
def _stand_in_var(input: Any, dim: Any = None, unbiased: Any = None, keepdim: Any = False, *, correction: Any = None, **other: Any) -> Any:
    if isinstance(dim, bool):  # torch.var(x, unbiased)
        dim, unbiased = None, dim
    usable = not other and isinstance(keepdim, bool) and (unbiased is None or (isinstance(unbiased, bool) and correction is None))
    kind = _kind(input, dim) if usable else None
    if kind is None or input.dtype not in FLOATS or not worth("var", input, input.numel(), kind):
        return NotImplemented
    return var(input, dim, (1 if unbiased in (None, True) else 0) if correction is None else correction, keepdim)


def _case(op: str, ours: Callable[..., Any], plain: Callable[..., Any], dims: tuple[int, ...], reads: int, **more: Any) -> Case:
    """Reads x once forward; backward reads it `reads` times and writes a gradient of its size."""

    def make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Any, ...]:
        return (torch.randn(shape, device=device, dtype=dtype).requires_grad_(op != "argmax"),)

    def moved(inputs: tuple[Any, ...], backward: bool) -> int:
        return int(inputs[0].numel() * inputs[0].element_size() * (1 + (1 + reads if backward else 0)))

    def kind(inputs: tuple[Any, ...]) -> tuple[str, int]:
        return kind_of(inputs[0].shape, normalize(dims, inputs[0].ndim)), inputs[0].numel()

    return benchmark(Case(op, ours, plain, make, moved, kind=kind, differentiable=op != "argmax", **more))


_SOLID = {"small": ((8, 32, 256),), "medium": ((16, 256, 1024),), "large": ((64, 256, 1024),), "batch": ((32, 128, 768), (16, 1024, 1024))}


def _anchors(small_ms: float | None, large_ms: float) -> tuple[Anchor, ...]:
    large = Anchor((64, 4096, 4096), torch.float32, limit_ms=large_ms)
    return (large,) if small_ms is None else (Anchor((4, 512, 896), torch.float32, limit_ms=small_ms), large)


BENCH = (
    _case("sum_all", sum, torch.sum, (), 0, anchors=_anchors(0.0049, 0.939)),
    _case("sum_last", lambda x: sum(x, -1), lambda x: torch.sum(x, -1), (-1,), 0,
          anchors=(*_anchors(0.0037, 0.936), Anchor((8, 16777216), torch.bfloat16, limit_ms=0.0725))),
    _case("sum_first_two", lambda x: sum(x, (0, 1)), lambda x: torch.sum(x, (0, 1)), (0, 1), 0, sizes=_SOLID,
          anchors=_anchors(0.0062, 0.959)),
    _case("sum_middle", lambda x: sum(x, 1), lambda x: torch.sum(x, 1), (1,), 0, sizes=_SOLID, anchors=_anchors(None, 0.944)),
    _case("mean", lambda x: mean(x, -1), lambda x: torch.mean(x, -1), (-1,), 0),
    _case("amax", lambda x: amax(x, -1), lambda x: torch.amax(x, -1), (-1,), 1),
    _case("argmax", lambda x: argmax(x, -1), lambda x: torch.argmax(x, -1), (-1,), 0),
    _case("var", lambda x: var(x, -1), lambda x: torch.var(x, -1), (-1,), 1),
)  # fmt: skip
