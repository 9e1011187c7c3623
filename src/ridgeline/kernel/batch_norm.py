"""Batch norm in training, with what usually follows it: y = activation((x - mean) rstd w + b + residual), forward and backward.

    x [rows, channels], channels innermost ──_statistics──> means and squares [programs, channels] ──_combined──> stats [3, channels]
      x, residual, stats ──_apply──> y                                          from the end, where the second-level cache is warm
    g, x, residual ──_slopes──> partial sums ──_summed──> dw, db ──_apply_backward──> dx, and dr, the residual's

What torch does in two to four passes more: the activation and the sum are never stored apart, and the backward computes the
activation's argument again. Least passes over x: forward 3 (4 with a residual), backward 5 (8); torch 5 (8) and 8 (8), relu in place.
Statistics about the mean of a program's first rows, then joined; arithmetic in float32 (float64 for float64), one rounding at the end.
Activations: none, relu, hardswish. Other layouts than channels-last are copied first. Not twice differentiable.
Evaluation is left to torch, and to folding into the convolution. Ref: Ioffe and Szegedy 2015; Chan 1979 (joining variances).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import OptionError
from ..workload.models.normed import normed
from .batch_norm_kernels import KERNELS, _apply, _apply_backward, _combined, _slopes, _statistics, _summed
from .case import Case, Inputs, benchmark
from .jit import cdiv, empty, next_power_of_2, tl
from .layer_norm import OptionalTensor
from .library import operator
from .plan import Plan, planned, start
from .replace import replaces, worth
from .softmax import multiprocessors, warps
from .tuning import Config, config, space

ACTIVATIONS = ("none", "relu", "hardswish")
FORMATS = {2: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}
# TILE: values a program takes at once, BLOCK: channels of them, PER_THREAD: of them in one thread, STAGES: how far loads run ahead,
# WARPS: of all programs on a multiprocessor
SPACE = [{"TILE": tile, "BLOCK": block, "PER_THREAD": values, "STAGES": stages, "WARPS": resident}
         for tile, block, values, stages, resident in
         ((4096, 64, 16, 2, 32), (4096, 128, 16, 2, 32), (4096, 128, 16, 3, 32), (4096, 256, 16, 2, 32), (2048, 128, 8, 3, 48),
          (2048, 64, 16, 3, 32), (8192, 128, 16, 2, 32), (8192, 128, 32, 2, 16), (4096, 128, 16, 1, 48),
          (2048, 128, 8, 1, 64))]  # fmt: skip
space("batch_norm", KERNELS, SPACE)
space("batch_norm_backward", KERNELS, SPACE)
_USUAL: Config = SPACE[4]
_plans: dict[Any, Plan] = {}


def _dense(x: Tensor) -> Tensor:
    """The tensor with its channels innermost and no gaps; itself where it is so."""
    form = FORMATS.get(x.dim())
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if form is None else x.contiguous(memory_format=form)


def _sizes(x: Tensor) -> tuple[int, int]:
    """(rows, channels)."""
    return x.numel() // x.shape[1], x.shape[1]


def _plan(op: str, kernel: Any, x: Tensor, then: Plan | None, **extra: Any) -> Plan:
    """Of a kernel that walks over tiles: a column of programs for each block of channels."""
    rows, cols = _sizes(x)
    bucket = (min(next_power_of_2(cols), 1024), x.element_size())
    chosen = config(op, bucket, _USUAL)
    block = min(next_power_of_2(cols), chosen["BLOCK"])
    tile = max(1, min(next_power_of_2(rows), chosen["TILE"] // block))
    team = warps(tile * block, chosen["PER_THREAD"])
    wide = cdiv(cols, block)
    parts = min(cdiv(rows, tile), max(1, max(1, chosen["WARPS"] // team) * multiprocessors(x.device) // wide))
    constants = {**extra, "ACC": _acc(x), "VEC": 8 if cols % 16 == 8 else 1, "ROWS": tile, "BLOCK": block, "STAGES": chosen["STAGES"],
                 "num_warps": team}  # fmt: skip
    return Plan(op, bucket, _USUAL, chosen, kernel, (wide, parts), (rows, cols), constants, then)


def _acc(x: Tensor) -> Any:
    return tl.float64 if x.dtype is torch.float64 else tl.float32


def _join(kernel: Any, x: Tensor, block: int, sizes: tuple[int, ...], then: Plan | None, **extra: Any) -> Plan:
    """Of a kernel that joins what the programs of the one before left: a program for each block of channels."""
    constants = {**extra, "ACC": _acc(x), "ROWS": 2048 // block, "BLOCK": block, "num_warps": 4}
    return Plan("", (), {}, {}, kernel, (cdiv(x.shape[1], block),), sizes, constants, then)


def _plan_forward(x: Tensor, activation: str) -> Plan:
    last = _plan("batch_norm", _apply, x, None, KIND=activation)
    block = max(8, min(64, next_power_of_2(cdiv(x.shape[1], 128))))
    join = _join(_combined, x, block, (*last.sizes, last.grid[1]), last, TILE=last.constants["ROWS"])
    return _plan("batch_norm", _statistics, x, join)


def _plan_backward(x: Tensor, activation: str, applied: bool) -> Plan:
    last = _plan("batch_norm_backward", _apply_backward, x, None, KIND=activation)
    block = max(32, min(256, next_power_of_2(cdiv(x.shape[1], 128))))  # about one program a multiprocessor
    join = _join(_summed, x, block, (last.grid[1], x.shape[1]), last if applied else None)
    return _plan("batch_norm_backward", _slopes, x, join, KIND=activation)


def _launch(x: Tensor, residual: OptionalTensor, weight: OptionalTensor, bias: OptionalTensor, eps: float, activation: str) -> Any:
    x, residual = _dense(x), None if residual is None else _dense(residual)
    shape, dtype, device = x.shape, x.dtype, x.device
    plan = planned(_plans, (activation, shape, dtype, device), _plan_forward, x, activation)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    parts = empty((plan.grid[1], 2, shape[1]), wide, device)
    stats = empty((3, shape[1]), wide, device)
    y = torch.empty_like(x)
    start(plan, (x, residual, _flat(weight), _flat(bias), parts, stats, y), (eps,))
    return y, stats


def _flat(parameter: OptionalTensor) -> OptionalTensor:
    return None if parameter is None else parameter.contiguous()


def _launch_backward(grad: Tensor, x: Tensor, residual: OptionalTensor, stats: Tensor, weight: OptionalTensor, bias: OptionalTensor,
                     needs: Sequence[bool], activation: str) -> Any:  # fmt: skip
    grad, x, residual = _dense(grad), _dense(x), None if residual is None else _dense(residual)
    weight, bias = _flat(weight), _flat(bias)
    found = _fake_backward(grad, x, residual, stats, weight, bias, needs, activation)
    shape, device, applied = x.shape, x.device, needs[0] or needs[1]
    plan = planned(_plans, (activation, shape, x.dtype, device, applied), _plan_backward, x, activation, applied)
    sums = empty((1 + plan.grid[1], 2, shape[1]), stats.dtype, device)
    start(plan, (grad, x, residual, weight, bias, stats, sums, *[room if room.numel() else None for room in found]))
    return found


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *(1,) * (x.dim() - 2))


def _argument(x: Tensor, residual: OptionalTensor, stats: Tensor, weight: OptionalTensor, bias: OptionalTensor) -> tuple[Tensor, Tensor]:
    """(normalised x, the activation's argument)."""
    seen = (x.to(stats.dtype) - _per_channel(stats[0], x)) * _per_channel(stats[1], x)
    z = seen if weight is None else seen * _per_channel(weight.to(stats.dtype), x)
    z = z if bias is None else z + _per_channel(bias.to(stats.dtype), x)
    return seen, z if residual is None else z + residual.to(stats.dtype)


def _reference(x: Tensor, residual: OptionalTensor, weight: OptionalTensor, bias: OptionalTensor, eps: float, activation: str) -> Any:
    x = _dense(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = [0, *range(2, x.dim())]
    mean = wide.mean(dims)
    square = (wide - _per_channel(mean, x)).square().sum(dims)
    rows = _sizes(x)[0]
    stats = torch.stack((mean, (square / rows + eps).rsqrt(), square / max(rows - 1, 1)))
    z = _argument(x, residual, stats, weight, bias)[1]
    z = z if activation == "none" else getattr(F, activation)(z)
    return _dense(z.to(x.dtype)), stats


def _reference_backward(grad: Tensor, x: Tensor, residual: OptionalTensor, stats: Tensor, weight: OptionalTensor, bias: OptionalTensor,
                        needs: Sequence[bool], activation: str) -> Any:  # fmt: skip
    out = _fake_backward(_dense(grad), _dense(x), residual, stats, weight, bias, needs, activation)
    seen, z = _argument(x, residual, stats, weight, bias)
    g = grad.to(stats.dtype)
    if activation == "relu":
        g = torch.where(z > 0, g, 0.0)
    elif activation == "hardswish":
        g = g * torch.where(z > 3, 1.0, torch.where(z > -3, z / 3 + 0.5, 0.0))
    dims, rows = [0, *range(2, x.dim())], _sizes(x)[0]
    dw, db = (g * seen).sum(dims), g.sum(dims)
    inner = g - _per_channel(db / rows, x) - seen * _per_channel(dw / rows, x)
    scale = stats[1] if weight is None else stats[1] * weight.to(stats.dtype)
    for to, found in zip(out, (inner * _per_channel(scale, x), g, dw, db), strict=True):
        if to.numel():
            to.copy_(found)
    return out


def _fake(x: Tensor, residual: OptionalTensor, weight: OptionalTensor, bias: OptionalTensor, eps: float, activation: str) -> Any:
    x = _dense(x)
    return torch.empty_like(x), x.new_empty((3, x.shape[1]), dtype=torch.promote_types(x.dtype, torch.float32))


def _fake_backward(grad: Tensor, x: Tensor, residual: OptionalTensor, stats: Tensor, weight: OptionalTensor, bias: OptionalTensor,
                   needs: Sequence[bool], activation: str) -> Any:  # fmt: skip
    """Tensors for the gradients, empty ones for what is not asked for."""
    x = _dense(x)
    likes = zip((x, None if residual is None else x, weight, bias), needs, strict=True)
    return tuple([torch.empty_like(like) if needed and like is not None else x.new_empty(0) for like, needed in likes])


def _setup(ctx: Any, args: tuple[Any, ...], output: Any) -> None:
    x, residual, weight, bias, _, ctx.activation = args
    stats = output[1]
    # without an activation the residual's gradient is the output's, and its values are not needed
    ctx.save_for_backward(x, None if ctx.activation == "none" else residual, weight, bias, stats)
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: OptionalTensor, *_: Any) -> tuple[OptionalTensor, ...]:
    if grad is None:
        return (None,) * 6
    x, residual, weight, bias, stats = ctx.saved_tensors
    asked = list(ctx.needs_input_grad[:4])
    needs = [asked[0], asked[1] and residual is not None, *asked[2:]]
    found = batch_norm_backward_op(grad, x, residual, stats, weight, bias, needs, ctx.activation)
    dx, dr, dw, db = [d if needed else None for d, needed in zip(found, needs, strict=True)]
    return dx, grad if asked[1] and residual is None else dr, dw, db, None, None


batch_norm_backward_op = operator(
    "batch_norm_backward(Tensor grad, Tensor x, Tensor? residual, Tensor stats, Tensor? weight, Tensor? bias, bool[] needs,"
    " str activation) -> (Tensor, Tensor, Tensor, Tensor)",
    launch=_launch_backward, reference=_reference_backward, fake=_fake_backward)  # fmt: skip
batch_norm_op = operator(
    "batch_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, str activation) -> (Tensor, Tensor)",
    launch=_launch, reference=_reference, fake=_fake, setup=_setup, backward=_backward)  # fmt: skip


def batch_norm(x: Tensor, running_mean: OptionalTensor = None, running_var: OptionalTensor = None, weight: OptionalTensor = None,
               bias: OptionalTensor = None, momentum: float = 0.1, eps: float = 1e-5, *, residual: OptionalTensor = None,
               activation: str = "none") -> Tensor:  # fmt: skip
    """activation(F.batch_norm(x, …, training=True) + residual); the running statistics are moved in place."""
    _check(x, weight, bias, residual, activation)
    y: Tensor
    y, stats = batch_norm_op(x, residual, weight, bias, eps, activation)
    if running_mean is not None or running_var is not None:
        _move(((running_mean, stats[0]), (running_var, stats[2])), momentum)
    return y


def _move(statistics: Sequence[tuple[OptionalTensor, Tensor]], momentum: float) -> None:
    """Each running statistic towards what was seen, all by one launch."""
    pairs = [(one, seen if seen.dtype is one.dtype else seen.to(one.dtype)) for one, seen in statistics if one is not None]
    running, wanted = zip(*pairs, strict=True)
    with torch.no_grad():
        torch._foreach_lerp_(running, wanted, momentum)


def _check(x: Tensor, weight: OptionalTensor, bias: OptionalTensor, residual: OptionalTensor, activation: str) -> None:
    shape = x.shape
    if len(shape) < 2 or not x.is_floating_point() or x.numel() <= shape[1]:
        raise OptionError(f"batch norm of {tuple(shape)} {x.dtype}", why="a variance needs two values or more of every channel, dim 1",
                          do="give floating point numbers [batch, channels, …]")  # fmt: skip
    channels = shape[1:2]
    if (weight is not None and weight.shape != channels) or (bias is not None and bias.shape != channels):
        raise OptionError(f"weight or bias for {shape[1]} channels", why="each has one number a channel", do="give vectors")
    if residual is not None and (residual.shape, residual.dtype) != (shape, x.dtype):
        raise OptionError(f"a residual of {tuple(residual.shape)} {residual.dtype} for x of {tuple(shape)} {x.dtype}",
                          why="both are added value by value", do="expand or convert one of them first")  # fmt: skip
    if activation not in ACTIVATIONS:
        raise OptionError(f"activation {activation!r}", why="the kernel has others", do=f"one of {', '.join(ACTIVATIONS)}")


def _fits(x: Any, weight: Any, residual: Any = None) -> bool:
    """Whether it is a case for the kernels: channels innermost already, and more than one value of each."""
    plain = isinstance(x, Tensor) and x.dim() in (2, 4) and x.is_floating_point() and x.numel() > x.shape[1] > 1
    if not plain or not x.is_contiguous(memory_format=FORMATS[x.dim()]):
        return False
    same = residual is None or (residual.shape, residual.dtype) == (x.shape, x.dtype)
    return same and (weight is None or weight.dtype in (x.dtype, torch.float32))


@replaces("batch_norm", F.batch_norm)
def _stand_in(input: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: bool = False,
              momentum: Any = 0.1, eps: float = 1e-5) -> Any:  # fmt: skip
    if not training or not isinstance(momentum, float) or not _fits(input, weight) or not worth("batch_norm", input, input.numel()):
        return NotImplemented
    return batch_norm(input, running_mean, running_var, weight, bias, momentum, eps)


NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
FOLLOWERS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.Hardswish: "hardswish"}


