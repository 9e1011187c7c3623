"""The search itself: ask, cost, train, tell, until the budget is spent; then the winner, trained to the end.

    for each seed:  strategy.ask() ──costs──> a limit is broken: told at once, nothing trained
                                   ──train on a part──> values ──journal (fsync)──> strategy.tell()
                    strategy.best() ──whole training split──> test accuracy, once ──> journal
    all seeds ──> Front: trials no other beats, winners, mean ± std ──> front.json, winner/

A run killed at any moment goes on: a strategy is a function of its seed and of what it was told, so the journal's lines are told again
and the next question is the one that was open; its training goes on from its last checkpoint. With a budget in trials the result is that
of a run that was never killed. Networks that compute the same as an earlier one of the seed are told its figures; they and networks
beyond a limit do not count as trials, but after MOST_IDLE of them in a row the search ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.errors import OptionError
from ...workload.data import Data, load_data
from ..budget import Budget
from ..spaces.space import Point, Space, load_space
from .costs import load_costing
from .evaluate import Report, held_out, quiet
from .final import export_front, ship
from .folder import open_run
from .objectives import parse_limit, parse_objectives, signed
from .request import BY_GRADIENT, Request, make_request, read_request
from .result import Front, Trial
from .study import Study, Watch, known_costs
from .trial import new_trial, refuse_empty

MOST_IDLE = 200
"""Networks in a row that take no training."""
FRONT_EVERY_S = 2.0
"""front.json is written no more often than this while trials come in."""


def search(
    space: Space | str, data: Data | str, target: str | None = None, objectives: str | Sequence[str] = "accuracy",
    budget: str | Budget = "8trials", **options: Any,
) -> Front:  # fmt: skip
    """Find a network of `space` for `data` that is good in `objectives` on `target` (default: the table's, else cpu), and train it; options
    are those of `run_search`.
    """
    source = load_data(data) if isinstance(data, str) else data
    if isinstance(data, str) and Path(data).is_dir():
        options["source"] = str(Path(data).resolve())
    chosen = space_for(space, source, options.pop("settings", None) or {}) if isinstance(space, str) else space
    return run_search(chosen, source, target=target, objectives=objectives, budget=budget, **options)


def space_for(name: str, data: Data, settings: dict[str, Any]) -> Space:
    """A space by name whose networks take the data's images and have its classes."""
    shape = data.prepare(data.train.inputs[:1]).shape[1:]
    if len(shape) != 3 or shape[1] != shape[2]:
        raise OptionError(f"data {data.name} with inputs {list(shape)}", why="spaces have square images", do="give other data")
    return load_space(name, **{"classes": data.classes, "image": shape[1], "image_channels": shape[0], **settings})


def run_search(
    space: Space, data: Data, *, strategy: str = "model", objectives: str | Sequence[str] = "accuracy", limits: Sequence[str] = (),
    budget: Budget | str = "8trials", seeds: int | Sequence[int] = 1, folder: Path | str | None = None, resume: bool = True,
    report: Report = quiet, watch: Watch | None = None, onnx: bool = True, **options: Any,
) -> Front:  # fmt: skip
    """Search `space` for each seed, train the winners, export the best into `folder`; options are the other fields of Request.

    `seeds`: how many (0, 1, …), or which. `resume` False: a folder that holds a run is an error. `watch` is called after every trial.
    `onnx` False: no model.onnx in winner/.
    """
    request = make_request(
        space, data, strategy=strategy, objectives=objectives, limits=tuple(limits), budget=_text(budget),
        seeds=tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds), **options,
    )  # fmt: skip
    costing = load_costing(request.target, request.table, request.batch, request.dtype, request.measure)
    final_space = _with(space, request.final)
    costing.check_space(final_space)
    for one in (space, final_space):
        check_data(one, data)
    check_strategy(request, space)
    path = Path(folder) if folder is not None else None
    with open_run(path, request.model_dump(mode="json"), resume=resume, say=report) as run:
        study = Study(
            request, space, final_space, data, held_out(data, request.validation), costing, parse_objectives(request.objectives),
            tuple(parse_limit(text) for text in request.limits), run, report, watch,
        )  # fmt: skip
        return _all_seeds(study, onnx)


def run_again(folder: Path | str, *, report: Report = quiet, watch: Watch | None = None) -> Front:
    """Go on with the run of a folder by the request it holds."""
    request = read_request(Path(folder))
    space, data = load_space(request.space, **request.settings), load_data(request.source or request.data)
    options = request.model_dump()
    for name in ("version", "space", "settings", "data", "data_digest", "rows", "table_digest", "target_digest", "recipe_hashes"):
        del options[name]  # follow from the space, the data and the files named
    return run_search(space, data, folder=folder, report=report, watch=watch, **options)


