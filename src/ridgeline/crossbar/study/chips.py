"""Monte Carlo over chips: the same network programmed on several chips of one kind, each with its own cells, and scored.

    network, chip ──> digital accuracy ──> the chip built perfectly ──> chip 0, 1, 2, … (cells and converters of their own)
      ChipsResult: accuracy of each; mean, standard deviation (of the sample), worst; images/s simulated; energy of an image on the chip

A chip is programmed once and then scored; its time is that of scoring alone. With a run folder every chip is on disk as soon as it is
known, and a run begun again goes on from there. A chip without anything random is the same each time, so one stands for all.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.errors import OptionError
from ...core.journal import open_results
from ...target.crossbar import CrossbarSpec
from ...target.load import load_crossbar
from ...train.evaluate import device_of, evaluate
from ...workload.data import Data
from ...workload.digest import data_digest, model_digest
from ..layer.convert import all_ideal
from ..layer.layers import products, set_call, set_chip
from .digests import simulator_digest
from .subject import CALIBRATION_IMAGES, ChipCost, Report, Subject, build_perfectly_, cost_of, load_subject, on_chip, quiet

RENDERERS = {"table": "ridgeline.report.crossbar_table:render_crossbar", "html": "ridgeline.report.crossbar_html:render_crossbar_html"}


@dataclass(frozen=True, slots=True)
class ChipsResult:
    """How one network does on several chips."""

    model: str
    chip: str
    data: str
    images: int
    seed: int
    engine: str
    """Engines the layers ran on, with how many each."""
    digital: float
    ideal: float
    """Accuracy of the chip built perfectly."""
    accuracies: tuple[float, ...]
    """Of chip 0, 1, …"""
    seconds: tuple[float, ...]
    """Each chip's images took to simulate, programming left out."""
    digital_s: float
    cost: ChipCost | None
    notes: tuple[str, ...] = ()

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def std(self) -> float:
        """Of the sample (n - 1); 0 for one chip."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0

    @property
    def worst(self) -> float:
        return min(self.accuracies)

    @property
    def images_per_s(self) -> float:
        """Simulated; the median chip's."""
        return self.images / statistics.median(self.seconds)

    def to_json(self) -> dict[str, Any]:
        names = (
            "model",
            "chip",
            "data",
            "images",
            "seed",
            "engine",
            "digital",
            "ideal",
            "mean",
            "std",
            "worst",
            "images_per_s",
            "digital_s",
        )
        own = {name: getattr(self, name) for name in names}
        lists = {"accuracies": list(self.accuracies), "seconds": list(self.seconds), "notes": list(self.notes)}
        return {"schema": 1, **own, **lists, "cost": self.cost.to_json() if self.cost else None}

    def table(self, **options: Any) -> str:
        return str(render("table")({"run": self.to_json()}, **options))

    def to_html(self) -> str:
        return str(render("html")({"run": self.to_json()}))


def render(kind: str) -> Any:
    """The function that shows a study; it lives downstream."""
    module, _, function = RENDERERS[kind].partition(":")
    return getattr(importlib.import_module(module), function)


