"""Settings of strategies: what may be given, its type and its bounds, whatever function takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest

from ridgeline.core.errors import OptionError, UnknownNameError
from ridgeline.search.differentiable.cycle import run_cycles
from ridgeline.search.differentiable.search import search_differentiable
from ridgeline.search.settings import BOUNDS, checked_settings
from ridgeline.search.strategies import STRATEGIES, own_settings
from ridgeline.search.supernet.network import make_supernet

Way = Literal["fast", "exact"]


def taking(
    space: object, *, population: int | None = None, rate: float = 0.1, words: tuple[str, ...] = (), flag: bool = True, name: str = "",
    way: Way | None = None, report: Callable[[str], None] | None = None, folder: str | None = None,
) -> None:  # fmt: skip
    """Every kind there is."""


def checked(**given: Any) -> dict[str, Any]:
    return checked_settings(taking, given, owner="strategy test", hidden=("folder",))


def test_what_fits_is_given_as_the_function_takes_it() -> None:
    found = checked(population=5, rate=1, words="one", flag=False, name="x", way="fast", report=print)
    assert found == {"population": 5, "rate": 1.0, "words": ("one",), "flag": False, "name": "x", "way": "fast", "report": print}
    assert isinstance(found["rate"], float)
    assert checked(population=None, words=["a", "b"], way=None) == {"population": None, "words": ("a", "b"), "way": None}
    assert checked_settings((taking, make_supernet), {"rate": 0.5, "k": 2}, owner="both") == {"rate": 0.5, "k": 2}
    assert checked_settings(taking, {"rate": 7}, owner="o", bounds={"rate": (7, 8)}) == {"rate": 7.0}


@pytest.mark.parametrize(
    ("name", "value"),
    [("population", "abc"), ("population", 2.0), ("population", True), ("population", 1), ("population", 10**400), ("rate", None),
     ("rate", "abc"), ("rate", True), ("rate", float("nan")), ("rate", float("inf")), ("rate", -1), ("words", 5), ("words", [1]),
     ("words", ["a"] * 99), ("words", None), ("flag", "no"), ("flag", 1), ("name", 3), ("way", "slow"), ("population", [3]), ("rate", {})],
)  # fmt: skip
def test_what_does_not_is_named_with_what_would(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"(?s){name} = .* of strategy test.* is wanted"):
        checked(**{name: value})


def test_what_cannot_be_written_down_is_no_setting() -> None:
    for name in ("space", "report", "folder", "x"):
        with pytest.raises(UnknownNameError) as caught:
            checked(**{name: 5})
        assert "known: flag, name, population, rate, way, words" in str(caught.value) or "did you mean" in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "name", "value"),
    [("model", "listed", 5), ("model", "first", "abc"), ("model", "first", 0), ("evolution", "population", 1_000_000),
     ("evolution", "screen", "no"), ("evolution", "proxy", 5), ("halving", "eta", "abc"), ("halving", "rungs", None),
     ("controller", "rate", "abc"), ("controller", "memory", 5), ("random", "x", 1), ("model", "seed", 1), ("model", "known", None)],
)  # fmt: skip
def test_strategies_refuse_them_before_they_begin(strategy: str, name: str, value: Any) -> None:
    with pytest.raises((OptionError, UnknownNameError), match=name):
        own_settings(strategy, {name: value})


def test_bounds_name_settings_there_are() -> None:
    taken = {name for make in (*STRATEGIES.values(), search_differentiable, make_supernet, run_cycles) for name in BOUNDS
             if accepts(make, name)}  # fmt: skip
    assert taken == set(BOUNDS)
    assert own_settings("evolution", {"proxy": "synflow"}) == {"proxy": ("synflow",)}


def accepts(make: Any, name: str) -> bool:
    """Whether a number within its bounds is taken."""
    try:
        checked_settings(make, {name: int(BOUNDS[name][1])}, owner="any")
    except UnknownNameError:
        return False
    return True
