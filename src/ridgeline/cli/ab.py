"""`ridgeline ab A B`: two variants timed in turn, with a confidence interval for their ratio."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .common import Json, emit_json, progress

VARIANT = "MODEL[@key=value,…] with dtype, batch, phase, context, device, threads, channels_last, compile"


def ab(
    a: Annotated[str, typer.Argument(help=VARIANT)] = "resnet18",
    b: Annotated[str, typer.Argument(help=VARIANT)] = "resnet18@channels_last",
    rounds: Annotated[int, typer.Option("--rounds", min=5, max=10_000, help="Interleaved rounds.")] = 30,
    as_json: Json = False,
) -> None:
    """Which of two variants is faster, and how sure is that?"""
    from ..measure.ab import ab_models

    with progress(f"{a} against {b}, {rounds} rounds"):
        result = ab_models(a, b, rounds=rounds)
    if as_json:
        emit_json(result.to_dict())
        return
    each = " a sample" if result.per_sample else ""
    for name, timing in zip(result.names, (result.a, result.b), strict=True):
        spread = f"p20 {timing.p20_s * 1e3:.3f}, p80 {timing.p80_s * 1e3:.3f}"
        sys.stdout.write(f"{name:<40} {timing.median_s * 1e3:10.3f} ms{each}   {spread}\n")
    sys.stdout.write(f"b takes {result.ratio:.3f}x a's time (95 % between {result.low:.3f}x and {result.high:.3f}x): {result.verdict}\n")
