"""Low rank over a whole model: which layers, how many ranks each, put in place, and trained again where asked.

    model ──select (kind, include, skip)──> layers ──Plan a layer (svd, asvd, tucker, cp, separable)──> rungs
      energy or rank: each layer for itself; one that would save nothing is left, with the reason in the notes
      ratio:          one budget of weights or FLOPs over all selected layers, by marginal energy per unit of cost (ranks.allot)
    ──> nn.Sequential of plain layers in each one's place ──> with epochs: taught by the original model, and by its layers' outputs

Left alone: layers that share a weight (factoring one would store both), parts of torch's fused transformer layers (which read
.weight directly), depthwise convolutions. Nothing left to factor is an error.
"""

from __future__ import annotations

import copy
import fnmatch
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ...core.change import Change
from ...core.errors import TransformError, nearest
from ...core.spec import Spec
from ...measure.subject import evaluating
from ...train.evaluate import as_model, device_of
from ...train.loss import call_model
from ..options import checked
from ..step import Context, Done, Quality, step, transform
from .cp import CpPlan
from .layers import Factorable
from .moments import positions, second_moments
from .ranks import Built, Plan, Rung, allot
from .separable import SeparablePlan
from .svd import SvdPlan
from .tucker import TuckerPlan

if TYPE_CHECKING:
    from ...workload.data import Data

Method = Literal["svd", "asvd", "tucker", "cp", "separable"]
ENERGY = 0.95
CALIBRATION_BATCH = 64


class LowRankSettings(Spec):
    """What becomes of which layers. Give one of energy, ratio and rank; energy 0.95 where none is given."""

    version: Literal[1] = 1
    """Of this specification."""
    method: Method = "svd"
    """svd and asvd take linear layers and convolutions, the others convolutions with a kernel above 1x1."""
    energy: float | None = Field(default=None, gt=0, le=1)
    """Share of each layer's squared norm (asvd: of its output's) to keep."""
    ratio: float | None = Field(default=None, gt=0, lt=1)
    """Share of the selected layers' cost to keep, over all of them together."""
    rank: int | None = Field(default=None, ge=1)
    """The same rank for every layer (tucker: of both sides; separable: kernels a channel)."""
    budget: Literal["parameters", "flops"] = "parameters"
    """What cost means. flops needs example inputs or data."""
    include: tuple[str, ...] = ("*",)
    """Patterns of layer names to take."""
    skip: tuple[str, ...] = ()
    """Patterns of layer names to leave."""
    calibration: int = Field(default=512, ge=1)
    """Samples of the training data that asvd measures the layers' inputs on."""
    epochs: int = Field(default=0, ge=0)
    """Of training afterwards, taught by the original model."""
    batch: int = Field(default=128, ge=1)
    """Of that training."""
    learning_rate: float = Field(default=0.01, gt=0, allow_inf_nan=False)
    """Of that training; cosine."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of that training."""
    match_outputs: bool = True
    """Whether that training also compares the new layers' outputs with the old ones'."""

    @model_validator(mode="after")
    def _one_of(self) -> LowRankSettings:
        if sum(value is not None for value in (self.energy, self.ratio, self.rank)) > 1:
            raise ValueError("give one of energy, ratio and rank")
        return self

    @property
    def aim(self) -> str:
        """For people: what decides the ranks."""
        if self.ratio is not None:
            return f"{100 * self.ratio:g} % of {self.budget}"
        return f"rank {self.rank}" if self.rank is not None else f"energy {100 * (self.energy or ENERGY):g} %"


def plan_for(
    layer: Factorable, method: Method, *, at: tuple[int, int, int] = (1, 1, 1), moment: Tensor | None = None, seed: int = 0
) -> Plan:
    """What a method can do to a layer; TransformError where it cannot take it."""
    if reason := _unfit(layer, method):
        raise TransformError(f"{method} of {layer}", why=reason, do="choose another method, or leave the layer out")
    if isinstance(layer, nn.Linear) or method in ("svd", "asvd"):
        return SvdPlan(layer, at, moment)
    if method == "tucker":
        return TuckerPlan(layer, at)
    return CpPlan(layer, at, seed) if method == "cp" else SeparablePlan(layer, at)


