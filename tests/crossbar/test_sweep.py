"""Sweeps: the grid, the variants' prices, Pareto marks, resuming, and what each number format costs in codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.errors import OptionError, RidgelineError
from ridgeline.crossbar.study import sweep as sweep_module
from ridgeline.crossbar.study.subject import load_subject
from ridgeline.crossbar.study.sweep import combinations, mark_pareto, sweep, variant
from ridgeline.target.load import load_crossbar
from tests.crossbar.study import small_data, small_network
from tests.crossbar.support import chip


@pytest.fixture(scope="module")
def subject() -> Any:
    data = small_data()
    return load_subject(small_network(data), data)


def test_every_combination_once_the_last_field_fastest() -> None:
    assert combinations({"array": [8, 16], "adc_levels": [64, 256]}) == [
        {"array": 8, "adc_levels": 64}, {"array": 8, "adc_levels": 256}, {"array": 16, "adc_levels": 64}, {"array": 16, "adc_levels": 256},
    ]  # fmt: skip
    assert combinations({}) == [{}]


@pytest.mark.parametrize(
    ("grid", "said"),
    [({"adc_level": [4]}, "adc_levels"), ({"array": 32}, "list of values"), ({"array": []}, "list of values"),
     ({"precision": ["fp8"]}, "precision"), ({"array": range(1, 200), "adc_levels": range(2, 200)}, "at most")],
)  # fmt: skip
def test_a_grid_that_cannot_be_is_an_error(grid: dict[str, Any], said: str) -> None:
    with pytest.raises(RidgelineError, match=said):
        combinations(grid)


def test_a_variant_changes_what_it_names() -> None:
    base = load_crossbar("rram-64")
    made = variant(base, {"slices": [1, 3, 4], "array": 32, "granularity": 128, "adc_levels": 64, "sign": "differential"})
    assert made.operands.x_slices == made.operands.w_slices == (1, 3, 4) and made.operands.sign == "differential"
    assert (made.array.rows, made.array.columns) == (32, 32)
    assert made.operands.x_granularity == (1, 128) and made.operands.w_granularity == (128, 128)
    assert made.cell.levels == made.dac.levels == 16, "a slice of four bits needs sixteen levels"
    assert made.cost.array_read_j.value == pytest.approx(base.cost.array_read_j.value / 4)
    assert made.cost.adc_conversion_j.value == pytest.approx(base.cost.adc_conversion_j.value / 4)
    assert made.cost.array_mm2.value == pytest.approx(base.cost.array_mm2.value / 4)
    assert made.cost.adc_mm2.value == pytest.approx(base.cost.adc_mm2.value / 4)
    assert made.cost.dac_mm2 == base.cost.dac_mm2 and made.cost.array_read_s == base.cost.array_read_s
    assert variant(base, {}) == base and variant(base, {"slices": [1, 1, 2, 2, 2]}).cell.levels == base.cell.levels


@pytest.mark.parametrize("settings", [{"adc_levels": 1}, {"array": 0}, {"slices": [2, 2]}, {"granularity": "per-row"}, {"sign": "none"}])
def test_an_impossible_variant_stops_before_anything_runs(subject: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(RidgelineError):
        sweep(subject, chip(), grid={name: [value] for name, value in settings.items()}, report=lambda text: pytest.fail(text))


def test_rows_state_accuracy_speed_memory_and_energy(subject: Any) -> None:
    found = sweep(subject, load_crossbar("rram-64"), grid={"adc_levels": [4, 256], "array": [16, 64]}, images=12, calibrate=16)
    assert [tuple(row["settings"].values()) for row in found.rows] == [(4, 16), (4, 64), (256, 16), (256, 64)]
    coarse, fine = found.rows[1], found.rows[3]
    assert fine["accuracy"] > coarse["accuracy"] and fine["energy_j"] > coarse["energy_j"] > 0
    assert all(row["images_per_s"] > 0 and row["peak_bytes"] > 0 and row["arrays"] > 0 for row in found.rows)
    best = max(found.rows, key=lambda row: (row["accuracy"], -row["energy_j"]))
    assert best["pareto"] and not all(row["pareto"] for row in found.rows)
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["digital"] == 1.0


def test_each_number_format_states_its_error(subject: Any) -> None:
    spec = chip(adc_levels=64)
    grid = {"precision": ["default", "float32", "float16", "bfloat16", "integer"], "array": [64]}
    found = {row["settings"]["precision"]: row for row in sweep(subject, spec, grid=grid, images=8).rows}
    for exact in ("default", "float32", "integer"):
        assert found[exact]["codes_differ"] == 0 and found[exact]["error"] < 1e-5, exact
    assert 0 <= found["float16"]["codes_differ"] <= found["bfloat16"]["codes_differ"] < 0.5


def test_a_wrong_code_is_seen(subject: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ridgeline.crossbar.study import precision

    result = precision._result

    def off_by_one(engine: Any, *given: Any) -> Any:
        out, codes = result(engine, *given)
        return (out, codes) if engine.name == "reference" else (out * 1.01, codes + (codes == codes.max()))

    monkeypatch.setattr(precision, "_result", off_by_one)
    row = sweep(subject, chip(), grid={}, images=8).rows[0]
    assert row["codes_differ"] > 0 and row["error"] == pytest.approx(0.01, rel=1e-3)


def test_a_killed_sweep_goes_on_where_it_was(subject: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, measure, measured = {"adc_levels": [64, 128, 256]}, sweep_module.measure_row, []

    def counted(*given: Any, **options: Any) -> dict[str, Any]:
        measured.append(1)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return measure(*given, **options)

    monkeypatch.setattr(sweep_module, "measure_row", counted)
    with pytest.raises(KeyboardInterrupt):
        sweep(subject, chip(), grid=grid, images=8, run=tmp_path)
    found = sweep(subject, chip(), grid=grid, images=8, run=tmp_path)
    assert len(measured) == 4 and [row["settings"]["adc_levels"] for row in found.rows] == [64, 128, 256]
    with pytest.raises(OptionError, match="different run"):
        sweep(subject, chip(), grid=grid, images=9, run=tmp_path)
    other = small_data()
    other.train.inputs[0] += 1.0  # what ranges are calibrated on
    with pytest.raises(OptionError, match="these differ: data"):
        sweep(replace(subject, data=other), chip(), grid=grid, images=8, run=tmp_path)


def test_pareto_marks_what_nothing_beats() -> None:
    def row(accuracy: float, energy_j: float | None, images_per_s: float = 1.0) -> dict[str, Any]:
        return {"accuracy": accuracy, "energy_j": energy_j, "images_per_s": images_per_s}

    marked = mark_pareto([row(0.9, 2.0), row(0.9, 1.0), row(0.8, 1.0), row(0.8, 0.5), row(0.95, 3.0, 1.0), row(0.95, 3.0, 2.0)])
    assert [one["pareto"] for one in marked] == [False, True, False, True, False, True]
    unpriced = mark_pareto([row(0.9, None, 5.0), row(0.8, None, 9.0), row(0.8, None, 4.0)])
    assert [one["pareto"] for one in unpriced] == [True, True, False]
