"""A file made from known cells is fitted back; broken and hostile files meet a DataError."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline.core.errors import DataError, TargetSpecError
from ridgeline.core.spec import parse_spec
from ridgeline.crossbar import cell_reads
from ridgeline.crossbar.fit_cells import cell_text, chip_text, fit_cells, write_chip
from ridgeline.target.crossbar import Cell
from ridgeline.target.load import load_crossbar

LOW, HIGH, WRITE, READ = 2e-6, 4e-5, [0.10, 0.05, 0.03, 0.02], [0.04, 0.02, 0.01, 0.005]
STUCK_HIGH, STUCK_LOW, NU, NU_SIGMA = 0.02, 0.05, 0.05, 0.01


def measurements(
    path: Path, *, cells: int = 1000, reads: int = 4, times: tuple[float, ...] = (), write: list[float] = WRITE, nu_sigma: float = NU_SIGMA
) -> Path:
    random = np.random.default_rng(3)
    lines = ["level,cell,read,conductance_s" + (",time_s" if times else "")]
    for level in range(4):
        for cell in range(cells):
            g = (LOW + level * (HIGH - LOW) / 3) * (1 + write[level] * random.standard_normal())
            u, nu = random.random(), NU + nu_sigma * random.standard_normal()
            g = HIGH if u < STUCK_HIGH else LOW if u < STUCK_HIGH + STUCK_LOW else g
            nearest = int(np.clip(round((g - LOW) / (HIGH - LOW) * 3), 0, 3))
            for time in times or (None,):
                for read in range(reads):
                    drifted = g if time is None else g * (time / times[0]) ** -nu
                    seen = drifted * np.exp(READ[nearest] * random.standard_normal())
                    lines.append(f"{level},c{cell},{read},{seen:.9e}" + ("" if time is None else f",{time}"))
    path.write_text("\n".join(lines) + "\n")
    return path


def values(table: dict[str, Any], name: str) -> list[float]:
    return [one["value"] for one in table[name]]


@pytest.mark.parametrize("times", [(), (20.0, 200.0, 3600.0)])
def test_known_cells_are_found_again(tmp_path: Path, times: tuple[float, ...]) -> None:
    table = fit_cells(measurements(tmp_path / "lab.csv", times=times))
    assert table["levels"] == 4
    assert abs(table["high_s"]["value"] / HIGH - 1) < 0.01 and abs(table["low_s"]["value"] / LOW - 1) < 0.02
    assert abs(table["stuck_high"]["value"] - STUCK_HIGH) < 0.01 and abs(table["stuck_low"]["value"] - STUCK_LOW) < 0.015
    assert np.allclose(
        values(table, "write_sigma"), WRITE, rtol=0.12
    )  # 1000 cells: 2.2 % a standard deviation, and stuck cells like the rest
    assert np.allclose(values(table, "read_sigma"), READ, rtol=0.1)
    assert {one["status"] for one in table["write_sigma"]} == {"measured"} and "lab.csv" in table["high_s"]["source"]
    if not times:
        assert "drift_nu" not in table
        return
    assert abs(table["drift_nu"]["value"] - NU) < 0.002 and abs(table["drift_nu_sigma"]["value"] - NU_SIGMA) < 0.002
    assert table["drift_from_s"]["value"] == 20.0 and table["drift_time_s"]["value"] == 3600.0


def test_noise_of_reads_is_not_taken_for_writes(tmp_path: Path) -> None:
    table = fit_cells(measurements(tmp_path / "lab.csv", write=[0.0] * 4, cells=400))
    assert max(values(table, "write_sigma")) < 0.01 and np.allclose(values(table, "read_sigma"), READ, rtol=0.12)


def test_noise_of_reads_is_not_taken_for_a_spread_of_drift(tmp_path: Path) -> None:
    table = fit_cells(measurements(tmp_path / "lab.csv", times=(20.0, 200.0, 3600.0), nu_sigma=0.0))
    assert table["drift_nu_sigma"]["value"] < 0.0015  # the reads alone spread the slopes by 0.003


def test_one_read_a_cell_says_so(tmp_path: Path) -> None:
    table = fit_cells(measurements(tmp_path / "lab.csv", reads=1, cells=50))
    assert values(table, "read_sigma") == [0.0] * 4 and {one["status"] for one in table["read_sigma"]} == {"assumed"}


def test_the_section_and_the_chip_read_back(tmp_path: Path) -> None:
    table = fit_cells(measurements(tmp_path / "lab.csv", cells=60, times=(1.0, 100.0)))
    assert tomllib.loads(cell_text(table)) == {"cell": table}
    spec = load_crossbar(str(write_chip(tmp_path / "ours.toml", "rram-64", table)))
    assert spec.name == "ours" and spec.cell.high_s.value == table["high_s"]["value"] and spec.cell.high_s.status == "measured"
    preset = load_crossbar("rram-64")
    assert spec.adc == preset.adc and spec.cost == preset.cost and spec.operands == preset.operands
    assert spec.cell.line_resistance_ohm == preset.cell.line_resistance_ohm
    assert spec.cell.write_sigmas == parse_spec(Cell, table, "x").write_sigmas
    with pytest.raises(TargetSpecError, match="levels"):
        chip_text("rram-64", {**table, "levels": 2, "write_sigma": 0.0, "read_sigma": 0.0}, "two")


def test_stuck_shares_are_of_the_cells_that_can_show_it(tmp_path: Path) -> None:
    low, high = [1e-6 * (1 + 0.001 * cell) for cell in range(10)], [9e-6 * (1 + 0.001 * cell) for cell in range(10)]
    low[0] = low[5] = 9e-6
    high[3] = 1e-6
    path, lines = tmp_path / "lab.csv", ["level,cell,read,conductance_s"]
    lines += [f"{level},{cell},0,{g:e}" for level, cells in enumerate((low, high)) for cell, g in enumerate(cells)]
    path.write_text("\n".join(lines))
    table = fit_cells(path)
    assert (table["stuck_high"]["value"], table["stuck_low"]["value"]) == (pytest.approx(2 / 10), pytest.approx(1 / 10))


def test_drift_stays_compensated_where_the_preset_does_it(tmp_path: Path) -> None:
    table = fit_cells(measurements(tmp_path / "lab.csv", cells=60, times=(20.0, 3600.0)))
    for preset, compensated in (("pcm-128", True), ("rram-64", False)):
        spec = load_crossbar(str(write_chip(tmp_path / "ours.toml", preset, table)))
        assert spec.cell.drift_compensated is compensated and spec.cell.drift_nu.value == table["drift_nu"]["value"]


def test_drift_beyond_what_a_cell_may_have_is_said(tmp_path: Path) -> None:
    path, lines = tmp_path / "lab.csv", ["level,cell,read,conductance_s,time_s"]
    lines += [
        f"{level},{cell},0,{(level + 1) * 1e-6 * time**-1.7:e},{time}" for level in (0, 1) for cell in (0, 1) for time in (1, 10, 100)
    ]
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match="no cell"):
        fit_cells(path)


HEAD = "level,cell,read,conductance_s\n"
GOOD = HEAD + "".join(f"{level},{cell},0,{(level + 1) * 1e-6}\n" for level in (0, 1) for cell in (0, 1))


def test_the_least_file_and_columns_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(GOOD)
    assert fit_cells(path)["high_s"]["value"] == pytest.approx(2e-6)
    path.write_text(
        "\ufeffnote, conductance_s ,read,cell,level\n\n"
        + "".join(f'"a, b",{g},0,{c},{lv}\n' for g, c, lv in [(1, 0, 0), (1, 1, 0), (2, 0, 1), (2, 1, 1)])
    )
    assert fit_cells(path)["low_s"]["value"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "none"), (HEAD, "0 levels"), ("level,cell\n", "missing"), ("level,level,cell,read,conductance_s\n", "twice"),
        (HEAD + "0,a,0,1e-6\n0,b,0,1e-6\n", "1 levels"), (HEAD + "0,a,0,1e-6\n0,b,0,1e-6\n1,a,0,2e-6\n", "1 cells of level 1"),
        (GOOD + "5,a,0,9e-6\n", "cells of level 2"), (GOOD + "0,a,0\n", "line 6"), (GOOD + "0,a,0,-1e-6\n", "conductance_s"),
        (GOOD + "0,a,0,nan\n", "conductance_s"), (GOOD + "0,a,0,inf\n", "conductance_s"), (GOOD + "0,a,0,x\n", "'x'"),
        (GOOD + "0.5,a,0,1e-6\n", "0.5"), (GOOD + "1e9,a,0,1e-6\n", "level"), (GOOD + "-1,a,0,1e-6\n", "level"),
        (GOOD + "0," + "a" * 2000 + ",0,1e-6\n", "1000 characters"), (GOOD + '0,"a,0,1e-6\n', "cannot be read"),
        (GOOD + "0,\0,0,1e9\n", "line|read"),
        (HEAD + "1,a,0,1e-6\n1,b,0,1e-6\n0,a,0,2e-6\n0,b,0,2e-6\n", "conducts more"),
        (GOOD.replace("_s\n", "_s,time_s\n").replace("e-06\n", "e-06,0\n"), "time_s"),
    ],
)  # fmt: skip
def test_a_broken_file_is_a_data_error(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=says):
        fit_cells(path)


def test_missing_binary_and_large_files_are_data_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bad.csv"
    for given in (path, tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            fit_cells(given)
    path.write_bytes(b"\xff\xfe\x00" * 100)
    with pytest.raises(DataError, match="cannot be read"):
        fit_cells(path)
    path.write_text(GOOD)
    monkeypatch.setattr(cell_reads, "MOST_CELLS", 3)
    with pytest.raises(DataError, match="more than 3 cells"):
        fit_cells(path)
    monkeypatch.setattr(cell_reads, "MOST_BYTES", 10)
    with pytest.raises(DataError, match="bytes"):
        fit_cells(path)
