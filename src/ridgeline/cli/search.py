"""`ridgeline search --space S --data D --on TARGET`: networks found, trained and exported; `--table FILE`: over finished trainings.

options ──> run_search in a run folder ──watch──> live front ──> table | --json | report.html, winner/
--resume FOLDER ──run.json──> the same options, from where the run was
--table FILE ──strategy, budget, seeds──> the cell each search would ship, with every column asked for
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import Json, check_outputs, emit_json, progress, say, spoken

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ..search.study.result import Front
    from ..workload.data import Data

SMALL = {"channels": 8, "cells": 1}
"""The default space's size on digits: a search of about a minute."""
BY_GRADIENT = ("differentiable", "aso-se")
OF_TABLES: dict[str, Any] = {"objectives": "c10_val12", "budget": "100trials", "seeds": 5}
OF_RUNS: dict[str, Any] = {"objectives": "accuracy", "budget": "8trials", "seeds": 1}
USED_BY_TABLES = ("table", "objectives", "shows", "strategy", "budget", "seeds", "as_json")
"""Parameters of `search` that a search over a table looks at."""

SetOption = Annotated[list[str] | None, typer.Option("--set", help="A setting of the space, e.g. channels=16; repeatable.")]
OnOption = Annotated[
    str | None,
    typer.Option("--on", help="Whose latency and energy: cpu, cuda, h200, eyeriss, rram-64, a .toml file (default: the table's, cpu)."),
]
FinalOption = Annotated[
    list[str] | None, typer.Option("--final", help="A setting that differs in the network that ships, e.g. cells=20; repeatable.")
]
StrategySet = Annotated[list[str] | None, typer.Option("--strategy-set", help="A setting of the strategy, e.g. epochs=30; repeatable.")]
Limits = Annotated[list[str] | None, typer.Option("--limit", help="latency<=2ms, parameters<=1M, accuracy>=90%; repeatable.")]


def search(
    context: typer.Context,
    space: Annotated[str, typer.Option("--space", help="darts, nb201, macro, residual, transformer, or one you registered.")] = "nb201",
    data: Annotated[str | None, typer.Option("--data", help="digits, cifar10 or a folder (default: digits, else cifar10).")] = None,
    on: OnOption = None,
    objectives: Annotated[
        str | None,
        typer.Option(help="accuracy (default), latency, energy, memory, parameters, flops, crossbar_accuracy; the first decides."),
    ] = None,
    limit: Limits = None,
    budget: Annotated[
        str | None, typer.Option(help="For each seed: 40trials (default 8trials), 90s, 10m. Half of a time trains the winner.")
    ] = None,
    strategy: Annotated[
        str, typer.Option(help="model, evolution, controller, halving, nsga2, tpe, random, differentiable or aso-se.")
    ] = "model",
    seeds: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="How many searches, each with its own seed (default 1; 5 with --table).")
    ] = None,
    first_seed: Annotated[int, typer.Option("--seed", min=0, help="The first seed.")] = 0,
    settings: SetOption = None,
    final: FinalOption = None,
    strategy_set: StrategySet = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs a candidate is trained for (default 4).")] = None,
    recipe: Annotated[str | None, typer.Option(help="What a candidate is trained by: cifar10-quick, digits, … or a .toml file.")] = None,
    final_recipe: Annotated[str | None, typer.Option("--final-recipe", help="What the winner is trained by, the same way.")] = None,
    final_epochs: Annotated[
        int | None,
        typer.Option(
            "--final-epochs", min=1, help="Epochs the winner is trained for (default: the recipe's; with a budget in time, what fits)."
        ),
    ] = None,
    train_winner: Annotated[bool, typer.Option("--train-winner/--no-train-winner", help="Train and test the winner.")] = True,
    device: Annotated[str | None, typer.Option("--device", help="Where to train: cpu, cuda (default: cuda where there is one).")] = None,
    lut: Annotated[Path | None, typer.Option("--lut", help="A latency table of `ridgeline lut build`.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure latency on this machine instead of estimating it.")] = False,
    pass_batch: Annotated[int, typer.Option("--pass-batch", min=1, help="Images of the pass whose latency is meant.")] = 1,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of that pass: float32, bfloat16, int8, …")] = None,
    cycles: Annotated[int | None, typer.Option(min=1, help="aso-se: cycles of warm-up, search, growth, training.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="differentiable, aso-se: images of a step.")] = None,
    channels: Annotated[int | None, typer.Option(min=1, help="Channels of the network searched.")] = None,
    depth: Annotated[int | None, typer.Option(min=1, help="aso-se: cells it begins with.")] = None,
    run: Annotated[Path | None, typer.Option("--run", help="The run folder (default: one in the cache, named by the request).")] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Go on with the run of this folder; takes none but --json and --html.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option("--table", help="Search a .npz table of finished trainings; nb201: that of RIDGELINE_DATA.")
    ] = None,
    shows: Annotated[str, typer.Option("--show", help="--table: columns of the chosen cell to look up afterwards.")] = "c10_test200",
    as_json: Json = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write the report here too (the run folder has it).")] = None,
) -> None:
    """Find a network for your data and your device, train it, and export it."""
    from .pairs import read_pairs

    defaults = OF_TABLES if table is not None else OF_RUNS
    wanted, most, many = (given or defaults[name] for given, name in ((objectives, "objectives"), (budget, "budget"), (seeds, "seeds")))
    if table is not None:
        _refuse_unused(context, USED_BY_TABLES, "--table")
        _search_table(table, str(wanted), shows, strategy, str(most), int(many), as_json)
        return
    check_outputs(html)
    if resume is not None:
        _refuse_unused(context, ("resume", "as_json", "html"), "--resume")
        _show(_resumed(resume), as_json, html)
        return
    _refuse_unused(context, {*context.params} - {"shows"}, "a search without --table")
    own = {"cycles": cycles, "batch": batch, "depth": depth, **({"channels": channels} if strategy in BY_GRADIENT else {})}
    request: dict[str, Any] = {
        "target": on, "objectives": str(wanted), "limits": limit or [], "budget": str(most), "strategy": strategy,
        "seeds": list(range(first_seed, first_seed + int(many))), "final": read_pairs("--final", final), "train_winner": train_winner,
        "strategy_settings": {**_given(**own), **read_pairs("--strategy-set", strategy_set)}, "measure": measure, "batch": pass_batch,
        **_given(epochs=epochs, recipe=recipe, final_recipe=final_recipe, final_epochs=final_epochs, table=lut, dtype=dtype),
    }  # fmt: skip
    sizes = {**read_pairs("--set", settings), **({"channels": channels} if channels and strategy not in BY_GRADIENT else {})}
    _show(_search(space, data, sizes, {**request, "device": device or _device()}, run), as_json, html)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _refuse_unused(context: typer.Context, used: Collection[str], owner: str) -> None:
    """Options that were given and would change nothing."""
    from ..core.errors import OptionError

    others = {one.name: one.opts[0] for one in context.command.params if one.name and one.name not in used}
    source = {name: context.get_parameter_source(name) for name in others}
    given = [option for name, option in others.items() if (found := source[name]) is not None and found.name != "DEFAULT"]
    if given:
        raise OptionError(f"{', '.join(given)} with {owner}", why="it would change nothing", do="leave it out")


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _data(name: str | None) -> Data:
    """The data asked for; else digits, else CIFAR-10."""
    from ..core.errors import MissingExtraError
    from ..workload.data import load_data

    if name is not None:
        return load_data(name)
    try:
        return load_data("digits")
    except MissingExtraError:
        return load_data("cifar10")


