"""The prune step: settings in, a smaller or sparser model out.

    magnitude, gradient, taylor, random ──> zeros, stored sparse          epochs > 0: gradually, with training in between
    n:m        ──> N of every M inputs kept; linear layers packed         epochs > 0: trained with the mask held
    channels   ──> channels gone, FLOPs or parameters within a budget     epochs > 0: fine-tuned
    heads      ──> attention heads or key-value groups gone               epochs > 0: fine-tuned

`distil` trains against the answers of a teacher (the model before pruning where the context has none) instead of labels alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ...core.change import Change
from ...core.errors import OptionError, TransformError
from ...core.spec import Spec
from ...train.evaluate import device_of
from ..compare import example_inputs
from ..distil import trainable
from ..options import checked
from ..step import Context, Done, Quality, step, transform
from .heads import prune_heads
from .masks import Masks
from .schedule import prune_gradually
from .scores import lowest, score, weights_of
from .sparse24 import nm_mask, pack_linears, parse_pattern, position_bits
from .structured import prune_channels

if TYPE_CHECKING:
    from ...workload.data import Data


class PruneSettings(Spec):
    """What to remove, how much of it, and how to train afterwards."""

    version: Literal[1] = 1
    """Of this specification."""
    method: Literal["magnitude", "gradient", "taylor", "random", "n:m", "channels", "heads"] = "magnitude"
    """What decides; n:m, channels and heads remove in a pattern."""
    sparsity: float = Field(default=0.5, ge=0, lt=1)
    """Share of the weights (or heads) to remove; for channels, of the FLOPs where neither flops nor parameters is given."""
    scope: Literal["global", "layer"] = "global"
    """Rank over the whole model, or take the same share of each layer."""
    pattern: str = "2:4"
    """Of n:m: N kept of every M inputs."""
    flops: float | None = Field(default=None, gt=0, lt=1)
    """Of channels: the share of the FLOPs that may stay."""
    parameters: float | None = Field(default=None, gt=0, lt=1)
    """Of channels: the share of the parameters that may stay."""
    importance: Literal["l1", "l2", "taylor", "bn_scale", "random"] = "l2"
    """Of channels: the score of one."""
    round_to: int = Field(default=1, ge=1, le=1024)
    """Of channels: widths are multiples of this, for kernels that work in blocks."""
    most: float = Field(default=0.9, gt=0, lt=1)
    """Of channels: the largest share one layer may lose."""
    unit: Literal["group", "query"] = "group"
    """Of heads: whole key-value groups, or query heads evenly within groups."""
    include: tuple[str, ...] = ("*",)
    """Patterns of layer names that may be pruned."""
    skip: tuple[str, ...] = ()
    """Patterns of layer names that are left alone."""
    epochs: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Training during and after pruning; 0 prunes at once."""
    ramp: float = Field(default=0.6, ge=0, le=1)
    """Share of the training in which sparsity grows along the cubic schedule."""
    learning_rate: float = Field(default=0.01, gt=0, allow_inf_nan=False)
    """First rate of the training; falls along a cosine."""
    weight_decay: float = Field(default=5e-4, ge=0, allow_inf_nan=False)
    """Of the training."""
    batch: int = Field(default=128, ge=1)
    """Rows of one optimiser step."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the training's forward and backward pass."""
    compile: bool | str = False
    """torch.compile for the training, or the name of its mode."""
    distil: bool = False
    """Train against a teacher's answers."""
    temperature: float = Field(default=3.0, gt=0, allow_inf_nan=False)
    """Of the teacher's answers."""
    alpha: float = Field(default=0.7, ge=0, le=1)
    """Weight of the teacher against the labels."""

    @model_validator(mode="after")
    def _agrees(self) -> PruneSettings:
        if self.flops is not None and self.parameters is not None:
            raise ValueError("give flops or parameters, one of the two")
        if self.method != "channels" and (self.flops is not None or self.parameters is not None):
            raise ValueError("flops and parameters are budgets of method channels")
        if self.distil and not self.epochs:
            raise ValueError("distil needs epochs to train")
        return self


