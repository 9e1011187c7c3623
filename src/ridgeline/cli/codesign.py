"""`ridgeline codesign MODEL… --area MM2 --power W`: which chip to build for these models.

capture at every batch ──> codesign (journalled in a run folder) ──> table | --json | --html ──> --save-best chip.toml
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import Context, Dtype, Html, Json, Phase, Rows, check_outputs, emit_json, progress, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..estimate.spatial.codesign import Codesign, DesignSpace, Problem
    from ..estimate.spatial.codesign.search import Search

MODELS_HELP = "Names from `ridgeline models`, model.onnx, Hugging Face folders, or file.py:factory."


def codesign(
    models: Annotated[list[str] | None, typer.Argument(help=MODELS_HELP, metavar="MODEL...")] = None,
    area: Annotated[float | None, typer.Option("--area", help="Most area of the chip, in mm2.")] = None,
    power: Annotated[float | None, typer.Option("--power", help="Most power of the chip with its outermost memory, in W.")] = None,
    base: Annotated[str, typer.Option("--base", help="Array the chips are variations of: a name or a .toml file.")] = "array-16",
    space: Annotated[Path | None, typer.Option("--space", help="Design space, a .toml file (default: half to double of the base).")] = None,
    goal: Annotated[str, typer.Option("--goal", help="latency of a pass, or throughput: time a sample at full rate.")] = "latency",
    objective: Annotated[str, typer.Option("--objective", help="What each layer is mapped for: edp, energy or latency.")] = "edp",
    method: Annotated[str, typer.Option("--method", help="grid, evolve, or auto: grid if the budget covers the space.")] = "auto",
    budget: Annotated[int, typer.Option("--budget", min=1, max=1_000_000, help="Most chips to map.")] = 16,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the evolution; the same seed gives the same front.")] = 0,
    run: Annotated[Path | None, typer.Option("--run", help="Keep every evaluated chip here; the same folder continues.")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="As --run, for a folder that must exist.")] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, max=256, help="Processes that map chips (default: one a core, at most 8).")
    ] = None,
    dtype: Dtype = None,
    phase: Phase = None,
    context: Context = None,
    save_best: Annotated[Path | None, typer.Option("--save-best", help="Write the recommended chip as a target file.")] = None,
    as_json: Json = False,
    html: Html = None,
    rows: Rows = 20,
) -> None:
    """Find the chips that no other beats in time, energy and area, and the one to build."""
    from ..core.files import write_text
    from ..core.journal import HEADER
    from ..estimate.spatial.codesign import Limits
    from ..measure.environment import usable_threads
    from ..report.codesign_html import render_codesign_html
    from ..report.codesign_table import render_codesign

    check_options(goal, objective, area, power)
    check_outputs(html, save_best, run and run / HEADER)
    names, options = models or ["resnet18"], {"dtype": dtype, "phase": phase, "context": context}
    with progress(f"co-design for {', '.join(names)}") as report:
        problem, chosen = _problem(names, options, base, space, objective, report)
        found = _search(problem, chosen, names, options, run, resume, report, limits=Limits(area, power), goal=goal, method=method,
                        budget=budget, seed=seed, workers=workers or min(8, budget, usable_threads()))  # fmt: skip
    data = found.to_json()
    if save_best:
        write_text(save_best, found.best_toml())
        say(f"chip: {save_best}")
    if html:
        write_text(html, render_codesign_html(data))
        say(f"report: {html}")
    if as_json:
        emit_json(data)
    else:
        sys.stdout.write(render_codesign(data, limit=rows or None) + "\n")


def check_options(goal: str, objective: str, area: float | None, power: float | None) -> None:
    """Before anything is captured: words and limits that make no sense."""
    from ..core.errors import OptionError

    for name, value, known in (("goal", goal, ("latency", "throughput")), ("objective", objective, ("edp", "energy", "latency"))):
        if value not in known:
            raise OptionError(f"--{name} {value}", why=f"it is one of {', '.join(known)}", do="choose one of them")
    for name, limit in (("area", area), ("power", power)):
        if limit is not None and not 0 < limit < float("inf"):
            raise OptionError(f"--{name} {limit}", why="a limit is a number above 0", do="give mm2 or W, or leave it out for no limit")


def _problem(
    names: list[str], options: dict[str, Any], base: str, space: Path | None, objective: str, report: Callable[[str], None]
) -> tuple[Problem, DesignSpace]:
    from ..core.errors import OptionError
    from ..estimate.spatial.codesign import Problem, default_space, load_space
    from ..estimate.spatial.codesign.space import check_space
    from ..target.load import load_array
    from ..workload.capture import capture

    array = load_array(base)
    chosen = load_space(space) if space else default_space(array)
    check_space(chosen, array)
    workloads = {}
    for batch in chosen.batch:
        report(f"capturing at batch {batch}")
        workloads[batch] = tuple(capture(name, batch=batch, **options) for name in names)
        for workload in workloads[batch]:
            if not any(op.loops for op in workload.ops):
                raise OptionError(
                    f"{workload.model} has nothing to map", why="it has no matrix product and no convolution", do="leave it out"
                )
    return Problem(array, workloads, chosen.rules, objective), chosen


def _search(
    problem: Problem,
    space: DesignSpace,
    names: list[str],
    options: dict[str, Any],
    run: Path | None,
    resume: Path | None,
    report: Callable[[str], None],
    **settings: Any,
) -> Codesign:
    from ..core.errors import OptionError
    from ..core.files import cache_dir
    from ..estimate.spatial.codesign import codesign as search
    from ..estimate.spatial.codesign import header_of, open_journal
    from ..estimate.spatial.codesign.journal import folder_name

    if run and resume:
        raise OptionError("--run and --resume", why="both name the run folder", do="give one of them")
    header = header_of(problem, [{"model": name, **options} for name in names])
    folder = run or resume or cache_dir() / "codesign" / folder_name(header)
    with open_journal(problem, folder, header, must_exist=resume is not None) as journal:
        say(f"run folder: {folder}" + (f", {journal.found} chips known" if journal.found else ""))
        return search(problem, space, journal=journal, progress=_bar(report, settings["budget"]), **settings)


def _bar(report: Callable[[str], None], budget: int) -> Callable[[Search], None]:
    """A bar over the chips still to map, the front so far and the time left."""
    begun, width = time.monotonic(), 24

    def show(search: Search) -> None:
        most = min(budget, search.space.size)
        # chips that need no mapping shorten a grid, so its bar counts all that were looked at
        done = max(search.mapped, len(search.seen) if search.space.size <= budget else 0)
        filled = min(width, width * done // most)
        left = (time.monotonic() - begun) / done * (most - done) if done else 0.0
        report(f"{'━' * filled}{'╌' * (width - filled)} {done} of {most} chips, {len(search.best)} on the front, about {left:.0f} s left")

    return show
