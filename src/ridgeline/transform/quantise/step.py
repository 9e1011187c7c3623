"""The quantize step: settings in, a model with fewer bits out.

    weight-only  weights packed, activations as they are              weight_only.py      no data (rtn), calibration (gptq, awq)
    dynamic      linear layers in int8, inputs rounded row by row     dynamic.py          no data
    static       convolutions and linear layers in int8               static.py           calibration
    qat          the same, weights of 2 to 8 bits, trained for it     qat.py              training data
    mixed        bits of each layer chosen under a budget             mixed.py            calibration

    context.data (training split) or context.inputs ──> calibration batches

What was done to each layer is in the Change's details; layers the device has no integer kernel for are its `storage_only`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from ...core.change import Change
from ...core.errors import TransformError
from ...core.spec import Spec
from ...train.evaluate import as_model, device_of
from ...train.fit import fit
from ..compare import example_inputs
from ..distil import trainable
from ..options import checked
from ..step import Context, Done, Quality, step, transform
from .dynamic import quantise_dynamic_
from .grid import SCALE_TYPES
from .mixed import FLOAT, quantise_mixed_
from .qat import convert_, foldable, taught_by, wrap_
from .static import Batch, candidates, fold_notes, quantise_static_
from .weight_only import WeightSettings, quantise_weights_

if TYPE_CHECKING:
    from ...workload.data import Data

WEIGHT_ONLY = (
    "symmetric",
    "granularity",
    "group",
    "scale_type",
    "minimum",
    "format",
    "algorithm",
    "only",
    "tables",
    "damping",
    "act_order",
    "clip",
)
TRAINING = ("epochs", "batch", "learning_rate", "weight_decay", "precision", "compile", "scale", "distil", "temperature", "alpha")
BUDGETS = ("budget_bits", "budget_bytes", "budget_latency_s")
CALIBRATION_BATCH = 64


class QuantizeSettings(Spec):
    """How many bits, where, and how their grids are found."""

    version: Literal[1] = 1
    """Of this specification."""
    method: Literal["weight-only", "dynamic", "static", "qat", "mixed"] = "static"
    """What is quantised and when the ranges of activations are found."""
    bits: int = Field(default=8, ge=2, le=8)
    """Of a weight; activations have 8."""
    layer_bits: dict[str, int] = Field(default_factory=dict)
    """Pattern of layer names to bits; the first that fits wins over `bits`."""
    skip: tuple[str, ...] = ()
    """Patterns of layer names that stay as they are."""
    calibration: Literal["minmax", "percentile", "mse", "entropy"] = "mse"
    """How the range of an activation is chosen."""
    calibration_samples: int = Field(default=512, ge=1)
    """Rows of the training split (images, or token sequences) that are run to find ranges."""
    percentile: float = Field(default=99.99, gt=50, le=100)
    """Of calibration = "percentile": the share of values kept at each end."""
    activations: bool = True
    """Of qat and mixed: quantise activations too; False gives packed weights with float inputs."""
    fold: dict[str, str] | None = None
    """Convolution to batch norm, by name, where the model cannot be traced."""

    symmetric: bool = True
    """Of weight-only: around 0, without a zero point."""
    granularity: Literal["tensor", "channel", "group"] = "channel"
    """Of weight-only: what shares a scale."""
    group: int = Field(default=64, ge=1)
    """Of weight-only: neighbours in a row that share a scale."""
    scale_type: Literal["float32", "float16", "bfloat16"] = "float32"
    """Of weight-only: how scales are stored."""
    minimum: bool = False
    """Of weight-only, asymmetric: a float minimum in the place of a whole zero point."""
    format: Literal["uniform", "log", "codebook", "nf4"] = "uniform"
    """Of weight-only: where the levels lie."""
    algorithm: Literal["rtn", "gptq", "awq"] = "rtn"
    """Of weight-only: how codes are found."""
    only: tuple[str, ...] = ("*",)
    """Of weight-only: patterns of layer names to quantise."""
    tables: bool = False
    """Of weight-only: embeddings too, in 8 bits."""
    damping: float = Field(default=0.05, gt=0, le=1)
    """Of gptq: share of the mean diagonal added to the Hessian."""
    act_order: bool = True
    """Of gptq: columns with the largest inputs first."""
    clip: bool = False
    """Of gptq: a group's range may shrink where that loses less."""

    epochs: int = Field(default=3, ge=1)
    """Of qat."""
    batch: int = Field(default=128, ge=1)
    """Of qat: rows of one optimiser step."""
    learning_rate: float = Field(default=0.01, gt=0, allow_inf_nan=False)
    """Of qat: falls along a cosine."""
    weight_decay: float = Field(default=1e-4, ge=0, allow_inf_nan=False)
    """Of qat: not of scales, norms and biases."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of qat: the passes between the grids."""
    compile: bool | str = False
    """Of qat: torch.compile for the training, or the name of its mode."""
    scale: Literal["max", "learned"] = "learned"
    """Of qat: scales follow the largest weight, or are trained (LSQ)."""
    distil: bool = True
    """Of qat: learn from the float model's answers too."""
    temperature: float = Field(default=3.0, gt=0, allow_inf_nan=False)
    """Of the float model's answers."""
    alpha: float = Field(default=0.7, ge=0, le=1)
    """Weight of the float model's answers against the labels."""

    choices: tuple[int, ...] = (2, 3, 4, 5, 6, 8)
    """Of mixed: the bits a layer may have; 32 leaves it in float."""
    budget_bits: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Of mixed: mean bits a weight."""
    budget_bytes: int | None = Field(default=None, gt=0)
    """Of mixed: bytes of the layers' tensors."""
    budget_latency_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Of mixed: sum of the layers' own times on this device."""

    @model_validator(mode="after")
    def _agrees(self) -> QuantizeSettings:
        owners = {"weight-only": WEIGHT_ONLY, "qat": TRAINING, "mixed": ("choices", *BUDGETS)}
        for method, names in owners.items():
            if set_here := [name for name in names if name in self.model_fields_set and method != self.method and self._changed(name)]:
                raise ValueError(f"{set_here[0]} is an option of method {method}, not of {self.method}")
        if self.method == "mixed" and sum(getattr(self, name) is not None for name in BUDGETS) != 1:
            raise ValueError(f"method mixed takes one of {', '.join(BUDGETS)}")
        if bad := [bits for bits in self.choices if bits not in (*range(2, 9), FLOAT)]:
            raise ValueError(f"choices are 2 to 8 bits or {FLOAT}, not {bad[0]}")
        if bad := [bits for bits in self.layer_bits.values() if not 2 <= bits <= 8]:
            raise ValueError(f"layer_bits are 2 to 8, not {bad[0]}")
        if self.layer_bits and self.method in ("weight-only", "mixed"):
            raise ValueError(f"layer_bits is not an option of method {self.method}")
        if self.scale_type not in SCALE_TYPES:
            raise ValueError(f"scale_type is one of {', '.join(SCALE_TYPES)}")
        return self

    def _changed(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True))


