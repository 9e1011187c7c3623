"""`ridgeline search` as a user calls it: a small real search, a table, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ridgeline.workload.data as data_sets
from ridgeline.search.study.final import load_winner
from ridgeline.workload.data import Data
from tests.search.study.tiny import register, tiny_data, tiny_recipe
from tests.search.tables import made_table


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a search that takes a moment; its data is found under the name tiny."""
    plain = data_sets.load_data

    def load(name: str, **options: Any) -> Data:
        return tiny_data() if name == "tiny" else plain(name, **options)

    for home in ("ridgeline.workload.data.load_data", "ridgeline.search.study.search.load_data"):
        monkeypatch.setattr(home, load)
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    register()
    recipe = tiny_recipe(tmp_path)
    fixed = ["--data", "tiny", "--recipe", recipe, "--final-recipe", recipe, "--epochs", "1", "--final-epochs", "2", "--device", "cpu"]
    return ["search", "--space", "nb201", "--set", "channels=2", "--set", "cells=1", "--strategy", "random", *fixed]


def test_a_search_from_the_command_line(run: Any, tiny: list[str], tmp_path: Path) -> None:
    folder, page = tmp_path / "run", tmp_path / "page.html"
    asked = [*tiny, "--objectives", "accuracy,parameters", "--limit", "parameters<=2500", "--budget", "2trials", "--run", folder]
    code, out, err = run(*asked, "--json", "--html", page)
    assert code == 0, err
    found = json.loads(out)
    assert found["front"] and found["shipped"][0]["test"]["accuracy"] > 0.2 and "trial 0: " in err and page.is_file()
    assert {"genotype.json", "weights.safetensors", "cell.svg"} <= {path.name for path in (folder / "winner").iterdir()}
    assert load_winner(folder / "winner") is not None and ("onnx" in found["exported"]) != any(
        "model.onnx" in note for note in found["notes"]
    )
    again = run("search", "--resume", folder)
    assert again.code == 0 and "winners" in again.out and "test accuracy" in again.out
    other = run(*asked, "--seed", 1)
    assert other.code == 2 and "holds another run" in other.err and "seeds was [0], now [1]" in other.err


def test_ops_are_listed_with_commas(run: Any, tiny: list[str], tmp_path: Path) -> None:
    code, out, err = run(*tiny, "--set", "ops=none,skip", "--budget", "1trial", "--no-train-winner", "--run", tmp_path / "run", "--json")
    assert code == 0, err
    assert json.loads(out)["request"]["settings"]["ops"] == ["none", "skip"]


def test_a_table_of_finished_trainings(run: Any, tmp_path: Path) -> None:
    table = made_table()
    np.savez(tmp_path / "t.npz", ops=np.array(table.points, dtype=np.uint8), **table.columns)
    code, out, err = run("search", "--table", tmp_path / "t.npz", "--objectives", "seen", "--show", "true", "--budget", "8trials",
                         "--seeds", 2, "--strategy", "random", "--json")  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    assert [row["trials"] for row in found["seeds"]] == [8, 8] and set(found["summary"]) == {"true"}


def test_refusals(run: Any, tiny: list[str], tmp_path: Path) -> None:
    for wrong, told in (
        (["--set", "image"], "a name and a value"), (["--set", "chanels=3"], "chanels"), (["--limit", "latency<2"], "latency<2"),
        (["--objectives", "speed"], "speed"), (["--on", "nowhere"], "nowhere"), (["--html", str(tmp_path)], "is a folder"),
        (["--budget", "ten"], "budget"), (["--lut", str(tmp_path / "none.json")], "none.json"), (["--strategy-set", "a=1"], "setting"),
        (["--set", "ops=none,skyp"], "unknown op 'skyp'"), (["--set", "ops=5"], "ops = 5"), (["--set", "ops=null"], "ops = None"),
        (["--set", "name=x"], "setting of space nb201"), (["--strategy-set", "name=x"], "setting"), (["--show", "true"], "--show with"),
        (["--resume", "F"], "--space, --data, --budget, --strategy, --set"), (["--table", "T"], "--space, --data, --set, --epochs"),
    ):  # fmt: skip
        code, _, err = run(*tiny, "--budget", "1trial", *wrong)
        assert code == 2 and told in err and "Traceback" not in err, (wrong, err)
    assert "run.json" in run("search", "--resume", tmp_path / "none").err
    assert "--seed with --table" in run("search", "--table", "T", "--seed", 0).err  # given, though it is the default


def test_without_a_terminal_what_goes_on_is_told_now_and_then(
    run: Any, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long trials, and searches of one trial, would be silent for minutes."""
    asked = [*tiny, "--budget", "1trial", "--no-train-winner"]
    assert "epoch 1" not in run(*asked, "--run", tmp_path / "quick").err
    monkeypatch.setattr("ridgeline.cli.common.QUIET_S", 0.0)
    assert "epoch 1" in run(*asked, "--run", tmp_path / "told").err
