"""The trace of a schedule: valid trace events, a track a unit, a slice an instruction, a microsecond a cycle."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from ridgeline.estimate.spatial.schedule import Instruction, schedule
from ridgeline.report import timeline_trace

INSTRUCTIONS = [
    Instruction("load", (), "x", 4, "dma", label="tile 0"),
    Instruction("load", (), "y", 4, "dma"),
    Instruction("matmul", ("x", "y"), "z", 9, "array", busy=2),
    Instruction("matmul", ("x", "y"), "z2", 9, "array", busy=2),
    Instruction("mark", ("x",), None, 0),
    Instruction("wait", (), None, 5),
    Instruction("wait", (), None, 6),
    Instruction("wait", ("y",), None, 3),
]
UNITS = {"dma": 2, "array": 1, "vector": 1}


def check_schema(rendered):
    """What Perfetto insists on, and slices of one track end to end; raises where something is broken."""
    document = json.loads(json.dumps(rendered, allow_nan=False))
    assert document["displayTimeUnit"] == "ns"
    tracks = {event["tid"]: event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str) and event["name"]
        assert event["ph"] in ("X", "M") and event["pid"] == timeline_trace.PROCESS and isinstance(event["tid"], int)
        assert isinstance(event["ts"], int) and event["ts"] >= 0 and isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["dur"] > 0 and event["tid"] in tracks and isinstance(event["cat"], str)
    for track in tracks:
        spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in slices(document) if event["tid"] == track)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    return document, tracks


def slices(document):
    return [event for event in document["traceEvents"] if event["ph"] == "X"]


def test_one_track_a_unit_and_one_slice_an_instruction():
    timeline = schedule(INSTRUCTIONS, UNITS)
    document, tracks = check_schema(timeline_trace.render_timeline(timeline, "two tiles"))
    assert list(tracks.values()) == ["dma[0]", "dma[1]", "array[0]", "vector[0]", "no unit 1", "no unit 2", "no unit 3"]
    drawn = {event["args"]["index"]: (tracks[event["tid"]], event["name"], event["ts"], event["dur"]) for event in slices(document)}
    assert drawn == {
        0: ("dma[0]", "tile 0", 0, 4),
        1: ("dma[1]", "load", 0, 4),
        2: ("array[0]", "matmul", 4, 2),  # as long as it holds the unit
        3: ("array[0]", "matmul", 6, 2),
        5: ("no unit 1", "wait", 0, 5),
        6: ("no unit 2", "wait", 0, 6),
        7: ("no unit 3", "wait", 4, 3),
    }
    second = next(event for event in slices(document) if event["args"]["index"] == 3)
    assert second["cat"] == "matmul"
    assert second["args"] == {"index": 3, "opcode": "matmul", "sources": "x, y", "destination": "z2", "result_cycle": 15, "end_cycle": 15}


def test_the_trace_says_what_a_microsecond_is():
    timeline = schedule(INSTRUCTIONS, UNITS)
    document, _ = check_schema(timeline_trace.render_timeline(timeline, "two tiles"))
    other = document["otherData"]
    assert other["time_unit"] == "1 us = 1 cycle"
    assert document["traceEvents"][0]["args"]["name"] == "two tiles (1 us = 1 cycle)"
    assert other["cycles"] == timeline.cycles == 15
    assert other["bounds"] == timeline.bounds.to_json() and other["utilisation"] == timeline.utilisation
    assert (other["instructions"], other["instructions_without_time"], other["instructions_beyond_tracks"]) == (8, 1, 0)


def test_a_track_without_unit_is_used_again():
    waits = [Instruction("wait", (f"r{i}",), f"r{i + 1}", 2) for i in range(5)]
    _, tracks = check_schema(timeline_trace.render_timeline(schedule(waits, {})))
    assert list(tracks.values()) == ["no unit 1"]


def test_what_finds_no_track_is_counted():
    waits = [Instruction("wait", (), None, 2) for _ in range(timeline_trace.LOOSE_TRACKS + 3)]
    document, tracks = check_schema(timeline_trace.render_timeline(schedule(waits, {})))
    assert len(tracks) == len(slices(document)) == timeline_trace.LOOSE_TRACKS
    assert document["otherData"]["instructions_beyond_tracks"] == 3


def test_nothing_is_a_valid_trace():
    document, tracks = check_schema(timeline_trace.render_timeline(schedule([], {"dma": 1})))
    assert list(tracks.values()) == ["dma[0]"] and not slices(document)


def test_the_check_can_fail():
    timeline = schedule(INSTRUCTIONS, UNITS)
    rows = tuple(replace(row, start=5) if row.index == 3 else row for row in timeline.rows)
    with pytest.raises(AssertionError):
        check_schema(timeline_trace.render_timeline(replace(timeline, rows=rows)))
    rendered = timeline_trace.render_timeline(timeline)
    rendered["traceEvents"] = [event for event in rendered["traceEvents"] if event["ph"] != "M"]
    with pytest.raises(AssertionError):
        check_schema(rendered)
