"""`ridgeline compress` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ridgeline.transform.saved import load_model

pytest.importorskip("sklearn")

FACTORY = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), (torch.ones(1, 64),)
"""
PRUNE = '[recipe]\nname = "zeros"\nversion = 1\n\n[[step]]\nkind = "prune"\nsparsity = 0.8\n'


@pytest.fixture
def factory(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(FACTORY)
    (tmp_path / "zeros.toml").write_text(PRUNE)
    return f"{tmp_path / 'net.py'}:make"


def test_defaults_train_the_digits_and_quantise_them(run: Any, tmp_path: Path) -> None:
    out, page = tmp_path / "out", tmp_path / "page.html"
    done = run("compress", "--out", out, "--html", page, "--json")
    assert done.code == 0, done.err
    change = json.loads(done.out)
    assert change["compression_ratio"] > 3 and change["after"]["quality"]["accuracy"] > 0.95
    assert "training it on digits first" in done.err and f"saved: {out / 'model.json'}" in done.err
    assert (out / "model.safetensors").stat().st_size == change["after"]["bytes_on_disk"]
    assert "digits-cnn" in page.read_text()
    from ridgeline.train.evaluate import evaluate
    from ridgeline.workload.data import load_data

    assert evaluate(load_model(out), load_data("digits")).accuracy == pytest.approx(change["after"]["quality"]["accuracy"])


def test_a_factory_and_a_recipe_file(run: Any, factory: str, tmp_path: Path) -> None:
    done = run("compress", factory, "--recipe", tmp_path / "zeros.toml", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert "80.0 %" in done.out and "no trained weights" in done.err
    again = run("compress", factory, "--recipe", tmp_path / "zeros.toml", "--out", tmp_path / "out", "--json")
    assert json.loads(again.out)["after"]["sparsity"] == pytest.approx(0.8, abs=0.03)
    loaded = load_model(tmp_path / "out", base=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
    assert loaded(torch.ones(1, 64)).shape == (1, 8)
    saved = run("compress", tmp_path / "out", "--recipe", tmp_path / "zeros.toml")
    assert saved.code == 2 and "without a base" in saved.err


def test_a_result_may_be_named_as_a_file(run: Any, factory: str, tmp_path: Path) -> None:
    done = run("compress", factory, "--recipe", tmp_path / "zeros.toml", "--out", tmp_path / "small.safetensors")
    assert done.code == 0, done.err
    assert (tmp_path / "small.safetensors").is_file() and (tmp_path / "small.json").is_file()
    assert (tmp_path / "small" / "steps" / "1-prune" / "model.json").is_file()


def test_advice_by_name(run: Any, factory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ridgeline.cli import compress
    from ridgeline.core.profile import Advice

    monkeypatch.setattr(compress, "_promised", lambda *_: Advice("precision bfloat16", 1.25, "memory"))
    done = run("compress", factory, "--apply", "precision bfloat16", "--json")
    assert done.code == 0, done.err
    change = json.loads(done.out)
    assert change["predicted_speedup"] == 1.25 and change["speedup"] > 0 and change["compression_ratio"] > 1.9


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-model"], "unknown model"),
        (["--recipe", "no-such"], "unknown recipe"),
        (["--recipe", "missing.toml"], "no such file"),
        (["--data", "no-such"], "unknown data set"),
        (["--on", "nowhere"], "device"),
        (["--apply", "go faster"], "apply one of: precision bfloat16"),
        (["missing/folder"], "cannot open"),
        (["net.py:make", "--weights", "x.th"], "only named models take weights"),
        (["digits-cnn", "--weights", "missing.th"], "missing.th"),
        (["digits-cnn", "--weights", "net.py"], "no state dict of tensors"),
    ],
)
def test_errors_are_three_lines(run: Any, arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FACTORY)
    done = run("compress", *arguments)
    assert done.code == 2 and said in done.err, done.err
    assert done.out == "" and "why:" in done.err and "do:" in done.err and "Traceback" not in done.err


def test_no_gain_is_told(run: Any, factory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ridgeline.transform import compare

    monkeypatch.setattr(compare, "timed", lambda *_: None)  # the clock has no say in this
    (tmp_path / "nothing.toml").write_text(PRUNE.replace("0.8", "0.001"))
    done = run("compress", factory, "--recipe", tmp_path / "nothing.toml")
    assert done.code == 2 and "NoGainError: zeros gained nothing" in done.err
