"""Are the answers still the model's? Fresh random inputs, two batch sizes, a tolerance that follows the dtype.

    original graph ──run in float64 and in its own dtype, once for each input──> reference r, own error e0 = |own - r| / max|r|
    after a pass   ──run──> e = |out - r| / max|r|      float64: e <= 1e-9        else: e <= 2 e0 + eps      (eps at least 2e-6)
                   ──beyond──> PassError: which pass, which output, how far, at which batch

The float64 run casts each weight when it is read, so no second copy of the model is held. Where the graph draws random
numbers, or an op has no float64 form, the own-dtype run is the reference and e may be 100 eps (at most 5 %).
Inputs an in-place op writes are compared too. A whole number counts as wrong or right: e is the share of wrong ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ...core.errors import TransformError
from .capture import Captured
from .edit import attribute, constant, is_op, is_random, storages, written_arguments

FLOAT64_TOLERANCE = 1e-9
SMALLEST_EPS = 2e-6  # a few float32 roundings: a lucky original must not make an honest pass wrong


class PassError(TransformError):
    """A pass after which the graph gives other answers."""


def working_dtype(graph: Captured) -> torch.dtype:
    """The coarsest floating dtype of any value in the graph; float64 where there is none."""
    found = torch.float64
    for node in graph.module.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and torch.finfo(value.dtype).eps > torch.finfo(found).eps:
                found = value.dtype
    return found


def fresh_inputs(graph: Captured, batch: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Random tensors like the examples, with `batch` rows where the batch is open."""
    generator = torch.Generator().manual_seed(seed)
    nodes = [node for node in graph.module.graph.nodes if node.op == "placeholder"]
    return tuple(_fresh(graph, node, example, batch, generator) for node, example in zip(nodes, graph.inputs, strict=True))


def _fresh(graph: Captured, node: fx.Node, example: torch.Tensor, batch: int, generator: torch.Generator) -> torch.Tensor:
    """One random tensor: floats of the example's mean and spread, integers of its range (or of the table they index)."""
    shape = list(example.shape)
    if shape and isinstance(node.meta["val"].shape[0], torch.SymInt):
        shape[0] = batch
    if not example.numel():
        return example.new_empty(shape)
    if example.is_floating_point() and bool(torch.isfinite(example).all()):
        seen = example.detach().double()
        spread = float(seen.std(correction=0))
        if not spread and (not seen.any() or seen.dim() != 2):
            spread = 1.0  # a dummy of zeros or ones; a matrix of ones is taken for a mask
        made = torch.randn(shape, generator=generator, dtype=torch.float64) * spread + float(seen.mean())
    elif example.is_floating_point() or example.is_complex() or example.dtype == torch.bool:
        # Masks: -inf, or true and false, mean something where they stand. Rows of the example, in another order.
        rows = torch.randint(max(1, example.shape[0]) if shape else 1, (shape[0] if shape else 1,), generator=generator)
        made = example.detach()[rows.to(example.device)] if shape else example.detach().clone()
    else:
        low, high = int(example.min()), int(example.max())
        made = torch.randint(low, max(high, _table_rows(graph, node) - 1) + 1, shape, generator=generator)
    made = made.to(device=example.device, dtype=example.dtype)
    if example.dim() == 4 and not example.is_contiguous() and example.is_contiguous(memory_format=torch.channels_last):
        made = made.contiguous(memory_format=torch.channels_last)
    return made


def _table_rows(graph: Captured, node: fx.Node) -> int:
    """Rows of the smallest embedding table that is all this input indexes; 0 where there is more, or none."""
    if not all(is_op(user, torch.ops.aten.embedding) and user.args[1] is node for user in node.users):
        return 0  # used for something else too, whose range only the example shows
    tables = [constant(graph, user.args[0]) for user in node.users]
    return min((int(table.shape[0]) for table in tables if table is not None), default=0)


