"""A space, data and a recipe so small that a whole search takes a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from ridgeline.search.spaces.space import Block, Decision, Flags, Point, register_space, space_names
from ridgeline.workload.data import Data, Split

RECIPE = """
version = 1
name = "tiny"
epochs = 3
batch = 32
learning_rate = 0.05
channels_last = false
mirrored_test = false
"""
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "none": nn.Identity}


@dataclass(frozen=True)
class TinySpace:
    """Linear layers on 4x4 images: how wide, which activation, and a decision that makes no difference."""

    name: ClassVar[str] = "tiny"
    scale: int = 1

    @property
    def decisions(self) -> tuple[Decision, ...]:
        widths = tuple(str(2 * width) for width in range(1, 9))
        return (Decision("width", widths), Decision("activation", tuple(ACTIVATIONS)), Decision("idle", ("a", "b")))

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (1, 4, 4)

    def random(self, random: np.random.Generator) -> Point:
        return tuple(int(random.integers(len(one.choices))) for one in self.decisions)

    def mutated(self, point: Point, random: np.random.Generator) -> Point:
        return ((point[0] + 1 + int(random.integers(7))) % 8, *point[1:])

    def crossed(self, first: Point, second: Point, random: np.random.Generator) -> Point:
        return (first[0], *second[1:])

    def canonical(self, point: Point) -> Point:
        return (*point[:2], 0)

    def features(self, points: Sequence[Point]) -> Flags:
        rows = [np.concatenate([np.arange(8) == point[0], np.arange(3) == point[1]]) for point in points]
        return np.array(rows, dtype=bool)

    def build(self, point: Point, *, seed: int | None = None) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed or 0)
            width = 2 * (point[0] + 1) * self.scale
            activation = list(ACTIVATIONS.values())[point[1]]
            return nn.Sequential(nn.Flatten(), nn.Linear(16, width), activation(), nn.Linear(width, 3))

    def blocks(self, point: Point) -> list[Block]:
        return [Block(f"net/{self.canonical(point)}", lambda: self.build(point), self.input_shape)]

    def all_blocks(self) -> list[Block]:
        return [self.blocks((width, kind, 0))[0] for width in range(8) for kind in range(3)]

    def genotype(self, point: Point) -> dict[str, Any]:
        return {"schema": 1, "space": self.name, "settings": {"scale": self.scale}, "layers": list(point)}

    def from_genotype(self, genotype: dict[str, Any]) -> Point:
        return tuple(genotype["layers"])


def register() -> None:
    if "tiny" not in space_names():
        register_space("tiny", TinySpace)


def tiny_data(rows: int = 160) -> Data:
    """Three classes that a straight line nearly tells apart."""
    generator = torch.Generator().manual_seed(3)
    centres = torch.randn(3, 1, 4, 4, generator=generator)
    targets = torch.arange(rows) % 3
    inputs = centres[targets] + 1.2 * torch.randn(rows, 1, 4, 4, generator=generator)
    half = rows * 3 // 4
    return Data("tiny", "image", 3, Split(inputs[:half], targets[:half]), Split(inputs[half:], targets[half:]))


def tiny_options(folder: Path) -> dict[str, Any]:
    """Of run_search: a moment's training, by the recipe put into the folder."""
    recipe = tiny_recipe(folder)
    return {"recipe": recipe, "final_recipe": recipe, "epochs": 1, "final_epochs": 2, "strategy": "random", "onnx": False}


def tiny_recipe(folder: Path) -> str:
    path = folder / "tiny.toml"
    path.write_text(RECIPE, encoding="utf-8")
    return str(path)
