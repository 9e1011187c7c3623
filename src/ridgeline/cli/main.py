"""The command line: one thin file a command, loaded when it runs.

    ridgeline analyze | profile | map | codesign | compare | optimize | compress | crossbar | search | lut | ab | bench | targets | models
    ridgeline generate | serve | bench-llm | calibrate | env

Exit codes: 0 done, 1 a check failed (a regression against a baseline), 2 bad input: what, why and what to do on stderr, 130 stopped
(Ctrl-C): one line on stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from . import (
    ab,
    analyze,
    bench,
    bench_llm,
    calibrate,
    codesign,
    compare,
    compress,
    crossbar,
    env,
    generate,
    lut,
    models,
    optimize,
    profile,
    search,
    serve,
    targets,
)
from . import map as map_command


class Stopped(Exception):
    """Ctrl-C, as what typer lets through: it would leave with 130 at a KeyboardInterrupt, without a word."""


class Commands(TyperGroup):
    """The commands."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Stopped from error


app = typer.Typer(
    cls=Commands,
    name="ridgeline",
    help="How fast could this model run here, why doesn't it, and what would make it?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("analyze")(analyze.analyze)
app.command("profile")(profile.profile)
app.command("map")(map_command.map_model)
app.command("codesign")(codesign.codesign)
app.command("compare")(compare.compare)
app.command("optimize")(optimize.optimize)
app.command("compress")(compress.compress)
app.command("ab")(ab.ab)
app.command("search")(search.search)
app.command("bench")(bench.bench)
app.command("generate")(generate.generate)
app.command("bench-llm")(bench_llm.bench_llm)
app.command("serve")(serve.serve)
app.command("models")(models.models)
app.command("calibrate")(calibrate.calibrate)
app.command("env")(env.env)
app.add_typer(crossbar.app, name="crossbar")
app.add_typer(lut.app, name="lut")
app.add_typer(targets.app, name="targets")


def version(show: bool) -> None:
    if show:
        from .. import __version__

        sys.stdout.write(f"ridgeline {__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    show_version: bool = typer.Option(False, "--version", help="Print the version and stop.", callback=version, is_eager=True),
) -> None:
    """How fast could this model run here, why doesn't it, and what would make it?"""


def main() -> None:
    """Run a command; our own errors become three lines and an exit code, never a traceback."""
    from ..core.errors import RegressionError, RidgelineError

    try:
        app()
    except RidgelineError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(1 if isinstance(error, RegressionError) else 2)
    except (Stopped, KeyboardInterrupt):
        sys.stderr.write(
            "stopped" + ("; what is finished is kept, and the same command goes on from there\n" if goes_on(sys.argv[1:]) else "\n")
        )
        sys.exit(130)
    except BrokenPipeError:  # the reader (head, less) has gone; nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def goes_on(words: Sequence[str]) -> bool:
    """Whether this command keeps what is finished, and takes it up again when it is given once more."""
    given = {word.partition("=")[0] for word in words}
    match words:
        case ["codesign", *_] | ["lut", "build", *_]:
            return True
        case ["search", *_]:
            return "--table" not in given
        case ["crossbar", *_]:
            return "--run" in given
        case ["compress", *_]:
            return "--out" in given and "--apply" not in given
        case _:
            return False


if __name__ == "__main__":
    main()
