"""What a network is worth: trained for a while on one part of the training split, scored on the other.

    data.train ──held_out──> Data(train = the larger part, test = the smaller part); the test split itself is not touched
    (space, point) ──build(seed)──> module ──recipe, epochs · fidelity──> accuracy on the held-out part
                                           ──chips with their noise──> crossbar_accuracy, where asked for

The same space, point, data, seed and recipe give the same figure on the CPU, whatever was trained before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from torch import nn

from ...core.errors import OptionError
from ...workload.data import Data, Split
from ..spaces.space import Point, Space

Report = Callable[[str], None]
CHIPS, CHIP_IMAGES = 3, 256
"""Chips a crossbar accuracy is the mean of, and images each of them is scored on."""


def quiet(message: str) -> None:
    """For callers that want to hear nothing."""


def held_out(data: Data, share: float, seed: int = 0) -> Data:
    """The training split in two, each class alike; every trial of every seed sees the same two parts."""
    from ...workload.data.digits import split_rows

    if not 0.0 < share < 1.0:
        raise OptionError(f"validation share {share}", why="a part is trained on, the other scored", do="give a number between 0 and 1")
    if data.kind != "image":
        raise OptionError(
            f"data {data.name} of kind {data.kind}", why="networks of a search answer for images", do="give images with labels"
        )
    kept, scored = split_rows(data.train.targets, share, seed)
    parts = [Split(data.train.inputs[rows], data.train.targets[rows]) for rows in (kept, scored)]
    return replace(data, train=parts[0], test=parts[1])


def evaluate_point(
    space: Space, point: Point, data: Data, *, device: str = "cpu", epochs: int = 4, recipe: str = "digits", seed: int = 0,
    fidelity: float = 1.0, report: Report = quiet, validation: float = 0.2, folder: Path | None = None,
    objectives: Iterable[str] = ("accuracy",), chip: str = "rram-64",
) -> dict[str, float]:  # fmt: skip
    """Accuracy (and crossbar_accuracy) of one network on a held-out part of the training split."""
    parts = held_out(data, validation)
    return score_candidate(
        space, point, parts, device=device, epochs=epochs, recipe=recipe, seed=seed, fidelity=fidelity, report=report, folder=folder,
        objectives=objectives, chip=chip,
    )  # fmt: skip


def score_candidate(
    space: Space, point: Point, parts: Data, *, device: str, epochs: int, recipe: str, seed: int, fidelity: float, report: Report,
    folder: Path | None, objectives: Iterable[str], chip: str,
) -> dict[str, float]:  # fmt: skip
    """The same with the training split divided already; `folder` holds checkpoints, from which a killed training goes on."""
    from ..recipe import train_network

    if not 0.0 < fidelity <= 1.0:
        raise OptionError(f"fidelity {fidelity}", why="it is a share of the full training", do="give a number above 0 and at most 1")
    model = space.build(point, seed=seed)
    trained = train_network(
        model, parts, recipe, device=device, seed=seed, epochs=epochs_of(epochs, fidelity), folder=folder, report=report
    )
    found = {"accuracy": float(trained.accuracy)}
    if "crossbar_accuracy" in objectives:
        found["crossbar_accuracy"] = on_chips(model, parts, chip, seed, report)
    return found


def epochs_of(epochs: int, fidelity: float) -> int:
    """Of a training of this share of them."""
    return max(1, round(epochs * fidelity))


def on_chips(model: nn.Module, parts: Data, chip: str, seed: int, report: Report) -> float:
    """Mean accuracy over a few simulated chips, their cells and converters as noisy as the chip's file says."""
    from ...crossbar.study.chips import evaluate_chips
    from ...crossbar.study.subject import Subject

    subject = Subject("candidate", model.eval(), parts)
    return evaluate_chips(subject, chip, chips=CHIPS, images=CHIP_IMAGES, seed=seed, report=report).mean
