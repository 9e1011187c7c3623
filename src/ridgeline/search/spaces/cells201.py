"""Cells of NAS-Bench-201 (Dong 2020): four nodes, one of five ops on each of six edges.

    image ──stem──> C ──cells──> ──reduce──> 2C ──cells──> ──reduce──> 4C ──cells──> head ──> logits
    node j = Σ over edges (i, j) of op(node i); the cell's output is node 3

Ops: 0 skip, 1 none, 2 conv3x3, 3 conv1x1, 4 avgpool. An edge whose source the input does not reach, or from whose target the output is not
reached, computes nothing: in the canonical form it is none, and no module is built for it (the paper's parameter counts include it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from ...core.errors import OptionError
from .base import BaseSpace, Sum, block, counted, once
from .genotype import CellGenotype, read_nodes, write_nodes
from .ops import Zero, make_op, relu_conv, require_ops
from .space import Block, Decision, Flags, Point

Points = np.ndarray[Any, np.dtype[np.uint8]]
EDGES = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
PATHS = ((2,), (0, 4), (1, 5), (0, 3, 5))
"""From node 0 to node 3, as edges."""
OPS = ("skip", "none", "conv3x3", "conv1x1", "avgpool")
NONE = 1


def canonical_rows(points: Points, none: int = NONE) -> Points:
    """Edges that compute nothing become none; a cell whose output is never reached is none throughout. [N, 6] -> [N, 6]"""
    live = np.zeros(points.shape, dtype=bool)
    for path in PATHS:
        whole = (points[:, path] != none).all(axis=1)
        for edge in path:
            live[:, edge] |= whole
    return np.where(live, points, none).astype(np.uint8)


def feature_rows(points: Points, choices: int = len(OPS), none: int = NONE) -> Flags:
    """One-hot ops of the canonical form, and one-hot sequences of ops along each path. [N, 6] -> [N, F]"""
    cells = canonical_rows(points, none)
    found = [(cells[:, :, None] == np.arange(choices)).reshape(len(cells), -1)]
    for path in PATHS:
        code = (cells[:, path].astype(np.int64) * choices ** np.arange(len(path))).sum(axis=1)
        found.append(code[:, None] == np.arange(choices ** len(path)))
    return np.concatenate(found, axis=1)


def cell_name(point: Sequence[int], ops: Sequence[str] = OPS) -> str:
    """The edges into each node: |conv3x3~0|+|none~0|skip~1|+…"""
    nodes = []
    for node in (1, 2, 3):
        into = [f"{ops[point[place]]}~{source}" for place, (source, target) in enumerate(EDGES) if target == node]
        nodes.append("|" + "|".join(into) + "|")
    return "+".join(nodes)


class Cell(nn.Module):
    """The live edges of a cell; `ops` is keyed by edge, "0-1"."""

    def __init__(self, names: Sequence[str], channels: int) -> None:
        super().__init__()
        self.ops = nn.ModuleDict({_edge(place): make_op(name, channels, channels) for place, name in enumerate(names) if name != "none"})

    def forward(self, x: Tensor) -> Tensor:
        nodes: dict[int, Tensor] = {0: x}
        for target in (1, 2, 3):
            for source in range(target):
                edge = f"{source}-{target}"
                if edge in self.ops and source in nodes:
                    value: Tensor = self.ops[edge](nodes[source])
                    nodes[target] = nodes[target] + value if target in nodes else value
        return nodes[3] if 3 in nodes else x.new_zeros(x.shape)


class Reduction(nn.Module):
    """The residual block of stride 2 between stages."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.first = relu_conv(channels_in, channels_out, 3, stride=2)
        self.second = relu_conv(channels_out, channels_out, 3)
        self.pool = nn.AvgPool2d(2, stride=2, ceil_mode=True)
        self.shortcut = nn.Conv2d(channels_in, channels_out, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shortcut(self.pool(x)) + self.second(self.first(x))
        return out


def make_stem(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False), nn.BatchNorm2d(channels_out))


