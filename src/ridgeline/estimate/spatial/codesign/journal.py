"""Every evaluated chip on disk as soon as it is known, so that a run killed at any moment goes on where it was.

    folder/run.json      what results depend on besides the chip: engine, base, rules, models, mapper's objective
    folder/chips.jsonl   one line a chip, appended and flushed to disk; a last line cut short is dropped and written again

A run started again asks the journal first. The search is a function of its seed and the chips' results, so it takes the
same path and ends with the same front. Seed, budget, limits and space may differ from the first run's: what is known is used.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....core.errors import OptionError
from ....core.files import write_json
from .evaluate import Evaluated, Problem, from_json
from .space import Choice

HEADER, LINES = "run.json", "chips.jsonl"
SCHEMA = "ridgeline/codesign-run/1"


def header_of(problem: Problem, models: list[dict[str, Any]]) -> dict[str, Any]:
    """What must be the same for results to be used again; `models` are names with their options."""
    return {
        "schema": SCHEMA,
        "engine": engine_digest(),
        "base": problem.base.model_dump(mode="json"),
        "rules": problem.rules.model_dump(mode="json"),
        "objective": problem.objective,
        "models": models,
    }


def engine_digest() -> str:
    """Changes with every line of the cost model, so that results of two engines never mix."""
    folder = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.py"), *Path(__file__).parent.glob("*.py")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def folder_name(header: dict[str, Any]) -> str:
    """The same for the same header."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()[:16]


class Journal:
    """Results by chip; `open_journal` makes one."""

    def __init__(self, problem: Problem, stream: Any = None) -> None:
        self._work = {batch: problem.work_key(batch) for batch in problem.workloads}
        self._known: dict[str, Evaluated] = {}
        self._stream = stream
        self.found = 0
        """Chips that were known at the start."""

    def get(self, choice: Choice) -> Evaluated | None:
        return self._known.get(self._key(choice))

    def put(self, choice: Choice, result: Evaluated) -> None:
        """Remember, and have it on disk before going on."""
        self._known[self._key(choice)] = result
        if self._stream is not None:
            line = json.dumps({"key": self._key(choice), "result": result.to_json()}, allow_nan=False)
            self._stream.write(line.encode() + b"\n")
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def read(self, path: Path) -> None:
        """Take in the lines of an earlier run and cut off what was not written to its end."""
        data = path.read_bytes()
        good = 0
        for number, line in enumerate(data.splitlines(keepends=True), start=1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("cut short")
                entry = json.loads(line)
                self._known[str(entry["key"])] = from_json(entry["result"])
            except (ValueError, KeyError, TypeError) as error:
                if good + len(line) < len(data):
                    raise OptionError(
                        f"line {number} of {path} cannot be read",
                        why=f"{type(error).__name__}: {error}; only the last line may be cut short",
                        do="remove the line, or start a new run folder",
                    ) from error
                break
            good += len(line)
        if good < len(data):
            os.truncate(path, good)
        self.found = len(self._known)

    def _key(self, choice: Choice) -> str:
        return f"{self._work[choice.batch]} {choice.key}"


@contextmanager
def open_journal(problem: Problem, folder: Path, header: dict[str, Any], must_exist: bool = False) -> Iterator[Journal]:
    """The journal of a run folder, for one process at a time."""
    path = folder / LINES
    if must_exist and not (folder / HEADER).exists():
        raise OptionError(
            f"nothing to resume in {folder}", why=f"there is no {HEADER}", do="give the folder of an earlier run, or use --run"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = path.open("ab")
    except OSError as error:
        raise OptionError(f"cannot use {folder} as run folder", why=str(error), do="give a folder you may write to") from error
    with stream:
        _lock(stream, folder)
        _check_header(folder, header, has_lines=path.stat().st_size > 0)
        journal = Journal(problem, stream)
        journal.read(path)
        yield journal


def _lock(stream: Any, folder: Path) -> None:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise OptionError(
            f"{folder} is in use", why="another run is writing to it", do="wait for it, or give another --run folder"
        ) from error


def _check_header(folder: Path, header: dict[str, Any], has_lines: bool) -> None:
    path, wanted = folder / HEADER, json.loads(json.dumps(header))
    if not path.exists():
        if has_lines:
            raise OptionError(
                f"{folder} has chips but no {HEADER}", why="what they were evaluated for is unknown", do="give another folder"
            )
        write_json(path, wanted)
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        differing = [name for name in wanted if before.get(name) != wanted[name]]
    except (ValueError, AttributeError) as error:
        raise OptionError(f"{path} cannot be read", why=str(error), do="give another run folder") from error
    if differing:
        causes = {"engine": "another version of the cost model", "base": "another base array", "rules": "other scaling rules",
                  "models": "other models", "objective": "another objective of the mapper"}  # fmt: skip
        why = " and ".join(causes.get(name, name) for name in differing)
        raise OptionError(f"{folder} holds a different run", why=f"its chips were evaluated with {why}", do="give another --run folder")
