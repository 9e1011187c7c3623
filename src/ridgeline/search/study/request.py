"""What a search is asked for: everything that decides its results, checked before anything is trained, and kept in run.json.

options ──make_request──> Request (frozen, JSON) ──> run.json; the same request in the same folder goes on where it was

Times of a budget: FINAL_SHARE of it is kept for training the winner, the rest is for the search; both for each seed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, ValidationError, model_validator

from ...core.dtypes import canonical
from ...core.errors import OptionError, nearest
from ...core.spec import Spec
from ...target.load import load_target
from ...workload.data import Data
from ...workload.digest import data_digest
from ..budget import Budget, parse_budget
from ..recipe_file import load_recipe
from ..spaces.space import Space
from .folder import read_run
from .objectives import parse_limit, parse_objectives

FINAL_SHARE = 0.5
"""Of a budget in time; what the search leaves over is the final training's too."""
MOST_BATCH = 1 << 16
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
    source: str | None = None
    """A folder of data."""
    data_digest: str
    """Of all its images and labels."""
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
    """Whose latency and energy; the table's where there is one."""
    target_digest: str | None = None
    """Of a target's file."""
    table: str | None = None
    """A latency table's file."""
    table_digest: str | None = None
    """Of that file's content."""
    batch: int = Field(default=1, ge=1, le=MOST_BATCH)
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
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or not 0 <= min(self.seeds) <= max(self.seeds) < 1 << 32:
            raise ValueError("seeds: at least one, each once, 0 to 4,294,967,295")
        if self.strategy == "aso-se" and (self.table or self.final):
            raise ValueError("aso-se has no table and no final sizes: its networks are of no space, and it grows them itself")
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
    check_device(options.get("device", "cpu"))
    whole = {"recipe": candidate, "final_recipe": options.get("recipe", final), **options, **_device_of(options)}
    for name in ("recipe", "final_recipe"):
        whole[name] = _place(whole[name])
    whole["recipe_hashes"] = (load_recipe(whole["recipe"]).hash, load_recipe(whole["final_recipe"]).hash)
    found: dict[str, Any] = {
        "space": space.name,
        "settings": settings_of(space),
        "data": data.name,
        "rows": (len(data.train), len(data.test)),
    }
    try:
        return Request(**found, data_digest=data_digest(data), **_known(whole))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "options"
        shown = f" = {str(first['input'])[:80]!r}" if first["loc"] else ""
        raise OptionError(f"{where}{shown}", why=first["msg"].removeprefix("Value error, "), do="see docs/search.md") from error


def _device_of(options: dict[str, Any]) -> dict[str, Any]:
    """Target, table and dtype of the pass: the table's where nothing else is said."""
    table, target, dtype = (options.get(name) for name in ("table", "target", "dtype"))
    found: dict[str, Any] = {}
    if table is not None:
        from ..latency.table import LatencyTable

        held = LatencyTable.load(table)
        found = {"table": str(Path(table).resolve()), "table_digest": _file_digest(Path(table))}
        target, dtype = target or held.target, dtype or held.dtype
    found |= {"target": _place(target or "cpu"), "dtype": canonical(dtype) if dtype else None}
    if Path(found["target"]).suffix == ".toml":
        found["target_digest"] = hashlib.sha256(load_target(found["target"]).model_dump_json().encode()).hexdigest()[:16]
    return found


def _place(name: Any) -> Any:
    """A file's path as any working directory has it; a name as it is."""
    is_file = isinstance(name, str | Path) and (Path(name).suffix == ".toml" or "/" in str(name))
    return str(Path(name).resolve()) if is_file else name


def check_device(name: str) -> None:
    """Whether networks can be trained there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"device {name!r}", why=str(error).splitlines()[0][:160], do="give cpu or cuda") from error
    many = torch.cuda.device_count() if device.type == "cuda" else 1
    if device.type not in ("cpu", "cuda") or (device.index or 0) >= many:
        why = f"this machine has {many} such" if device.type == "cuda" else "networks are trained on processors and NVIDIA GPUs"
        raise OptionError(f"device {name!r}", why=why, do="give cpu" if not torch.cuda.is_available() else "give cpu or cuda")


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
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        why = error.strerror or str(error)
        raise OptionError(f"cannot read {path}", why=why, do="give a file of `ridgeline lut build`") from error
