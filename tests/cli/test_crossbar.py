"""`ridgeline crossbar` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ridgeline.cli.crossbar import parse_grid
from ridgeline.core.errors import OptionError

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """digits-cnn, trained once for all tests here."""
    from ridgeline.crossbar.study.subject import load_subject

    path = tmp_path_factory.mktemp("digits") / "digits.safetensors"
    module = load_subject("digits-cnn").module
    save_file({name: tensor.contiguous() for name, tensor in module.state_dict().items() if tensor.dtype != torch.int64}, path)
    return path


def test_run_is_the_default_and_says_everything(run: Any, weights: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = run("crossbar", "--weights", weights, "--chips", 2, "--images", 16, "--calibrate", 16, "--diagnose", 2, "--html", page, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["run"]["digital"] > 0.9 and len(found["run"]["accuracies"]) == 2 and found["run"]["cost"]["energy_j"] > 0
    assert [layer["name"] for layer in found["diagnosis"]["layers"]] == ["conv1", "conv2", "conv3", "fc1", "fc2"]
    assert all(layer["snr_db"] > 5 and layer["kl_alone"] is not None for layer in found["diagnosis"]["layers"])
    assert "digits-cnn" in page.read_text() and f"report: {page}" in done.err


def test_table_and_a_run_folder(run: Any, weights: Path, tmp_path: Path) -> None:
    call = (
        "crossbar",
        "digits-cnn",
        "--chip",
        "crossbar-ideal",
        "--weights",
        weights,
        "--images",
        16,
        "--diagnose",
        0,
        "--run",
        tmp_path / "run",
    )
    first, again = run(*call), run(*call)
    assert first.code == again.code == 0, first.err
    assert "digits-cnn on crossbar-ideal" in first.out and "one chip stands for all" in first.out and "±" in first.out
    assert len((tmp_path / "run" / "lines.jsonl").read_text().splitlines()) == 2, "known results are not computed again"


def test_sweep(run: Any, weights: Path) -> None:
    done = run(
        "crossbar", "sweep", "--chip", "crossbar-ideal", "--weights", weights, "--grid", "adc_levels=16,1024", "--images", 16, "--json"
    )
    assert done.code == 0, done.err
    rows = json.loads(done.out)["sweep"]["rows"]
    assert [row["settings"] for row in rows] == [{"adc_levels": 16}, {"adc_levels": 1024}] and rows[1]["accuracy"] > rows[0]["accuracy"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (("crossbar", "--chip", "h200"), "only a crossbar"),
        (("crossbar", "--chip", "rram-65"), "rram-64"),
        (("crossbar", "--engine", "fast"), "engine"),
        (("crossbar", "nope"), "unknown model or command 'nope'"),
        (("crossbar", "swep"), "did you mean sweep?"),
        (("crossbar", "resnet21"), "did you mean resnet20"),
        (("crossbar", "run", "nope"), "unknown model 'nope'"),
        (("crossbar", "sweep", "nope"), "unknown model 'nope'"),
        (("crossbar", "missing/folder"), "no such file or folder"),
        (("crossbar", "resnet18"), "no data"),
        (("crossbar", "resnet18", "--data", "digits"), "no trained weights"),
        (("crossbar", "sweep", "--grid", "adc=4"), "adc_levels"),
        (("crossbar", "sweep", "--grid", "adc_levels"), "a field and its values"),
        (("crossbar", "sweep", "--grid", "adc_levels=1"), "adc.levels"),
        (("crossbar", "fit", "no-such.csv", "-o", "never.toml"), "no-such.csv"),
    ],
)
def test_bad_input_is_three_lines_and_code_2(run: Any, call: tuple[str, ...], said: str) -> None:
    done = run(*call)
    assert done.code == 2 and said in done.err and "why:" in done.err and "do:" in done.err and "Traceback" not in done.err
    assert not done.out


def test_fit_writes_a_chip_that_loads(run: Any, tmp_path: Path) -> None:
    from ridgeline.target.load import load_crossbar

    reads = [f"{level},{cell},{read},{(1 + level * 10) * (1 + 0.01 * (cell - 3)) * (1 + 0.001 * read) * 1e-6}"
             for level in range(4) for cell in range(7) for read in range(3)]  # fmt: skip
    (tmp_path / "cells.csv").write_text("\n".join(["level,cell,read,conductance_s", *reads]))
    done = run("crossbar", "fit", tmp_path / "cells.csv", "--like", "pcm-128", "-o", tmp_path / "mine.toml")
    assert done.code == 0, done.err
    mine, base = load_crossbar(str(tmp_path / "mine.toml")), load_crossbar("pcm-128")
    assert mine.name == "mine" and mine.cell.levels == 4 and mine.array == base.array and mine.cost == base.cost
    assert mine.cell.high_s.value == pytest.approx(31e-6, rel=0.02) and mine.cell.high_s.status == "measured"
    assert "[cell]" in done.out and str(tmp_path / "mine.toml") in done.err


def test_grids_are_read_as_people_write_them() -> None:
    assert parse_grid(["adc_levels=64,256", "slices=[1,1,2],[1,3]", "sign=slice,offset", "x_granularity=[1,64],\"per-row\""]) == {
        "adc_levels": [64, 256], "slices": [[1, 1, 2], [1, 3]], "sign": ["slice", "offset"], "x_granularity": [[1, 64], "per-row"],
    }  # fmt: skip
    with pytest.raises(OptionError, match="twice"):
        parse_grid(["array=1", "array=2"])


def test_help_names_the_commands(run: Any) -> None:
    done = run("crossbar", "--help")
    assert done.code == 0 and all(name in done.out for name in ("run", "sweep", "fit"))
    assert "--chips" in run("crossbar", "run", "--help").out
