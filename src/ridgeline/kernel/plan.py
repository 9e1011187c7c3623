"""A launch worked out once for a shape, and started again with little host time.

    planned(plans, key, make, *args) ──> Plan(kernel, grid, sizes, constants)          made where `key` is new, or was tuned since
    start(plan, tensors, numbers)    ──> the kernel, with tensors, plan.sizes, numbers (floats) and plan.constants, in this order;
                                         tensor descriptors, where there are any, come first; then plan.then, with the same

`launch` looks at every argument to find what was compiled for it. Sizes and constants of a plan never change, so `start` looks at
the tensors alone: their dtypes, and whether all are aligned to 16 bytes. What `launch` found is kept with the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import jit
from .tuning import Config, config

PLANS = 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """What a launch needs beside its tensors: working it out takes longer than the launch."""

    op: str
    """Whose configuration it was made with; empty: with none."""
    bucket: tuple[Any, ...]
    default: Config
    chosen: Config
    kernel: Any
    grid: tuple[int, ...]
    sizes: tuple[Any, ...]
    constants: dict[str, Any]
    then: Plan | None = None
    """What is launched right after, with the same tensors and numbers: their pointers are asked for once."""
    ready: dict[Any, jit.Ready] = field(default_factory=dict)
    """Device and dtypes of the tensors → the compiled kernel."""


def planned(plans: dict[Any, Plan], key: Any, make: Callable[..., Plan], *args: Any) -> Plan:
    """The plan kept under `key`, made anew when another configuration is forced or was tuned; at most PLANS are kept."""
    plan = plans.get(key)
    if plan is None or (plan.op and config(plan.op, plan.bucket, plan.default) is not plan.chosen):
        if len(plans) >= PLANS:
            plans.clear()
        plan = plans[key] = make(*args)
    return plan


def start(plan: Plan, tensors: Sequence[torch.Tensor | None], numbers: tuple[float, ...] = (), descriptors: tuple[Any, ...] = ()) -> None:
    """Launch the plan's kernels on the current stream; dtypes and blocks of `descriptors` are part of what the plan is kept under."""
    at: Plan | None = plan
    if jit.INTERPRETED or not jit.HAVE_TRITON or jit._recorder is not None or 0 in plan.grid:
        _slowly(at, (*descriptors, *tensors), numbers)
        return
    device = torch._C._cuda_getDevice()
    dtypes: list[Any] = [device]
    pointers: list[int | None] = []
    together = 0
    for tensor in tensors:
        if tensor is None:
            dtypes.append(None)
            pointers.append(None)
        else:
            pointer = tensor.data_ptr()
            together |= pointer
            dtypes.append(tensor.dtype)
            pointers.append(pointer)
    if together & 15:
        _slowly(at, (*descriptors, *tensors), numbers)
        return
    key, stream = tuple(dtypes), torch._C._cuda_getCurrentRawStream(device)
    while at is not None:
        ready = at.ready.get(key)
        if ready is None:
            _first(at, key, (*descriptors, *tensors, *at.sizes, *numbers))
        else:
            ready(at.grid, stream, (*descriptors, *pointers, *at.sizes, *numbers))
        at = at.then


def _slowly(plan: Plan | None, operands: tuple[Any, ...], numbers: tuple[float, ...]) -> None:
    while plan is not None:
        jit.launch(plan.kernel, plan.grid, *operands, *plan.sizes, *numbers, **plan.constants)
        plan = plan.then


def _first(plan: Plan, key: tuple[Any, ...], args: tuple[Any, ...]) -> None:
    jit.launch(plan.kernel, plan.grid, *args, **plan.constants)
    kind = jit._kind(plan.kernel, args, jit.with_prompt(plan.kernel, plan.constants))
    found = None if kind is None else jit._ready.get(kind[0])
    if found is not None:
        plan.ready[key] = found
