"""Launches of the reductions: what depends on shape, strides and dtype only is worked out once.

    x, dim, … ──find──> Call: plan, schedule, grid, numbers and constants of the kernel ──run──> out

A call costs the host one look-up, the result's allocation and a launch; a new shape costs a plan. The tuner may change the
configuration under a Call, which then makes its schedule anew.

One launch: each program leaves its partial result and counts itself in; the last of a block of outputs combines them. The counters
belong to a device and stream, and are zero between launches. Inside a CUDA graph, whose replays may overlap on other streams, a
second launch combines instead, as it does for very many pieces or outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import reduce_kernels as kernels
from .jit import cdiv, empty, launch, tl
from .overlap import LARGE, promptness
from .plan import Plan as Launch
from .plan import start
from .reduce_plan import COUNTERS, MOST_PIECES, Plan, bucket, copied_shape, default, normalize, plan, reduced_shape, schedule
from .tuning import config

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
KNOWN = frozenset(FLOATS + INTEGERS)
_LOWEST = {torch.int64: -(2**63), torch.int32: -(2**31)}
_CALLS_MOST = 4096

_counters: dict[tuple[int, int], torch.Tensor] = {}
"""Of a device and stream, zero between launches."""


@dataclass(slots=True)
class Call:
    """One reduction of tensors of one shape, layout and dtype."""

    how: str
    """fold, position or spread: the kernel."""
    plan: Plan
    shape: torch.Size
    """Of the result."""
    result: torch.dtype
    acc: torch.dtype
    """Of the partial results."""
    divisor: int
    """0: nothing is divided."""
    fixed: dict[str, Any]
    """The kernel's constants that no configuration changes."""
    copy: list[int] | None
    """The order to copy x's dimensions in first."""
    itemsize: int
    op: str = ""
    bucket: tuple[Any, ...] = ()
    default: Mapping[str, int] = field(default_factory=dict)
    chosen: Mapping[str, int] | None = None
    """The configuration that what follows was made for."""
    stages: tuple[Launch, ...] = ()
    """Launches of the kernel's stages, see reduce_kernels.py."""
    splits: int = 1
    part: tuple[int, ...] = ()
    two: bool = False
    """Combines in a second launch."""
    finish_grid: tuple[int, ...] = ()
    finish: dict[str, Any] = field(default_factory=dict)

    def choose(self, chosen: Mapping[str, int]) -> None:
        """Make the numbers of the launch for a configuration."""
        p, cut = self.plan, schedule(self.plan, chosen, self.itemsize)
        tile = {
            "AXIS": p.axis, "KEPT": cut.tile_kept, "RED": cut.tile_reduced, "FLAT": cut.flat, "EVEN": cut.even, "ALIGN": p.align,
            "LINEAR": cut.linear, "WIDE": cut.wide, "SOLE": p.s == 1, "ONCE": cut.once, "SPL": cut.combine, **self.fixed,
            "num_warps": cut.warps,
            **promptness(p.kept * p.s * p.r * self.itemsize < LARGE),
        }  # fmt: skip
        numbers: tuple[int, ...] = (p.kept, cut.k_units, cut.r_units, p.sb, p.sk, p.ss, p.sr, cut.chunks, cut.splits, self.divisor)
        if self.how == "position":
            numbers = (p.kept, cut.k_units, cut.r_units, p.sb, p.sk, p.sr, cut.splits)
            del tile["SOLE"]
        if self.how == "spread":
            tile["SPL"] = max(1, cut.combine // 4)  # three numbers a piece: with the tile of a sum they would take 178 registers a thread
        kernel, _ = _KERNELS[self.how]
        self.splits, count = cut.splits, 3 if cut.splits > 1 else 1
        self.stages = tuple(Launch("", (), {}, {}, kernel, cut.grid, numbers, {**tile, "STAGE": stage}) for stage in range(count))
        self.part = (3, cut.splits, p.kept) if self.how == "spread" else (cut.splits, p.kept)
        self.two = cut.two_launches or cut.blocks > COUNTERS or cut.splits > MOST_PIECES
        self.finish_grid = (cdiv(p.kept, cut.finish_kept),)
        self.finish = {"KEPT": cut.finish_kept, "SPL": cut.finish_combine, **self.fixed}
        self.chosen = chosen  # last: another thread may look


_calls: dict[tuple[Any, ...], Call | None] = {}


def find(how: str, x: torch.Tensor, dim: Sequence[int] | int | None, keepdim: bool, extra: Any = None) -> Call | None:
    """The call for sum, mean, amax, argmax or var of x; None where plain torch must do it.

    `extra`: the result's dtype or None; for var the correction; for pieces of a sum or mean (dtype, divisor).
    """
    key = (how, x.shape, x.stride(), tuple(dim) if isinstance(dim, list) else dim, keepdim, x.dtype, extra)
    if key in _calls:
        call = _calls[key]
    else:
        if len(_calls) >= _CALLS_MOST:
            _calls.clear()
        call = _calls[key] = _new(how, x, dim, keepdim, extra)
    if call is not None:
        chosen = config(call.op, call.bucket, call.default)
        if chosen is not call.chosen:
            call.choose(chosen)
    return call


def _new(how: str, x: torch.Tensor, dim: Sequence[int] | int | None, keepdim: bool, extra: Any) -> Call | None:
    dtype = torch.uint8 if x.dtype == torch.bool else x.dtype
    if x.numel() == 0 or dtype not in KNOWN:
        return None
    kernel, divide, fixed = "fold", None, {}
    if how in ("sum", "mean"):
        result, divide = extra if isinstance(extra, tuple) else (extra or (x.dtype if how == "mean" else sum_dtype(x.dtype)), None)
        if result not in KNOWN or result == torch.bool or (how == "mean" and result not in FLOATS):
            return None
        acc = torch.float64 if result == torch.float64 else torch.float32 if result.is_floating_point else torch.int64
        fixed = {"MAXIMUM": False, "MEAN": how == "mean", "IDENTITY": 0.0 if acc.is_floating_point else 0}
    elif how in ("amax", "argmax"):
        result, acc = dtype if how == "amax" else torch.int64, _maximum_of(dtype)
        fixed = {"IDENTITY": _LOWEST.get(acc, float("-inf"))}
        if how == "amax":
            fixed |= {"MAXIMUM": True, "MEAN": False}
        kernel = "fold" if how == "amax" else "position"
        if x.dtype == torch.bool and how == "argmax":
            return None
    else:
        if dtype not in FLOATS or extra != int(extra):
            return None
        result, acc, kernel = dtype, torch.float64 if dtype == torch.float64 else torch.float32, "spread"
    dims = normalize(dim, x.ndim)
    made, copy = _planned(x, dims, kernel)
    count = made.s * made.r
    divisor = count if how == "mean" and divide is None else divide or 0
    if how == "var":
        divisor = max(0, count - int(extra))
    call = Call(kernel, made, torch.Size(reduced_shape(x.shape, dims, keepdim)), result, acc, divisor,
                {"ACC": _language(acc), **fixed}, copy, x.element_size())  # fmt: skip
    call.op = f"reduce_{made.kind}"
    call.bucket, call.default = bucket(made, call.itemsize, kernel), default(made, call.itemsize, kernel)
    return call


def _planned(x: torch.Tensor, dims: tuple[int, ...], how: str) -> tuple[Plan, list[int] | None]:
    """The plan, and the order to copy x's dimensions in first, where it needs that."""
    made = plan(x.shape, x.stride(), dims, in_order=how == "position")
    # many small pieces: adding them up would take longer than a copy; those of a variance cannot be reduced as a tensor of their own
    if made is not None and not (made.s > MOST_PIECES and (made.r < 32 or how == "spread")):
        return made, None
    copy, (kept, reduced) = copied_shape(x.shape, dims)
    made = plan((kept, reduced), (reduced, 1), (1,))
    assert made is not None
    return made, copy


def _language(acc: torch.dtype) -> Any:
    return {torch.float32: tl.float32, torch.float64: tl.float64, torch.int32: tl.int32, torch.int64: tl.int64}[acc]


def _maximum_of(dtype: torch.dtype) -> torch.dtype:
    """What maxima of a dtype are computed in."""
    if dtype in (torch.float64, torch.int64):
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int32


def sum_dtype(x: torch.dtype) -> torch.dtype:
    """Of the sum, where none is asked for."""
    return torch.int64 if x in INTEGERS else x


def directly(source: torch.dtype, result: torch.dtype) -> bool:
    """Whether casting an element to the accumulator gives what torch gets by casting x to the result's dtype first."""
    if source == result:
        return True
    if result in (torch.float32, torch.float64):
        return source != torch.float64
    return result == torch.int64 and source in INTEGERS


def run(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Reduce x."""
    if x.dtype == torch.bool:
        x = x.view(torch.uint8)
    if call.copy is not None:
        x = x.permute(call.copy).contiguous()
    out = empty(call.shape, call.result, x.device)
    _run(call, x, out)
    if call.plan.order is None:
        return out
    # the kernel wrote in the order of x's memory
    return out.view(call.plan.sizes).permute(call.plan.order).contiguous().view(call.shape)


def _run(call: Call, x: torch.Tensor, out: torch.Tensor) -> None:
    _, finish = _KERNELS[call.how]
    position = call.how == "position"
    if call.splits == 1:
        unused = (None, None, None) if position else (None, None)
        start(call.stages[0], (x, out, *unused))
        return
    part = empty(call.part, call.acc, x.device)
    pieces = (part, empty(call.part, torch.int64, x.device)) if position else (part,)
    if not (call.two or (x.is_cuda and torch.cuda.is_current_stream_capturing())):
        start(call.stages[2], (x, out, *pieces, _counter(x)))
        return
    start(call.stages[1], (x, out, *pieces, None))
    if call.splits > MOST_PIECES and call.how == "fold":
        how = "amax" if call.fixed["MAXIMUM"] else "mean" if call.fixed["MEAN"] else "sum"
        again = find(how, part, (0,), False, (call.result, call.divisor))
        assert again is not None
        _run(again, part, out)
        return
    last = (call.splits,) if position else (call.splits, call.divisor)
    launch(finish, call.finish_grid, *pieces, out, call.plan.kept, *last, **call.finish)


_KERNELS = {
    "fold": (kernels.fold_kernel, kernels.fold_finish),
    "position": (kernels.position_kernel, kernels.position_finish),
    "spread": (kernels.spread_kernel, kernels.spread_finish),
}


def _counter(x: torch.Tensor) -> torch.Tensor:
    index = x.get_device()
    key = (index, torch._C._cuda_getCurrentRawStream(index) if index >= 0 else 0)
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(COUNTERS, dtype=torch.int32, device=x.device)
    return found
