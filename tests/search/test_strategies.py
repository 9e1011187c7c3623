"""Every strategy, by one contract: any space, replay from a journal, no repeats, limits kept; and what is each one's own."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import OptionError, UnknownNameError
from ridgeline.search.front import hypervolume
from ridgeline.search.spaces.space import Point, Space, load_space
from ridgeline.search.strategies import STRATEGIES, Ask, Strategy, make_strategy
from ridgeline.search.strategy.acquisition import choose
from ridgeline.search.strategy.base import ordered
from ridgeline.search.strategy.controller import Controller
from ridgeline.search.strategy.evolution import Evolution
from ridgeline.search.strategy.halving import Halving
from ridgeline.search.strategy.model import ModelSearch
from ridgeline.search.strategy.screen import chance_to_fit
from tests.support import FULL, full_or_tenth

NAMES = sorted(STRATEGIES)


@cache
def space(name: str = "nb201") -> Space:
    small: dict[str, dict[str, Any]] = {"nb201": {"channels": 4, "cells": 1, "image": 8}, "transformer": {}, "macro": {}, "darts": {}}
    return load_space(name, **small[name])


def made(name: str, where: Space, *, objectives: int = 1, trials: int | None = 40, seed: int = 0, **options: Any) -> Strategy:
    if name in ("tpe", "nsga2"):
        pytest.importorskip("optuna")
    if name == "evolution":
        options = {"proxy": (), **options}
    return make_strategy(name, where, objectives=objectives, budget_trials=trials, seed=seed, **options)


def worth(point: Point, objectives: int) -> tuple[list[float], bool]:
    """Of a point, by its choices alone: objectives pull apart, about one in four breaks a limit, some have no number."""
    total = sum((place % 3 + 1) * choice for place, choice in enumerate(point))
    values = [float(total), -(float(sum(point)) ** 1.5), float(point[0] - point[-1])][:objectives]
    if point[0] == point[1] == 0:
        values[0] = float("nan")
    return values, (point[1] + point[2]) % 4 != 1


def steps(strategy: Strategy, count: int, objectives: int) -> list[Ask]:
    found = []
    for _ in range(count):
        ask = strategy.ask()
        assert strategy.ask() is ask  # the question stands until it is answered
        strategy.tell(ask, *worth(ask.point, objectives))
        found.append(ask)
    return found


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=full_or_tenth(20), deadline=None)
@given(data=st.data())
def test_a_journal_brings_back_the_same_search(name: str, data: st.DataObject) -> None:
    """Told again, with the questions or without them, a fresh strategy goes on as the killed one would have."""
    where = space(data.draw(st.sampled_from(("nb201", "transformer"))))
    objectives, seed = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 99))
    cut, more = data.draw(st.integers(0, 24)), 4
    first, asking, silent = (made(name, where, objectives=objectives, seed=seed) for _ in range(3))
    journal = steps(first, cut, objectives)
    for ask in journal:
        assert asking.ask() == ask
        for strategy in (asking, silent):
            strategy.tell(ask, *worth(ask.point, objectives))
    later = steps(first, more, objectives)
    assert steps(asking, more, objectives) == later and steps(silent, more, objectives) == later
    assert first.best() == silent.best()


@pytest.mark.parametrize("name", NAMES)
def test_every_space_every_limit(name: str) -> None:
    """Points are in range in any space; infeasible ones and ones without a number are never shipped."""
    for kind, count in (("macro", 6), ("darts", 12 if name == "tpe" else 8)):
        where = space(kind)
        strategy = made(name, where, objectives=2, trials=16, seed=3)
        asked = steps(strategy, count, 2)
        for ask in asked:
            assert len(ask.point) == len(where.decisions) and 0 < ask.fidelity <= 1
            assert all(0 <= index < len(decision.choices) for index, decision in zip(ask.point, where.decisions, strict=True))
        values, feasible = worth(strategy.best(), 2)
        assert feasible and np.isfinite(values).all()


@pytest.mark.parametrize("name", sorted({*STRATEGIES} - {"halving", "tpe", "nsga2"}))
def test_no_computation_is_asked_twice(name: str) -> None:
    asked = steps(made(name, space()), 30, 1)
    assert len({space().canonical(ask.point) for ask in asked}) == 30


@pytest.mark.parametrize("name", ["model", "evolution", "controller", "tpe", "nsga2"])
def test_limits_are_learnt(name: str) -> None:
    """Three fifths of the space are refused, by one decision: after a while far fewer are asked there."""
    count = 120 if name == "controller" else 50  # one gradient step a trial
    refused, late = 0, 0
    for seed in range(full_or_tenth(20)):
        strategy = made(name, space(), seed=seed, trials=count)
        for number in range(count):
            ask = strategy.ask()
            broken = ask.point[2] in (2, 3, 4)
            strategy.tell(ask, [] if broken else [float(ask.point[0] == 3) + float(ask.point[1] == 2)], feasible=not broken)
            refused, late = refused + (broken and number >= count - 30), late + (number >= count - 30)
    assert refused < 0.42 * late  # chance: 0.6


@pytest.mark.parametrize("name", ["model", "evolution", "controller", "tpe", "nsga2"])
def test_better_than_chance(name: str) -> None:
    """On a space too large to list, by a sum over decisions."""
    where = space("transformer")

    def reached(kind: str) -> float:
        values = []
        strategy = made(kind, where, trials=60, seed=1)
        for _ in range(60):
            ask = strategy.ask()
            values.append(float(sum(choice == 1 for choice in ask.point)))
            strategy.tell(ask, [values[-1]])
        return float(np.mean(values[40:]))

    assert reached(name) > reached("random") + 0.3


def test_halving_keeps_the_best_third() -> None:
    strategy = made("halving", space(), trials=13)
    assert isinstance(strategy, Halving)
    asked = []
    for _ in range(13):
        ask = strategy.ask()
        asked.append(ask)
        strategy.tell(ask, [float(sum(ask.point)) * ask.fidelity])
    assert [ask.fidelity for ask in asked] == [1 / 9] * 9 + [1 / 3] * 3 + [1.0]
    first = sorted((sum(ask.point) for ask in asked[:9]), reverse=True)
    assert [sum(ask.point) for ask in asked[9:12]] == first[:3] and sum(asked[12].point) == first[0]
    assert strategy.best() == asked[12].point
    assert strategy.ask().fidelity == 1 / 9  # the next bracket
    nothing = made("halving", space(), trials=13)
    for _ in range(40):
        assert nothing.ask().fidelity == 1 / 9  # nothing feasible, nothing promoted
        nothing.tell(nothing.ask(), [], feasible=False)
    with pytest.raises(OptionError, match="without a result"):
        nothing.best()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 400), st.integers(2, 5), st.integers(1, 4))
def test_halving_fits_its_budget(trials: int, eta: int, rungs: int) -> None:
    made = Halving(space(), 1, trials, 0, eta=eta, rungs=rungs)
    used, wider = (sum(width // eta**rung for rung in range(made.rungs)) for width in (made.width, made.width + 1))
    assert used <= trials < wider
    assert made.rungs == rungs or sum(eta**rung for rung in range(made.rungs + 1)) > trials


def test_the_controllers_step_is_the_gradient() -> None:
    """Of log p(point) x (reward - baseline) + entropy, by differences."""
    controller = made("controller", space(), entropy=0.3)
    assert isinstance(controller, Controller)
    steps(controller, 20, 1)
    before, point = controller.logits.copy(), controller.ask().point
    reward, baseline = controller._reward((9.0,)), controller.baseline

    def gain(logits: Any) -> float:
        controller.logits = logits
        shares = controller.shares()
        chosen = np.log([row[choice] for row, choice in zip(shares, point, strict=True)]).sum()
        return float((reward - baseline) * chosen - 0.3 * (shares * np.log(shares)).sum())

    moments, step = controller.first.copy(), 1e-5
    slopes = np.zeros(before.shape)
    for place in product(*map(range, before.shape)):
        moved = np.zeros(before.shape)
        moved[place] = step
        slopes[place] = (gain(before + moved) - gain(before - moved)) / (2 * step)
    controller.logits = before
    controller._step(point, (9.0,))
    assert np.abs((controller.first - 0.9 * moments) / 0.1 - slopes).max() < 1e-7 and np.abs(slopes).max() > 0.01


def test_evolution_ages_and_begins_with_proxies() -> None:
    strategy = made("evolution", space(), population=5, tournament=2, proxy=("synflow",), seed=1)
    assert isinstance(strategy, Evolution)
    asked = [ask.point for ask in steps(strategy, 5, 1)]
    scores = [sum(choice in (2, 3) for choice in space().canonical(point)) for point in asked]
    chance = np.mean([sum(choice in (2, 3) for choice in space().canonical(space().random(np.random.default_rng(n)))) for n in range(50)])
    assert np.mean(scores) > chance + 0.5  # more convolutions, more flow
    plain = made("evolution", space(), population=5, tournament=2)
    assert isinstance(plain, Evolution)
    told = []
    for number in range(12):
        ask = plain.ask()
        plain.tell(ask, [float(-number)])
        told.append(ask.point)
        assert list(plain.alive) == told[-5:]  # the oldest dies, good as it is


def test_order_and_choice_of_several() -> None:
    values = np.array([[1.0, 1.0], [3.0, 0.0], [2.0, 2.0], [0.0, 0.0]])
    assert set(ordered(values)[:2]) == {1, 2} and ordered(values)[3] == 3
    random, sure = np.random.default_rng(0), np.full(3, 1e-6)
    means = [np.array([0.1, 0.9, 0.5]), np.array([0.9, 0.1, 0.1]), np.array([0.5, 0.5, 0.1])]
    picked = {choose([(mean, sure) for mean in means], np.ones(3), np.array([[0.0] * 3, [1.0] * 3]), random) for _ in range(30)}
    assert picked == {0, 1}  # the third is worse than the second throughout
    assert choose([(means[1], sure)], np.array([0.0, 1.0, 1.0]), np.zeros((2, 1)), random) != 0
    flags: dict[Point, Any] = {(number,): np.array([number < 5, number >= 5]) for number in range(10)}
    chance = chance_to_fit(flags, {(number,): None for number in range(5)}, np.array([[True, False], [False, True]]), 2.0)
    assert chance[0] < 0.1 and chance[1] > 0.9


def test_foreign_tells_and_refusals() -> None:
    for name in NAMES:
        strategy = made(name, space())
        strategy.ask()
        for choice in range(3):
            strategy.tell(Ask((choice, 2, 2, 2, 2, 2)), [float(choice)])  # not what was asked
        assert strategy.best()[0] == 2 or name == "model"
    for call in (
        lambda: made("modle", space()),
        lambda: made("random", space(), population=3),
        lambda: made("evolution", space(), population=3, tournament=9),
        lambda: made("evolution", space(), proxy=("synflw",)).ask(),
        lambda: made("random", space(), objectives=0),
        lambda: made("halving", space(), eta=1),
        lambda: made("random", space()).tell(Ask((0,) * 6), [1.0, 2.0]),
        lambda: made("random", space()).best(),
    ):
        with pytest.raises((OptionError, UnknownNameError)):
            call()


@pytest.mark.skipif(not FULL, reason="minutes; RIDGELINE_FULL=1")
@pytest.mark.parametrize("name", NAMES)
def test_long_runs_replay(name: str) -> None:
    first, second = made(name, space(), trials=150, objectives=2), made(name, space(), trials=150, objectives=2)
    for ask in steps(first, 140, 2):
        second.tell(ask, *worth(ask.point, 2))
    assert steps(first, 5, 2) == steps(second, 5, 2)


def knowing(name: str, seed: int, **options: Any) -> Strategy:
    """A strategy that knows the second objective, and that point[2] must be small."""
    return made(name, space(), objectives=2, trials=24, seed=seed, known=lambda p: ((None, -float(sum(p))), p[2] < 3), **options)


@pytest.mark.parametrize("name", ["model", "evolution"])
def test_what_is_known_is_not_guessed_and_no_known_limit_is_broken(name: str) -> None:
    """The same after a journal was told again; without knowledge a third of the points would be refused."""
    for seed in range(3):
        first, again, asked = knowing(name, seed), knowing(name, seed), []
        for _ in range(24):
            ask = first.ask()
            assert again.ask() == ask and ask.point[2] < 3
            for strategy in (first, again):
                strategy.tell(ask, [float(ask.point[0] == 3) + float(ask.point[1] == 2), -float(sum(ask.point))])
            asked.append(ask.point)
        screen = first.pool.screen if isinstance(first, ModelSearch) else first.screen  # type: ignore[attr-defined, union-attr]
        points = [space().random(np.random.default_rng(one)) for one in range(20)]
        (_, deviation), (known, sure) = (guess for guess in screen.guesses(points)[0])
        assert known.tolist() == [-float(sum(point)) for point in points] and sure.max() < 1e-6 < deviation.min()
        assert [bool(kept) for kept in screen.feasible(points) > 0] == [point[2] < 3 for point in points]


@pytest.mark.parametrize("name,options", [("evolution", {"screen": False}), *((one, {}) for one in NAMES if one not in ("tpe", "nsga2"))])
def test_a_tight_known_limit_is_never_broken(name: str, options: dict[str, Any]) -> None:
    """One point in thirty keeps it; first parents by proxies, children and neighbours are held to it too."""
    tiny = load_space("nb201", channels=2, cells=1, classes=3, image=4, image_channels=1)

    def known(point: Point) -> tuple[tuple[float | None, ...], bool]:
        return (None, -float(sum(point))), sum(point) <= 6

    for seed in range(2):
        strategy = made(name, tiny, objectives=2, trials=12, seed=seed, known=known, **options)
        for _ in range(12):
            ask = strategy.ask()
            assert known(ask.point)[1], (name, ask)
            strategy.tell(ask, [float(hash(ask.point) % 7), -float(sum(ask.point))])


def test_first_points_are_spread_over_known_costs() -> None:
    costs = []
    for seed in range(6):
        strategy = made("model", space(), objectives=2, trials=32, seed=seed, known=lambda point: ((None, -float(sum(point))), True))
        for _ in range(8):
            ask = strategy.ask()
            costs.append(sum(ask.point))
            strategy.tell(ask, [0.0, -float(costs[-1])])
    drawn = [sum(space().random(np.random.default_rng(one))) for one in range(500)]
    assert np.std(costs) > 1.2 * np.std(drawn)


def test_known_costs_find_a_larger_front() -> None:
    """Of a sum over decisions against another one; the mean over seeds, and the same where the knowledge is wrong is worse."""

    def reached(known: Any) -> float:
        volumes = []
        for seed in range(full_or_tenth(40)):
            strategy, values = made("model", space(), objectives=2, trials=16, seed=seed, known=known), []
            for _ in range(16):
                ask = strategy.ask()
                values.append([float(sum(choice == 3 for choice in ask.point)), -float(cost(ask.point))])
                strategy.tell(ask, values[-1])
            volumes.append(hypervolume(np.array(values), (-0.5, -31.0)))
        return float(np.mean(volumes))

    def cost(point: Point) -> float:
        return float(sum((place + 1) * (choice > 1) for place, choice in enumerate(point)) + sum(point) / 3)

    right = reached(lambda point: ((None, -cost(point)), True))
    assert right > reached(None) and right > reached(lambda point: ((None, cost(point)), True))
