"""Operators of the `ridgeline` namespace: one schema, four implementations, no overhead that can be avoided.

    operator(schema, launch=…, reference=…, fake=…, setup=…, backward=…)
      CUDA      launch       the Triton kernels
      CPU       reference    plain torch, also the oracle's formula; with TRITON_INTERPRET=1 the Triton kernels, interpreted
      Meta      fake         shapes and dtypes, so that torch.compile and torch.export trace through
      Autograd  setup saves what `backward` needs, as in torch.autograd.Function; without them the operator has no gradient

A gradient that is an operator itself, <name>_backward, under create_graph: the reference, recorded by autograd, where `twice` says that it
can be; else a result that raises when it is differentiated. A gradient made of operators and of torch needs neither.

Registered with torch.library's low-level `define` and `impl`: `custom_op` costs 10 µs more a call. What `operator` returns goes
through the dispatcher only where someone may be listening there; see `_caller`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .jit import HAVE_TRITON, INTERPRETED

NAMESPACE = "ridgeline"
_library = torch.library.Library(NAMESPACE, "DEF")

Implementation = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Operator:
    """What is known of one operator; call `torch.ops.ridgeline.<name>` or what `operator` returned."""

    name: str
    schema: str
    launch: Implementation
    reference: Implementation
    fake: Implementation
    differentiable: bool
    deterministic: bool
    """Bitwise the same on every run."""


OPERATORS: dict[str, Operator] = {}


def operator(
    schema: str,
    *,
    launch: Implementation,
    reference: Implementation,
    fake: Implementation,
    setup: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    backward: Callable[..., Any] | None = None,
    deterministic: bool = True,
    twice: bool = False,
) -> Any:
    """Define and register an operator; returns a function that calls it, with the overload as an attribute.

    twice: of a <name>_backward, that `reference` is plain torch and depends on nothing but its arguments.
    """
    name = schema.partition("(")[0]
    if name in OPERATORS:
        raise ValueError(f"operator {name} is defined twice")
    OPERATORS[name] = Operator(name, schema, launch, reference, fake, backward is not None, deterministic)
    _library.define(schema)
    on_device = _on_its_device(launch)
    _library.impl(name, on_device if HAVE_TRITON else reference, "CUDA")
    _library.impl(name, launch if INTERPRETED else reference, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    function = None
    if setup is not None and backward is not None:
        function = _function(name, overload, on_device, setup, backward)
        _library.impl(name, _autograd(overload, function.apply), "Autograd")
    elif name.endswith("_backward"):
        _library.impl(name, _autograd(overload, reference if twice else _once(name, overload)), "Autograd")
    return _caller(overload, on_device, function)


def _unseen(first: Any) -> bool:
    """Whether nobody else could want to see a call: a plain tensor that kernels run on, no dispatch mode, no transform."""
    return (
        HAVE_TRITON and type(first) is torch.Tensor and (first.is_cuda or INTERPRETED)
        and not torch._C._len_torch_dispatch_stack() and torch._C._functorch.peek_interpreter_stack() is None
    )  # fmt: skip


def without_gradient(first: Any, *rest: torch.Tensor | None) -> bool:
    """Whether a function may skip what only a gradient, or somebody who listens, would need of its operator."""
    if torch.compiler.is_compiling() or torch._C._len_torch_function_stack() or not _unseen(first):
        return False
    if not INTERPRETED and first.get_device() != torch._C._cuda_getDevice():
        return False
    return not (torch.is_grad_enabled() and (first.requires_grad or any([x is not None and x.requires_grad for x in rest])))


def _caller(overload: Any, launch: Implementation, function: Any) -> Any:
    """Calls `launch`, or the autograd function, itself where nobody is listening; `.overload` is the operator proper.

    The way through the dispatcher and back into Python costs as much as the launch.
    """
    # What torch.autograd.Function.apply does before this one is for functorch transforms, of which there are none.
    apply = None if function is None else super(torch.autograd.Function, function).apply

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._len_torch_function_stack() or not _unseen(args[0]):
            return overload(*args)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return overload(*args) if apply is None else apply(*args)
        return launch(*args)

    call.overload = overload  # type: ignore[attr-defined]
    return call


def _on_its_device(launch: Implementation) -> Implementation:
    """Launch on the device of the first argument, a tensor, which need not be the current one."""
    if INTERPRETED:
        return launch

    def launched(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if first.get_device() == torch._C._cuda_getDevice():
            return launch(first, *args, **kwargs)
        with torch.cuda.device(first.device):
            return launch(first, *args, **kwargs)

    return launched


def _function(name: str, overload: Any, launch: Implementation, setup: Any, backward: Any) -> Any:
    """The torch.autograd.Function of an operator."""

    def forward(ctx: Any, *args: Any) -> Any:
        if _unseen(args[0]):
            output = launch(*args)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                output = overload(*args)
        setup(ctx, args, output)
        return output

    return type(f"{name}_function", (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


def _autograd(overload: Any, recorded: Implementation) -> Implementation:
    """What the dispatcher calls: tracing, transforms, and calls of torch.ops.ridgeline itself come this way."""

    def entry(*args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return recorded(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    return entry


def _once(name: str, overload: Any) -> Implementation:
    """The gradients that an operator finds, each raising when it is differentiated."""

    def found(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            gradients = overload(*args)
        sources = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if isinstance(gradients, torch.Tensor):
            return not_again(name.removesuffix("_backward"), gradients, *sources)
        return tuple(not_again(name.removesuffix("_backward"), gradient, *sources) for gradient in gradients)

    return found


class _NotAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, gradient: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.name = name
        return gradient.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError(
            f"the gradient of {NAMESPACE}'s {ctx.name} is differentiated\n  why: it is not twice differentiable\n"
            f"  do:  use torch's own operator where gradients are made with create_graph=True"
        )


def not_again(name: str, gradient: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
    """A gradient of operator `name` that was made of `sources`; to differentiate it with respect to them raises."""
    result: torch.Tensor = _NotAgain.apply(name, gradient, *sources)  # type: ignore[no-untyped-call]
    return result
