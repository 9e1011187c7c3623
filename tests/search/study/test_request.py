"""What a run folder belongs to: data, tables, targets by content; wrong requests are told before anything is begun."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.errors import OptionError, RidgelineError
from ridgeline.search.latency.table import LatencyTable
from ridgeline.search.spaces.space import load_space
from ridgeline.search.strategies import make_strategy
from ridgeline.search.study.costs import load_costing
from ridgeline.search.study.folder import digest_of
from ridgeline.search.study.request import make_request
from ridgeline.search.study.search import run_again, run_search
from ridgeline.workload.digest import data_digest
from tests.search.study.tiny import TinySpace, register, tiny_data, tiny_options
from tests.support import ROOT

DATA = tiny_data()
SPACE = TinySpace()
register()


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {**tiny_options(tmp_path), "budget": "2trials"}


def table_of(folder: Path, **changes: Any) -> Path:
    entries = {one.key: {"seconds": 1e-3 * (1 + place)} for place, one in enumerate(SPACE.all_blocks())}
    fields = {"schema": 1, "space": "tiny", "settings": {"scale": 1}, "target": "cpu", "method": "measured", "machine": "m"}
    whole = {**fields, "versions": {"torch": "2"}, "overhead_s": 0.0, "entries": entries, **changes}
    return LatencyTable.model_validate_json(json.dumps(whole)).save(folder / "lut.json")


def test_other_images_are_another_run(options: dict[str, Any], tmp_path: Path) -> None:
    """The same name and shapes, one pixel changed."""
    other = replace(DATA, train=replace(DATA.train, inputs=DATA.train.inputs.clone()))
    other.train.inputs[0, 0, 0, 0] += 1
    assert data_digest(DATA) == data_digest(tiny_data()) != data_digest(other)
    run_search(SPACE, DATA, folder=tmp_path / "run", **options)
    with pytest.raises(OptionError, match="another run") as told:
        run_search(SPACE, other, folder=tmp_path / "run", **options)
    assert "data_digest" in str(told.value)


def test_an_edited_target_file_is_another_run(options: dict[str, Any], tmp_path: Path) -> None:
    target = tmp_path / "mine.toml"
    shutil.copyfile(ROOT / "src" / "ridgeline" / "target" / "catalog" / "h200.toml", target)
    wanted = {**options, "objectives": "accuracy,latency", "train_winner": False, "target": str(target), "folder": tmp_path / "run"}
    run_search(SPACE, DATA, **wanted)
    text = target.read_text(encoding="utf-8")
    target.write_text(text.replace("seconds = 4.198e-06", "seconds = 5.198e-06", 1), encoding="utf-8")
    with pytest.raises(OptionError, match="target_digest"):
        run_search(SPACE, DATA, **wanted)


def test_files_may_be_named_from_anywhere(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table_of(tmp_path)
    monkeypatch.chdir(tmp_path)
    near = {**options, "objectives": "accuracy,latency", "train_winner": False, "recipe": "tiny.toml", "final_recipe": "./tiny.toml"}
    first = run_search(SPACE, DATA, table="lut.json", folder="run", **near)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    far = {**near, "recipe": "../tiny.toml", "final_recipe": str(tmp_path / "tiny.toml")}
    again = run_search(SPACE, DATA, table="../lut.json", folder="../run", **far)
    assert again.trials == first.trials
    monkeypatch.setattr("ridgeline.search.study.search.load_data", lambda name: DATA)
    assert run_again(tmp_path / "run").trials == first.trials
    os.rename(tmp_path / "lut.json", tmp_path / "moved.json")
    assert run_search(SPACE, DATA, table=tmp_path / "moved.json", folder=tmp_path / "run", **far).trials == first.trials


def test_the_digest_is_of_content(options: dict[str, Any], tmp_path: Path) -> None:
    asked = {name: value for name, value in options.items() if name != "onnx"}
    (tmp_path / "other.toml").write_text((tmp_path / "tiny.toml").read_text(encoding="utf-8"), encoding="utf-8")
    first, second = (make_request(SPACE, DATA, **{**asked, "recipe": str(tmp_path / f"{name}.toml")}) for name in ("tiny", "other"))
    assert digest_of(first.model_dump(mode="json")) == digest_of(second.model_dump(mode="json"))
    third = make_request(SPACE, DATA, **{**asked, "epochs": 2})
    assert digest_of(third.model_dump(mode="json")) != digest_of(first.model_dump(mode="json"))


def test_a_table_answers_for_its_own_conditions(options: dict[str, Any], tmp_path: Path) -> None:
    asked = {**options, "objectives": "accuracy,latency", "train_winner": False}
    path = table_of(tmp_path, target="eyeriss", method="estimated", dtype="float16")
    found = run_search(SPACE, DATA, table=path, **asked)
    assert (found.request["target"], found.request["dtype"]) == ("eyeriss", "float16")  # the table's, where nothing is said
    for wrong in ({"target": "h200"}, {"dtype": "float32"}, {"batch": 2}, {"final": {"scale": 2}}):
        with pytest.raises(OptionError, match="a table"):
            run_search(SPACE, DATA, table=path, **asked, **wrong)
    with pytest.raises(OptionError, match="a table for"):
        run_search(TinySpace(scale=3), DATA, table=path, **asked)
    with pytest.raises(OptionError, match="aso-se"):
        run_search(SPACE, DATA, table=path, **{**asked, "strategy": "aso-se"})


@pytest.mark.parametrize(
    "wrong,told",
    [
        ({"strategy": "modle"}, "strategy"),
        ({"strategy_settings": {"rungs": 2}}, "setting"),
        ({"device": "nope"}, "device"),
        ({"device": "meta"}, "device"),
        ({"dtype": "nope"}, "dtype"),
        ({"measure": True, "dtype": "int8", "objectives": "accuracy,latency"}, "int8"),
        ({"seeds": [1 << 40]}, "seeds"),
        ({"batch": 10**9}, "batch"),
    ],
)
def test_wrong_requests_leave_the_folder_free(options: dict[str, Any], tmp_path: Path, wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(RidgelineError, match=told):
        run_search(SPACE, DATA, folder=tmp_path / "run", **{**options, **wrong})
    assert len(run_search(SPACE, DATA, folder=tmp_path / "run", **options).trials) == 2


def test_a_folder_where_nothing_was_done_is_free(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="without a result"):
        run_search(SPACE, DATA, folder=tmp_path / "run", limits=["parameters<=1"], objectives="accuracy,parameters", **options)
    (tmp_path / "run" / "trials.jsonl").write_text("", encoding="utf-8")
    assert len(run_search(SPACE, DATA, folder=tmp_path / "run", **options).trials) == 2


def test_a_space_must_fit_the_data(options: dict[str, Any]) -> None:
    for sizes in ({"classes": 4}, {"image": 8}, {"image_channels": 3}):
        space = load_space("nb201", **{"channels": 2, "cells": 1, "classes": 3, "image": 4, "image_channels": 1, **sizes})
        with pytest.raises(OptionError, match="has images"):
            run_search(space, DATA, **options)
    fits = load_space("nb201", channels=2, cells=1, classes=3, image=4, image_channels=1)
    with pytest.raises(OptionError, match="has images"):
        run_search(fits, DATA, final={"classes": 7}, **options)


def test_memory_is_in_the_dtype_of_the_pass() -> None:
    names = ["memory", "parameters"]
    wide, narrow = (load_costing("h200", None, 1, dtype, False).of(SPACE, (3, 0, 0), names) for dtype in (None, "bfloat16"))
    assert narrow["parameters"] == wide["parameters"] and narrow["memory"] == pytest.approx(wide["memory"] / 2, rel=0.02)
    measured = load_costing("cpu", None, 1, "bfloat16", True).of(SPACE, (3, 0, 0), [*names, "latency"])
    assert measured["memory"] == narrow["memory"] and measured["latency"] > 0


@pytest.mark.parametrize("strategy", ["random", "evolution", "model", "controller"])
def test_no_other_trial_beats_a_winner_by_cost(options: dict[str, Any], strategy: str) -> None:
    """Parameters need no training: among networks of equally few the more accurate ships."""
    found = run_search(
        SPACE, DATA, objectives="parameters,accuracy", train_winner=False, **{**options, "strategy": strategy, "budget": "9trials"}
    )
    assert found.winner is not None and found.winner.number in {trial.number for trial in found.front}


def test_equals_of_the_first_objective_are_told_apart_by_the_second() -> None:
    for name in ("random", "evolution", "controller", "halving"):
        strategy = make_strategy(name, SPACE, objectives=2, budget_trials=9, seed=0)
        told = {}
        for number in range(8):
            ask = strategy.ask()
            told[ask.point, ask.fidelity] = (1.0, float(number % 5))
            strategy.tell(ask, told[ask.point, ask.fidelity])
        top = max(fidelity for _, fidelity in told)
        assert max(value for (point, fidelity), value in told.items() if point == strategy.best() and fidelity == top)[1] == max(
            value[1] for (_, fidelity), value in told.items() if fidelity == top
        ), name


def test_halving_promotes_within_the_default_budget(options: dict[str, Any]) -> None:
    """8 trials, 4 epochs: two rungs, and what would be trained for as many epochs again is not."""
    found = run_search(SPACE, DATA, train_winner=False, **{**options, "strategy": "halving", "budget": "8trials", "epochs": 4})
    assert {trial.fidelity for trial in found.trials} == {1 / 3, 1.0} and found.winner is not None and found.winner.fidelity == 1.0
    same = run_search(
        SPACE,
        DATA,
        train_winner=False,
        strategy_settings={"rungs": 3},
        **{**options, "strategy": "halving", "budget": "13trials", "epochs": 4},
    )
    repeated = [trial for trial in same.trials if trial.same_as is not None]
    assert repeated and all(trial.values == same.trials[trial.same_as or 0].values for trial in repeated)
    assert sum(trial.same_as is None for trial in same.trials) == 13


def test_what_is_gone_is_said(options: dict[str, Any], tmp_path: Path) -> None:
    whole = run_search(SPACE, DATA, folder=tmp_path / "run", **options)
    written = json.loads((tmp_path / "run" / "front.json").read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(whole.to_json())) and written["exported"]["report"].endswith("report.html")
    (tmp_path / "run" / "final" / "0" / "weights.safetensors").unlink()
    (tmp_path / "run" / "winner" / "weights.safetensors").unlink()
    again = run_search(SPACE, DATA, folder=tmp_path / "run", **options)
    assert any("no weights" in note for note in again.notes)
