"""Patterns of several torch calls that one kernel does, found in a model's modules.

    gated perceptron   down(silu(gate(x)) · up(x))            ──> down(swiglu(gate(x), up(x)))
    RMS norm by hand   w · x / sqrt(mean x² + eps)            ──> rms_norm(x, w, eps)
    rotary positions   apply_rotary_pos_emb(q, k, cos, sin)   ──> rope(q, k, cos, sin), both in one launch
    norm, activation   side by side in an nn.Sequential       ──> normed(x, norm, activation), see batch_norm.py

A module is matched by its parts and then *asked*: its own forward and the formula run on a few random numbers, and only where both
agree to rounding is it changed. In eager only: torch.compile fuses these by itself, and does so as well as we do. Models that call
`workload.models.decoder.rotate`, `gated` and `normed` are covered without being changed: those announce themselves to function modes.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..workload.models.decoder import gated, rotate
from ..workload.models.normed import normed
from .batch_norm import FOLLOWERS, NORMS
from .replace import replaces, worth
from .rms_norm import rms_norm
from .rope import rope, rope_one
from .softmax import columns_kind
from .swiglu import swiglu

Undo = Callable[[], None]
PROBES = 3


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
        for match in (_gated_perceptron, _rms_norm):
            found = match(module, replaced)
            if found is not None and "forward" not in vars(module) and _agrees(module, found.formula):
                module.forward = found.forward
                undo.append(lambda module=module: delattr(module, "forward"))  # type: ignore[misc]
                break
    return undo + _sequences(model) + _rotary(model, replaced)


class Match(NamedTuple):
    """A pattern found in a module: what its forward becomes, and what the kernel in it computes, in plain torch."""

    forward: Callable[[Tensor], Tensor]
    formula: Callable[[Tensor], Tensor]


def _agrees(module: nn.Module, formula: Callable[[Tensor], Tensor]) -> bool:
    """Whether the module's own forward and the formula give the same on random numbers."""
    weight = next(iter(module.parameters()))
    if weight.is_meta:
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


def _gated_perceptron(module: nn.Module, replaced: Counter[str]) -> Match | None:
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    others = set(dict(module.named_children())) - {"gate_proj", "up_proj", "down_proj", "act_fn"}
    if not (isinstance(gate, nn.Linear) and isinstance(up, nn.Linear) and isinstance(down, nn.Linear)) or others:
        return None

    def forward(x: Tensor) -> Tensor:
        left, right = gate(x), up(x)
        if not torch.compiler.is_compiling() and worth("swiglu", left, left.numel()):
            replaced["swiglu"] += 1
            return down(swiglu(left, right))  # type: ignore[no-any-return]
        return down(nn.functional.silu(left) * right)  # type: ignore[no-any-return]

    return Match(forward, lambda x: down(nn.functional.silu(gate(x)) * up(x)))


def _rms_norm(module: nn.Module, replaced: Counter[str]) -> Match | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if isinstance(module, nn.RMSNorm) or not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if "rms" not in type(module).__name__.lower() or list(module.children()):
        return None
    own = type(module).forward

    def forward(x: Tensor) -> Tensor:
        if x.dtype == weight.dtype and not torch.compiler.is_compiling() and worth("rms_norm", x, x.numel(), columns_kind(x.shape[-1])):
            replaced["rms_norm"] += 1
            return rms_norm(x, weight, eps)
        return own(module, x)  # type: ignore[no-any-return]

    def formula(x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)

    return Match(forward, formula)


def _sequences(model: nn.Module) -> list[Undo]:
    """Every nn.Sequential with a batch norm and an activation side by side; its modules stay as they are."""
    undo: list[Undo] = []
    for module in model.modules():
        if type(module) is not nn.Sequential or "forward" in vars(module) or not any(_follows(*pair) for pair in pairwise(module)):
            continue

        def forward(x: Tensor, sequence: nn.Sequential = module) -> Tensor:
            rest = deque(sequence)
            while rest:
                first = rest.popleft()
                x = normed(x, first, rest.popleft()) if rest and _follows(first, rest[0]) else first(x)
            return x

        module.forward = forward  # type: ignore[method-assign]
        undo.append(lambda module=module: delattr(module, "forward"))  # type: ignore[misc]
    return undo


def _follows(norm: nn.Module, activation: nn.Module) -> bool:
    return type(norm) in NORMS and type(activation) in FOLLOWERS


def _rotary(model: nn.Module, replaced: Counter[str]) -> list[Undo]:
    """`apply_rotary_pos_emb` as transformers' model files call it: a function of the file, so changed for all models of that file."""
    undo: list[Undo] = []
    files = {sys.modules[type(module).__module__] for module in model.modules() if type(module).__module__ in sys.modules}
    for file in files:
        own = vars(file).get("apply_rotary_pos_emb")
        if not file.__name__.startswith("transformers.") or own is None or getattr(own, "fused", False):
            continue

        def fused(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, own: Any = own, **kwargs: Any) -> Any:
            plain = args or kwargs or torch.compiler.is_compiling() or q.dim() != 4 or cos.dim() != 3 or cos.shape[0] != 1
            if plain or not worth("rope", q, q.numel() + k.numel()):
                return own(q, k, cos, sin, *args, **kwargs)
            replaced["rope"] += 1
            return rope(q, k, cos[0], sin[0], seq_dim=2)

        fused.fused = True  # type: ignore[attr-defined]
        file.apply_rotary_pos_emb = fused  # type: ignore[attr-defined]
        undo.append(lambda file=file, own=own: setattr(file, "apply_rotary_pos_emb", own))  # type: ignore[misc]
    return undo
