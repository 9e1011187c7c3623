"""`ridgeline crossbar`: a network on memristor arrays.

    crossbar [MODEL]          accuracy digital, on the chip built perfectly and on real chips; images/s, energy, layer by layer
    crossbar sweep [MODEL]    variants of the chip in one table
    crossbar fit CSV          a chip's file with cells fitted to your measurements

--json owns stdout; progress goes to stderr.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from .common import Html, Json, check_outputs, emit_json, progress, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..crossbar.study.subject import Subject

FEW_LAYERS = 16
FIELD_HELP = "FIELD=VALUE,VALUE; lists in brackets: slices=[1,2,2],[1,2,2,2]. Fields: slices, x_slices, w_slices, array, rows, columns, granularity, x_granularity, w_granularity, adc_levels, sign, format, precision."  # noqa: E501
DEFAULT_GRID = ("array=32,64,128", "adc_levels=64,256,1024")


class RunByDefault(TyperGroup):
    """`crossbar MODEL` is `crossbar run MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            if args:
                check_model(args[0], self.commands)
            args = ["run", *args]
        return super().parse_args(ctx, args)


def check_model(word: str, commands: Iterable[str] = ()) -> None:
    """Refuse what is no model's name, folder or file, before a lack of data or weights is spoken of; an option passes."""
    from ..core.errors import unknown_name
    from ..workload.capture import refuse_file
    from ..workload.models import MODELS

    if word.startswith("-") or word in MODELS or ".py:" in word or os.path.exists(word):
        return
    refuse_file(word)
    kind = "model or command" if commands else "model"
    raise unknown_name(kind, word, [*commands, *MODELS], see="`ridgeline crossbar --help`, `ridgeline models`")


app = typer.Typer(cls=RunByDefault, help="A network on memristor arrays: accuracy, speed and energy; `run` is the default.")

Model = Annotated[
    str, typer.Argument(help="digits-cnn, resnet20, resnet56, any named model with --weights, a saved folder, file.py:factory.")
]
Chip = Annotated[str, typer.Option("--chip", help="A crossbar of `ridgeline targets list`, or a .toml file.")]
DataName = Annotated[str | None, typer.Option("--data", help="digits, cifar10 or a folder (default: the model's own).")]
Weights = Annotated[Path | None, typer.Option("--weights", help="Trained weights of a named model: .safetensors or .th.")]
EngineName = Annotated[str, typer.Option("--engine", help="auto, reference, blocked, native or fused; exactly:NAME allows no other.")]
On = Annotated[str, typer.Option("--on", help="Where to simulate: cpu, cuda or cuda:N.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of chips and noise.")]
BatchSize = Annotated[int, typer.Option("--batch", min=1, help="Images simulated at once.")]
RunFolder = Annotated[Path | None, typer.Option("--run", help="Keep every result here at once; begun again, a run goes on from there.")]


@app.command("run")
def run_chips(
    model: Model = "digits-cnn",
    chip: Chip = "rram-64",
    data: DataName = None,
    chips: Annotated[int, typer.Option("--chips", min=1, help="Chips to program and score.")] = 16,
    images: Annotated[int | None, typer.Option("--images", min=1, help="Test images (default: all).")] = None,
    calibrate: Annotated[int, typer.Option("--calibrate", min=1, help="Training images the ADC ranges come from.")] = 256,
    diagnose: Annotated[int, typer.Option("--diagnose", min=0, help="Test images for the table of layers (0: none).")] = 128,
    rank: Annotated[bool | None, typer.Option("--rank/--no-rank", help="What each layer costs (default: up to 16 layers).")] = None,
    weights: Weights = None,
    engine: EngineName = "auto",
    on: On = "cpu",
    seed: Seed = 0,
    batch: BatchSize = 64,
    run: RunFolder = None,
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Score a network digitally, on the chip built perfectly, and on several real chips; then layer by layer."""
    from ..core.journal import HEADER
    from ..crossbar.study.chips import evaluate_chips
    from ..crossbar.study.diagnose import diagnose as diagnose_layers
    from ..crossbar.study.subject import on_chip
    from ..target.load import load_crossbar

    spec = load_crossbar(chip)  # what is asked for is checked before anything is trained
    check_outputs(html, run and run / HEADER)
    with progress(f"{model} on {spec.name}") as report:
        subject = _subject(model, data, weights, on, seed, engine, report)
        options: dict[str, Any] = {"seed": seed, "batch": batch, "engine": engine, "calibrate": calibrate}
        found: dict[str, Any] = {"schema": 1}
        found["run"] = evaluate_chips(subject, spec, chips=chips, images=images, run=run, report=report, **options).to_json()
        if diagnose:
            from ..crossbar.layer.layers import products

            analog = on_chip(subject, spec, **options)
            ranked = rank if rank is not None else len(products(analog)) <= FEW_LAYERS
            layers = diagnose_layers(subject, spec, images=diagnose, batch=min(batch, 32), rank=ranked, analog=analog, report=report)
            found["diagnosis"] = layers.to_json()
    _emit(found, as_json, html)


@app.command("sweep")
def sweep_chips(
    model: Model = "digits-cnn",
    chip: Chip = "rram-64",
    data: DataName = None,
    grid: Annotated[list[str] | None, typer.Option("--grid", help=FIELD_HELP)] = None,
    images: Annotated[int, typer.Option("--images", min=1, help="Test images for each variant.")] = 256,
    calibrate: Annotated[int, typer.Option("--calibrate", min=1, help="Training images the ADC ranges come from.")] = 64,
    weights: Weights = None,
    engine: EngineName = "auto",
    on: On = "cpu",
    seed: Seed = 0,
    batch: BatchSize = 64,
    run: RunFolder = None,
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Every combination of the grid's values: accuracy, speed, memory, energy, and error against the reference."""
    from ..core.journal import HEADER
    from ..crossbar.study.sweep import combinations, sweep, variant
    from ..target.load import load_crossbar

    spec = load_crossbar(chip)
    check_outputs(html, run and run / HEADER)
    wanted = parse_grid(grid or list(DEFAULT_GRID))
    for settings in combinations(wanted):
        variant(spec, settings)
    with progress(f"{model} on variants of {spec.name}") as report:
        subject = _subject(model, data, weights, on, seed, engine, report)
        found = sweep(
            subject, spec, grid=wanted, images=images, batch=batch, seed=seed, engine=engine, calibrate=calibrate, run=run, report=report
        )
    _emit({"schema": 1, "sweep": found.to_json()}, as_json, html)


@app.command("fit")
def fit_chip(
    csv: Annotated[Path, typer.Argument(help="Columns level, cell, read, conductance_s and, for drift, time_s.")],
    like: Annotated[str, typer.Option("--like", help="The chip everything but the cells is taken from.")] = "rram-64",
    out: Annotated[Path, typer.Option("--out", "-o", help="The chip's file to write; the chip is named like it.")] = Path("chip.toml"),
    as_json: Json = False,
) -> None:
    """Fit a chip's cells to measured conductances, and write a chip file."""
    from ..crossbar.fit_cells import cell_text, fit_cells, write_chip
    from ..target.load import load_crossbar

    load_crossbar(like)  # before a long file is read
    check_outputs(out)
    table = fit_cells(csv)
    say(f"chip: {write_chip(out, like, table)}")
    if as_json:
        emit_json({"schema": 1, "cell": table})
    else:
        sys.stdout.write(cell_text(table))


def parse_grid(given: list[str]) -> dict[str, list[Any]]:
    """["adc_levels=64,256", "slices=[1,1,2,2],[1,1,4]"] → {"adc_levels": [64, 256], "slices": [[1, 1, 2, 2], [1, 1, 4]]}."""
    import json

    from ..core.errors import OptionError

    grid: dict[str, list[Any]] = {}
    for entry in given:
        name, equals, text = entry.partition("=")
        if not equals or not name or not text or name in grid:
            why = "it is given twice" if name in grid else "a field and its values are wanted"
            raise OptionError(f"--grid {entry}", why=why, do="e.g. --grid adc_levels=64,256 --grid array=32,64")
        try:
            grid[name] = json.loads(f"[{text}]")
        except ValueError:
            grid[name] = [value.strip() for value in text.split(",")]  # words need no quotes
    return grid


def _subject(model: str, data: str | None, weights: Path | None, on: str, seed: int, engine: str, report: Callable[[str], None]) -> Subject:
    from ..crossbar.engine.choose import check_wanted
    from ..crossbar.study.subject import load_subject
    from ..measure.subject import choose_device

    check_model(model)
    check_wanted(engine)
    return load_subject(model, data, weights=weights, device=str(choose_device(on, model)), seed=seed, report=report)


def _emit(found: dict[str, Any], as_json: bool, html: Path | None) -> None:
    from ..core.files import write_text

    if html:
        from ..report.crossbar_html import render_crossbar_html

        say(f"report: {write_text(html, render_crossbar_html(found))}")
    if as_json:
        emit_json(found)
    else:
        from ..report.crossbar_table import render_crossbar

        sys.stdout.write(render_crossbar(found, color=sys.stdout.isatty()) + "\n")
