"""The snippets of docs/train.md run, one after another, as a reader would type them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.train.feed import MODES, RESIDENT_SHARE
from ridgeline.train.history import COLUMNS, INTERVAL
from ridgeline.train.options import SPEED_ONLY
from ridgeline.train.stability import FLUSHED_LIMIT
from ridgeline.workload.data import data_names
from tests.support import ROOT

PAGE = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")


def test_snippets_run(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    script = tmp_path / "page.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=180, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "resumed from step 20" in done.stdout and "9 blocks" in done.stdout
    found = re.search(r"([\d.]+)% of 359 test images", done.stdout)
    assert found and float(found[1]) >= 90, done.stdout
    assert re.search(r"^verdict: (float16|bfloat16): ", done.stdout, re.MULTILINE)
    assert (tmp_path / "runs" / "digits").is_dir()


def test_the_page_names_what_exists() -> None:
    for name in (*MODES, *COLUMNS, *SPEED_ONLY, *data_names()):
        assert f"`{name}`" in PAGE, name
    assert RESIDENT_SHARE == 0.25 and "a quarter of the free memory" in PAGE
    assert FLUSHED_LIMIT == 0.01 and "more than 1 %" in PAGE
    assert INTERVAL == 50 and "every 50 steps" in PAGE
