"""Optimisers by name, and learning-rate schedules as pure functions of the step.

named parameters ──build_optimiser──> torch.optim.{SGD, Adam, AdamW}     (fused on CUDA: a loss scale then needs no host sync), Muon
rate(step) = base rate · factor(schedule, step, total)                   nothing to store, so that a resumed run is exact

  constant  1                      linear  1 → final                     step  γ^(milestones passed), He 2015
  cosine    final + (1-final)(1+cos πp)/2, Loshchilov 2017               onecycle  1/25 → 1 → 1/250,000, Smith 2018
  triangle  0 → 1 evenly in the first `rise` of the steps, then evenly → final
  p = (step - warmup) / (total - warmup); before that (step + 1) / warmup, Goyal 2017
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..core.errors import OptionError, unknown_name
from .options import TrainSettings

Build = Callable[[Any], torch.optim.Optimizer]
Schedule = Callable[[int, int], float]
START, END = 1 / 25, 1 / 25 / 1e4  # of onecycle: first and last factor


def factor(settings: TrainSettings, step: int, total: int, custom: Schedule | None = None) -> float:
    """What the base rate is multiplied by at `step` of `total`."""
    if custom is not None:
        return float(custom(step, total))
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(total - settings.warmup, 1)
    return _SCHEDULES[settings.schedule](progress, step, total, settings)


def _cosine(progress: float, step: int, total: int, settings: TrainSettings) -> float:
    return settings.final + (1 - settings.final) * (1 + math.cos(math.pi * progress)) / 2


def _linear(progress: float, step: int, total: int, settings: TrainSettings) -> float:
    return 1 - (1 - settings.final) * progress


def _step(progress: float, step: int, total: int, settings: TrainSettings) -> float:
    return float(settings.gamma ** sum(step >= share * total for share in settings.milestones))


def _onecycle(progress: float, step: int, total: int, settings: TrainSettings) -> float:
    top, last = settings.rise * total - 1, total - 1
    if step <= top:
        return _between(START, 1.0, step / top if top > 0 else 1.0)
    return _between(1.0, END, (step - top) / max(last - top, 1e-9))


def _triangle(progress: float, step: int, total: int, settings: TrainSettings) -> float:
    top = settings.rise * total
    down = settings.final + (1 - settings.final) * (total - step) / (total - top)
    return min((step + 1) / top, down, 1.0)


def _between(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * min(share, 1.0)))


_SCHEDULES: Mapping[str, Callable[[float, int, int, TrainSettings], float]] = {
    "constant": lambda *_: 1.0,
    "linear": _linear,
    "cosine": _cosine,
    "step": _step,
    "onecycle": _onecycle,
    "triangle": _triangle,
}


def build_optimiser(named: Iterable[tuple[str, nn.Parameter]], settings: TrainSettings, build: Build | None) -> torch.optim.Optimizer:
    """The optimiser over the parameters that ask for a gradient; each group remembers its base rate."""
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not trained:
        raise OptionError("no parameter to train", why="every one is frozen or asks for no gradient", do="freeze less")
    if build is not None:
        made = build([parameter for _, parameter in trained])
        if not isinstance(made, torch.optim.Optimizer):
            raise OptionError(f"optimiser gives {type(made).__name__}", why="it must give a torch.optim.Optimizer", do="return one")
    else:
        made = _named(settings)(_groups(trained, settings), settings, all(p.is_cuda for _, p in trained))
    for group in made.param_groups:
        group["initial_lr"] = float(group["lr"])
    _start_fused_momentum(made)
    return made


def _start_fused_momentum(optimiser: torch.optim.Optimizer) -> None:
    """Momentum of fused SGD from zeros, which gives the same first step (0 · momentum + gradient).

    Torch would make the buffers in the first step without filling them, and where that step is skipped for an overflow, as first
    steps in float16 often are, the next one would take what happened to lie in memory for momentum (seen in torch 2.13).
    """
    if not isinstance(optimiser, torch.optim.SGD):
        return
    for group in optimiser.param_groups:
        if group["fused"] and group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:
                optimiser.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def set_rate(optimiser: torch.optim.Optimizer, share: float) -> float:
    """Give every group its base rate times `share`; the first group's rate, for the history."""
    for group in optimiser.param_groups:
        group["lr"] = group["initial_lr"] * share
    return float(optimiser.param_groups[0]["lr"])


def _groups(trained: list[tuple[str, nn.Parameter]], settings: TrainSettings) -> list[dict[str, Any]]:
    """All in one group, or norms and biases (one dimension) in another without weight decay."""
    if settings.decay == "all":
        return [{"params": [p for _, p in trained], "weight_decay": settings.weight_decay}]
    wide, thin = [p for _, p in trained if p.ndim > 1], [p for _, p in trained if p.ndim <= 1]
    groups = [{"params": wide, "weight_decay": settings.weight_decay}, {"params": thin, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _sgd(groups: list[dict[str, Any]], settings: TrainSettings, cuda: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, settings.learning_rate, settings.momentum, nesterov=settings.nesterov, fused=cuda or None)


def _adam(groups: list[dict[str, Any]], settings: TrainSettings, cuda: bool) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, settings.learning_rate, betas=settings.betas, fused=cuda or None)


def _adamw(groups: list[dict[str, Any]], settings: TrainSettings, cuda: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, settings.learning_rate, betas=settings.betas, fused=cuda or None)


def _muon(groups: list[dict[str, Any]], settings: TrainSettings, cuda: bool) -> torch.optim.Optimizer:
    """Matrices apart; the weight decay of the rest is scaled so that rate · decay is the same for both."""
    from .muon import Muon, is_matrix

    rest_rate = settings.rest_rate or settings.learning_rate
    ready: list[dict[str, Any]] = []
    for group in groups:
        matrices, rest = [p for p in group["params"] if is_matrix(p)], [p for p in group["params"] if not is_matrix(p)]
        ready.append({"params": matrices, "weight_decay": group["weight_decay"], "orthogonal": True})
        decay = group["weight_decay"] * settings.learning_rate / rest_rate
        ready.append({"params": rest, "weight_decay": decay, "lr": rest_rate})
    ready = [group for group in ready if group["params"]]
    return Muon(ready, settings.learning_rate, settings.momentum, settings.nesterov)


OPTIMISERS: Mapping[str, Callable[[list[dict[str, Any]], TrainSettings, bool], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "muon": _muon,
    "adam": _adam,
    "adamw": _adamw,
}


def _named(settings: TrainSettings) -> Callable[[list[dict[str, Any]], TrainSettings, bool], torch.optim.Optimizer]:
    if settings.optimiser not in OPTIMISERS:
        raise unknown_name("optimiser", settings.optimiser, OPTIMISERS, see="docs/train.md, or give a function of the parameters")
    return OPTIMISERS[settings.optimiser]
