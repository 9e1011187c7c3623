"""`ridgeline bench-llm` as a user meets it, and the GPU benchmark's way of running cases, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ridgeline.llm import bench
from tests.support import FULL, ROOT

SMALL = ("bench-llm", "--prompt", 8, "--new", 6, "--repeats", 1, "--target", "h200")


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "read_bandwidth", lambda device: 1e10)


def test_lines_for_a_reader(run: Any) -> None:
    code, out, err = run(*SMALL, "--requests", 3, "--prompt-to", 16, "--alone", 1, "--draft", "ngram")
    assert code == 0, err
    for part in ("builtin: 8 + 6 tokens", "tokens/s", "at 10 GB/s", "% reached", "estimate decode", "3 requests of 8 to 16", "x together"):
        assert part in out
    assert "draft ngram" in out


def test_json_rows(run: Any) -> None:
    data = json.loads(run(*SMALL, "--batch", 2, "--requests", 2, "--alone", 0, "--json").out)
    decode, serving = data["rows"]
    assert decode["case"] == "decode" and decode["batch"] == 2 and decode["predicted"]["target"] == "h200"
    assert serving["case"] == "serving" and serving["output_tokens"] == 12 and "alone" not in serving


def test_clear_errors(run: Any) -> None:
    for arguments in (("--prompt", 100_000), ("--target", "no-such-target")):
        code, _, err = run("bench-llm", *arguments)
        assert code == 2 and "why:" in err and "do:" in err


@pytest.mark.skipif(not FULL, reason="half a minute; RIDGELINE_FULL=1")
def test_a_case_of_the_gpu_benchmark_runs_alone_and_a_failure_is_a_row(tmp_path: Path) -> None:
    """The script with a small model on the CPU in place of its own: one case that works and one that cannot."""
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); import llm_gpu\n"
        "llm_gpu.CASES = {'good': {'model': 'builtin', 'weights': None}, 'bad': {'model': 'no/such', 'weights': None}}\n"
        "llm_gpu.main()\n"
    )
    script = tmp_path / "run.py"
    script.write_text(code, encoding="utf-8")
    options = ["--device", "cpu", "--label", "test", "--prompt", "8", "--new", "4", "--repeats", "1", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), "--cases", "good,bad", *options], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    good, bad = json.loads((tmp_path / "llm-gpu-test.json").read_text())["rows"]
    assert good["ready_s"] > 0 and good["tokens_per_s"] > 0 and "error" not in good
    assert "no model no/such" in bad["error"]
