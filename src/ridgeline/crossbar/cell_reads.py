"""A file of measured cells, read once, line by line, in bounded memory.

    level,cell,read,conductance_s[,time_s]      one line a read; level 0 … L-1 as written, cell any name, read counts repeated reads,
    0,a17,0,1.02e-6,1.0                         time_s since writing; columns in any order, others ignored
        ──read_cells──> Measured: for each (level, cell) the sums that a straight line of log G over log time needs

What is not as it should be is a DataError that names the line.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ..core.errors import DataError

COLUMNS = ("level", "cell", "read", "conductance_s")
MOST_BYTES, MOST_LINE, MOST_CELLS, MOST_LEVELS = 1 << 29, 1000, 500_000, 4096
MOST_SIEMENS, MOST_SECONDS = 1e3, 1e12
FORM = "give level,cell,read,conductance_s and, if you have it, time_s"


@dataclass(slots=True)
class Sums:
    """Of one cell's reads: x = log time, y = log G, both from the first read on, so that nothing cancels."""

    x_first: float
    y_first: float
    count: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def add(self, x: float, y: float) -> None:
        x, y = x - self.x_first, y - self.y_first
        self.count += 1
        self.x, self.y = self.x + x, self.y + y
        self.xx, self.xy, self.yy = self.xx + x * x, self.xy + x * y, self.yy + y * y


@dataclass(slots=True)
class Measured:
    """A file's reads, summed by (level, cell)."""

    cells: dict[tuple[int, str], Sums] = field(default_factory=dict)
    first_s: float = math.inf
    last_s: float = 0.0


def read_cells(path: Path) -> Measured:
    """All reads of a file, summed by cell."""
    measured = Measured()
    try:
        if path.stat().st_size > MOST_BYTES:
            raise DataError(
                f"{path.name} has {path.stat().st_size:,} bytes", why=f"at most {MOST_BYTES:,} are read", do="give fewer cells or reads"
            )
        with path.open(encoding="utf-8-sig", newline="") as stream:
            rows = csv.reader(_short_lines(stream, path.name), strict=True)
            places = _places(next(rows, []), path.name)
            for number, row in enumerate(rows, 2):
                if row:
                    _add(measured, row, places, f"{path.name}, line {number}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read", why=str(error), do=f"give a CSV file in UTF-8: {FORM}") from error
    return measured


def _short_lines(stream: IO[str], name: str) -> Iterator[str]:
    while line := stream.readline(MOST_LINE + 1):
        if len(line) > MOST_LINE:
            raise DataError(
                f"{name} has a line of more than {MOST_LINE} characters", why="no read takes as many", do=f"one line a read: {FORM}"
            )
        yield line


def _places(header: list[str], name: str) -> dict[str, int]:
    found = [column.strip() for column in header]
    missing = [column for column in COLUMNS if column not in found]
    if missing or len(set(found)) < len(found):
        what = f"{name} has the columns {', '.join(found)[:200] or 'none'}"
        raise DataError(what, why=f"{', '.join(missing)} missing" if missing else "a name comes twice", do=FORM)
    return {column: found.index(column) for column in (*COLUMNS, "time_s") if column in found}


def _add(measured: Measured, row: list[str], places: dict[str, int], where: str) -> None:
    if len(row) <= max(places.values()):
        raise DataError(f"{where} has {len(row)} columns", why="the header has more", do="give a value in each")
    level = _number(row[places["level"]], "level", where, 0, MOST_LEVELS - 1)
    if level != int(level):
        raise DataError(f"{where}: level {level:g}", why="levels are counted", do="give 0, 1, 2, …")
    siemens = _number(row[places["conductance_s"]], "conductance_s", where, 1e-30, MOST_SIEMENS)
    seconds = _number(row[places["time_s"]], "time_s", where, 1e-12, MOST_SECONDS) if "time_s" in places else 1.0
    key = (int(level), row[places["cell"]].strip())
    x, y = math.log(seconds), math.log(siemens)
    if key not in measured.cells:
        if len(measured.cells) == MOST_CELLS:
            raise DataError(f"{where}: more than {MOST_CELLS:,} cells", why="each is kept in memory", do="give a sample of them")
        measured.cells[key] = Sums(x, y)
    measured.cells[key].add(x, y)
    measured.first_s, measured.last_s = min(measured.first_s, seconds), max(measured.last_s, seconds)


def _number(text: str, column: str, where: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise DataError(
            f"{where}: {column} {text[:40]!r}", why=f"it must be a number from {least:g} to {most:g}", do="mend or leave out the line"
        )
    return value
