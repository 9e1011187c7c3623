"""Numeric tests run the Triton kernels: on a GPU where there is one, interpreted with TRITON_INTERPRET=1, and not at all otherwise.

pytest ──collected──> numerics (TRITON_INTERPRET=1) and compiled (=0), each a pytest of its own in the background ──> test_interpreted.py

Triton reads TRITON_INTERPRET when a kernel is defined, so one process cannot do both. The two are started when collecting is done and
give way to the tests in front (nice), which keep one core busy; test_interpreted.py, much later, waits for them and judges.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from typing import IO, NamedTuple

import pytest

from tests.support import ROOT

FOLDERS = {"numerics": "1", "compiled": "0"}


class Run(NamedTuple):
    """A pytest in the background, and what it prints."""

    process: subprocess.Popen[str]
    log: IO[str]


RUNS = pytest.StashKey[dict[str, Run]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    wanted = any(item.path.name == "test_interpreted.py" for item in session.items)
    if wanted and importlib.util.find_spec("triton") and not session.config.option.collectonly and RUNS not in session.config.stash:
        folders = {"compiled": "0"} if _gpu() else FOLDERS  # on a GPU the numeric tests run in this process
        session.config.stash[RUNS] = {folder: _start(folder, interpret) for folder, interpret in folders.items()}


def pytest_sessionfinish(session: pytest.Session) -> None:
    for run in session.config.stash.get(RUNS, {}).values():
        run.process.kill()
        run.log.close()


def _gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _start(folder: str, interpret: str) -> Run:
    environment = {**os.environ, "TRITON_INTERPRET": interpret, "TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1"}
    command = ["nice", "-n", "10", sys.executable, "-m", "pytest", "-v", "--no-header", "--durations=5", f"tests/kernel/{folder}"]
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