@step("prune", PruneSettings)
def run(model: nn.Module, settings: PruneSettings, context: Context) -> Done:
    """Prune `model`, a copy of the user's, in place."""
    if settings.epochs:
        context.need("data", f"pruning with epochs = {settings.epochs:g}")
    runs: dict[str, Callable[[nn.Module, PruneSettings, Context], Done]] = {"n:m": _pattern, "channels": _channels, "heads": _heads}
    return runs.get(settings.method, _weights)(model, settings, context)


def prune(
    model: nn.Module,
    *,
    method: str = "magnitude",
    sparsity: float = 0.5,
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
    """A pruned copy of the model and what that changed; `settings` are PruneSettings' other fields."""
    chosen = checked(PruneSettings, {"method": method, "sparsity": sparsity, **settings}, "prune(...)")
    context = Context(inputs=inputs, data=data, quality=quality, teacher=teacher, name=name, seed=seed, latency=latency)
    return transform(model, chosen, context, require_gain=require_gain)


def _weights(model: nn.Module, settings: PruneSettings, context: Context) -> Done:
    if settings.sparsity == 0:
        raise OptionError("sparsity = 0", why="nothing would be removed", do="give the share of weights to remove, e.g. 0.5")
    method: Any = settings.method
    chosen = {"method": method, "scope": settings.scope, "include": settings.include, "skip": settings.skip, "seed": context.seed}
    details: dict[str, Any] = {}
    if settings.epochs:
        data: Data = context.need("data", "gradual pruning")
        teacher = _teacher(model, settings, context)
        with trainable(model):
            masks, record = prune_gradually(
                model, data, settings.sparsity, epochs=settings.epochs, ramp=settings.ramp, batch=settings.batch,
                **chosen, **_training(settings, context, teacher),
            )  # fmt: skip
        details["schedule"] = [[at, share] for at, share in record["sparsity"]]
    else:
        weights = weights_of(model, settings.include, settings.skip)
        scores = score(weights, method, model=model, data=context.data, batch=settings.batch, seed=context.seed)
        masks = Masks(model, lowest(scores, settings.sparsity, settings.scope))
    rows = masks.rows()
    empty = [row["layer"] for row in rows if row["pruned"] == row["weights"]]
    notes = (f"nothing is left of {', '.join(empty)}: lower sparsity or scope = layer",) if empty else ()
    masks.close()
    name = f"prune {settings.method} {settings.scope} {settings.sparsity:.0%}"
    return Done(model, name, notes, settings.sparsity, details={**details, "layers": rows})


def _pattern(model: nn.Module, settings: PruneSettings, context: Context) -> Done:
    n, m = parse_pattern(settings.pattern)
    weights = weights_of(model, settings.include, settings.skip)
    fits = {name: weight for name, weight in weights.items() if weight.shape[1] % m == 0}
    if not fits:
        raise TransformError(
            f"no layer for {settings.pattern}", why=f"no weight has a multiple of {m} inputs", do="choose a smaller pattern"
        )
    teacher = _teacher(model, settings, context)
    masks = Masks(model, {name: nm_mask(values, n, m) for name, values in score(fits, "magnitude").items()})
    if settings.epochs:
        _fine_tune(model, settings, context, teacher, after_step=masks)
    rows = masks.rows()
    masks.close()
    packed = _packable(model, fits, n, m)
    model = pack_linears(model, packed, n, m)
    notes = [f"{name} is left dense: its inputs are no multiple of {m}" for name in weights if name not in fits]
    layers = [module for module in model.modules() if getattr(module, "has_kernel", None) is False]
    only = (f"{settings.pattern} ({len(layers)} linear layers unpacked before use: no sparse kernel here)",) if layers else ()
    total = sum(weight.numel() for weight in weights.values())
    share = sum(row["pruned"] for row in rows) / total
    return Done(model, f"prune {settings.pattern}", tuple(notes), share, only, {"layers": rows})


def _packable(model: nn.Module, fits: dict[str, nn.Parameter], n: int, m: int) -> set[str]:
    """Plain linear layers with a weight of their own that packing makes smaller; a shared weight would be stored twice."""
    holders: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    found = set()
    for name, weight in fits.items():
        layer = name.rpartition(".")[0]
        smaller = n * (8 * weight.element_size() + position_bits(m)) < m * 8 * weight.element_size()
        if type(model.get_submodule(layer)) is nn.Linear and holders[id(weight)] == 1 and smaller:
            found.add(layer)
    return found


def _channels(model: nn.Module, settings: PruneSettings, context: Context) -> Done:
    if settings.include != ("*",):
        raise OptionError(
            f"include = {settings.include} with channels", why="sets of channels span layers", do="leave layers out with skip="
        )
    inputs = example_inputs(model, context)
    if inputs is None:
        context.need("inputs", "channel pruning")
    assert inputs is not None
    budget: Any = "parameters" if settings.parameters is not None else "flops"
    ratio = settings.parameters or settings.flops or 1.0 - settings.sparsity
    teacher = _teacher(model, settings, context)
    removed = prune_channels(
        model, inputs, ratio, budget=budget, importance=settings.importance, scope=settings.scope, data=context.data,
        skip=settings.skip, round_to=settings.round_to, most=settings.most, seed=context.seed,
    )  # fmt: skip
    if settings.epochs:
        _fine_tune(model, settings, context, teacher)
    notes = tuple(f"left: {reason}" for reason in removed.left)
    details = {"layers": removed.rows(), "flops": list(removed.flops), "parameters": list(removed.parameters)}
    return Done(model, f"prune channels to {ratio:.0%} of the {budget}", notes, details=details)


def _heads(model: nn.Module, settings: PruneSettings, context: Context) -> Done:
    teacher = _teacher(model, settings, context)
    cuts = prune_heads(model, settings.sparsity, unit=settings.unit, data=context.data, seed=context.seed)
    if settings.epochs:
        _fine_tune(model, settings, context, teacher)
    rows = [{"layer": cut.layer, "query_heads": list(cut.query_heads), "kv_heads": list(cut.kv_heads)} for cut in cuts]
    return Done(model, f"prune heads by {settings.unit} {settings.sparsity:.0%}", details={"layers": rows})


def _teacher(model: nn.Module, settings: PruneSettings, context: Context) -> nn.Module | None:
    """The context's teacher or the model as it is before pruning; None where nobody asks for one."""
    if not settings.distil:
        return None
    return copy.deepcopy(context.teacher if context.teacher is not None else model).to(device_of(model))  # a recipe's is the user's own


def _training(settings: PruneSettings, context: Context, teacher: nn.Module | None) -> dict[str, Any]:
    """What train.fit is told."""
    options: dict[str, Any] = {
        "learning_rate": settings.learning_rate, "weight_decay": settings.weight_decay, "precision": settings.precision,
        "compile": settings.compile, "report": context.report, "progress": False,
    }  # fmt: skip
    if teacher is not None:
        options["objective"] = taught_by(teacher, settings)
    return options


def _fine_tune(
    model: nn.Module, settings: PruneSettings, context: Context, teacher: nn.Module | None, *, after_step: Masks | None = None
) -> None:
    from ...train.fit import fit

    data: Data = context.need("data", "fine-tuning")
    rows = len(data.train)
    steps = max(1, round(settings.epochs * (rows // min(settings.batch, rows))))
    options = _training(settings, context, teacher)
    with trainable(model):
        fit(model, data, steps=steps, batch=settings.batch, seed=context.seed, after_step=after_step, **options)


def taught_by(teacher: nn.Module, settings: PruneSettings) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    """The objective α·T²·KL + (1 − α)·CE against a teacher that does not learn (Hinton 2015)."""
    from ...train.loss import call_model
    from ..distil_loss import distillation_loss

    teacher.eval().requires_grad_(False)
    answer: Any = (
        torch.compile(teacher, mode=settings.compile if isinstance(settings.compile, str) else None) if settings.compile else teacher
    )

    def objective(student: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            soft = call_model(answer, inputs).clone()  # a compiled model may reuse the memory of its answer
        return distillation_loss(call_model(student, inputs), soft, targets, temperature=settings.temperature, alpha=settings.alpha)

    return objective
