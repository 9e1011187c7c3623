"""`ridgeline bench [OP]`: the kernels against torch, torch.compile, other libraries and the machine's own ceilings.

load_cases ──> planned rows ──> measured in turn ──> table | --json | --html, and a line a row in the history
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import Html, Json, emit_json, progress, say

if TYPE_CHECKING:
    from ..kernel.bench import Settings, Wanted
    from ..kernel.case import Case

SIZES = "small, medium, large, xlarge, batch, anchors (shapes whose times elsewhere are known) or all (default: anchors and large)."


def bench(
    op: Annotated[str | None, typer.Argument(help="An operator; none lists them.")] = None,
    all_ops: Annotated[bool, typer.Option("--all", help="Every operator.")] = False,
    fast: Annotated[bool, typer.Option("--fast", help="Three samples, no torch.compile, no peers, no float64 errors.")] = False,
    size: Annotated[str | None, typer.Option("--size", help=SIZES)] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16, float16, … (default: all the op has).")] = None,
    backward: Annotated[bool, typer.Option("--backward", help="Also forward and backward together.")] = False,
    tune: Annotated[bool, typer.Option("--tune", help="Try every launch configuration first, and keep the fastest.")] = False,
    device: Annotated[str, typer.Option("--device", help="cuda, cuda:1, … or cpu, which times the references.")] = "cuda",
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Measure the kernels: time, share of the machine's ceiling, and how they stand against torch."""
    from ..core.errors import OptionError
    from ..core.files import write_text
    from ..kernel.bench import Settings, load_cases
    from ..report.bench_html import render_bench_html
    from ..report.bench_table import render_bench

    cases = load_cases()
    if op is None and not all_ops:
        _list(cases, as_json)
        return
    if op is not None and all_ops:
        raise OptionError(f"{op} and --all", why="one names an operator, the other means every one", do="give one of the two")
    rows = _rows(cases, op, size, dtype, backward, tune, device)
    settings = Settings(device, repeats=3 if fast else 7, compiled=not fast, peers=not fast, errors=not fast, tune=tune)
    data = _measure(rows, settings, op or "all kernels")
    if html:
        say(f"report: {write_text(html, render_bench_html(data))}")
    if as_json:
        emit_json(data)
    else:
        sys.stdout.write(render_bench(data, color=sys.stdout.isatty()) + "\n")


def _list(cases: dict[str, Case], as_json: bool) -> None:
    from ..kernel.bench.rows import dtype_name
    from ..report.bench_table import render_ops

    ops = [
        {
            "op": case.op,
            "differentiable": case.differentiable,
            "dtypes": [dtype_name(dtype) for dtype in case.dtypes],
            "sizes": list(case.sizes),
            "anchors": len(case.anchors),
            "peers": list(case.peers),
        }
        for case in cases.values()
    ]
    if as_json:
        emit_json({"schema": 1, "ops": ops})
    else:
        sys.stdout.write(render_ops(ops) + "\n")
        say("ridgeline bench OP measures one, --all all of them")


def _rows(
    cases: dict[str, Case], op: str | None, size: str | None, dtype: str | None, backward: bool, tune: bool, device: str
) -> list[Wanted]:
    from ..core.errors import OptionError, unknown_name
    from ..kernel.bench import SIZE_CLASSES, check_device, planned
    from ..kernel.bench.rows import forward_only, nothing_planned, parse_dtype

    if op is not None and op not in cases:
        raise unknown_name("op", op, cases, "`ridgeline bench` for the list")
    wanted = parse_dtype(dtype)
    on_cpu = device.startswith("cpu")
    sizes = (["small"] if on_cpu else ["anchors", "large"]) if size is None else list(SIZE_CLASSES) if size == "all" else [size]
    rows = planned([cases[op]] if op else cases.values(), sizes, wanted, backward)
    check_device(device)
    if tune and on_cpu:
        raise OptionError("--tune with --device cpu", why="the references have no launch configurations", do="tune on a CUDA GPU")
    if not rows:
        raise nothing_planned(op or "any op", sizes, wanted)
    if backward and (without := forward_only(rows)):
        say(f"forward only, since they have no gradient: {', '.join(without)}")
    return rows


def _measure(rows: list[Wanted], settings: Settings, what: str) -> dict[str, Any]:
    from ..core.errors import MeasureError
    from ..kernel.bench import machine, measure_ceilings, run

    measured: list[dict[str, Any]] = []
    with progress(f"measuring {what}") as report:
        report("ceilings")
        ceilings = measure_ceilings(settings.device)
        try:
            for row in run(rows, ceilings, settings, lambda text: report(f"{text} ({len(measured) + 1} of {len(rows)})")):
                measured.append(row.to_json())
        except MeasureError as error:  # the GPU is gone: what was measured still counts
            say(f"{type(error).__name__}: {error}")
    return {"schema": 1, "machine": machine(settings.device), "ceilings": ceilings.to_json(), "rows": measured}