@replaces("batch_norm", normed)
def _normed(x: Any, norm: Any, activation: Any, residual: Any = None) -> Any:
    """A norm and what follows it in one operator: no module of them may have hooks, which would not run."""
    kind = FOLLOWERS.get(type(activation))
    modules = (norm, activation)
    if kind is None or type(norm) not in NORMS or not norm.training or any(map(_watched, modules)):
        return NotImplemented
    op = "batch_norm_act" if residual is None else "add_batch_norm_act"
    if not _fits(x, norm.weight, residual) or not worth(op, x, x.numel()):
        return NotImplemented
    momentum = 0.0 if norm.momentum is None else norm.momentum
    if norm.track_running_stats:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            momentum = 1.0 / float(norm.num_batches_tracked)
    running = (norm.running_mean, norm.running_var)
    return batch_norm(x, *running, norm.weight, norm.bias, momentum, norm.eps, residual=residual, activation=kind)


def _watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def _make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Inputs:
    """Channels-last images; weights and biases in float32, as mixed precision has them."""
    x = torch.randn(shape, device=device).to(dtype, memory_format=torch.channels_last)
    parameters = (torch.randn(shape[1], device=device, dtype=torch.promote_types(dtype, torch.float32)) for _ in range(2))
    return x.requires_grad_(), *(one.requires_grad_() for one in parameters)


