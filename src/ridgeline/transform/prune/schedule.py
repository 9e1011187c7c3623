"""Pruning little by little while the model trains on.

    sparsity(t) = final + (initial − final) · (1 − (t − begin) / (end − begin))³      t in optimiser steps, begin ≤ t ≤ end

    prune_gradually(model, data, 0.8, epochs=20) ──train.fit──> every `every` steps: new masks at sparsity(t), never fewer zeros
      ramp: the share of the steps in which sparsity grows; in the rest the survivors recover

Most weights go early, when many are redundant, and few at the end. Masks only grow. The last mask is exact to one weight.
Ref: Zhu & Gupta 2017.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ...core.errors import OptionError
from .masks import Masks
from .scores import Method, Scope, check_sparsity, lowest, score, weights_of

if TYPE_CHECKING:
    from ...workload.data import Data


def cubic_sparsity(step: int, final: float, *, begin: int, end: int, initial: float = 0.0) -> float:
    """The sparsity due after `step` optimiser steps: initial up to `begin`, final from `end` on."""
    if end <= begin:
        return final if step >= end else initial
    left = 1.0 - min(max((step - begin) / (end - begin), 0.0), 1.0)
    return final + (initial - final) * left**3


class Gradual:
    """The hook that raises the sparsity along the schedule; call it after each optimiser step."""

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        sparsity: float,
        *,
        begin: int,
        end: int,
        every: int,
        method: Method = "magnitude",
        scope: Scope = "global",
        include: Sequence[str] = ("*",),
        skip: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        check_sparsity(sparsity)
        self.model, self.data, self.sparsity = model, data, sparsity
        self.begin, self.end, self.every = begin, end, every
        self.method, self.scope, self.seed = method, scope, seed
        self.weights = weights_of(model, include, skip)
        self.history: list[tuple[int, float]] = []  # (step, sparsity reached)
        self.masks = Masks(model, {name: weight.detach() == 0 for name, weight in self.weights.items()})
        self.initial = min(self.masks.sparsity, sparsity)

    def prune(self, step: int, sparsity: float) -> None:
        """New masks at this sparsity, on top of the old ones."""
        scores = score(self.weights, self.method, model=self.model, data=self.data, seed=self.seed + step)
        chosen = lowest(scores, sparsity, self.scope, pruned=self.masks.pruned)
        self.masks.update({name: mask | self.masks.pruned[name] for name, mask in chosen.items()})  # zeros beyond the target stay too
        self.history.append((step, self.masks.sparsity))

    def __call__(self, model: Any, step: int) -> None:
        due = self.begin <= step <= self.end and ((step - self.begin) % self.every == 0 or step == self.end)
        if due:
            self.prune(step, cubic_sparsity(step, self.sparsity, begin=self.begin, end=self.end, initial=self.initial))
        else:
            self.masks.apply()


def prune_gradually(
    model: nn.Module,
    data: Data,
    sparsity: float,
    *,
    epochs: float,
    ramp: float = 0.6,
    every: int | None = None,
    batch: int = 128,
    method: Method = "magnitude",
    scope: Scope = "global",
    include: Sequence[str] = ("*",),
    skip: Sequence[str] = (),
    seed: int = 0,
    **training: Any,
) -> tuple[Masks, Mapping[str, Any]]:
    """Prune and fine-tune `model` in place; `training` goes to train.fit. Gives the final masks and the record of both."""
    from ...train.fit import fit

    if not (0.0 <= ramp <= 1.0 and math.isfinite(epochs) and epochs > 0):
        raise OptionError(
            f"epochs {epochs}, ramp {ramp}", why="epochs must be > 0 and ramp between 0 and 1", do="give e.g. epochs=20, ramp=0.6"
        )
    steps = max(1, round(epochs * (len(data.train) // min(batch, len(data.train)))))  # fit takes whole batches only
    end = min(round(ramp * steps), steps - 1)  # steps count from 0
    interval = every or max(1, min(100, end // 20))
    gradual = Gradual(
        model, data, sparsity, begin=0, end=end, every=interval, method=method, scope=scope, include=include, skip=skip, seed=seed
    )
    history = fit(model, data, steps=steps, batch=batch, after_step=gradual, seed=seed, **training)
    if not gradual.history or gradual.history[-1][0] < end:  # training that stopped early must not leave fewer zeros than asked
        gradual.prune(end, sparsity)
    gradual.masks.apply()
    return gradual.masks, {"steps": steps, "ramp_steps": end, "every": interval, "sparsity": gradual.history, "training": history}
