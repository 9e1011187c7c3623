"""Chips evaluated here or by several processes.

    Evaluator(problem, workers) ──results(choices)──> (Choice, Evaluated), each as soon as it is ready

Processes are started afresh (not forked: the parent may have threads) and stop when the parent is gone, however it went. Ctrl-C reaches
the parent alone: it hands on what is finished and ends them, whatever they are at.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process
from types import TracebackType

from ....core.errors import OptionError
from .evaluate import Evaluated, Problem, evaluate_chip
from .space import Choice

_problem: Problem | None = None


class Evaluator:
    """A context: its processes end with it."""

    def __init__(self, problem: Problem, workers: int = 1) -> None:
        self._problem = problem
        self._pool = None
        if workers > 1:
            self._pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start, initargs=(problem.portable(),))

    def results(self, choices: Sequence[Choice]) -> Iterator[tuple[Choice, Evaluated]]:
        """In the order they are ready; interrupted, those that are ready by then come before the interrupt goes on."""
        if self._pool is None:
            yield from ((choice, evaluate_chip(self._problem, choice)) for choice in choices)
            return
        waiting: dict[Future[Evaluated], Choice] = {}
        try:
            waiting = _submit(self._pool, choices)
            for done in as_completed(list(waiting)):
                yield waiting.pop(done), done.result()
        except KeyboardInterrupt:
            yield from ((choice, done.result()) for done, choice in waiting.items() if done.done() and done.exception() is None)
            raise
        except BrokenProcessPool as error:
            raise OptionError(
                "a worker process died", why=str(error), do="run again: known chips are kept; with fewer --workers if memory ran out"
            ) from error

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is None:
            return
        if kind is not None:  # nobody waits for the chips that are being mapped, which can take a minute
            for process in list(self._pool._processes.values()):
                process.terminate()
        self._pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, choices: Sequence[Choice]) -> dict[Future[Evaluated], Choice]:
    """Futures of all; the first call starts the processes, which inherit that SIGINT is blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return {pool.submit(_evaluate, choice): choice for choice in choices}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(problem: Problem) -> None:
    global _problem
    _problem = problem
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool's queues keep a worker waiting for ever if the parent is killed."""
    if (parent := parent_process()) is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _evaluate(choice: Choice) -> Evaluated:
    assert _problem is not None
    return evaluate_chip(_problem, choice)
