"""Trade-offs: the same network on variants of a chip, every combination of a grid one row.

    grid {"adc_levels": [64, 256], "array": [32, 64], …} ──> variants of the chip, all checked before the first is run
      row = settings, accuracy (digital beside it), images/s and peak bytes of the simulation, error against the reference, and what the
            chip would take for an image: energy, time, arrays, area
    Pareto: no other row has at least its accuracy for at most its energy (and, where both are equal, simulates faster)

Fields (FIELDS): slices (both operands), x_slices, w_slices, array (rows = columns), rows, columns, granularity (n: x [1, n], w [n, n]),
x_granularity, w_granularity, adc_levels, sign, format, precision (what the dot products run in: float32, tf32, float16, bfloat16, integer).
Where a slice needs more levels than the chip's DACs or cells have, they get them. Prices follow the size: a read's energy and an array's
area with its cells, a conversion's energy and a converter's area with the ADC's levels (Walden 1999: joules a conversion step).
With a run folder each row is on disk as soon as it is known, and a sweep begun again goes on from there.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.errors import OptionError, unknown_name
from ...core.journal import open_results
from ...core.spec import Constant, parse_spec
from ...measure.memory import measured_peak_bytes
from ...target.crossbar import CrossbarSpec
from ...target.load import load_crossbar
from ...train.evaluate import device_of, evaluate
from ...workload.case import ModelCase
from ...workload.data import Data
from ...workload.digest import data_digest, model_digest
from ...workload.graph import Workload
from .digests import simulator_digest
from .precision import DEFAULT, PRECISIONS, error_against_reference, use_precision
from .subject import Report, Subject, cost_of, load_subject, on_chip, quiet, work_of

MOST_ROWS = 4096
SAMPLED = 4  # images whose codes are compared with the reference's
Setter = Callable[[dict[str, Any], Any], None]


def _operand(name: str) -> Setter:
    return lambda chip, value: chip["operands"].__setitem__(name, value)


def _slices(*operands: str) -> Setter:
    def change(chip: dict[str, Any], value: Any) -> None:
        for operand in operands:
            chip["operands"][f"{operand}_slices"], chip["operands"][f"{operand}_bits"] = value, None
        widest = max((width for width in value if isinstance(width, int)), default=1) if isinstance(value, list | tuple) else 1
        for part, operand in (("dac", "x"), ("cell", "w")):
            if operand in operands and isinstance(chip[part]["levels"], int):
                chip[part]["levels"] = max(chip[part]["levels"], 2**widest)

    return change


def _array(*axes: str) -> Setter:
    return lambda chip, value: chip["array"].update(dict.fromkeys(axes, value))


def _granularity(chip: dict[str, Any], value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise OptionError(
            f"granularity = {value!r}", why="it is a number of values that share a scale", do="use x_granularity and w_granularity"
        )
    chip["operands"].update(x_granularity=[1, value], w_granularity=[value, value])


FIELDS: dict[str, Setter] = {
    "slices": _slices("x", "w"),
    "x_slices": _slices("x"),
    "w_slices": _slices("w"),
    "array": _array("rows", "columns"),
    "rows": _array("rows"),
    "columns": _array("columns"),
    "granularity": _granularity,
    "x_granularity": _operand("x_granularity"),
    "w_granularity": _operand("w_granularity"),
    "sign": _operand("sign"),
    "format": _operand("format"),
    "adc_levels": lambda chip, value: chip["adc"].__setitem__("levels", value),
}
"""Name in a grid → what it changes in a chip's data."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Rows in the order of the grid; each is what was journaled, with its Pareto mark."""

    model: str
    chip: str
    data: str
    images: int
    digital: float
    rows: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("model", "chip", "data", "images", "digital")}
        return {"schema": 1, **own, "rows": list(self.rows)}


def sweep(
    model: nn.Module | str | Subject,
    chip: CrossbarSpec | str,
    data: Data | str | None = None,
    *,
    grid: Mapping[str, Sequence[Any]],
    images: int = 256,
    batch: int = 64,
    seed: int = 0,
    engine: str = "auto",
    calibrate: int = 64,
    run: Path | None = None,
    report: Report = quiet,
) -> SweepResult:
    """One row for each combination of the grid's values, on the first `images` test images and chip 0."""
    base = load_crossbar(chip) if isinstance(chip, str) else chip
    variants = [(settings, variant(base, settings)) for settings in combinations(grid)]
    subject = model if isinstance(model, Subject) else load_subject(model, data, seed=seed, report=report)
    count = min(images, len(subject.data.test))
    header = {
        "what": "sweep", "simulator": simulator_digest(), "model": [subject.name, model_digest(subject.module)],
        "data": [subject.data.name, data_digest(subject.data) if run else ""],
        "chip": base.model_dump(mode="json"), "images": count, "batch": batch, "seed": seed, "engine": engine, "calibrate": calibrate,
        "device": str(device_of(subject.module)),
    }  # fmt: skip
    options: dict[str, Any] = {"images": count, "batch": batch, "seed": seed, "engine": engine, "calibrate": calibrate}
    rows, workload = [], work_of(subject)
    with open_results(run, header) as journal:
        digital = journal.get("digital") or journal.put("digital", {"accuracy": _accuracy(subject.module, subject, count, batch)})
        for place, (settings, spec) in enumerate(variants, 1):
            key = json.dumps(settings, sort_keys=True)
            report(f"{place} of {len(variants)}: {key}")
            known = journal.get(key)
            rows.append(known or journal.put(key, {"settings": settings, **measure_row(subject, spec, settings, workload, **options)}))
    return SweepResult(subject.name, base.name, subject.data.name, count, digital["accuracy"], tuple(mark_pareto(rows)))


