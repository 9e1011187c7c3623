"""Two models measured side by side: what a step took away and what it cost.

    before, Done(model) ──> State (bytes on disk, parameters, non-zeros, peak memory, quality) of each
                        ──> latency, the two in alternation (A B B A), so that what drifts hits both
                        ──> Change

Bytes are those of the file save_model would write. A packed layer counts the parameters it stands for (`logical_parameters()`), not
its bytes. Latency and memory are of one pass over `context.inputs`, or one sample of the data where no inputs are given.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..core.change import Change, State
from ..core.profile import Timing
from ..core.timing import collect_samples
from ..measure.ab import AbResult, ab
from ..measure.memory import measured_peak_bytes
from ..measure.subject import evaluating
from ..train.evaluate import as_model, device_of, evaluate
from ..workload.case import ModelCase
from .saved import stored_bytes
from .step import Context, Done

LEAST_ROUNDS, MOST_ROUNDS = 7, 60  # of four passes each
BUDGET_S = 3.0  # for the rounds


def change_between(
    before_model: nn.Module, done: Done, settings: Mapping[str, Any], context: Context, *, before: State | None = None
) -> Change:
    """The Change from one model to what a step made of it; `before` is the first one's State where it is known already."""
    context.report(f"measuring {done.name}")
    first = before if before is not None else state_of(before_model, context)
    second = state_of(done.model, context)
    timing = timed(before_model, done.model, context)
    notes = done.notes
    if timing is None:
        notes = (*notes, "latency was not measured: " + ("not asked for" if not context.latency else "no example inputs"))
    else:
        first = dataclasses.replace(first, latency=timing.a)
        second = dataclasses.replace(second, latency=timing.b)
    return Change(
        done.name,
        context.name,
        str(device_of(before_model)),
        first,
        second,
        settings=settings,
        target_sparsity=done.target_sparsity,
        speedup_interval=speedup_interval(timing),
        storage_only=done.storage_only,
        notes=notes,
        details=done.details,
    )


def state_of(model: nn.Module, context: Context) -> State:
    """Everything but the latency, which is only worth something beside another's."""
    parameters, nonzero = count_parameters(model)
    with evaluating(model):
        quality = dict(_quality(model, context))
        peak = _peak(model, context)
    return State(stored_bytes(model), parameters, nonzero, None, peak, quality)


def _quality(model: nn.Module, context: Context) -> Mapping[str, float]:
    """The user's scores, else those that suit the data, else none."""
    if context.quality is not None:
        return context.quality(model)
    if context.data is None:
        return {}
    scores = evaluate(model, context.data)
    return {"perplexity": scores.perplexity} if context.data.kind == "tokens" else {"accuracy": scores.accuracy, "loss": scores.loss}


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(parameters, those that are not zero); shared ones once, packed ones as many as they stand for."""
    seen: set[int] = set()

    def count(module: nn.Module) -> tuple[int, int]:
        if id(module) in seen:
            return 0, 0
        seen.add(id(module))
        logical = getattr(module, "logical_parameters", None)
        if callable(logical):
            total = int(logical())
            nonzero = getattr(module, "logical_nonzeros", None)
            packed, shape = getattr(module, "packed", None), getattr(module, "shape", None)
            if isinstance(packed, Tensor) and isinstance(shape, torch.Size):
                if id(packed) in seen:  # one table for input and output
                    total -= shape.numel()
                seen.add(id(packed))
            return total, int(nonzero()) if callable(nonzero) else total
        total = nonzeros = 0
        for tensor in module.parameters(recurse=False):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                total += tensor.numel()
                nonzeros += int(torch.count_nonzero(tensor))
        for child in module.children():
            inner = count(child)
            total, nonzeros = total + inner[0], nonzeros + inner[1]
        return total, nonzeros

    return count(model)


def speedup_interval(timing: AbResult | None) -> tuple[float, float] | None:
    """95 % interval of a's time over b's."""
    return None if timing is None else (1.0 / timing.high, 1.0 / timing.low)


def latencies(a: nn.Module, b: nn.Module, context: Context) -> tuple[Timing, Timing] | None:
    """Median seconds of one pass of each; see `timed`."""
    found = timed(a, b, context)
    return None if found is None else (found.a, found.b)


def timed(a: nn.Module, b: nn.Module, context: Context) -> AbResult | None:
    """One pass of each, taken in alternation; None where there is nothing to run or nobody asked."""
    if not context.latency or example_inputs(a, context) is None:
        return None
    device = str(device_of(a))
    with evaluating(a), evaluating(b):
        first, second = _pass(a, context), _pass(b, context)
        once_s = sum(collect_samples(one, device=device, warmup=1, min_repeats=1, max_repeats=1)[0] for one in (first, second))
        rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(BUDGET_S / (2 * max(once_s, 1e-6)))))
        return ab(first, second, rounds=rounds, device=device)


def _pass(model: nn.Module, context: Context) -> Callable[[], None]:
    inputs = example_inputs(model, context) or ()
    with torch.no_grad():  # not inference mode: what a layer builds on its first call must serve training too
        model(*inputs)

    def call() -> None:
        with torch.inference_mode():
            model(*inputs)

    return call


def example_inputs(model: nn.Module, context: Context) -> tuple[Any, ...] | None:
    """The arguments of one pass on the model's device, or None where the context has neither inputs nor data."""
    device = device_of(model)
    inputs = context.inputs
    if inputs is None and context.data is not None:
        sample = context.data.prepare(context.data.test.inputs[:1])
        takes_positions = "positions" in inspect.signature(type(model).forward).parameters
        inputs = (sample, torch.arange(sample.shape[1])) if takes_positions else (sample,)
    if inputs is None:
        return None
    moved: tuple[Any, ...] = tree_map_only(Tensor, lambda tensor: as_model(model, tensor.to(device)), tuple(inputs))
    return moved


def _peak(model: nn.Module, context: Context) -> int | None:
    inputs = example_inputs(model, context)
    if inputs is None:
        return None
    device = device_of(model)
    with torch.no_grad():
        model(*inputs)  # layouts that kernels build at their first call belong to the weights, not to the pass
    return measured_peak_bytes(ModelCase(context.name, model, inputs, 1, "float32"), device)
