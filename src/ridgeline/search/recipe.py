"""How a network is trained from scratch: everything that decides the result in one TOML file.

    load_recipe("cifar10" | "my.toml") ──> Recipe (frozen, checked; .hash names it)
    train_network(model, data, recipe, epochs=60 | seconds=300) ──> Trained(accuracy, ...)
        seconds: the first steps are timed, the weights put back, and the epochs chosen so that the schedule ends in time
        ──train.fit: augmentation on the device, SGD or Muon, rise and fall, smoothing, average of the weights──> model, trained in place
        ──evaluate, once, at the very end──> accuracy on data.test as it is, and with the mean of each image and its mirror image

Any module that gives logits can be trained. With `epochs` a run is a function of (model, data, recipe, seed) alone; with `seconds`
the machine's speed decides the number of epochs, which is then stored in `folder`, so that a run taken up again goes on the same.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import OptionError, TrainError
from ..core.files import write_json
from ..train import checkpoint as store
from ..train.augment import Augmentation
from ..train.evaluate import device_of, evaluate
from ..train.fit import fit
from ..train.history import History
from ..workload.data import Data
from ..workload.data.augment import Normalise
from .recipe_file import AugmentTable, Recipe, load_recipe, parse_recipe, recipe_names

__all__ = ["Recipe", "Trained", "load_recipe", "parse_recipe", "recipe_names", "train_network", "widest_within"]

WARM_STEPS, TIMED_STEPS = 8, 12  # before the clock starts: kernels are chosen, memory is taken, graphs are captured
SETTLE_S, SETTLE_SHARE = 3.0, 0.01  # at most, and of the seconds given: the first steps on an H200 were a fifth faster than the rest
RESERVE = 0.03  # of the seconds given, for the scoring at the end and steps slower than the timed ones
CHECKPOINTS = 5  # in one run, at most
PLAN = "plan.json"
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Trained:
    """A training from scratch, scored once at its end."""

    accuracy: float  # on data.test, each image as it is
    accuracy_mirrored: float | None  # with the mean of each image's and its mirror image's logits
    loss: float  # nats, each image as it is
    test_rows: int
    train_rows: int
    epochs: int
    steps: int
    batch: int
    parameters: int
    measure_s: float  # timing the first steps, with compiling and choosing kernels
    train_s: float
    evaluate_s: float
    seed: int
    recipe: str
    recipe_hash: str
    history: History

    @property
    def seconds(self) -> float:
        """In all."""
        return self.measure_s + self.train_s + self.evaluate_s

    def to_json(self) -> dict[str, Any]:
        """Without the history."""
        names = [name for name in self.__dataclass_fields__ if name != "history"]
        return {**{name: getattr(self, name) for name in names}, "seconds": self.seconds}


class Mirrored(nn.Module):
    """The mean of a model's logits for an image and its mirror image."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        both: Tensor = self.model(images) + self.model(images.flip(-1))
        return both / 2


