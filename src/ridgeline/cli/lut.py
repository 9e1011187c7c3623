"""`ridgeline lut build --space S --on TARGET --out FILE`, `ridgeline lut check FILE`: latency tables for architecture search.

space + target ──> every block measured (cpu, cuda) or estimated (any other) ──> FILE: one JSON table with its own errors
FILE ──> networks timed now beside what the table predicts ──> errors; exit code 1 above --within
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import Json, check_outputs, emit_json, progress, say

if TYPE_CHECKING:
    from ..search.latency import Errors, LatencyTable

app = typer.Typer(help="Latency tables: what every block of a search space costs on a device.", no_args_is_help=True)


@app.command("build")
def build(
    space: Annotated[str, typer.Option("--space", help="darts, nb201, macro, residual, transformer, or one you registered.")],
    out: Annotated[Path, typer.Option("--out", help="The table, JSON; beside it a journal while it is built, to resume from.")],
    on: Annotated[str, typer.Option("--on", help="cpu or cuda: measured here; any other target: estimated.")] = "cpu",
    settings: Annotated[list[str] | None, typer.Option("--set", help="A setting of the space, e.g. channels=16; repeatable.")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Samples in one pass.")] = 1,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16; measured tables only.")] = "float32",
    mode: Annotated[
        str | None, typer.Option("--mode", help="graph (CUDA graphs; the default on cuda) or eager; measured tables only.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="CPU threads (default: torch's); tables measured on cpu only.")
    ] = None,
    nets: Annotated[int, typer.Option("--nets", min=2, help="Networks the errors are measured on.")] = 12,
    as_json: Json = False,
) -> None:
    """Measure or estimate every block of a space into one table."""
    from ..search.latency.build import Plan, build_table
    from ..search.spaces.space import load_space
    from .pairs import read_pairs

    found = load_space(space, **read_pairs("--set", settings))
    check_outputs(out)
    journal = out.with_name(out.name + ".journal")
    with progress(f"{space} on {on}") as report:
        table = build_table(
            found, on, batch=batch, dtype=dtype, mode=mode, threads=threads, plan=Plan(check=nets), journal=journal, report=report
        )
    say(f"table: {table.save(out)}")
    journal.unlink(missing_ok=True)  # the table is on disk: nothing is left to resume
    _show(table, table.errors, as_json)


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="A table of `ridgeline lut build`.")],
    nets: Annotated[int, typer.Option("--nets", min=0, help="Networks to time or estimate now (0: only read the file).")] = 12,
    within: Annotated[float, typer.Option("--within", min=0.0, help="Mean error above which the exit code is 1.")] = 0.1,
    as_json: Json = False,
) -> None:
    """Read a table, time networks now, and say how far its predictions are off."""
    from ..core.errors import OptionError, RegressionError
    from ..search.latency import LatencyTable
    from ..search.latency.check import check_table

    table = LatencyTable.load(file)
    if nets == 1:
        raise OptionError("--nets 1", why="an order needs two networks", do="give --nets 0 or at least 2")
    with progress(f"checking {file}") as report:
        errors = check_table(table, nets=nets, report=report) if nets else table.errors
    _show(table, errors, as_json)
    if errors is not None and errors.mean > within:
        raise RegressionError(
            f"{file} is off by {errors.mean:.1%} on average",
            why=f"--within allows {within:.0%}",
            do="build the table again on this machine",
        )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _show(table: LatencyTable, errors: Errors | None, as_json: bool) -> None:
    if as_json:
        about = table.model_dump(mode="json", by_alias=True, exclude={"entries"})
        emit_json({**about, "entries": len(table.entries), "errors": errors.model_dump() if errors else None})
        return
    how = f"{table.method} on {table.machine}, batch {table.batch}, {table.dtype}, {table.mode}"
    lines = [f"{table.space}: {len(table.entries)} blocks {how}" + (f", {table.threads} threads" if table.threads else "")]
    if errors:
        against = "measured" if table.method == "measured" else "estimated as a whole"
        lines += [
            f"{errors.nets} random networks, predicted against {against}:",
            f"  {'':<7}{'mean error':>11}{'90th':>8}{'worst':>8}{'Spearman':>10}",
            f"  {'table':<7}{errors.mean:>11.1%}{errors.p90:>8.1%}{errors.worst:>8.1%}{errors.spearman:>10.3f}",
            f"  {'FLOPs':<7}{errors.flops_mean:>11.1%}{'':>8}{errors.flops_worst:>8.1%}{errors.flops_spearman:>10.3f}",
            *(f"  off most: {_ms(one.predicted_s)} instead of {_ms(one.measured_s)} for {one.point}" for one in errors.missed_most[:1]),
        ]
    sys.stdout.write("\n".join(lines) + "\n")
