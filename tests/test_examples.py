"""Every example runs and prints what its docstring promises."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import ROOT

EXPECTED = {
    "analyze_module.py": "bottleneck",
    "profile_regions.py": "normalise",
    "map_layer.py": "the loops in C differ from torch by",
    "own_target.py": "conv1: 118.0 µs of arithmetic, 1.93 µs of memory, compute binds",
    "use_kernels.py": "in the model: loss",
    "train_digits.py": "accuracy",
    "compress_digits.py": "the file gives the same answers",
}


def test_every_example_is_listed() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_example_runs(name: str) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "examples" / name)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert EXPECTED[name] in done.stdout
