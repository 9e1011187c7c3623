"""Supernet searches as runs: one trial a seed, resumed like any other, with the table's latency in the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.errors import OptionError, RidgelineError
from ridgeline.search.differentiable import cycle
from ridgeline.search.differentiable.cycle import Grown
from ridgeline.search.differentiable.grown import EDGES, GrownNet, Plan
from ridgeline.search.spaces import load_space
from ridgeline.search.study import gradient
from ridgeline.search.study.final import load_winner
from ridgeline.search.study.search import run_search
from ridgeline.train.evaluate import evaluate
from tests.search.study.tiny import tiny_data, tiny_recipe
from tests.support import FULL

DATA = tiny_data()
SPACE = load_space("nb201", channels=2, cells=1, classes=3, image=4, image_channels=1)


def searched(folder: Path, strategy: str, **more: Any) -> Any:
    folder.mkdir(exist_ok=True)
    recipe = tiny_recipe(folder)
    return run_search(
        SPACE, DATA, strategy=strategy, objectives="accuracy,parameters", recipe=recipe, final_recipe=recipe, epochs=1, final_epochs=1,
        folder=folder / "run", onnx=False, **more,
    )  # fmt: skip


def test_differentiable_is_one_trial_that_ships(tmp_path: Path) -> None:
    settings = {"epochs": 1, "batch": 32}
    found = searched(tmp_path, "differentiable", strategy_settings=settings)
    assert len(found.trials) == 1 and found.shipped[0].point == found.trials[0].point and found.trials[0].values["parameters"] > 0
    written = (tmp_path / "run" / "trials.jsonl").read_bytes()
    assert searched(tmp_path, "differentiable", strategy_settings=settings).shipped == found.shipped
    assert (tmp_path / "run" / "trials.jsonl").read_bytes() == written
    with pytest.raises(RidgelineError, match="epoch"):
        searched(tmp_path / "other", "differentiable", strategy_settings={"epoch": 1})


@pytest.mark.skipif(not FULL, reason="some hundred steps")
def test_aso_se_ships_the_network_it_has_grown(tmp_path: Path) -> None:
    settings = {"cycles": 1, "channels": 2, "depth": 3, "batch": 32}
    found = searched(tmp_path, "aso-se", strategy_settings=settings)
    assert found.trials[0].genotype["space"] == "aso-se" and found.genotypes[0]["stages"]
    assert evaluate(load_winner(tmp_path / "run" / "winner"), DATA).accuracy == found.shipped[0].test["accuracy"]
    assert searched(tmp_path, "aso-se", strategy_settings=settings).shipped == found.shipped


def test_aso_se_is_scored_on_rows_its_search_has_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows run_cycles gets are all others; the trial's accuracy is that of the held-out part, not the search's own."""
    seen: dict[str, Any] = {}

    def grown(space: Any, parts: Any, **options: Any) -> Grown:
        seen.update(parts=parts, options=options)
        plan = Plan(2, (1, 1, 1), (((("conv3x3",),) * len(EDGES)),) * 3, 3, 1)
        seen["model"] = GrownNet(plan)
        return Grown(seen["model"], plan.to_json(), [], 0.125, 1)

    monkeypatch.setattr(cycle, "run_cycles", grown)
    monkeypatch.setattr(gradient, "_functions", lambda strategy: ())
    found = searched(tmp_path, "aso-se")
    assert found.trials[0].values["accuracy"] == evaluate(seen["model"], seen["parts"]).accuracy != 0.125
    start = tmp_path / "run" / "final" / "0" / "start.safetensors"
    journal = (tmp_path / "run" / "trials.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for damaged in (b"no tensors", None):  # the search is done, its final training is not
        (tmp_path / "run" / "trials.jsonl").write_text("".join(journal[:-1]), encoding="utf-8")
        start.unlink() if damaged is None else start.write_bytes(damaged)
        with pytest.raises(OptionError, match="final training begins"):
            searched(tmp_path, "aso-se")