def outputs_of(model: nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> list[Any]:
    """A model's outputs as a flat list, run on copies of the inputs from a fixed seed; its buffers and the random state stay."""
    args, named = pytree.tree_map(_copied, (inputs, dict(kwargs or {})))
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        found = list(pytree.tree_leaves(model(*args, **named)))
        for buffer, value in kept:
            if not torch.equal(buffer, value):
                found = [_copied(leaf) for leaf in found]  # an output may be the buffer itself
                buffer.copy_(value)
    return found


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def reference_run(graph: Captured, inputs: tuple[torch.Tensor, ...], *, high: bool = False) -> list[Any]:
    """The graph's flat outputs, then its inputs as the run left them; `high`: every float in float64."""
    args = tuple(_copied(tensor) for tensor in inputs)
    with state_kept(graph) as kept, torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        if high:
            args = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in args)
            found = InFloat64(graph.module, {id(tensor) for tensor in kept}).run(*args, enable_io_processing=False)
        else:
            found = graph.module(*args)
        found = pytree.tree_map(_copied, found) if kept else found  # an output may be the state itself
    return [*pytree.tree_leaves(found, is_leaf=lambda leaf: leaf is None), *args]


@contextmanager
def state_kept(graph: Captured) -> Iterator[list[torch.Tensor]]:
    """Inside, the graph may be run; after, what it writes of its own is as before. Yields those tensors."""
    where = storages(graph)
    bases = {base for node in graph.module.graph.nodes for target in written_arguments(node) for base in where[target]}
    found = [attribute(graph.module, str(base.target)) for base in bases if base.op == "get_attr"]
    kept = [(tensor, tensor.detach().clone()) for tensor in found if isinstance(tensor, torch.Tensor)]
    try:
        yield [tensor for tensor, _ in kept]
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)


class InFloat64(fx.Interpreter):
    """Runs a graph with every floating value, weight and dtype argument in float64."""

    def __init__(self, module: fx.GraphModule, written: set[int]) -> None:
        super().__init__(module)
        self.written = written  # ids of attributes the graph writes: those are cast once, the others wherever they are used

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = attribute(self.module, str(target))
        return _wider(value.clone()) if id(value) in self.written else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(_wider, (args, kwargs))
        return super().call_function(target, args, kwargs)


