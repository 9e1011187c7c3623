"""Several steps, one after another: from TOML, with what each cost, resumable after the last whole step.

    [recipe]                       load_recipe("r.toml" | "small") ──> Recipe(name, steps)
    name = "small"
    version = 1                    run_recipe(model, recipe, context, work=folder) ──> (model, Change with one Change a step)
    [[step]]                           step i ──run_step──> measured against step i-1 ──saved──> work/1-prune, work/2-distill, ...
    kind = "prune"                     the last against the first: neither smaller nor faster is an error
    sparsity = 0.5

A step's key is the SHA-256 of the model, the seed, the device, the data (name, content, how it is prepared), the teacher, the example
inputs, the quality function and every setting up to it; a run takes up after the last step in the work folder whose key is the same.
Where no teacher is given, a distilling step learns from the model the recipe began with.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from ..core.change import Change
from ..core.errors import RidgelineError, TargetSpecError, TransformError, unknown_name
from ..core.files import write_json
from ..core.spec import Spec, parse_spec, read_toml
from ..train.evaluate import device_of
from ..train.identity import told
from ..workload.digest import data_digest, model_digest
from .compare import change_between, speedup_interval, state_of, timed
from .saved import Base, load_model, read_document, save_model
from .step import Context, find_step, run_step

RECIPES = Path(__file__).parent / "recipes"


class Header(Spec):
    """The [recipe] table."""

    name: str
    """What the Change is called."""
    version: Literal[1]
    """Of this format."""
    description: str = ""
    """For people."""


class RecipeFile(Spec):
    """A recipe as it is written."""

    recipe: Header
    """Name and version."""
    step: tuple[dict[str, Any], ...] = Field(min_length=1)
    """Each with its `kind` and that kind's settings."""


@dataclass(frozen=True, slots=True)
class Step:
    """A kind of step and its checked settings."""

    kind: str
    settings: Spec

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **self.settings.model_dump(mode="json")}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Steps in their order."""

    name: str
    steps: tuple[Step, ...]
    description: str = ""


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def load_recipe(name: str | Path) -> Recipe:
    """A recipe by name, or from a TOML file; the error names the step and the field."""
    path = Path(name)
    if path.suffix != ".toml" and "/" not in str(name):
        if str(name) not in recipe_names():
            raise unknown_name("recipe", str(name), recipe_names(), see="docs/compress.md, or give a .toml file")
        path = RECIPES / f"{name}.toml"
    if not path.is_file():
        why = "it is a folder" if path.is_dir() else "no such file"
        raise TransformError(f"cannot open recipe {path}", why=why, do=f"give a .toml file, or one of {', '.join(recipe_names())}")
    try:
        return parse_recipe(read_toml(path), path.name)
    except TargetSpecError as error:
        raise TransformError(error.what, why=error.why, do="correct it; docs/compress.md has the fields of every step") from error


def parse_recipe(data: dict[str, Any], origin: str = "the recipe") -> Recipe:
    """A recipe from its tables."""
    try:
        file = parse_spec(RecipeFile, data, origin)
        steps = tuple(parse_step(one, f"step {place + 1} of {origin}") for place, one in enumerate(file.step))
    except TargetSpecError as error:
        raise TransformError(error.what, why=error.why, do="correct it; docs/compress.md has the fields of every step") from error
    return Recipe(file.recipe.name, steps, file.recipe.description)


def parse_step(table: dict[str, Any], origin: str) -> Step:
    """One [[step]] table, checked by its kind's own settings."""
    settings = dict(table)
    kind = settings.pop("kind", None)
    if not isinstance(kind, str):
        raise TransformError(f"{origin} has no kind", why="a step is chosen by its kind", do='write e.g. kind = "quantize"')
    return Step(kind, parse_spec(find_step(kind)[0], settings, f"{origin} ({kind})"))


