"""Distil: a student learns a teacher's answers, and what happens inside it, while it learns the right ones.

    inputs ──teacher (eval, no gradient)──> t, features ─┐
    inputs ──student (training)───────────> s, features ─┴─bridge──> α·T²·KL(t ‖ s) + (1 − α)·CE + β·features ──train.fit──> student
      one module, Pupil(student, bridge), so that adapters are in the optimiser, in checkpoints and under torch.compile

distill(student, teacher, data=...) gives a trained copy and the Change from teacher to student: what is saved by using the
student instead. As a step of a recipe the teacher is the context's. Hooks and adapters are gone afterwards, and the teacher is
as it was. Losses: distil_loss.py; layers: features.py.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ..core.change import Change
from ..core.errors import TransformError
from ..core.spec import Spec
from ..train.evaluate import as_model, device_of, evaluate, logits_of
from ..train.fit import fit
from ..train.history import History
from ..workload.data import Data
from .distil_loss import ALPHA, BETA, TEMPERATURE, distillation_loss
from .features import Bridge, Kind, Taps
from .options import checked
from .step import Context, Done, Quality, step

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TRY_ROWS = 2  # of data, to learn the shapes of features


class DistilSettings(Spec):
    """How a student is taught."""

    version: Literal[1] = 1
    """Of this specification."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the data; give this or `steps` (10 epochs where neither is given)."""
    steps: int | None = Field(default=None, ge=1)
    """Optimiser steps."""
    temperature: float = Field(default=TEMPERATURE, gt=0, allow_inf_nan=False)
    """T: softens both sides' answers."""
    alpha: float = Field(default=ALPHA, ge=0, le=1)
    """Weight of the teacher's answers; 1 - alpha goes to the right ones."""
    beta: float = Field(default=BETA, ge=0, allow_inf_nan=False)
    """Weight of the feature term."""
    features: Literal["none", "hidden", "attention"] = "none"
    """What is compared at `layers`: outputs through an adapter, or attention maps."""
    layers: dict[str, str] = Field(default_factory=dict)
    """Student layer to teacher layer, by name."""
    batch: int = Field(default=128, ge=1)
    """Rows of one optimiser step."""
    optimiser: Literal["sgd", "adam", "adamw"] = "sgd"
    """As train.fit has them."""
    learning_rate: float = Field(default=0.05, gt=0, allow_inf_nan=False)
    """Base rate."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Of sgd."""
    weight_decay: float = Field(default=5e-4, ge=0, allow_inf_nan=False)
    """Of every weight, adapters' too."""
    schedule: Literal["cosine", "constant", "step", "linear", "onecycle"] = "cosine"
    """How the rate falls."""
    warmup: int = Field(default=0, ge=0)
    """Steps over which the rate rises first."""
    clip: float | None = Field(default=None, gt=0)
    """Largest norm of all gradients together."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the student's passes, by autocast."""
    teacher_precision: Literal["same", "float32", "bfloat16", "float16"] = "same"
    """Of the teacher's passes."""
    compile: bool | str = False
    """torch.compile of student, teacher and loss together, or the name of its mode."""
    freeze: tuple[str, ...] = ()
    """Patterns of student parameters that are not trained."""
    augment: bool = True
    """Whether the data's augmentation is used; both see the same crops."""
    keep_zeros: bool = True
    """Whether weights that are zero stay zero, so that what was pruned stays pruned; tensors of zeros alone are free."""

    @model_validator(mode="after")
    def _agrees(self) -> DistilSettings:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give epochs or steps, one of the two")
        if (self.features == "none") != (not self.layers):
            raise ValueError('features and layers go together: features="attention", layers={"layer3": "layer3"}')
        return self