def evaluate_chips(
    model: nn.Module | str | Subject,
    chip: CrossbarSpec | str,
    data: Data | str | None = None,
    *,
    chips: int = 16,
    seed: int = 0,
    images: int | None = None,
    batch: int = 64,
    engine: str = "auto",
    calibrate: int = CALIBRATION_IMAGES,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    run: Path | None = None,
    progress: bool = True,
    report: Report | None = None,
) -> ChipsResult:
    """Score the network on `chips` chips, on the first `images` of the test images (None: all)."""
    if chips < 1 or batch < 1 or (images is not None and images < 1):
        raise OptionError(
            f"{chips} chips, batches of {batch}, {images} images", why="at least one of each", do="give whole numbers from 1 up"
        )
    spec = load_crossbar(chip) if isinstance(chip, str) else chip
    say = report or (_to_stderr if progress else quiet)
    subject = model if isinstance(model, Subject) else load_subject(model, data, seed=seed, report=say)
    count = min(images or len(subject.data.test), len(subject.data.test))
    header = {
        "what": "chips", "simulator": simulator_digest(), "model": [subject.name, model_digest(subject.module)],
        "data": [subject.data.name, data_digest(subject.data) if run else ""],
        "chip": spec.model_dump(mode="json"), "images": count, "batch": batch, "seed": seed, "engine": engine, "calibrate": calibrate,
        "overrides": {name: dict(fields) for name, fields in (overrides or {}).items()}, "device": str(device_of(subject.module)),
    }  # fmt: skip
    alike = all_ideal(spec, overrides or {})
    notes = [] if not alike else ["nothing on this chip is random: one chip stands for all"]
    convert = {"engine": engine, "seed": seed, "calibrate": calibrate, "batch": batch, "overrides": overrides}
    with open_results(run, header) as journal:
        say("digital")
        digital = journal.get("digital") or journal.put("digital", _score(subject.module, subject, count, batch))
        say(f"{spec.name} built perfectly")
        analog = None
        if (ideal := journal.get("ideal")) is None:
            analog = build_perfectly_(on_chip(subject, spec, **convert))  # type: ignore[arg-type]
            ideal = journal.put("ideal", {**_score(analog, subject, count, batch), "engine": engines_of(analog)})
        scores = [ideal] if alike else _each(subject, spec, chips, count, batch, convert, journal, say)
    cost = cost_of(subject, spec)
    if cost and overrides:
        notes.append("energy, time and arrays are those of the chip without overrides")
    return ChipsResult(
        subject.name, spec.name, subject.data.name, count, seed, str(scores[0]["engine"]), digital["accuracy"], ideal["accuracy"],
        tuple(score["accuracy"] for score in scores), tuple(score["seconds"] for score in scores), digital["seconds"],
        cost, tuple(notes),
    )  # fmt: skip


def _each(
    subject: Subject, spec: CrossbarSpec, chips: int, count: int, batch: int, convert: dict[str, Any], journal: Any, say: Report
) -> list[dict[str, Any]]:
    """Scores of chip 0, 1, …: one converted network, programmed anew for each that the journal does not know."""
    analog: nn.Module | None = None
    scores: list[dict[str, Any]] = []
    for number in range(chips):
        say(f"chip {number + 1} of {chips}" + (f", mean so far {statistics.fmean(s['accuracy'] for s in scores):.2%}" if scores else ""))
        known = journal.get(f"chip {number}")
        if known is None:
            analog = analog if analog is not None else on_chip(subject, spec, **convert)
            set_chip(analog, number)
            set_call(analog, 0)
            set_call(analog, None)  # reads begin anew: a chip's score does not depend on those before it
            known = journal.put(f"chip {number}", {**_score(analog, subject, count, batch), "engine": engines_of(analog)})
        scores.append(known)
    return scores


def _score(model: nn.Module, subject: Subject, count: int, batch: int) -> dict[str, Any]:
    """Accuracy, and the seconds it took once cells were programmed."""
    with torch.inference_mode():
        model(subject.inputs(1))  # programs the cells
    _wait(model)
    start = time.perf_counter()
    accuracy = evaluate(model, subject.data, batch=batch, limit=count).accuracy
    _wait(model)
    return {"accuracy": accuracy, "seconds": time.perf_counter() - start}


def _wait(model: nn.Module) -> None:
    if (device := device_of(model)).type == "cuda":
        torch.cuda.synchronize(device)


def engines_of(model: nn.Module) -> str:
    """Engines of the layers, with how many each: "native 20, blocked 1"."""
    used: dict[str, int] = {}
    for product in products(model).values():
        name = str(product.report()["engine"])
        used[name] = used.get(name, 0) + 1
    return ", ".join(f"{name} {number}" for name, number in sorted(used.items(), key=lambda item: -item[1]))


def _to_stderr(message: str) -> None:
    sys.stderr.write(f"{message}\n")
