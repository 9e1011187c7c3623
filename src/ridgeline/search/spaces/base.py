"""What spaces of categorical decisions share: drawing, changing and mixing points, features, settings, seeds, lists of blocks.

class MySpace(BaseSpace): frozen dataclass with `name`, `decisions`, `canonical`, `build_network`, `parts`, `all_blocks`, `content`, `read`

groups(): decisions that are inherited together (a node, a layer)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ...core.errors import OptionError
from .space import SCHEMA, Block, Decision, Flags, Point, Shape, broken

LARGEST = {"channels": 4096, "cells": 1000, "classes": 1_000_000, "image": 4096, "image_channels": 1024}


class Sum(nn.Module):
    """The sum of its inputs, left to right."""

    def forward(self, *inputs: Tensor) -> Tensor:
        total = inputs[0]
        for value in inputs[1:]:
            total = total + value
        return total


class Concat(nn.Module):
    """Its inputs side by side along the channels."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.cat(inputs, dim=1)


class BaseSpace:
    name: ClassVar[str]
    image: int
    image_channels: int

    @property
    def decisions(self) -> tuple[Decision, ...]:
        raise NotImplementedError

    @property
    def input_shape(self) -> Shape:
        return (self.image_channels, self.image, self.image)

    def groups(self) -> list[range]:
        return [range(place, place + 1) for place in range(len(self.decisions))]

    def canonical(self, point: Point) -> Point:
        raise NotImplementedError

    def live(self, point: Point) -> Sequence[bool]:
        """Of a canonical point, which decisions make a difference; the others have no features."""
        return [True] * len(point)

    def build_network(self, point: Point) -> nn.Module:
        raise NotImplementedError

    def parts(self, point: Point) -> Iterable[Block]:
        """The net's blocks one by one."""
        raise NotImplementedError

    def content(self, point: Point) -> dict[str, Any]:
        """The genotype's own part."""
        raise NotImplementedError

    def read(self, genotype: dict[str, Any]) -> Point:
        """The point of a genotype; a KeyError, TypeError, ValueError or IndexError means it is broken."""
        raise NotImplementedError

    def checked(self, point: Sequence[int]) -> Point:
        decisions = self.decisions
        if len(point) != len(decisions):
            raise OptionError(
                f"a point of {len(point)} indices", why=f"space {self.name} has {len(decisions)} decisions", do="give one each"
            )
        for index, decision in zip(point, decisions, strict=True):
            if not 0 <= index < len(decision.choices):
                raise OptionError(
                    f"choice {index} of {decision.name}", why=f"it has {len(decision.choices)} choices", do="count from 0 within them"
                )
        return tuple(int(index) for index in point)

    def random(self, random: np.random.Generator) -> Point:
        return tuple(int(random.integers(len(decision.choices))) for decision in self.decisions)

    def mutated(self, point: Point, random: np.random.Generator) -> Point:
        """One decision other than it was, one that makes a difference where there is such."""
        before, decisions, child = self.canonical(point), self.decisions, point
        for place in random.permutation(len(decisions)):
            choices = len(decisions[place].choices)
            if choices == 1:
                continue
            other = (point[place] + 1 + int(random.integers(choices - 1))) % choices
            child = (*point[:place], other, *point[place + 1 :])
            if self.canonical(child) != before:
                return child
        return child

    def crossed(self, first: Point, second: Point, random: np.random.Generator) -> Point:
        """Each group of decisions from one of the two."""
        child: list[int] = []
        for group in self.groups():
            child += (first if random.random() < 0.5 else second)[group.start : group.stop]
        return tuple(child)

    def features(self, points: Sequence[Point]) -> Flags:
        """One-hot choices of the canonical form; a decision without effect has no flag set."""
        decisions = self.decisions
        starts = np.cumsum([0, *(len(decision.choices) for decision in decisions)])
        found = np.zeros((len(points), int(starts[-1])), dtype=bool)
        for row, point in enumerate(points):
            form = self.canonical(point)
            places = np.flatnonzero(self.live(form))
            found[row, starts[places] + np.array(form)[places]] = True
        return found

    def build(self, point: Point, *, seed: int | None = None) -> nn.Module:
        """The net with fresh weights: the same for the same seed; without one, torch's own generator goes on."""
        point = self.checked(point)
        if seed is None:
            return self.build_network(point)
        with torch.random.fork_rng(devices=[]):  # weights are drawn on the CPU
            torch.manual_seed(seed)
            return self.build_network(point)

    def blocks(self, point: Point) -> list[Block]:
        return counted(self.parts(self.checked(point)))

    def genotype(self, point: Point) -> dict[str, Any]:
        return {"schema": SCHEMA, "space": self.name, "settings": self.settings(), **self.content(self.checked(point))}

    def from_genotype(self, genotype: dict[str, Any]) -> Point:
        allowed = {"schema", "space", "settings", *self.content((0,) * len(self.decisions))}
        if not isinstance(genotype, dict) or set(genotype) != allowed:
            raise broken("genotype", f"space {self.name} has exactly the keys {', '.join(sorted(allowed))}")
        if genotype["space"] != self.name or genotype["settings"] != self.settings():
            raise broken("genotype", f"it is of space {genotype['space']!r} or of other settings; `point_of` finds the right space")
        try:
            return self.checked(self.read(genotype))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise broken(f"genotype of space {self.name}", f"{type(error).__name__}: {str(error)[:200] or 'a part is missing'}") from None

    def settings(self) -> dict[str, Any]:
        """As JSON has them."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {field.name: _json(getattr(self, field.name)) for field in fields if field.init}

    def check_sizes(self, *names: str) -> None:
        """Integers from 1 up to what a net can sensibly have: a genotype from elsewhere must not ask for all the memory there is."""
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST[name]:
                raise OptionError(
                    f"{name} = {value!r} of space {self.name}", why=f"it must be an integer of 1 to {LARGEST[name]}", do="change it"
                )


def counted(parts: Iterable[Block]) -> list[Block]:
    """Each key once, with how many there are."""
    found: dict[str, Block] = {}
    for part in parts:
        before = found.get(part.key)
        found[part.key] = dataclasses.replace(part, count=part.count + before.count) if before else part
    return list(found.values())


def once(parts: Iterable[Block]) -> list[Block]:
    """Each key once, counted 1."""
    return [dataclasses.replace(part, count=1) for part in counted(parts)]


def block(name: str, make: Callable[[], nn.Module], *shapes: Shape, detail: str = "") -> Block:
    """Keyed by name, detail and input shapes: `conv3x3/16/s1/16x32x32`."""
    sizes = "+".join("x".join(map(str, shape)) for shape in shapes)
    key = "/".join(filter(None, (name, detail, sizes)))
    return Block(key, make, shapes[0] if len(shapes) == 1 else shapes)


def choice(decision: Decision, value: Any) -> int:
    """The index of a genotype's value among the choices."""
    if not isinstance(value, str | int | float) or str(value) not in decision.choices:
        raise ValueError(f"{decision.name} = {str(value)[:40]!r}; choices: {', '.join(decision.choices)}")
    return decision.choices.index(str(value))


def _json(value: Any) -> Any:
    return [_json(entry) for entry in value] if isinstance(value, tuple) else value
