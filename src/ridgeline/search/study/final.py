"""The end of a search: each seed's winner trained on the whole training split, scored on the test split once, the best exported.

winner ──build(final size, seed)──> train_network(recipe, epochs | what is left of the time) ──> test accuracy, final/<seed>/weights
best seed, by what was known before the test ──> winner/genotype.json, weights.safetensors, model.onnx, cell.svg
load_winner(folder) ──> the trained network
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ...core.errors import MissingExtraError, ModelFileError, RidgelineError
from ...core.files import write_json, write_text
from ..budget import parse_budget
from ..spaces.space import point_of
from .evaluate import on_chips
from .result import Front, Shipped
from .study import Study

WEIGHTS = "weights.safetensors"
MOST_GENOTYPE_BYTES = 1 << 20
DRAWN = ("darts", "nb201", "macro", "residual", "transformer")


def ship(study: Study, front: Front, seed: int) -> Shipped:
    """Train and score the winner of a seed, or read that it was done."""
    done = [entry for entry in study.run.journal.entries if entry.get("kind") == "final" and entry.get("seed") == seed]
    if done:
        return Shipped.from_json(done[0])
    from ..recipe import train_network

    trial, request, begun = front.trials[front.winners[seed]], study.request, time.perf_counter()
    model, folder = build_genotype(front.genotypes[trial.number], seed), study.run.final(seed)
    if (start := study.grown.get(seed)) is not None:
        model.load_state_dict(dict(start))
    trained = train_network(
        model, study.data, request.final_recipe, device=request.device, seed=seed, folder=folder / "checkpoints" if folder else None,
        report=lambda message: study.report(f"winner of seed {seed}: {message}"), **_length(study, front, seed),
    )  # fmt: skip
    test = {"accuracy": float(trained.accuracy)}
    if trained.accuracy_mirrored is not None:
        test["accuracy_mirrored"] = float(trained.accuracy_mirrored)
    if "crossbar_accuracy" in request.wanted:
        test["crossbar_accuracy"] = on_chips(model, study.data, request.chip, seed, study.report)
    if folder is not None:
        save_weights(model, folder / WEIGHTS)
    shipped = Shipped(seed, trial.number, trial.point, dict(trial.values), test, time.perf_counter() - begun)
    study.run.journal.append(shipped.to_json())
    if folder is not None:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return shipped


def _length(study: Study, front: Front, seed: int) -> dict[str, Any]:
    """How long to train: the epochs asked for, or the time the search has left, or the recipe's own."""
    request, whole = study.request, parse_budget(study.request.budget)
    if request.final_epochs is not None or whole.seconds is None:
        return {"epochs": request.final_epochs}
    used = sum(trial.seconds for trial in front.trials if trial.seed == seed)
    return {"seconds": max(whole.seconds - used, whole.seconds * 0.1)}


def build_genotype(genotype: dict[str, Any], seed: int = 0) -> nn.Module:
    """Fresh weights for what a genotype names: a point of a space, or a network aso-se has grown."""
    if genotype.get("space") == "aso-se":
        from ..differentiable.grown import GrownNet, plan_from_json

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return GrownNet(plan_from_json(genotype))
    space, point = point_of(genotype)
    return space.build(point, seed=seed)


def save_weights(model: nn.Module, path: Path) -> None:
    """The state as safetensors, whole or not at all."""
    state = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.tmp")
    save_file(state, beside)
    with beside.open("rb") as stream:
        os.fsync(stream.fileno())
    os.replace(beside, path)


def export_front(study: Study, front: Front, onnx: bool = True) -> None:
    """winner/ and the last front.json; without a folder nothing."""
    folder, winner = study.run.winner, front.winner
    if folder is None or winner is None:
        return
    genotype = front.genotypes[winner.number]
    front.exported = {"genotype": str(write_json(folder / "genotype.json", genotype))}
    if (drawing := draw_genotype(genotype)) is not None:
        front.exported["drawing"] = str(write_text(folder / "cell.svg", drawing))
    final = study.run.final(winner.seed)
    if final is not None and (final / WEIGHTS).is_file():
        if not (folder / WEIGHTS).is_file() or not filecmp.cmp(final / WEIGHTS, folder / WEIGHTS, shallow=False):
            (folder / "model.onnx").unlink(missing_ok=True)  # of other weights
            shutil.copyfile(final / WEIGHTS, folder / f".{WEIGHTS}.tmp")
            os.replace(folder / f".{WEIGHTS}.tmp", folder / WEIGHTS)
        front.exported["weights"] = str(folder / WEIGHTS)
        if (folder / "model.onnx").is_file():
            front.exported["onnx"] = str(folder / "model.onnx")
        elif onnx:
            _export_onnx(study, front, folder)
    elif front.shipped:
        front.notes.append(f"winner/ has no weights: {final / WEIGHTS if final else WEIGHTS} is gone since they were trained")
    if study.run.path is not None:
        front.exported["report"] = str(study.run.path / "report.html")
        write_text(study.run.path / "report.html", front.to_html())
    study.write_front(front)


def _export_onnx(study: Study, front: Front, folder: Path) -> None:
    """model.onnx; where it cannot be made, a note says why."""
    from ...transform.onnx_out import export_onnx

    model = load_winner(folder)
    try:
        made = export_onnx(model, (study.data.prepare(study.data.train.inputs[:2]),), folder / "model.onnx")
    except MissingExtraError as error:
        front.notes.append(f"no model.onnx: {error.what}; {error.do}")
    except RidgelineError as error:
        front.notes.append(f"no model.onnx: {error.what}: {error.why}")
    else:
        front.exported["onnx"] = str(made.path)
        front.exported["onnx_difference"] = made.largest_difference


def draw_genotype(genotype: dict[str, Any]) -> str | None:
    """An SVG of the cell or the network; None for spaces of others, which draw themselves as they like."""
    if genotype.get("space") not in DRAWN:
        return None
    from ..spaces.draw import draw

    return draw(genotype)


def load_winner(folder: Path | str) -> nn.Module:
    """The trained network of a run's winner/ folder (or of any with genotype.json and weights.safetensors), in eval mode."""
    home = Path(folder)
    try:
        if (home / "genotype.json").stat().st_size > MOST_GENOTYPE_BYTES:
            raise ValueError("genotype.json is larger than a genotype can be")
        genotype = json.loads((home / "genotype.json").read_text(encoding="utf-8"))
        if not isinstance(genotype, dict):
            raise ValueError("genotype.json holds no object")
        state = load_file(home / WEIGHTS)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        why = str(error).splitlines()[0][:200]
        raise ModelFileError(f"no trained network in {home}", why=why, do="give the winner/ folder of a search") from error
    model = build_genotype(genotype)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        why = str(error).splitlines()[-1].strip()[:200]
        raise ModelFileError(f"{home / WEIGHTS} does not fit its genotype", why=why, do="give the files of one run") from error
    return model.eval()
