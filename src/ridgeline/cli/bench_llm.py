"""`ridgeline bench-llm [MODEL]`: decode and serving of a language model, beside the limit and the estimate.

load_model ──> Engine ──> bench_decode (one batch) ──┬──> lines | --json
                     ──> bench_serving (--requests) ─┘        prediction: the calibrated machine, or a --target of the catalog
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .answer import draft_line
from .common import Json, emit_json, progress, say
from .generate import BUILTIN, Device, DraftOf, DtypeOf, KvInt8, Lookahead, ModelName, Weights, open_engine

if TYPE_CHECKING:
    from ..target.load import Target


def bench_llm(
    model: ModelName = None,
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="Tokens of each prompt.")] = 128,
    new: Annotated[int, typer.Option("--new", min=2, help="New tokens of each sequence.")] = 128,
    batch: Annotated[int, typer.Option("--batch", min=1, max=1024, help="Sequences at once.")] = 1,
    repeats: Annotated[int, typer.Option("--repeats", min=1, max=1000, help="Runs after the one that warms up.")] = 3,
    requests: Annotated[int, typer.Option("--requests", min=0, help="Also serve this many requests.")] = 0,
    prompt_to: Annotated[int | None, typer.Option("--prompt-to", help="Longest prompt of those (default: --prompt).")] = None,
    rate: Annotated[float | None, typer.Option("--rate", min=1e-6, help="Requests a second on average (default: all at once).")] = None,
    alone: Annotated[int | None, typer.Option("--alone", min=0, help="How many of them one after another (default: all).")] = None,
    target: Annotated[str | None, typer.Option("--target", help="Predict for this one (default: this machine, where calibrated).")] = None,
    weights: Weights = None,
    dtype: DtypeOf = "auto",
    on: Device = "auto",
    kv_int8: KvInt8 = False,
    draft: DraftOf = None,
    lookahead: Lookahead = 4,
    as_json: Json = False,
) -> None:
    """Measure a language model: time to first token, decode and serving throughput, per cent of the memory limit."""
    from ..llm.bench import bench_decode, bench_serving
    from ..measure.environment import machine_name

    name = model or BUILTIN
    rows = []
    with progress(f"measuring {name}") as report:
        report("loading")
        engine = open_engine(
            name, weights=weights, dtype=dtype, device=on, kv_int8=kv_int8, draft=draft, lookahead=lookahead, max_batch=max(64, batch)
        )
        chosen = prediction_target(target, str(engine.device))
        rows.append(bench_decode(engine, prompt=prompt, new=new, batch=batch, repeats=repeats, target=chosen, say=report))
        if requests:
            span = (prompt, max(prompt, prompt_to or prompt))
            rows.append(bench_serving(engine, requests=requests, prompt=span, new=new, rate=rate, alone=alone, say=report))
    if as_json:
        machine = machine_name(str(engine.device))
        emit_json({"schema": 1, "model": engine.loaded.name, "machine": machine, "weights": weights or "as loaded", "rows": rows})
    else:
        sys.stdout.write("\n".join(text for row in rows for text in lines(row)) + "\n")


def prediction_target(name: str | None, device: str) -> Target | None:
    """What to predict for: a target by name, else this machine if it was calibrated, else the catalog's GPU of this name."""
    from ..target.calibrate import calibration_path
    from ..target.load import catalog_names, load_target

    if name is not None:
        return load_target(name)
    kind = device.partition(":")[0]
    if calibration_path(kind).exists():
        return load_target(kind)
    if kind == "cuda":
        import torch

        words = torch.cuda.get_device_name(torch.device(device)).lower().split()
        known = [one for one in catalog_names("processor") if one in words]
        if known:
            return load_target(known[0])
    say("no prediction: run `ridgeline calibrate` once, or name a target with --target")
    return None


def lines(row: dict[str, Any]) -> list[str]:
    """A row for a reader."""
    return _decode_lines(row) if row["case"] == "decode" else _serving_lines(row)


def _decode_lines(row: dict[str, Any]) -> list[str]:
    from ..report.format import scaled, seconds, significant, size

    found = [
        f"{row['model']}: {row['prompt']} + {row['new']} tokens, batch {row['batch']}",
        f"  prefill  {seconds(row['prefill_ms'] / 1e3)} ({significant(row['prefill_tokens_per_s'])} tokens/s)",
        f"  decode   {significant(row['tokens_per_s'])} tokens/s, {seconds(row['ms_per_token'] / 1e3)} a step",
        f"  limit    {size(row['bytes_per_token'])} a token, {seconds(row['limit_ms_per_token'] / 1e3)} at "
        f"{scaled(row['bandwidth_bps'], 'B/s')}: {row['percent_of_limit']:.0f} % reached",
        f"  gaps     p50 {seconds(row['gap_ms']['p50'] / 1e3)}, p99 {seconds(row['gap_ms']['p99'] / 1e3)}",
    ]
    if "draft" in row:
        found.append(f"  {draft_line(row)}")
    predicted = row.get("predicted", {})
    if "note" in predicted:
        found.append(f"  {predicted['note']}")
    for phase in ("prefill", "decode"):
        if phase in predicted:
            part = predicted[phase]
            found.append(
                f"  estimate {phase} {seconds(part['ms'] / 1e3)} on {predicted['target']} in plain PyTorch "
                f"(least {seconds(part['limit_ms'] / 1e3)}); measured is {part['measured_over_predicted']:.2f} of it"
            )
    return found


def _serving_lines(row: dict[str, Any]) -> list[str]:
    from ..report.format import seconds, significant

    first, gap, token = row["first_token_ms"], row["gap_ms"], row["inter_token_ms"]
    found = [
        f"{row['requests']} requests of {row['prompt'][0]} to {row['prompt'][1]} + {row['new']} tokens, "
        + ("all at once" if row["rate"] is None else f"{significant(row['rate'])} a second"),
        f"  output   {significant(row['output_tokens_per_s'])} tokens/s, {seconds(row['seconds'])} in all",
        f"  first    p50 {seconds(first['p50'] / 1e3)}, p99 {seconds(first['p99'] / 1e3)}",
        f"  a token  p50 {seconds(token['p50'] / 1e3)}, p99 {seconds(token['p99'] / 1e3)}; "
        f"between deliveries p50 {seconds(gap['p50'] / 1e3)}, p99 {seconds(gap['p99'] / 1e3)}",
    ]
    if "alone" in row:
        found.append(
            f"  alone    {significant(row['alone']['output_tokens_per_s'])} tokens/s one after another: {row['times_faster']:.1f}x together"
        )
    return found
