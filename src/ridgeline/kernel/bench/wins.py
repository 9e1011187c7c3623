"""The dispatch table: from which size on ours beat torch, by what was measured.

    rows ──wins_table──> {"op|kind|dtype": {"eager": least size, "compile": least size}}      null where never

Eager: host plus GPU time of ours at most eager's; where the GPU is what one waits for, GPU time alone. It is, where a call keeps it
busy for longer than the host needs for the call, six calls for a forward and backward (96 and 135 µs of host time were measured
in a chain of softmax and swiglu, whose calls take about 20): launches are ahead of it then. Compile: GPU time of ours at most
0.97 of torch.compile's, since inside a compiled graph an operator of ours also stops fusion. A size counts when every row of it
and of every larger one was won, forward and backward. Rows that torch.compile could not run say nothing about it; rows that ours
could not run are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

MARGIN = 0.97
CALLS_WITH_BACKWARD = 6
Row = Mapping[str, Any]


def wins_table(rows: Iterable[Row]) -> dict[str, dict[str, int | None]]:
    """Lines for every op, kind and dtype among the rows (BenchRow.to_json())."""
    lines: dict[str, list[Row]] = {}
    members = list(rows)
    calls_us: dict[tuple[str, str], float] = {}
    for row in members:
        if not row["backward"] and row["ours"]["host_us"]:
            calls_us[_call(row)] = min(calls_us.get(_call(row), float("inf")), float(row["ours"]["host_us"]))
    for row in ({**row, "call_us": calls_us.get(_call(row), float(row["ours"]["host_us"] or 0))} for row in members):
        lines.setdefault(f"{row['op']}|{row['kind']}|{row['dtype']}", []).append(row)
    return {line: _line(members) for line, members in lines.items()}


def _line(rows: list[Row]) -> dict[str, int | None]:
    return {"eager": _least(rows, beats_eager), "compile": _least(rows, beats_compile)}


def _call(row: Row) -> tuple[str, str]:
    """What a call costs the host does not depend on sizes: the least measured is the one without disturbances."""
    return row["op"], row["dtype"]


def beats_eager(row: Row) -> bool | None:
    """None where eager was not measured."""
    if row["eager"] is None:
        return None
    ours, eager = _whole_ms(row["ours"]), _whole_ms(row["eager"])
    if ours is None or eager is None:
        return ours is not None
    return ours <= eager or (gpu_is_the_limit(row) and row["ours"]["gpu_ms"] <= row["eager"]["gpu_ms"])


def gpu_is_the_limit(row: Row) -> bool:
    """Whether the call keeps the GPU busy for longer than the host takes to make it."""
    calls = CALLS_WITH_BACKWARD if row["backward"] else 1
    return float(row["ours"]["gpu_ms"]) * 1e3 >= calls * float(row.get("call_us", row["ours"]["host_us"] or 0))


def beats_compile(row: Row) -> bool | None:
    """None where torch.compile was not measured."""
    theirs = row["compile"]["gpu_ms"] if row["compile"] else None
    ours = row["ours"]["gpu_ms"]
    if ours is None:
        return False
    return None if theirs is None else ours <= MARGIN * theirs


def _whole_ms(timed: Row) -> float | None:
    return None if timed["gpu_ms"] is None else float(timed["gpu_ms"]) + float(timed["host_us"] or 0) / 1e3


def _least(rows: Iterable[Row], won: Callable[[Row], bool | None]) -> int | None:
    by_size: dict[int, list[bool]] = {}
    for row in rows:
        result = won(row)
        if result is not None:
            by_size.setdefault(int(row["elements"]), []).append(result)
    least = None
    for size in sorted(by_size, reverse=True):
        if not all(by_size[size]):
            break
        least = size
    return least