def run_recipe(
    model: nn.Module,
    recipe: Recipe,
    context: Context,
    *,
    work: str | Path | None = None,
    base: Base | None = None,
    require_gain: bool = True,
) -> tuple[nn.Module, Change]:
    """Every step on a copy of the model; results of whole steps are kept in `work` and taken up again from there."""
    inner = context if context.teacher is not None else dataclasses.replace(context, teacher=model)
    folder = Path(work) if work is not None else None
    keys = _keys(model, recipe, context) if folder is not None else []
    done = _resume(folder, recipe, keys, base or model, inner, device_of(model)) if folder is not None else []
    current = done[-1][0] if done else model
    changes = [change for _, change in done]
    before = changes[-1].after if changes else state_of(model, inner)
    for place in range(len(changes), len(recipe.steps)):
        one = recipe.steps[place]
        context.report(f"step {place + 1} of {len(recipe.steps)}: {one.kind}")
        made = run_step(current, one.settings, inner)
        change = change_between(current, made, one.to_dict(), inner, before=before)
        if folder is not None:
            _keep(folder, place, one, keys[place], made.model, base or model, change)
        current, before = made.model, change.after
        changes.append(change)
    whole = _whole(model, current, changes, recipe, inner)
    return current, whole.require_gain() if require_gain else whole


def _whole(model: nn.Module, last: nn.Module, changes: list[Change], recipe: Recipe, context: Context) -> Change:
    """From the first model to the last, timed against each other once more where there were steps between."""
    before, after, interval = changes[0].before, changes[-1].after, changes[0].speedup_interval
    if len(changes) > 1:
        timing = timed(model, last, context)
        before = dataclasses.replace(before, latency=timing.a if timing is not None else None)
        after = dataclasses.replace(after, latency=timing.b if timing is not None else None)
        interval = speedup_interval(timing)
    targets = [change.target_sparsity for change in changes if change.target_sparsity is not None]
    return dataclasses.replace(
        changes[-1],
        name=recipe.name,
        before=before,
        after=after,
        settings={"recipe": recipe.name, "steps": [one.to_dict() for one in recipe.steps]},
        target_sparsity=targets[-1] if targets else None,
        speedup_interval=interval,
        storage_only=tuple(dict.fromkeys(name for change in changes for name in change.storage_only)),
        notes=(),
        details={},
        steps=tuple(changes),
    )


def _keys(model: nn.Module, recipe: Recipe, context: Context) -> list[str]:
    digest = hashlib.sha256(model_digest(model).encode())
    digest.update(json.dumps([context.seed, context.data.name if context.data is not None else None]).encode())
    digest.update(_surroundings(context))
    keys = []
    for one in recipe.steps:
        digest.update(json.dumps(one.to_dict(), sort_keys=True).encode())
        keys.append(digest.hexdigest())
    return keys


def _surroundings(context: Context) -> bytes:
    """Of everything beside the model that decides what a step makes or what is said of it."""
    found, data = [told([context.inputs, context.quality, context.target, context.latency])], context.data
    if data is not None:
        found += [data.kind, str(data.classes), data_digest(data), told(data.prepare), told(data.augment)]
    if context.teacher is not None:
        found.append(model_digest(context.teacher))
    return json.dumps(found).encode()


def _home(folder: Path, place: int, kind: str) -> Path:
    return folder / f"{place + 1}-{kind}"


def _keep(folder: Path, place: int, one: Step, key: str, model: nn.Module, base: Base, change: Change) -> None:
    """The model and its Change, then the key that says they are whole."""
    home = _home(folder, place, one.kind)
    (home / "step.json").unlink(missing_ok=True)
    save_model(model, home, base=base, change=change)
    still = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]  # no model file says so
    write_json(home / "step.json", {"schema": 1, "key": key, "still": still})


def _resume(
    folder: Path, recipe: Recipe, keys: list[str], base: Base, context: Context, device: torch.device
) -> list[tuple[nn.Module, Change]]:
    """The steps that need not be done again; only the last one's model is loaded."""
    homes = [_home(folder, place, one.kind) for place, one in enumerate(recipe.steps)]
    whole = 0
    while whole < len(homes) and _key(homes[whole]) == keys[whole]:
        whole += 1
    try:
        changes = [Change.from_json(read_document(home / "model.json")["change"]) for home in homes[:whole]]
        model = load_model(homes[whole - 1], base, device=device) if whole else None
    except (RidgelineError, KeyError, TypeError) as error:
        context.report(f"{folder} cannot be taken up ({error}): starting again")
        return []
    if model is None:
        return []
    still = _step_file(homes[whole - 1]).get("still", [])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.is_floating_point() and name not in still)
    context.report(f"taking up after step {whole} of {len(homes)}, kept in {folder}")
    return [(model, change) for change in changes]


def _key(home: Path) -> str | None:
    return _step_file(home).get("key")


def _step_file(home: Path) -> dict[str, Any]:
    """What `_keep` wrote beside a step's model; empty where it is missing or broken."""
    try:
        found = json.loads((home / "step.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
