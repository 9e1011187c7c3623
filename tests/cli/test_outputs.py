"""Where a command is going to write is looked at before it begins: nothing is computed for a file that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

COMMANDS = {
    "analyze": (["analyze", "alexnet", "--on", "h200"], ["--html", "--trace"]),
    "sweep": (["analyze", "alexnet", "--on", "h200", "--sweep", "batch=1..2"], ["--html"]),
    "compare": (["compare", "alexnet", "--on", "h200"], ["--html"]),
    "profile": (["profile", "alexnet"], ["--html", "--trace"]),
    "map": (["map", "alexnet"], ["--html", "--save-mappings"]),
    "compare dataflows": (["map", "alexnet", "--dataflow", "compare"], ["--html"]),
    "layer": (["map", "alexnet", "--layer", "features.0"], ["--trace"]),
    "codesign": (["codesign", "alexnet"], ["--html", "--save-best", "--run"]),
    "optimize": (["optimize", "alexnet"], ["--html", "--out"]),
    "compress": (["compress"], ["--html", "--out"]),
    "crossbar": (["crossbar"], ["--html", "--run"]),
    "crossbar sweep": (["crossbar", "sweep"], ["--html", "--run"]),
    "crossbar fit": (["crossbar", "fit", "cells.csv"], ["--out"]),
}
FOLDERS = ("--run", "--out")
"""Options whose place may be a folder that is there."""


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever takes long fails the test as soon as it begins."""
    for place in ("common", "analyze", "compare", "profile", "map", "codesign", "optimize", "compress", "crossbar"):
        monkeypatch.setattr(f"ridgeline.cli.{place}.progress", lambda what: pytest.fail(f"began {what}"))
    monkeypatch.setattr("ridgeline.crossbar.fit_cells.fit_cells", lambda path: pytest.fail(f"read {path}"))


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.usefixtures("idle")
def test_a_file_that_cannot_be_written_is_told_before_the_work(run: Any, name: str, tmp_path: Path) -> None:
    words, options = COMMANDS[name]
    (tmp_path / "file").write_text("")
    for option in options:
        for wrong in (tmp_path / "file" / "below", *([] if option in FOLDERS else [tmp_path])):
            done = run(*words, option, wrong)
            assert done.code == 2 and not done.out and "cannot write" in done.err, (option, done.err)
            assert len(done.err.splitlines()) == 3 and str(wrong) in done.err, (option, done.err)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.usefixtures("idle")
def test_a_chip_is_not_written_over_a_folder(run: Any, tmp_path: Path) -> None:
    done = run("crossbar", "fit", "cells.csv", "-o", tmp_path)
    assert done.code == 2 and "is a folder" in done.err


@pytest.mark.usefixtures("idle")
def test_baselines_are_looked_at_before_the_measurement(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "file"))
    done = run("profile", "alexnet", "--save-baseline", "mine")
    assert done.code == 2 and "cannot write" in done.err
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    done = run("profile", "alexnet", "--against", "nobodys")
    assert done.code == 2 and "no baseline 'nobodys'" in done.err
