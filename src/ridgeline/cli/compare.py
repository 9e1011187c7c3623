"""`ridgeline compare MODEL --on a,b,c`: one model, several targets, one table.

processors ──estimate at --dtype and --mode──┐
spatial arrays ──map at their own widths─────┼──> table | --json | --html
crossbars ──count events at their own widths─┘
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .common import Batch, Context, Dtype, Html, Json, Mode, Model, Phase, check_outputs, emit_json, progress, say


def compare(
    model: Model = "resnet18",
    on: Annotated[str, typer.Option("--on", help="Targets, separated by commas.")] = "cpu,l4,a100,h200,npu-256",
    batch: Batch = None,
    dtype: Dtype = None,
    phase: Phase = None,
    context: Context = None,
    mode: Mode = "eager",
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Put one model on several machines side by side."""
    from ..core.errors import OptionError
    from ..core.files import write_text
    from ..estimate.processor import estimate
    from ..report.basis import basis_lines, with_basis
    from ..report.html import render_comparison_html
    from ..report.table import render_comparison
    from ..target.load import LOCAL_TARGETS, load_target
    from ..target.spec import ProcessorSpec
    from ..workload.capture import capture

    names = [name.strip() for name in on.split(",") if name.strip()]
    if not names:
        raise OptionError("--on is empty", why="there is nothing to compare", do="name targets, e.g. --on cpu,h200,npu-256,tpu-v1")
    check_outputs(html)
    with progress(f"comparing {model} on {', '.join(names)}") as report:
        for name in names:
            if name not in LOCAL_TARGETS:
                load_target(name)  # a wrong name is told before the model is captured
        workload = capture(model, batch=batch, dtype=dtype, phase=phase, context=context)
        specs = [load_target(name, report) for name in names]
        specs.sort(key=lambda spec: not isinstance(spec, ProcessorSpec))  # the heading is a processor's where there is one
        profiles = [
            with_basis(
                estimate(workload, spec, mode=mode) if isinstance(spec, ProcessorSpec) else estimate(workload, spec, progress=report)
            )
            for spec in specs
        ]
    if html:
        write_text(html, render_comparison_html(profiles))
        say(f"report: {html}")
    if as_json:
        rows = [{"target": p.target, "dtype": p.dtype, "total": p.total.to_dict(), "notes": list(p.notes)} for p in profiles]
        emit_json({"schema": 1, "model": workload.model, "batch": workload.batch, "dtype": workload.dtype, "targets": rows})
        return
    sys.stdout.write(render_comparison(profiles) + "\n")
    for line in basis_lines(profiles):
        sys.stdout.write(f"{line}\n")
