"""Interpreted, a run takes a third of the cases of each test and leaves bfloat16 alone; RIDGELINE_FULL=1 and a GPU take them all.

Triton's interpreter rounds bfloat16 in its own way, and a GPU certifies it. Of a test's other cases every third runs, the first among
them, always the same ones; a test of few cases runs whole.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from tests.support import FULL

FEW = 4


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if FULL or torch.cuda.is_available():
        return
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            cases[item.nodeid.partition("[")[0]].append(item)
    left: list[pytest.Item] = []
    for of_test in cases.values():
        wide = [item for item in of_test if not _is_bfloat16(item)]
        kept = wide if len(wide) <= FEW else wide[::3]
        left += [item for item in of_test if item not in kept]
    config.hook.pytest_deselected(items=left)
    gone = {id(item) for item in left}
    items[:] = [item for item in items if id(item) not in gone]


def _is_bfloat16(item: pytest.Item) -> bool:
    return getattr(getattr(item, "callspec", None), "params", {}).get("dtype") is torch.bfloat16
