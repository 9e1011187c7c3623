"""One trial: what a network costs, whether a limit forbids it, and what it is worth when trained.

(point, fidelity) ──same as an earlier one──> its figures
                  ──costs──> beyond a limit: not trained ──train on a part of the training split──> Trial
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from ...core.errors import OptionError, RidgelineError, TrainError
from ..spaces.space import Point
from .evaluate import epochs_of, score_candidate
from .result import Trial
from .study import Study, broken_limit


def new_trial(study: Study, point: Point, fidelity: float, seed: int, number: int, before: list[Trial], begun: float) -> Trial:
    """Cost a network, and train it unless it breaks a limit or computes the same as one of the seed's before."""
    form, epochs = study.space.canonical(point), epochs_of(study.request.epochs, fidelity)
    for other in before:
        alike = other.same_as is None and epochs_of(study.request.epochs, other.fidelity) == epochs
        if alike and study.space.canonical(other.point) == form:
            return replace(other, number=number, point=point, fidelity=fidelity, seconds=time.perf_counter() - begun, same_as=other.number)
    trial = Trial(number, seed, point, fidelity, {}, True, 0.0)
    costs = study.costing.of(study.final_space, point, study.request.wanted, study.report)
    why = broken_limit(study.limits, costs)
    if not why:
        try:
            costs = {**costs, **_trained(study, point, fidelity, seed, number)}
            why = broken_limit(study.limits, costs)
        except (TrainError, torch.OutOfMemoryError) as error:
            why = (error.what if isinstance(error, RidgelineError) else str(error)).splitlines()[0][:200]
    return replace(trial, values=costs, feasible=not why, why=why, seconds=time.perf_counter() - begun)


def _trained(study: Study, point: Point, fidelity: float, seed: int, number: int) -> dict[str, float]:
    request = study.request
    return score_candidate(
        study.space, point, study.parts, device=request.device, epochs=request.epochs, recipe=request.recipe, seed=seed, fidelity=fidelity,
        report=lambda message: study.report(f"trial {number}: {message}"), folder=study.run.trial(number, "training"),
        objectives=request.wanted, chip=request.chip,
    )  # fmt: skip


def refuse_empty(study: Study, trials: list[Trial]) -> None:
    """A search none of whose networks could be used has no result."""
    if any(trial.feasible for trial in trials):
        return
    limits, first = ", ".join(study.request.limits) or "none", trials[0].why if trials else "nothing was tried"
    nearest = [
        f"{name} {(min if one.at_most else max)(found):.4g}"
        for one in study.limits
        if (name := one.objective.name) and (found := [trial.values[name] for trial in trials if name in trial.values])
    ]
    why = f"of {len(trials)} networks none could be used (limits: {limits}); the first: {first}"
    why += f"; nearest to the limits: {', '.join(nearest)}" if nearest else ""
    raise OptionError("a search without a result", why=why, do="loosen the limits, or give a larger budget")
