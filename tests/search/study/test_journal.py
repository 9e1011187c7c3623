"""The journal and the run folder: cut at every byte, written by two, begun by another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.core.errors import OptionError
from ridgeline.search.study.evaluate import quiet
from ridgeline.search.study.folder import open_run, read_front, read_run, read_trials
from ridgeline.search.study.journal import Journal, open_journal, read_entries


def test_a_journal_cut_anywhere_keeps_what_was_finished(tmp_path: Path) -> None:
    path, entries = tmp_path / "trials.jsonl", [{"n": 1, "text": "a\nb"}, {"n": 2.5}, {"n": []}]
    with open_journal(path) as journal:
        for entry in entries:
            assert journal.append(entry) == entry
    whole = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == 10]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        finished = sum(end <= cut for end in ends)
        assert read_entries(path) == entries[:finished] and path.stat().st_size == cut  # a reader changes nothing
        with open_journal(path) as journal:
            assert journal.entries == entries[:finished]
            journal.append({"n": "next"})
        assert read_entries(path) == [*entries[:finished], {"n": "next"}]


def test_a_broken_line_is_an_error_and_not_dropped(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    for broken in (b'{"n": 1}\n{"n": \n{"n": 3}\n', b"[1]\n", b"\xff\n", b"[" * 5000 + b"\n"):
        path.write_bytes(broken)
        with pytest.raises(OptionError, match="line"), open_journal(path):
            pass
        assert path.read_bytes() == broken


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "run" / "trials.jsonl"
    with open_journal(path) as journal:
        journal.append({"n": 1})
        with pytest.raises(OptionError, match="in use"), open_journal(path):
            pass
        assert read_entries(path) == [{"n": 1}]
    with open_journal(path) as journal:
        assert len(journal.entries) == 1
    assert Journal().append({"a": 1}) == {"a": 1}


def test_a_folder_goes_on_with_its_own_request_only(tmp_path: Path) -> None:
    said: list[str] = []
    with open_run(tmp_path, {"seed": 1, "space": ("a",)}, say=said.append) as run:
        run.journal.append({"kind": "trial"})
    with open_run(tmp_path, {"seed": 1, "space": ["a"]}, say=said.append) as run:
        assert len(run.journal.entries) == 1
    with pytest.raises(OptionError, match="seed was 1, now 2"), open_run(tmp_path, {"seed": 2, "space": ["a"]}, say=quiet):
        pass
    with pytest.raises(OptionError, match="holds a run already"), open_run(tmp_path, {"seed": 1, "space": ["a"]}, resume=False, say=quiet):
        pass
    assert not said
    document = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    (tmp_path / "run.json").write_text(json.dumps({**document, "versions": {"torch": "0"}}), encoding="utf-8")
    with open_run(tmp_path, {"seed": 1, "space": ["a"]}, say=said.append):
        assert "other versions" in said[0]
    (tmp_path / "run.json").unlink()
    with pytest.raises(OptionError, match=r"without run\.json"), open_run(tmp_path, {"seed": 1}, say=quiet):
        pass


def test_hostile_folders(tmp_path: Path) -> None:
    for text in ("", "[]", "{", '{"schema": 2}', '{"schema": 1, "request": 3}', "[" * 100_000):
        (tmp_path / "run.json").write_text(text, encoding="utf-8")
        with pytest.raises(OptionError):
            read_run(tmp_path)
    with pytest.raises(OptionError):
        read_front(tmp_path / "none")
    assert read_trials(tmp_path / "none") == []
