"""Operators of the `ridgeline` namespace: one schema, four implementations, no overhead that can be avoided.

    operator(schema, launch=…, reference=…, fake=…, setup=…, backward=…)
      CUDA      launch       the Triton kernels
      CPU       reference    plain torch, also the oracle's formula; with TRITON_INTERPRET=1 the Triton kernels, interpreted
      Meta      fake         shapes and dtypes, so that torch.compile and torch.export trace through
      Autograd  setup saves what `backward` needs, as in torch.autograd.Function; without them the operator has no gradient

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
) -> Any:
    """Define and register an operator; returns a function that calls it, with the overload as an attribute."""
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
    if setup is not None and backward is not None:
        _library.impl(name, _autograd(name, overload, setup, backward), "Autograd")
    return _caller(overload, on_device)


def _caller(overload: Any, launch: Implementation) -> Any:
    """Calls `launch` itself where nobody else could want to see the call: plain CUDA tensors, no gradient, no mode, no transform.

    The way through the dispatcher and back into Python costs as much as the launch. `.overload` is the operator proper.
    """
    plain, compiling, gradients = torch.Tensor, torch.compiler.is_compiling, torch.is_grad_enabled
    needs_gradient, dispatch_modes = torch._C._any_requires_grad, torch._C._len_torch_dispatch_stack
    function_modes, transforms = torch._C._len_torch_function_stack, torch._C._functorch.peek_interpreter_stack

    def call(*args: Any) -> Any:
        if compiling():
            return overload(*args)
        first = args[0]
        if (
            HAVE_TRITON and type(first) is plain and first.is_cuda and not (gradients() and needs_gradient(*args))
            and not dispatch_modes() and not function_modes() and transforms() is None
        ):  # fmt: skip
            return launch(*args)
        return overload(*args)

    call.overload = overload  # type: ignore[attr-defined]
    return call


def _on_its_device(launch: Implementation) -> Implementation:
    """Launch on the device of the first argument, a tensor, which need not be the current one."""

    def launched(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if first.get_device() == torch.cuda.current_device():
            return launch(first, *args, **kwargs)
        with torch.cuda.device(first.device):
            return launch(first, *args, **kwargs)

    return launched


def _autograd(name: str, overload: Any, setup: Any, backward: Any) -> Implementation:
    below = torch._C._AutoDispatchBelowAutograd
    needs_gradient = torch._C._any_requires_grad

    def forward(ctx: Any, *args: Any) -> Any:
        with below():
            output = overload(*args)
        setup(ctx, args, output)
        return output

    function = type(f"{name}_function", (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})

    def entry(*args: Any) -> Any:
        if torch.is_grad_enabled() and needs_gradient(*args):
            return function.apply(*args)  # type: ignore[attr-defined]
        with below():
            return overload(*args)

    return entry
