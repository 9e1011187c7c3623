"""Every evaluated chip on disk as soon as it is known, so that a run killed at any moment goes on where it was.

    folder/run.json      what results depend on besides the chip: engine, base, rules, models, mapper's objective
    folder/chips.jsonl   one line a chip, appended and flushed to disk; a last line cut short is dropped and written again

A run started again asks the journal first. The search is a function of its seed and the chips' results, so it takes the
same path and ends with the same front. Seed, budget, limits and space may differ from the first run's: what is known is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....core.errors import OptionError
from ....core.journal import HEADER, Results, open_results
from .evaluate import Evaluated, Problem, from_json
from .space import Choice

LINES = "chips.jsonl"
SCHEMA = "ridgeline/codesign-run/1"
BESIDE = ("target/array.py", "workload/graph.py")
"""Part of the cost model too: areas, leakage and energies of a chip, and the loops of an op."""
NAMES = {"engine": "the version of the cost model", "base": "the base array", "rules": "scaling rules",
         "objective": "the mapper's objective"}  # fmt: skip


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
    """Changes with every line of the cost model and of what it reads, so that results of two engines never mix."""
    codesign = Path(__file__).parent
    spatial, package = codesign.parent, codesign.parents[2]
    digest = hashlib.sha256()
    for path in [*sorted([*spatial.glob("*.py"), *codesign.glob("*.py")]), *(package / name for name in BESIDE)]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def folder_name(header: dict[str, Any]) -> str:
    """The same for the same header."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()[:16]


class Journal:
    """Results by chip; `open_journal` makes one that is kept, without `results` they are only remembered."""

    def __init__(self, problem: Problem, results: Results | None = None) -> None:
        self._work = {batch: problem.work_key(batch) for batch in problem.workloads}
        self._results = Results() if results is None else results
        self._known = {key: _evaluated(key, result) for key, result in self._results.items()}
        self.found = len(self._known)
        """Chips that were known at the start."""

    def get(self, choice: Choice) -> Evaluated | None:
        return self._known.get(self._key(choice))

    def put(self, choice: Choice, result: Evaluated) -> None:
        """Remember, and have it on disk before going on."""
        self._known[self._key(choice)] = result
        self._results.put(self._key(choice), result.to_json())

    def _key(self, choice: Choice) -> str:
        return f"{self._work[choice.batch]} {choice.key}"


def _evaluated(key: str, result: dict[str, Any]) -> Evaluated:
    try:
        return from_json(result)
    except (ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise OptionError(f"chip {key!r} of {LINES} cannot be read", why=why, do="remove its line, or give another --run folder") from error


@contextmanager
def open_journal(problem: Problem, folder: Path, header: dict[str, Any], must_exist: bool = False) -> Iterator[Journal]:
    """The journal of a run folder, for one process at a time."""
    if must_exist and not (folder / HEADER).exists():
        raise OptionError(
            f"nothing to resume in {folder}", why=f"there is no {HEADER}", do="give the folder of an earlier run, or use --run"
        )
    with open_results(folder, header, LINES, NAMES) as results:
        yield Journal(problem, results)
