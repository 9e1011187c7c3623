"""The dispatch table: from which size on ours beat torch, by what was measured.

    rows ──wins_table──> {"op|kind|dtype": {"eager": least size, "compile": least size, "saved_us": at the first}}      null where never

Eager: host plus GPU time of ours at most eager's. Compile: GPU time of ours at most 0.97 of torch.compile's, since inside a
compiled graph an operator of ours also stops fusion. A size counts when every row of it and of every larger one was won,
forward and backward. Rows that torch.compile could not run say nothing about it; rows that ours could not run are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

MARGIN = 0.97
Row = Mapping[str, Any]


def wins_table(rows: Iterable[Row]) -> dict[str, dict[str, float | None]]:
    """Lines for every op, kind and dtype among the rows (BenchRow.to_json())."""
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(f"{row['op']}|{row['kind']}|{row['dtype']}", []).append(row)
    return {line: _line(members) for line, members in lines.items()}


def _line(rows: list[Row]) -> dict[str, float | None]:
    eager = _least(rows, beats_eager)
    saved = [_saved_us(row) for row in rows if row["elements"] == eager]
    return {"eager": eager, "compile": _least(rows, beats_compile), "saved_us": round(min(saved, default=0.0), 1)}


def _saved_us(row: Row) -> float:
    """Host and GPU time, as `beats_eager` compares them."""
    ours, eager = _whole_ms(row["ours"]), _whole_ms(row["eager"])
    return (eager - ours) * 1e3 if ours is not None and eager is not None else 0.0


def beats_eager(row: Row) -> bool | None:
    """None where eager was not measured."""
    if row["eager"] is None:
        return None
    ours, eager = _whole_ms(row["ours"]), _whole_ms(row["eager"])
    return ours is not None and (eager is None or ours <= eager)


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
