"""Regions nest, recurse, cross threads and exceptions; a planted slow one is found; turned off they cost next to nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from ridgeline.core.errors import OptionError
from ridgeline.measure import regions
from ridgeline.measure.regions import RegionRow, profile_op, region_report, region_table, reset_regions

TICK_S = 0.01


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RIDGELINE_PROFILE", raising=False)
    reset_regions()
    yield
    monkeypatch.undo()
    reset_regions()


def by_path() -> dict[str, RegionRow]:
    return {row.path: row for row in region_report()}


def test_planted_slow_region_is_found() -> None:
    for name, seconds in (("load", 0.0), ("decode", TICK_S), ("store", 0.0)):
        for _ in range(3):
            with profile_op(name):
                time.sleep(seconds)
    slowest = max(region_report(), key=lambda row: row.self_s)
    assert (slowest.name, slowest.calls) == ("decode", 3)
    assert slowest.median_s >= TICK_S * 0.95 and slowest.p20_s <= slowest.median_s <= slowest.p80_s
    assert slowest.total_s >= 3 * TICK_S * 0.95


def test_self_time_leaves_out_inner_regions() -> None:
    with profile_op("outer"):
        time.sleep(TICK_S)
        for _ in range(2):
            with profile_op("inner"):
                time.sleep(2 * TICK_S)
    rows = by_path()
    outer, inner = rows["outer"], rows["outer/inner"]
    assert inner.calls == 2 and inner.total_s >= 4 * TICK_S * 0.95
    assert outer.total_s >= inner.total_s + TICK_S * 0.95
    assert outer.self_s == pytest.approx(outer.total_s - inner.total_s, abs=1e-9)
    assert [row.path for row in region_report()] == ["outer", "outer/inner"]


def test_decorated_functions_keep_their_name_result_and_arguments() -> None:
    @profile_op("double")
    def double(value: int, *, plus: int = 0) -> int:
        """Doubles."""
        return 2 * value + plus

    assert double(4, plus=1) == 9
    assert (double.__name__, double.__doc__) == ("double", "Doubles.")
    assert by_path()["double"].calls == 1


def test_one_instance_may_recurse() -> None:
    @profile_op("f")
    def factorial(n: int) -> int:
        return 1 if n == 0 else n * factorial(n - 1)

    assert factorial(3) == 6
    assert [row.path for row in region_report()] == ["f", "f/f", "f/f/f", "f/f/f/f"]
    shared = profile_op("shared")
    with shared, shared:
        pass
    assert by_path()["shared/shared"].calls == 1


def test_exceptions_pass_through_and_are_recorded() -> None:
    with pytest.raises(KeyError), profile_op("outer"), profile_op("fails"):
        raise KeyError
    assert {"outer", "outer/fails"} == by_path().keys()
    with profile_op("next"):
        pass
    assert "next" in by_path()


def test_threads_do_not_nest_in_each_other() -> None:
    barrier = threading.Barrier(4)

    @profile_op("work")
    def work() -> None:
        barrier.wait(timeout=10)
        for _ in range(200):
            with profile_op("step"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {path: row.calls for path, row in by_path().items()} == {"work": 4, "work/step": 800}


def test_given_work_becomes_a_rate() -> None:
    with profile_op("matmul", flops=2e6, bytes=4e5):
        time.sleep(TICK_S)
    row = by_path()["matmul"]
    assert row.flops_per_s == pytest.approx(2e6 / row.total_s) and row.bytes_per_s == pytest.approx(4e5 / row.total_s)
    assert "GFLOP/s" in region_table()
    reset_regions()
    with profile_op("plain"):
        pass
    assert by_path()["plain"].flops_per_s is None and "GFLOP/s" not in region_table()


def test_table_indents_inner_regions() -> None:
    assert region_table() == "no regions recorded\n"
    with profile_op("outer"), profile_op("a/b"):
        pass
    lines = region_table().splitlines()
    assert len(lines) == 3 and lines[1].startswith("outer") and lines[2].startswith("  a")


def test_samples_are_bounded_and_totals_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "SAMPLES", 16)
    for _ in range(100):
        with profile_op("often"):
            pass
    assert by_path()["often"].calls == 100
    assert len(regions._collector.records[("often",)].samples_s) == 16


def test_turned_off_nothing_is_recorded_and_functions_are_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_PROFILE", "0")
    reset_regions()

    def plain() -> int:
        return 1

    assert profile_op("x")(plain) is plain
    start = time.perf_counter()
    for _ in range(10_000):
        with profile_op("y"):
            pass
    assert (time.perf_counter() - start) / 10_000 < 2e-5
    assert region_report() == [] and "RIDGELINE_PROFILE=0" in region_table()


def test_turning_off_inside_an_open_region_stays_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    with profile_op("outer"):
        monkeypatch.setenv("RIDGELINE_PROFILE", "0")
        reset_regions()
        with profile_op("inner"):
            pass
        monkeypatch.delenv("RIDGELINE_PROFILE")
        reset_regions()
    assert by_path().keys() == {"outer"}


def test_what_runs_later_is_refused() -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None: ...

    async def stream() -> AsyncIterator[int]:
        yield 1

    late: list[Any] = [generator, coroutine, stream]
    for function in late:
        with pytest.raises(OptionError, match="runs after the call returns"):
            profile_op("late")(function)


@pytest.mark.parametrize("name", ["", None, print])
def test_a_region_needs_a_name(name: Any) -> None:
    with pytest.raises(OptionError, match="needs a name"):
        profile_op(name)


def test_sync_without_cuda_uses_the_host_clock() -> None:
    with profile_op("synced", sync=True):
        time.sleep(TICK_S)
    assert by_path()["synced"].total_s >= TICK_S * 0.95
