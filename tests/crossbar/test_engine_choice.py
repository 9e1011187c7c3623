"""Which engine is taken: the fastest that can, blocked with the reason, or an error where no other is wanted."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.core.errors import OptionError, UnknownNameError
from ridgeline.crossbar.engine import choose as engines
from ridgeline.crossbar.plan import Plan
from tests.crossbar.support import chip

PLAN = Plan(chip(), 70, 40)


class Able:
    name = "able"

    def unable(self, plan: Plan, device: str) -> str | None:
        return None


class Unable(Able):
    name = "unable"

    def unable(self, plan: Plan, device: str) -> str | None:
        return "more than 16 levels"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {"blocked": (Able(), ""), "native": (Unable(), ""), "fused": (None, "fused cannot be loaded: no Triton")}
    monkeypatch.setattr(engines, "load", lambda name: found[name])
    return found


def test_fastest_is_taken_where_it_can(loaded: dict[str, Any]) -> None:
    loaded["native"] = (Able(), "")
    engine, why = engines.choose(PLAN, "cpu")
    assert engine is loaded["native"][0] and why == "fastest on cpu"


def test_blocked_stands_in_and_says_why(loaded: dict[str, Any]) -> None:
    assert engines.choose(PLAN, "cpu") == (loaded["blocked"][0], "native: more than 16 levels")
    assert engines.choose(PLAN, "cuda:0") == (loaded["blocked"][0], "fused cannot be loaded: no Triton")
    assert engines.choose(PLAN, "cpu", "native") == (loaded["blocked"][0], "native: more than 16 levels")
    assert engines.choose(PLAN, "cpu", "blocked") == (loaded["blocked"][0], "asked for")


def test_exactly_raises(loaded: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="more than 16 levels"):
        engines.choose(PLAN, "cpu", "exactly:native")


def test_no_engine_at_all(loaded: dict[str, Any]) -> None:
    loaded["blocked"] = (Unable(), "")
    with pytest.raises(OptionError, match="no engine for 70 x 40"):
        engines.choose(PLAN, "cpu")


@pytest.mark.parametrize("name", ["fussed", "exactly:auto", "exactly:", ""])
def test_unknown_name(name: str) -> None:
    with pytest.raises(UnknownNameError, match="engine"):
        engines.check_wanted(name)


def test_real_engines_load() -> None:
    assert engines.choose(PLAN, "cpu", "exactly:blocked")[0].name == "blocked"
    assert engines.choose(PLAN, "cpu", "exactly:reference")[0].name == "reference"