def calibration_batches(model: nn.Module, settings: QuantizeSettings, context: Context) -> list[Batch]:
    """Arguments of forward passes on the model's device: a seeded sample of the training split, or the context's inputs."""
    data = context.data
    if data is None:
        inputs = example_inputs(model, context)
        if inputs is None:
            raise TransformError(f"quantize {settings.method} without data or inputs", why="ranges are found on them", do="give data=")
        return [inputs]
    device = device_of(model)
    chosen = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(context.seed))[: settings.calibration_samples]
    positions = "positions" in inspect.signature(type(model).forward).parameters
    batches = []
    for rows in chosen.split(CALIBRATION_BATCH):
        x = as_model(model, data.prepare(data.train.inputs[rows].to(device)))
        batches.append((x, torch.arange(x.shape[1], device=device)) if positions else (x,))
    return batches


@step("quantize", QuantizeSettings)
def run(model: nn.Module, settings: QuantizeSettings, context: Context) -> Done:
    """Quantise `model`, a copy of the user's, in place."""
    runs: dict[str, Callable[[nn.Module, QuantizeSettings, Context], Done]] = {
        "weight-only": _weight_only, "dynamic": _dynamic, "static": _static, "qat": _qat, "mixed": _mixed,
    }  # fmt: skip
    return runs[settings.method](model, settings, context)


def _weight_only(model: nn.Module, settings: QuantizeSettings, context: Context) -> Done:
    own = {name: getattr(settings, name) for name in WEIGHT_ONLY}
    batches = calibration_batches(model, settings, context) if settings.algorithm != "rtn" else None
    rows = quantise_weights_(model, WeightSettings(bits=settings.bits, skip=settings.skip, **own), batches)
    notes = tuple(dict.fromkeys(f"{row.name}: {row.note}" for row in rows if row.note))
    how = f"group {settings.group}" if settings.granularity == "group" else settings.granularity
    name = f"quantize weight-only {settings.bits} bits {settings.format} {settings.algorithm} {how}"
    return _done(model, name, notes, {"layers": [row.to_dict() for row in rows]})


def _dynamic(model: nn.Module, settings: QuantizeSettings, context: Context) -> Done:
    rows, notes = quantise_dynamic_(model, bits=settings.bits, layer_bits=settings.layer_bits, skip=settings.skip)
    return _done(model, f"quantize dynamic {_width(settings)}", notes, {"layers": [row.to_dict() for row in rows]})


