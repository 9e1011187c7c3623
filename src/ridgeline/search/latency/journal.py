"""Measured times on disk as soon as a group of them is known, so that a build killed at any moment goes on where it was.

    first line {"schema": 1, …conditions}      then one line a group: {"pass": 0, "times": {"key": [alone_s, cold_s], …}}

The file is one of core/journal.py. A journal of other conditions (space, device, batch, versions …) is an error that says what differs,
never mixed in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...core import journal as lines
from ...core.errors import OptionError

SCHEMA = 1
Times = dict[str, tuple[float, ...]]


class Journal:
    """Times by pass."""

    def __init__(self, kept: lines.Journal) -> None:
        self._kept = kept
        self.passes: dict[int, Times] = {}

    def known(self, pass_: int) -> Times:
        return self.passes.setdefault(pass_, {})

    def put(self, pass_: int, times: Mapping[str, tuple[float, ...]]) -> None:
        """Remember a group, and have it on disk before going on."""
        self.known(pass_).update(times)
        self._kept.append({"pass": pass_, "times": {key: list(values) for key, values in times.items()}})

    def read(self, path: Path) -> None:
        """Take in the groups of an earlier build, which follow its conditions."""
        for number, entry in enumerate(self._kept.entries[1:], start=2):
            try:
                times = {str(key): tuple(map(float, values)) for key, values in entry["times"].items()}
                if not all(values and all(math.isfinite(value) and value >= 0 for value in values) for values in times.values()):
                    raise ValueError("times must be finite numbers, not below 0")
                self.known(int(entry["pass"])).update(times)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise lines.bad_line(path, number, f"{type(error).__name__}: {error}"[:200]) from error


@contextmanager
def open_journal(path: Path | None, header: Mapping[str, Any]) -> Iterator[Journal]:
    """The journal at `path`, for one process at a time; None keeps it in memory."""
    wanted = json.loads(json.dumps({"schema": SCHEMA, **header}))
    with lines.open_journal(path) as kept:
        if not kept.entries:
            kept.append(wanted)
        if differing := lines.differing(kept.entries[0], wanted):
            raise OptionError(
                f"{path} belongs to another build", why=f"these differ: {', '.join(differing)}", do="remove it, or give another --out"
            )
        journal = Journal(kept)
        if path is not None:
            journal.read(path)
        yield journal
