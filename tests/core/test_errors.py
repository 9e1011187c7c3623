"""Suggestions are near what was written, or there are none and everything known is listed."""

from __future__ import annotations

import pytest

from ridgeline.core.errors import nearest, unknown_name

WORDS = ("ws", "is", "os", "rs", "any", "compare", "accuracy", "latency", "flops", "layer1.0.conv1")


@pytest.mark.parametrize("name", ["foo", "x", "qqqq"])
def test_what_is_near_nothing_lists_everything(name: str) -> None:
    assert nearest(name, WORDS) == []
    error = unknown_name("word", name, WORDS, see="the list")
    assert error.why == f"no word of that name; known: {', '.join(sorted(WORDS))}" and error.do == "see the list"


@pytest.mark.parametrize(
    ("name", "meant"), [("wss", "ws"), ("compar", "compare"), ("acuracy", "accuracy"), ("lat", "latency"), ("conv1", "layer1.0.conv1")]
)
def test_what_is_misspelt_or_a_part_of_a_name_is_found(name: str, meant: str) -> None:
    assert nearest(name, WORDS)[0] == meant
    assert f"did you mean {meant}" in unknown_name("word", name, WORDS, see="the list").why


def test_likeness_comes_before_being_a_part_and_no_more_than_asked_for() -> None:
    known = ["very.long.name.of.conv1", "conv2", "another.long.name.of.conv1"]
    assert nearest("conv1", known) == ["conv2", known[0], known[2]] and nearest("conv1", known, count=1) == ["conv2"]
