"""`ridgeline compress MODEL --recipe R --data D`: a smaller or faster model, with what each step gained and cost.

model (named, saved, or file.py:factory) + weights ──> recipe or --apply ADVICE ──> Change: table | --json | --html
                                                                                ──> --out: model.safetensors + model.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import Html, Json, check_outputs, emit_json, progress, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from ..core.change import Change
    from ..transform.saved import Base
    from ..transform.step import Context
    from ..workload.data import Data

DATA = {"digits-cnn": "digits", "resnet20": "cifar10", "resnet56": "cifar10"}
TRAINED_HERE = "digits-cnn"
SAVED_AS = (".safetensors", ".json")


def compress(
    model: Annotated[str, typer.Argument(help="A name from `ridgeline models`, a saved folder, or file.py:factory.")] = TRAINED_HERE,
    recipe: Annotated[str, typer.Option("--recipe", help="A built-in recipe (int8, small) or a .toml file.")] = "int8",
    data: Annotated[str | None, typer.Option("--data", help="digits, cifar10, wikitext2 or a folder (default: the model's own).")] = None,
    weights: Annotated[Path | None, typer.Option("--weights", help="Trained weights of a named model: .safetensors or .th.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Save the result here; whole steps are kept beside it to resume.")] = None,
    on: Annotated[str, typer.Option("--on", help="Where to work and to measure: cpu, cuda or cuda:N.")] = "cpu",
    apply: Annotated[str | None, typer.Option("--apply", help="Apply one piece of advice by name instead, e.g. channels-last.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of training and calibration.")] = 0,
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Quantise, prune, factor and distil a model by a recipe, and measure what it gained and cost."""
    from ..measure.subject import choose_device
    from ..transform.advised import find_advised
    from ..transform.recipe import load_recipe
    from ..transform.saved import save_model
    from ..workload.data import load_data

    device = str(choose_device(on, model))
    # what is asked for is checked before anything is trained
    steps = load_recipe(recipe) if apply is None else None
    if apply is not None:
        find_advised(apply)
    written, work = _places(out) if out is not None else (None, None)
    check_outputs(html, written)
    with progress(f"compressing {model}") as report:
        chosen = data if data is not None else DATA.get(model)
        source = load_data(chosen) if chosen is not None else None
        module, base, inputs = _model(model, weights, source, seed, report)
        context = _context(model, module.to(device), source, inputs, seed, report)
        made, change = _run(module, steps, apply, model, on, context, work, base, report)
        if out is not None:
            say(f"saved: {save_model(made, out, base=base, change=change)}")
    _emit(change, as_json, html)


def _places(out: Path) -> tuple[Path, Path]:
    """(a file that is going to be written, the folder of whole steps); `out` is a folder, or NAME.safetensors with NAME.json."""
    if out.suffix in SAVED_AS:
        return out, out.with_suffix("") / "steps"
    return out / "model.json", out / "steps"


def _emit(change: Change, as_json: bool, html: Path | None) -> None:
    from ..core.files import write_text

    if html:
        say(f"report: {write_text(html, change.to_html())}")
    if as_json:
        emit_json(change.to_json())
    else:
        sys.stdout.write(change.table(color=sys.stdout.isatty()) + "\n")


def _run(
    module: nn.Module, steps: Any, apply: str | None, model: str, on: str, context: Context, work: Path | None, base: Base,
    report: Callable[[str], None],
) -> tuple[nn.Module, Change]:  # fmt: skip
    from ..transform.recipe import run_recipe

    if apply is None:
        return run_recipe(module, steps, context, work=work, base=base)
    from ..transform.advised import apply_advice

    return apply_advice(module, _promised(module, apply, on, context, report), context)


def _promised(module: nn.Module, name: str, on: str, context: Context, report: Callable[[str], None]) -> Any:
    """The advice of that name with what the estimate predicts for it here; the bare name where it predicts no gain."""
    from ..estimate.advice import advise
    from ..estimate.processor import estimate
    from ..target.load import load_target
    from ..transform.compare import example_inputs
    from ..workload.capture import capture

    workload = capture(module, example_inputs(module, context), name=context.name)
    found = [one for one in advise(estimate(workload, load_target(on, report))) if one.change == name]
    if not found:
        say(f"the estimate predicts no gain from {name!r} on {on}; measuring it all the same")
    return found[0] if found else name


def _model(
    name: str, weights: Path | None, data: Data | None, seed: int, report: Callable[[str], None]
) -> tuple[nn.Module, Base, tuple[Any, ...] | None]:
    """(module, what it is built from, example inputs)."""
    import copy

    from ..core.errors import OptionError
    from ..transform.saved import load_model, read_document
    from ..workload.capture import resolve
    from ..workload.case import CaseOptions
    from ..workload.models import MODELS
    from ..workload.pretrained import PUBLISHED, load_pretrained

    if name in MODELS and (weights is not None or name in PUBLISHED):
        return load_pretrained(name, weights), name, None
    if weights is not None:
        raise OptionError(f"--weights {weights} with {name}", why="only named models take weights", do="leave --weights out")
    if name == TRAINED_HERE and data is not None:
        return _trained(data, seed, report), name, None
    if Path(name).is_dir() and (Path(name) / "model.json").is_file():
        module, named = load_model(name), read_document(Path(name) / "model.json")["base"]
        return module, named or copy.deepcopy(module), None  # of a name, what is saved loads without anything of the user's
    case = resolve(name, CaseOptions(device="cpu"))
    say(f"{name} has no trained weights here: bytes and times are its own, answers are not")
    return case.module, name if name in MODELS else copy.deepcopy(case.module), case.args


def _trained(data: Data, seed: int, report: Callable[[str], None]) -> nn.Module:
    from ..train.evaluate import evaluate
    from ..train.fit import fit
    from ..transform.saved import load_model

    say(f"{TRAINED_HERE} without --weights: training it on {data.name} first")
    module = load_model(TRAINED_HERE).requires_grad_(True)
    fit(
        module,
        data,
        epochs=12,
        batch=64,
        optimiser="adamw",
        learning_rate=3e-3,
        weight_decay=1e-2,
        seed=seed,
        report=report,
        progress=False,
    )
    say(f"trained: accuracy {evaluate(module, data).accuracy:.2%}")
    return module.eval()


def _context(name: str, module: nn.Module, data: Data | None, inputs: Any, seed: int, report: Callable[[str], None]) -> Context:
    from ..transform.step import Context

    return Context(inputs=inputs, data=data, name=name, target=str(next(module.parameters()).device), seed=seed, report=report)
