"""`ridgeline calibrate`: measure this machine's roofs and how near them each family of op gets."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .common import Json, emit_json, progress, say


def calibrate(
    device: Annotated[str, typer.Argument(help="cpu or cuda.")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the probes: rougher, in seconds.")] = False,
    as_json: Json = False,
) -> None:
    """Measure this machine (two or three minutes) and remember the result."""
    from ..report.catalog import render_targets
    from ..target.calibrate import calibrate as measure_machine
    from ..target.calibrate import calibration_path

    with progress(f"calibrating {device}") as report:
        spec = measure_machine(device, progress=report, quick=quick)
    if load := spec.machine.get("busy"):
        say(f"other work was running ({load}): calibrate again on an idle machine for sound predictions")
    say(f"saved: {calibration_path(device)}")
    if as_json:
        emit_json(spec.model_dump(exclude_none=True))
    else:
        sys.stdout.write(render_targets([spec]) + "\n")
