"""The path a GPU takes, by Triton's interpreter in a process of its own; bfloat16 and int8, which take minutes, with RIDGELINE_FULL=1."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ridgeline.kernel.jit import HAVE_TRITON
from tests.support import FULL, ROOT

pytest.importorskip("transformers")


@pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed: pip install 'ridgeline[gpu]'")
@pytest.mark.parametrize("dtype", ("float32", pytest.param("bfloat16", marks=pytest.mark.skipif(not FULL, reason="RIDGELINE_FULL=1"))))
def test_steps_through_the_kernels_agree_with_transformers(dtype: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, str(ROOT / "tests/llm/model/interpreted.py"), dtype]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.count("agrees") >= 3, done.stdout + done.stderr[-3000:]
