"""An append-only file of finished things: one JSON object a line, on disk before the next is begun.

    open_journal(path) ──exclusive lock──> Journal(entries read so far) ──append(entry)──write, flush, fsync──> one more line
    read_entries(path) ──> the same entries, for readers: no lock, nothing changed

A process killed while writing leaves a last line without its end: it was never finished, so it is cut off. Any other line that cannot
be read is an error: something else has written to the file.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ...core.errors import OptionError

Entry = dict[str, Any]


class Journal:
    """Entries in the order they were finished; without a stream they are only remembered."""

    def __init__(self, entries: list[Entry] | None = None, stream: BinaryIO | None = None) -> None:
        self.entries = entries or []
        self._stream = stream

    def append(self, entry: Entry) -> Entry:
        """Remember, and have it on disk before going on; gives back what a later run will read."""
        line = json.dumps(entry, allow_nan=False, separators=(",", ":"))
        if self._stream is not None:
            self._stream.write(line.encode() + b"\n")
            self._stream.flush()
            os.fsync(self._stream.fileno())
        self.entries.append(json.loads(line))
        return self.entries[-1]


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
            raise OptionError(f"{path.parent} is in use", why=why, do="wait for it, or give another folder") from error
        entries, good = _read(path)
        if good < path.stat().st_size:
            os.truncate(path, good)
        yield Journal(entries, stream)


def read_entries(path: Path) -> list[Entry]:
    """What is finished; [] where the file does not exist."""
    return _read(path)[0] if path.exists() else []


def _read(path: Path) -> tuple[list[Entry], int]:
    """(entries, bytes of the file they take up)."""
    try:
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
            why = f"{type(error).__name__}: {str(error)[:120]}"
            raise OptionError(f"line {number} of {path} cannot be read", why=why, do="remove the line, or give another folder") from error
        entries.append(entry)
        good += len(line) + 1
    return entries, good
