"""Patterns of several torch calls that one kernel does, found in a model's modules.

    gated perceptron   down(silu(gate(x)) · up(x))            ──> down(swiglu(gate(x), up(x)))
    RMS norm by hand   w · x / sqrt(mean x² + eps)            ──> rms_norm(x, w, eps)
    rotary positions   apply_rotary_pos_emb(q, k, cos, sin)   ──> rope(q, k, cos, sin), both in one launch
    norm, activation   side by side in an nn.Sequential       ──> normed(x, norm, activation), see batch_norm.py

A module is matched by its parts and then *asked*: its own forward and the formula run on a few random numbers, and only where both
agree to rounding is it changed. Its parts are looked up at each call, so they may be exchanged. In eager only: torch.compile fuses
these by itself, and does so as well as we do. Models that call `workload.models.decoder.rotate`, `gated` and `normed` are covered
without being changed: those announce themselves to function modes.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..workload.models.decoder import gated, rotate
from ..workload.models.normed import normed
from .batch_norm import FOLLOWERS, NORMS
from .replace import Replaced, overridden, plain, replaces, worth
from .rms_norm import rms_norm
from .rope import rope, rope_one
from .softmax import columns_kind
from .swiglu import swiglu

Undo = Callable[[], None]
PROBES = 3
ROTARY = "apply_rotary_pos_emb"


@replaces("swiglu", gated)
def _gated(gate: Tensor, up: Tensor) -> Any:
    return swiglu(gate, up) if worth("swiglu", gate, gate.numel()) else NotImplemented


@replaces("rope", rotate)
def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Any:
    if cos.dim() != 2 or x.dim() != 4 or not worth("rope", x, x.numel()):
        return NotImplemented
    return rope_one(x, cos, sin, signed=True, seq_dim=2)


def fuse_(model: nn.Module, replaced: Counter[str]) -> list[Undo]:
    """Change what matches, in place; returns how to put it back."""
    undo: list[Undo] = []
    for module in list(model.modules()):
        if overridden(module):
            continue
        for match in (GatedForward.match, NormForward.match):
            found = match(module, replaced)
            if found is not None and _agrees(module, found.formula):
                undo.append(found.put())
                break
    return undo + _sequences(model) + _rotary(model, replaced)


def _agrees(module: nn.Module, formula: Callable[[Tensor], Tensor]) -> bool:
    """Whether the module's own forward and the formula give the same on random numbers."""
    weight = next(iter(module.parameters()))
    if weight.is_meta or not weight.is_floating_point():
        return False
    width = weight.shape[-1]
    with torch.no_grad(), torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
        x = torch.randn(PROBES, width, device=weight.device, dtype=weight.dtype)
        try:
            own, ours = module.forward(x), formula(x)
        except Exception:  # the module needs something else than one tensor: leave it
            return False
    tolerance = 8 * torch.finfo(weight.dtype).eps
    return bool(own.shape == ours.shape and own.dtype == ours.dtype and torch.allclose(own, ours, rtol=tolerance, atol=tolerance))


class Fused(Replaced):
    """A module's forward of one tensor, with a kernel of ours in it, which computes `formula`."""

    def __init__(self, module: nn.Module, replaced: Counter[str]) -> None:
        super().__init__(module)
        self.replaced = replaced

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or torch.compiler.is_compiling():
            return self.before(*args, **kwargs)
        return self.fused(args[0])

    def fused(self, x: Any) -> Any:
        """Eager, with the kernel where it is worth it."""
        raise NotImplementedError

    def formula(self, x: Tensor) -> Tensor:
        """In plain torch."""
        raise NotImplementedError


