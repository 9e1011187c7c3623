"""Options of `ridgeline bench` that do not go together, or have nothing to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ON_CPU = ("--device", "cpu", "--size", "small", "--dtype", "bfloat16", "--fast")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RIDGELINE_COMMIT", "0" * 40)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("softmax", "--device", "cpu:x"), ("cannot measure on 'cpu:x'", "cpu")),
        (("softmax", "--all", *ON_CPU), ("softmax and --all", "one of the two")),
    ],
)
def test_errors_say_what_why_and_what_to_do(run: Any, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    code, out, err = run("bench", *args)
    assert code == 2 and out == "" and "why:" in err and "do:" in err
    assert all(word in err for word in words), err


def test_an_operator_without_a_gradient_says_so(run: Any) -> None:
    code, out, err = run("bench", "gemv", "--backward", "--json", *ON_CPU)
    assert code == 0 and not any(row["backward"] for row in json.loads(out)["rows"])
    assert "forward only, since they have no gradient: gemv" in err
    assert "forward only" not in run("bench", "gemv", "--json", *ON_CPU).err


def test_a_second_run_of_the_references_is_no_regression(run: Any, tmp_path: Path) -> None:
    assert run("bench", "gemv", *ON_CPU).code == 0
    (path,) = (tmp_path / "cache" / "bench").iterdir()
    path.write_text("".join(json.dumps({**json.loads(line), "ours_ms": 1e-9}) + "\n" for line in path.read_text().splitlines()))
    code, out, _ = run("bench", "gemv", *ON_CPU)
    assert code == 0 and "not kernels" in out and "REGRESSION" not in out