def _static(model: nn.Module, settings: QuantizeSettings, context: Context) -> Done:
    batches = calibration_batches(model, settings, context)
    rows, notes = quantise_static_(
        model, batches, bits=settings.bits, layer_bits=settings.layer_bits, method=settings.calibration, percentile=settings.percentile,
        skip=settings.skip, pairs=_pairs(settings),
    )  # fmt: skip
    name = f"quantize static {_width(settings)}, {settings.calibration} ranges"
    return _done(model, name, notes, {"layers": [row.to_dict() for row in rows]})


def _qat(model: nn.Module, settings: QuantizeSettings, context: Context) -> Done:
    data: Data = context.need("data", "quantisation-aware training")
    layers, _ = candidates(model, settings.skip)
    pairs = foldable(model, _pairs(settings), layers)
    objective = None
    if settings.distil:
        teacher = copy.deepcopy(model if context.teacher is None else context.teacher).to(device_of(model))
        objective = taught_by(teacher, settings.temperature, settings.alpha)
    batches = calibration_batches(model, settings, context) if settings.activations else None
    with trainable(model):  # before the scales come: they take gradients whatever the weights do
        notes = wrap_(
            model, batches, bits=settings.bits, layer_bits=settings.layer_bits, scale=settings.scale, method=settings.calibration,
            percentile=settings.percentile, skip=settings.skip,
        )  # fmt: skip
        history = fit(
            model, data, objective=objective, epochs=settings.epochs, batch=settings.batch, learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay, decay="matrices", precision=settings.precision, compile=settings.compile,
            seed=context.seed, report=context.report, progress=False,
        )  # fmt: skip
        rows, more = convert_(model, pairs)
    notes = [*notes, *more, *fold_notes(model, pairs, _pairs(settings))]
    every = max(1, len(history.loss) // 50)
    details = {"layers": [row.to_dict() for row in rows], "losses": history.loss[::every]}
    taught = ", taught by the float model" if settings.distil else ""
    return _done(model, f"quantize qat {_width(settings)}, {settings.epochs} epochs{taught}", notes, details)


def _mixed(model: nn.Module, settings: QuantizeSettings, context: Context) -> Done:
    batches = calibration_batches(model, settings, context)
    found = quantise_mixed_(
        model, batches, choices=settings.choices, budget_bits=settings.budget_bits, budget_bytes=settings.budget_bytes,
        budget_latency_s=settings.budget_latency_s, activations=settings.activations, method=settings.calibration,
        percentile=settings.percentile, skip=settings.skip, pairs=_pairs(settings), timed=example_inputs(model, context),
        report=context.report,
    )  # fmt: skip
    spent = {"cost": found.cost, "budget": found.budget, "unit": found.unit}
    rise = {"predicted_kl": found.predicted_kl, "measured_kl": found.measured_kl}
    details = {"layers": [row.to_dict() for row in found.rows], "sensitivity": found.table, **spent, **rise}
    return _done(model, f"quantize mixed {min(found.bits.values())} to {max(found.bits.values())} bits", found.notes, details)


def _pairs(settings: QuantizeSettings) -> list[tuple[str, str]] | None:
    return None if settings.fold is None else list(settings.fold.items())


def _width(settings: QuantizeSettings) -> str:
    return f"int8, weights of {settings.bits} bits" if settings.bits < 8 else "int8"


def _done(model: nn.Module, name: str, notes: Any, details: dict[str, Any]) -> Done:
    return Done(model, name, tuple(notes), None, storage_only(model), details)


def storage_only(model: nn.Module) -> tuple[str, ...]:
    """One sentence a reason for the layers that the model's device does not run in integers or packed."""
    reasons: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        asks = getattr(module, "runs_packed", None)
        if asks is not None:
            runs, reason = asks()
            if not runs:
                reasons.setdefault(f"{type(module).__name__}: {reason}", []).append(name)
    return tuple(f"{len(names)} layers, {reason}" for reason, names in reasons.items())


def quantize(
    model: nn.Module,
    *,
    method: str = "static",
    inputs: tuple[Any, ...] | None = None,
    data: Data | None = None,
    quality: Quality | None = None,
    teacher: nn.Module | None = None,
    name: str = "model",
    seed: int = 0,
    latency: bool = True,
    require_gain: bool = True,
    **settings: Any,
) -> tuple[nn.Module, Change]:
    """A quantised copy of the model and what that changed; `settings` are QuantizeSettings' other fields."""
    chosen = checked(QuantizeSettings, {"method": method, **settings}, "quantize(...)")
    context = Context(
        inputs=inputs, data=data, quality=quality, teacher=teacher, name=name, target=str(device_of(model)), seed=seed, latency=latency
    )
    return transform(model, chosen, context, require_gain=require_gain)
