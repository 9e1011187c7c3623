"""Supernet searches as runs: one trial a seed, resumed like any other, with the table's latency in the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.errors import RidgelineError
from ridgeline.search.spaces import load_space
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
