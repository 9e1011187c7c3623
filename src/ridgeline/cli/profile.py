"""`ridgeline profile MODEL --on cpu|cuda`: the estimate and the measurement of the same ops, side by side.

load_processor ──> estimate ──┐
measure on this machine ──────┴── merge ──> advice ──> table | --json | --html | --trace
--pipeline: from files to answers        --save-baseline NAME, --against NAME: exit code 1 on a significant regression
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import Batch, Context, Dtype, Html, Json, Model, On, Phase, Rows, Trace, check_outputs, emit, progress, say

if TYPE_CHECKING:
    from ..core.profile import Profile


def profile(
    model: Model = "resnet18",
    on: On = "cpu",
    batch: Batch = None,
    dtype: Dtype = None,
    phase: Phase = None,
    context: Context = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, max=10_000, help="Timed passes after warm-up.")] = 20,
    channels_last: Annotated[bool, typer.Option("--channels-last", help="Store images as NHWC.")] = False,
    compiled: Annotated[bool, typer.Option("--compiled", help="Time the whole model under torch.compile; ops stay eager.")] = False,
    pipeline: Annotated[bool, typer.Option("--pipeline", help="Also time loading, pre-processing, host copy and post-processing.")] = False,
    save_baseline: Annotated[str | None, typer.Option("--save-baseline", help="Remember this measurement under a name.")] = None,
    against: Annotated[str | None, typer.Option("--against", help="Compare with a saved baseline; exit 1 if significantly slower.")] = None,
    as_json: Json = False,
    html: Html = None,
    trace: Trace = None,
    rows: Rows = 20,
) -> None:
    """Measure a model on this machine, op by op, beside its estimate."""
    from ..measure.baseline import baseline_path, load_baseline
    from ..measure.pipeline import measure_pipeline
    from ..measure.profiler import measure

    options: dict[str, Any] = {"batch": batch, "dtype": dtype, "phase": phase, "context": context}
    check_outputs(html, trace, baseline_path(save_baseline) if save_baseline is not None else None)
    if against is not None:
        load_baseline(against)  # a bad or unknown name is told before minutes are spent measuring
    extra: dict[str, Any] = {}
    with progress(f"profiling {model} on {on}") as report:
        device = _device(on)
        measured = measure(
            model, device=device, **options, repeats=repeats, channels_last=channels_last, compiled=compiled, progress=report
        )
        result = _beside_estimate(measured, model, on, options, channels_last, report)
        if pipeline:
            report("the way from files to answers")
            way = measure_pipeline(model, device=device, **options, channels_last=channels_last)
            extra["pipeline"] = way.to_dict()
    slower = _baselines(measured, save_baseline, against, extra)
    emit(result, as_json=as_json, html=html, trace=trace, rows=rows, extra=extra)
    if pipeline and not as_json:
        sys.stdout.write("\n" + way.table())
    if slower:
        raise slower


def _device(on: str) -> str:
    """Where a target is measured: `cpu` here, `cuda` and every GPU of the catalog on this machine's GPU."""
    import torch

    from ..core.errors import MeasureError
    from ..target.load import check_processor

    check_processor(on)
    if on == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise MeasureError(
            f"cannot measure on {on}", why="torch sees no CUDA device here", do="use --on cpu, or `ridgeline analyze` for an estimate"
        )
    return "cuda"


def _beside_estimate(measured: Profile, model: str, on: str, options: dict[str, Any], channels_last: bool, report: Any) -> Profile:
    from ..estimate.advice import advise
    from ..estimate.processor import Settings, estimate
    from ..measure.profiler import merge
    from ..target.load import load_processor
    from ..workload.capture import capture

    spec = load_processor(on, report)
    report("estimating")
    estimated = estimate(capture(model, **options), spec, settings=Settings(channels_last=channels_last))
    merged = merge(estimated, measured)
    return dataclasses.replace(merged, advice=tuple(advise(estimated)))


def _baselines(measured: Profile, save: str | None, against: str | None, extra: dict[str, Any]) -> Exception | None:
    """Compare first, so that saving under the same name does not hide a regression."""
    from ..core.errors import RegressionError
    from ..measure.baseline import baseline_of, compare_baseline, save_baseline

    slower = None
    current = baseline_of(measured)
    if against:
        found = compare_baseline(against, current)
        extra["against"] = found.to_dict()
        low, high = found.interval
        say(f"against {against}: {found.ratio:.3f}x the time, 95 % between {low:.3f}x and {high:.3f}x {found.detail}".rstrip())
        if found.slower:
            slower = RegressionError(
                f"{measured.model} is {found.ratio:.2f}x slower than baseline {against!r}",
                why=f"{found.now_s * 1e3:.3f} ms now, {found.before_s * 1e3:.3f} ms then; the 95 % interval starts at {low:.3f}x",
                do=f"find the op that slowed down, or accept it: run again with --save-baseline {against} alone",
            )
    if save and not (slower and save == against):
        say(f"baseline: {save_baseline(save, current)}")
    return slower
