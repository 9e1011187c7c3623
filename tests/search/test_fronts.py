"""benchmarks/search_fronts.py: what it says of two fronts, by hand."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.support import ROOT


@pytest.fixture
def fronts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("search_fronts")


def net(accuracy: float, here: float, there: float) -> dict[str, Any]:
    return {"accuracy": accuracy, "latency_s": {"a": here, "b": there}}


def test_each_front_is_scored_on_both_machines(fronts: Any) -> None:
    rows = [{"front": [net(0.9, 4.0, 8.0), net(0.8, 2.0, 6.0)]}, {"front": [net(0.9, 6.0, 4.0), net(0.7, 3.0, 2.0)]}]
    fronts.compare(rows, ["a", "b"])
    # on a: worst (0.7, 6), best (0.9, 2), box 0.2 x 4; the first front has 0.1 x 4 + 0.1 x 2, the second nothing inside
    assert [row["hypervolume"]["a"] for row in rows] == pytest.approx([0.75, 0.0])
    # on b: worst (0.7, 8), best (0.9, 2), box 0.2 x 6; the first 0.1 x 2, the second 0.2 x 4
    assert [row["hypervolume"]["b"] for row in rows] == pytest.approx([1 / 6, 2 / 3])
    assert [row["beaten"] for row in rows] == [{"a": 0, "b": 2}, {"a": 2, "b": 0}]


def test_an_equal_network_beats_nobody(fronts: Any) -> None:
    assert not fronts.beats(net(0.9, 1.0, 1.0), net(0.9, 1.0, 1.0), "a")
    assert fronts.beats(net(0.9, 1.0, 1.0), net(0.9, 2.0, 1.0), "a") and not fronts.beats(net(0.9, 1.0, 1.0), net(0.9, 2.0, 1.0), "b")
