"""Searches inside one supernet, as one trial of a run: `differentiable` and `aso-se`.

    differentiable ──supernet on the training part──> point ──trained as any candidate──> Trial
    aso-se ──search and growth in turns──> grown network ──> Trial with its genotype; the final training begins with its weights

Both keep checkpoints in trials/<n>/ and go on from them; the held-out part scores the result and is not seen by the search. With a table,
an objective latency becomes a term of the architecture's loss, and a limit on it holds for the derived network. A budget in time ends
either after the epoch or cycle in which the search's share of it is spent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ...core.errors import OptionError
from ...train.evaluate import evaluate
from ..settings import checked_settings
from .final import save_weights
from .request import Request
from .result import Front, Trial
from .study import Study, broken_limit
from .trial import new_trial, refuse_empty

COST_WEIGHT = 0.1
"""Of the latency term, where --strategy-set does not say otherwise."""
SCORED_BATCH = 512
OURS = ("device", "seed", "folder", "report", "resume", "costs", "limit", "guard", "settings")


def search_by_gradient(study: Study, front: Front, seed: int) -> int:
    """The number of the seed's one trial."""
    number, known = len(front.trials), study.known(seed)
    if known:
        trial = known[0]
        if trial.genotype is not None and (folder := study.run.final(seed)) is not None:
            study.grown[seed] = _start_of(folder / "start.safetensors")
    else:
        begun = time.perf_counter()
        search = _grown if study.request.strategy == "aso-se" else _derived
        trial = search(study, seed, number, begun)
        study.keep(trial)
    study.add(front, trial)
    refuse_empty(study, [trial])
    return trial.number


def _start_of(path: Path) -> dict[str, Tensor]:
    """The weights a search has left for the final training."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        why = f"the final training begins with the weights of the search: {str(error).splitlines()[0][:160]}"
        raise OptionError(f"cannot read {path}", why=why, do="put the file back, or search again in another folder") from error


def _derived(study: Study, seed: int, number: int, begun: float) -> Trial:
    from ..differentiable.search import search_differentiable

    settings = {**check_settings(study.request), **_device_terms(study)}
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

    grown = run_cycles(study.space, study.parts, **_common(study, seed, number), **check_settings(study.request))
    wanted = study.request.wanted
    scores = evaluate(grown.model, study.parts, batch=SCORED_BATCH)  # not seen by the search, whose own held-out part chose
    costs = study.costing.of_model(grown.model, study.space.input_shape, wanted, study.report)
    values = {name: value for name, value in costs.items() if name in wanted} | {"accuracy": float(scores.accuracy)}
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


def check_settings(request: Request) -> dict[str, Any]:
    """Settings the search has and the run does not decide itself; a budget in time becomes its seconds."""
    owner = f"strategy {request.strategy}"
    settings = checked_settings(_functions(request.strategy), request.strategy_settings, owner=owner, hidden=OURS)
    if request.most.seconds is not None:
        settings.setdefault("seconds", request.most.seconds)
    return settings


def _functions(strategy: str) -> tuple[Callable[..., Any], ...]:
    """Whose options are the strategy's settings."""
    if strategy == "aso-se":
        from ..differentiable.cycle import run_cycles

        return (run_cycles,)
    from ..differentiable.search import search_differentiable
    from ..supernet.network import make_supernet

    return (search_differentiable, make_supernet)
