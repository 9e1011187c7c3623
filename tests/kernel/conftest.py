"""Numeric tests run the Triton kernels: on a GPU where there is one, interpreted with TRITON_INTERPRET=1, and not at all otherwise."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def device() -> str:
    """Where the kernels run."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1; test_interpreted.py runs these files so in a process of their own")