def train_network(
    model: nn.Module, data: Data, recipe: Recipe | str | Path = "cifar10", *, device: torch.device | str | None = None, seed: int = 0,
    epochs: int | None = None, seconds: float | None = None, folder: Path | str | None = None, resume: bool = True,
    report: Report | None = None, progress: bool = False,
) -> Trained:  # fmt: skip
    """Train `model` in place on data.train by the recipe, then score data.test once.

    `epochs` or `seconds` (of the whole call) replace the recipe's number of epochs. `folder` holds checkpoints and the plan; the
    same call takes an unfinished run up. `device` None: where the model is.
    """
    if epochs is not None and seconds is not None:
        raise OptionError(f"epochs = {epochs} and seconds = {seconds}", why="each decides how long to train", do="give one of them")
    if epochs is not None and epochs < 1:
        raise OptionError(f"epochs = {epochs}", why="a training passes over its data at least once", do="give 1 or more")
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise OptionError(f"seconds = {seconds}", why="a training takes some time", do="give a number above 0")
    start, chosen = time.perf_counter(), load_recipe(recipe)
    place = torch.device(device) if device is not None else device_of(model)
    source, home = _augmented(data, chosen), None if folder is None else Path(folder)
    model.to(place)
    if chosen.channels_last:
        _to_channels_last(model)
    plan = _planned(home, chosen, seed, resume)
    if plan is None:
        plan = chosen.epochs if epochs is None else epochs
        if seconds is not None:
            epoch_s = _epoch_s(model, source, chosen, place, seed, min(SETTLE_S, SETTLE_SHARE * seconds))
            saving_s = 0.0 if home is None else _saving_s(model, home)
            plan = _epochs_within(epoch_s, seconds, time.perf_counter() - start + saving_s, report)
        _write_plan(home, chosen, seed, plan)
    elif epochs is not None and epochs != plan:
        raise TrainError(
            f"{home} holds a run of {plan} epochs, not {epochs}", why="its schedule is another", do="resume=False, or a new folder"
        )
    measured = time.perf_counter()
    history = _fit(model, source, chosen, place, seed, epochs=plan, home=home, resume=resume, report=report, progress=progress)
    _wait(place)
    trained = time.perf_counter()
    with torch.autocast(place.type, getattr(torch, chosen.precision), enabled=chosen.precision != "float32"):
        scores = evaluate(model, data, batch=chosen.batch)
        mirrored = evaluate(Mirrored(model), data, batch=chosen.batch).accuracy if chosen.mirrored_test else None
    return Trained(
        scores.accuracy, mirrored, scores.loss, scores.count, len(data.train), plan, len(history), history.batch,
        sum(parameter.numel() for parameter in model.parameters()), measured - start, trained - measured, time.perf_counter() - trained,
        seed, chosen.name, chosen.hash, history,
    )  # fmt: skip


