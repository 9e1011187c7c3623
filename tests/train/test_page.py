"""The snippets of docs/train.md run, one after another, as a reader would type them; its tables are the committed results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def feed_table() -> str:
    lines = [
        "| model, images, batch | `feed` | step, ms | host waited, ms | GPU idle between steps, ms | the copy alone, ms | samples/s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in measured("feed"):
        what = f"{row['model']}, {row['pixels']} x {row['pixels']}, {row['batch']}"
        times = f"{row['step_ms']:.1f} | {row['wait_ms']:.2f} | {row['gap_ms']:.2f} | {row['copy_ms']:.2f}"
        lines.append(f"| {what} | `{row['mode']}` | {times} | {row['samples_per_s']:,.0f} |")
    return "\n".join(lines)


def recompute_table() -> str:
    lines = [
        "| model, batch | blocks | peak memory, GiB | with recomputing | ms | with recomputing |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in measured("recompute"):
        memory = f"{row['before_bytes'] / 2**30:.2f} | {row['after_bytes'] / 2**30:.2f} ({row['memory_ratio']:.2f}x)"
        times = f"{row['before']['median_s'] * 1e3:.1f} | {row['after']['median_s'] * 1e3:.1f} ({row['time_ratio']:.2f}x)"
        lines.append(f"| {row['model']}, {row['batch']} | {row['blocks']} | {memory} | {times} |")
    return "\n".join(lines)


def measured(kind: str) -> list[dict[str, Any]]:
    path = ROOT / "benchmarks" / "results" / "compress-train-feed-h200.json"
    return [row for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if row["kind"] == kind]


def test_the_page_has_the_measured_rows() -> None:
    for marker, table in (("train-feed", feed_table()), ("train-recompute", recompute_table())):
        assert PAGE.split(f"<!-- {marker} -->")[1].split("<!-- end -->")[0].strip() == table
    by = {(row["model"], row["mode"]): row for row in measured("feed")}
    for model in ("resnet20", "resnet18"):  # what prefetching is for: nobody waits, and steps are those of data that is there already
        assert by[model, "prefetch"]["step_ms"] < 1.01 * by[model, "resident"]["step_ms"] < by[model, "blocking"]["step_ms"]


def test_the_page_names_what_exists() -> None:
    for name in (*MODES, *COLUMNS, *SPEED_ONLY, *data_names()):
        assert f"`{name}`" in PAGE, name
    assert RESIDENT_SHARE == 0.25 and "a quarter of the free memory" in PAGE
    assert FLUSHED_LIMIT == 0.01 and "more than 1 %" in PAGE
    assert INTERVAL == 50 and "every 50 steps" in PAGE
