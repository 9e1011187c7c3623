"""softmax and log_softmax over any dim, forward and backward.

    x [rows, cols]  ──_rows──>     a row stays in registers: read once, written once   cols <= 32768 (float64: 8192), last dim
                                   maxima of 16 bytes first, then maximum and sum of the row by one reduction
    x [outer, cols, inner] ──_strided──> online maximum and sum per lane, then a second pass over the same data, backwards, so
                                   that it starts where the caches are warm                 longer rows, other dims
    backward: softmax      dx = y (g - sum g y)            y, g -> dx, saves y only
              log_softmax  dx = g - exp(y) sum g

Least bytes: forward 2 passes over x, backward 3; 4096x32768 bfloat16 on 4.26 TB/s: 0.126 ms + 0.189 ms. Arithmetic in float32
(float64 for float64). Half input with a float32 result is converted on the way. A row of -inf gives NaN, as in torch.
Limits: one program a row, so a few very long rows do not fill a GPU. Not twice differentiable.
Ref: Milakov and Gimelshein 2018 (online normalizer).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from .case import Anchor, Case, Function, Inputs, benchmark
from .jit import INTERPRETED, cdiv, jit, next_power_of_2, tl
from .library import operator
from .overlap import LARGE, promptly, promptness
from .plan import Plan, planned, start
from .replace import replaces, worth
from .tuning import Config, config, space

IN_REGISTERS = 32768
"""Columns of a row that one program can hold: 32 warps, 32 float32 values a thread."""
HALVES = (torch.float16, torch.bfloat16)


@jit
def _joined(most, total, most2, total2):  # type: ignore[no-untyped-def]
    """Maximum and sum of exponentials of two parts; equal maxima count as 1, also where both are -inf."""
    e = tl.exp(-tl.abs(tl.where(most == most2, 0.0, most - most2)))
    return tl.maximum(most, most2), tl.where(most > most2, total + total2 * e, total * e + total2)


@jit
def _rows_tile(x_ptr, y_ptr, tile, rows, width, LOG: tl.constexpr, ACC: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr,  # type: ignore[no-untyped-def]
               BLOCK: tl.constexpr, CHUNK: tl.constexpr, STREAM: tl.constexpr):  # fmt: skip
    policy: tl.constexpr = "evict_first" if STREAM else ""
    modifier: tl.constexpr = ".cs" if STREAM else ""
    # chunks of half types are scaled by their own maxima, so exponentials start before the whole row is here, and one reduction
    # over the chunks gives maximum and sum together
    col = tl.arange(0, BLOCK // CHUNK)[None, :, None] * CHUNK + tl.arange(0, CHUNK)[None, None, :]
    row = (tl.arange(0, ROWS).to(tl.int64) + tile * ROWS)[:, None, None]
    at = row * (BLOCK if FULL else width) + col
    if FULL:
        x = tl.load(x_ptr + at, eviction_policy=policy).to(ACC)
    else:
        inside = (row < rows) & (col < width)
        x = tl.load(x_ptr + at, mask=inside, other=float("-inf"), eviction_policy=policy).to(ACC)
    if x_ptr.dtype.element_ty.primitive_bitwidth == 16:
        top = tl.max(x, 2)
        e = tl.exp(x - tl.where(top == float("-inf"), 0.0, top)[:, :, None])
        most, total = tl.reduce((top, tl.sum(e, 2)), 1, _joined)
        share = (tl.exp(top - most[:, None]) / total[:, None])[:, :, None]
    else:  # every joining rounds, which half types do not show
        most = tl.max(tl.max(x, 2), 1)
        e = tl.exp(x - most[:, None, None])
        total = tl.sum(tl.sum(e, 2), 1)
        share = (1.0 / total)[:, None, None]
    y = x - most[:, None, None] - tl.log(total)[:, None, None] if LOG else e * share
    if FULL:
        tl.store(y_ptr + at, y, cache_modifier=modifier)
    else:
        tl.store(y_ptr + at, y, mask=inside, cache_modifier=modifier)


@jit
def _rows_forward(x_ptr, y_ptr, rows, cols, LOG: tl.constexpr, ACC: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr,  # type: ignore[no-untyped-def]
                  ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, STREAM: tl.constexpr,
                  PROMPT: tl.constexpr = False):  # fmt: skip
    promptly(PROMPT)
    width = cols // VEC * VEC  # no change; tells the compiler what divides the row, for wide loads
    if STAGES:
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
            _rows_tile(x_ptr, y_ptr, tile, rows, width, LOG, ACC, FULL, ROWS, BLOCK, CHUNK, STREAM)
    else:
        _rows_tile(x_ptr, y_ptr, tl.program_id(0), rows, width, LOG, ACC, FULL, ROWS, BLOCK, CHUNK, STREAM)


@jit
def _rows_backward_tile(g_ptr, y_ptr, dx_ptr, tile, rows, width, LOG: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr,  # type: ignore[no-untyped-def]
                        BLOCK: tl.constexpr, AGAIN: tl.constexpr):  # fmt: skip
    col = tl.arange(0, BLOCK)[None, :]
    row = (tl.arange(0, ROWS).to(tl.int64) + tile * ROWS)[:, None]
    at = row * width + col
    inside = (row < rows) & (col < width)
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(ACC)
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(ACC)
    dot = tl.sum(g if LOG else g * y, 1)[:, None]
    if AGAIN:  # two rows do not fit in the registers; this one is still in the L1 cache
        y = tl.load(y_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first").to(ACC)
    dx = g - tl.exp(y) * dot if LOG else y * (g - dot)
    tl.store(dx_ptr + at, dx, mask=inside)


@jit
def _rows_backward(g_ptr, y_ptr, dx_ptr, rows, cols, LOG: tl.constexpr, ACC: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,  # type: ignore[no-untyped-def]
                   BLOCK: tl.constexpr, STAGES: tl.constexpr, AGAIN: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    promptly(PROMPT)
    width = cols // VEC * VEC
    if STAGES:
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
            _rows_backward_tile(g_ptr, y_ptr, dx_ptr, tile, rows, width, LOG, ACC, ROWS, BLOCK, AGAIN)
    else:
        _rows_backward_tile(g_ptr, y_ptr, dx_ptr, tl.program_id(0), rows, width, LOG, ACC, ROWS, BLOCK, AGAIN)


@jit
def _strided_forward(x_ptr, y_ptr, cols, inner, LOG: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr,  # type: ignore[no-untyped-def]
                     STAGES: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    promptly(PROMPT)
    blocks = tl.cdiv(inner, INNER)
    outer = (tl.program_id(0) // blocks).to(tl.int64)
    lane = (tl.program_id(0) % blocks * INNER + tl.arange(0, INNER))[None, :]
    step = tl.arange(0, BLOCK)[:, None]
    start = outer * cols * inner
    most = tl.full([BLOCK, INNER], float("-inf"), ACC)
    total = tl.zeros([BLOCK, INNER], ACC)
    for chunk in tl.range(0, tl.cdiv(cols, BLOCK), num_stages=STAGES):
        n = chunk * BLOCK + step
        x = tl.load(x_ptr + start + n.to(tl.int64) * inner + lane, mask=(n < cols) & (lane < inner), other=float("-inf")).to(ACC)
        # one exponential a value: it scales either the old sum or the new value. Equal infinities count as 1 here and are
        # settled by exp(most - top) below, which is 0, or NaN where torch's is.
        e = tl.exp(-tl.abs(tl.where(x == most, 0.0, x - most)))
        total = tl.where(x > most, total * e + 1.0, total + e)
        most = tl.maximum(most, x)
    top = tl.max(most, 0)[None, :]
    total = tl.sum(total * tl.exp(most - top), 0)[None, :]
    last = tl.cdiv(cols, BLOCK) - 1
    for chunk in tl.range(0, last + 1, num_stages=STAGES):
        n = (last - chunk) * BLOCK + step
        at = start + n.to(tl.int64) * inner + lane
        inside = (n < cols) & (lane < inner)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(ACC) - top
        y = x - tl.log(total) if LOG else tl.exp(x) / total
        tl.store(y_ptr + at, y, mask=inside)


@jit
def _strided_backward(g_ptr, y_ptr, dx_ptr, cols, inner, LOG: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,  # type: ignore[no-untyped-def]
                      INNER: tl.constexpr, STAGES: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    promptly(PROMPT)
    blocks = tl.cdiv(inner, INNER)
    outer = (tl.program_id(0) // blocks).to(tl.int64)
    lane = (tl.program_id(0) % blocks * INNER + tl.arange(0, INNER))[None, :]
    step = tl.arange(0, BLOCK)[:, None]
    start = outer * cols * inner
    total = tl.zeros([BLOCK, INNER], ACC)
    for chunk in tl.range(0, tl.cdiv(cols, BLOCK), num_stages=STAGES):
        n = chunk * BLOCK + step
        at = start + n.to(tl.int64) * inner + lane
        inside = (n < cols) & (lane < inner)
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(ACC)
        if LOG:
            total += g
        else:
            total += g * tl.load(y_ptr + at, mask=inside, other=0.0).to(ACC)
    dot = tl.sum(total, 0)[None, :]
    last = tl.cdiv(cols, BLOCK) - 1
    for chunk in tl.range(0, last + 1, num_stages=STAGES):
        n = (last - chunk) * BLOCK + step
        at = start + n.to(tl.int64) * inner + lane
        inside = (n < cols) & (lane < inner)
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(ACC)
        y = tl.load(y_ptr + at, mask=inside, other=0.0).to(ACC)
        dx = g - tl.exp(y) * dot if LOG else y * (g - dot)
        tl.store(dx_ptr + at, dx, mask=inside)


# TILE: values a program takes at once, PER_THREAD: of them in one thread. STAGES 0: one program a tile; otherwise how far loads run
# ahead in programs that walk over all tiles, WARPS warps of them a multiprocessor. Independent of the row's length, as tuning needs it.
_CANDIDATES = [{"TILE": tile, "PER_THREAD": values, "STAGES": stages, "WARPS": resident} for tile, values, stages, resident in
               ((1024, 8, 0, 0), (1024, 16, 0, 0), (1024, 32, 0, 0), (1024, 64, 0, 0), (2048, 16, 0, 0), (4096, 16, 0, 0),
                (4096, 32, 0, 0), (1024, 16, 1, 48), (1024, 16, 2, 32), (1024, 32, 2, 32), (1024, 32, 3, 32),
                (1024, 64, 2, 16))]  # fmt: skip
space("softmax", __file__, _CANDIDATES)
space("softmax_backward", __file__, _CANDIDATES)
_STRIDED = {"TILE": 8192, "PER_THREAD": 16, "STAGES": 2}
space("softmax_strided", __file__, [{"TILE": t, "PER_THREAD": p, "STAGES": s} for t in (4096, 8192) for p in (8, 16) for s in (1, 2, 3)])


def default(block: int, backward: bool) -> Config:
    """The configuration of a row kernel where nothing was tuned; `block`: columns, rounded up to a power of two."""
    return {"TILE": 1024, "PER_THREAD": 16 if backward and block <= 16384 else 32, "STAGES": 0, "WARPS": 0}


_plans: dict[Any, Plan] = {}


def warps(values: int, per_thread: int) -> int:
    """Warps for a tile of so many values: a power of two, 1 to 32."""
    return max(1, min(32, values // (32 * per_thread)))


def chunk(block: int, size: int) -> int:
    """Values of one 128-bit load; more for the interpreter, which joins chunks one after another: slower, and it rounds more often."""
    return min(block, max(16 // size, block // 16 if INTERPRETED else 1))


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 2 for the interpreter, so that its few programs loop too."""
    return 2 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def streamed(x: torch.Tensor) -> bool:
    """Whether x and a result of its size leave no room in the second-level cache for each other: hints that neither is needed again
    then save time: softmax 16384x1024 bfloat16 0.0185 instead of 0.0197 ms on an H200."""
    return x.nbytes >= LARGE


