"""Every test runs on a cache of its own, offline, with fixed seeds; hypothesis runs a fixed tenth unless RIDGELINE_FULL=1."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support import FULL, full_or_tenth

# One thread each, before torch is imported: the tests share two cores with those in the background (tests/kernel/conftest.py), and
# threads that spin for each other while something else has the core make small training runs many times as slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")
EXAMPLES = 500

settings.register_profile("full", max_examples=EXAMPLES, deadline=None, print_blob=True)
settings.register_profile("tenth", max_examples=full_or_tenth(EXAMPLES), deadline=None, derandomize=True, database=None)
settings.load_profile("full" if FULL else "tenth")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Calibrations and baselines go to a temporary folder, never to the user's; nothing is downloaded."""
    with pytest.MonkeyPatch.context() as patch:
        if "RIDGELINE_CACHE" not in os.environ:
            patch.setenv("RIDGELINE_CACHE", str(tmp_path_factory.mktemp("ridgeline-cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(autouse=True)
def seed() -> int:
    """The same random numbers in every test, whatever ran before; libraries nobody imported stay unimported."""
    value = 20250101
    random.seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(value)
    return value
