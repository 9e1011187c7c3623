"""Prediction and reality side by side.

    estimated rows + measured rows ──by name (and occurrence)──> estimated rows with `measured` filled

A fused row takes the sum of its parts' times, and only if every part was measured. What was measured and is in no
estimated row is named in the notes with its time, so that nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..core.profile import OpRow, Profile, Timing


def merge(estimated: Profile, measured: Profile) -> Profile:
    """The estimate with the measured times of the same ops, and the measured totals."""
    left: dict[str, list[Timing | None]] = {}
    for row in measured.rows:
        left.setdefault(row.name, []).append(row.measured)
    rows = tuple(replace(row, measured=_take(row, left)) for row in estimated.rows)
    total = replace(
        estimated.total,
        measured=measured.total.measured,
        measured_peak_bytes=measured.total.measured_peak_bytes,
    )
    notes = dict.fromkeys((*estimated.notes, *measured.notes, *_unmatched(left)))
    return replace(estimated, rows=rows, total=total, notes=tuple(notes))


def _take(row: OpRow, left: dict[str, list[Timing | None]]) -> Timing | None:
    """Remove and add up the timings of the row's ops; None, with nothing removed, unless all are there."""
    names = row.parts or (row.name,)
    if any(len(left.get(name, ())) < names.count(name) or None in left[name][: names.count(name)] for name in names):
        return None
    return add_up([timing for name in names if (timing := left[name].pop(0))])


def add_up(timings: Sequence[Timing]) -> Timing:
    """Ops run one after the other: medians add; adding percentiles as well overstates the spread, on the safe side."""
    return Timing(
        sum(timing.median_s for timing in timings),
        sum(timing.p20_s for timing in timings),
        sum(timing.p80_s for timing in timings),
        min(timing.repeats for timing in timings),
    )


def _unmatched(left: dict[str, list[Timing | None]]) -> Iterable[str]:
    names = [name for name, timings in left.items() if any(timings)]
    if names:
        spent_s = sum(timing.median_s for name in names for timing in left[name] if timing)
        shown = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
        yield f"measured but not estimated: {shown} ({spent_s * 1e3:.3f} ms)"