def check_data(space: Space, data: Data) -> None:
    """Whether the space's networks take the data's images and have its classes."""
    shape = tuple(data.prepare(data.train.inputs[:1]).shape[1:])
    classes = getattr(space, "classes", data.classes)
    if tuple(space.input_shape) != shape or classes != data.classes:
        raise OptionError(
            f"space {space.name} of images {list(space.input_shape)}, {classes} classes",
            why=f"data {data.name} has images {list(shape)}, {data.classes} classes", do="leave image, image_channels and classes out",
        )  # fmt: skip


def check_strategy(request: Request, space: Space) -> None:
    """Names and settings, before a folder is begun."""
    from ..strategies import make_strategy, own_settings

    if request.strategy in BY_GRADIENT:
        from .gradient import check_settings

        check_settings(request)
        return
    settings = own_settings(request.strategy, request.strategy_settings)
    make_strategy(request.strategy, space, objectives=len(request.objectives), budget_trials=request.most.trials, seed=0, **settings)


def _text(budget: Budget | str) -> str:
    if isinstance(budget, str):
        return budget
    return f"{budget.trials}trials" if budget.trials is not None else f"{budget.seconds}s"


def _with(space: Space, changes: dict[str, Any]) -> Space:
    """The same decisions at another size."""
    if not changes:
        return space
    import dataclasses

    try:
        larger: Space = dataclasses.replace(space, **changes)  # type: ignore[type-var]
    except TypeError as error:
        raise OptionError(f"final settings {changes}", why=str(error), do=f"give settings of space {space.name}") from error
    if [one.choices for one in larger.decisions] != [one.choices for one in space.decisions]:
        why = "the decisions would be others, so that nothing found would fit"
        raise OptionError(f"final settings {changes}", why=why, do="change sizes only, e.g. channels and cells")
    return larger


def _all_seeds(study: Study, onnx: bool) -> Front:
    front = Front(study.request.model_dump(mode="json"), study.objectives)
    for seed in study.request.seeds:
        if study.request.strategy in BY_GRADIENT:
            from .gradient import search_by_gradient

            front.winners[seed] = search_by_gradient(study, front, seed)
        else:
            front.winners[seed] = _search_seed(study, front, seed)
        study.write_front(front)
        if study.request.train_winner:
            front.shipped.append(ship(study, front, seed))
            study.write_front(front)
    export_front(study, front, onnx)
    return front


def _search_seed(study: Study, front: Front, seed: int) -> int:
    """One strategy from its first question to its last; gives the trial it would ship."""
    from ..strategies import make_strategy

    request = study.request
    strategy = make_strategy(
        request.strategy, study.space, objectives=len(study.objectives), budget_trials=request.most.trials, seed=seed,
        known=known_costs(study), **request.strategy_settings,
    )  # fmt: skip
    known = study.known(seed)
    mine: list[Trial] = []
    written = time.monotonic()
    while len(mine) < len(known) or not spent(request.most, mine):
        begun = time.perf_counter()
        ask = strategy.ask()
        if len(mine) < len(known):
            trial = known[len(mine)]
            if trial.point != tuple(ask.point) or trial.fidelity != ask.fidelity or trial.number != len(front.trials):
                why = f"{request.strategy} now asks for another network than it did then"
                raise OptionError(f"trial {trial.number} of the journal is out of place", why=why, do="use the version that began the run")
        else:
            trial = new_trial(study, tuple(ask.point), ask.fidelity, seed, len(front.trials), mine, begun)
            study.keep(trial)
        strategy.tell(ask, signed(study.objectives, trial.values), trial.feasible)
        mine.append(trial)
        study.add(front, trial)
        if time.monotonic() - written > FRONT_EVERY_S:
            study.write_front(front)
            written = time.monotonic()
    refuse_empty(study, mine)
    return _winning_trial(study, mine, tuple(strategy.best()))


def spent(most: Budget, trials: list[Trial]) -> bool:
    """Whether another trial would be one too many, or could not end in time if it took as long as the mean of those so far."""
    trained = [trial for trial in trials if trial.counts]
    if len(trials) >= MOST_IDLE and not any(trial.counts for trial in trials[-MOST_IDLE:]):
        return True
    elapsed = sum(trial.seconds for trial in trials)
    expected = sum(trial.seconds for trial in trained) / len(trained) if trained else 0.0
    return most.spent(len(trained), elapsed + expected)


def _winning_trial(study: Study, mine: list[Trial], point: Point) -> int:
    """The trial of the strategy's choice; where it was never feasible, the best that was."""
    feasible = [trial for trial in mine if trial.feasible]
    noisy = study.objectives[0].trained  # a cost is what it is: among equals the other objectives decide
    chosen = [trial for trial in feasible if noisy and trial.point == point] or feasible
    return max(chosen, key=lambda trial: (trial.fidelity, signed(study.objectives, trial.values), -trial.number)).number
