"""Tests that run in processes of their own, in the background of the others.

pytest ──collected──> numerics (TRITON_INTERPRET=1), compiled (=0), compress (tests/train, …), models (tests/workload, most of llm),
         search ──> test_interpreted.py

Numeric tests run the Triton kernels: on a GPU where there is one, interpreted with TRITON_INTERPRET=1, and not at all otherwise. Triton
reads the variable when a kernel is defined, so one process cannot do both. Training, compression and crossbars, models, and search have
processes of their own to use the second core. All start when collecting is done and give way to the tests in front (nice);
test_interpreted.py, put last, waits and judges.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from itertools import chain
from typing import IO, NamedTuple

import pytest

from tests.support import ROOT

NUMERICS, COMPILED, COMPRESS, MODELS, SEARCH = "numerics", "compiled", "compress", "models", "search"
FOLDERS = {
    NUMERICS: ["tests/kernel/numerics"],
    COMPILED: ["tests/kernel/compiled"],
    COMPRESS: ["tests/train", "tests/transform", "tests/crossbar"],
    MODELS: ["tests/workload", *(f"tests/llm/{part}" for part in ("model", "load", "cache", "engine", "speculate"))],
    SEARCH: ["tests/search"],
}
BEHIND = (COMPRESS, MODELS, SEARCH)
JUDGE = "test_interpreted.py"


class Run(NamedTuple):
    """A pytest in the background, and what it prints."""

    process: subprocess.Popen[str]
    log: IO[str]


RUNS = pytest.StashKey[dict[str, Run]]()
GROUPS = pytest.StashKey[list[str]]()


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a run of everything: what the background does is left out, and who judges it comes last."""
    judges = [item for item in items if item.path.name == JUDGE]
    if not judges or config.option.collectonly:
        return
    behind = {
        group: [item for item in items if any(item.path.is_relative_to(ROOT / folder) for folder in FOLDERS[group])] for group in BEHIND
    }
    apart = {id(item) for item in [*chain(*behind.values()), *judges]}
    items[:] = [item for item in items if id(item) not in apart] + judges
    config.stash[GROUPS] = [group for group in BEHIND if behind[group]]


def pytest_collection_finish(session: pytest.Session) -> None:
    if GROUPS not in session.config.stash or RUNS in session.config.stash:
        return
    groups = session.config.stash[GROUPS]
    if importlib.util.find_spec("triton"):
        groups += [COMPILED] if _gpu() else [NUMERICS, COMPILED]  # on a GPU the numeric tests run in this process
    session.config.stash[RUNS] = {group: _start(group) for group in groups}


def pytest_sessionfinish(session: pytest.Session) -> None:
    for run in session.config.stash.get(RUNS, {}).values():
        run.process.kill()
        run.log.close()


def _gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _start(group: str) -> Run:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1" if group == NUMERICS else "0",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = ["nice", "-n", "10", sys.executable, "-m", "pytest", "-v", "--no-header", "--durations=5", *FOLDERS[group]]
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed when the session ends)
    return Run(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True), log)


@pytest.fixture
def background(request: pytest.FixtureRequest) -> dict[str, Run]:
    """The runs started after collecting."""
    return request.config.stash.get(RUNS, {})


@pytest.fixture
def device() -> str:
    """Where the kernels run."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1; test_interpreted.py runs these files so in a process of their own")
