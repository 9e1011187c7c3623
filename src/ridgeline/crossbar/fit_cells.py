"""Measurements of cells to the [cell] table of a chip file.

    cells.csv ──cell_reads──> sums of each (level, cell) ──fit──> {levels, high_s, low_s, write_sigma, …} ──> TOML
      of one cell    log G = log G0 - nu * log(t / t0), least squares; t0 = the earliest time; without times nu = 0
      high_s, low_s  medians of G0 of the highest and the lowest level
      stuck          cells written to another level that are within half a spacing of high or low and 6 robust sigmas off their own level
      write_sigma    of a level: spread of G0 / mean, what the reads' noise adds to it taken off
      read_sigma     of a level: spread of log G about its cell's line;  drift_nu, drift_nu_sigma: mean and spread of nu, likewise

Levels are taken to be evenly spaced, as a chip file has them; the source of high_s says how far they are off. Stuck cells must be the
lesser part of every level; where a level's spread comes near its distance from high or low they cannot be told apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import DataError, RidgelineError
from ..core.files import write_text
from ..core.spec import parse_spec
from ..core.toml_out import dump_toml
from ..target.crossbar import Cell, CrossbarSpec
from ..target.load import load_crossbar
from .cell_reads import FORM, Measured, read_cells

OUTLIER = 6.0
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Lines:
    """One fitted line a cell, as arrays."""

    level: NDArray[np.int64]
    start_s: Floats
    """G0."""
    slope: Floats
    """d log G / d log t; 0 where a cell was read at one time only."""
    timed: NDArray[np.bool_]
    """Which cells have a slope."""
    squares: Floats
    """Of log G about the line, summed."""
    freedom: Floats
    """Reads beyond what the line takes."""
    start_share: Floats
    """Variance of log G0 for reads of variance 1."""
    slope_share: Floats
    """The same of the slope."""


def fit_cells(csv_path: Path | str) -> dict[str, Any]:
    """The [cell] table that a file of measurements gives; every value says where it is from."""
    path = Path(csv_path)
    measured = read_cells(path)
    lines = _lines(measured)
    table = _table(lines, measured, path.name)
    try:
        parse_spec(Cell, table, path.name)
    except RidgelineError as error:
        raise DataError(f"what {path.name} gives is no cell: {error.what}", why=error.why, do="look at its units and levels") from error
    return table


def cell_text(table: dict[str, Any]) -> str:
    """The [cell] section of a chip file."""
    return dump_toml({"cell": table})


def chip_text(preset: str, table: dict[str, Any], name: str) -> str:
    """A whole chip file: `preset` with these cells; of its [cell] stays what is not the cells': wires, and whether drift is compensated."""
    chip = load_crossbar(preset)
    around = {"line_resistance_ohm": chip.cell.line_resistance_ohm.model_dump(), "drift_compensated": chip.cell.drift_compensated}
    described = f"{preset} with measured cells"
    data = {**chip.model_dump(exclude_none=True), "name": name, "description": described, "cell": {**table, **around}}
    text = dump_toml(data)
    parse_spec(CrossbarSpec, data, f"{name}.toml")
    return text


def write_chip(path: Path | str, preset: str, table: dict[str, Any]) -> Path:
    """chip_text to a file; the chip is named like it."""
    return write_text(path, chip_text(preset, table, Path(path).stem))


def _lines(measured: Measured) -> Lines:
    """Least squares for each cell, from its sums."""
    keys, sums = list(measured.cells), list(measured.cells.values())
    n, x, y, xx, xy, yy, x_first, y_first = (
        np.array([getattr(one, name) for one in sums], dtype=np.float64)
        for name in ("count", "x", "y", "xx", "xy", "yy", "x_first", "y_first")
    )
    mean_x, mean_y = x / np.maximum(n, 1), y / np.maximum(n, 1)
    spread_x, together, spread_y = xx - n * mean_x**2, xy - n * mean_x * mean_y, yy - n * mean_y**2
    timed = spread_x > 1e-9 * np.maximum(n, 1)
    divisor = np.where(timed, spread_x, 1.0)
    slope = np.where(timed, together / divisor, 0.0)
    back = math.log(measured.first_s) - x_first - mean_x if sums else mean_x  # from the middle of a cell's reads to t0
    return Lines(
        level=np.array([level for level, _ in keys], dtype=np.int64), start_s=np.exp(y_first + mean_y + slope * back), slope=slope,
        timed=timed,
        squares=np.maximum(spread_y - slope * together, 0.0), freedom=n - 1 - timed,
        start_share=1 / np.maximum(n, 1) + np.where(timed, back**2 / divisor, 0.0), slope_share=np.where(timed, 1 / divisor, 0.0),
    )  # fmt: skip