def factor_layer(
    layer: Factorable,
    method: Method = "svd",
    *,
    rank: int | None = None,
    energy: float | None = None,
    ratio: float | None = None,
    moment: Tensor | None = None,
    seed: int = 0,
) -> Built:
    """One layer's factors; a rank or energy that saves nothing is refused."""
    plan = plan_for(layer, method, moment=moment, seed=seed)
    rung = _rung(plan, checked(LowRankSettings, {"method": method, "rank": rank, "energy": energy, "ratio": ratio}, "factor_layer(...)"))
    if not rung.ranks:
        raise TransformError(f"{method} of {layer}", why="no rank within the ratio keeps more than the layer itself", do="lower the ratio")
    return plan.build(rung.ranks)


def _rung(plan: Plan, settings: LowRankSettings) -> Rung:
    if settings.rank is not None:
        return plan.for_rank(settings.rank)
    return plan.for_ratio(settings.ratio) if settings.ratio is not None else plan.for_energy(settings.energy or ENERGY)


def _unfit(layer: nn.Module, method: Method) -> str | None:
    """Why a method cannot take a layer."""
    if type(layer) is nn.Linear:
        return None if method in ("svd", "asvd") else f"{method} is for convolutions"
    if type(layer) is not nn.Conv2d:
        return "only nn.Linear and nn.Conv2d are factored"
    if layer.in_channels == layer.groups:
        return "a depthwise convolution has nothing to factor"
    return "its kernel is 1x1: use svd" if method not in ("svd", "asvd") and layer.kernel_size == (1, 1) else None


