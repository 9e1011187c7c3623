"""A schedule of instructions as Chrome trace events, for Perfetto or chrome://tracing.

    Timeline.rows ──> {"traceEvents": [M names, X one slice an instruction], "displayTimeUnit": "ns", "otherData": {…}}   1 µs = 1 cycle

One track a unit of each resource; a slice lasts as long as its instruction holds the unit, so that slices never overlap, and its
arguments say when the result is there. Instructions that need no unit may overlap: they last until their result is there, on as
many further tracks as it takes. Those without any length have no slice; `otherData` says how many.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any

from ..estimate.spatial.schedule.instructions import Instruction
from ..estimate.spatial.schedule.scheduler import Row, Timeline

PROCESS = 1
LOOSE_TRACKS = 64  # a viewer shows no more usefully
LOOSE_NAME = "no unit"
TIME_UNIT = "1 us = 1 cycle"


def render_timeline(timeline: Timeline, title: str = "schedule") -> dict[str, Any]:
    """A JSON-ready trace; `title` names the process."""
    units = [(name, unit) for name, count in timeline.resources.items() for unit in range(count)]
    thread_of = {lane: thread for thread, lane in enumerate(units, start=1)}
    loose = _loose_tracks(timeline, first=len(units) + 1)
    tracks = {thread: f"{name}[{unit}]" for (name, unit), thread in thread_of.items()}
    tracks |= {thread: f"{LOOSE_NAME} {thread - len(units)}" for thread in sorted(set(loose.values()))}
    slices = list(_slices(timeline, thread_of, loose))
    timeless = sum(row.start == row.end for row in timeline.rows)
    return {
        "traceEvents": [*_names(title, tracks), *slices],
        "displayTimeUnit": "ns",
        "otherData": {
            "time_unit": TIME_UNIT,
            "cycles": timeline.cycles,
            "bounds": timeline.bounds.to_json(),
            "utilisation": timeline.utilisation,
            "instructions": len(timeline.rows),
            "instructions_without_time": timeless,
            "instructions_beyond_tracks": len(timeline.rows) - timeless - len(slices),
        },
    }


def _loose_tracks(timeline: Timeline, first: int) -> dict[int, int]:
    """Index → track of each instruction that takes time but no unit: the lowest track that is free."""
    free, ends, found = list(range(first, first + LOOSE_TRACKS)), list[tuple[int, int]](), dict[int, int]()
    for row in sorted((row for row in timeline.rows if row.unit is None and row.end > row.start), key=lambda row: (row.start, row.index)):
        while ends and ends[0][0] <= row.start:
            heappush(free, heappop(ends)[1])
        if free:
            found[row.index] = heappop(free)
            heappush(ends, (row.end, found[row.index]))
    return found


def _names(title: str, tracks: dict[int, str]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": PROCESS, "tid": 0, "ts": 0, "args": {"name": f"{title} ({TIME_UNIT})"}}
    for thread, name in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": thread, "ts": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": thread, "ts": 0, "args": {"sort_index": thread}}


def _slices(timeline: Timeline, thread_of: dict[tuple[str, int], int], loose: dict[int, int]) -> Iterator[dict[str, Any]]:
    for row in timeline.rows:
        instruction = timeline.instructions[row.index]
        thread = loose.get(row.index) if row.unit is None else thread_of.get((instruction.resource, row.unit))
        if thread is not None:
            yield {
                "ph": "X",
                "name": instruction.label or instruction.opcode,
                "cat": instruction.opcode,
                "pid": PROCESS,
                "tid": thread,
                "ts": row.start,
                "dur": instruction.held_cycles or row.end - row.start,
                "args": _arguments(instruction, row),
            }


def _arguments(instruction: Instruction, row: Row) -> dict[str, Any]:
    return {
        "index": row.index,
        "opcode": instruction.opcode,
        "sources": ", ".join(instruction.sources),
        "destination": instruction.destination or "",
        "result_cycle": row.start + instruction.latency,
        "end_cycle": row.end,
    }
