"""Machine-code tests compile; they run in a process of their own (test_interpreted.py), not in the one that collects everything."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def in_a_process_of_its_own() -> None:
    if os.environ.get("TRITON_INTERPRET") != "0":
        pytest.skip("run by test_interpreted.py with TRITON_INTERPRET=0, in a process of its own")
