"""Last layer and loss in one: cross-entropy of hidden [N, H] @ weight [V, H]^T + bias [V], without logits of [N, V] in memory.

    rows of hidden in chunks ──matmul──> logits [R, V], one buffer for all chunks
      ──_fused_kernel, in place──> loss[R] and the gradient of these logits
      ──two matmuls──> grad_hidden[R, H]; grad_weight[V, H] += gradient^T @ hidden chunk
    backward: gradients *= grad of the loss, in place, and not even read where it is 1

Gradients are made in the forward pass, only those asked for; the backward pass is a scaling. In eager mode a second backward through the
same graph therefore raises. Matmuls are torch's. The buffer takes at most 512 MiB. Up to 4 chunks grad_weight is added up in the weight's
dtype (4 roundings, 1.6 times the error of one); with more, in float32. float16 gradients stay in float32, lifted by a power of two, until
the gradient of the loss is known: a loss scaler comes too late for what has already become zero. Deterministic as far as torch.mm is.

Floor, bf16 8192x4096x128256 on an H200: three matmuls of 8.6 TFLOP, 32.4 ms at 797 TFLOP/s; the kernel adds 4.2 GB (6.3 without the
cache), about 1 to 1.5 ms. Memory above the inputs: gradients (1.1 GB) and the buffer (.5 GB); plain torch needs 6.3 GB or more.

Limits: as cross_entropy; reductions mean and sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .case import Anchor, Case, Inputs, benchmark
from .cross_entropy import indices, row_gradient, row_loss, row_statistics
from .jit import cdiv, jit, launch, tl
from .library import not_again, operator
from .overlap import promptly
from .tuning import Config, bucketed, config, space

BUFFER_BYTES = 1 << 29
FEW_CHUNKS = 4
MOST_LIFT = 1 << 13
"""float16 holds (0 to 1) * 8192 times a hidden value of 8."""


@jit
def _fused_kernel(  # type: ignore[no-untyped-def]
    x_ptr, target_ptr, loss_ptr, count_ptr, V, ignore_index, lift, SMOOTHING: tl.constexpr, GRADIENT: tl.constexpr, AVERAGE: tl.constexpr,
    ALIGNED: tl.constexpr, VEC: tl.constexpr, PER: tl.constexpr, THREADS: tl.constexpr, STAGES: tl.constexpr, PROMPT: tl.constexpr = False,
):  # fmt: skip
    """Loss of a row of logits, which its gradient then overwrites; the second read finds the row in the cache if few are in flight."""
    promptly(PROMPT)
    row = tl.program_id(0).to(tl.int64)
    C: tl.constexpr = loss_ptr.dtype.element_ty
    begin = row * V
    target = tl.load(target_ptr + row).to(tl.int64)
    known = (target >= 0) & (target < V)
    maximum = tl.zeros([], C)
    log_sum = tl.zeros([], C)
    loss = tl.zeros([], C)
    if target != ignore_index:
        maximum, log_sum, mean = row_statistics(x_ptr, begin, V, C, SMOOTHING, ALIGNED, VEC, PER, THREADS, STAGES)
        loss = row_loss(x_ptr, begin, target, known, maximum, log_sum, mean, C, SMOOTHING)
    tl.store(loss_ptr + row, loss)
    if GRADIENT:
        scale = tl.zeros([], C) + lift
        if AVERAGE:
            scale = scale / tl.load(count_ptr)
        scale = tl.where(known, scale, float("nan"))
        scale = tl.where(target == ignore_index, 0.0, scale)
        tl.debug_barrier()  # every thread has read the target's logit before any overwrites it
        row_gradient(
            x_ptr, x_ptr, begin, begin, target.to(tl.int32), maximum, log_sum, scale, V, C, SMOOTHING, True, ALIGNED, VEC, PER, THREADS,
            STAGES,
        )  # fmt: skip


@jit
def _scale_kernel(x_ptr, by_ptr, size, BLOCK: tl.constexpr, PROMPT: tl.constexpr = False):  # type: ignore[no-untyped-def]
    promptly(PROMPT)
    C: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    by = tl.load(by_ptr).to(C)
    if by != 1.0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < size
        x = tl.load(x_ptr + offsets, mask=mask).to(C)
        tl.store(x_ptr + offsets, x * by, mask=mask)


space(
    "linear_cross_entropy",
    __file__,
    [
        {"WARPS": warps, "PER": per, "STAGES": stages}
        for warps, per, stages in ((32, 1, 1), (32, 2, 1), (16, 1, 1), (16, 2, 1), (16, 4, 1), (8, 2, 1), (8, 4, 1), (16, 2, 3), (32, 1, 3))
    ],
)


def default_config(bucket: int, bytes_each: int) -> Config:
    """Long rows: 32 warps of more than 32 registers, so one row an SM; 132 * 256 kB stay in 60 MB of cache for the second read."""
    return {"WARPS": min(32, max(1, bucket * bytes_each // 512)), "PER": 1 if bucket < 32768 else 2, "STAGES": 1}


def _loss_and_slope(
    logits: torch.Tensor, target: torch.Tensor, losses: torch.Tensor, count: torch.Tensor, ignore_index: int, label_smoothing: float,
    mean: bool, lift: float, gradient: bool,
) -> None:  # fmt: skip
    """Losses of these rows; their logits become gradients where asked for."""
    rows, vocabulary = logits.shape
    bytes_each = logits.element_size()
    bucket = bucketed(vocabulary)
    vector = 16 // bytes_each
    chosen = config("linear_cross_entropy", (bucket, bytes_each), default_config(bucket, bytes_each))
    launch(
        _fused_kernel, (rows,), logits, target, losses, count, vocabulary, ignore_index, lift,
        SMOOTHING=label_smoothing, GRADIENT=gradient, AVERAGE=mean, ALIGNED=vocabulary % vector == 0, VEC=vector, PER=chosen["PER"],
        THREADS=32 * chosen["WARPS"], STAGES=chosen["STAGES"], num_warps=chosen["WARPS"],
    )  # fmt: skip


def _loss_and_slope_reference(
    logits: torch.Tensor, target: torch.Tensor, losses: torch.Tensor, count: torch.Tensor, ignore_index: int, label_smoothing: float,
    mean: bool, lift: float, gradient: bool,
) -> None:  # fmt: skip
    vocabulary = logits.shape[1]
    inner = losses.dtype
    ignored, known = target == ignore_index, (target >= 0) & (target < vocabulary)
    log_p = F.log_softmax(logits.to(inner), 1)
    chosen = log_p.gather(1, torch.where(known, target, 0).long()[:, None])[:, 0]
    loss = -(1 - label_smoothing) * chosen - label_smoothing * log_p.mean(1)
    losses.copy_(torch.where(known, loss, torch.nan).masked_fill(ignored, 0))
    if gradient:
        hot = torch.arange(vocabulary, device=logits.device) == target[:, None]
        scale = torch.where(known, lift / count if mean else torch.full_like(count, lift), torch.nan)[:, None]
        slope = (log_p.exp() - (1 - label_smoothing) * hot.to(inner) - label_smoothing / vocabulary) * scale
        logits.copy_(torch.where(ignored[:, None], 0, slope))


def rows_a_chunk(rows: int, vocabulary: int, bytes_each: int) -> int:
    """Rows whose logits fit the buffer, in chunks as even as multiples of 128 rows allow."""
    most = max(1, BUFFER_BYTES // max(1, vocabulary * bytes_each))
    if rows <= most:
        return max(1, rows)
    even = cdiv(rows, cdiv(rows, most))
    return min(most, cdiv(even, 128) * 128) if most >= 128 else most


def lift_of(dtype: torch.dtype, rows: int, mean: bool) -> float:
    """What float16 gradients are multiplied by until the backward pass: about the number of rows, which a mean divides by."""
    return float(min(MOST_LIFT, bucketed(rows))) if dtype == torch.float16 and mean else 1.0


def _forward_by(step: Callable[..., None]) -> Callable[..., Any]:
    """The operator with `step` turning logits into losses and gradients."""

    def forward(
        hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None, ignore_index: int,
        label_smoothing: float, mean: bool, wide: bool, wanted: list[bool],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        rows, vocabulary, dtype = hidden.shape[0], weight.shape[0], hidden.dtype
        loss, grad_hidden, grad_weight, grad_bias = _outputs(
            hidden, weight, target, bias, ignore_index, label_smoothing, mean, wide, wanted
        )
        inner = torch.float64 if dtype == torch.float64 else torch.float32
        target = indices(target)
        count = (target != ignore_index).sum(dtype=inner)
        losses = hidden.new_empty(rows, dtype=inner)
        chunk = rows_a_chunk(rows, vocabulary, hidden.element_size())
        buffer = hidden.new_empty(min(chunk, rows), vocabulary)
        lift, gradient = lift_of(dtype, rows, mean), any(wanted)
        total_weight, total_bias = grad_weight, grad_bias.to(inner)
        if wanted[1] and cdiv(rows, chunk) > FEW_CHUNKS and grad_weight.dtype != inner:
            total_weight = torch.empty_like(grad_weight, dtype=inner)
        for start in range(0, rows, chunk):
            stop = min(rows, start + chunk)
            x, logits = hidden[start:stop], buffer[: stop - start]
            if bias is None:
                torch.mm(x, weight.t(), out=logits)
            else:
                torch.addmm(bias, x, weight.t(), out=logits)
            step(logits, target[start:stop], losses[start:stop], count, ignore_index, label_smoothing, mean, lift, gradient)
            if wanted[0]:
                _matmul(logits, weight, grad_hidden[start:stop], add=False)
            if wanted[1]:
                _matmul(logits.t(), x, total_weight, add=start > 0)
            if wanted[2]:
                total_bias += logits.sum(0, dtype=inner)
        if rows == 0 and wanted[1]:
            grad_weight.zero_()
        elif total_weight is not grad_weight:
            grad_weight.copy_(total_weight)
        grad_bias.copy_(total_bias)
        total = losses.sum()
        loss.copy_(total / count if mean else total)
        return loss, grad_hidden, grad_weight, grad_bias

    return forward


def _matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    """out = a @ b, or out += a @ b, in one rounding to out's dtype.

    cuBLAS may add the parts of a long sum (here over the vocabulary) in the half type: three times the error, so it is not let.
    """
    flags = torch.backends.cuda.matmul
    let = flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction
    flags.allow_bf16_reduced_precision_reduction = flags.allow_fp16_reduced_precision_reduction = False
    try:
        _product(a, b, out, add)
    finally:
        flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction = let


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    if out.dtype == a.dtype:
        if add:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
    elif a.is_cuda and add:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    elif a.is_cuda:
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
    else:
        product = a.to(out.dtype) @ b.to(out.dtype)
        out.copy_(out + product if add else product)


def _outputs(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None, ignore_index: int, label_smoothing: float,
    mean: bool, wide: bool, wanted: list[bool],
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Loss and the gradients asked for, uninitialised but for the bias's; empty ones in the place of the others. Also the fake."""
    dtype = hidden.dtype
    inner = torch.float64 if dtype == torch.float64 else torch.float32
    kept = torch.float32 if dtype == torch.float16 else dtype
    loss = hidden.new_empty((), dtype=inner if wide else dtype)
    grad_hidden = hidden.new_empty(hidden.shape if wanted[0] else (0,), dtype=kept)
    grad_weight = hidden.new_empty(weight.shape if wanted[1] else (0,), dtype=kept)
    grad_bias = hidden.new_zeros(bias.shape if wanted[2] and bias is not None else (0,), dtype=kept)
    return loss, grad_hidden, grad_weight, grad_bias