def make_head(channels: int, classes: int) -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Cells201Network(nn.Module):
    def __init__(self, space: Cells201Space, names: Sequence[str]) -> None:
        super().__init__()
        self.stem = make_stem(space.image_channels, space.channels)
        layers: list[nn.Module] = []
        for stage, (channels, _) in enumerate(space.stages()):
            if stage:
                layers.append(Reduction(channels // 2, channels))
            layers += [Cell(names, channels) for _ in range(space.cells)]
        self.cells = nn.Sequential(*layers)
        self.head = make_head(space.channels * 4, space.classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.cells(self.stem(x)))
        return logits


@dataclass(frozen=True)
class Cells201Space(BaseSpace):
    """`cells` in each of three stages; with other `ops` (one of them none) it is a space of the same shape over your own."""

    name: ClassVar[str] = "nb201"
    channels: int = 16
    cells: int = 5
    classes: int = 10
    image: int = 32
    image_channels: int = 3
    ops: tuple[str, ...] = OPS

    def __post_init__(self) -> None:
        self.check_sizes("channels", "cells", "classes", "image", "image_channels")
        require_ops(self.ops)
        if "none" not in self.ops or not 2 <= len(set(self.ops)) == len(self.ops) <= 255:
            raise OptionError(f"ops {', '.join(self.ops)}", why="two or more different ops are needed, none among them", do="change ops")

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(Decision(f"{source}-{target}", self.ops) for source, target in EDGES)

    @property
    def none(self) -> int:
        return self.ops.index("none")

    def stages(self) -> list[tuple[int, int]]:
        """Channels and size of each."""
        half = -(-self.image // 2)
        return [(self.channels, self.image), (self.channels * 2, half), (self.channels * 4, -(-half // 2))]

    def canonical(self, point: Point) -> Point:
        row = canonical_rows(np.array([point], dtype=np.uint8), self.none)[0]
        return tuple(int(index) for index in row)

    def features(self, points: Sequence[Point]) -> Flags:
        return feature_rows(np.array(points, dtype=np.uint8).reshape(-1, len(EDGES)), len(self.ops), self.none)

    def derive(self, weights: np.ndarray[Any, Any]) -> Point:
        """The largest op of each edge; weights [6, ops]."""
        return tuple(int(index) for index in np.asarray(weights).argmax(axis=1))

    def names(self, point: Point) -> list[str]:
        return [self.ops[index] for index in point]

    def build_network(self, point: Point) -> nn.Module:
        return Cells201Network(self, self.names(self.canonical(point)))

    def parts(self, point: Point) -> Iterator[Block]:
        names = self.names(self.canonical(point))
        yield from self._frame()
        for channels, size in self.stages():
            for _ in range(self.cells):
                yield from (self.op_block(name, channels, size) for name in names if name != "none")
                for node in (1, 2, 3):
                    inputs = sum(name != "none" for name, (_, target) in zip(names, EDGES, strict=True) if target == node)
                    if inputs > 1:
                        yield block("sum", Sum, *[(channels, size, size)] * inputs)
                if all(name == "none" for name in names):
                    yield block("zero", partial(Zero, channels), (channels, size, size))

    def _frame(self) -> Iterator[Block]:
        """Everything that is in every net."""
        stages = self.stages()
        first, (last, last_size) = self.channels, stages[-1]
        yield block("nb201_stem", partial(make_stem, self.image_channels, first), self.input_shape, detail=str(first))
        for (channels_in, size_in), (channels, _) in pairwise(stages):
            yield block("nb201_reduction", partial(Reduction, channels_in, channels), (channels_in, size_in, size_in), detail=str(channels))
        yield block("nb201_head", partial(make_head, last, self.classes), (last, last_size, last_size), detail=str(self.classes))

    def op_block(self, name: str, channels: int, size: int) -> Block:
        return block(name, partial(make_op, name, channels, channels), (channels, size, size), detail=f"{channels}/s1")

    def edge_blocks(self) -> list[list[list[Block]]]:
        """[edge][op] -> the blocks that choice adds to the whole net, with counts; none adds nothing."""
        ops = [
            [self.op_block(name, *stage) for stage in self.stages() for _ in range(self.cells)] if name != "none" else []
            for name in self.ops
        ]
        return [[counted(parts) for parts in ops] for _ in EDGES]

    def all_blocks(self) -> list[Block]:
        parts = list(self._frame())
        for channels, size in self.stages():
            parts += [self.op_block(name, channels, size) for name in self.ops if name != "none"]
            parts += [block("sum", Sum, *[(channels, size, size)] * inputs) for inputs in (2, 3)]
            parts.append(block("zero", partial(Zero, channels), (channels, size, size)))
        return once(parts)

    def content(self, point: Point) -> dict[str, Any]:
        nodes: CellGenotype = [[] for _ in range(3)]
        for name, (source, target) in zip(self.names(point), EDGES, strict=True):
            nodes[target - 1].append((name, source))
        return {"cells": {"cell": write_nodes(nodes)}}

    def read(self, genotype: dict[str, Any]) -> Point:
        nodes = read_nodes(genotype["cells"], ("cell",), 3, first=1)["cell"]
        found = {(source, target): name for target, into in enumerate(nodes, 1) for name, source in into}
        if set(found) != set(EDGES) or sum(map(len, nodes)) != len(EDGES):
            raise ValueError("each node needs one op from every node before it")
        return tuple(self.ops.index(found[edge]) for edge in EDGES)


def _edge(place: int) -> str:
    return "{}-{}".format(*EDGES[place])
