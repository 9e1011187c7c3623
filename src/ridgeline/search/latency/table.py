"""The table: seconds (and energy, bytes, FLOPs) of every block of a space on one device, in one JSON file.

    {"schema": 1, "space", "settings", "target", "method", "mode", "batch", "dtype", "threads", "machine", "versions",
     "overhead_s", "correction", "errors", "entries": {key: {"seconds", "energy_j", "bytes", "flops", "alone_s", "cold_s"}}}

    predict(space, point) = overhead_s + Σ blocks count · entries[key].seconds                [s]

`seconds` is what a block adds to a network, corrected on calibration networks (see fit.py); `alone_s` and `cold_s` are the raw times:
repeated in a hot cache, and after other blocks have run. `errors` holds what prediction misses on networks no correction has seen.
The file is read as data only: no pickle, at most MOST_BYTES, unknown fields and numbers that are not finite are errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from ...core.errors import OptionError, nearest
from ...core.files import write_text
from ...target.load import LOCAL_TARGETS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..spaces.space import Point, Space

SCHEMA = 1
MOST_BYTES = 64 << 20
MOST = 10**30
"""Of a time, an energy or a count: sums of such, and what they are off by, are still numbers."""
Seconds = Annotated[float, Field(ge=0, le=MOST)]
Found = Annotated[float, Field(ge=0)]
"""What follows from times: finite, and no more is known of it."""
Count = Annotated[int, Field(ge=0, le=MOST)]
Name = Annotated[str, Field(min_length=1, max_length=500)]


class _Record(BaseModel):
    """Strict: unknown fields, wrong types and numbers that are not finite are refused; nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Entry(_Record):
    """One block."""

    seconds: Seconds
    energy_j: Seconds | None = None
    bytes: Count = 0
    flops: Count = 0
    alone_s: Seconds | None = None
    cold_s: Seconds | None = None


class Missed(_Record):
    """A network and what a table says of it."""

    point: Name
    predicted_s: Found
    measured_s: Found


class Errors(_Record):
    """|predicted / measured - 1| over whole networks, and the order of the two; beside it the same for FLOPs, scaled by a line."""

    nets: Count
    mean: Found
    p90: Found
    worst: Found
    spearman: float
    flops_mean: Found
    flops_worst: Found
    flops_spearman: float
    missed_most: tuple[Missed, ...] = ()
    """The networks that are furthest off, worst first."""


class Correction(_Record):
    """seconds of a block = per_block_s + alone · alone_s + cold · cold_s, fitted on `nets` networks; all zero where nothing is fitted."""

    nets: Count = 0
    per_block_s: Seconds = 0.0
    alone: Found = 0.0
    cold: Found = 0.0


class LatencyTable(_Record):
    """What `ridgeline lut build` writes."""

    version: Literal[1] = Field(default=1, alias="schema")
    space: Name
    settings: dict[Name, JsonValue]
    target: Name
    method: Literal["measured", "estimated"]
    mode: Literal["eager", "graph"] = "eager"
    batch: Annotated[int, Field(ge=1)] = 1
    dtype: Name = "float32"
    threads: Count = 0
    machine: Name
    versions: dict[Name, Name]
    overhead_s: Seconds
    correction: Correction = Correction()
    errors: Errors | None = None
    entries: Annotated[dict[Name, Entry], Field(min_length=1)]

    @model_validator(mode="after")
    def _measured_here(self) -> LatencyTable:
        if self.method == "measured" and self.target.partition(":")[0] not in LOCAL_TARGETS:
            raise ValueError(f"target {self.target[:80]!r} cannot have been measured, only {' and '.join(LOCAL_TARGETS)} can")
        return self

    def predict(self, space: Space, point: Point) -> float:
        """Seconds of the whole network."""
        self._check_space(space)
        return self.overhead_s + sum(self.entry(block.key).seconds * block.count for block in space.blocks(point))

    def energy_j(self, space: Space, point: Point) -> float:
        """Joules of the whole network, where the target gives them."""
        self._check_space(space)
        parts = [(self.entry(block.key).energy_j, block.count) for block in space.blocks(point)]
        if any(energy is None for energy, _ in parts):
            raise OptionError(
                f"no energy in the table of {self.target}",
                why="times were measured, joules were not" if self.method == "measured" else "the target's estimate states none",
                do="build a table for a target with energies, e.g. `ridgeline lut build --on eyeriss`",
            )
        return sum(energy * count for energy, count in parts if energy is not None)

    def flops(self, space: Space, point: Point) -> int:
        """FLOPs of the whole network, as counted block by block."""
        return sum(self.entry(block.key).flops * block.count for block in space.blocks(point))

    def within(self, space: Space, points: Sequence[Point], limit_s: float) -> list[Point]:
        """Those predicted to take at most `limit_s`: the hard limit of a search."""
        return [point for point in points if self.predict(space, point) <= limit_s]

    def cost_matrix(self, space: Space) -> NDArray[np.float64]:
        """[edges, ops] seconds each op adds on each edge of a cell space, for a supernet's differentiable term."""
        from .predict import cost_matrix

        return cost_matrix(self, space)

    def save(self, path: Path | str) -> Path:
        """Whole or not at all."""
        return write_text(path, self.model_dump_json(indent=1, by_alias=True) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> LatencyTable:
        """Read a table; anything that is not one is an OptionError."""
        place = Path(path)
        try:
            if place.stat().st_size > MOST_BYTES:
                raise _broken(place, f"it is larger than {MOST_BYTES >> 20} MiB")
            text = place.read_bytes()
        except OSError as error:
            raise OptionError(
                f"cannot read {place}", why=error.strerror or str(error), do="give a file of `ridgeline lut build`"
            ) from error
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part)[:80] for part in first["loc"][:4])
            why = first["msg"].removeprefix("Value error, ")
            raise _broken(place, f"{where}: {why}"[:300] if where else why[:300]) from error

    def _check_space(self, space: Space) -> None:
        if space.name != self.space:
            raise OptionError(
                f"a table of space {self.space!r} for a network of {space.name!r}",
                why="their blocks differ",
                do=f"build one: `ridgeline lut build --space {space.name} --on {self.target}`",
            )

    def entry(self, key: str) -> Entry:
        found = self.entries.get(key)
        if found is None:
            close = nearest(key, self.entries, 1)
            raise OptionError(
                f"block {key!r} is not in the table of {self.space} on {self.target}",
                why=f"the table was built with settings {self.settings}" + (f"; nearest: {close[0]}" if close else ""),
                do="build a table with the settings of this space",
            )
        return found


def _broken(path: Path, why: str) -> OptionError:
    return OptionError(f"{path} is no latency table", why=why, do="build it again with `ridgeline lut build`")
