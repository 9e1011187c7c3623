"""Several processes, interrupted: finished chips are handed on, and nobody waits for the others."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

import pytest

from ridgeline.core.errors import OptionError
from ridgeline.estimate.spatial.codesign import workers
from ridgeline.estimate.spatial.codesign.evaluate import Problem, evaluate_chip
from ridgeline.estimate.spatial.codesign.space import Choice
from ridgeline.estimate.spatial.codesign.workers import Evaluator
from ridgeline.workload.graph import Workload
from tests.estimate.spatial.codesign.nets import SPACE, pebble_problem

ASLEEP_S = 60.0


class Drowsy(dict[int, tuple[Workload, ...]]):
    """Workloads by batch; those of batch 2 take a minute to come."""

    def __getitem__(self, batch: int) -> tuple[Workload, ...]:
        if batch == 2:
            time.sleep(ASLEEP_S)
        return super().__getitem__(1)


class DrowsyProblem(Problem):
    def portable(self) -> Problem:
        return self


@pytest.fixture
def problem() -> Problem:
    known = replace(pebble_problem(), rules=SPACE.rules)
    return DrowsyProblem(known.base, Drowsy(known.workloads), known.rules, known.objective)


def choices() -> list[Choice]:
    """One that is quick, two that are not."""
    first, second, third = (SPACE.choice(SPACE.picks(number)) for number in range(3))
    return [replace(first, batch=1), replace(second, batch=2), replace(third, batch=2)]


def test_an_interrupt_ends_the_workers_and_keeps_what_is_ready(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[float] = []

    def ctrl_c(asked: Sequence[Future[Any]]) -> Iterator[Future[Any]]:
        wait(asked[:1])
        stopped.append(time.monotonic())
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "as_completed", ctrl_c)
    found = []
    with pytest.raises(KeyboardInterrupt), Evaluator(problem, 2) as evaluator:
        for choice, result in evaluator.results(choices()):
            found.append((choice, result))
    assert time.monotonic() - stopped[0] < ASLEEP_S / 4 and multiprocessing.active_children() == []
    assert found == [(choices()[0], evaluate_chip(problem, choices()[0]))]


def test_any_error_ends_the_workers(problem: Problem) -> None:
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="disk"), Evaluator(problem, 2) as evaluator:
        for _ in evaluator.results(choices()):
            begun = time.monotonic()
            raise RuntimeError("disk full")
    assert time.monotonic() - begun < ASLEEP_S / 4 and multiprocessing.active_children() == []


def test_a_worker_that_dies_is_an_error(problem: Problem) -> None:
    with pytest.raises(OptionError, match="a worker process died"), Evaluator(problem, 2) as evaluator:
        for _ in evaluator.results(choices()):
            multiprocessing.active_children()[0].kill()
    assert multiprocessing.active_children() == []


def test_ctrl_c_is_for_the_parent_alone(problem: Problem) -> None:
    """A terminal sends it to all: a worker would answer with a traceback."""
    with Evaluator(problem, 2) as evaluator:
        assert len(list(evaluator.results(choices()[:1]))) == 1 and evaluator._pool is not None
        assert signal.SIGINT in evaluator._pool.submit(signal.pthread_sigmask, signal.SIG_BLOCK, []).result()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
