"""Measured times on disk as soon as a group of them is known, so that a build killed at any moment goes on where it was.

    first line {"schema": 1, …conditions}      then one line a group: {"pass": 0, "times": {"key": [alone_s, cold_s], …}}

A line is appended and flushed to disk before the next group starts; a last line cut short is dropped. A journal of other conditions
(space, device, batch, versions …) is an error that says what differs, never mixed in.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...core.errors import OptionError

SCHEMA = 1
MOST_BYTES = 256 << 20
Times = dict[str, tuple[float, ...]]


class Journal:
    """Times by pass; without a stream they are kept in memory alone."""

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream
        self.passes: dict[int, Times] = {}

    def known(self, pass_: int) -> Times:
        return self.passes.setdefault(pass_, {})

    def put(self, pass_: int, times: Mapping[str, tuple[float, ...]]) -> None:
        """Remember a group, and have it on disk before going on."""
        self.known(pass_).update(times)
        if self._stream is not None:
            _append(self._stream, {"pass": pass_, "times": {key: list(values) for key, values in times.items()}})

    def read(self, lines: list[bytes], path: Path) -> None:
        for number, line in enumerate(lines, start=2):
            try:
                entry = json.loads(line)
                times = {str(key): tuple(map(float, values)) for key, values in entry["times"].items()}
                if not all(values and all(math.isfinite(value) and value >= 0 for value in values) for values in times.values()):
                    raise ValueError("times must be finite numbers, not below 0")
                self.known(int(entry["pass"])).update(times)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise _broken(path, f"line {number}: {type(error).__name__}: {error}"[:200]) from error


@contextmanager
def open_journal(path: Path | None, header: Mapping[str, Any]) -> Iterator[Journal]:
    """The journal at `path`, for one process at a time; None keeps it in memory."""
    if path is None:
        yield Journal()
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a+b")
    except OSError as error:
        raise OptionError(f"cannot write {path}", why=str(error), do="give a path in a folder you may write to") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OptionError(f"{path} is in use", why="another build is writing to it", do="wait for it, or give another --out") from error
        yield _opened(stream, path, {"schema": SCHEMA, **header})


def _opened(stream: Any, path: Path, header: dict[str, Any]) -> Journal:
    if path.stat().st_size > MOST_BYTES:
        raise _broken(path, f"it is larger than {MOST_BYTES >> 20} MiB")
    stream.seek(0)
    data: bytes = stream.read()
    whole = data[: data.rfind(b"\n") + 1]  # a line cut short by a kill is dropped
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    lines = whole.splitlines()
    journal = Journal(stream)
    if lines:
        _check(lines[0], path, header)
        journal.read(lines[1:], path)
    else:
        _append(stream, header)
    return journal


def _check(line: bytes, path: Path, header: dict[str, Any]) -> None:
    wanted = json.loads(json.dumps(header))
    try:
        before = json.loads(line)
        differing = sorted(name for name in {**wanted, **before} if before.get(name) != wanted.get(name))
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise _broken(path, str(error)[:200]) from error
    if differing:
        raise OptionError(
            f"{path} belongs to another build", why=f"these differ: {', '.join(differing)}", do="remove it, or give another --out"
        )


def _append(stream: Any, entry: Mapping[str, Any]) -> None:
    stream.write(json.dumps(entry, allow_nan=False).encode() + b"\n")
    stream.flush()
    os.fsync(stream.fileno())


def _broken(path: Path, why: str) -> OptionError:
    return OptionError(f"{path} cannot be read", why=why, do="remove it; the build then starts anew")