class Pupil(nn.Module):
    """The student with its bridge to the teacher; one call is one loss. The teacher is held, but is no part of it.

    What forward reads is plain numbers and functions, so that torch.compile takes teacher, student and loss as one graph.
    """

    def __init__(
        self, student: nn.Module, teacher: nn.Module, bridge: Bridge | None, taps: tuple[Taps, Taps] | None, settings: DistilSettings
    ) -> None:
        super().__init__()
        self.student, self.bridge, self.taps = student, bridge, taps
        self._weights = {"temperature": settings.temperature, "alpha": settings.alpha, "beta": settings.beta}
        self._teacher_precision = settings.teacher_precision
        self._ask, self._answer = _caller(teacher), _caller(student)  # functions: the teacher is not trained, moved or saved
        self._teacher_dtype = next((p.dtype for p in teacher.parameters() if p.is_floating_point()), torch.float32)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of one batch."""
        asked = inputs.to(self._teacher_dtype) if inputs.is_floating_point() else inputs
        with torch.no_grad(), _cast(inputs.device.type, self._teacher_precision):
            wanted = logits_of(self._ask(asked))
        given = logits_of(self._answer(inputs))
        taps = self.taps
        features = self.bridge(taps[0].take(), taps[1].take()) if self.bridge is not None and taps is not None else None
        return distillation_loss(given, wanted, targets, features=features, **self._weights)


def _caller(model: nn.Module) -> Callable[[Tensor], Any]:
    """call_model with what it finds out found out beforehand."""
    if "positions" in inspect.signature(type(model).forward).parameters:
        return lambda inputs: model(inputs, torch.arange(inputs.shape[1], device=inputs.device))
    return lambda inputs: model(inputs)


def _cast(device: str, wanted: str) -> contextlib.AbstractContextManager[Any]:
    if wanted == "same":
        return contextlib.nullcontext()
    return torch.autocast(device, dtype=DTYPES[wanted] if wanted != "float32" else None, enabled=wanted != "float32")


def teach(student: nn.Module, teacher: nn.Module, data: Data, settings: DistilSettings, *, seed: int = 0, **options: Any) -> History:
    """Train `student` in place against `teacher`; `options` go to train.fit (checkpoint, report, progress, …)."""
    device = device_of(student)
    if any(a is b for a in student.parameters() for b in teacher.parameters()):
        raise TransformError("a teacher that shares parameters with its student", why="training would change both", do="copy the teacher")
    numbers = settings.model_dump(include=set(PASSED))
    if settings.epochs is None and settings.steps is None:
        numbers["epochs"] = 10
    with _as_teacher(teacher, device) as wise, contextlib.ExitStack() as stack:
        taps = bridge = None
        if settings.features != "none":
            taps = (Taps(student, tuple(settings.layers), "the student"), Taps(wise, tuple(settings.layers.values()), "the teacher"))
            bridge = _bridge(student, wise, data, settings.layers, settings.features, taps, seed)
            for tap in taps:
                stack.enter_context(tap)
        pupil = Pupil(student, wise, bridge, taps, settings)
        freeze = tuple(f"student.{pattern}" for pattern in settings.freeze)
        stack.enter_context(trainable(student))
        zeros = _pruned(student) if settings.keep_zeros else []
        keep = (lambda _, __: _clear(zeros)) if zeros else None
        return fit(pupil, data, objective=_lesson, after_step=keep, device=device, seed=seed, freeze=freeze, **numbers, **options)


PASSED = ("epochs", "steps", "batch", "optimiser", "learning_rate", "momentum", "weight_decay", "schedule", "warmup", "clip",
          "precision", "compile", "augment")  # fmt: skip


def _lesson(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = model(inputs, targets)
    return loss


@contextlib.contextmanager
def trainable(student: nn.Module) -> Iterator[None]:
    """A model none of whose parameters takes a gradient (a named one, a loaded one) takes them for the run."""
    off = [p for p in student.parameters() if p.is_floating_point()]
    if any(parameter.requires_grad for parameter in off):
        off = []  # somebody chose what to freeze
    for parameter in off:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in off:
            parameter.requires_grad_(False)


def _pruned(student: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """(weight, where it is zero) of matrices and convolutions that are zero in part."""
    found = [(p, p.detach() == 0) for p in student.parameters() if p.dim() >= 2]
    return [(parameter, mask) for parameter, mask in found if bool(mask.any()) and not bool(mask.all())]


def _clear(zeros: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for parameter, mask in zeros:
            parameter.masked_fill_(mask, 0.0)


def _bridge(
    student: nn.Module, teacher: nn.Module, data: Data, layers: Mapping[str, str], kind: Kind, taps: tuple[Taps, Taps], seed: int
) -> Bridge:
    """Adapters for the shapes one small batch has; seeded, and without moving torch's own random numbers."""
    rows = data.prepare(data.train.inputs[:TRY_ROWS].to(device_of(student)))
    seen = tuple(tap.try_out(model, as_model(model, rows)) for tap, model in zip(taps, (student, teacher), strict=True))
    with torch.random.fork_rng(devices=[]):  # adapters are made on the CPU, then moved
        torch.default_generator.manual_seed(seed)
        return Bridge(layers, kind, seen[0], seen[1])


@contextlib.contextmanager
def _as_teacher(teacher: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """The teacher on `device` in eval mode: itself, put back afterwards, or a copy where it is elsewhere."""
    wise = teacher if device_of(teacher) == device else copy.deepcopy(teacher).to(device)
    modes = [(module, module.training) for module in wise.modules()]
    wise.eval()
    try:
        yield wise
    finally:
        for module, training in modes:
            module.training = training


@step("distill", DistilSettings)
def run(student: nn.Module, settings: DistilSettings, context: Context) -> Done:
    """The step: the context's teacher teaches the model."""
    data, teacher = context.need("data", "distill"), context.need("teacher", "distill")
    context.report("distilling")
    before = dict(context.quality(student)) if context.quality is not None else {}
    history = teach(student, teacher, data, settings, seed=context.seed, progress=False, report=context.report)
    length = f"{settings.steps} steps" if settings.steps else f"{settings.epochs or 10} epochs"
    inside = "" if settings.features == "none" else f", {settings.features} of {len(settings.layers)} layers"
    details = {"student_before": before, "losses": _thinned(history.loss)}
    return Done(student, f"distill {length}{inside}", details=details)


def _thinned(losses: list[float], points: int = 50) -> list[float]:
    every = max(1, len(losses) // points)
    return losses[::every]


def quality_on(data: Data) -> Quality:
    """Scores on the test split, as quality before and after."""
    names = ("accuracy", "loss") if data.kind == "image" else ("perplexity", "loss", "accuracy")

    def scores(model: nn.Module) -> Mapping[str, float]:
        found = evaluate(model, data).to_dict()
        return {name: found[name] for name in names}

    return scores


def distill(
    student: nn.Module,
    teacher: nn.Module,
    *,
    data: Data,
    epochs: int | None = None,
    quality: Quality | None = None,
    inputs: tuple[Any, ...] | None = None,
    name: str = "student",
    seed: int = 0,
    latency: bool = True,
    require_gain: bool = True,
    **settings: Any,
) -> tuple[nn.Module, Change]:
    """A trained copy of the student, and the Change from the teacher to it. `settings`: the fields of DistilSettings."""
    from .compare import change_between

    chosen = checked(DistilSettings, {"epochs": epochs, **settings}, "distill(...)")
    context = Context(inputs, data, quality or quality_on(data), teacher, name, str(device_of(student)), seed, latency)
    done = run(copy.deepcopy(student), chosen, context)
    change = change_between(teacher, done, chosen.model_dump(mode="json"), context)
    return done.model, change.require_gain() if require_gain else change
