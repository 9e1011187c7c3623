"""The file of tuned configurations: what a line is kept under, who may write at once, what counts as a line."""

from __future__ import annotations

import fcntl
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeline.core.errors import MeasureError
from ridgeline.kernel import tuning
from ridgeline.kernel.use import load_operators

CANDIDATES = [{"TILE": 64, "STAGES": 0}, {"TILE": 128, "STAGES": 2}]
DEFAULT = {"TILE": 32, "STAGES": 1}
BUCKET = (4, 2)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of one operator's kernels, on a machine with a GPU and nothing tuned yet."""
    path = tmp_path / "kernels.py"
    path.write_text("first")
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "TABLES", tmp_path / "tables")
    monkeypatch.setattr(tuning, "_known", {})
    monkeypatch.setattr(tuning, "_spaces", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "Some GPU")
    tuning.source_hash.cache_clear()
    tuning._shipped.cache_clear()
    tuning.space("op", str(path), CANDIDATES)
    yield path
    tuning.source_hash.cache_clear()
    tuning._shipped.cache_clear()


def anew() -> tuning.Config:
    """What another process finds."""
    tuning._known.clear()
    return tuning.config("op", BUCKET, DEFAULT)


def taking(seconds: dict[int, float | Exception]) -> Callable[[], float]:
    """Times by TILE."""

    def measured() -> float:
        found = seconds[tuning.config("op", BUCKET, DEFAULT)["TILE"]]
        if isinstance(found, Exception):
            raise found
        return found

    return measured


def test_the_fastest_is_kept_on_disk(source: Path) -> None:
    assert tuning.tune("op", BUCKET, taking({64: 2.0, 128: 1.0})) == (CANDIDATES[1], 1.0)
    assert tuning.config("op", BUCKET, DEFAULT) == CANDIDATES[1] == anew()
    assert tuning.config("op", (8, 2), DEFAULT) is DEFAULT


def test_a_changed_kernel_is_tuned_anew(source: Path) -> None:
    tuning.tune("op", BUCKET, taking({64: 2.0, 128: 1.0}))
    source.write_text("second")
    tuning.source_hash.cache_clear()
    assert anew() is DEFAULT
    source.write_text("first")
    tuning.source_hash.cache_clear()
    assert anew() == CANDIDATES[1]


def test_each_device_and_each_triton_has_a_file_of_its_own(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = set()
    for version in ("3.5.0", "3.6.0"):
        monkeypatch.setattr(tuning, "triton", SimpleNamespace(__version__=version))
        for name in ("Some GPU", "Other GPU"):
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None, name=name: name)
            files.add(tuning.cache_file())
    assert len(files) == 4


def test_lines_of_others_stay(source: Path) -> None:
    tuning.tune("op", BUCKET, taking({64: 2.0, 128: 1.0}))
    tuning._remember("op", (8, 2), CANDIDATES[0])
    assert sorted(tuning.read(tuning.cache_file()).values(), key=str) == sorted([CANDIDATES[0], CANDIDATES[1]], key=str)


def test_who_writes_waits_for_the_lock(source: Path) -> None:
    tuning._remember("op", BUCKET, CANDIDATES[0])
    before = tuning.cache_file().read_text()
    with tuning.cache_file().with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = threading.Thread(target=tuning._remember, args=("op", (8, 2), CANDIDATES[1]))
        other.start()
        other.join(0.3)
        assert other.is_alive() and tuning.cache_file().read_text() == before
    other.join(10)
    assert len(tuning.read(tuning.cache_file())) == 2


def test_a_shipped_line_holds_until_one_is_tuned_here(source: Path) -> None:
    tuning.TABLES.mkdir()
    (tuning.TABLES / "some-gpu-configs.json").write_text(json.dumps({"op|4,2": CANDIDATES[0], "op|8,2": {"TILE": 0, "STAGES": 0}}))
    assert anew() == CANDIDATES[0] and tuning.config("op", (8, 2), DEFAULT) is DEFAULT
    tuning._remember("op", BUCKET, CANDIDATES[1])
    assert anew() == CANDIDATES[1]


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"TILE": 64},
        {"TILE": 64, "STAGES": 1, "MORE": 1},
        {"tile": 64, "STAGES": 1},
        {"TILE": "64", "STAGES": 1},
        {"TILE": 64.0, "STAGES": 1},
        {"TILE": True, "STAGES": 1},
        {"TILE": None, "STAGES": 1},
        {"TILE": [64], "STAGES": 1},
        {"TILE": 0, "STAGES": 1},
        {"TILE": 64, "STAGES": -1},
        [64, 1],
        64,
    ],
)
def test_a_line_that_is_none_is_passed_over(source: Path, line: Any) -> None:
    tuning._remember("op", BUCKET, CANDIDATES[0])
    stored = {name: line for name in json.loads(tuning.cache_file().read_text())}
    tuning.cache_file().write_text(json.dumps(stored))
    assert anew() is DEFAULT
    tuning.TABLES.mkdir()
    (tuning.TABLES / "some-gpu-configs.json").write_text(json.dumps({"op|4,2": CANDIDATES[1]}))
    tuning._shipped.cache_clear()
    assert anew() == CANDIDATES[1]


@pytest.mark.parametrize("text", ["", "{broken", "[" * 100_000, '{"a":' * 100_000, "[1]", "null", "\x00", '{"op": [1]}'])
def test_a_file_that_is_none_is_empty_and_written_anew(source: Path, text: str) -> None:
    tuning.cache_file().parent.mkdir(parents=True)
    tuning.cache_file().write_text(text)
    assert tuning.read(tuning.cache_file()) == {} and anew() is DEFAULT
    tuning._remember("op", BUCKET, CANDIDATES[1])
    assert anew() == CANDIDATES[1]


def test_every_shipped_line_is_one() -> None:
    load_operators()
    lines = tuning.read(tuning.TABLES / "nvidia-h200-configs.json")
    assert lines
    for name, line in lines.items():
        assert tuning._usable(line, tuning.spaces()[name.partition("|")[0]]), name


def test_candidates_that_do_not_fit_are_left_out(source: Path) -> None:
    too_large = RuntimeError("out of resource: shared memory")
    assert tuning.tune("op", BUCKET, taking({64: too_large, 128: 3.0})) == (CANDIDATES[1], 3.0)
    with pytest.raises(MeasureError, match=r"no configuration of op runs for \(4, 2\)") as error:
        tuning.tune("op", BUCKET, taking({64: too_large, 128: too_large}))
    assert "shared memory" in str(error.value)
    tuning.space("op", str(source), [])
    with pytest.raises(MeasureError, match="its space is empty"):
        tuning.tune("op", BUCKET, taking({}))


def test_another_error_of_a_candidate_is_not_hidden(source: Path) -> None:
    with pytest.raises(ValueError, match="wrong"):
        tuning.tune("op", BUCKET, taking({64: 1.0, 128: ValueError("wrong")}))
    assert not tuning.cache_file().exists() and "op" not in tuning._forced


def test_forced_configurations_nest(source: Path) -> None:
    outer, inner = {"TILE": 1, "STAGES": 1}, {"TILE": 2, "STAGES": 1}
    with tuning.forced("op", outer):
        with tuning.forced("op", inner):
            assert tuning.config("op", BUCKET, DEFAULT) is inner
        assert tuning.config("op", BUCKET, DEFAULT) is outer
        with pytest.raises(KeyError), tuning.forced("op", inner):
            raise KeyError
        assert tuning.config("op", BUCKET, DEFAULT) is outer
    assert tuning.config("op", BUCKET, DEFAULT) is DEFAULT
