"""What a space of architectures is, and the registry of spaces.

    load_space("nb201", cells=5) ──> Space
    Space.random(generator) ──> Point: one index per decision ──build──> nn.Module (fresh weights)
                                        ├──blocks──> [Block]: the parts whose costs add up to the net's; same key, same block
                                        └──genotype──> JSON ──point_of──> (Space, Point)

A space is a frozen dataclass: its fields are its settings, JSON numbers, strings, or tuples of them. `base.BaseSpace` has what most share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import nn

from ...core.errors import OptionError, unknown_name

Point = tuple[int, ...]
"""One index per decision."""
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Shape = tuple[int, ...]
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Decision:
    name: str
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A measured part of a net; `shape` is its input's without the batch (several inputs: a tuple of shapes)."""

    key: str
    make: Callable[[], nn.Module]
    shape: Shape | tuple[Shape, ...]
    count: int = 1


class Space(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def decisions(self) -> tuple[Decision, ...]: ...
    @property
    def input_shape(self) -> Shape: ...

    def random(self, random: np.random.Generator) -> Point: ...

    def mutated(self, point: Point, random: np.random.Generator) -> Point:
        """One decision other than it was, one that makes a difference."""
        ...

    def crossed(self, first: Point, second: Point, random: np.random.Generator) -> Point: ...

    def canonical(self, point: Point) -> Point:
        """Points that compute the same have the same canonical form."""
        ...

    def features(self, points: Sequence[Point]) -> Flags:
        """bool [n, F]; points of one canonical form have the same row."""
        ...

    def build(self, point: Point, *, seed: int | None = None) -> nn.Module: ...

    def blocks(self, point: Point) -> list[Block]:
        """The whole net's, stem and head included, each key once with its count."""
        ...

    def all_blocks(self) -> list[Block]:
        """Every block any net of the space can have, each once."""
        ...

    def genotype(self, point: Point) -> dict[str, Any]: ...

    def from_genotype(self, genotype: dict[str, Any]) -> Point: ...


Factory = Callable[..., Space]
_FACTORIES: dict[str, Factory] = {}


def register_space(name: str, factory: Factory) -> None:
    """`factory(**settings)` gives the space; a name can be taken once."""
    if name in _FACTORIES or name in _builtin():
        raise OptionError(f"space {name!r}", why="a space of that name is registered already", do="choose another name")
    _FACTORIES[name] = factory


def space_names() -> list[str]:
    return sorted({**_builtin(), **_FACTORIES})


def load_space(name: str, /, **settings: Any) -> Space:
    """The space of that name; settings are its own, e.g. `channels=16, cells=8, classes=10, image=32`."""
    factories = {**_builtin(), **_FACTORIES}
    if name not in factories:
        raise unknown_name("space", name, factories, see="`ridgeline.search.spaces.space_names()`")
    factory = factories[name]
    if dataclasses.is_dataclass(factory):
        known = [field.name for field in dataclasses.fields(factory) if field.init]
        for given in settings:
            if given not in known:
                raise unknown_name(f"setting of space {name}", given, known, see="docs/search.md")
    return factory(**{key: _frozen(value) for key, value in settings.items()})


def point_of(genotype: dict[str, Any]) -> tuple[Space, Point]:
    """The space, with its settings, and the point a genotype names; anything else is an OptionError."""
    if not isinstance(genotype, dict) or genotype.get("schema") != SCHEMA or isinstance(genotype.get("schema"), bool):
        raise broken("genotype", f'it must be a JSON object with "schema": {SCHEMA}')
    name, settings = genotype.get("space"), genotype.get("settings")
    if not isinstance(name, str) or not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise broken("genotype", '"space" must be a name and "settings" an object')
    try:
        space = load_space(name, **settings)
    except OptionError:
        raise
    except Exception as error:
        raise broken(f"genotype of space {name!r}", str(error).splitlines()[0]) from None
    return space, space.from_genotype(genotype)


def broken(what: str, why: str) -> OptionError:
    return OptionError(what, why=why, do="give a genotype as `Space.genotype(point)` writes it")


def _frozen(value: Any) -> Any:
    """JSON lists as the tuples settings are."""
    return tuple(_frozen(entry) for entry in value) if isinstance(value, list | tuple) else value


def _builtin() -> dict[str, Factory]:
    from .cells201 import Cells201Space
    from .darts import DartsSpace
    from .macro import MacroSpace
    from .residual import ResidualSpace
    from .transformer import TransformerSpace

    return {"darts": DartsSpace, "nb201": Cells201Space, "macro": MacroSpace, "residual": ResidualSpace, "transformer": TransformerSpace}
