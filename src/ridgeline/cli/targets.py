"""`ridgeline targets list|show`: the machines Ridgeline knows, every constant with unit, source and status."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from .common import Json, emit_json

app = typer.Typer(help="The machines Ridgeline knows.", no_args_is_help=True)


@app.command("list")
def list_targets(as_json: Json = False) -> None:
    """Names, main figures and descriptions of all targets."""
    from ..report.catalog import render_arrays, render_crossbars, render_targets
    from ..target.load import LOCAL_TARGETS, Target, catalog_names, load_array, load_crossbar, load_processor

    processors = [load_processor(name) for name in catalog_names("processor")]
    arrays = [load_array(name) for name in catalog_names("array")]
    crossbars = [load_crossbar(name) for name in catalog_names("crossbar")]
    if as_json:
        local = "this machine, calibrated on first use"
        specs: list[Target] = [*processors, *arrays, *crossbars]
        known = [(s.name, s.kind, s.description) for s in specs] + [(name, "processor", local) for name in LOCAL_TARGETS]
        emit_json([{"name": name, "kind": kind, "description": what} for name, kind, what in known])
        return
    sys.stdout.write(f"{render_targets(processors)}\n\n{render_arrays(arrays)}\n\n{render_crossbars(crossbars)}\n")


@app.command("show")
def show(name: Annotated[str, typer.Argument(help="A target's name or file.")] = "cpu", as_json: Json = False) -> None:
    """Every constant of one target, as a TOML file you can copy and change."""
    from ..core.toml_out import dump_toml
    from ..target.load import load_target
    from .common import progress

    with progress(f"loading {name}") as report:
        spec = load_target(name, report)
    data: dict[str, Any] = spec.model_dump(exclude_none=True)
    if as_json:
        emit_json(data)
        return
    sys.stdout.write(dump_toml(data))
