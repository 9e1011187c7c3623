"""`kill -9` at random times: the search goes on, nothing finished is lost, and it ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support import FULL, ROOT


def test_killed_searches_end_as_if_nothing_had_happened(tmp_path: Path) -> None:
    kills, trials, strategy = (20, 14, "model") if FULL else (3, 3, "random")
    command = [sys.executable, "-m", "tests.search.study.killed", str(tmp_path), str(kills), str(trials), strategy]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == [] and found["kills"] == kills and found["finished"] >= 1 and found["lines"] >= 2 * trials + 2, found
