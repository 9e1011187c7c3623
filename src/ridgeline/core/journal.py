"""Finished things on disk before the next is begun, so that work killed at any moment goes on where it was.

    open_journal(path) ──exclusive lock──> Journal(entries read so far) ──append(entry)──write, flush, fsync──> one more line of JSON
    open_results(folder, header) ──run.json agrees──> Results: get(key), put(key, result), one line a result
    read_entries(path) ──> the entries, for readers: no lock, nothing changed

A process killed while writing leaves a last line without its end: it was never finished, so it is cut off. Any other line that cannot
be read is an error: something else has written to the file. Without a path the same objects only remember.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import ItemsView, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from .errors import OptionError
from .files import write_json

HEADER, LINES = "run.json", "lines.jsonl"
MOST_BYTES = 256 << 20
"""Of a journal: more is no file of ours."""
Entry = dict[str, Any]


class Journal:
    """Entries in the order they were finished; without a stream they are only remembered."""

    def __init__(self, entries: list[Entry] | None = None, stream: BinaryIO | None = None) -> None:
        self.entries = entries or []
        self._stream = stream

    def append(self, entry: Mapping[str, Any]) -> Entry:
        """Remember, and have it on disk before going on; gives back what a later run will read."""
        line = json.dumps(entry, allow_nan=False, separators=(",", ":"))
        if self._stream is not None:
            self._stream.write(line.encode() + b"\n")
            self._stream.flush()
            os.fsync(self._stream.fileno())
        self.entries.append(json.loads(line))
        return self.entries[-1]


class Results:
    """Results by key, over a journal of {"key": …, "result": {…}}."""

    def __init__(self, journal: Journal | None = None, path: Path | None = None) -> None:
        self._journal, self._known = Journal() if journal is None else journal, dict[str, Entry]()
        for number, entry in enumerate(self._journal.entries, start=1):
            if not isinstance(entry.get("key"), str) or not isinstance(entry.get("result"), dict):
                raise bad_line(path, number, "it holds no key and result")
            self._known[entry["key"]] = entry["result"]

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> Entry | None:
        return self._known.get(key)

    def items(self) -> ItemsView[str, Entry]:
        """In the order they were first known."""
        return self._known.items()

    def put(self, key: str, result: Mapping[str, Any]) -> Entry:
        """Remember, and have it on disk before going on; gives back what a later run will read."""
        self._known[key] = self._journal.append({"key": key, "result": result})["result"]
        return self._known[key]


@contextmanager
def open_journal(path: Path | None) -> Iterator[Journal]:
    """The journal of a file, for one process at a time; None: one that only remembers."""
    if path is None:
        yield Journal()
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("ab")
    except OSError as error:
        raise OptionError(f"cannot use {path.parent} as a run folder", why=str(error), do="give a folder you may write to") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go by the system when the process ends, however it ends
        except OSError as error:
            why = "another process is writing to it"
            raise OptionError(f"{path} is in use", why=why, do="wait for it, or give another folder") from error
        entries, good = _read(path)
        if good < path.stat().st_size:
            os.truncate(path, good)
        yield Journal(entries, stream)


@contextmanager
def open_results(
    folder: Path | None, header: Mapping[str, Any], lines: str = LINES, names: Mapping[str, str] | None = None
) -> Iterator[Results]:
    """The results of a folder begun with the same header, for one process at a time; `names`: what to call its fields in an error."""
    with open_journal(None if folder is None else folder / lines) as journal:
        if folder is not None:
            _agree(folder, json.loads(json.dumps(header)), bool(journal.entries), names or {})
        yield Results(journal, None if folder is None else folder / lines)


def read_entries(path: Path) -> list[Entry]:
    """What is finished; [] where the file does not exist."""
    return _read(path)[0] if path.exists() else []


def differing(before: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Names of what is not the same in both."""
    return sorted(name for name in {*before, *wanted} if before.get(name) != wanted.get(name))


def bad_line(path: Path | None, number: int, why: str) -> OptionError:
    return OptionError(f"line {number} of {path} cannot be read", why=why, do="remove the line, or give another folder")


def _agree(folder: Path, wanted: Entry, has_lines: bool, names: Mapping[str, str]) -> None:
    path = folder / HEADER
    if not path.exists():
        if has_lines:
            raise OptionError(f"{folder} holds results but no {HEADER}", why="what they belong to is unknown", do="give another folder")
        write_json(path, wanted)
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(before, dict):
            raise ValueError("not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"{path} cannot be read", why=str(error)[:200], do="give another folder") from error
    if differ := differing(before, wanted):
        why = f"these differ: {', '.join(names.get(name, name) for name in differ)}"
        raise OptionError(f"{folder} holds a different run", why=why, do="give another folder (--run), or the same options")


def _read(path: Path) -> tuple[list[Entry], int]:
    """(entries, bytes of the file they take up)."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise OptionError(f"cannot read {path}", why=f"it is larger than {MOST_BYTES >> 20} MiB", do="give another folder")
        data = path.read_bytes()
    except OSError as error:
        raise OptionError(f"cannot read {path}", why=str(error), do="give another folder") from error
    entries: list[Entry] = []
    good = 0
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):  # what follows the last line end was cut short
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            raise bad_line(path, number, f"{type(error).__name__}: {str(error)[:120]}") from error
        entries.append(entry)
        good += len(line) + 1
    return entries, good