def _make_add(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Inputs:
    x, weight, bias = _make(shape, dtype, device)
    return x, _make(shape, dtype, device)[0], weight, bias


def _moved(forward: int, both: int) -> Any:
    return lambda inputs, backward: (both if backward else forward) * inputs[0].numel() * inputs[0].element_size()


SIZES = {
    "small": ((32, 16, 16, 16),), "medium": ((128, 64, 32, 32),), "large": ((512, 128, 32, 32),), "xlarge": ((512, 512, 16, 16),),
    "batch": ((512, 32, 32, 32), (128, 1024, 8, 8)),
}  # fmt: skip
"""Stages of convolutional networks, batch first."""
BENCH = benchmark(
    Case(op="batch_norm", ours=lambda x, w, b: batch_norm(x, None, None, w, b),
         plain=lambda x, w, b: F.batch_norm(x, None, None, w, b, True), make=_make, moved=_moved(3, 8), sizes=SIZES, differentiable=True)
)  # fmt: skip
BENCH_ACT = benchmark(
    Case(op="batch_norm_act", ours=lambda x, w, b: batch_norm(x, None, None, w, b, activation="relu"),
         plain=lambda x, w, b: F.relu(F.batch_norm(x, None, None, w, b, True), inplace=True), make=_make, moved=_moved(3, 8), sizes=SIZES,
         differentiable=True)
)  # fmt: skip
BENCH_ADD = benchmark(
    Case(op="add_batch_norm_act", ours=lambda x, r, w, b: batch_norm(x, None, None, w, b, residual=r, activation="relu"),
         plain=lambda x, r, w, b: F.relu(F.batch_norm(x, None, None, w, b, True) + r, inplace=True), make=_make_add, moved=_moved(4, 12),
         sizes=SIZES, differentiable=True)
)  # fmt: skip