def _fit(
    model: nn.Module, data: Data, recipe: Recipe, device: torch.device, seed: int, *, epochs: int | None = None, steps: int | None = None,
    home: Path | None = None, resume: bool = True, report: Report | None = None, progress: bool = False,
    after_step: Callable[[nn.Module, int], object] | None = None,
) -> History:  # fmt: skip
    """train.fit with the recipe's options."""
    rows = len(data.train)
    batch = min(recipe.batch, rows)
    every = -(-(epochs or 1) // CHECKPOINTS) * (rows // batch) if home is not None else None
    return fit(
        model, data, epochs=epochs, steps=steps, batch=batch, optimiser=recipe.optimiser, learning_rate=recipe.learning_rate,
        rest_rate=recipe.rest_rate, momentum=recipe.momentum, nesterov=recipe.nesterov, weight_decay=recipe.weight_decay,
        decay=recipe.decay, schedule=recipe.schedule, rise=recipe.rise, final=recipe.final, clip=recipe.clip, smoothing=recipe.smoothing,
        average=recipe.average, precision=recipe.precision, compile=recipe.compile, graph=recipe.graph and device.type == "cuda",
        choose_kernels=True, seed=seed,
        device=device, checkpoint=home, checkpoint_every=every, resume=resume, report=report, progress=progress, after_step=after_step,
    )  # fmt: skip


def _augmented(data: Data, recipe: Recipe) -> Data:
    """The data with the recipe's augmentation; what is painted over gets the mean colour, which prepare makes zero."""
    table = recipe.augment
    if data.kind != "image":
        if table != AugmentTable():
            raise OptionError(f"[augment] of recipe {recipe.name} for {data.name}", why="it moves pixels", do="leave the table out")
        return replace(data, augment=None)
    prepare = data.prepare
    fill = tuple(round(mean * prepare.top) for mean in prepare.mean) if isinstance(prepare, Normalise) else (0,)
    made = Augmentation(table.shift, table.border, table.flip, table.cutout, fill, table.cutmix, data.classes, table.trivial)
    return replace(data, augment=made if made.changes else None)


def _to_channels_last(model: nn.Module) -> None:
    """Convolution weights with channels innermost, in place; torch then keeps activations so."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def widest_within(
    build: Callable[[int], nn.Module], widths: Sequence[int], data: Data, recipe: Recipe | str | Path = "cifar10", *, seconds: float,
    epochs: int | None = None, device: torch.device | str = "cpu", report: Report | None = None,
) -> int:  # fmt: skip
    """The largest of `widths` with which the recipe's epochs fit into the seconds, by timing a few steps of some (halving the list).

    The smallest where none fits. `build(width)` gives a fresh network; a wider one is taken to be no faster.
    """
    chosen, place = load_recipe(recipe), torch.device(device)
    source, ordered = _augmented(data, chosen), sorted(set(widths))
    if not ordered:
        raise OptionError("no width to choose from", why="widths is empty", do="give at least one")
    low, high = 0, len(ordered)  # ordered[low] is the answer so far, ordered[high] is too wide
    while high - low > 1:
        middle = (low + high) // 2
        model = build(ordered[middle]).to(place)
        if chosen.channels_last:
            _to_channels_last(model)
        whole_s = (epochs or chosen.epochs) * _epoch_s(model, source, chosen, place, 0)
        if report:
            report(f"width {ordered[middle]}: {whole_s:.0f} s of {seconds:.0f} s for {epochs or chosen.epochs} epochs")
        low, high = (middle, high) if whole_s <= seconds * (1 - RESERVE) else (low, middle)
    return ordered[low]


def _epoch_s(model: nn.Module, data: Data, recipe: Recipe, device: torch.device, seed: int, settle_s: float = 0.0) -> float:
    """Seconds an epoch takes, by timing the first steps, or where those are over sooner, the second half of `settle_s` of them.

    The weights are as before afterwards.
    """
    kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
    step_s = _step_s(model, data, recipe, device, seed, WARM_STEPS, TIMED_STEPS)
    if step_s * TIMED_STEPS < settle_s:
        half = max(TIMED_STEPS, math.ceil(settle_s / step_s / 2))
        step_s = _step_s(model, data, recipe, device, seed, half, half)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(kept[name])
    return step_s * (len(data.train) // min(recipe.batch, len(data.train)))


def _step_s(model: nn.Module, data: Data, recipe: Recipe, device: torch.device, seed: int, warm: int, timed: int) -> float:
    """Mean time of `timed` steps after `warm` others."""
    at: dict[int, float] = {}

    def note(_: nn.Module, step: int) -> None:
        if step + 1 in (warm, warm + timed):
            _wait(device)
            at[step + 1] = time.perf_counter()

    _fit(model, data, recipe, device, seed, steps=warm + timed, after_step=note)
    return (at[warm + timed] - at[warm]) / timed


def _saving_s(model: nn.Module, home: Path) -> float:
    """What a run's checkpoints take: the weights written once, times weights, momentum and average, times their number."""
    start, scratch = time.perf_counter(), home / "timing"
    store.save(scratch, store.Snapshot(0, model.state_dict()))
    taken = time.perf_counter() - start
    shutil.rmtree(scratch, ignore_errors=True)
    return 3 * CHECKPOINTS * taken


def _epochs_within(epoch_s: float, seconds: float, spent_s: float, report: Report | None) -> int:
    """How many epochs fit into what is left of the time; one at least."""
    left_s = seconds * (1 - RESERVE) - spent_s
    epochs = max(1, math.floor(left_s / epoch_s))
    if report:
        over = "" if epochs * epoch_s <= left_s else f", more than the {seconds:.0f} s given"
        report(f"{epoch_s:.2f} s an epoch: {epochs} epochs in {epochs * epoch_s:.0f} s{over}")
    return epochs


def _planned(home: Path | None, recipe: Recipe, seed: int, resume: bool) -> int | None:
    """The epochs of the run that `home` holds; None where there is none."""
    if home is None or not resume or not (home / PLAN).is_file():
        return None
    try:
        stored = json.loads((home / PLAN).read_text(encoding="utf-8"))
        told, epochs = (stored["recipe_hash"], stored["seed"]), int(stored["epochs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainError(
            f"{home / PLAN} cannot be read", why=str(error), do="give resume=False to start again, or another folder"
        ) from error
    if told != (recipe.hash, seed):
        raise TrainError(
            f"{home} holds a run of recipe {told[0]}, seed {told[1]}, not {recipe.hash}, {seed}",
            why="going on would mix two runs",
            do="give another folder, or resume=False to start again here",
        )
    return epochs


def _write_plan(home: Path | None, recipe: Recipe, seed: int, epochs: int) -> None:
    if home is not None:
        write_json(home / PLAN, {"schema": 1, "recipe": recipe.name, "recipe_hash": recipe.hash, "seed": seed, "epochs": epochs})


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
