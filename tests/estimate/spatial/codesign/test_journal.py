"""Runs that are killed, cut short, mixed up or shared: the front is the uninterrupted one, or there is a clear error."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.errors import OptionError
from ridgeline.core.journal import HEADER
from ridgeline.estimate.spatial.codesign import codesign, header_of, open_journal
from ridgeline.estimate.spatial.codesign.journal import LINES, engine_digest, folder_name
from ridgeline.estimate.spatial.codesign.space import DesignSpace
from tests.estimate.spatial.codesign.killed import BUDGET, SEED
from tests.estimate.spatial.codesign.nets import SPACE, pebble_problem
from tests.support import ROOT

PROBLEM = replace(pebble_problem(), rules=SPACE.rules)
HEAD = header_of(PROBLEM, [{"model": "pebble-net"}])
SMALL = DesignSpace(rows=(1, 2), bandwidth_bits=(8, 16))


def lines(folder: Path) -> list[bytes]:
    path = folder / LINES
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def start(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.estimate.spatial.codesign.killed", str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)


def search(folder: Path, space: DesignSpace = SMALL, **settings: Any) -> dict[str, Any]:
    with open_journal(PROBLEM, folder, HEAD) as journal:
        return codesign(PROBLEM, space, journal=journal, **settings).to_json()


def test_killed_and_started_again_gives_the_same_front(tmp_path: Path) -> None:
    process = start(tmp_path)
    deadline = time.monotonic() + 60
    while len(lines(tmp_path)) < 6 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    process.communicate()
    known = len([line for line in lines(tmp_path) if line.endswith(b"\n")])
    assert 6 <= known < BUDGET, "it was to be killed in the middle"
    with (tmp_path / LINES).open("ab") as stream:
        stream.write(b'{"key": "half a li')
    again, _ = start(tmp_path).communicate(timeout=120)
    whole = codesign(PROBLEM, SPACE, method="evolve", budget=BUDGET, seed=SEED)
    assert json.loads(again) == json.loads(json.dumps(whole.to_json()))
    entries = [json.loads(line) for line in lines(tmp_path)]
    assert len({entry["key"] for entry in entries}) == len(entries) == whole.counts["mapped"] > known


def test_a_finished_run_maps_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = search(tmp_path)
    monkeypatch.setattr("ridgeline.estimate.spatial.codesign.workers.evaluate_chip", lambda *_: pytest.fail("mapped again"))
    assert search(tmp_path) == first
    # other limits, seeds and budgets use what is known
    assert search(tmp_path, method="evolve", budget=3, seed=9)["counts"]["mapped"] == 3


def test_a_chip_is_on_disk_before_the_next_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr("ridgeline.core.journal.os.fsync", lambda number: flushed.append(len(lines(tmp_path))))
    search(tmp_path)
    assert [count for count in flushed if count] == [1, 2, 3, 4]


@pytest.mark.parametrize("cut", [1, 20, 400])
def test_last_line_cut_short_is_written_again(tmp_path: Path, cut: int) -> None:
    first = search(tmp_path)
    before = lines(tmp_path)
    (tmp_path / LINES).write_bytes(b"".join(before)[:-cut])
    assert search(tmp_path) == first and lines(tmp_path) == before


def test_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    search(tmp_path)
    before = lines(tmp_path)
    (tmp_path / LINES).write_bytes(b"".join([before[0], b"{}\n", *before[2:]]))
    with pytest.raises(OptionError, match="line 2 of"):
        search(tmp_path)
    assert lines(tmp_path)[2:] == before[2:]  # nothing was thrown away
    (tmp_path / LINES).write_bytes(b"".join([b'{"key": "a", "result": {"area": 1}}\n', *before]))
    with pytest.raises(OptionError, match="chip 'a' of"):
        search(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("engine", "0", "the version of the cost model"),
        ("base", {}, "the base array"),
        ("models", [{"model": "resnet18"}], "models"),
        ("objective", "energy", "the mapper's objective"),
        ("rules", {}, "scaling rules"),
    ],
)
def test_other_runs_do_not_mix(tmp_path: Path, field: str, value: object, words: str) -> None:
    search(tmp_path)
    (tmp_path / HEADER).write_text(json.dumps(HEAD | {field: value}))
    with pytest.raises(OptionError, match="holds a different run") as error:
        search(tmp_path)
    assert words in error.value.why and "--run" in error.value.do


def test_other_layers_under_the_same_name_are_not_taken(tmp_path: Path) -> None:
    search(tmp_path)
    net = PROBLEM.workloads[1][0]
    changed = replace(PROBLEM, workloads={1: (replace(net, ops=net.ops[:2]),)})
    with open_journal(changed, tmp_path, HEAD) as journal:
        assert journal.found == 4 and all(journal.get(SMALL.choice(SMALL.picks(number))) is None for number in range(4))


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="nothing to resume"), open_journal(PROBLEM, tmp_path / "none", HEAD, must_exist=True):
        pass
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot use"), open_journal(PROBLEM, tmp_path / "file" / "x", HEAD):
        pass
    (tmp_path / LINES).write_text("{}\n")
    with pytest.raises(OptionError, match=r"no run\.json"):
        search(tmp_path)
    (tmp_path / HEADER).write_text("[]")
    with pytest.raises(OptionError, match="cannot be read"):
        search(tmp_path)


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        open_journal(PROBLEM, tmp_path, HEAD),
        pytest.raises(OptionError, match="is in use"),
        open_journal(PROBLEM, tmp_path, HEAD),
    ):
        pass


@pytest.mark.parametrize("name", ["latency.py", "space.py", "array.py", "graph.py"])  # of the mapper, of this folder, and beside them
def test_a_changed_line_of_the_cost_model_is_another_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, read = engine_digest(), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + (b"#" if path.name == name else b""))
    assert engine_digest() != before


def test_names_of_runs() -> None:
    assert engine_digest() == engine_digest() and folder_name(HEAD) == folder_name(json.loads(json.dumps(HEAD)))
    assert folder_name(HEAD) != folder_name(header_of(replace(PROBLEM, objective="energy"), [{"model": "pebble-net"}]))