def select(model: nn.Module, settings: LowRankSettings) -> tuple[dict[str, Factorable], dict[str, str]]:
    """The layers to factor, and why each other linear layer or convolution that was asked for is left."""
    shared = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    fused = {
        id(inner)
        for outer in model.modules()
        if isinstance(outer, nn.MultiheadAttention | nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
        for inner in outer.modules()
    }
    places = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    known = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    for pattern in (*settings.include, *settings.skip):
        if pattern != "*" and not fnmatch.filter(known, pattern):
            close = nearest(pattern, known)
            do = f"did you mean {', '.join(close)}?" if close else f"it has {len(known)} linear layers and convolutions"
            raise TransformError(f"no layer matches {pattern!r}", why="include and skip are patterns of layer names", do=do)
    taken: dict[str, Factorable] = {}
    left: dict[str, str] = {}
    for name, layer in known.items():
        if not _matches(name, settings.include) or _matches(name, settings.skip):
            continue
        if shared[id(layer.weight)] > 1 or places[id(layer)] > 1:
            left[name] = "its weight is shared"
        elif id(layer) in fused:
            left[name] = "it is a part of a fused torch layer"
        elif reason := _unfit(layer, settings.method):
            left[name] = reason
        else:
            taken[name] = layer
    return taken, left


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@step("low_rank", LowRankSettings)
def run(model: nn.Module, settings: LowRankSettings, context: Context) -> Done:
    """The step: plan every layer, choose the ranks, put the factors in place, train where asked."""
    layers, left = select(model, settings)
    original = copy.deepcopy(model) if settings.epochs else None
    plans = _plans(model, layers, settings, context)
    chosen = _choose(plans, settings, left)
    built: dict[str, Built] = {}
    rows = [{"layer": name, "left": reason} for name, reason in left.items()]
    for name, rung in chosen.items():
        context.report(f"factoring {name}")
        built[name] = plans.pop(name).build(rung.ranks)
        rows.append(_row(name, layers[name], rung, built[name]))
    if not built:
        why = "; ".join(f"{reason} ({count})" for reason, count in Counter(left.values()).most_common(4)) or "it has none to factor"
        raise TransformError(
            f"low rank of {context.name} by {settings.method}, {settings.aim}", why=why, do="ask for less, or another method"
        )
    for name, made in built.items():
        model.set_submodule(name, made.layer)
    notes = [f"{count} layers left: {reason}" for reason, count in Counter(left.values()).items()]
    if original is not None:
        notes.append(_train(model, original, tuple(built), settings, context))
    elif settings.method == "separable":
        notes.append("not trained: separable layers are a starting point; give epochs and data")
    return Done(model, f"low rank {settings.method} {settings.aim}", tuple(notes), details={"layers": rows})


def _plans(model: nn.Module, layers: dict[str, Factorable], settings: LowRankSettings, context: Context) -> dict[str, Plan]:
    places: Mapping[str, tuple[int, int, int]] = {}
    moments: Mapping[str, Tensor] = {}
    if settings.budget == "flops" and layers:
        places = positions(_one_pass(model, context), layers)
    if settings.method == "asvd" and layers:
        context.report("measuring the layers' inputs")
        moments = second_moments(_calibration(model, settings, context), layers)
    plans = {}
    for name, layer in layers.items():
        context.report(f"decomposing {name}")
        try:
            plans[name] = plan_for(layer, settings.method, at=places.get(name, (1, 1, 1)), moment=moments.get(name), seed=context.seed)
        except TransformError as error:
            raise TransformError(f"{name}: {error.what}", why=error.why, do=error.do) from error
    return plans


def _choose(plans: Mapping[str, Plan], settings: LowRankSettings, left: dict[str, str]) -> dict[str, Rung]:
    """The rung of each layer that is factored; the others go to `left`."""
    if settings.ratio is not None and plans:
        ladders = {name: [*plan.rungs(), Rung((), plan.dense, 1.0)] for name, plan in plans.items()}
        rungs = allot(ladders, settings.ratio * sum(plan.dense for plan in plans.values()))
        left.update({name: "the budget has room for it as it is" for name, rung in rungs.items() if not rung.ranks})
        return {name: rung for name, rung in rungs.items() if rung.ranks}
    chosen = {}
    for name, plan in plans.items():
        try:
            chosen[name] = _rung(plan, settings)
        except TransformError as error:
            left[name] = error.what
    return chosen


def _row(name: str, layer: Factorable, rung: Rung, built: Built) -> dict[str, Any]:
    return {
        "layer": name,
        "ranks": list(rung.ranks),
        "weights_before": layer.weight.numel(),
        "weights_after": sum(piece.weight.numel() for piece in built.layer if isinstance(piece, nn.Linear | nn.Conv2d)),
        "energy": built.energy,
        "relative_error": built.error,
    }


def _one_pass(model: nn.Module, context: Context) -> Callable[[], None]:
    def once() -> None:
        with evaluating(model), torch.no_grad():
            if context.inputs is not None:
                model(*context.inputs)
            else:
                data: Data = context.need("data", "low_rank by flops")
                call_model(model, as_model(model, data.prepare(data.train.inputs[:1].to(device_of(model)))))

    return once


def _calibration(model: nn.Module, settings: LowRankSettings, context: Context) -> Callable[[], None]:
    if context.data is None and context.inputs is not None:
        return _one_pass(model, context)
    data: Data = context.need("data", "activation-aware svd")

    def all_batches() -> None:
        inputs = data.train.inputs[: settings.calibration]
        with evaluating(model), torch.no_grad():
            for start in range(0, len(inputs), CALIBRATION_BATCH):
                rows = data.prepare(inputs[start : start + CALIBRATION_BATCH].to(device_of(model)))
                call_model(model, as_model(model, rows))

    return all_batches


def _train(model: nn.Module, original: nn.Module, names: tuple[str, ...], settings: LowRankSettings, context: Context) -> str:
    """Teach the factored model by the original: its answers and, at the new layers, its outputs."""
    from ..distil import DistilSettings, teach

    data = context.need("data", "low_rank with epochs")
    features: dict[str, Any] = {"features": "hidden", "layers": {name: name for name in names}} if settings.match_outputs else {}
    lesson = DistilSettings(
        epochs=settings.epochs, batch=settings.batch, learning_rate=settings.learning_rate, precision=settings.precision, **features
    )
    context.report(f"training for {settings.epochs} epochs against the original")
    history = teach(model, original, data, lesson, seed=context.seed, progress=False, report=context.report)
    return f"trained {settings.epochs} epochs against the original: loss {history.epochs[0].loss:.4f} to {history.epochs[-1].loss:.4f}"


def low_rank(
    model: nn.Module,
    *,
    method: Method = "svd",
    energy: float | None = None,
    ratio: float | None = None,
    rank: int | None = None,
    inputs: tuple[Any, ...] | None = None,
    data: Data | None = None,
    quality: Quality | None = None,
    name: str = "model",
    seed: int = 0,
    latency: bool = True,
    **settings: Any,
) -> tuple[nn.Module, Change]:
    """A copy of the model with low-rank layers, and the Change. `settings`: the other fields of LowRankSettings."""
    from ..distil import quality_on

    given = {"method": method, "energy": energy, "ratio": ratio, "rank": rank, **settings}
    chosen = checked(LowRankSettings, given, "low_rank(...)")
    scores = quality or (quality_on(data) if data is not None else None)
    context = Context(inputs, data, scores, None, name, str(device_of(model)), seed, latency)
    return transform(model, chosen, context)
