"""What a training run can be told, checked before anything is touched.

fit(model, data, **options) ──check──> TrainSettings (frozen, JSON-ready) ──> every part of train/
  decides the result: written into each checkpoint, and a resumed run must agree field by field
  SPEED_ONLY: may differ between a checkpoint and the run that takes it up
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from ..core.errors import OptionError, nearest
from ..core.spec import Spec

SPEED_ONLY = frozenset({"accumulate", "checkpoint_activations", "compile", "graph", "choose_kernels", "tf32", "attention", "feed"})


class Scaling(Spec):
    """Loss scaling of a float16 run, as torch's GradScaler does it. Ref: Micikevicius 2018."""

    initial: float = Field(default=2.0**16, gt=0, allow_inf_nan=False)
    """First scale; 65536 as in torch."""
    growth: float = Field(default=2.0, gt=1, allow_inf_nan=False)
    """Factor after `interval` good steps in a row."""
    backoff: float = Field(default=0.5, gt=0, lt=1)
    """Factor after a step whose gradients overflowed."""
    interval: int = Field(default=2000, ge=1)
    """Good steps in a row before the scale grows."""
    dynamic: bool = True
    """False: the scale stays `initial`; steps that overflow are skipped all the same."""


class TrainSettings(Spec):
    """The numbers of one run."""

    version: Literal[1] = 1
    """Of this specification."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the data; give this or `steps`."""
    steps: int | None = Field(default=None, ge=1)
    """Optimiser steps."""
    batch: int = Field(default=128, ge=1)
    """Rows of one optimiser step, over all ranks and pieces together."""
    optimiser: str = "sgd"
    """sgd, muon, adam, adamw; "custom" where the caller builds it."""
    learning_rate: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Base rate, multiplied by the schedule."""
    rest_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """muon: base rate of what is no matrix (vectors, stem, head); None: learning_rate."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Of sgd and muon."""
    nesterov: bool = False
    """Nesterov's momentum, of sgd and muon."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of adam and adamw."""
    weight_decay: float = Field(default=5e-4, ge=0, allow_inf_nan=False)
    """Added to the gradient (sgd, adam) or taken off the weight (adamw, matrices of muon)."""
    decay: Literal["all", "matrices"] = "all"
    """matrices: none on norms and biases."""
    schedule: Literal["cosine", "constant", "step", "linear", "onecycle", "triangle", "custom"] = "cosine"
    """How the rate falls."""
    warmup: int = Field(default=0, ge=0)
    """Steps over which the rate rises first."""
    rise: float = Field(default=0.3, gt=0, lt=1)
    """Share of the steps in which onecycle and triangle rise."""
    final: float = Field(default=0.0, ge=0, le=1)
    """Where cosine, linear and triangle end, as a share of the base rate."""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """Shares of the run after which `step` multiplies the rate by gamma."""
    gamma: float = Field(default=0.1, gt=0, le=1)
    """See milestones."""
    smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Label smoothing of the built-in loss: this share of each label is spread over all classes."""
    average: float | None = Field(default=None, gt=0, lt=1)
    """Decay of a moving average of the weights; the model ends with the average."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the forward and backward pass, by autocast; weights stay as they are."""
    scaling: Scaling = Scaling()
    """Of float16."""
    clip: float | None = Field(default=None, gt=0)
    """Largest norm of all gradients together."""
    accumulate: int = Field(default=1, ge=1)
    """Pieces a batch is cut into to save memory; the result is that of the whole batch."""
    checkpoint_activations: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    compile: bool | str = False
    """torch.compile, or the name of its mode."""
    graph: bool = False
    """Both passes as one CUDA graph from the fourth step on."""
    choose_kernels: bool = False
    """cuDNN times its convolution kernels in the first step and keeps the fastest."""
    tf32: bool = True
    """Whether float32 products on CUDA may use TF32."""
    attention: Literal["auto", "flash", "efficient", "math", "cudnn"] = "auto"
    """Which of torch's attention kernels."""
    seed: int = 0
    """Of data order, augmentation and dropout."""
    augment: bool = True
    """Whether the data's own augmentation is used."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameter or layer names that are not trained."""
    feed: Literal["auto", "resident", "prefetch", "blocking"] = "auto"
    """How batches reach the device."""

    @model_validator(mode="after")
    def _agrees(self) -> TrainSettings:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give epochs or steps, one of the two")
        if self.schedule in ("onecycle", "triangle") and self.warmup:
            raise ValueError(f"{self.schedule} has a rise of its own: leave warmup at 0")
        if self.rest_rate is not None and self.optimiser != "muon":
            raise ValueError("rest_rate belongs to optimiser = 'muon'")
        if self.graph and (self.compile or self.accumulate > 1 or self.checkpoint_activations):
            raise ValueError("a graph holds one plain forward and backward pass: no compile, accumulate or checkpoint_activations with it")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        if self.accumulate > self.batch:
            raise ValueError(f"a batch of {self.batch} cannot be cut into {self.accumulate} pieces")
        if any(not 0 <= beta < 1 for beta in self.betas) or any(not 0 < share < 1 for share in self.milestones):
            raise ValueError("betas lie in [0, 1), milestones in (0, 1)")
        return self

    def deciding(self) -> dict[str, Any]:
        """The fields that decide the weights a run ends with, JSON-ready."""
        return {name: value for name, value in self.model_dump(mode="json").items() if name not in SPEED_ONLY}


def check_settings(**given: Any) -> TrainSettings:
    """Settings from options, or an OptionError that names the first wrong one."""
    try:
        return TrainSettings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "options"
        shown = f" = {first['input']!r}" if first["loc"] else ""
        why = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            close = nearest(where, TrainSettings.model_fields)
            why = "no such option" + (f"; did you mean {', '.join(close)}?" if close else "")
        raise OptionError(f"{where}{shown}", why=why, do="see docs/train.md for what each option takes") from error
