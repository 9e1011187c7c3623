"""One entry for every kind of model: name, file, folder, factory or module in; Workload out.

    "resnet18" ─ "model.onnx" ─ "hf-folder/" ─ "file.py:factory" ─ nn.Module + inputs
        │ resolve                                                       (ONNX goes straight to a Workload)
        ▼
    ModelCase on the meta device ──torch.export, else one real run──> Recorder ──liveness──> Workload

Data types no torch module runs in (int8, int4, float8, tfloat32) are captured in float16 and re-labelled.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.checks import expect
from ..core.dtypes import canonical
from ..core.errors import CaptureError, NeedsWeightsError, OptionError, RidgelineError
from .case import CaseOptions, ModelCase
from .graph import ROLES, Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

RUNNABLE = ("float64", "float32", "float16", "bfloat16")


def capture(
    model: str | Path | nn.Module,
    inputs: Any = None,
    *,
    batch: int | None = None,
    dtype: str | torch.dtype | None = None,
    phase: str | None = None,
    context: int | None = None,
    name: str | None = None,
) -> Workload:
    """The workload of a model: every op with its FLOPs, bytes, loops and layer."""
    options = CaseOptions(batch, canonical(dtype) if dtype else None, phase, context)
    if isinstance(model, str | Path):
        if inputs is not None:
            raise OptionError("inputs given for a named model", why="a name or file brings its own inputs", do="pass the nn.Module itself")
        return _capture_named(str(model), options)
    if batch is not None or phase is not None or context is not None:
        raise OptionError(
            "batch, phase or context given for a module", why="the example inputs already fix them", do="shape the example inputs instead"
        )
    case = module_case(model, inputs, name or type(model).__name__)
    workload = capture_case(case)
    return workload.with_dtype(options.dtype) if options.dtype and options.dtype != workload.dtype else workload


def resolve(model: str, options: CaseOptions) -> ModelCase:
    """Build the model a name, folder or factory stands for, on the device the options say."""
    from .models import MODELS, build_named

    if ":" in model and model.rpartition(":")[0].endswith(".py"):
        from .factory import build_factory

        return build_factory(model, options)
    if model not in MODELS and Path(model).is_dir():
        from .huggingface import build_folder

        return build_folder(model, options)
    refuse_file(model)
    return build_named(model, options)


def refuse_file(model: str) -> None:
    """A clear error for paths that are missing or of a kind that would run code when opened."""
    from ..core.errors import ModelFileError

    suffix = Path(model).suffix.lower()
    if suffix in (".pt", ".pth", ".pt2", ".pkl", ".pickle", ".bin", ".ckpt", ".th"):
        raise ModelFileError(
            f"{model} is refused",
            why=f"a {suffix} file is a pickle or archive that can run code when it is opened",
            do="export it to ONNX, save weights as safetensors beside a config.json, or give file.py:factory",
        )
    if suffix == ".py":
        raise ModelFileError(f"{model} names no factory", why="a Python file may hold many", do=f"give {model}:function_name")
    if "/" in model or suffix in (".onnx", ".json", ".safetensors", ".gguf"):
        why = "no such file or folder" if not Path(model).exists() else "not a model Ridgeline can read"
        raise ModelFileError(
            f"cannot open {model}", why=why, do="give a name from `ridgeline models`, model.onnx, a Hugging Face folder or file.py:factory"
        )


def module_case(module: nn.Module, inputs: Any, name: str) -> ModelCase:
    """Wrap a module the user already built."""
    import torch
    from torch import nn

    from .tensors import dtype_name

    expect("model", module, nn.Module, do="give a torch.nn.Module, built: nn.Linear(4, 4) and not nn.Linear; or a name")
    if inputs is None:
        raise OptionError(
            "no example inputs", why="a module's work depends on its input shapes", do="pass a tensor, a tuple or a dict of keyword inputs"
        )
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, dict):
        kwargs = dict(inputs)
    else:
        args = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    batch = int(tensors[0].shape[0]) if tensors and tensors[0].dim() else 1
    floating = [dtype_name(t.dtype) for t in (*module.parameters(), *tensors) if t.is_floating_point()]
    return ModelCase(name, module, args, batch, floating[0] if floating else "float32", kwargs)


def capture_case(case: ModelCase) -> Workload:
    """Capture a built model: torch.export first, a recorded run where that fails."""
    from .exported import export_case, record_program

    notes: tuple[str, ...] = ()
    training = case.module.training
    case.module.eval()
    try:
        try:
            recorder, how = record_program(export_case(case)), "torch.export"
        except RidgelineError:
            raise
        except Exception as error:  # torch.export raises many types; the recorded run below tells a bad model from an unexportable one
            recorder, how, notes = _run_instead(case, error)
    finally:
        case.module.train(training)
    return _workload(case, recorder, how, notes)


def _run_instead(case: ModelCase, error: Exception) -> tuple[Any, str, tuple[str, ...]]:
    from .dispatched import record_run

    reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
    try:
        recorder = record_run(case)
    except NeedsWeightsError as meta:
        raise NeedsWeightsError(meta.what, why=f"{meta.why} ({reason})", do=meta.do) from error
    except Exception as failure:
        first = str(failure).strip().splitlines()[0][:200] if str(failure).strip() else type(failure).__name__
        raise CaptureError(
            f"{case.name} does not run on these inputs", why=first, do="check the shapes, dtypes and device of the example inputs"
        ) from failure
    note = f"torch.export could not trace the model ({reason}); recorded one run instead: only the path these inputs took is seen"
    return recorder, "dispatch", (note,)


def _workload(case: ModelCase, recorder: Any, how: str, notes: tuple[str, ...]) -> Workload:
    from .liveness import peak_activation_bytes, peak_cache_bytes

    inputs = recorder.input_values
    return Workload(
        model=case.name,
        batch=case.batch,
        dtype=case.dtype,
        ops=tuple(recorder.ops),
        captured_by=how,
        parameters=sum(p.numel() for p in case.module.parameters()),  # tied ones once
        peak_activation_bytes=peak_activation_bytes(recorder.ops, recorder.storage_bytes, inputs),
        input_bytes=sum(recorder.storage_bytes[v] for v in inputs),
        output_bytes=sum(_results(recorder.ops)),
        phase=case.phase,
        context=case.context,
        uncounted=tuple(recorder.uncounted),
        notes=notes,
        stored_weights=tuple(recorder.stored_weights),
        peak_cache_bytes=peak_cache_bytes(recorder.ops, recorder.storage_bytes, recorder.cache_values),
    )


def _results(ops: list[Any]) -> list[int]:
    """Bytes of each storage that is written and never read again: the model's results."""
    size: dict[str, int] = {}
    for op in ops:
        for operand in op.outputs:
            if operand.role == "activations":
                size[operand.value] = operand.bytes
        for operand in op.inputs:
            size.pop(operand.value, None)
    return list(size.values())


def _capture_named(model: str, options: CaseOptions) -> Workload:
    if model.lower().endswith(".onnx"):
        from .onnx_file import capture_onnx

        workload = capture_onnx(model, options)
    else:
        wanted = options.dtype
        runnable = options if wanted is None or wanted in RUNNABLE else replace(options, dtype="float16")
        try:
            workload = capture_case(resolve(model, runnable))
        except NeedsWeightsError:
            if ".py:" not in model:  # a user's own factory is small enough to build for real; a named model may not be
                raise
            workload = capture_case(resolve(model, replace(runnable, device="cpu")))
    if options.dtype and options.dtype != workload.dtype:
        workload = workload.with_dtype(options.dtype, ROLES)
    return replace(workload, rebatch=lambda batch: _capture_named(model, replace(options, batch=batch)))