class GatedForward(Fused):
    """Of a gated perceptron."""

    def __init__(self, module: nn.Module, replaced: Counter[str]) -> None:
        super().__init__(module, replaced)
        self.activation = _activation(module)

    @classmethod
    def match(cls, module: nn.Module, replaced: Counter[str]) -> GatedForward | None:
        layers = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        others = set(dict(module.named_children())) - {"gate_proj", "up_proj", "down_proj", "act_fn"}
        return None if others or not all(isinstance(layer, nn.Linear) for layer in layers) else cls(module, replaced)

    def fused(self, x: Any) -> Any:
        module = self.holder
        if _activation(module) is not self.activation:  # exchanged since the module was asked
            return self.before(x)
        gate, up = module.gate_proj(x), module.up_proj(x)
        if not worth("swiglu", gate, gate.numel()) or not plain((gate, up)):
            return module.down_proj(nn.functional.silu(gate) * up)
        self.replaced["swiglu"] += 1
        return module.down_proj(swiglu(gate, up))

    def formula(self, x: Tensor) -> Tensor:
        module = self.holder
        return module.down_proj(nn.functional.silu(module.gate_proj(x)) * module.up_proj(x))  # type: ignore[no-any-return]


def _activation(module: nn.Module) -> Any:
    """The `act_fn` of a gated perceptron, a module or a function; None: it needs none."""
    return module._modules.get("act_fn") or vars(module).get("act_fn")


class NormForward(Fused):
    """Of an RMS norm written by hand."""

    def __init__(self, module: nn.Module, replaced: Counter[str]) -> None:
        super().__init__(module, replaced)
        self.eps = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"

    @classmethod
    def match(cls, module: nn.Module, replaced: Counter[str]) -> NormForward | None:
        weight, eps = (getattr(module, name, None) for name in ("weight", "eps"))
        eps = getattr(module, "variance_epsilon", eps)
        if isinstance(module, nn.RMSNorm) or not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float):
            return None
        return None if "rms" not in type(module).__name__.lower() or list(module.children()) else cls(module, replaced)

    def fused(self, x: Any) -> Any:
        weight = self.holder.weight
        usable = plain((x, weight)) and x.dtype == weight.dtype and x.shape[-1:] == weight.shape
        if not usable or not worth("rms_norm", x, x.numel(), columns_kind(x.shape[-1])):
            return self.before(x)
        self.replaced["rms_norm"] += 1
        return rms_norm(x, weight, getattr(self.holder, self.eps))

    def formula(self, x: Tensor) -> Tensor:
        weight, eps = self.holder.weight, getattr(self.holder, self.eps)
        return nn.functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


class SequenceForward(Replaced):
    """Of an nn.Sequential with a batch norm and an activation side by side; its modules stay as they are."""

    def run(self, input: Any) -> Any:
        rest = deque(self.holder)
        while rest:
            first = rest.popleft()
            input = normed(input, first, rest.popleft()) if rest and _follows(first, rest[0]) else first(input)
        return input


def _sequences(model: nn.Module) -> list[Undo]:
    found = [module for module in model.modules() if type(module) is nn.Sequential and not overridden(module)]
    return [SequenceForward(module).put() for module in found if any(_follows(*pair) for pair in pairwise(module))]


def _follows(norm: nn.Module, activation: nn.Module) -> bool:
    return type(norm) in NORMS and type(activation) in FOLLOWERS


class Rotary(Replaced):
    """`apply_rotary_pos_emb` as transformers' model files call it: a function of the file, so changed for all models of that file."""

    def __init__(self, file: ModuleType, replaced: Counter[str]) -> None:
        super().__init__(file, ROTARY)
        self.replaced = replaced

    def run(self, q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        usual = not args and not kwargs and not torch.compiler.is_compiling() and plain((q, k, cos, sin))
        if not usual or q.dim() != 4 or cos.dim() != 3 or cos.shape[0] != 1 or not worth("rope", q, q.numel() + k.numel()):
            return self.before(q, k, cos, sin, *args, **kwargs)
        self.replaced["rope"] += 1
        return rope(q, k, cos[0], sin[0], seq_dim=2)


def _rotary(model: nn.Module, replaced: Counter[str]) -> list[Undo]:
    files = {sys.modules[type(module).__module__] for module in model.modules() if type(module).__module__ in sys.modules}
    return [Rotary(file, replaced).put() for file in files if file.__name__.startswith("transformers.") and hasattr(file, ROTARY)]