def combinations(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every choice of one value a field, the last field fastest."""
    for name, values in grid.items():
        if name not in FIELDS and name != "precision":
            raise unknown_name("field to sweep", name, [*FIELDS, "precision"], see="docs/crossbar.md")
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise OptionError(
                f"{name} = {values!r} in a grid", why="each field takes a list of values", do=f'e.g. {{"{name}": [value, value]}}'
            )
    if unknown := [value for value in grid.get("precision", ()) if value not in PRECISIONS]:
        raise unknown_name("precision", str(unknown[0]), PRECISIONS, see="docs/crossbar.md")
    rows = [dict(zip(grid, chosen, strict=True)) for chosen in itertools.product(*grid.values())]
    if len(rows) > MOST_ROWS:
        raise OptionError(f"a grid of {len(rows):,} rows", why=f"at most {MOST_ROWS:,} are run", do="sweep fewer values at once")
    return rows


def variant(base: CrossbarSpec, settings: Mapping[str, Any]) -> CrossbarSpec:
    """The chip with these settings and the prices that go with them; an impossible one is an error that names the field."""
    data = base.model_dump()
    for name, value in settings.items():
        if name in FIELDS:
            FIELDS[name](data, value)
    changed = parse_spec(CrossbarSpec, data, f"{base.name} with {json.dumps(dict(settings))}")
    return changed.model_copy(update={"cost": _prices(changed, base)})


def _prices(chip: CrossbarSpec, base: CrossbarSpec) -> Any:
    cells = chip.array.rows * chip.array.columns / (base.array.rows * base.array.columns)
    steps = (sum(chip.adc_levels) / len(chip.adc_levels)) / (sum(base.adc_levels) / len(base.adc_levels))
    ratios = {"array_read_j": cells, "array_mm2": cells, "adc_conversion_j": steps, "adc_mm2": steps}

    def scaled(name: str, ratio: float) -> Constant:
        given: Constant = getattr(base.cost, name)
        return given.model_copy(
            update={"value": given.value * ratio, "source": f"{given.source}; x {ratio:g} with its size", "status": "assumed"}
        )

    return base.cost.model_copy(update={name: scaled(name, ratio) for name, ratio in ratios.items() if ratio != 1})


def measure_row(
    subject: Subject, chip: CrossbarSpec, settings: Mapping[str, Any], workload: Workload, *, images: int, batch: int, seed: int,
    engine: str, calibrate: int,
) -> dict[str, Any]:  # fmt: skip
    """Everything one row states, but its settings."""
    analog = on_chip(subject, chip, engine=engine, seed=seed, calibrate=calibrate, batch=batch)
    use_precision(analog, str(settings.get("precision", DEFAULT)))
    first = subject.inputs(min(batch, images))
    with torch.inference_mode():
        analog(first[:1])  # programs the cells
    device = device_of(analog)
    peak = measured_peak_bytes(ModelCase(subject.name, analog, (first,), len(first), "float32"), device)
    start = time.perf_counter()
    accuracy = _accuracy(analog, subject, images, batch)
    seconds = time.perf_counter() - start
    cost = cost_of(subject, chip, workload)
    price = cost.to_json() if cost else dict.fromkeys(("energy_j", "latency_s", "arrays", "area_mm2"))
    return {
        "accuracy": accuracy,
        "images_per_s": images / seconds,
        "peak_bytes": peak,
        **{name: price[name] for name in ("energy_j", "latency_s", "arrays", "area_mm2")},
        **error_against_reference(analog, first[:SAMPLED]),
    }


def _accuracy(model: nn.Module, subject: Subject, count: int, batch: int) -> float:
    return evaluate(model, subject.data, batch=batch, limit=count).accuracy


def mark_pareto(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with `pareto`: whether none beats them in accuracy and energy (in accuracy and speed where no prices are stated)."""

    def beats(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        mine, theirs = (_worth(row) for row in (one, other))
        return all(a >= b for a, b in zip(mine[:2], theirs[:2], strict=True)) and mine > theirs

    return [{**row, "pareto": not any(beats(other, row) for other in rows)} for row in rows]


def _worth(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Larger is better: accuracy, the chip's energy, the simulation's speed."""
    energy = -row["energy_j"] if row.get("energy_j") is not None else row["images_per_s"]
    return row["accuracy"], energy, row["images_per_s"]