def _search(space: str, data: str | None, settings: dict[str, Any], request: dict[str, Any], run: Path | None) -> Front:
    from ..core.files import cache_dir
    from ..search.study.folder import digest_of
    from ..search.study.request import make_request
    from ..search.study.search import run_search, space_for

    source = _data(data)
    if data is not None and Path(data).is_dir():
        request["source"] = str(Path(data).resolve())
    small = SMALL if space == "nb201" and source.name == "digits" else {}
    found = space_for(space, source, {**small, **settings})
    if run is None:
        whole = make_request(found, source, **request).model_dump(mode="json")
        run = cache_dir() / "search" / f"{space}-{Path(source.name).name}-{digest_of(whole)}"
    say(f"run folder: {run}")
    with _watching(f"searching {space} on {source.name}") as (report, watch):
        return run_search(found, source, folder=run, report=report, watch=watch, **request)


def _resumed(folder: Path) -> Front:
    from ..search.study.search import run_again

    with _watching(f"going on with {folder}") as (report, watch):
        return run_again(folder, report=report, watch=watch)


class _watching:
    """Progress: a live front on a terminal, else a line a trial, and between them one every ten seconds; on stderr."""

    def __init__(self, what: str) -> None:
        self.what, self.seen, self.message, self.front = what, 0, what, dict[str, Any]()
        self.live: Any = None
        self.speak: Callable[[str], None] = lambda message: None

    def __enter__(self) -> tuple[Callable[[str], None], Callable[[Front], None]]:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self.live = Live(self.what, console=Console(stderr=True), refresh_per_second=4, transient=True)
            self.live.start()
        else:
            self.speak = spoken(self.what)
        return self.report, self.watch

    def __exit__(self, *problem: object) -> None:
        if self.live is not None:
            self.live.stop()

    def report(self, message: str) -> None:
        self.message = message
        if self.live is not None:
            self._draw()
        else:
            self.speak(message)

    def watch(self, front: Front) -> None:
        self.front = front.to_json()
        if self.live is not None:
            self._draw()
            return
        from ..report.search_table import trial_line

        for trial in self.front["trials"][self.seen :]:
            say(trial_line(self.front, trial))
        self.seen = len(self.front["trials"])

    def _draw(self) -> None:
        from ..report.search_table import live_table

        self.live.update(live_table(self.front, self.message) if self.front else self.message)


def _show(front: Front, as_json: bool, html: Path | None) -> None:
    from ..core.files import write_text

    if html:
        say(f"report: {write_text(html, front.to_html())}")
    if as_json:
        emit_json(front.to_json())
    else:
        sys.stdout.write(front.table(color=sys.stdout.isatty()) + "\n")


def _search_table(table: Path, objectives: str, shows: str, strategy: str, budget: str, seeds: int, as_json: bool) -> None:
    """What would a strategy have found, how fast, how surely?"""
    from ..search.run import report_table
    from ..search.table import load_table
    from ..workload.data.find import find_file

    if str(table) == "nb201":
        table = find_file("vision/nb201_tables.npz", "nb201_tables.npz", get="give --table FILE, or get a table of NAS-Bench-201")
    columns, shown = _words(objectives), _words(shows)
    with progress(f"searching {table.name}") as report:
        held = load_table(table)
        whole = report_table(held, strategy=strategy, budget=budget, columns=columns, shown=shown, seeds=seeds, report=report)
    if as_json:
        emit_json(whole)
        return
    for row in whole["seeds"]:
        told = "  ".join(f"{name} {row[name]:.2f}" for name in shown)
        typer.echo(f"seed {row['seed']}  {row['trials']} trials, {row['seconds']:.1f} s  {told}  {row['cell']}")
    for name, value in whole["summary"].items():
        typer.echo(f"{name}: {value['mean']:.3f} ± {value['std']:.3f} over {seeds} seeds")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