def _scale(x: torch.Tensor, by: torch.Tensor) -> None:
    size = x.numel()
    block = 32 * 8 * 2 * 16 // x.element_size()  # two vectors a thread of 8 warps
    launch(_scale_kernel, (cdiv(size, block),), x, by, size, BLOCK=block, num_warps=8)


def _scale_reference(x: torch.Tensor, by: torch.Tensor) -> None:
    x.mul_(by)


def _scale_fake(x: torch.Tensor, by: torch.Tensor) -> None:
    return None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    hidden, mean = inputs[0], inputs[6]
    ctx.lift = lift_of(hidden.dtype, hidden.shape[0], mean)
    ctx.dtype, ctx.wanted = hidden.dtype, inputs[8]
    with torch.enable_grad():
        origin = not_again("linear_cross_entropy", hidden.new_empty(0), *(t for t in inputs[:4] if t is not None))
    ctx.save_for_backward(*output[1:], origin)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad: torch.Tensor | None, *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    out: list[torch.Tensor | None] = [None] * 9
    if grad is None:
        return tuple(out)
    *parts, origin = ctx.saved_tensors
    for place, part, wanted in zip((0, 1, 3), parts, ctx.wanted, strict=True):
        if not wanted:
            continue
        if torch.is_grad_enabled():  # create_graph: parts know nothing of what they were made of, `origin` does
            scale = grad.detach().to(torch.promote_types(grad.dtype, part.dtype)) / ctx.lift
            out[place] = not_again("linear_cross_entropy", (part * scale).to(ctx.dtype), origin, grad)
        elif part.dtype != ctx.dtype:
            out[place] = (part * (grad.to(part.dtype) / ctx.lift)).to(ctx.dtype)
        elif torch._C._len_torch_dispatch_stack():  # traced: a graph must not change what its forward part returned
            out[place] = part * grad
        else:
            _scale_in_place(part, grad)
            torch.autograd.graph.increment_version(part)  # so that a second backward raises instead of scaling twice
            out[place] = part
    return tuple(out)


