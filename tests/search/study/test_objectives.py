"""Objectives, limits and fronts against brute force."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import OptionError, RidgelineError
from ridgeline.search.study.objectives import nondominated, parse_limit, parse_objectives, signed


def test_limits_are_read_in_their_units() -> None:
    for text, bound in (
        ("memory<=4MiB", 4 * 2.0**20), ("memory<=1GiB", 2.0**30), ("accuracy>=100%", 1.0), ("latency<=80us", 8e-05),
        ("latency<=2ms", 2e-3), ("latency <= 80 us", 80e-6), ("latency<=0.5", 0.5), ("energy<=30uJ", 30e-6), ("memory<=4MB", 4e6),
        ("parameters<=1.5M", 1.5e6), ("flops<=2GFLOP", 2e9), ("accuracy>=92%", 0.92), ("accuracy>=0.9", 0.9),
    ):  # fmt: skip
        limit = parse_limit(text)
        assert math.isclose(limit.bound, bound) and limit.at_most == ("<=" in text)
        name = limit.objective.name
        assert limit.met({name: bound}) and limit.met({}) and not limit.met({name: bound * (1.01 if limit.at_most else 0.99)})
        assert parse_limit(limit.text).bound == limit.bound
    for wrong in ("latency", "latency<2ms", "latency<=2m", "latency<=ms", "latency<=2GB", "lateny<=2ms", "accuracy>=3ms", "latency<=1e999"):
        with pytest.raises(RidgelineError):
            parse_limit(wrong)


@pytest.mark.parametrize(
    ("text", "told"),
    [("latency<=1e99999999999999999999", "beyond what"), ("parameters<=1e999999999999999999999M", "beyond what"),
     ("accuracy>=92", "write accuracy>=92%"), ("accuracy>=120%", "at most 100%"), ("crossbar_accuracy<=1.5", "is a share"),
     ("memory<=4Mi", "use MB or GB or MiB"), ("flops<=2G", "use MFLOP or GFLOP"), ("latency<=2Mis", "use ms or us"),
     ("parameters<=3MB", "k, M or G")],
)  # fmt: skip
def test_a_limit_that_cannot_be_meant_is_told_what_can(text: str, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        parse_limit(text)


def test_objectives_know_their_direction() -> None:
    found = parse_objectives("accuracy, latency,parameters")
    assert signed(found, {"accuracy": 0.9, "latency": 2.0}) == [0.9, -2.0, -math.inf]
    for wrong in ("", "accuracy,accuracy", "speed", "accuracy,latency,energy,memory,flops"):
        with pytest.raises(RidgelineError):
            parse_objectives(wrong)
    assert isinstance(OptionError("a", why="b", do="c"), RidgelineError)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), max_size=9))
def test_the_front_is_what_no_other_beats(rows: list[tuple[int, int, int]]) -> None:
    kept = nondominated(rows)
    for place, row in enumerate(rows):
        better = any(other != row and all(a >= b for a, b in zip(other, row, strict=True)) for other in rows)
        assert (place in kept) == (not better and row not in rows[:place])
