"""A table of finished trainings: every point of a space with what its training, and devices, gave.

    load_table(file.npz) ──> Table: points [N, decisions], columns [N] by name
    Table.reveal(point, columns) ──> the numbers of that point and nothing else; counted

The file is a NumPy archive without pickles: `ops` [N, 6] and columns of N numbers (c10_val12, c10_test200, hw_c10_edgegpu_latency, …).
"""

from __future__ import annotations

import struct
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import OptionError, unknown_name
from .spaces.cells201 import EDGES, OPS, Cells201Space, Points, canonical_rows, cell_name, feature_rows
from .spaces.space import Point
from .strategy.model import Listed

Column = np.ndarray[Any, np.dtype[np.float64]]
MOST_BYTES = 1 << 30
BROKEN = (ValueError, KeyError, EOFError, TypeError, OverflowError, MemoryError, SyntaxError, RuntimeError, zipfile.BadZipFile, zlib.error,
          struct.error, tokenize.TokenError)  # fmt: skip
"""What NumPy and zipfile raise on a damaged file."""


@dataclass
class Table:
    """A table of NAS-Bench-201's cells; strategies see its points, and through `reveal` what they asked for."""

    points: Points
    columns: dict[str, Column]
    revealed: int = 0  # points looked up so far

    @cached_property
    def space(self) -> Cells201Space:
        return Cells201Space()

    @cached_property
    def rows(self) -> dict[Point, int]:
        return {point: row for row, point in enumerate(self.listed.points)}

    @cached_property
    def listed(self) -> Listed:
        """What is known without looking anything up."""
        forms = canonical_rows(self.points)
        _, groups = np.unique(forms, axis=0, return_inverse=True)
        groups = groups.reshape(-1)
        # of cells that compute the same the one with nothing on dead edges comes first: devices were measured with what is on them
        order = np.argsort((self.points != forms).sum(axis=1), kind="stable")
        _, first = np.unique(groups[order], return_index=True)
        return Listed([tuple(row) for row in self.points.tolist()], feature_rows(self.points), groups, order[first])

    def column(self, name: str) -> Column:
        if name not in self.columns:
            raise unknown_name("column", name, self.columns, see="the file's own names")
        return self.columns[name]

    def reveal(self, point: Point, columns: Sequence[str]) -> list[float]:
        """What training and measuring this point would have told."""
        if point not in self.rows:
            raise OptionError(f"point {list(point)}", why="the table has no such row", do="give one of its points")
        row = self.rows[point]
        self.revealed += 1
        return [float(self.column(name)[row]) for name in columns]

    def name(self, row: int) -> str:
        return cell_name(self.points[row])


def load_table(path: Path | str) -> Table:
    """A NAS-Bench-201 table; damaged, foreign or huge files are errors."""
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > MOST_BYTES:
            raise OptionError(f"{path.name} of {size:,} bytes", why=f"tables are read up to {MOST_BYTES:,}", do="leave columns out")
        with np.load(path, allow_pickle=False) as archive:
            # an entry that is no array comes as bytes
            held = {name: found for name in archive.files if isinstance(found := archive[name], np.ndarray) and found.dtype.kind in "fiu"}
    except OSError as error:
        raise OptionError(f"table {path.name}", why=error.strerror or str(error), do="name a .npz file") from error
    except BROKEN as error:
        raise OptionError(
            f"table {path.name}", why=f"it is no NumPy archive: {error}", do="name a .npz file made without pickles"
        ) from error
    ops = held.pop("ops", None)
    if ops is None or ops.ndim != 2 or ops.shape[1] != len(EDGES) or not len(ops) or not 0 <= ops.min() <= ops.max() < len(OPS):
        raise OptionError(
            f"table {path.name}", why="`ops` is missing or no [N, 6] of ops 0 to 4", do="give a table of NAS-Bench-201's cells"
        )
    fitting = {
        name: values.astype(np.float64) for name, values in held.items() if values.shape == (len(ops),) and values.dtype.kind in "fiu"
    }
    return Table(ops.astype(np.uint8), fitting)
