"""Whole searches over a tiny space: what is trained, what is refused, what is kept, what ships."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.core.errors import ModelFileError, OptionError, RidgelineError
from ridgeline.search.latency.table import LatencyTable
from ridgeline.search.study import evaluate, final, search, trial
from ridgeline.search.study.evaluate import evaluate_point, held_out
from ridgeline.search.study.final import load_winner
from ridgeline.search.study.folder import read_front, read_trials
from ridgeline.search.study.search import run_again, run_search
from ridgeline.train.evaluate import evaluate as score
from tests.search.study.tiny import TinySpace, register, tiny_data, tiny_options
from tests.support import FULL

DATA = tiny_data()
SPACE = TinySpace()
register()


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return tiny_options(tmp_path)


def test_the_test_split_is_not_looked_at_before_the_end(options: dict[str, Any]) -> None:
    other = tiny_data()
    other.test.targets.copy_((other.test.targets + 1) % 3)
    first, second = (run_search(SPACE, data, budget="3trials", **options) for data in (DATA, other))
    assert [one.values for one in first.trials] == [one.values for one in second.trials]
    assert first.shipped[0].test != second.shipped[0].test
    parts = held_out(DATA, 0.25)
    assert len(parts.train) + len(parts.test) == len(DATA.train)
    rows = {tuple(row.tolist()) for row in DATA.test.inputs.flatten(1)}
    assert not rows & {tuple(row.tolist()) for part in (parts.train, parts.test) for row in part.inputs.flatten(1)}


def test_networks_beyond_a_limit_are_not_trained(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []
    plain = trial.score_candidate

    def counted(space: Any, point: Any, *args: Any, **more: Any) -> dict[str, float]:
        trained.append(sum(p.numel() for p in space.build(point).parameters()))
        return plain(space, point, *args, **more)

    monkeypatch.setattr(trial, "score_candidate", counted)
    found = run_search(SPACE, DATA, objectives="accuracy,parameters", limits=["parameters<=130"], budget="4trials", **options)
    refused = [one for one in found.trials if not one.feasible]
    assert len(trained) == 4 and max(trained) <= 130 and refused and all("parameters" in one.why for one in refused)
    assert all(one.values["parameters"] <= 130 for one in found.front) and found.winner is not None and found.winner.feasible
    with pytest.raises(OptionError, match="without a result"):
        run_search(SPACE, DATA, limits=["parameters<=3"], budget="2trials", **options)
    with pytest.raises(OptionError, match="without a result"):
        run_search(SPACE, DATA, limits=["accuracy>=100%", "parameters<=60"], budget="1trial", **options)


def test_the_same_computation_is_trained_once(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MOST_IDLE", 6)
    found = run_search(SPACE, DATA, budget="40trials", train_winner=False, **options)
    forms = [SPACE.canonical(one.point) for one in found.trials if one.same_as is None]
    assert len(forms) == len(set(forms)) == 24  # all there are; then the search ends by itself
    again = [one for one in found.trials if one.same_as is not None]
    assert again and all(one.values == found.trials[one.same_as or 0].values for one in again)


def test_a_folder_holds_what_it_says(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen = tmp_path / "run", list[int]()
    found = run_search(
        SPACE, DATA, objectives="accuracy,flops", budget="2trials", seeds=[4, 7], folder=folder, final={"scale": 2},
        watch=lambda front: seen.append(len(front.trials)), **options,
    )  # fmt: skip
    assert seen == list(range(1, len(found.trials) + 1))
    assert {path.name for path in folder.iterdir()} == {
        "run.json",
        "trials.jsonl",
        "trials",
        "final",
        "front.json",
        "winner",
        "report.html",
    }
    assert not list((folder / "trials").iterdir()) and not list((folder / "final").glob("*/checkpoints"))
    front, lines = read_front(folder), read_trials(folder)
    assert front == json.loads(json.dumps(found.to_json() | {"exported": front["exported"]}))
    assert [line["kind"] for line in lines].count("final") == 2 and front["summary"]["test_accuracy"]["seeds"] == 2
    model, winner = load_winner(folder / "winner"), found.winner
    assert winner is not None
    own = next(one for one in found.shipped if one.seed == winner.seed)
    assert score(model, DATA).accuracy == own.test["accuracy"]
    assert model[1].out_features == 2 * 2 * (winner.point[0] + 1)  # type: ignore[index]  # the size that ships
    monkeypatch.setattr(search, "load_data", lambda name: DATA)
    if not FULL:  # taken up, it would export ONNX too, as the command's test does
        monkeypatch.setattr(final, "_export_onnx", lambda *_: None)
    written = (folder / "trials.jsonl").read_bytes()
    assert run_again(folder).to_json()["shipped"] == front["shipped"] and (folder / "trials.jsonl").read_bytes() == written
    with pytest.raises(OptionError, match="epochs was 1, now 2"):
        run_search(SPACE, DATA, folder=folder, **{**options, "epochs": 2, "budget": "2trials"})
    (folder / "winner" / "weights.safetensors").write_bytes(os.urandom(200))
    with pytest.raises(ModelFileError):
        load_winner(folder / "winner")
    (folder / "winner" / "genotype.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelFileError):
        load_winner(folder / "winner")


def test_a_failing_training_is_told_and_passed_over(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = trial.score_candidate, []

    def sometimes(*args: Any, **more: Any) -> dict[str, float]:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no room")
        return plain(*args, **more)

    monkeypatch.setattr(trial, "score_candidate", sometimes)
    found = run_search(SPACE, DATA, budget="3trials", train_winner=False, **options)
    assert [one.why for one in found.trials if not one.feasible] == ["no room"] and sum(one.counts for one in found.trials) == 3


def test_time_ends_with_the_last_trial_that_fits() -> None:
    from ridgeline.search.budget import Budget
    from ridgeline.search.study.result import Trial

    def trials(*seconds: float) -> list[Trial]:
        return [Trial(n, 0, (), 1.0, {"accuracy": 0.5}, True, one) for n, one in enumerate(seconds)]

    assert not search.spent(Budget(seconds=10), []) and not search.spent(Budget(seconds=10), trials(3, 3))
    assert search.spent(Budget(seconds=10), trials(3, 3, 3)) and search.spent(Budget(trials=2), trials(1, 1))


def test_costs_by_estimate_and_by_table(tmp_path: Path, options: dict[str, Any]) -> None:
    costing = search.load_costing("h200", None, 1, None, False)
    costs = costing.of(SPACE, (3, 0, 0), ["latency", "memory", "parameters", "flops", "accuracy"])
    assert costs["parameters"] == 16 * 8 + 8 + 8 * 3 + 3 and costs["flops"] >= 2 * (16 * 8 + 8 * 3) and 0 < costs["latency"] < 1
    assert costs["memory"] > 4 * costs["parameters"] and costing.of(SPACE, (3, 0, 1), ["flops"]) == {"flops": costs["flops"]}
    entries = {one.key: {"seconds": 1e-3 * (1 + place % 3)} for place, one in enumerate(SPACE.all_blocks())}
    fields = {"schema": 1, "space": "tiny", "settings": {"scale": 1}, "target": "cpu", "method": "measured", "machine": "m"}
    table = LatencyTable.model_validate_json(json.dumps({**fields, "versions": {"torch": "2"}, "overhead_s": 0.0, "entries": entries}))
    path = table.save(tmp_path / "lut.json")
    found = run_search(
        SPACE, DATA, objectives="accuracy,latency", limits=["latency<=2ms"], table=path, budget="3trials", train_winner=False, **options
    )
    assert {one.values["latency"] for one in found.front} <= {1e-3, 2e-3} and found.request["table_digest"]
    refused = {}  # a third of the networks break the limit: ours know which before they ask, Optuna's are told
    for strategy in ("model", "random", "tpe"):
        again = run_search(
            SPACE, DATA, objectives="accuracy,latency", limits=["latency<=2ms"], table=path, budget="8trials", train_winner=False,
            **{**options, "strategy": strategy},
        )  # fmt: skip
        refused[strategy] = sum(not trial.feasible for trial in again.trials)
    assert refused["model"] == refused["random"] == 0 < refused["tpe"]
    with pytest.raises(OptionError, match="batch"):
        search.load_costing("cpu", path, 8, None, False)
    with pytest.raises(RidgelineError):
        search.load_costing("nowhere", None, 1, None, False)
    with pytest.raises(OptionError, match="measured"):
        search.load_costing("h200", None, 1, None, True)
    assert 0 < search.load_costing("cpu", None, 1, None, True).of(SPACE, (0, 0, 0), ["latency"])["latency"] < 1


def test_wrong_options(options: dict[str, Any]) -> None:
    for wrong in (
        {"strategy": "nothing"}, {"objectives": "speed"}, {"budget": "9"}, {"limits": ["latency<=x"]}, {"recipe": "none"}, {"epoch": 3},
        {"seeds": []}, {"final": {"scal": 2}}, {"validation": 2.0}, {"table": "/none"}, {"target": "cpuu"}, {"strategy_settings": {"a": 1}},
    ):  # fmt: skip
        with pytest.raises(RidgelineError):
            run_search(SPACE, DATA, **{**options, "budget": "1trial", **wrong})  # type: ignore[arg-type]
    with pytest.raises(OptionError):
        evaluate_point(SPACE, (0, 0, 0), DATA, recipe=options["recipe"], fidelity=0.0)
    assert final.build_genotype(SPACE.genotype((0, 0, 0))) is not None and evaluate.quiet("") is None


@pytest.mark.skipif(not FULL, reason="an engine of the simulator may have to be compiled first")
def test_noise_of_a_chip_is_an_objective(options: dict[str, Any]) -> None:
    found = evaluate_point(SPACE, (3, 0, 0), DATA, recipe=options["recipe"], epochs=2, objectives=["crossbar_accuracy"])
    assert 0.2 < found["crossbar_accuracy"] <= 1.0 and found["accuracy"] > 0.4
