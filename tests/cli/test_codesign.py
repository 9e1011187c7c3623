"""`ridgeline codesign` as a user meets it: the front in every form, a chip that loads, runs that go on, clear errors."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.main import main
from ridgeline.core.toml_out import dump_toml
from ridgeline.report.codesign_html import render_codesign_html
from ridgeline.report.codesign_table import render_codesign
from ridgeline.target.load import load_array
from tests.estimate.spatial.codesign.nets import BASE

NET = """
import torch
def build(batch=1):
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 1), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 1))
    return net, torch.zeros(batch, 2, 4, 4)
"""
SPACE = """
rows = [1, 2]
buffer_bits = [1024, 16384]
bandwidth_bits = [8, 64]
"""


class Folder:
    """Files of a small search, and the command on them."""

    def __init__(self, path: Path, capsys: Any, monkeypatch: Any) -> None:
        self.path, self._capsys, self._monkeypatch = path, capsys, monkeypatch
        for name, text in {"net.py": NET, "space.toml": SPACE, "base.toml": dump_toml(BASE.model_dump())}.items():
            (path / name).write_text(text)

    def __call__(self, *args: str, search: bool = True) -> tuple[int, str, str]:
        space = ["--base", str(self.path / "base.toml"), "--space", str(self.path / "space.toml")]
        alone = [] if "--workers" in args else ["--workers", "1"]  # to start another process takes longer than these chips do
        command = ["codesign", f"{self.path / 'net.py'}:build", *space, *alone] if search else []
        self._monkeypatch.setattr(sys, "argv", ["ridgeline", *command, *args])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *self._capsys.readouterr()


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    return Folder(tmp_path, capsys, monkeypatch)


def test_every_form_of_the_answer(run: Folder) -> None:
    page, chip = run.path / "out" / "page.html", run.path / "chip.toml"
    code, out, err = run("--json", "--html", str(page), "--save-best", str(chip))
    assert code == 0, err
    data = json.loads(out)
    assert data["schema"] == "ridgeline/codesign/1" and data["whole_space"] and data["space"] == data["counts"]["seen"] == 8
    row = data["front"][data["best"]]
    assert {"chip", "batch", "dataflow", "latency_s", "sample_s", "energy_j", "area_mm2", "power_w", "utilisation", "fusion",
            "kept_bytes"} <= set(row)  # fmt: skip
    assert load_array(str(chip)).area_mm2 == row["area_mm2"] and page.read_text().startswith("<!doctype html>")
    code, out, _ = run("map", f"{run.path / 'net.py'}:build", "--on", str(chip), "--json", search=False)
    assert code == 0 and json.loads(out)["target"] == "pebble-codesign"
    assert json.loads(out)["total"]["seconds"] >= row["latency_s"]  # alone, `map` does not fuse
    code, out, err = run()
    assert code == 0 and "* build this one: " + data["reason"][:20] in out and "known" in err  # the same run, from the cache
    assert sum(line.lstrip().startswith("*  ") for line in out.splitlines()) == 1


def test_run_folders_go_on(run: Folder) -> None:
    folder = run.path / "run"
    first = run("--json", "--run", str(folder), "--method", "evolve", "--budget", "3")[1]
    lines = (folder / "chips.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 3
    (folder / "chips.jsonl").write_bytes(lines[0] + lines[1][:40])
    code, again, err = run("--json", "--resume", str(folder), "--method", "evolve", "--budget", "3")
    assert code == 0 and again == first and "1 chips known" in err
    assert (folder / "chips.jsonl").read_bytes() == b"".join(lines)


BAD = {
    "no such folder": (["--resume", "nowhere"], "nothing to resume"),
    "two folders": (["--run", "a", "--resume", "b"], "both name"),
    "area": (["--area", "-1"], "above 0"),
    "power": (["--power", "nan"], "above 0"),
    "goal": (["--goal", "speed"], "throughput"),
    "objective": (["--objective", "area"], "edp"),
    "method": (["--method", "random"], "evolve"),
    "grid": (["--method", "grid", "--budget", "2"], "budget is 2"),
    "nothing fits": (["--area", "0.0001"], "the nearest takes"),
    "processor": (["--base", "h200"], "only a spatial array"),
    "space": (["--space", "none.toml"], "no such file"),
    "model": (["resnet81"], "resnet18"),
}


def test_bad_input_is_three_lines_and_exit_code_2(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.path)
    for name, (args, words) in BAD.items():
        code, out, err = run(*args, "--html", "page.html")
        assert code == 2 and out == "" and "Traceback" not in err, (name, err)
        assert words in err and "why:" in err and "do:" in err, (name, err)
        assert not Path("page.html").exists(), name


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))


def row(time: float, energy: float, area: float) -> dict[str, Any]:
    chip = {"axes": {"columns": 2, "rows": 4}, "register_bits": {"registers": 384}, "local_bits": {}, "buffer_bits": {"buffer": 8192},
            "bandwidth_bits": 16, "noc_bits": None, "bits": {"W": 8, "I": 8, "O": 16, "F": 8},
            "cores": {"count": 2, "use": "split"}}  # fmt: skip
    worth = {"latency_s": time, "sample_s": time / 2, "energy_j": energy, "area_mm2": area, "power_w": 0.5, "static_w": 0.1}
    return {
        **worth,
        "chip": chip,
        "batch": 2,
        "dataflow": "ws",
        "utilisation": 0.5,
        "fusion": [["a<b>", "c"]],
        "kept_bytes": 192,
        "models": [],
    }


def answer(*rows: dict[str, Any], best: int = 0, goal: str = "latency") -> dict[str, Any]:
    counts = {"seen": 6, "mapped": 4, "over_a_limit": 2}
    return {"models": ["<script>alert(1)</script>"], "base": "pebble", "goal": goal, "limits": {"area_mm2": 4.0, "power_w": None},
            "method": "evolve", "seed": 0, "space": 96, "whole_space": False, "counts": counts, "front": list(rows), "best": best,
            "reason": "it is near"}  # fmt: skip


def test_page_draws_every_chip_and_runs_no_foreign_script() -> None:
    rows = [row(1e-3, 3e-3, 1.0), row(2e-3, 2e-3, 9.0), row(4e-2, 1e-3, 1.0)]
    text = render_codesign_html(answer(*rows, best=1))
    tags = Tags(text).found
    circles = [a for tag, a in tags if tag == "circle" and "target" in str(a.get("class"))]
    assert len([1 for tag, a in tags if tag == "svg" and a.get("role") == "img"]) == 3 and len(circles) == 9
    assert sum("k1" in str(a["class"]) for a in circles) == 3
    assert "<script>alert" not in text and "a<b>" not in text and "a&lt;b&gt;" in text
    # the fastest chip is left of the slowest, and the largest above the smallest
    x, y = ([float(str(a[name])) for a in circles[3:6]] for name in ("cx", "cy"))
    assert x[0] < x[1] < x[2] and y[1] < y[0] == y[2]
    assert "Build chip 2" in text and "Chips not seen may be better" in text and "192 B" in text


def test_page_of_one_chip() -> None:
    assert "1 chip on the front" in render_codesign_html(answer(row(1e-3, 1e-3, 1.0)))


def test_table_shows_the_recommended_chip_whatever_the_limit() -> None:
    rows = [row(number * 1e-3, 1e-3, 1.0) for number in range(1, 9)]
    text = render_codesign(answer(*rows, best=7), limit=3, width=200)
    assert (
        "8 ms" in text and "3 ms" not in text and "5 more on the front" in text and "6 of 96 chips seen: 4 mapped, 2 over a limit" in text
    )
    assert "4x2" in text and "2 split" in text and "network" not in text  # a column without a value is left out
    assert "4 ms" in render_codesign(answer(*rows, best=7, goal="throughput"), limit=3, width=200)
    assert re.search(r"^ \*\s+4x2", text, re.MULTILINE)
