"""Cross-entropy of logits [N, V] and class indices [N]: one read forward, one read and one write backward.

    logits, target ──cross_entropy──> loss, stats = (maximum[N], log of the sum[N], loss[N], rows that count)
    grad, logits, target, stats ──cross_entropy_backward──> (softmax(logits) - smoothed one-hot(target)) * grad [/ rows that count]

One program a row. A thread keeps a running maximum and sum of its own over every 16-byte vector it loads and the row is reduced across
threads once, at its end: one exponential an element. A row that does not start on 16 bytes (V = 50257) gets its first elements apart, so
that all other loads are still vectors. Maximum and log of the sum are kept apart: their sum would lose the digits that a loss near zero
at large logits needs. Ignored rows are not read; the backward pass goes from the last row, whose logits may still be in the cache.

Least bytes, bf16 8192x32000: forward 524 MB (.121 ms on an H200), with backward 1.57 GB (.37 ms). A few rows only (N < SMs) leave SMs idle.

Limits: no class weights, no probabilities as targets, logits of two dimensions. A target out of range (and not ignore_index) is not read:
its loss and its row of the gradient are nan, where torch stops the process with a device-side assertion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .case import Anchor, Case, Inputs, benchmark
from .jit import empty, jit, tl
from .library import operator
from .overlap import promptly
from .plan import Plan, planned
from .plan import start as begin
from .replace import replaces, worth
from .tuning import Config, bucketed, config, space

LOG2E = tl.constexpr(1.4426950408889634)
REDUCTIONS = ("none", "mean", "sum")
NONE, MEAN, SUM = range(3)
FEW_ROWS = 1 << 16
"""Up to here one program adds up the losses; above, torch's sum, which uses the whole GPU."""


