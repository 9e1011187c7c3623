"""Searches inside one supernet, as one trial of a run: `differentiable` and `aso-se`.

    differentiable ──supernet on the training part──> point ──trained as any candidate──> Trial
    aso-se ──search and growth in turns──> grown network ──> Trial with its genotype; the final training begins with its weights

Both keep checkpoints in trials/<n>/ and go on from them; the held-out part scores the result and is not seen by the search. With a table,
an objective latency becomes a term of the architecture's loss, and a limit on it holds for the derived network. A budget in time ends
either after the epoch or cycle in which the search's share of it is spent.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

from safetensors.torch import load_file

from ...core.errors import OptionError, unknown_name
from .final import save_weights
from .result import Front, Trial
from .study import Study, broken_limit
from .trial import new_trial, refuse_empty

COST_WEIGHT = 0.1
"""Of the latency term, where --strategy-set does not say otherwise."""
OURS = ("device", "seed", "folder", "report", "resume", "costs", "limit", "guard", "settings")


def search_by_gradient(study: Study, front: Front, seed: int) -> int:
    """The number of the seed's one trial."""
    number, known = len(front.trials), study.known(seed)
    if known:
        trial = known[0]
        if trial.genotype is not None and (folder := study.run.final(seed)) is not None and (folder / "start.safetensors").is_file():
            study.grown[seed] = load_file(folder / "start.safetensors")
    else:
        begun = time.perf_counter()
        search = _grown if study.request.strategy == "aso-se" else _derived
        trial = search(study, seed, number, begun)
        study.keep(trial)
    study.add(front, trial)
    refuse_empty(study, [trial])
    return trial.number


def _derived(study: Study, seed: int, number: int, begun: float) -> Trial:
    from ..differentiable.search import search_differentiable
    from ..supernet.network import make_supernet

    settings = {**_checked(study, search_differentiable, make_supernet), **_device_terms(study)}
    found = search_differentiable(study.space, study.parts, **_common(study, seed, number), **settings)
    return new_trial(study, tuple(found.point), 1.0, seed, number, [], begun)


def _device_terms(study: Study) -> dict[str, Any]:
    """Latency in the loss, and its limit on the derived network, where a table says what each op costs."""
    table, request = study.costing.table, study.request
    bounds = [limit.bound for limit in study.limits if limit.objective.name == "latency" and limit.at_most]
    if table is None or not ("latency" in request.objectives or bounds):
        return {}
    costs = table.cost_matrix(study.final_space)
    terms: dict[str, Any] = {"costs": costs}
    if "latency" in request.objectives and "cost_weight" not in request.strategy_settings:
        terms["cost_weight"] = COST_WEIGHT
    if bounds:
        from ..differentiable.derive import Limit

        terms["limit"] = Limit(costs, min(bounds), lambda point: table.predict(study.final_space, point))
    return terms


def _grown(study: Study, seed: int, number: int, begun: float) -> Trial:
    from ..differentiable.cycle import run_cycles

    grown = run_cycles(study.space, study.parts, **_common(study, seed, number), **_checked(study, run_cycles))
    wanted = study.request.wanted
    costs = study.costing.of_model(grown.model, study.space.input_shape, wanted, study.report)
    values = {name: value for name, value in costs.items() if name in wanted} | {"accuracy": float(grown.accuracy)}
    if "crossbar_accuracy" in wanted:
        from .evaluate import on_chips

        values["crossbar_accuracy"] = on_chips(grown.model, study.parts, study.request.chip, seed, study.report)
    study.grown[seed] = {name: value.detach().cpu() for name, value in grown.model.state_dict().items()}
    if (folder := study.run.final(seed)) is not None:
        save_weights(grown.model, folder / "start.safetensors")
    why = broken_limit(study.limits, values)
    return Trial(number, seed, (), 1.0, values, not why, time.perf_counter() - begun, why, None, grown.genotype)


def _common(study: Study, seed: int, number: int) -> dict[str, Any]:
    def report(message: str) -> None:
        study.report(f"seed {seed}: {message}")

    return {"device": study.request.device, "seed": seed, "folder": study.run.trial(number, "search"), "report": report}


def _checked(study: Study, *functions: Callable[..., Any]) -> dict[str, Any]:
    """Settings the search has and the run does not decide itself; a budget in time becomes its seconds."""
    kinds = {name: one for function in functions for name, one in inspect.signature(function).parameters.items()}
    known = [name for name, one in kinds.items() if one.kind is inspect.Parameter.KEYWORD_ONLY and name not in OURS]
    settings = dict(study.request.strategy_settings)
    for name, value in settings.items():
        if name not in known:
            raise unknown_name(f"setting of strategy {study.request.strategy}", name, known, see="docs/search.md")
        if isinstance(value, dict):
            raise OptionError(f"setting {name} = {value}", why="a number or a word is wanted", do="give one")
    if study.request.most.seconds is not None:
        settings.setdefault("seconds", study.request.most.seconds)
    return settings
