"""optimize(model, inputs): a module of fewer, larger operators with the same answers, and what that gained.

    model + inputs ──capture──> graph ──passes, each checked──> graph ──(rematerialise under a budget)──> (static arena)
                                  │ opportunities             │ predicted, measured gain          │ memory plan
                                  ▼                           ▼                                   ▼
                             Change: before and after timed in alternation, details["passes" | "opportunities" | "memory"]

The module out runs eager, under torch.compile and through torch.export again (an arena: eager only). The user's model is left as it is.
A prediction is the estimate of the graph made again after each pass, on `target`; measuring stays on the device the model is on.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ...core.change import Change
from ...core.errors import OptionError, TransformError
from ...core.spec import Spec
from ...target.load import LOCAL_TARGETS, Target, load_target
from ...train.evaluate import device_of
from ..compare import change_between, example_inputs
from ..options import checked
from ..step import Context, Done, Quality, step
from .capture import Captured, capture_graph
from .manager import PASSES, PassContext, find_pass, run_passes
from .predict import Predictor
from .watch import Watch, report_json

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]


class OptimizeSettings(Spec):
    """What to do to the graph."""

    passes: tuple[str, ...] | None = None
    """Names of passes in the order they run; all of them by default."""
    target: str | None = None
    """Whose times are predicted: a target's name or file; by default the device the model is on."""
    memory: Literal["none", "plan", "static"] = "plan"
    """plan: state what an arena would take; static: return a module that runs inside one; none: neither."""
    budget_bytes: int | None = Field(default=None, gt=0)
    """Most bytes of intermediate tensors alive at once: cheap operators are computed again to stay below it."""
    constant_budget_bytes: int = Field(default=64 << 20, ge=0)
    """How much larger constant folding may make the model."""
    check: bool = True
    """Compare the graph with the original after every pass, on fresh random inputs."""
    predict: bool | None = None
    """Estimate after each pass; by default where that needs no calibration of this machine first."""
    measure_passes: bool = False
    """Time the graph after each pass that changed it, beside the one before."""

    @model_validator(mode="after")
    def _known_once(self) -> OptimizeSettings:
        for one in self.passes or ():
            if one not in PASSES:
                find_pass(one)  # raises with the nearest names
        if len(set(self.passes or ())) != len(self.passes or ()):
            raise ValueError("a pass is named twice; the rounds repeat them anyway")
        return self


@step("optimize", OptimizeSettings)
def run(model: nn.Module, settings: OptimizeSettings, context: Context) -> Done:
    """The step of a recipe."""
    inputs = example_inputs(model, context)
    if inputs is None or not all(isinstance(one, Tensor) for one in inputs):
        what = "optimize without inputs" if inputs is None else "optimize in a recipe with inputs that are no tensors"
        raise TransformError(what, why="a graph is captured for tensors", do="give tensors as inputs=, or call ridgeline.optimize")
    return rewritten(model, inputs, {}, settings, context)


def optimize(
    model: nn.Module,
    inputs: Inputs,
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: str | None = None,
    passes: Sequence[str] | None = None,
    budget_bytes: int | None = None,
    memory: Literal["none", "plan", "static"] = "plan",
    check: bool = True,
    measure: bool = True,
    measure_passes: bool = False,
    predict: bool | None = None,
    constant_budget_bytes: int = 64 << 20,
    quality: Quality | None = None,
    name: str = "model",
    require_gain: bool = True,
    report: Callable[[str], None] = lambda message: None,
) -> tuple[nn.Module, Change]:
    """The optimised module and its Change. `inputs`: a tensor, the positional arguments, or a dict of keyword arguments.

    The module takes the tensors among the arguments, by position or by name; other arguments are fixed to the example's.

    With `measure`, a result neither smaller, faster nor planned into an arena is a NoGainError unless `require_gain` is False.
    """
    given = {
        "passes": None if passes is None else tuple(passes), "target": target, "memory": memory, "budget_bytes": budget_bytes,
        "constant_budget_bytes": constant_budget_bytes, "check": check, "predict": predict, "measure_passes": measure_passes,
    }  # fmt: skip
    settings = checked(OptimizeSettings, given, "optimize(...)")
    args, keywords = split_inputs(inputs, kwargs)
    tensors = tuple(one for one in tree_leaves((args, keywords)) if isinstance(one, Tensor))
    context = Context(inputs=tensors, quality=quality, name=name, target=str(device_of(model)), latency=measure, report=report)
    done = rewritten(copy.deepcopy(model), args, keywords, settings, context)
    plain = not keywords and all(isinstance(one, Tensor) for one in args)
    change = change_between(model if plain else ByTensors(model, args, keywords), done, settings.model_dump(mode="json"), context)
    change = with_arena(change)
    if settings.target in (None, device_of(model).type):
        change = dataclasses.replace(change, predicted_speedup=done.details["predicted_gain"])
    if require_gain and measure and memory != "static" and budget_bytes is None:
        change = change.require_gain()
    return done.model, change


