"""`ridgeline bench` as a user meets it: the list, a run on the CPU's references in every form, clear errors."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.kernel.bench import planned
from ridgeline.kernel.bench.history import history_file
from ridgeline.kernel.case import CASES, Case
from tests.support import ROOT

ON_CPU = ("--device", "cpu")


def make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    return (torch.randn(shape, device=device, dtype=dtype, requires_grad=True),)


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An op of two small shapes beside the real ones, and a cache of its own."""
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RIDGELINE_COMMIT", "0" * 40)
    moved = {"moved": lambda inputs, backward: 2 * inputs[0].nbytes, "flops": lambda inputs, backward: inputs[0].numel()}
    sizes = {"small": ((4, 4),), "medium": ((8, 8),), "large": ((16, 16),)}
    more = {"make": make, "sizes": sizes, "dtypes": (torch.float32,), "differentiable": True}
    case = Case(op="tiny", ours=lambda x: 2 * x, plain=lambda x: x + x, **more, **moved)
    monkeypatch.setitem(CASES, "tiny", case)


def test_without_an_op_they_are_listed(run: Any) -> None:
    code, out, _ = run("bench")
    assert code == 0 and "softmax" in out and "tiny" in out and "forward, backward" in out
    names = [line.split()[0] for line in out.splitlines()]
    assert names == sorted(names) and set(names) == set(CASES)
    assert {op["op"] for op in json.loads(run("bench", "--json").out)["ops"]} == set(CASES)


def test_every_form_of_a_run(run: Any, tmp_path: Path) -> None:
    page = tmp_path / "out" / "page.html"
    code, out, err = run("bench", "tiny", "--size", "all", "--backward", "--json", "--html", page, *ON_CPU)
    assert code == 0, err
    data = json.loads(out)
    assert set(data) == {"schema", "machine", "ceilings", "rows"} and data["schema"] == 1
    assert data["machine"]["kernels"] is False and data["ceilings"]["copy_bps"] > 0 and data["ceilings"]["flops"]["bfloat16"] > 0
    assert [(row["shape"], row["backward"]) for row in data["rows"]] == [([n, n], b) for n in (4, 8, 16) for b in (False, True)]
    for row in data["rows"]:
        assert {"gpu_ms", "p20", "p80", "host_us"} <= set(row["ours"]) and row["ours"]["gpu_ms"] > 0 and row["vs_eager"] > 0
        assert row["error_ours"] == 0.0 and row["bytes"] == 8 * row["elements"] and row["fraction"] > 0
    assert page.read_text().startswith("<!doctype html>") and str(page) in err
    assert len(history_file("cpu").read_text().splitlines()) == 6


def test_the_table_says_what_it_shows(run: Any) -> None:
    code, out, err = run("bench", "tiny", "--fast", *ON_CPU)
    assert code == 0 and "measuring tiny" in err
    assert "not kernels" in out and "4x4" in out and "8x8" not in out  # small alone on the CPU unless asked for more
    path = history_file("cpu")
    planted = {**json.loads(path.read_text().splitlines()[0]), "ours_ms": 1e-9}
    path.write_text(json.dumps(planted) + "\nbroken\n")
    assert "REGRESSION" not in run("bench", "tiny", "--fast", *ON_CPU).out


