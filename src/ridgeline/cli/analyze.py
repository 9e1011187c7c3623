"""`ridgeline analyze MODEL --on TARGET`: what must be computed, how long it takes there, what limits it, what would help.

capture ──> estimate ──> advise ──> table | --json | --html | --trace          --sweep: the same along one parameter
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .common import Batch, Context, Dtype, Html, Json, Mode, Model, On, Phase, Rows, Trace, check_outputs, emit, emit_json, progress, say


def analyze(
    model: Model = "resnet18",
    on: On = "cpu",
    batch: Batch = None,
    dtype: Dtype = None,
    phase: Phase = None,
    context: Context = None,
    mode: Mode = "eager",
    devices: Annotated[int, typer.Option("--devices", help="Split the layers over this many devices.")] = 1,
    host_copy: Annotated[bool, typer.Option("--host-copy", help="Count copying inputs in and results out.")] = False,
    graph: Annotated[bool, typer.Option("--graph", help="Launched as one captured graph.")] = False,
    sweep: Annotated[str | None, typer.Option("--sweep", help="batch=1..256, context=128..8192 or bandwidth=0.5..4.")] = None,
    advice: Annotated[bool, typer.Option("--advice/--no-advice", help="Run the estimate again with each change made.")] = True,
    as_json: Json = False,
    html: Html = None,
    trace: Trace = None,
    rows: Rows = 20,
) -> None:
    """Estimate a model on a machine: limits, expected time, bottlenecks, advice."""
    from ..estimate.advice import advise
    from ..estimate.processor import Settings, estimate
    from ..estimate.sweep import parse_sweep
    from ..estimate.sweep import sweep as sweep_over
    from ..target.load import LOCAL_TARGETS, load_processor, load_target
    from ..workload.capture import capture

    check_outputs(html, trace)
    settings = Settings(mode, devices, host_copy, graph)
    options = {"batch": batch, "dtype": dtype, "phase": phase, "context": context}
    with progress(f"analysing {model} on {on}") as report:
        if sweep:
            parameter, values = parse_sweep(sweep)
            processor = load_processor(on, report)
            points = sweep_over(model, processor, parameter, values, settings, options, report)
        else:
            if on not in LOCAL_TARGETS:
                load_target(on)  # a wrong name or file is told before the model is captured
            report("capturing")
            workload = capture(model, **options)  # type: ignore[arg-type]
            target = load_target(on, report)  # after the model is known to be good: a first calibration takes minutes
            estimated = estimate(workload, target, settings=settings, progress=report)
            report("advice")
            estimated = dataclasses.replace(estimated, advice=tuple(advise(estimated)) if advice else ())
    if sweep:
        _emit_sweep(points, sweep, model, processor.name, as_json, html)
    else:
        emit(estimated, as_json=as_json, html=html, trace=trace, rows=rows)


def _emit_sweep(points: list[dict[str, Any]], text: str, model: str, target: str, as_json: bool, html: Path | None) -> None:
    from ..core.files import write_text
    from ..report.html import render_sweep_html
    from ..report.table import render_sweep

    parameter = text.partition("=")[0]
    if html:
        write_text(html, render_sweep_html(points, parameter, model, target))
        say(f"report: {html}")
    if as_json:
        emit_json({"schema": 1, "model": model, "target": target, "parameter": parameter, "points": points})
    else:
        sys.stdout.write(render_sweep(points, parameter) + "\n")
