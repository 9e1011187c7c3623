"""`ridgeline optimize MODEL --on TARGET`: the same answers from fewer operators, each pass checked, predicted and measured.

model (named, Hugging Face folder, file.py:factory) ──passes──> tables | --json | --html with pictures of what changed
                                                    ──> --out: graph.safetensors + graph.json
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import Batch, Context, Dtype, Html, Json, Phase, check_outputs, emit_json, progress, say

if TYPE_CHECKING:
    from ..core.change import Change

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def optimize(
    model: Annotated[str, typer.Argument(help="A name from `ridgeline models`, a Hugging Face folder, or file.py:factory.")] = "resnet18",
    on: Annotated[str, typer.Option("--on", help="cpu or cuda: run, measure and predict here; a target's name: predict for it.")] = "cpu",
    passes: Annotated[str | None, typer.Option("--passes", help="Only these, in this order, separated by commas (default: all).")] = None,
    budget: Annotated[str | None, typer.Option("--budget", help="Most bytes of intermediate tensors, e.g. 4000000 or 4MB.")] = None,
    static: Annotated[bool, typer.Option("--static", help="Return and time a module that runs inside one preallocated arena.")] = False,
    measure_passes: Annotated[bool, typer.Option("--measure-passes", help="Time the graph after each pass, not only in total.")] = False,
    predict: Annotated[bool, typer.Option(help="Estimate after each pass; the first time on this machine calibrates it.")] = True,
    out: Annotated[Path | None, typer.Option("--out", help="Save the graph here: weights as safetensors, nodes as JSON.")] = None,
    batch: Batch = None,
    dtype: Dtype = None,
    phase: Phase = None,
    context: Context = None,
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Rewrite a model's graph by checked passes: fold, fuse, lay out, prepack, plan its memory."""
    from ..core.files import write_text
    from ..measure.subject import build_subject, choose_device
    from ..target.load import check_processor
    from ..transform.graph.optimize import OptimizeSettings
    from ..transform.graph.optimize import optimize as run
    from ..transform.options import checked
    from ..workload.case import CaseOptions

    here = on.partition(":")[0] in ("cpu", "cuda")
    chosen = tuple(word.strip() for word in passes.split(",") if word.strip()) if passes is not None else None
    most = parse_bytes(budget) if budget is not None else None
    checked(OptimizeSettings, {"passes": chosen, "budget_bytes": most}, "ridgeline optimize")  # before anything is built
    check_outputs(html, out and out / "graph.json")
    if not here:
        check_processor(on)
    device = str(choose_device(on if here else "cpu", model))
    with progress(f"optimising {model}") as report:
        case = build_subject(model, None, CaseOptions(batch, dtype, phase, context, device), None, False)
        made, change = run(
            case.module,
            case.args,
            case.kwargs,
            target=on.partition(":")[0] if here else on,
            passes=chosen,
            budget_bytes=most,
            memory="static" if static else "plan",
            measure=here,
            measure_passes=measure_passes and here,
            predict=predict,
            name=model,
            require_gain=False,
            report=report,
        )
        if out is not None:
            from ..transform.graph.stored import save_graph

            say(f"saved: {save_graph(made, out, change=change)}")
    if html:
        from ..report.graph_html import render_optimized_html

        say(f"report: {write_text(html, render_optimized_html(change))}")
    _show(change, as_json)


def _show(change: Change, as_json: bool) -> None:
    from ..report.graph_table import render_optimized

    if as_json:
        emit_json(change.to_json())
    else:
        sys.stdout.write(render_optimized(change, color=sys.stdout.isatty()) + "\n")
    if change.speedup is not None and not change.faster and change.compression_ratio <= 1:
        say("neither smaller nor measurably faster: keep the model as it is")


def parse_bytes(text: str) -> int:
    """`4000000`, `4MB` or `3.5 GiB` as bytes."""
    from ..core.errors import OptionError

    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = found[2].upper() if found else ""
    if not found or unit not in UNITS or float(found[1]) * UNITS[unit] < 1:
        raise OptionError(f"--budget {text!r}", why="it must be a number of bytes above 0", do="write e.g. 4000000, 4MB or 4MiB")
    return int(float(found[1]) * UNITS[unit])
