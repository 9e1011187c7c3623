"""Percentiles against numpy, repeats against what was asked, intervals against simulated truth."""

from __future__ import annotations

import gc
import time

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import MeasureError, OptionError
from ridgeline.core.timing import collect_samples, garbage_collector_off, median_ratio_interval, summarise, time_callable


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=40))
def test_summary_equals_numpy(samples: list[float]) -> None:
    timing = summarise(samples)
    expected = numpy.quantile(samples, [0.5, 0.2, 0.8])
    assert [timing.median_s, timing.p20_s, timing.p80_s] == pytest.approx(expected.tolist(), rel=1e-9)
    assert timing.repeats == len(samples)


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(MeasureError, match="no samples"):
        summarise([])


def test_a_sleep_takes_as_long_as_it_sleeps() -> None:
    timing = time_callable(lambda: time.sleep(0.004), warmup=1, min_repeats=5, max_repeats=5)
    assert 0.004 <= timing.p20_s <= timing.median_s <= timing.p80_s
    assert timing.median_s < 1


def test_repeats_follow_the_budget() -> None:
    calls: list[int] = []
    assert len(collect_samples(lambda: calls.append(1), warmup=2, min_repeats=3, max_repeats=9, budget_s=0.0)) == 3
    assert len(calls) == 5
    assert len(collect_samples(lambda: None, min_repeats=1, max_repeats=7, budget_s=60.0)) == 7


@pytest.mark.parametrize("wrong", [{"min_repeats": 0}, {"min_repeats": 6, "max_repeats": 5}, {"warmup": -1}])
def test_counts_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="at least one repeat"):
        collect_samples(lambda: None, **wrong)


def test_cuda_without_a_device_says_so() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(MeasureError, match="no CUDA device"):
        time_callable(lambda: None, device="cuda")


def test_garbage_collector_is_off_inside_and_back_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError), garbage_collector_off():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def noisy(median_s: float, count: int, seed: int) -> list[float]:
    return (median_s * numpy.random.default_rng(seed).lognormal(0.0, 0.1, count)).tolist()


def test_interval_holds_the_planted_ratio_and_leaves_out_one() -> None:
    ratio, low, high = median_ratio_interval(noisy(1.5, 60, 1), noisy(1.0, 60, 2))
    assert 1.3 < low <= ratio <= high < 1.7
    assert low <= 1.5 <= high
    swapped, _, _ = median_ratio_interval(noisy(1.0, 60, 2), noisy(1.5, 60, 1))
    assert swapped == pytest.approx(1 / ratio)


def test_interval_covers_equality_about_as_often_as_it_claims() -> None:
    covered = 0
    for seed in range(60):
        _, low, high = median_ratio_interval(noisy(1.0, 25, 2 * seed), noisy(1.0, 25, 2 * seed + 1))
        covered += low <= 1 <= high
    assert covered >= 52


def test_interval_is_the_same_for_the_same_seed() -> None:
    a, b = noisy(1.0, 20, 3), noisy(1.1, 20, 4)
    assert median_ratio_interval(a, b, seed=5) == median_ratio_interval(a, b, seed=5)
    assert median_ratio_interval(a, b, seed=5) != median_ratio_interval(a, b, seed=6)


def test_pairing_cancels_what_both_sides_share() -> None:
    drift = numpy.linspace(1.0, 4.0, 30)
    a, b = (drift * 1.1).tolist(), drift.tolist()
    _, low, high = median_ratio_interval(a, b)
    _, paired_low, paired_high = median_ratio_interval(a, b, paired=True)
    assert low < 1 < high
    assert paired_low == pytest.approx(1.1) and paired_high == pytest.approx(1.1)


@pytest.mark.parametrize(("a", "b", "paired"), [([], [1.0], False), ([1.0], [0.0], False), ([1.0, 2.0], [1.0], True)])
def test_no_ratio_without_samples(a: list[float], b: list[float], paired: bool) -> None:
    with pytest.raises(MeasureError, match="no ratio"):
        median_ratio_interval(a, b, paired=paired)
