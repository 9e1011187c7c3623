"""Results on disk as soon as they are known, so that a study killed at any moment goes on where it was.

    folder/run.json       what every result depends on: model, data, chip, options, the simulator itself
    folder/lines.jsonl    {"key": …, "result": {…}} a line, on disk before the next one is begun; a last line cut short is dropped

Without a folder the same object only remembers.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from ...core.errors import OptionError
from ...core.files import write_json

HEADER, LINES = "run.json", "lines.jsonl"


class Journal:
    """Results by key; `open_journal` makes one."""

    def __init__(self, stream: BinaryIO | None = None) -> None:
        self._known: dict[str, dict[str, Any]] = {}
        self._stream = stream

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> dict[str, Any] | None:
        return self._known.get(key)

    def put(self, key: str, result: Mapping[str, Any]) -> dict[str, Any]:
        """Remember, and have it on disk before going on; gives back what a later run will read."""
        line = json.dumps({"key": key, "result": result}, allow_nan=False)
        if self._stream is not None:
            self._stream.write(line.encode() + b"\n")
            self._stream.flush()
            os.fsync(self._stream.fileno())
        self._known[key] = json.loads(line)["result"]
        return self._known[key]

    def read(self, path: Path) -> None:
        """Take in an earlier run's lines; what was not written to its end is cut off."""
        data, good = path.read_bytes(), 0
        for number, line in enumerate(data.splitlines(keepends=True), start=1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("cut short")
                entry = json.loads(line)
                self._known[str(entry["key"])] = dict(entry["result"])
            except (ValueError, KeyError, TypeError) as error:
                if good + len(line) < len(data):
                    why = f"{type(error).__name__}: {error}; only the last line may be cut short"
                    raise OptionError(
                        f"line {number} of {path} cannot be read", why=why, do="remove the line, or give a new folder"
                    ) from error
                break
            good += len(line)
        if good < len(data):
            os.truncate(path, good)


@contextmanager
def open_journal(folder: Path | None, header: Mapping[str, Any]) -> Iterator[Journal]:
    """The journal of a folder, for one process at a time; it must have been begun with the same header."""
    if folder is None:
        yield Journal()
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / LINES).open("ab")
    except OSError as error:
        raise OptionError(f"cannot use {folder} as a run folder", why=str(error), do="give a folder you may write to") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OptionError(
                f"{folder} is in use", why="another run is writing to it", do="wait for it, or give another folder"
            ) from error
        _check_header(folder, json.loads(json.dumps(header)))
        journal = Journal(stream)
        journal.read(folder / LINES)
        yield journal


def _check_header(folder: Path, wanted: dict[str, Any]) -> None:
    path = folder / HEADER
    if not path.exists():
        if (folder / LINES).stat().st_size:
            raise OptionError(f"{folder} holds results without {HEADER}", why="what they belong to is unknown", do="give another folder")
        write_json(path, wanted)
        return
    try:
        before = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise OptionError(f"{path} cannot be read", why=str(error), do="give another folder") from error
    if differing := sorted(name for name in {*wanted, *before} if before.get(name) != wanted.get(name)):
        why = f"it was begun with another {', '.join(differing)}"
        raise OptionError(f"{folder} holds a different run", why=why, do="give another folder, or the same options")


def simulator_digest() -> str:
    """Changes with every line of this room, so that results of two simulators never mix."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def model_digest(module: nn.Module) -> str:
    """Changes with every weight."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
