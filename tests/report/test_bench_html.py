"""The page and the table of a benchmark run: complete, well-formed, self-contained, safe whatever the names."""

from __future__ import annotations

import copy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ridgeline.kernel.bench import BenchRow, Ceilings
from ridgeline.kernel.bench.launches import KernelUse
from ridgeline.kernel.bench.rows import judge
from ridgeline.kernel.bench.timing import Timed
from ridgeline.report import roofline
from ridgeline.report.bench_html import render_bench_html
from ridgeline.report.bench_table import cells, render_bench
from tests.report.test_browser import OPTIONS
from tests.report.test_html import Page, requests_of

CEILINGS = Ceilings(4.26e12, 4.34e12, {"bfloat16": 7.97e14, "float32": 5.1e13})
CHROMIUM = shutil.which("chromium")
HOSTILE = "<script>alert('x')</script>[bold]\x1b[31m{{ 7*7 }}"


def timed(gpu_ms: float, host_us: float = 20.0) -> Timed:
    return Timed(gpu_ms, gpu_ms, gpu_ms, host_us)


def row(op: str, ours: Timed, **changes: Any) -> BenchRow:
    given: dict[str, Any] = {"shape": (4096, 4096), "dtype": "bfloat16", "backward": False, "size": "large", "device": "cuda"}
    made = BenchRow(op=op, ours=ours, **{**given, "eager": timed(0.2), "bytes": 2 * 10**8, **changes})
    made.ceiling_ms, made.ceiling = CEILINGS.limit(made.bytes, made.flops, made.dtype, writes=True)
    return judge(made)


@pytest.fixture
def data() -> dict[str, Any]:
    rows = [
        row("matmul", timed(0.18), flops=2 * 4096**3, compile=timed(0.174), size="anchors", limit_ms=0.183, error_ours=1e-3),
        row("softmax", timed(0.05), peers={"liger": timed(0.06), "other": Timed(error="no")}, error_ours=1e-3, error_eager=2e-3),
        row("softmax", Timed(error="RuntimeError: out of luck"), backward=True, size="anchors", limit_ms=1.0),
        row("sum", timed(0.9), kernels=[KernelUse("fold", (132,), 1, 255, 8, 1024, 8, 0.125), KernelUse("f", (1,), 2, *[None] * 5)],
            notes=["a note"], tuned=["sum: BLOCK=1"], compile=Timed(0.1, 0.1, 0.1, 5.0, ahead=False)),
    ]  # fmt: skip
    rows[1].regression = 1.25
    machine = {"name": "NVIDIA H200", "device": "cuda", "kernels": True, "torch": "2.11", "triton": "3.6"}
    return {"schema": 1, "machine": machine, "ceilings": CEILINGS.to_json(), "rows": [one.to_json() for one in rows]}


def test_the_page_holds_every_row(data: dict[str, Any]) -> None:
    text = render_bench_html(data)
    page = Page(text)
    assert requests_of(text) == [] and "https:" not in text and "http:" not in text and "default-src 'none'" in text
    assert {"roofline", "ceiling", "rows", "kernels"} <= page.ids()
    circles = page.all("circle", "op")
    assert len(circles) == 1  # one row counts FLOPs
    x, y = (float(circles[0].attributes[name]) for name in ("cx", "cy"))
    assert roofline.LEFT <= x <= roofline.RIGHT and roofline.TOP <= y <= roofline.BOTTOM
    assert len(page.all("rect", "mapped")) == 3  # a row that failed has no share
    assert len(page.data()["rows"]) == 4
    shown = " ".join("".join(one.text) for one in page.elements)
    for words in ("holds", "REGRESSION 1.25x", "out of luck", "spill registers", "BLOCK=1", "a note", "797 TFLOP/s", "waits for the GPU"):
        assert words in shown, words


def test_bars_are_as_long_as_their_shares(data: dict[str, Any]) -> None:
    widths = [float(bar.attributes["width"]) for bar in Page(render_bench_html(data)).all("rect", "mapped")]
    shares = [one["fraction"] for one in data["rows"] if one["fraction"]]
    assert [width / widths[0] for width in widths] == pytest.approx([share / shares[0] for share in shares], rel=1e-3)


def test_names_cannot_run(data: dict[str, Any]) -> None:
    bad = copy.deepcopy(data)
    bad["machine"]["name"] = bad["rows"][0]["op"] = bad["rows"][3]["kernels"][0]["name"] = bad["rows"][2]["ours"]["error"] = HOSTILE
    text = render_bench_html(bad)
    Page(text)
    assert "<script>alert" not in text and "\x1b" not in text and requests_of(text) == []
    assert "\x1b" not in render_bench(bad)


@pytest.mark.parametrize("rows", [slice(0, 0), slice(2, 3)], ids=["none", "only one that failed"])
def test_pages_of_little(data: dict[str, Any], rows: slice) -> None:
    little = {**data, "rows": data["rows"][rows]}
    assert Page(render_bench_html(little)).all("circle", "op") == []
    assert f"{len(little['rows'])} row" in render_bench(little)


def test_the_references_are_not_called_kernels(data: dict[str, Any]) -> None:
    on_cpu = {**data, "machine": {**data["machine"], "kernels": False}}
    assert "not kernels" in render_bench(on_cpu) and "not kernels" in render_bench_html(on_cpu)
    assert "not kernels" not in render_bench(data)


def test_the_table(data: dict[str, Any]) -> None:
    first, second, failed, slow = (cells(one) for one in data["rows"])
    assert (
        first[4] == "0.1800 ms"
        and first[7] == "0.97x"
        and first[9].endswith("compute")
        and first[-1] == "within 0.1830 ms, LOST to compile"
    )
    assert second[8] == "liger 1.20x" and second[11] == "1.0e-03 (eager 2.0e-03)" and "REGRESSION" in second[-1]
    assert failed[3] == "f+b" and failed[4] == "error" and failed[12] == "failed" and "OVER" in failed[-1]
    assert slow[12] == "slow" and slow[13] == "occupancy"
    text = render_bench(data, width=200)
    assert all(len(line) <= 240 for line in text.splitlines()) and "0 of 2 anchors hold" in text and "1 of 2 within" in text
    assert "\x1b[" in render_bench(data, color=True) and "\x1b[" not in text


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_the_page_opens_without_a_console_message(data: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(render_bench_html(data), encoding="utf-8")
    command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert 'class="scripted"' in done.stdout, done.stderr[-2000:]
    assert [line for line in done.stderr.splitlines() if ":CONSOLE" in line] == []
