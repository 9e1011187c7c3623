"""Cells of DARTS (Liu 2019): a normal and a reduction cell of four nodes, each node the sum of two ops on two nodes before it.

    image ──stem 3C──> cell 0 ──> cell 1 ──> … ──> cell N-1 ──> head ──> logits
    reduction cells at N/3 and 2N/3: half the size, C doubled
    a cell's nodes 0, 1: outputs of the two cells before it, brought to C channels; nodes 2..5; output: 2..5 side by side, 4C channels

A node has three decisions: its pair of inputs, and an op for each. `edges` lists all (source, target) of a cell, the order of a supernet's
architecture weights [2 x 14, ops]: normal cell first. Points whose nodes are only numbered differently have one canonical form: such nets
differ in the order of channels alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations, permutations
from typing import Any, ClassVar

import numpy as np
from torch import nn

from ...core.errors import OptionError
from .base import BaseSpace, counted, once
from .darts_network import DartsNetwork, cell_plans, edge_block, frame_blocks, node_blocks
from .genotype import CellGenotype, read_nodes, write_nodes
from .ops import require_ops
from .space import Block, Decision, Flags, Point

OPS = ("none", "max_pool_3x3", "avg_pool_3x3", "skip_connect", "sep_conv_3x3", "sep_conv_5x5", "dil_conv_3x3", "dil_conv_5x5")
KINDS = ("normal", "reduction")
NODES = 4
EDGES = tuple((source, target) for target in range(2, 2 + NODES) for source in range(target))
Node = tuple[tuple[int, int], tuple[int, int]]
"""(source, op) and (source, op), sources rising; op counts from 0 without none."""


@cache
def pairs(node: int) -> tuple[tuple[int, int], ...]:
    """The pairs of inputs node 2..5 can have."""
    return tuple(combinations(range(node), 2))


@dataclass(frozen=True)
class DartsSpace(BaseSpace):
    """`channels` and `cells` as DARTS searches; train with 36 and 20. `ops` may name your own; `drop_path` above 0 adds DropPath."""

    name: ClassVar[str] = "darts"
    edges: ClassVar[tuple[tuple[int, int], ...]] = EDGES
    channels: int = 16
    cells: int = 8
    classes: int = 10
    image: int = 32
    image_channels: int = 3
    ops: tuple[str, ...] = OPS
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        self.check_sizes("channels", "cells", "classes", "image", "image_channels")
        require_ops(self.ops)
        if self.cells < 3:
            raise OptionError(f"cells = {self.cells}", why="with fewer than 3 there is no normal cell", do="give 3 or more")
        if len(set(self.ops)) != len(self.ops) or not self.real_ops:
            raise OptionError(f"ops {', '.join(self.ops)}", why="they must differ, and one must not be none", do="change ops")
        if isinstance(self.drop_path, bool) or not isinstance(self.drop_path, int | float) or not 0 <= self.drop_path < 1:
            raise OptionError(f"drop_path = {self.drop_path!r}", why="a probability below 1 is needed", do="give 0 to 0.9")

    @property
    def real_ops(self) -> tuple[str, ...]:
        """What a net can have: none only competes in a supernet."""
        return tuple(name for name in self.ops if name != "none")

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        found = []
        for kind in KINDS:
            for node in range(2, 2 + NODES):
                found.append(Decision(f"{kind}.{node}.inputs", tuple(f"{first}+{second}" for first, second in pairs(node))))
                found += [Decision(f"{kind}.{node}.{place}", self.real_ops) for place in ("first", "second")]
        return tuple(found)

    def groups(self) -> list[range]:
        return [range(start, start + 3) for start in range(0, len(self.decisions), 3)]

    def nodes(self, point: Point) -> tuple[list[Node], list[Node]]:
        """Of the normal and of the reduction cell."""
        found: list[Node] = []
        for place in range(2 * NODES):
            pair, first, second = point[3 * place : 3 * place + 3]
            sources = pairs(2 + place % NODES)[pair]
            found.append(((sources[0], first), (sources[1], second)))
        return found[:NODES], found[NODES:]

    def point(self, normal: Sequence[Node], reduction: Sequence[Node]) -> Point:
        """The reverse of `nodes`."""
        found: list[int] = []
        for cell in (normal, reduction):
            for node, into in enumerate(cell, 2):
                (low, first), (high, second) = sorted(into)
                found += [pairs(node).index((low, high)), first, second]
        return tuple(found)

    def canonical(self, point: Point) -> Point:
        normal, reduction = self.nodes(point)
        return self.point(_smallest(tuple(normal)), _smallest(tuple(reduction)))

    def features(self, points: Sequence[Point]) -> Flags:
        """Which op each edge of the canonical form has. [n, 2 x 14 x ops without none]"""
        found = np.zeros((len(points), 2, len(EDGES), len(self.real_ops)), dtype=bool)
        for row, point in enumerate(points):
            for kind, cell in enumerate(self.nodes(self.canonical(point))):
                for target, into in enumerate(cell, 2):
                    for source, op in into:
                        found[row, kind, EDGES.index((source, target)), op] = True
        return found.reshape(len(points), -1)

    def derive(self, weights: np.ndarray[Any, Any]) -> Point:
        """DARTS's rule, weights [2 x 14, ops]: each edge's largest op other than none; each node's two edges of largest share."""
        logits = np.asarray(weights, dtype=np.float64).reshape(2, len(EDGES), len(self.ops))
        shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        real = shares[:, :, [place for place, name in enumerate(self.ops) if name != "none"]]
        cells: list[list[Node]] = []
        for kind in range(2):
            cell = []
            for target in range(2, 2 + NODES):
                ranked = sorted(range(target), key=lambda source: (-real[kind, EDGES.index((source, target))].max(), source))
                low, high = sorted(ranked[:2])
                ops = [int(real[kind, EDGES.index((source, target))].argmax()) for source in (low, high)]
                cell.append(((low, ops[0]), (high, ops[1])))
            cells.append(cell)
        return self.point(*cells)

    def named(self, point: Point) -> dict[str, CellGenotype]:
        """Each cell as [(op name, source), …] a node."""
        names, cells = self.real_ops, zip(KINDS, self.nodes(point), strict=True)
        return {kind: [[(names[op], source) for source, op in into] for into in cell] for kind, cell in cells}

    def build_network(self, point: Point) -> nn.Module:
        frame = (self.channels, self.cells, self.classes, self.image, self.image_channels)
        return DartsNetwork(self.named(point), *frame, drop_path=self.drop_path)

    def parts(self, point: Point) -> Iterator[Block]:
        cells, plans = self.named(point), self.plans()
        yield from frame_blocks(plans, self.channels, self.classes, self.input_shape)
        for plan in plans:
            for into in cells[plan.kind]:
                yield from (edge_block(plan, name, source) for name, source in into)
            yield from node_blocks(plan)

    def plans(self) -> list[Any]:
        return cell_plans(self.channels, self.cells, self.image)

    def edge_blocks(self) -> list[list[list[Block]]]:
        """[2 x 14 edges][op] -> the blocks that choice adds to the whole net, with counts; none adds nothing."""
        plans, found = self.plans(), []
        for kind in KINDS:
            mine = [plan for plan in plans if plan.kind == kind]
            for source, _ in EDGES:
                found.append([counted(edge_block(plan, name, source) for plan in mine if name != "none") for name in self.ops])
        return found

    def all_blocks(self) -> list[Block]:
        plans = self.plans()
        parts = list(frame_blocks(plans, self.channels, self.classes, self.input_shape))
        for plan in plans:
            parts += [edge_block(plan, name, source) for name in self.real_ops for source in (0, 2)]
            parts += node_blocks(plan)
        return once(parts)

    def content(self, point: Point) -> dict[str, Any]:
        return {"cells": {kind: write_nodes(nodes) for kind, nodes in self.named(point).items()}}

    def read(self, genotype: dict[str, Any]) -> Point:
        found: dict[str, list[Node]] = {kind: [] for kind in KINDS}
        for kind, nodes in read_nodes(genotype["cells"], KINDS, NODES, first=2).items():
            for into in nodes:
                if len({source for _, source in into}) != 2 or len(into) != 2:
                    raise ValueError("a node has two inputs, from two different nodes")
                (first, low), (second, high) = sorted(into, key=lambda edge: edge[1])
                found[kind].append(((low, self.real_ops.index(first)), (high, self.real_ops.index(second))))
        return self.point(found["normal"], found["reduction"])


@cache
def _orders() -> list[tuple[int, ...]]:
    return list(permutations(range(NODES)))


def _smallest(cell: tuple[Node, ...]) -> list[Node]:
    """Of all numberings of the nodes in which inputs come first, the one whose description is smallest."""
    best: list[Node] | None = None
    for order in _orders():  # order[new place] = old place
        number = {old + 2: new + 2 for new, old in enumerate(order)} | {0: 0, 1: 1}
        nodes: list[Node] = []
        for new, old in enumerate(order):
            first, second = sorted((number[source], op) for source, op in cell[old])
            if second[0] >= new + 2:
                break
            nodes.append((first, second))
        else:
            best = nodes if best is None or nodes < best else best
    assert best is not None  # the order as given is one of them
    return best