def _table(lines: Lines, measured: Measured, name: str) -> dict[str, Any]:
    levels = int(lines.level.max()) + 1 if len(lines.level) else 0
    medians = _medians(lines, levels, name)
    low, high = float(medians[0]), float(medians[-1])
    even = low + np.arange(levels) * (high - low) / (levels - 1)
    off = float(np.abs(medians - even).max() / (high - low) * (levels - 1))
    stuck_high, stuck_low = _stuck(lines, medians)
    sound = ~(stuck_high | stuck_low)
    at = [sound & (lines.level == level) for level in range(levels)]
    read_variance = np.array([_read_variance(lines, here) for here in at])
    write = [_write_sigma(lines, here, read_variance[level]) for level, here in enumerate(at)]

    def constant(value: float, unit: str, what: str, status: str = "measured") -> dict[str, Any]:
        return {"value": float(value), "unit": unit, "source": f"{name}: {what}", "status": status}

    def repeated(level: int) -> dict[str, Any]:
        if float(lines.freedom[at[level]].sum()) <= 0:
            return constant(0.0, "ratio", f"level {level} has no repeated reads", "assumed")
        return constant(read_variance[level] ** 0.5, "ratio", f"repeated reads of level {level}")

    table: dict[str, Any] = {
        "high_s": constant(high, "S", f"median of level {levels - 1}; levels are at most {100 * off:.0f} % of a spacing off even places"),
        "low_s": constant(low, "S", "median of level 0"),
        "levels": levels,
        "stuck_high": constant(stuck_high.sum() / (lines.level != levels - 1).sum(), "ratio", "share of cells written lower"),
        "stuck_low": constant(stuck_low.sum() / (lines.level != 0).sum(), "ratio", "share of cells written higher"),
        "write_sigma": [constant(sigma, "ratio", f"{at[level].sum()} cells of level {level}") for level, sigma in enumerate(write)],
        "read_sigma": [repeated(level) for level in range(levels)],
    }
    drifting = sound & lines.timed
    if drifting.any():
        nu, spread = _drift(lines, drifting, read_variance)
        table |= {
            "drift_nu": constant(nu, "ratio", f"mean of {drifting.sum()} cells"),
            "drift_nu_sigma": constant(spread, "ratio", f"spread of {drifting.sum()} cells"),
            "drift_from_s": constant(measured.first_s, "s", "the earliest read"),
            "drift_time_s": constant(measured.last_s, "s", "the latest read"),
        }
    return table


def _medians(lines: Lines, levels: int, name: str) -> Floats:
    """Of G0 of every level; levels that are missing or out of order are the file's fault."""
    counts = np.bincount(lines.level, minlength=levels)
    if levels < 2 or counts.min() < 2:
        found = f"{name} has {levels} levels" if levels < 2 else f"{name} has {counts.min()} cells of level {counts.argmin()}"
        raise DataError(found, why="there are two levels or more, 0 among them, each of two cells or more", do=FORM)
    medians = np.array([np.median(lines.start_s[lines.level == level]) for level in range(levels)])
    if not (np.diff(medians) > 0).all():
        level = int((np.diff(medians) <= 0).argmax()) + 1
        what = f"{name}: level {level} has {medians[level]:.3g} S and level {level - 1} {medians[level - 1]:.3g} S, their medians"
        raise DataError(what, why="a higher level conducts more", do="number levels from the lowest conductance up")
    return medians


def _stuck(lines: Lines, medians: Floats) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    levels, own = len(medians), medians[lines.level]
    half = (medians[-1] - medians[0]) / (levels - 1) / 2
    robust = np.array([1.4826 * np.median(np.abs(lines.start_s[lines.level == level] - medians[level])) for level in range(levels)])
    outlier = np.abs(lines.start_s - own) > OUTLIER * robust[lines.level]
    high = outlier & (lines.level != levels - 1) & (lines.start_s > medians[-1] - half)
    low = outlier & (lines.level != 0) & (lines.start_s < medians[0] + half)
    return high, low


def _read_variance(lines: Lines, here: NDArray[np.bool_]) -> float:
    return float(lines.squares[here].sum() / max(lines.freedom[here].sum(), 1.0))


def _write_sigma(lines: Lines, here: NDArray[np.bool_], read_variance: float) -> float:
    if here.sum() < 2:
        return 0.0
    relative = lines.start_s[here] / lines.start_s[here].mean()
    return math.sqrt(max(0.0, float(relative.var(ddof=1)) - read_variance * float(lines.start_share[here].mean())))


def _drift(lines: Lines, here: NDArray[np.bool_], read_variance: Floats) -> tuple[float, float]:
    """nu and its spread; cells that gain conductance on the whole are taken not to drift."""
    slopes = lines.slope[here]
    by_reads = float((read_variance[lines.level[here]] * lines.slope_share[here]).mean())
    spread = math.sqrt(max(0.0, float(slopes.var(ddof=1)) - by_reads)) if len(slopes) > 1 else 0.0
    return max(0.0, -float(slopes.mean())), spread
