"""The pass as Chrome trace events, for Perfetto or chrome://tracing.

    Profile.rows ──> {"traceEvents": [M names, X one slice an op, C FLOP/s], "displayTimeUnit": "ns", "otherData": {…}}   times in µs

Tracks: `expected` at the estimate's own start times; `measured`, where there is any, with the medians laid end to end, because
ops are timed one by one and have no common clock. Ops that take no time have no slice; `otherData` says how many.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from ..core.profile import OpRow, Profile
from .summary import finite, label, setting_words, spent_s

PROCESS, EXPECTED, MEASURED = 1, 1, 2
MICROSECONDS = 1e6


def render_profile(profile: Profile) -> dict[str, Any]:
    """A JSON-ready trace; every number in it is finite, as Perfetto requires."""
    measured = any(row.measured for row in profile.rows)
    events = list(_names(profile, measured))
    events += _track(EXPECTED, ((row, finite(row.start_s), finite(row.time_s)) for row in profile.rows))
    events += _counter(profile.rows)
    if measured:
        events += _track(MEASURED, _end_to_end(profile.rows))
    timeless = sum(not finite(row.time_s) and not spent_s(row) for row in profile.rows)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "model": profile.model,
            "target": profile.target,
            "settings": ", ".join(setting_words(profile)),
            "expected_s": finite(profile.total.time_s),
            "ops_without_time": timeless,
        },
    }


def _names(profile: Profile, measured: bool) -> Iterator[dict[str, Any]]:
    title = f"{profile.model} on {profile.target}"
    yield {"ph": "M", "name": "process_name", "pid": PROCESS, "tid": 0, "ts": 0, "args": {"name": title}}
    tracks = [(EXPECTED, "expected"), (MEASURED, "measured")]
    for thread, name in tracks[: 2 if measured else 1]:
        yield {"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": thread, "ts": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": thread, "ts": 0, "args": {"sort_index": thread}}


def _track(thread: int, placed: Iterable[tuple[OpRow, float, float]]) -> Iterator[dict[str, Any]]:
    for row, start_s, duration_s in placed:
        if duration_s:
            yield {
                "ph": "X",
                "name": label(row),
                "cat": row.kind,
                "pid": PROCESS,
                "tid": thread,
                "ts": start_s * MICROSECONDS,
                "dur": duration_s * MICROSECONDS,
                "args": _arguments(row),
            }


def _end_to_end(rows: Iterable[OpRow]) -> Iterator[tuple[OpRow, float, float]]:
    clock = 0.0
    for row in rows:
        if row.measured:
            yield row, clock, finite(row.measured.median_s)
            clock += finite(row.measured.median_s)


def _counter(rows: Iterable[OpRow]) -> Iterator[dict[str, Any]]:
    """Expected FLOP/s as a step line, back to zero after the last op."""
    end_s = 0.0
    for row in rows:
        if finite(row.time_s):
            rate, end_s = row.flops / row.time_s, finite(row.start_s) + row.time_s
            yield _sample(finite(row.start_s), rate)
    yield _sample(end_s, 0.0)


def _sample(time_s: float, rate: float) -> dict[str, Any]:
    return {"ph": "C", "name": "FLOP/s (expected)", "pid": PROCESS, "tid": 0, "ts": time_s * MICROSECONDS, "args": {"FLOP/s": rate}}


def _arguments(row: OpRow) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "op": row.name,
        "operator": row.operator,
        "dtype": row.dtype,
        "flops": row.flops,
        "bytes": row.bytes,
        "intensity": row.intensity,
        "limit_us": row.limit_s * MICROSECONDS,
        "expected_us": row.time_s * MICROSECONDS,
        "bottleneck": row.bottleneck,
        "cause": row.cause,
    }
    if row.measured:
        arguments["measured_us"] = row.measured.median_s * MICROSECONDS
    # A trace is JSON, which has no word for infinity or NaN.
    return {name: value for name, value in arguments.items() if not (isinstance(value, float) and not math.isfinite(value))}