class ByTensors(nn.Module):
    """A model called with its tensors alone, as its graph is: the rest of its arguments is the example's."""

    def __init__(self, inner: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        super().__init__()
        self.inner = inner
        self.leaves, self.spec = tree_flatten((args, keywords))

    def forward(self, *tensors: Tensor) -> Any:
        given = iter(tensors)
        args, keywords = tree_unflatten([next(given) if isinstance(one, Tensor) else one for one in self.leaves], self.spec)
        return self.inner(*args, **keywords)


def split_inputs(inputs: Inputs, kwargs: Mapping[str, Any] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, keyword) arguments of what the user gave."""
    keywords = dict(kwargs or {})
    if isinstance(inputs, Mapping):
        args: tuple[Any, ...] = ()
        keywords = {**inputs, **keywords}
    else:
        args = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if not any(isinstance(one, Tensor) for one in tree_leaves((args, keywords))):
        raise OptionError(
            "no tensor in the example inputs", why="a graph is captured at their shapes", do="give a tensor, a tuple or a dict"
        )
    return args, keywords


def rewritten(model: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], settings: OptimizeSettings, context: Context) -> Done:
    """The graph captured, rewritten and planned; `model` is the caller's copy."""
    context.report("capturing the graph")
    captured = capture_graph(model.eval(), args, keywords or None)
    notes = list(captured.notes)
    before = len(captured.module.graph.nodes)
    found = _opportunities(captured)
    watch = _watch(captured, settings, context, notes)
    chosen = [watch.over(find_pass(one)) for one in (PASSES if settings.passes is None else settings.passes)]
    reports = run_passes(captured, chosen, _pass_context(captured, settings, context), check=settings.check)
    watch.fill(reports)
    notes += watch.notes
    drop_unused(captured)
    details: dict[str, Any] = {
        "nodes": {"before": before, "after": len(captured.module.graph.nodes)},
        "batch_dynamic": captured.batch_dynamic,
        "passes": [report_json(one) for one in reports],
        "predicted_gain": watch.predicted_whole,
        "opportunities": found,
    }
    module: nn.Module = captured.module
    if settings.memory != "none" or settings.budget_bytes is not None:
        from .planned import planned

        module, details["memory"] = planned(captured, settings.memory, settings.budget_bytes, context.report, notes)
    name = "optimize" + (" static" if settings.memory == "static" else "")
    return Done(module, name, notes=tuple(dict.fromkeys(notes)), details=details)


def drop_unused(captured: Captured) -> None:
    """Keep the attributes the graph uses; weights that passes made (folded, merged) count as parameters like those they replace."""
    module = fx.GraphModule(captured.module, captured.module.graph)
    for name, tensor in list(module.named_buffers()):
        if isinstance(getattr(captured.module, name, None), Tensor) and tensor.is_floating_point() and tensor.dim() > 0:
            delattr(module, name)
            module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    captured.module = module


def _opportunities(captured: Captured) -> list[dict[str, Any]]:
    from .opportunities import opportunities

    return [dataclasses.asdict(one) for one in opportunities(captured)]


def _pass_context(captured: Captured, settings: OptimizeSettings, context: Context) -> PassContext:
    tensors = [one for one in (*captured.module.parameters(), *captured.module.buffers(), *tree_leaves(captured.inputs)) if _floating(one)]
    device = device_of(captured.module)
    dtype = tensors[0].dtype if tensors else torch.float32
    return PassContext(settings.target or device.type, device, dtype, settings.constant_budget_bytes, context.report)


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _watch(captured: Captured, settings: OptimizeSettings, context: Context, notes: list[str]) -> Watch:
    device = device_of(captured.module).type
    spec = target_of(settings, device, context.report, notes)
    predictor = Predictor(spec, context.name, context.report) if spec is not None else None
    return Watch(captured, predictor, measure=settings.measure_passes and context.latency, report=context.report)


def target_of(settings: OptimizeSettings, device: str, report: Callable[[str], None], notes: list[str]) -> Target | None:
    """Whose times to predict; None, with a note, where nobody asked or this machine would have to be calibrated first."""
    name = settings.target or device
    if settings.predict is False:
        return None
    if name in LOCAL_TARGETS and settings.predict is None and not _is_calibrated(name):
        notes.append(f"no predicted gains: {name} is not calibrated; run `ridgeline calibrate {name}` once, or set predict=True")
        return None
    if name not in (device, f"{device}:0"):
        notes.append(f"the model is on {device}: passes choose and times are taken there, gains are predicted for {name}")
    return load_target(name, report)


def _is_calibrated(name: str) -> bool:
    from ...target.calibrate import calibration_path

    return calibration_path(name).exists()


def with_arena(change: Change) -> Change:
    """An arena is held between passes, where a peak measured during one does not see it: it is added."""
    plan = change.details.get("memory")
    if not plan or not plan["used"] or change.after.peak_bytes is None:
        return change
    after = dataclasses.replace(change.after, peak_bytes=change.after.peak_bytes + plan["arena_bytes"])
    return dataclasses.replace(change, after=after, notes=(*change.notes, "peak memory after: what one pass took, plus the arena"))
