"""The front against brute force over 200 chips; seeds, limits, bounds and workers change nothing they should not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import dist, log

import pytest

from ridgeline.core.errors import OptionError
from ridgeline.estimate.spatial.codesign import search as searching
from ridgeline.estimate.spatial.codesign.evaluate import Bound, Evaluated, evaluate_chip
from ridgeline.estimate.spatial.codesign.journal import Journal
from ridgeline.estimate.spatial.codesign.result import Codesign, codesign
from ridgeline.estimate.spatial.codesign.search import Limits
from ridgeline.estimate.spatial.codesign.space import DesignSpace
from ridgeline.estimate.spatial.network import map_layers
from tests.estimate.spatial.codesign.nets import SPACE, pebble_net, pebble_problem

SMALL = DesignSpace(rows=(1, 2), columns=(1, 2), buffer_bits=(1024, 4096), bandwidth_bits=(8, 64))


@cache
def every_chip() -> tuple[Evaluated, ...]:
    """All 200, each by itself."""
    problem = replace(pebble_problem(), rules=SPACE.rules)
    return tuple(evaluate_chip(problem, SPACE.choice(SPACE.picks(number))) for number in range(SPACE.size))


def objectives(chip: Evaluated) -> tuple[float, float, float]:
    return chip.latency_s, chip.energy_j, chip.area_mm2


def brute_front(fits: Callable[[Evaluated], bool] = lambda chip: True) -> set[str]:
    """By the definition: a chip is out if another is nowhere worse and somewhere better."""
    chips = [chip for chip in every_chip() if fits(chip)]
    found = set()
    for one in chips:
        mine, beaten = objectives(one), False
        for other in chips:
            theirs = objectives(other)
            if theirs[0] <= mine[0] and theirs[1] <= mine[1] and theirs[2] <= mine[2] and theirs != mine:
                beaten = True
                break
        if not beaten:
            found.add(str(one.choice))
    return found


def names(found: Codesign) -> set[str]:
    return {str(chip.choice) for chip in found.front}


def test_brute_force_stands_on_the_mapper() -> None:
    """Of the chips without fusion, all three objectives from map_layers and the target alone."""
    from ridgeline.estimate.spatial.codesign.chip import build

    for number in range(1, SPACE.size, 26):
        choice = SPACE.choice(SPACE.picks(number))
        choice = replace(choice, fusion=False)
        chip, array = evaluate_chip(pebble_problem(), choice), build(pebble_problem().base, choice, SPACE.rules)
        network = map_layers(pebble_net(), array)
        assert objectives(chip) == pytest.approx((network.seconds, network.energy_pj * 1e-12, array.area_mm2))


def test_grid_front_is_brute_force_over_200_chips() -> None:
    found = codesign(pebble_problem(), SPACE, budget=200)
    assert found.method == "grid" and found.counts["seen"] == 200 and names(found) == brute_front()
    assert 5 < len(found.front) < 100 and len(set(map(objectives, every_chip()))) > 50


def test_evolution_front_is_brute_force_once_all_are_seen() -> None:
    found = codesign(pebble_problem(), SPACE, method="evolve", budget=200, seed=3)
    assert found.method == "evolve" and found.counts["seen"] == 200 and names(found) == brute_front()


def test_evolution_finds_most_of_the_front_with_a_third_of_the_chips() -> None:
    whole = brute_front()
    found = codesign(pebble_problem(), SPACE, method="evolve", budget=66, seed=1)
    assert found.counts["mapped"] <= 66 and found.counts["seen"] < 200
    assert len(names(found) & whole) >= 0.6 * len(whole)


@pytest.mark.parametrize("method", ["grid", "evolve"])
def test_limits(method: str) -> None:
    area, power = sorted(c.area_mm2 for c in every_chip())[120], sorted(c.power_w for c in every_chip())[120]
    found = codesign(pebble_problem(), SPACE, method=method, budget=200, limits=Limits(area, power))
    assert names(found) == brute_front(lambda chip: chip.area_mm2 <= area and chip.power_w <= power)
    assert all(chip.area_mm2 <= area and chip.power_w <= power for chip in found.front) and found.counts["over_a_limit"] > 20


def test_throughput_is_another_goal() -> None:
    space = DesignSpace(rows=(2,), bandwidth_bits=(8, 64), batch=(1, 2))
    found = codesign(pebble_problem(1, 2), space, budget=4, goal="throughput")
    assert [chip.sample_s for chip in found.front] == sorted(chip.sample_s for chip in found.front)
    assert {chip.choice["batch"] for chip in found.front} == {2}  # a sample costs less in a larger batch, on the same area


def test_bounds_rule_chips_out_and_the_front_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    pruned, plain = (codesign(pebble_problem(), SPACE, budget=200, prune=prune) for prune in (True, False))
    assert names(pruned) == names(plain) == brute_front() and plain.counts["mapped"] == 200
    assert pruned.counts["mapped"] == 200 - pruned.counts["beaten_by_its_bound"] < 180
    # the comparison sees a bound that is too high
    monkeypatch.setattr(searching, "bound_of", lambda *_: Bound(1.0, 1.0, 1.0))
    assert names(codesign(pebble_problem(), SPACE, budget=200)) != names(plain)


def test_the_seed_decides_everything() -> None:
    runs = [codesign(pebble_problem(), SPACE, method="evolve", budget=24, seed=seed) for seed in (5, 5, 6)]
    assert runs[0].to_json() == runs[1].to_json() and runs[0].to_json() != runs[2].to_json()


def test_no_chip_is_mapped_twice() -> None:
    seen: list[str] = []

    class Counting(Journal):
        def put(self, choice, result):  # type: ignore[no-untyped-def]
            seen.append(choice.key)
            super().put(choice, result)

    problem = replace(pebble_problem(), rules=SPACE.rules)
    codesign(problem, SPACE, method="evolve", budget=40, journal=Counting(problem), prune=False)
    assert len(seen) == len(set(seen)) == 40


def test_processes_change_nothing() -> None:
    alone, shared = (codesign(pebble_problem(), SMALL, budget=16, workers=workers) for workers in (1, 2))
    assert alone.to_json() == shared.to_json()


def test_recommendation_is_on_the_front_and_says_why() -> None:
    found = codesign(pebble_problem(), SPACE, budget=200)
    best = [min(column) for column in zip(*map(objectives, found.front), strict=True)]
    away = [dist((0, 0, 0), [log(value / low) for value, low in zip(objectives(chip), best, strict=True)]) for chip in found.front]
    assert away[found.knee] == pytest.approx(min(away)) and f"distance {min(away):.2f} " in found.reason and max(away) > 1.2 * min(away)
    least = [min(objectives(chip)[column] for chip in found.front) for column in range(3)]
    for value, low, name in zip(objectives(found.best), least, ("latency", "energy", "area"), strict=True):
        assert (f"the least {name}" if value == low else f"{value / low:.3g}x the least {name}") in found.reason
    array = found.best_array()
    assert array.area_mm2 == found.best.area_mm2 and f"rows {found.best.choice['rows']}" in array.description


def test_what_cannot_be_says_how_near_it_came() -> None:
    with pytest.raises(OptionError, match=r"keeps to --area 0\.001") as error:
        codesign(pebble_problem(), SMALL, limits=Limits(0.001))
    assert f"{min(c.area_mm2 for c in every_chip()):.4g} mm2" in error.value.why and "at least" in error.value.why
    with pytest.raises(OptionError, match=r"--power 0\.0012") as error:  # above leakage, so chips are mapped
        codesign(pebble_problem(), SMALL, limits=Limits(None, 0.0012))
    assert "at least" not in error.value.why
    with pytest.raises(OptionError, match="none of 1 chips can run") as error:
        codesign(pebble_problem(), DesignSpace(register_bits=(2,)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("settings", "words"), [({"method": "random"}, "grid"), ({"method": "grid", "budget": 3}, "a grid of 16")])
def test_bad_settings(settings: dict[str, object], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        codesign(pebble_problem(), SMALL, **settings)  # type: ignore[arg-type]
