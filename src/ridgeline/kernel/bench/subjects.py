"""The functions of one row, ready to be called by number of input set: ours, eager, torch.compile and the peers.

    Subjects(wanted, device) ──> sets: K tuples of inputs
      step(function)(i): forward   held[i] = function(*sets[i])
                         backward  held[i] = autograd.grad(function(*sets[i]), inputs that require one, fixed random gradients)
    errors(…) ──> relative norm of ours and of eager against float64, on one more input set

All share the sets and the ring of results. A peer may write to its inputs (Liger's cross-entropy leaves its gradient in the
logits): times do not depend on the values, and errors are computed before, on a set of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..case import Function, Inputs
from .rows import Wanted
from .timing import Step, set_count

EXACT_BYTES = 12e9
SEED = 20240501


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those in a tensor, or in nested tuples and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors(item)


class Subjects:
    """Inputs of one row, and steps over them."""

    def __init__(self, wanted: Wanted, device: str) -> None:
        self.wanted, self.device = wanted, device
        with torch.random.fork_rng(devices=[torch.device(device)] if device.startswith("cuda") else []):
            torch.manual_seed(SEED)
            first = self._make()
            stored = sum(one.untyped_storage().nbytes() for one in tensors(first))
            self.bytes = wanted.case.moved(first, wanted.backward)
            # of a quantised op's inputs the kernel does not read the weight torch gets, so what it moves decides
            count = set_count(min(stored, wanted.case.moved(first, False)), stored, device)
            self.sets: list[Inputs] = [first, *(self._make() for _ in range(count - 1))]
        self.flops = wanted.case.flops(first, wanted.backward) if wanted.case.flops else 0
        self.held: list[Any] = [None] * count
        self._gradients: dict[Any, list[tuple[torch.Tensor, ...]]] = {}

    def _make(self) -> Inputs:
        return self.wanted.case.make(self.wanted.shape, self.wanted.dtype, self.device)

    def step(self, function: Function) -> Step:
        """One call over set i, as it is timed."""
        sets, held = self.sets, self.held
        if not self.wanted.backward:

            def forward(i: int) -> None:
                held[i] = function(*sets[i])

            return forward
        inputs = [wanting_gradient(one) for one in sets]
        fixed: list[tuple[torch.Tensor, ...]] = []

        def both(i: int) -> None:
            out = function(*sets[i])
            outputs = (out,) if isinstance(out, torch.Tensor) else wanting_gradient(out)
            if not fixed:
                fixed.extend(self.gradients(outputs))
            held[i] = torch.autograd.grad(outputs, inputs[i], fixed[i])

        return both

    def gradients(self, outputs: tuple[torch.Tensor, ...]) -> list[tuple[torch.Tensor, ...]]:
        """Random gradients of these outputs, one tuple a set; shared by functions whose outputs look the same."""
        look = tuple((tuple(one.shape), one.stride(), one.dtype) for one in outputs)
        if look not in self._gradients:
            self._gradients[look] = [tuple(torch.randn_like(one) for one in outputs) for _ in self.sets]
        return self._gradients[look]

    def written_bytes(self) -> int:
        """Of the results last held."""
        return max((sum(one.nbytes for one in tensors(result)) for result in self.held if result is not None), default=0)

    def functions(self, *, compiled: bool, peers: bool) -> tuple[dict[str, Function], dict[str, BaseException]]:
        """(by name, those that could not be had and why); a peer that is not installed is neither."""
        case = self.wanted.case
        found: dict[str, Function] = {"ours": case.ours, "eager": case.plain}
        failures: dict[str, BaseException] = {}
        if compiled:
            try:
                found["compile"] = freshly_compiled(case.plain)
            except Exception as error:
                failures["compile"] = error
        for name, load in case.peers.items() if peers else ():
            try:
                found[name] = load()
            except ImportError:
                continue
            except Exception as error:
                failures[name] = error
        return found, failures


def wanting_gradient(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(one for one in tensors(value) if one.requires_grad)


def freshly_compiled(function: Function) -> Function:
    """torch.compile with nothing left of earlier rows: no dynamic shapes learnt, no limit of recompilations near."""
    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(lambda *inputs: function(*inputs), dynamic=False)
    return compiled


def errors(subjects: Subjects) -> tuple[float | None, float | None]:
    """(ours, eager) against float64; None where it would take too much memory, or nothing floating-point comes out."""
    case, backward = subjects.wanted.case, subjects.wanted.backward
    with torch.random.fork_rng(devices=[torch.device(subjects.device)] if subjects.device.startswith("cuda") else []):
        torch.manual_seed(SEED + 1)
        inputs = subjects._make()
    elements = sum(one.numel() for one in tensors(inputs) if one.is_floating_point())
    if elements * 8 * (8 if backward else 4) > EXACT_BYTES:  # inputs, results, what lies between, and as much again for gradients
        return None, None
    with torch.set_grad_enabled(backward):
        exact, gradients = _results(case.exact or case.plain, _doubled(inputs) if backward or not case.exact else inputs, backward, None)
        pair = []
        for function in (case.ours, case.plain):
            results, _ = _results(function, inputs, backward, gradients)
            pair.append(_relative(results, exact))
    return pair[0], pair[1]


def _doubled(value: Any) -> Any:
    """float64 copies of the floating-point tensors, leaves like the originals."""
    if isinstance(value, torch.Tensor):
        return value.detach().double().requires_grad_(value.requires_grad) if value.is_floating_point() else value
    return type(value)(map(_doubled, value)) if isinstance(value, tuple | list) else value


Tensors = tuple[torch.Tensor, ...]


def _results(function: Function, inputs: Inputs, backward: bool, gradients: Tensors | None) -> tuple[Tensors, Tensors | None]:
    """(outputs, or the gradients of the inputs; the outputs' gradients they come from)."""
    out = function(*inputs)
    if not backward:
        return tuple(tensors(out)), None
    outputs = wanting_gradient(out)
    # drawn in float32 and rounded to bfloat16: the same value in every dtype
    given = gradients or tuple(torch.randn(one.shape, device=one.device).bfloat16().to(one.dtype) for one in outputs)
    matching = tuple(one.to(output.dtype) for one, output in zip(given, outputs, strict=True))
    return torch.autograd.grad(outputs, wanting_gradient(inputs), matching), given


def _relative(results: Tensors, exact: Tensors) -> float | None:
    worst = None
    for ours, true in zip(results, exact, strict=True):
        if ours.is_floating_point() and true.is_floating_point() and ours.numel():
            gap = float((ours.double() - true.double()).norm() / true.double().norm().clamp_min(1e-30))
            worst = gap if worst is None or not gap <= worst else worst
    return worst if worst is None or math.isfinite(worst) else math.inf
