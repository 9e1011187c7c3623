"""The numeric tests by Triton's interpreter and the machine-code tests by its compiler, each in a process of their own.

Triton reads TRITON_INTERPRET when a kernel is defined, so one process cannot do both; the two run side by side, one a core.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.support import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install 'ridgeline[gpu]'")
FOLDERS = {"numerics": "1", "compiled": "0"}


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Both folders' tests, started together."""

    def start(folder: str, interpret: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "TRITON_INTERPRET": interpret, "TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-v", "--no-header", "--durations=5", f"tests/kernel/{folder}"]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    folders = {"compiled": "0"} if torch.cuda.is_available() else FOLDERS  # on a GPU the numeric tests run in this process
    started = {folder: start(folder, interpret) for folder, interpret in folders.items()}
    yield started
    for process in started.values():
        process.kill()


@pytest.mark.parametrize("folder", FOLDERS)
def test_in_a_process_of_their_own(folder: str, runs: dict[str, subprocess.Popen[str]]) -> None:
    if folder not in runs:
        pytest.skip("the numeric tests run on the GPU, in this process")
    output, _ = runs[folder].communicate(timeout=600)
    print(output[-2000:])
    assert runs[folder].returncode == 0 and " passed" in output, output[-8000:]
