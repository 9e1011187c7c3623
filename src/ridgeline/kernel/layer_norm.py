"""Layer normalisation over the trailing dims, and what it shares with RMS normalisation, forward and backward.

    x [rows, cols] ──_forward──> y = (x - mean) rstd w + b, mean, rstd [rows]     the row stays in registers, one reduction
    g, x, mean, rstd ──_backward──> dx, and dw, db partial sums [programs, cols] ──_reduce──> dw, db
      a few programs a multiprocessor walk over the rows and keep their dw and db in registers; fixed order, so deterministic
    longer rows (_forward_long, _backward_long): chunks of the row, read once more for each pass; dw, db by _columns

The kernels are in norm_kernels.py. Without a mean it is RMS norm; with a residual, that is added first, as two torch operators would.
Least bytes: forward 2 passes over x, backward 3; 16384x4096 bfloat16 on 4.26 TB/s: 0.063 ms + 0.095 ms. Arithmetic in float32
(float64 for float64); eps is rounded to float32. Not twice differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from ..core.errors import OptionError
from .case import Anchor, Case, Function, Inputs, benchmark
from .jit import cdiv, empty, launch, next_power_of_2, tl
from .library import operator, without_gradient
from .norm_kernels import KERNELS, _backward, _backward_long, _columns, _forward, _forward_long, _reduce
from .plan import Plan, planned, start
from .replace import replaces, worth
from .softmax import chunk, columns_kind, programs, streamed, warps
from .tuning import Config, config, space

IN_REGISTERS, IN_REGISTERS_BACKWARD = 16384, 8192
"""Columns of a row that one program can hold; the backward also holds the gradient and both sums."""
OptionalTensor = torch.Tensor | None


# As in softmax.py: values a program takes at once, of them in one thread, how far loads run ahead in programs that loop (0: they do
# not), warps a multiprocessor. LATE: weight and bias are loaded after the reduction.
FORWARD_SPACE = [{"TILE": tile, "PER_THREAD": values, "LATE": late, "STAGES": stages, "WARPS": resident}
                 for tile, values, late, stages, resident in
                 ((1024, 8, 0, 0, 0), (1024, 8, 1, 0, 0), (1024, 16, 0, 0, 0), (1024, 16, 1, 0, 0), (1024, 32, 0, 0, 0),
                  (1024, 32, 1, 0, 0), (1024, 64, 1, 0, 0), (4096, 16, 1, 0, 0), (8192, 32, 1, 0, 0), (1024, 16, 1, 1, 48),
                  (1024, 16, 1, 2, 40), (1024, 32, 1, 2, 24))]  # fmt: skip
BACKWARD_SPACE = [
    {"TILE": 1024, "PER_THREAD": 8, "STAGES": 1, "WARPS": 32},
    {"TILE": 1024, "PER_THREAD": 16, "STAGES": 1, "WARPS": 16},
    {"TILE": 1024, "PER_THREAD": 16, "STAGES": 2, "WARPS": 16},
    {"TILE": 1024, "PER_THREAD": 16, "STAGES": 3, "WARPS": 16},
    {"TILE": 1024, "PER_THREAD": 8, "STAGES": 2, "WARPS": 32},
    {"TILE": 1024, "PER_THREAD": 8, "STAGES": 3, "WARPS": 32},
    {"TILE": 1024, "PER_THREAD": 16, "STAGES": 1, "WARPS": 32},
    {"TILE": 1024, "PER_THREAD": 16, "STAGES": 2, "WARPS": 32},
    {"TILE": 1024, "PER_THREAD": 8, "STAGES": 2, "WARPS": 16},
    {"TILE": 1024, "PER_THREAD": 8, "STAGES": 1, "WARPS": 16},
    {"TILE": 4096, "PER_THREAD": 16, "STAGES": 2, "WARPS": 16},
    {"TILE": 1024, "PER_THREAD": 32, "STAGES": 2, "WARPS": 8},
]
space("layer_norm", KERNELS, FORWARD_SPACE)
space("layer_norm_backward", KERNELS, BACKWARD_SPACE)
_FORWARD: Config = FORWARD_SPACE[3]
_CHUNK, _GROUPS = 4096, 32
_plans: dict[Any, Plan] = {}


def default_backward(block: int, size: int) -> Config:
    """Two programs of 8 warps a multiprocessor for rows of 4096; float32 needs more registers, so fewer values a thread."""
    return BACKWARD_SPACE[4 if size > 2 and block <= 4096 else 2]


def _plan(op: str, x: torch.Tensor, cols: int, center: bool) -> Plan:
    wide = x.dtype == torch.float64
    rows = x.numel() // cols
    constants: dict[str, Any] = {"ACC": tl.float64 if wide else tl.float32, "CENTER": center}
    if cols > (IN_REGISTERS // 4 if wide else IN_REGISTERS):
        constants |= {"BLOCK": _CHUNK, "STAGES": 2, "num_warps": 8}
        return Plan("", (), {}, {}, _forward_long, (rows,), (cols,), constants)
    block, size = next_power_of_2(cols), x.element_size()
    chosen = config(op, (block, size), _FORWARD)
    tile = max(1, chosen["TILE"] // block)
    count = warps(tile * block, chosen["PER_THREAD"])
    constants |= {"VEC": 8 if cols % 16 == 8 else 1, "FULL": cols == block and rows % tile == 0, "ROWS": tile, "BLOCK": block,
                  "CHUNK": chunk(block, size), "LATE": chosen["LATE"], "STAGES": chosen["STAGES"], "STREAM": streamed(x),
                  "num_warps": count}  # fmt: skip
    grid = (programs(cdiv(rows, tile), chosen["WARPS"], count, x.device),)
    return Plan(op, (block, size), _FORWARD, chosen, _forward, grid, (rows, cols), constants)


def forward(op: str, x: torch.Tensor, residual: OptionalTensor, weight: OptionalTensor, bias: OptionalTensor, cols: int, eps: float,
            center: bool, stats: bool = True) -> tuple[torch.Tensor, OptionalTensor, OptionalTensor, OptionalTensor]:  # fmt: skip
    """Launch a forward: (y, x + residual, mean, rstd); neither of the last two without `stats`."""
    x = x.contiguous()
    y = torch.empty_like(x)
    total = None if residual is None else torch.empty_like(x)
    mean = rstd = None
    if stats:
        rows = x.numel() // cols if cols else 0
        rstd = empty((rows,), torch.float64 if x.dtype is torch.float64 else torch.float32, x.device)
        mean = torch.empty_like(rstd) if center else None
    if x.numel():
        plan = planned(_plans, (op, x.shape, x.dtype, cols, x.get_device()), _plan, op, x, cols, center)
        residual = None if residual is None else residual.contiguous()
        weight = None if weight is None else weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        start(plan, (x, residual, weight, bias, y, total, mean, rstd), (eps,))
    return y, total, mean, rstd


def backward(op: str, grad: torch.Tensor, x: torch.Tensor, mean: OptionalTensor, rstd: torch.Tensor, weight: OptionalTensor,
             bias: OptionalTensor, grad_sum: OptionalTensor, needs: Sequence[bool],
             cols: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Launch a backward: (dx, dw, db), an empty tensor for what `needs` does not ask for."""
    grad, x = grad.contiguous(), x.contiguous()
    grad_sum = grad_sum if grad_sum is None else grad_sum.contiguous()
    weight = weight if weight is None else weight.contiguous()
    wide = x.dtype is torch.float64
    acc = tl.float64 if wide else tl.float32
    rows = rstd.numel()
    dx, dw, db = fake_backward(x, weight, bias, needs)
    sums = needs[1] or needs[2]
    if cols > (IN_REGISTERS_BACKWARD // 4 if wide else IN_REGISTERS_BACKWARD):
        if needs[0]:
            launch(_backward_long, (rows,), grad, x, mean, rstd, weight, grad_sum, dx, cols, ACC=acc, BLOCK=_CHUNK, STAGES=2, num_warps=8)
        count = min(_GROUPS, cdiv(rows, 8)) if sums else 0
        partial = [empty((count, cols), rstd.dtype, x.device) if needed else None for needed in needs[1:3]]
        launch(_columns, (cdiv(cols, 256), count), grad, x, mean, rstd, *partial, rows, cols, ACC=acc, ROWS=8, BLOCK=256, STAGES=2,
               num_warps=4)  # fmt: skip
    else:
        plan = planned(_plans, (op, "backward", rows, x.dtype, cols, x.get_device()), _plan_backward, op, x, rows, cols)
        count = plan.grid[0]
        partial = [empty((count, cols), rstd.dtype, x.device) if needed else None for needed in needs[1:3]]
        start(plan, (grad, x, mean, rstd, weight, grad_sum, dx if needs[0] else None, *partial))
    if sums:  # also for no rows: the sums are 0 then
        plan = planned(_plans, ("reduce", count, cols, acc, x.get_device()), _plan_reduce, count, cols, acc)
        start(plan, (*partial, dw if needs[1] else None, db if needs[2] else None))
    return dx, dw, db


def _plan_backward(op: str, x: torch.Tensor, rows: int, cols: int) -> Plan:
    block, size = next_power_of_2(cols), x.element_size()
    bucket, usual = (block, size), default_backward(block, size)
    chosen = config(op, bucket, usual)
    tile = max(1, chosen["TILE"] // block)
    team = warps(tile * block, chosen["PER_THREAD"])
    count = programs(cdiv(rows, tile), chosen["WARPS"], team, x.device)
    acc = tl.float64 if x.dtype == torch.float64 else tl.float32
    constants = {"ACC": acc, "VEC": 8 if cols % 16 == 8 else 1, "ROWS": tile, "BLOCK": block, "STAGES": chosen["STAGES"], "num_warps": team}
    return Plan(op, bucket, usual, chosen, _backward, (count,), (rows, cols), constants)


def _plan_reduce(count: int, cols: int, acc: Any) -> Plan:
    block = max(32, min(256, next_power_of_2(cdiv(cols, 128))))  # about one program a multiprocessor
    constants = {"ACC": acc, "ROWS": 2048 // block, "BLOCK": block, "num_warps": 4}
    return Plan("", (), {}, {}, _reduce, (cdiv(cols, block),), (count, cols), constants)


def fake_backward(x: torch.Tensor, weight: OptionalTensor, bias: OptionalTensor,
                  needs: Sequence[bool]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Tensors for the gradients, not filled."""

    def room(like: OptionalTensor, needed: bool) -> torch.Tensor:
        if like is None or not needed:
            return x.new_empty(0)
        return torch.empty_like(like, memory_format=torch.contiguous_format)

    return room(x, needs[0]), room(weight, needs[1]), room(bias, needs[2])


def reference_backward(grad: torch.Tensor, x: torch.Tensor, mean: OptionalTensor, rstd: torch.Tensor, weight: OptionalTensor,
                       bias: OptionalTensor, grad_sum: OptionalTensor, needs: Sequence[bool],
                       cols: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The formulas of `backward` in plain torch."""
    dx, dw, db = fake_backward(x, weight, bias, needs)
    flat = (rstd.numel(), cols)
    g, normed = grad.reshape(flat).to(rstd.dtype), x.reshape(flat).to(rstd.dtype)
    normed = (normed if mean is None else normed - mean[:, None]) * rstd[:, None]
    if weight is not None and needs[1]:
        dw.copy_((g * normed).sum(0).view_as(weight))
    if bias is not None and needs[2]:
        db.copy_(g.sum(0).view_as(bias))
    if needs[0]:
        g = g if weight is None else g * weight.reshape(-1).to(g.dtype)
        slope = (g * normed).mean(1, keepdim=True)
        inner = g - normed * slope if mean is None else g - normed * slope - g.mean(1, keepdim=True)
        gx = (inner * rstd[:, None]).view_as(x)
        dx.copy_(gx if grad_sum is None else gx + grad_sum)
    return dx, dw, db


def _launch(x: torch.Tensor, weight: OptionalTensor, bias: OptionalTensor, cols: int, eps: float) -> Any:
    y, _, mean, rstd = forward("layer_norm", x, None, weight, bias, cols, eps, True)
    return y, mean, rstd


def _launch_backward(grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: OptionalTensor,
                     bias: OptionalTensor, needs: Sequence[bool], cols: int) -> Any:  # fmt: skip
    return backward("layer_norm_backward", grad, x, mean, rstd, weight, bias, None, needs, cols)


def _reference(x: torch.Tensor, weight: OptionalTensor, bias: OptionalTensor, cols: int, eps: float) -> Any:
    wide = torch.promote_types(x.dtype, torch.float32)
    flat = x.reshape(x.numel() // cols if cols else 0, cols).to(wide)
    mean, rstd = _statistics(flat, eps)
    y = (flat - mean[:, None]) * rstd[:, None]
    y = y if weight is None else y * weight.reshape(-1).to(wide)
    y = y if bias is None else y + bias.reshape(-1).to(wide)
    return y.to(x.dtype).reshape(x.shape).contiguous(), mean, rstd


def _statistics(flat: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and 1 / sqrt(variance + eps) of every row."""
    mean = flat.mean(1)
    return mean, ((flat - mean[:, None]).square().mean(1) + eps).rsqrt()


def _reference_backward(grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: OptionalTensor,
                        bias: OptionalTensor, needs: Sequence[bool], cols: int) -> Any:  # fmt: skip
    return reference_backward(grad, x, mean, rstd, weight, bias, None, needs, cols)


def _fake(x: torch.Tensor, weight: OptionalTensor, bias: OptionalTensor, cols: int, eps: float) -> Any:
    stats = x.new_empty(x.numel() // cols if cols else 0, dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.empty_like(x, memory_format=torch.contiguous_format), stats, torch.empty_like(stats)


def _fake_backward(grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: OptionalTensor,
                   bias: OptionalTensor, needs: Sequence[bool], cols: int) -> Any:  # fmt: skip
    return fake_backward(x, weight, bias, needs)


def _setup(ctx: Any, args: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, ctx.cols, ctx.eps = args
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _backward_rule(ctx: Any, grad: OptionalTensor, *_: Any) -> tuple[OptionalTensor, ...]:
    if grad is None:
        return None, None, None, None, None
    x, weight, bias, mean, rstd = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    if torch.is_grad_enabled():  # create_graph: the saved statistics know nothing of x
        mean, rstd = _statistics(x.reshape(rstd.numel(), ctx.cols).to(rstd.dtype), ctx.eps)
    found = layer_norm_backward_op(grad, x, mean, rstd, weight, bias, needs, ctx.cols)
    return *(d if needed else None for d, needed in zip(found, needs, strict=True)), None, None


layer_norm_backward_op = operator(
    "layer_norm_backward(Tensor grad, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, bool[] needs, int cols)"
    " -> (Tensor, Tensor, Tensor)",
    launch=_launch_backward, reference=_reference_backward, fake=_fake_backward, twice=True)  # fmt: skip
layer_norm_op = operator("layer_norm(Tensor x, Tensor? weight, Tensor? bias, int cols, float eps) -> (Tensor, Tensor, Tensor)",
                         launch=_launch, reference=_reference, fake=_fake, setup=_setup, backward=_backward_rule)  # fmt: skip


def fits(x: torch.Tensor, shape: tuple[int, ...], *parameters: OptionalTensor) -> bool:
    """Whether `shape` is the end of x's and that of every parameter, all on one device."""
    if len(shape) == 0 or x.shape[-len(shape) :] != shape:
        return False
    device = x.get_device()
    return all([p is None or (p.shape == shape and p.get_device() == device) for p in parameters])  # a list: half a generator's time


def check_fits(x: torch.Tensor, shape: tuple[int, ...], *parameters: OptionalTensor) -> None:
    """Raise where `fits` is false."""
    if not fits(x, shape, *parameters):
        given = ", ".join(f"{tuple(p.shape)} on {p.device}" for p in parameters if p is not None)
        raise OptionError(f"normalized shape {shape} for a tensor of shape {tuple(x.shape)} on {x.device}, parameters {given or None}",
                          why="it must be the last dims of the tensor, and the shape of weight and bias, on one device",
                          do="give x.shape[-1:] to normalise over the last dim")  # fmt: skip


def layer_norm(x: torch.Tensor, normalized_shape: Sequence[int], weight: OptionalTensor = None, bias: OptionalTensor = None,
               eps: float = 1e-5) -> torch.Tensor:  # fmt: skip
    """(x - mean) / sqrt(variance + eps) * weight + bias over the trailing dims `normalized_shape`."""
    shape = tuple(normalized_shape)
    check_fits(x, shape, weight, bias)
    if without_gradient(x, weight, bias):
        return forward("layer_norm", x, None, weight, bias, prod(shape), eps, True, stats=False)[0]
    y: torch.Tensor = layer_norm_op(x, weight, bias, prod(shape), eps)[0]
    return y


def replaceable(op: str, x: Any, normalized_shape: Any, *parameters: Any) -> bool:
    """Whether a norm's stand-in may run: torch's dtype and autocast rules are ours, and ours is faster."""
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        return False
    if not isinstance(normalized_shape, (tuple, list)) or not fits(x, tuple(normalized_shape), *parameters):
        return False
    if torch.is_autocast_enabled(x.device.type) or any(p is not None and p.dtype != x.dtype for p in parameters):
        return False
    return worth(op, x, x.numel(), columns_kind(prod(normalized_shape)))


@replaces("layer_norm", F.layer_norm, torch.layer_norm)
def _stand_in(input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enable: bool = True) -> Any:
    return layer_norm(input, normalized_shape, weight, bias, eps) if replaceable("layer_norm", input, normalized_shape, weight, bias) \
        else NotImplemented  # fmt: skip


def _make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Inputs:
    def leaf(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=torch.float32).to(dtype).requires_grad_()

    return leaf(*shape), leaf(shape[-1]), leaf(shape[-1])


def _liger() -> Function:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5)


def _flag_gems() -> Function:
    from flag_gems import layer_norm as peer  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return lambda x, w, b: peer(x, (x.shape[-1],), w, b, 1e-5)


BENCH = benchmark(
    Case(
        op="layer_norm",
        ours=lambda x, w, b: layer_norm(x, x.shape[-1:], w, b),
        plain=lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        make=_make,
        moved=lambda inputs, backward: (5 if backward else 2) * inputs[0].numel() * inputs[0].element_size(),
        anchors=(
            Anchor((16384, 4096), torch.bfloat16, limit_ms=0.070),
            Anchor((16384, 4096), torch.bfloat16, backward=True, limit_ms=0.30),
        ),
        differentiable=True,
        peers={"liger": _liger, "flag_gems": _flag_gems},
        kind=lambda inputs: (columns_kind(inputs[0].shape[-1]), inputs[0].numel()),
    )
)
