"""Tuning what one call uses: run it, see which configurations it looks up, time the candidates of each.

step ──config() look-ups──> [(space, bucket)] ──tune──> fastest, kept on disk ──> sentences for the row

An operator's buckets are its own affair; watching the look-ups finds them all, also in operators called something else (sum
uses reduce_outer). A default that no candidate beats stays.
"""

from __future__ import annotations

from typing import Any

from .. import tuning
from ..tuning import Config
from .timing import Step, failed, gpu_seconds


def looked_up(step: Step) -> dict[tuple[str, tuple[Any, ...]], Config]:
    """The configurations one call asks for, by (space, bucket)."""
    before = dict(tuning._known)
    tuning._known.clear()
    try:
        step(0)
        return dict(tuning._known)
    finally:
        tuning._known.update({key: value for key, value in before.items() if key not in tuning._known})


def tune_step(step: Step, sets: int, device: str) -> list[str]:
    """Tune every space the call uses; says what was chosen, or why nothing was."""
    try:
        used = looked_up(step)
    except Exception as error:
        return [f"not tuned: {failed(error).error}"]
    known = tuning.spaces()
    said = []
    for (op, bucket), current in used.items():
        if op in known:
            try:
                said.append(_tune(op, bucket, current, step, sets, device))
            except Exception as error:
                said.append(f"{op} not tuned: {failed(error).error}")
    return said or ["nothing to tune"]


def _tune(op: str, bucket: tuple[Any, ...], current: Config, step: Step, sets: int, device: str) -> str:
    def seconds() -> float:
        return gpu_seconds(step, sets, device)

    before_s = seconds()
    best, best_s = tuning.tune(op, bucket, seconds)
    if current not in tuning.spaces()[op] and before_s <= best_s:
        tuning._remember(op, bucket, current)
        tuning._known[op, bucket] = current
        best, best_s = current, before_s
    chosen = ", ".join(f"{name}={value}" for name, value in best.items())
    return f"{op}{list(bucket)}: {chosen} ({best_s * 1e3:.4f} ms, was {before_s * 1e3:.4f} ms)"
