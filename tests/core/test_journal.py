"""Journals: cut at every byte, written by two, begun by another."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.core import journal as module
from ridgeline.core.errors import OptionError
from ridgeline.core.journal import HEADER, LINES, Journal, open_journal, open_results, read_entries


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


def test_a_file_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 8)
    (tmp_path / "a").write_bytes(b'{"n": 1}\n')
    with pytest.raises(OptionError, match="cannot read"):
        read_entries(tmp_path / "a")


def test_results_are_known_again_by_the_same_header_only(tmp_path: Path) -> None:
    with open_results(tmp_path, {"a": 1, "b": (2,)}) as results:
        assert results.put("x", {"v": 1}) == {"v": 1} and results.put("y", {"v": [2]}) == {"v": [2]}
        results.put("x", {"v": 3})
    with open_results(tmp_path, {"a": 1, "b": [2]}) as results:
        assert len(results) == 2 and results.get("x") == {"v": 3} and results.get("z") is None and list(results.items())[1][0] == "y"
    with pytest.raises(OptionError, match="different run") as error, open_results(tmp_path, {"a": 2, "c": 1}, names={"a": "the first"}):
        pass
    assert "the first, b, c" in error.value.why
    with open_results(None, {"a": 1}) as results:
        assert results.put("x", {}) == {} and len(results) == 1


def test_results_that_are_none_are_named(tmp_path: Path) -> None:
    with open_results(tmp_path, {"a": 1}) as results:
        results.put("x", {"v": 1})
    for broken in (b"{}", b'{"key": 1, "result": {}}', b'{"key": "a", "result": [1]}'):
        (tmp_path / LINES).write_bytes(b'{"key": "x", "result": {}}\n' + broken + b"\n")
        with pytest.raises(OptionError, match="line 2 of"), open_results(tmp_path, {"a": 1}):
            pass
    for broken_header in ("[]", "{", "3", "[" * 100_000):
        (tmp_path / HEADER).write_text(broken_header, encoding="utf-8")
        with pytest.raises(OptionError, match=r"run\.json cannot be read"), open_results(tmp_path, {"a": 1}):
            pass
    (tmp_path / HEADER).unlink()
    with pytest.raises(OptionError, match=r"no run\.json"), open_results(tmp_path, {"a": 1}):
        pass