def _wider(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def relative_error(found: Any, reference: Any) -> float:
    """The largest difference over the largest magnitude of the reference; for whole numbers the share that differs. Infinities must
    have the same sign, and NaN must stand where NaN stood."""
    if not isinstance(reference, torch.Tensor) or not isinstance(found, torch.Tensor):
        return 0.0 if _plain(found) == _plain(reference) else float("inf")
    if found.shape != reference.shape:
        return float("inf")
    if not reference.numel():
        return 0.0
    if not (reference.is_floating_point() or reference.is_complex()):
        return float((found != reference).double().mean())
    wide = torch.complex128 if reference.is_complex() else torch.float64
    ours, theirs = found.to(wide), reference.to(wide)
    finite = torch.isfinite(theirs)
    if not torch.equal(torch.isfinite(ours), finite) or not _same_beyond(ours[~finite], theirs[~finite]):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    difference, scale = (ours - theirs)[finite].abs().max(), theirs[finite].abs().max()
    return float(difference / scale) if scale > 0 else float(difference)


def _same_beyond(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether values that are not finite are the same ones."""
    if theirs.is_complex():
        ours, theirs = torch.view_as_real(ours), torch.view_as_real(theirs)
    beyond = ~torch.isfinite(theirs)
    return bool(torch.isclose(ours[beyond], theirs[beyond], equal_nan=True).all())


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


@dataclass(frozen=True, slots=True)
class Trial:
    """One fresh input and what the original made of it."""

    batch: int
    inputs: tuple[torch.Tensor, ...]
    reference: list[Any]
    own_error: list[float]
    dtypes: list[torch.dtype | None]


@dataclass(frozen=True, slots=True)
class Checker:
    """The original's answers, kept to compare every later graph with."""

    trials: list[Trial]
    allowed: list[float]  # for each output

    @classmethod
    def of(cls, graph: Captured, *, seed: int = 1234) -> Checker:
        """Run the graph as it is now on fresh inputs, at the example's batch and at another where that is open."""
        own = working_dtype(graph)
        batches = (graph.batch, graph.batch + 1) if graph.batch_dynamic else (graph.batch,)
        trials = [_trial(graph, own, batch, seed + batch) for batch in batches]
        return cls(trials, [_allowed(own, errors) for errors in zip(*(trial.own_error for trial in trials), strict=True)])

    def check(self, graph: Captured, name: str) -> float:
        """The largest error of any output; PassError names the pass where one is too large."""
        worst = 0.0
        for trial in self.trials:
            try:
                found = reference_run(graph, trial.inputs)
            except Exception as error:
                raise PassError(
                    f"the graph does not run after pass {name!r} (batch {trial.batch})",
                    why=f"{type(error).__name__}: {error}",
                    do=f"run without it and report it: passes other than {name!r} are not affected",
                ) from error
            worst = max(worst, compare(found, trial, self.allowed, name))
        return worst


def compare(found: list[Any], trial: Trial, allowed: list[float], name: str) -> float:
    """The largest error of one run's outputs against a trial's reference."""
    outputs = len(trial.reference) - len(trial.inputs)
    if len(found) != len(trial.reference):
        raise _wrong(name, f"{len(found) - len(trial.inputs)} outputs", f"the original has {outputs}")
    worst = 0.0
    for position, (ours, reference, dtype) in enumerate(zip(found, trial.reference, trial.dtypes, strict=True)):
        label = f"output {position}" if position < outputs else f"input {position - outputs}, written by the graph,"
        if isinstance(ours, torch.Tensor) and ours.dtype != dtype:
            raise _wrong(name, f"{label} is {ours.dtype}", f"the original's is {dtype}")
        error = relative_error(ours, reference)
        if not error <= allowed[position]:
            raise _wrong(
                name,
                f"{label} is off by {error:.2e} of its largest value at batch {trial.batch}",
                f"the tolerance is {allowed[position]:.2e}, the original's own rounding {trial.own_error[position]:.2e}",
            )
        worst = max(worst, error)
    return worst


def _wrong(name: str, what: str, why: str) -> PassError:
    return PassError(f"pass {name!r} changed the answers: {what}", why=why, do=f"leave {name!r} out of passes, and report the model")


def _trial(graph: Captured, own: torch.dtype, batch: int, seed: int) -> Trial:
    """One fresh input, run in the graph's own dtype and in float64."""
    inputs = fresh_inputs(graph, batch, seed)
    plain = reference_run(graph, inputs)
    dtypes = [value.dtype if isinstance(value, torch.Tensor) else None for value in plain]
    if own == torch.float64:
        return Trial(batch, inputs, plain, [0.0] * len(plain), dtypes)
    high = None
    if not any(is_random(node) for node in graph.module.graph.nodes):
        try:
            high = reference_run(graph, inputs, high=True)
        except Exception:  # an op without a float64 form: the own-dtype run is the reference
            high = None
    errors = [relative_error(ours, wide) for ours, wide in zip(plain, high, strict=True)] if high is not None else []
    if high is None or any(error > 0.1 for error in errors):
        return Trial(batch, inputs, copy.copy(plain), [float("nan")] * len(plain), dtypes)
    return Trial(batch, inputs, high, errors, dtypes)


def _allowed(own: torch.dtype, errors: tuple[float, ...]) -> float:
    """The tolerance of one output from the original's own errors at each input; NaN says there was no float64 run."""
    if own == torch.float64:
        return FLOAT64_TOLERANCE
    eps = max(torch.finfo(own).eps, SMALLEST_EPS)
    if any(error != error for error in errors):
        return min(100 * torch.finfo(own).eps, 5e-2)
    return 2 * max(errors) + eps
