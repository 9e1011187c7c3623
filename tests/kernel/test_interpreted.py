"""The numeric tests by Triton's interpreter and the machine-code tests by its compiler, each in a process of their own; see conftest.py."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install 'ridgeline[gpu]'")


@pytest.mark.parametrize("folder", ["numerics", "compiled"])
def test_in_a_process_of_their_own(folder: str, background: dict[str, Any]) -> None:
    if folder not in background:
        pytest.skip("the numeric tests run on the GPU, in this process")
    process, log = background[folder]
    process.wait(timeout=900)
    log.seek(0)
    output = log.read()
    print(output[-2000:])
    assert process.returncode == 0 and " passed" in output, output[-8000:]
