"""The one layout of a run folder, which a run writes and every report reads.

    run.json                  schema, request (everything that decides the results), versions, machine
    trials.jsonl              one line a finished trial or final training, in order (core/journal.py); a process that writes holds its lock
    trials/<n>/               checkpoints of trial n: training/, of a supernet search/; removed once its line is in the journal
    final/<seed>/             checkpoints, then weights.safetensors of that seed's winner trained on the whole training split
    front.json                Front.to_json(): trials no other beats, the winner of every seed, mean ± std; written anew after every trial
    winner/                   genotype.json, weights.safetensors, model.onnx, cell.svg of the seed whose winner was best before the test
    report.html               the page

A folder is taken up only by the same request. Without a folder the same object only remembers.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...core.errors import OptionError
from ...core.files import write_json
from ...core.journal import HEADER, Entry, Journal, differing, open_journal, read_entries

SCHEMA = 1
PLACES = ("source", "data", "table", "recipe", "final_recipe")
"""Fields of a request that say where something lies, or what it is called, whose content another field tells."""
MOST_BYTES = 16 << 20
"""Of run.json and front.json: more is no file of ours."""


class RunFolder:
    """Where a run keeps what it knows; `open_run` makes one."""

    def __init__(self, path: Path | None, journal: Journal) -> None:
        self.path, self.journal = path, journal

    def trial(self, number: int, part: str = "") -> Path | None:
        return self.path / "trials" / str(number) / part if self.path else None

    def final(self, seed: int) -> Path | None:
        return self.path / "final" / str(seed) if self.path else None

    @property
    def winner(self) -> Path | None:
        return self.path / "winner" if self.path else None

    def finished(self, number: int) -> None:
        """Checkpoints of a trial whose line is written are no longer needed."""
        if (folder := self.trial(number)) is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def write_front(self, front: Mapping[str, Any]) -> None:
        if self.path:
            write_json(self.path / "front.json", front)


@contextmanager
def open_run(path: Path | None, request: Mapping[str, Any], *, resume: bool = True, say: Callable[[str], None]) -> Iterator[RunFolder]:
    """A new folder, or one begun with the same request; another's, and one that is in use, are errors."""
    wanted = json.loads(json.dumps(request))
    with open_journal(path / "trials.jsonl" if path else None) as journal:
        if path is not None:
            _agree(path, wanted, journal, resume, say)
        yield RunFolder(path, journal)


def _agree(path: Path, wanted: dict[str, Any], journal: Journal, resume: bool, say: Callable[[str], None]) -> None:
    if not (path / HEADER).exists():
        if journal.entries:
            raise OptionError(f"{path} holds trials without run.json", why="what they belong to is unknown", do="give another folder")
        write_json(path / HEADER, {"schema": SCHEMA, "request": wanted, "versions": versions()})
        return
    document = read_run(path)
    before = document["request"]
    differ = [name for name in differing(before, wanted) if name not in PLACES]
    if differ and not journal.entries and not any((path / name).exists() for name in ("trials", "final")):
        write_json(path / HEADER, {"schema": SCHEMA, "request": wanted, "versions": versions()})  # nothing was ever done for the other
        return
    if differ:
        told = "; ".join(f"{name} was {_short(before.get(name))}, now {_short(wanted.get(name))}" for name in differ[:3])
        raise OptionError(f"{path} holds another run", why=told, do=f"give another folder, or go on with it: --resume {path}")
    if journal.entries and not resume:
        raise OptionError(f"{path} holds a run already", why=f"{len(journal.entries)} lines are finished", do="resume it, or give another")
    if document.get("versions") != versions():
        say(f"{path} was begun with other versions: its finished trials are kept, new ones may differ from what they would have been")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_run(path: Path) -> dict[str, Any]:
    """run.json, checked as far as others rely on it."""
    document = _document(path / HEADER)
    if document.get("schema") != SCHEMA or not isinstance(document.get("request"), dict):
        raise OptionError(f"{path / HEADER} is not a run of this version", why=f"schema {SCHEMA} is read", do="give another folder")
    return document


def read_front(path: Path) -> dict[str, Any]:
    """front.json, for reports."""
    return _document(path / "front.json")


def read_trials(path: Path) -> list[Entry]:
    """Every finished line of a run, running or not."""
    return read_entries(path / "trials.jsonl")


def _document(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"larger than {MOST_BYTES:,} bytes")
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise ValueError("not an object")
    except (OSError, ValueError, RecursionError) as error:
        why = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise OptionError(f"cannot read {path}", why=why, do="give the folder of a search") from error
    return document


def versions() -> dict[str, str]:
    """Of what results depend on."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("ridgeline", "torch", "numpy", "optuna"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def digest_of(request: Mapping[str, Any]) -> str:
    """The same for the same request, wherever its files lie."""
    content = {name: value for name, value in request.items() if name not in PLACES}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