@jit
def first_vector(begin, VEC: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first element at or after `begin` that starts a 16-byte vector."""
    if ALIGNED:
        return begin
    else:
        return (begin + VEC - 1) // VEC * VEC


@jit
def _add(parts, top, total, PER: tl.constexpr):  # type: ignore[no-untyped-def]
    """PER tiles [THREADS, VEC] more: running maximum and sum of exp(x - maximum), both [THREADS], without a word between threads."""
    new = top
    for part in tl.static_range(PER):
        new = tl.maximum(new, tl.max(parts[part], 1))
    shift = tl.where(new == float("-inf"), 0.0, new)  # -inf - -inf is nan
    total = total * tl.exp2((top - shift) * LOG2E)
    for part in tl.static_range(PER):
        total += tl.sum(tl.exp2((parts[part] - shift[:, None]) * LOG2E), 1)
    return new, total


@jit
def row_statistics(  # type: ignore[no-untyped-def]
    x_ptr, begin, V, C: tl.constexpr, SMOOTHING: tl.constexpr, ALIGNED: tl.constexpr, VEC: tl.constexpr, PER: tl.constexpr,
    THREADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """(maximum, log of the sum of exp(x - maximum), mean of x or 0) of V elements from `begin`."""
    TILE: tl.constexpr = THREADS * VEC  # a vector a thread; one [PER, THREADS, VEC] tile is laid out otherwise by some versions of Triton
    first = first_vector(begin, VEC, ALIGNED)
    lead = (first - begin).to(tl.int32)
    offsets = tl.arange(0, THREADS)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    top = tl.full([THREADS], float("-inf"), C)
    total = tl.zeros([THREADS], C)
    plain = tl.zeros([THREADS, VEC], C)  # added up across a vector at the end only: Triton 3.6 fails on a sum of loads kept over the loop
    blocks = tl.maximum(V - lead, 0) // (PER * TILE)
    for block in tl.range(0, blocks, num_stages=STAGES):
        parts = ()
        for part in tl.static_range(PER):
            x = tl.load(x_ptr + (first + (block * PER + part) * TILE) + offsets).to(C)
            parts = parts + (x,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no starred tuples)
            if SMOOTHING != 0.0:
                plain += x
        top, total = _add(parts, top, total, PER)
    done = lead + blocks * (PER * TILE)
    if done < V:
        parts = ()
        for part in tl.static_range(PER):
            mask = done + part * TILE + offsets < V
            x = tl.load(x_ptr + (first + (blocks * PER + part) * TILE) + offsets, mask=mask, other=float("-inf")).to(C)
            parts = parts + (x,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no starred tuples)
            if SMOOTHING != 0.0:
                plain += tl.where(mask, x, 0.0)
        top, total = _add(parts, top, total, PER)
    maximum = tl.max(top, 0)
    if not ALIGNED:
        column = tl.arange(0, VEC)
        inside = (column < lead) & (column < V)
        head = tl.load(x_ptr + begin + column, mask=inside, other=float("-inf")).to(C)
        maximum = tl.maximum(maximum, tl.max(head, 0))
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    exponentials = tl.sum(total * tl.exp2((top - shift) * LOG2E), 0)
    mean = tl.sum(tl.sum(plain, 1), 0)
    if not ALIGNED:
        exponentials += tl.sum(tl.exp2((head - shift) * LOG2E), 0)
        mean += tl.sum(tl.where(inside, head, 0.0), 0)
    return maximum, tl.log(exponentials), mean / V


@jit
def row_loss(x_ptr, begin, target, known, maximum, log_sum, mean, C: tl.constexpr, SMOOTHING: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loss of a row from its statistics; nan for a target out of range."""
    chosen = tl.load(x_ptr + begin + target, mask=known, other=float("nan")).to(C)
    loss = (maximum - chosen) + log_sum
    if SMOOTHING != 0.0:
        loss = (1.0 - SMOOTHING) * loss + SMOOTHING * ((maximum - mean) + log_sum)
    return loss


@jit
def _slope(x, columns, target, maximum, log_sum, scale, V, SMOOTHING: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gradient of a block of logits."""
    slope = tl.exp2((x - maximum) * LOG2E - log_sum * LOG2E)
    slope = tl.where(columns == target, slope - (1.0 - SMOOTHING), slope)
    if SMOOTHING != 0.0:
        slope -= (tl.zeros([], x.dtype) + SMOOTHING) / V
    return slope * scale


@jit
def row_gradient(  # type: ignore[no-untyped-def]
    x_ptr, grad_ptr, begin, to, target, maximum, log_sum, scale, V, C: tl.constexpr, SMOOTHING: tl.constexpr, SAME: tl.constexpr,
    ALIGNED: tl.constexpr, VEC: tl.constexpr, PER: tl.constexpr, THREADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of V logits from `begin` to grad_ptr from `to` (SAME: in that place); a scale of 0 writes zeros and reads none."""
    BLOCK: tl.constexpr = PER * THREADS * VEC
    first = first_vector(begin, VEC, ALIGNED)
    lead = (first - begin).to(tl.int32)
    goal = first if SAME else to + lead
    offsets = tl.arange(0, BLOCK)
    blocks = tl.maximum(V - lead, 0) // BLOCK
    columns = lead + blocks * BLOCK + offsets
    column = tl.arange(0, VEC)
    inside = (column < lead) & (column < V)
    if scale == 0.0:
        zeros = tl.zeros([BLOCK], C)
        for block in range(0, blocks):
            tl.store(grad_ptr + (goal + block * BLOCK) + offsets, zeros)
        tl.store(grad_ptr + (goal + blocks * BLOCK) + offsets, zeros, mask=columns < V)
        if not ALIGNED:
            tl.store(grad_ptr + to + column, tl.zeros([VEC], C), mask=inside)
    else:
        for block in tl.range(0, blocks, num_stages=STAGES):
            x = tl.load(x_ptr + (first + block * BLOCK) + offsets).to(C)
            slope = _slope(x, lead + block * BLOCK + offsets, target, maximum, log_sum, scale, V, SMOOTHING)
            tl.store(grad_ptr + (goal + block * BLOCK) + offsets, slope)
        if lead + blocks * BLOCK < V:
            x = tl.load(x_ptr + (first + blocks * BLOCK) + offsets, mask=columns < V, other=0.0).to(C)
            slope = _slope(x, columns, target, maximum, log_sum, scale, V, SMOOTHING)
            tl.store(grad_ptr + (goal + blocks * BLOCK) + offsets, slope, mask=columns < V)
        if not ALIGNED:
            x = tl.load(x_ptr + begin + column, mask=inside, other=0.0).to(C)
            tl.store(grad_ptr + to + column, _slope(x, column, target, maximum, log_sum, scale, V, SMOOTHING), mask=inside)


@jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, target_ptr, loss_ptr, stats_ptr, stride, N, V, ignore_index, SMOOTHING: tl.constexpr, EACH: tl.constexpr,
    ALIGNED: tl.constexpr, VEC: tl.constexpr, PER: tl.constexpr, THREADS: tl.constexpr, STAGES: tl.constexpr, PROMPT: tl.constexpr = False,
):  # fmt: skip
    promptly(PROMPT)
    row = tl.program_id(0).to(tl.int64)
    C: tl.constexpr = stats_ptr.dtype.element_ty
    begin = row * stride
    target = tl.load(target_ptr + row).to(tl.int64)
    maximum = tl.zeros([], C)
    log_sum = tl.zeros([], C)
    loss = tl.zeros([], C)
    if target != ignore_index:
        known = (target >= 0) & (target < V)
        maximum, log_sum, mean = row_statistics(x_ptr, begin, V, C, SMOOTHING, ALIGNED, VEC, PER, THREADS, STAGES)
        loss = row_loss(x_ptr, begin, target, known, maximum, log_sum, mean, C, SMOOTHING)
    tl.store(stats_ptr + row, maximum)
    tl.store(stats_ptr + N + row, log_sum)
    tl.store(stats_ptr + 2 * N + row, loss)
    if EACH:
        tl.store(loss_ptr + row, loss)


@jit
def _total_kernel(x_ptr, target_ptr, loss_ptr, stats_ptr, N, ignore_index, AVERAGE: tl.constexpr, BLOCK: tl.constexpr,  # type: ignore[no-untyped-def]
                  PROMPT: tl.constexpr = False):  # fmt: skip
    """One program: the losses added in a fixed order, and the rows that count, kept as the last of `stats`; x is not read."""
    promptly(PROMPT)
    C: tl.constexpr = stats_ptr.dtype.element_ty
    total = tl.zeros([BLOCK], C)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        total += tl.load(stats_ptr + 2 * N + rows, mask=rows < N, other=0.0)
        count += (tl.load(target_ptr + rows, mask=rows < N, other=ignore_index) != ignore_index).to(tl.int32)
    loss = tl.sum(total, 0)
    counted = tl.sum(count, 0).to(C)
    if AVERAGE:
        loss = loss / counted
    tl.store(stats_ptr + 3 * N, counted)
    tl.store(loss_ptr, loss)


@jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, x_ptr, target_ptr, stats_ptr, out_ptr, grad_stride, stride, N, V, ignore_index, SMOOTHING: tl.constexpr,
    AVERAGE: tl.constexpr, SAME: tl.constexpr, ALIGNED: tl.constexpr, VEC: tl.constexpr, PER: tl.constexpr, THREADS: tl.constexpr,
    STAGES: tl.constexpr, PROMPT: tl.constexpr = False,
):  # fmt: skip
    promptly(PROMPT)
    row = (N - 1 - tl.program_id(0)).to(tl.int64)
    C: tl.constexpr = stats_ptr.dtype.element_ty
    target = tl.load(target_ptr + row).to(tl.int64)
    maximum = tl.load(stats_ptr + row)
    log_sum = tl.load(stats_ptr + N + row)
    scale = tl.load(grad_ptr + row * grad_stride).to(C)
    if AVERAGE:
        scale = scale / tl.load(stats_ptr + 3 * N)
    scale = tl.where((target >= 0) & (target < V), scale, float("nan"))
    scale = tl.where(target == ignore_index, 0.0, scale)
    row_gradient(
        x_ptr, out_ptr, row * stride, row * V, target.to(tl.int32), maximum, log_sum, scale, V, C, SMOOTHING, SAME, ALIGNED, VEC, PER,
        THREADS, STAGES,
    )  # fmt: skip


