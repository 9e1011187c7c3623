"""What is measured: a model built, moved and laid out on a real device, without touching what the user passed in.

    "resnet18" ──resolve(device)──────────────┐
    nn.Module + inputs ──copied when changed──┴──> ModelCase in eval mode on the device, inputs its own copies

A module that must move, change dtype or layout is copied first; otherwise the user's own module runs, in eval mode for
the time of the measurement.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..core.checks import expect
from ..core.dtypes import canonical
from ..core.errors import MeasureError, OptionError
from ..workload.capture import RUNNABLE, module_case, resolve
from ..workload.case import CaseOptions, ModelCase
from .memory import require_room


def build_subject(
    model: str | Path | torch.nn.Module, inputs: Any, options: CaseOptions, name: str | None, channels_last: bool
) -> ModelCase:
    """The case to measure on `options.device`."""
    if options.dtype is not None and (dtype := canonical(options.dtype)) not in RUNNABLE:
        raise OptionError(
            f"dtype {dtype!r} cannot be measured", why="torch modules do not run in it", do=f"measure in {', '.join(RUNNABLE)}"
        )
    case = _named(str(model), inputs, options) if isinstance(model, str | Path) else _given(model, inputs, options, name)
    if channels_last:
        module: Any = copy.deepcopy(case.module) if case.module is model else case.module
        case = replace(case, module=module.to(memory_format=torch.channels_last), **_inputs(case, _to_channels_last))
    return case


def choose_device(device: str | None, model: str | Path | torch.nn.Module) -> torch.device:
    """The device asked for; else the module's own; else the GPU where there is one."""
    expect("model", model, torch.nn.Module, str, Path, do="give a torch.nn.Module, a name from `ridgeline models` or a path")
    if device is None:
        first = None if isinstance(model, str | Path) else next((t for t in (*model.parameters(), *model.buffers())), None)
        if first is not None:
            chosen = first.device
        else:
            chosen = torch.device("cuda" if isinstance(model, str | Path) and torch.cuda.is_available() else "cpu")
    else:
        try:
            chosen = torch.device(device)
        except RuntimeError as error:
            raise OptionError(f"device {device!r}", why=str(error).splitlines()[0][:160], do="use cpu, cuda or cuda:N") from error
    if chosen.type not in ("cpu", "cuda"):
        raise MeasureError(f"cannot measure on {chosen}", why="only cpu and cuda devices are timed", do="use device='cpu' or device='cuda'")
    if chosen.type == "cuda":
        return _cuda_device(chosen)
    return chosen


def _cuda_device(chosen: torch.device) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0 or (chosen.index or 0) >= count:
        why = f"torch finds {count} CUDA devices here" if count else "torch finds no CUDA device here"
        raise MeasureError(f"cannot measure on {chosen}", why=why, do="use device='cpu', or run on a machine with that GPU")
    return torch.device("cuda", torch.cuda.current_device() if chosen.index is None else chosen.index)


def _named(model: str, inputs: Any, options: CaseOptions) -> ModelCase:
    if inputs is not None:
        raise OptionError("inputs given for a named model", why="a name or file brings its own inputs", do="pass the nn.Module itself")
    if model.lower().endswith(".onnx"):
        raise MeasureError(
            f"{model} cannot be measured",
            why="an ONNX file is read for its costs, it is not run",
            do="use `ridgeline analyze`, or give the torch model",
        )
    device = torch.device(options.device)
    require_room(resolve(model, replace(options, device="meta")), device)
    case = resolve(model, options)
    case.module.eval()
    return case


def _given(module: torch.nn.Module, inputs: Any, options: CaseOptions, name: str | None) -> ModelCase:
    if options.batch is not None or options.phase is not None or options.context is not None:
        raise OptionError(
            "batch, phase or context given for a module", why="the example inputs already fix them", do="shape the example inputs instead"
        )
    case = module_case(module, inputs, name or type(module).__name__)
    tensors = [*module.parameters(), *module.buffers()]
    if any(t.is_meta for t in tensors):
        raise MeasureError(f"{case.name} is on the meta device", why="it has shapes and no values", do="build it on the CPU or a GPU")
    device, dtype = torch.device(options.device), getattr(torch, canonical(options.dtype)) if options.dtype else None
    moved = any(t.device != device for t in tensors)
    recast = dtype is not None and any(t.dtype != dtype for t in tensors if t.is_floating_point())
    if moved or recast:
        module = copy.deepcopy(module).to(device=device, dtype=dtype)

    def place(tensor: torch.Tensor) -> torch.Tensor:
        # A copy, so that models that write into their inputs do not change the caller's.
        return tensor.detach().to(device=device, dtype=dtype if tensor.is_floating_point() else None, copy=True)

    return replace(case, module=module, dtype=canonical(options.dtype) if options.dtype else case.dtype, **_inputs(case, place))


def _inputs(case: ModelCase, change: Any) -> dict[str, Any]:
    return {"args": tree_map_only(torch.Tensor, change, case.args), "kwargs": tree_map_only(torch.Tensor, change, case.kwargs)}


def _to_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 and tensor.is_floating_point() else tensor


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Every submodule in eval mode inside, each back to its own mode after."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, training in modes:
            child.training = training
