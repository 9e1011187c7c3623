"""What a search is asked for: everything that decides its results, checked before anything is trained, and kept in run.json.

options ──make_request──> Request (frozen, JSON) ──> run.json; the same request in the same folder goes on where it was

Times of a budget: FINAL_SHARE of it is kept for training the winner, the rest is for the search; both for each seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from ...core.errors import OptionError, nearest
from ...core.spec import Spec
from ...workload.data import Data
from ..budget import Budget, parse_budget
from ..recipe_file import load_recipe
from ..spaces.space import Space
from .folder import read_run
from .objectives import parse_limit, parse_objectives

FINAL_SHARE = 0.5
"""Of a budget in time; what the search leaves over is the final training's too."""
BY_GRADIENT = ("differentiable", "aso-se")
"""Strategies that search inside one supernet instead of asking for networks."""
RECIPES = {"digits": ("digits", "digits")}
OTHER_RECIPES = ("cifar10-quick", "cifar10")
"""(of a candidate, of the winner), by data."""


class Request(Spec):
    """One search."""

    version: Literal[1] = 1
    """Of this specification."""
    space: str
    """Its name."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Of the space, as its genotypes have them."""
    final: dict[str, Any] = Field(default_factory=dict)
    """Settings that differ in the network that ships, e.g. more channels; costs and limits are of that one."""
    data: str
    """Its name."""
    rows: tuple[int, int]
    """Of its training and test split."""
    strategy: str = "model"
    """A name of make_strategy, differentiable or aso-se."""
    strategy_settings: dict[str, Any] = Field(default_factory=dict)
    """The strategy's own."""
    objectives: tuple[str, ...] = ("accuracy",)
    """The first decides the winner."""
    limits: tuple[str, ...] = ()
    """e.g. latency<=2ms."""
    target: str = "cpu"
    """Whose latency and energy."""
    table: str | None = None
    """A latency table's file."""
    table_digest: str | None = None
    """Of that file's content."""
    batch: int = Field(default=1, ge=1)
    """Images of the pass whose latency, energy and FLOPs are meant."""
    dtype: str | None = None
    """Of that pass; float32 where None."""
    measure: bool = False
    """Whether latency is measured on this machine instead of estimated."""
    budget: str = "8trials"
    """40trials, 90s, 10m; for each seed."""
    seeds: tuple[int, ...] = (0,)
    """Searches."""
    epochs: int = Field(default=4, ge=1)
    """A candidate is trained for."""
    recipe: str
    """A candidate is trained by."""
    validation: float = Field(default=0.2, gt=0, lt=1)
    """Share of the training split that scores candidates."""
    train_winner: bool = True
    """Whether the winner is trained on the whole training split and scored on the test split."""
    final_recipe: str
    """By this."""
    final_epochs: int | None = Field(default=None, ge=1)
    """For so many epochs (None: the recipe's own; with a budget in time: as many as fit)."""
    device: str = "cpu"
    """Where networks are trained."""
    chip: str = "rram-64"
    """Of crossbar_accuracy."""
    recipe_hashes: tuple[str, str]
    """Of the two recipes' contents."""

    @model_validator(mode="after")
    def _agrees(self) -> Request:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError("seeds: at least one, each once, from 0 up")
        return self

    @property
    def most(self) -> Budget:
        """Of the search alone, for a seed."""
        whole = parse_budget(self.budget)
        share = 1 - FINAL_SHARE if self.train_winner else 1.0
        return whole if whole.seconds is None else Budget(seconds=whole.seconds * share)

    @property
    def wanted(self) -> list[str]:
        """Every figure a trial must know."""
        return list(dict.fromkeys([*self.objectives, *(parse_limit(text).objective.name for text in self.limits)]))


def make_request(space: Space, data: Data, **options: Any) -> Request:
    """A request from options, or an OptionError that names the first wrong one."""
    candidate, final = RECIPES.get(data.name, OTHER_RECIPES)
    options["objectives"] = tuple(one.name for one in parse_objectives(options.get("objectives", "accuracy")))
    options["limits"] = tuple(parse_limit(text).text for text in options.get("limits", ()))
    parse_budget(options.get("budget", "8trials"))
    if options.get("table") is not None:
        options |= {"table": str(options["table"]), "table_digest": _file_digest(Path(options["table"]))}
    whole = {"recipe": candidate, "final_recipe": options.get("recipe", final), **options}
    whole["recipe_hashes"] = (load_recipe(whole["recipe"]).hash, load_recipe(whole["final_recipe"]).hash)
    try:
        return Request(
            space=space.name, settings=settings_of(space), data=data.name, rows=(len(data.train), len(data.test)), **_known(whole)
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "options"
        shown = f" = {str(first['input'])[:80]!r}" if first["loc"] else ""
        raise OptionError(f"{where}{shown}", why=first["msg"].removeprefix("Value error, "), do="see docs/search.md") from error


def read_request(folder: Path) -> Request:
    """What a run folder was begun with."""
    try:
        return Request.model_validate(read_run(folder)["request"])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise OptionError(f"{where} in {folder / 'run.json'}", why=first["msg"], do="give a folder as a search leaves it") from error


def _known(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in Request.model_fields:
            close = nearest(name, Request.model_fields)
            why = "no such option of a search" + (f"; did you mean {', '.join(close)}?" if close else "")
            raise OptionError(f"{name} = {str(options[name])[:80]!r}", why=why, do="see docs/search.md for what each takes")
    return options


def settings_of(space: Space) -> dict[str, Any]:
    """As the space's genotypes have them."""
    import numpy

    return dict(space.genotype(space.random(numpy.random.default_rng(0)))["settings"])


def _file_digest(path: Path) -> str:
    import hashlib

    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        why = error.strerror or str(error)
        raise OptionError(f"cannot read {path}", why=why, do="give a file of `ridgeline lut build`") from error
