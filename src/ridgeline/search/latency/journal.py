"""Measured times on disk as soon as a group of them is known, so that a build killed at any moment goes on where it was.

    first line {"schema": 1, …conditions}      then one line a group: {"pass": 0, "times": {"key": [alone_s, cold_s], …}}

The file is one of core/journal.py. A journal of other conditions (space, device, batch, versions …) is an error that says what differs,
never mixed in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...core import journal as lines
from ...core.errors import OptionError
from .table import Seconds

SCHEMA = 1
Times = dict[str, tuple[float, ...]]
Lengths = Mapping[str, tuple[int, ...]]
"""How many numbers there may be of each key."""


class _Line(BaseModel):
    """One group, as `put` writes it."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    pass_: Annotated[int, Field(ge=0, alias="pass")]
    times: dict[str, list[Seconds]]


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

    def read(self, path: Path, lengths: Lengths) -> None:
        """Take in the groups of an earlier build, which follow its conditions."""
        for number, entry in enumerate(self._kept.entries[1:], start=2):
            try:
                line = _Line.model_validate(entry)
            except ValidationError as error:
                first = error.errors(include_url=False, include_input=False)[0]
                where = ".".join(str(part)[:80] for part in first["loc"][:4])
                raise lines.bad_line(path, number, f"{where}: {first['msg']}"[:200]) from error
            for key, values in line.times.items():
                if len(values) not in lengths.get(key, ()):
                    why = f"{len(values)} numbers for {key[:80]!r}" if key in lengths else f"{key[:80]!r} is nothing of this build"
                    raise lines.bad_line(path, number, why)
            self.known(line.pass_).update({key: tuple(values) for key, values in line.times.items()})


@contextmanager
def open_journal(path: Path | None, header: Mapping[str, Any], lengths: Lengths) -> Iterator[Journal]:
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
            journal.read(path, lengths)
        yield journal