def test_a_real_op_end_to_end(run: Any) -> None:
    code, out, err = run("bench", "softmax", "--size", "small", "--dtype", "float32", "--fast", "--json", *ON_CPU)
    assert code == 0, err
    assert [row["ours"]["error"] for row in json.loads(out)["rows"]] == [None, None]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("softmx", *ON_CPU), ("unknown op 'softmx'", "softmax")),
        (("tiny", "--size", "lrge", *ON_CPU), ("unknown size", "large")),
        (("tiny", "--dtype", "flot32", *ON_CPU), ("unknown dtype", "float32")),
        (("tiny", "--dtype", "int8", *ON_CPU), ("no row of int8 of tiny", "--size all")),
        (("tiny", "--tune", *ON_CPU), ("--tune with --device cpu", "CUDA")),
        (("tiny", "--device", "tpu"), ("cannot measure on 'tpu'", "cpu")),
    ],
)
def test_errors_say_what_why_and_what_to_do(run: Any, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    code, out, err = run("bench", *args)
    assert code == 2 and out == "" and "why:" in err and "do:" in err
    assert all(word in err for word in words), err


def test_without_a_gpu_there_is_nothing_to_measure(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = run("bench", "tiny")
    assert code == 2 and "no CUDA GPU" in err and "--device cpu" in err


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/kernels.py, called as a program."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("kernels_script", ROOT / "benchmarks" / "kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def call(*args: object) -> Any:
        monkeypatch.setattr(sys, "argv", ["kernels.py", "--device", "cpu", "--ops", "tiny", "--repeats", "2", *map(str, args)])
        module.main()
        return module

    return call


def test_the_script_writes_rows_and_wins(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "cpu-wins.json"
    table.write_text(json.dumps({"other||float32": {"eager": 1, "compile": None}, "tiny|gone|float32": {"eager": 1, "compile": 1}}))
    script("--wins", "--out", tmp_path)
    rows = json.loads((tmp_path / "kernel-wins-cpu.json").read_text())
    assert {"schema", "machine", "versions", "commit", "command", "rows"} <= set(rows) and len(rows["rows"]) == 6
    assert set(json.loads(table.read_text())) <= {"tiny||float32"}  # the table follows from the rows, and none here is of another op
    assert "6 rows" in capsys.readouterr().out.splitlines()[-1]
    script("--sizes", "small", "--out", tmp_path)
    path = tmp_path / "kernel-rows-cpu.json"
    rows = json.loads(path.read_text())
    assert len(rows["rows"]) == 2
    path.write_text(json.dumps({**rows, "rows": [{**rows["rows"][0], "op": "other", "commit": "before"}, *rows["rows"]]}))
    script("--sizes", "small", "--out", tmp_path)  # --ops tiny: rows of other ops stay
    assert [(row["op"], row["commit"] == "before") for row in json.loads(path.read_text())["rows"]] == [
        ("other", True),
        *[("tiny", False)] * 2,
    ]


def test_wins_from_rows_measured_before(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script("--everything", "--out", tmp_path)
    measured = tmp_path / "kernel-rows-cpu.json"
    found = json.loads(measured.read_text())
    for row in found["rows"]:
        row["ours"] |= {"gpu_ms": 0.5, "host_us": 1.0}
        row["eager"] |= {"gpu_ms": 0.75, "host_us": 1.0}
    measured.write_text(json.dumps(found))
    first = {name: value for name, value in found["rows"][0].items() if name != "commit"}
    before = [{**first, "op": "other"}, {**first, "shape": [99, 99], "elements": 9801}]
    wins = tmp_path / "kernel-wins-cpu.json"
    wins.write_text(json.dumps({"commit": "before", "rows": before}))
    script("--wins", "--measured", measured, "--out", tmp_path)
    rows = json.loads(wins.read_text())["rows"]
    assert {row["ours"]["gpu_ms"] for row in rows} == {0.5} and len(rows) == len(found["rows"]) + 1
    assert [row["commit"] for row in rows if row["op"] == "other"] == ["before"] and [99, 99] not in [row["shape"] for row in rows]
    lines = json.loads((tmp_path / "cpu-wins.json").read_text())
    assert {name: line["eager"] for name, line in lines.items()} == {"other||float32": 16, "tiny||float32": 16}
    with pytest.raises(SystemExit):
        script("--measured", measured)
    assert "--wins" in capsys.readouterr().err


def test_the_shipped_lines_of_batch_norm_follow_from_its_rows(script: Any, tmp_path: Path) -> None:
    """By the command docs/kernels.md names, on any machine: the file says for which one the table is, and at which commit it was made."""
    results = ROOT / "benchmarks" / "results"
    ops = "batch_norm,batch_norm_act,add_batch_norm_act"
    script("--wins", "--measured", results / "kernel-rows-h200.json", "--ops", ops, "--out", tmp_path)
    made, shipped = (json.loads((folder / "kernel-wins-h200.json").read_text()) for folder in (tmp_path, results))
    assert made["rows"] == shipped["rows"] and made["machine"]["name"] == "NVIDIA H200"
    assert made["command"].endswith(f"--measured kernel-rows-h200.json --ops {ops}") and str(tmp_path) not in made["command"]
    table = json.loads((ROOT / "src/ridgeline/kernel/tables/nvidia-h200-wins.json").read_text())
    assert json.loads((tmp_path / "nvidia-h200-wins.json").read_text()) == table


def test_a_command_names_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch, script: Any) -> None:
    common = sys.modules["common"]
    words = ["/there/x.py", "--table=/there/t.npz", "--text", "../other/t.txt", "--set", "a.b=c", "--out", "/there/out", "--fast"]
    monkeypatch.setattr(sys, "argv", words)
    assert common.command() == "python benchmarks/x.py --table=t.npz --text t.txt --set a.b=c --fast"


def test_the_script_stops_when_its_time_is_spent(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script("--wins", "--budget", "0", "--out", tmp_path)
    assert "not all measured: tiny" in capsys.readouterr().out
    assert not (tmp_path / "cpu-wins.json").exists()


def test_wins_cover_the_anchors_in_both_directions(script: Any, tmp_path: Path) -> None:
    module = script("--budget", "0", "--out", tmp_path)
    rows = module.wins_rows(CASES["softmax"])
    keys = {row.key for row in rows}
    for anchor in CASES["softmax"].anchors:
        assert {("softmax", anchor.shape, "bfloat16", backward) for backward in (False, True)} <= keys
    assert {row.key for row in planned([CASES["softmax"]], module.WINS_SIZES, backward=True)} <= keys and len(keys) == len(rows)