_plans: dict[Any, Plan] = {}


def _plan(op: str, kernel: Any, x: torch.Tensor, sizes: tuple[int, ...], constants: dict[str, Any], then: Plan | None = None) -> Plan:
    """A program for each row of logits whose classes lie side by side."""
    (rows, vocabulary), bytes_each = x.shape, x.element_size()
    bucket = (bucketed(vocabulary), bytes_each)
    default = default_config(op, *bucket)
    chosen = config(op, bucket, default)
    warps = chosen["WARPS"]
    shape = {"ALIGNED": x.stride(0) * bytes_each % 16 == 0, "VEC": 16 // bytes_each, "PER": chosen["PER"], "THREADS": 32 * warps,
             "STAGES": chosen["STAGES"], "num_warps": warps}  # fmt: skip
    return Plan(op, bucket, default, chosen, kernel, (rows,), sizes, {**constants, **shape}, then)


def default_config(op: str, bucket: int, bytes_each: int) -> Config:
    """A block as long as a short row; 16 kB and 8 warps for long ones, so that 4 programs keep 64 kB of an SM in flight."""
    vectors = max(1, bucket * bytes_each // 16)
    warps = min(8, max(1, vectors // 64))
    most = 4 if op != "cross_entropy_backward" else 2
    return {"WARPS": warps, "PER": min(most, max(1, vectors // (32 * warps))), "STAGES": 1}


_CANDIDATES = [
    {"WARPS": warps, "PER": per, "STAGES": stages}
    for warps, per, stages in (
        (4, 2, 1), (4, 4, 1), (4, 8, 1), (8, 1, 1), (8, 2, 1), (8, 4, 1), (16, 1, 1), (16, 2, 1), (16, 4, 1), (4, 4, 3), (8, 2, 3),
        (8, 2, 4),
    )
]  # fmt: skip
space("cross_entropy", __file__, _CANDIDATES)
space("cross_entropy_backward", __file__, _CANDIDATES)


def rows_of(logits: torch.Tensor) -> torch.Tensor:
    """Logits with classes side by side; rows may lie anywhere, so a vocabulary cut out of a padded one is not copied."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def indices(target: torch.Tensor) -> torch.Tensor:
    """Targets side by side, of a dtype that holds ignore_index and the vocabulary: compared with a uint8, -100 is 156."""
    return target.contiguous() if target.dtype in (torch.int64, torch.int32) else target.to(torch.int64).contiguous()


def _forward(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: int, wide: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    x, target = rows_of(logits), indices(target)
    rows, vocabulary = x.shape
    sizes = (x.stride(0), rows, vocabulary, ignore_index)
    key = (sizes, x.dtype, label_smoothing, reduction, x.get_device())
    plan = planned(_plans, key, _forward_plan, x, sizes, label_smoothing, reduction)
    (loss_shape, loss_dtype), (stats_shape, stats_dtype) = _results(x.dtype, rows, reduction, wide)
    loss, stats = empty(loss_shape, loss_dtype, x.device), empty(stats_shape, stats_dtype, x.device)
    begin(plan, (x, target, loss, stats))
    if reduction != NONE and rows > FEW_ROWS:
        counted, total = stats[3 * rows], stats[2 * rows : 3 * rows].sum()
        torch.sum(target != ignore_index, dim=0, dtype=stats.dtype, out=counted)
        loss.copy_(total / counted if reduction == MEAN else total)
    return loss, stats


def _forward_plan(x: torch.Tensor, sizes: tuple[int, ...], label_smoothing: float, reduction: int) -> Plan:
    """The rows' losses and, up to FEW_ROWS of them, their sum or mean right after."""
    rows, total = x.shape[0], None
    if reduction != NONE and rows <= FEW_ROWS:
        adding = {"AVERAGE": reduction == MEAN, "BLOCK": min(4096, max(128, bucketed(rows))), "num_warps": 4 if rows <= 512 else 16}
        total = Plan("", (), {}, {}, _total_kernel, (1,), (rows, sizes[-1]), adding)
    constants: dict[str, Any] = {"SMOOTHING": label_smoothing, "EACH": reduction == NONE}
    return _plan("cross_entropy", _forward_kernel, x, sizes, constants, total)


def _results(dtype: torch.dtype, rows: int, reduction: int, wide: bool) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shape and dtype of loss and stats."""
    inner = torch.float64 if dtype == torch.float64 else torch.float32
    return ((rows,) if reduction == NONE else (), inner if wide else dtype), ((3 * rows + 1,), inner)


def _outputs(logits: torch.Tensor, rows: int, reduction: int, wide: bool) -> tuple[torch.Tensor, torch.Tensor]:
    loss, stats = _results(logits.dtype, rows, reduction, wide)
    return logits.new_empty(loss[0], dtype=loss[1]), logits.new_empty(stats[0], dtype=stats[1])


def _backward(
    grad: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, stats: torch.Tensor, ignore_index: int, label_smoothing: float,
    reduction: int,
) -> torch.Tensor:  # fmt: skip
    x = rows_of(logits)
    (rows, vocabulary), stride = x.shape, x.stride(0)
    out = torch.empty_like(x) if stride == vocabulary else x.new_empty((rows, vocabulary))
    sizes = (grad.stride(0) if reduction == NONE else 0, stride, rows, vocabulary, ignore_index)
    constants = {"SMOOTHING": label_smoothing, "AVERAGE": reduction == MEAN, "SAME": stride == vocabulary}
    key = (sizes, x.dtype, label_smoothing, reduction == MEAN, "backward", x.get_device())
    plan = planned(_plans, key, _plan, "cross_entropy_backward", _backward_kernel, x, sizes, constants)
    begin(plan, (grad, x, indices(target), stats, out))
    return out


def _forward_reference(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: int, wide: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    loss, stats = _outputs(logits, logits.shape[0], reduction, wide)
    x, target = logits.to(stats.dtype), indices(target)
    ignored = target == ignore_index
    known = (target >= 0) & (target < x.shape[1])
    maximum = x.amax(1) if x.shape[1] else x.new_full((x.shape[0],), -torch.inf)
    log_sum = (x - maximum[:, None]).exp().sum(1).log()
    chosen = x.gather(1, torch.where(known, target, 0).long()[:, None])[:, 0] if x.shape[1] else maximum
    losses = (maximum - chosen) + log_sum
    if label_smoothing:
        losses = (1 - label_smoothing) * losses + label_smoothing * ((maximum - x.mean(1)) + log_sum)
    losses = torch.where(known, losses, torch.nan).masked_fill(ignored, 0)
    counted = (~ignored).sum().to(stats.dtype)
    total = losses if reduction == NONE else losses.sum() / counted if reduction == MEAN else losses.sum()
    torch.cat([maximum.masked_fill(ignored, 0), log_sum.masked_fill(ignored, 0), losses, counted[None]], out=stats)
    return loss.copy_(total), stats


def _backward_reference(
    grad: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, stats: torch.Tensor, ignore_index: int, label_smoothing: float,
    reduction: int,
) -> torch.Tensor:  # fmt: skip
    (rows, vocabulary), target = logits.shape, indices(target)
    ignored, known = target == ignore_index, (target >= 0) & (target < vocabulary)
    hot = torch.arange(vocabulary, device=logits.device) == target[:, None]
    slope = torch.log_softmax(logits.to(stats.dtype), 1).exp()
    slope = slope - (1 - label_smoothing) * hot.to(slope.dtype) - label_smoothing / max(1, vocabulary)
    scale = grad.to(stats.dtype) / (stats[3 * rows] if reduction == MEAN else 1)
    scale = torch.where(ignored, 0, torch.where(known, scale, torch.nan))
    slope = torch.where(ignored[:, None], 0, slope * scale[:, None])
    return slope.to(logits.dtype).contiguous()


def _forward_fake(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: int, wide: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(logits, logits.shape[0], reduction, wide)


def _backward_fake(
    grad: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, stats: torch.Tensor, ignore_index: int, label_smoothing: float,
    reduction: int,
) -> torch.Tensor:  # fmt: skip
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, target, *ctx.options, _ = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad: torch.Tensor | None, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if grad is None or not ctx.needs_input_grad[0]:
        return (None,) * 6
    return _cross_entropy_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


_cross_entropy_backward = operator(
    "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor stats, int ignore_index, float label_smoothing, "
    "int reduction) -> Tensor",
    launch=_backward, reference=_backward_reference, fake=_backward_fake, twice=True,
)  # fmt: skip
_cross_entropy = operator(
    "cross_entropy(Tensor logits, Tensor target, int ignore_index, float label_smoothing, int reduction, bool wide) -> (Tensor, Tensor)",
    launch=_forward, reference=_forward_reference, fake=_forward_fake, setup=_setup, backward=_gradient,
)  # fmt: skip


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    wide: bool = False,
) -> torch.Tensor:
    """F.cross_entropy of logits [N, V] and class indices [N]; `wide`: a float32 loss of half-precision logits, as under autocast."""
    if logits.dim() != 2 or target.dim() != 1 or target.shape[0] != logits.shape[0]:
        raise ValueError(f"logits {tuple(logits.shape)} and target {tuple(target.shape)}: expected [N, V] and [N]")
    if target.dtype.is_floating_point or target.dtype == torch.bool:
        raise ValueError(f"target is {target.dtype}: expected class indices")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}: expected 0 to 1")
    loss: torch.Tensor = _cross_entropy(logits, target, ignore_index, float(label_smoothing), REDUCTIONS.index(reduction), wide)[0]
    return loss


def kind_of(vocabulary: int) -> str:
    """The line of the dispatch table for a number of classes."""
    return "to 4096" if vocabulary <= 4096 else "to 32768" if vocabulary <= 32768 else "above"


@replaces("cross_entropy", F.cross_entropy)
def _stand_in(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """F.cross_entropy; torch's own for class weights, probabilities as targets, other shapes than [N, V], and wrong arguments."""
    if weight is not None or size_average is not None or reduce is not None or reduction not in REDUCTIONS:
        return NotImplemented
    if input.dim() != 2 or target.dim() != 1 or target.dtype != torch.int64 or target.shape[0] != input.shape[0]:
        return NotImplemented
    if not input.is_floating_point() or input.device != target.device or not 0.0 <= label_smoothing <= 1.0:
        return NotImplemented
    if not worth("cross_entropy", input, input.numel(), kind_of(input.shape[1])):
        return NotImplemented
    wide = input.element_size() == 2 and torch.is_autocast_enabled(input.device.type)
    return cross_entropy(input, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction, wide=wide)


def _make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Inputs:
    vocabulary = shape[-1]
    rows = 1
    for size in shape[:-1]:
        rows *= size
    logits = torch.randn(rows, vocabulary, dtype=dtype, device=device, requires_grad=True)
    return logits, torch.randint(vocabulary, (rows,), device=device)


def _moved(inputs: Inputs, backward: bool) -> int:
    logits, target = inputs
    return int((3 if backward else 1) * logits.numel() * logits.element_size() + target.numel() * 8)


def _liger() -> Callable[..., Any]:
    from liger_kernel.transformers.functional import liger_cross_entropy  # type: ignore[import-not-found]

    return liger_cross_entropy  # type: ignore[no-any-return]


def _flag_gems() -> Callable[..., Any]:
    from flag_gems.fused import cross_entropy_loss  # type: ignore[import-not-found]

    return cross_entropy_loss  # type: ignore[no-any-return]


BENCH = benchmark(
    Case(
        op="cross_entropy",
        ours=cross_entropy,
        plain=F.cross_entropy,
        make=_make,
        moved=_moved,
        anchors=(
            Anchor((8192, 32000), torch.bfloat16, limit_ms=0.20),
            Anchor((8192, 32000), torch.bfloat16, backward=True, limit_ms=0.55),
            Anchor((4096, 128256), torch.bfloat16, limit_ms=0.40),
            Anchor((4096, 128256), torch.bfloat16, backward=True, limit_ms=1.10),
        ),
        differentiable=True,
        peers={"liger": _liger, "flag_gems": _flag_gems},
        kind=lambda inputs: (kind_of(inputs[0].shape[1]), inputs[0].numel()),
    )
)