_scale_in_place = operator(
    "scale_in_place(Tensor(a!) x, Tensor by) -> ()", launch=_scale, reference=_scale_reference, fake=_scale_fake
)  # fmt: skip
_linear_cross_entropy = operator(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, int ignore_index, float label_smoothing, bool mean, "
    "bool wide, bool[3] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
    launch=_forward_by(_loss_and_slope),
    reference=_forward_by(_loss_and_slope_reference),
    fake=_outputs,
    setup=_setup,
    backward=_gradient,
)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """F.cross_entropy(F.linear(hidden [N, H], weight [V, H], bias [V]), target [N]) without the logits; reduction mean or sum."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or target.shape != hidden.shape[:1]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (hidden, weight, target))
        raise ValueError(f"hidden, weight and target are {shapes}: expected [N, H], [V, H] and [N]")
    if target.dtype.is_floating_point or target.dtype == torch.bool:
        raise ValueError(f"target is {target.dtype}: expected class indices")
    if reduction not in ("mean", "sum") or not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"reduction {reduction!r}, label_smoothing {label_smoothing}: expected mean or sum, and 0 to 1")
    wide = torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64
    if wide:
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if weight.dtype != hidden.dtype or (bias is not None and bias.dtype != hidden.dtype):
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}: expected one dtype for hidden, weight and bias")
    recorded = torch.is_grad_enabled()
    wanted = [recorded and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    arguments = (hidden, weight, target, bias, ignore_index, float(label_smoothing), reduction == "mean", wide, wanted)
    loss: torch.Tensor = _linear_cross_entropy(*arguments)[0]
    return loss


def _plain(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


def _make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Inputs:
    rows, width, vocabulary = shape
    hidden = torch.randn(rows, width, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, device=device).mul_(width**-0.5).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (rows,), device=device)


def _moved(inputs: Inputs, backward: bool) -> int:
    hidden, weight, target = inputs
    return int((2 if backward else 1) * (hidden.numel() + weight.numel()) * hidden.element_size() + target.numel() * 8)


def _flops(inputs: Inputs, backward: bool) -> int:
    hidden, weight, _ = inputs
    return int(2 * hidden.numel() * weight.shape[0] * (3 if backward else 1))


def _liger() -> Callable[..., Any]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy  # type: ignore[import-not-found]

    return liger_fused_linear_cross_entropy  # type: ignore[no-any-return]


BENCH = benchmark(
    Case(
        op="linear_cross_entropy",
        ours=linear_cross_entropy,
        plain=_plain,
        make=_make,
        moved=_moved,
        flops=_flops,
        sizes={
            "small": ((512, 512, 4096),),
            "medium": ((2048, 1024, 32000),),
            "large": ((4096, 2048, 50304),),
            "xlarge": ((8192, 4096, 128256),),
        },
        anchors=(Anchor((8192, 4096, 128256), torch.bfloat16, backward=True, limit_ms=42.0),),
        differentiable=True,
        peers={"liger": _liger},
        kind=lambda inputs: ("", inputs[0].shape[0] * inputs[1].shape[0]),
    )
)
