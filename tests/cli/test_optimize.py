"""`ridgeline optimize` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.cli.optimize import parse_bytes
from ridgeline.core.errors import OptionError
from ridgeline.transform.graph.stored import load_graph

FACTORY = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    return net.eval(), (torch.ones(2, 3, 8, 8),)
"""


@pytest.fixture
def factory(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(FACTORY)
    return f"{tmp_path / 'net.py'}:make"


def test_table_page_and_saved_graph(run: Any, factory: str, tmp_path: Path) -> None:
    out, page = tmp_path / "out", tmp_path / "page.html"
    done = run("optimize", factory, "--on", "h200", "--passes", "fold_norm,epilogue", "--out", out, "--html", page)
    assert done.code == 0, done.err
    assert "fold_norm" in done.out and "conv + norm" in done.out and "memory plan: arena" in done.out
    assert "latency was not measured" in done.out and "gains are predicted for h200" in done.out
    assert f"saved: {out / 'graph.json'}" in done.err and f"report: {page}" in done.err
    assert "What each pass changed" in page.read_text()
    assert load_graph(out)(torch.ones(3, 3, 8, 8)).shape == (3, 4)


def test_json_measured_here(run: Any, factory: str) -> None:
    done = run("optimize", factory, "--no-predict", "--static", "--measure-passes", "--passes", "fold_norm", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["speedup"] > 0 and found["details"]["memory"]["used"]
    folded = next(one for one in found["details"]["passes"] if one["name"] == "fold_norm")
    assert folded["changed_sites"] == 1 and folded["measured_gain"] > 0 and folded["predicted_gain"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-model"], "unknown model"),
        (["--passes", "fold_nrom"], "did you mean fold_norm"),
        (["--passes", "dead,dead"], "twice"),
        (["--budget", "many"], "a number of bytes"),
        (["--on", "h2000"], "h200"),
        (["--on", "eyeriss"], "spatial array"),
    ],
)
def test_wrong_arguments_are_told(run: Any, arguments: list[str], said: str) -> None:
    done = run("optimize", *arguments)
    assert done.code == 2 and said in done.err and "do:" in done.err


def test_bytes_as_people_write_them() -> None:
    assert [parse_bytes(text) for text in ("4000", "4MB", "1.5 GiB", "2kib")] == [4000, 4_000_000, 3 * 2**29, 2048]
    for wrong in ("", "-1", "0", "4 apples", "1e6"):
        with pytest.raises(OptionError):
            parse_bytes(wrong)