def programs(tiles: int, resident: int, count: int, device: torch.device) -> int:
    """One for each tile; or those that make `resident` warps a multiprocessor, `count` in each, and take several tiles."""
    return min(tiles, max(1, resident // count) * multiprocessors(device)) if resident else tiles


def _split(shape: torch.Size, dim: int) -> tuple[int, int, int]:
    """(outer, cols, inner) of a contiguous tensor."""
    if not shape:
        return 1, 1, 1
    dim %= len(shape)
    inner = 1
    for size in shape[dim + 1 :]:
        inner *= size
    return shape.numel() // (shape[dim] * inner), shape[dim], inner


def _plan(op: str, kernels: tuple[Any, Any], first: torch.Tensor, dim: int, log: bool) -> Plan:
    """Of the kernel that fits; `first`: any of the tensors, not empty."""
    outer, cols, inner = _split(first.shape, dim)
    wide = first.dtype == torch.float64
    size = first.element_size()
    constants: dict[str, Any] = {"LOG": log, "ACC": tl.float64 if wide else tl.float32, **promptness(not streamed(first))}
    if inner == 1 and cols <= (IN_REGISTERS // 4 if wide else IN_REGISTERS):
        block = next_power_of_2(cols)
        bucket, usual = (block, size), default(block, op != "softmax")
        chosen = config(op, bucket, usual)
        rows = max(1, chosen["TILE"] // block)
        count = warps(rows * block, chosen["PER_THREAD"])
        grid = (programs(cdiv(outer, rows), chosen["WARPS"], count, first.device),)
        constants |= {"VEC": 8 if cols % 16 == 8 else 1, "ROWS": rows, "BLOCK": block, "STAGES": chosen["STAGES"], "num_warps": count}
        if op == "softmax":
            constants |= {"FULL": cols == block and outer % rows == 0, "CHUNK": chunk(block, size), "STREAM": streamed(first)}
        else:
            constants["AGAIN"] = block > 16384 and chosen["STAGES"] < 2
        return Plan(op, bucket, usual, chosen, kernels[0], grid, (outer, cols), constants)
    bucket = (inner > 1, size)
    chosen = config("softmax_strided", bucket, _STRIDED)
    lanes = min(64, next_power_of_2(inner))
    block = max(1, min(next_power_of_2(cols), chosen["TILE"] // (4 if wide else 1) // lanes))
    constants |= {"BLOCK": block, "INNER": lanes, "STAGES": chosen["STAGES"], "num_warps": warps(block * lanes, chosen["PER_THREAD"])}
    return Plan("softmax_strided", bucket, _STRIDED, chosen, kernels[1], (outer * cdiv(inner, lanes),), (cols, inner), constants)


def _launch(x: torch.Tensor, dim: int, log: bool, dtype: torch.dtype) -> torch.Tensor:
    if x.is_contiguous() and x.dtype is dtype:
        y = torch.empty_like(x)
    else:
        y, x = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format), x.contiguous()
    if x.numel():
        key = (x.shape, x.dtype, dim, log, x.get_device())
        plan = planned(_plans, key, _plan, "softmax", (_rows_forward, _strided_forward), x, dim, log)
        start(plan, (x, y))
    return y


def _launch_backward(grad: torch.Tensor, y: torch.Tensor, dim: int, log: bool, dtype: torch.dtype) -> torch.Tensor:
    dx = torch.empty_like(y, dtype=dtype, memory_format=torch.contiguous_format)
    if y.numel():
        key = ("backward", y.shape, y.dtype, dim, log, y.get_device())
        plan = planned(_plans, key, _plan, "softmax_backward", (_rows_backward, _strided_backward), y, dim, log)
        start(plan, (grad.contiguous(), y.contiguous(), dx))
    return dx


def _reference(x: torch.Tensor, dim: int, log: bool, dtype: torch.dtype) -> torch.Tensor:
    return (torch.log_softmax if log else torch.softmax)(x.contiguous(), dim, dtype=dtype)


def _reference_backward(grad: torch.Tensor, y: torch.Tensor, dim: int, log: bool, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.promote_types(y.dtype, torch.float32)
    g, p = grad.to(wide), y.to(wide)
    dx = g - p.exp() * g.sum(dim, keepdim=True) if log else p * (g - (g * p).sum(dim, keepdim=True))
    return dx.to(dtype).contiguous()


def _fake(x: torch.Tensor, dim: int, log: bool, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _fake_backward(grad: torch.Tensor, y: torch.Tensor, dim: int, log: bool, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(y, dtype=dtype, memory_format=torch.contiguous_format)


def _setup(ctx: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.dim, ctx.log, _ = args
    ctx.dtype = x.dtype
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    (y,) = ctx.saved_tensors
    return softmax_backward_op(grad, y, ctx.dim, ctx.log, ctx.dtype), None, None, None


softmax_backward_op = operator("softmax_backward(Tensor grad, Tensor y, int dim, bool log, ScalarType dtype) -> Tensor",
                               launch=_launch_backward, reference=_reference_backward, fake=_fake_backward, twice=True)  # fmt: skip
softmax_op = operator("softmax(Tensor x, int dim, bool log, ScalarType dtype) -> Tensor", launch=_launch, reference=_reference,
                      fake=_fake, setup=_setup, backward=_backward)  # fmt: skip


def _call(x: torch.Tensor, dim: int, log: bool, dtype: torch.dtype | None) -> torch.Tensor:
    count = max(1, x.dim())
    if not -count <= dim < count:
        raise IndexError(f"dimension out of range: dim={dim} for a tensor of {x.dim()} dimensions")
    if dtype is not None and dtype != x.dtype and not (dtype == torch.float32 and x.dtype in HALVES):
        x = x.to(dtype)
    result: torch.Tensor = softmax_op(x, dim, log, x.dtype if dtype is None else dtype)
    return result


def softmax(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    """exp(x) / sum exp(x) along `dim`, of dtype `dtype` (of x where left out)."""
    return _call(x, dim, False, dtype)


def log_softmax(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x - log sum exp(x) along `dim`, of dtype `dtype` (of x where left out)."""
    return _call(x, dim, True, dtype)


def columns_kind(cols: int) -> str:
    """The line of the dispatch table for rows of so many columns."""
    return "cols<=1024" if cols <= 1024 else "cols<=8192" if cols <= 8192 else "cols>8192"


def _stand_in(x: Any, dim: Any, dtype: torch.dtype | None, log: bool) -> Any:
    floating = isinstance(x, torch.Tensor) and (x.dtype in HALVES or x.dtype in (torch.float32, torch.float64))
    if not floating or not isinstance(dim, int) or not -max(1, x.dim()) <= dim < max(1, x.dim()):
        return NotImplemented
    if dtype is None and x.dtype in HALVES and torch.is_autocast_enabled(x.device.type):
        if x.device.type != "cuda":
            return NotImplemented
        dtype = torch.float32  # what CUDA's autocast does
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    last = dim in (-1, x.dim() - 1)
    kind = columns_kind(x.shape[-1]) if x.dim() and last else "strided"
    return _call(x, dim, log, dtype) if worth("softmax", x, x.numel(), kind) else NotImplemented


@replaces("softmax", F.softmax)
def _functional_softmax(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    return _stand_in(input, dim, dtype, False)


@replaces("softmax", F.log_softmax)
def _functional_log_softmax(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    return _stand_in(input, dim, dtype, True)


@replaces("softmax", torch.softmax, torch.Tensor.softmax)
def _torch_softmax(input: Any, dim: Any = None, dtype: torch.dtype | None = None, *, out: Any = None) -> Any:
    return NotImplemented if out is not None else _stand_in(input, dim, dtype, False)


@replaces("softmax", torch.log_softmax, torch.Tensor.log_softmax)
def _torch_log_softmax(input: Any, dim: Any = None, dtype: torch.dtype | None = None, *, out: Any = None) -> Any:
    return NotImplemented if out is not None else _stand_in(input, dim, dtype, True)


def _make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Inputs:
    return (torch.randn(shape, device=device, dtype=torch.float32).to(dtype).requires_grad_(),)


def _liger() -> Function:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction  # type: ignore[import-not-found, import-untyped, unused-ignore]

    apply: Function = LigerSoftmaxFunction.apply
    return apply


BENCH = benchmark(
    Case(
        op="softmax",
        ours=softmax,
        plain=lambda x: torch.softmax(x, -1),
        make=_make,
        moved=lambda inputs, backward: (5 if backward else 2) * inputs[0].numel() * inputs[0].element_size(),
        anchors=(
            Anchor((16384, 1024), torch.bfloat16, limit_ms=0.0190),
            Anchor((4096, 32768), torch.bfloat16, limit_ms=0.165),
            Anchor((4096, 32768), torch.bfloat16, backward=True, limit_ms=0.355),
        ),
        differentiable=True,
        peers={"liger": _liger},
        kind=lambda inputs: (columns_kind(inputs[0].shape[-1]), inputs[0].numel()),
    )
)
