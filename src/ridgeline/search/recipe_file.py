"""A training recipe: one TOML file with everything that decides what a training ends with, but for model, data and seed.

    load_recipe("cifar10" | "my.toml") ──read, check──> Recipe (frozen)
      .hash      twelve digits of its contents, written beside every result
      .changed(learning_rate=0.3, augment__cutout=8) ──> another Recipe, checked the same

Unknown fields, wrong types and values out of bounds are errors that name the field.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from ..core.errors import OptionError, TargetSpecError, unknown_name
from ..core.spec import Spec, parse_spec, read_toml

RECIPES = Path(__file__).parent / "recipes"


class AugmentTable(Spec):
    """The [augment] table; see train/augment.py."""

    shift: int = Field(default=0, ge=0)
    """Pixels an image is moved by at most, in both directions."""
    border: Literal["zeros", "reflect"] = "reflect"
    """What comes in at the sides."""
    flip: Literal["none", "random", "alternate"] = "none"
    """Mirroring left to right: by chance, or every second epoch."""
    cutout: int = Field(default=0, ge=0)
    """Side of the square that is painted over [pixels]."""
    cutmix: float = Field(default=0.0, ge=0, le=1)
    """Share of the images in which a box shows another image, whose label then counts by the box's area."""
    trivial: bool = False
    """First one of fourteen changes of shape or colour an image, of random strength."""


class Recipe(Spec):
    """Everything that decides what a training ends with, but for model, data and seed."""

    version: Literal[1]
    """Of this format."""
    name: str
    """What results say was used."""
    description: str = ""
    """For people."""
    epochs: int = Field(ge=1)
    """Where the caller gives neither epochs nor seconds."""
    batch: int = Field(ge=1)
    """Rows of one step."""
    optimiser: Literal["sgd", "muon", "adam", "adamw"] = "sgd"
    """See docs/train.md."""
    learning_rate: float = Field(gt=0, allow_inf_nan=False)
    """At the top of the schedule, for this batch."""
    rest_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """muon: rate of vectors, stem and head."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Of sgd and muon."""
    nesterov: bool = True
    """Of sgd and muon."""
    weight_decay: float = Field(default=5e-4, ge=0, allow_inf_nan=False)
    """See docs/train.md for what each optimiser does with it."""
    decay: Literal["all", "matrices"] = "matrices"
    """matrices: none on norms and biases."""
    schedule: Literal["triangle", "onecycle", "cosine", "linear", "constant"] = "triangle"
    """How the rate rises and falls."""
    rise: float = Field(default=0.2, gt=0, lt=1)
    """Share of the steps in which triangle and onecycle rise."""
    final: float = Field(default=0.0, ge=0, le=1)
    """Where triangle, cosine and linear end, as a share of the rate."""
    clip: float | None = Field(default=None, gt=0)
    """Largest norm of all gradients together."""
    smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Of labels."""
    average: float | None = Field(default=None, gt=0, lt=1)
    """Decay of the moving average of the weights that the network ends with."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the passes."""
    channels_last: bool = True
    """Memory layout of images and weights."""
    compile: bool | str = False
    """torch.compile, or the name of its mode."""
    graph: bool = False
    """Both passes as one CUDA graph (on a GPU): for networks of many small layers."""
    mirrored_test: bool = True
    """Whether the mean over each test image and its mirror image is scored as well."""
    augment: AugmentTable = AugmentTable()
    """What is done to training images."""

    @model_validator(mode="after")
    def _agrees(self) -> Recipe:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        if self.graph and self.compile:
            raise ValueError("graph and compile exclude each other")
        return self

    @property
    def hash(self) -> str:
        """Twelve hexadecimal digits of everything but the name and the description."""
        deciding = {name: value for name, value in self.model_dump(mode="json").items() if name not in ("name", "description")}
        for newer in ("cutmix", "trivial"):  # than the first results: a recipe without them keeps the name they know it by
            if not deciding["augment"][newer]:
                del deciding["augment"][newer]
        return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:12]

    def changed(self, **fields: Any) -> Recipe:
        """The same with some fields set anew, checked as a file would be; augment__cutout sets one of [augment]."""
        tables = self.model_dump()
        for name, value in fields.items():
            table, _, inner = name.partition("__")
            if inner and isinstance(tables.get(table), dict):
                tables[table][inner] = value
            else:
                tables[name] = value
        return parse_recipe(tables, f"recipe {self.name}")


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def load_recipe(name: str | Path | Recipe) -> Recipe:
    """A recipe by name or from a TOML file; the error names the field."""
    if isinstance(name, Recipe):
        return name
    path = Path(name)
    if path.suffix != ".toml" and "/" not in str(name):
        if str(name) not in recipe_names():
            raise unknown_name("recipe", str(name), recipe_names(), see="docs/search.md, or give a .toml file")
        path = RECIPES / f"{name}.toml"
    try:
        return parse_recipe(read_toml(path), path.name)
    except TargetSpecError as error:
        raise OptionError(error.what, why=error.why, do=f"give a recipe file, or one of {', '.join(recipe_names())}") from error


def parse_recipe(tables: dict[str, Any], origin: str = "the recipe") -> Recipe:
    """A recipe from its tables."""
    try:
        return parse_spec(Recipe, tables, origin)
    except TargetSpecError as error:
        raise OptionError(error.what, why=error.why, do="correct it; docs/search.md has every field of a recipe") from error
