"""`ridgeline lut` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TINY = ("--space", "nb201", "--set", "channels=2", "--set", "cells=1", "--set", "image=8", "--set", "ops=skip,none,conv3x3")


def test_a_table_is_built_and_checked_and_gives_exit_code_1_when_it_is_off(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    built = run("lut", "build", *TINY, "--on", "rram-64", "--out", out, "--nets", 2)
    assert built.code == 0, built.err
    assert "19 blocks estimated on rram-64" in built.out and "FLOPs" in built.out
    assert out.exists() and not (tmp_path / "table.json.journal").exists()
    checked = run("lut", "check", out, "--nets", 2, "--json")
    assert checked.code == 0, checked.err
    assert json.loads(checked.out)["errors"]["nets"] == 2 and json.loads(checked.out)["entries"] == 19
    data = json.loads(out.read_text())
    for entry in data["entries"].values():
        entry["seconds"] *= 1.5
    out.write_text(json.dumps(data))
    off = run("lut", "check", out, "--nets", 2)
    assert off.code == 1 and "is off by 5" in off.err
    assert run("lut", "check", out, "--nets", 0).code == 0


def test_bad_input_is_three_lines(run: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    for args, said in (
        (("check", tmp_path / "bad.json"), "is no latency table"),
        (("check", tmp_path / "none.json"), "cannot read"),
        (("build", "--space", "nb20l", "--out", tmp_path / "t"), "unknown space"),
        (("build", *TINY, "--on", "eyeris", "--out", tmp_path / "t"), "unknown target"),
        (("build", *TINY, "--set", "channels", "--out", tmp_path / "t"), "name=value"),
        (("build", *TINY, "--set", "channels=3", "--out", tmp_path / "t"), "given twice"),
        (("build", "--space", "macro", "--set", "widths=[[16", "--out", tmp_path / "t"), "not a JSON list"),
        (("build", *TINY, "--mode", "graph", "--out", tmp_path / "t"), "graphs are CUDA's"),
        (("build", *TINY, "--batch", 100_000, "--out", tmp_path / "t"), "1 to 65,536"),
        (("build", *TINY, "--threads", 100_000, "--out", tmp_path / "t"), "1 to 4,096"),
        (("build", *TINY, "--on", "cpu:x", "--out", tmp_path / "t"), "device 'cpu:x'"),
        (("build", *TINY, "--on", "eyeriss", "--dtype", "nope", "--threads", 9, "--out", tmp_path / "t"), "dtype, threads for eyeriss"),
        (("build", *TINY, "--on", "eyeriss", "--out", tmp_path), "is a folder"),
    ):
        done = run("lut", *args)
        assert done.code == 2 and said in done.err and "why:" in done.err and "do:" in done.err, (args, done.err)
    assert not tmp_path.with_name(tmp_path.name + ".journal").exists()
