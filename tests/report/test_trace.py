"""The trace: valid JSON in Chrome's trace event format, as Perfetto reads it."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from ridgeline.report import trace


def check_schema(rendered):
    """The parts of the trace event format Perfetto insists on; raises where one is broken."""
    document = json.loads(json.dumps(rendered, allow_nan=False))
    assert document["displayTimeUnit"] in ("ms", "ns")
    named = set()
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ph"] in ("X", "M", "C")
        assert isinstance(event["ts"], int | float) and event["ts"] >= 0
        assert isinstance(event["args"], dict)
        if event["ph"] == "M" and event["name"] == "thread_name":
            named.add(event["tid"])
        if event["ph"] == "X":
            assert event["dur"] > 0 and isinstance(event["cat"], str)
            assert event["tid"] in named
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    return document


def slices(document, thread):
    return [event for event in document["traceEvents"] if event["ph"] == "X" and event["tid"] == thread]


def test_estimate_has_one_track_with_its_own_times(estimate_profile):
    document = check_schema(trace.render_profile(estimate_profile))
    timed = [row for row in estimate_profile.rows if row.time_s]
    events = slices(document, trace.EXPECTED)
    assert len(events) == len(timed)
    assert not slices(document, trace.MEASURED)
    for event, row in zip(events, timed, strict=True):
        assert event["name"] == row.layer
        assert event["ts"] == pytest.approx(row.start_s * 1e6) and event["dur"] == pytest.approx(row.time_s * 1e6)
        assert event["args"]["flops"] == row.flops and event["args"]["bytes"] == row.bytes
        assert event["args"]["bottleneck"] == row.bottleneck and event["args"]["cause"] == row.cause
    assert document["otherData"]["ops_without_time"] == 1


def test_measured_track_lays_medians_end_to_end(measured_profile):
    document = check_schema(trace.render_profile(measured_profile))
    events = slices(document, trace.MEASURED)
    assert len(events) == sum(row.measured is not None for row in measured_profile.rows)
    for before, after in pairwise(events):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"])
    assert events[-1]["ts"] + events[-1]["dur"] == pytest.approx(measured_profile.total.measured.median_s * 1e6)
    names = {event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert names == {"expected", "measured"}


def test_counter_returns_to_zero(estimate_profile):
    samples = [event for event in trace.render_profile(estimate_profile)["traceEvents"] if event["ph"] == "C"]
    first = estimate_profile.rows[0]
    assert samples[0]["args"]["FLOP/s"] == pytest.approx(first.flops / first.time_s)
    assert samples[-1]["args"]["FLOP/s"] == 0
    assert [sample["ts"] for sample in samples] == sorted(sample["ts"] for sample in samples)


@pytest.mark.parametrize("name", ["empty_profile", "odd_profile", "large_profile", "hostile_profile"])
def test_any_profile_gives_valid_json(request, name):
    check_schema(trace.render_profile(request.getfixturevalue(name)))


def test_the_check_can_fail(estimate_profile):
    rendered = trace.render_profile(estimate_profile)
    rendered["traceEvents"][-1] = {**rendered["traceEvents"][-1], "ts": float("nan")}
    with pytest.raises(ValueError):
        check_schema(rendered)
    rendered["traceEvents"] = [event for event in rendered["traceEvents"] if event["ph"] != "M"]
    with pytest.raises((AssertionError, ValueError)):
        check_schema(rendered)
