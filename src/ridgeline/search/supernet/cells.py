"""The networks around mixed ops: DARTS's and NAS-Bench-201's, with the frames of their spaces.

Cell: states ──MixedOp of each group──> states, summed as they become known ──> DARTS: nodes side by side; NAS-Bench-201: the last one
Frame: stem, cells, head; `cell_work` [rows, ops]: multiply-adds of every choice over all cells
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..spaces import cells201
from ..spaces.darts import EDGES as DARTS_EDGES
from ..spaces.darts_network import STEM_TIMES, cell_plans, make_head, make_inputs, make_stem
from .layout import Group, group_edges
from .mixed import DENSE, DILATED, POOLS, SEPARABLE, SKIPS, MixedOp, Weighed, without_statistics

Shares = list[Weighed]
"""For each group of a kind of cell."""


class Cell(nn.Module):
    """`inputs` states to start from."""

    def __init__(self, groups: Sequence[Group], mixed: Sequence[MixedOp], inputs: int, *, concatenate: bool) -> None:
        super().__init__()
        self.groups, self.inputs, self.concatenate = tuple(groups), inputs, concatenate
        self.mixed = nn.ModuleList(mixed)

    def forward(self, inputs: Sequence[Tensor], shares: Shares) -> Tensor:
        states: dict[int, Tensor] = {}
        for group, mixed, weighed in zip(self.groups, self.mixed, shares, strict=True):
            first = group.sources[0]
            x = states[first] if first in states else inputs[0] if len(inputs) == 1 else torch.cat(tuple(inputs), dim=1)
            found = mixed(x, weighed).unbind(1)
            for target, one in zip(group.targets, found, strict=True):
                states[target] = states[target] + one if target in states else one
        nodes = [states[target] for target in sorted(states)]
        return torch.cat(nodes, dim=1) if self.concatenate else nodes[-1]


class Frame(nn.Module):
    """What of a supernet is not the architecture: `kinds` of cells in the order of the architecture's rows."""

    kinds: tuple[str, ...]
    groups: dict[str, list[Group]]
    edge_targets: list[int]
    """For every architecture row the node it goes into, numbered across kinds."""
    work: list[list[float]]

    def all_cells(self) -> list[tuple[str, Cell]]:
        raise NotImplementedError

    def forward(self, x: Tensor, shares: dict[str, Shares], recompute: bool) -> Tensor:
        raise NotImplementedError


def run_cell(cell: Cell, inputs: Sequence[Tensor], shares: Shares, recompute: bool) -> Tensor:
    """With autocast off: a cell computes in the dtype of its inputs, its sums too."""
    with torch.autocast(inputs[0].device.type, enabled=False):
        if recompute and torch.is_grad_enabled():
            # Shares and plans go in by closure, tensors by argument; there is no random number to restore, and asking would wait.
            out: Tensor = checkpoint(lambda *states: cell(states, shares), *inputs, use_reentrant=False, preserve_rng_state=False)
            return out
        found: Tensor = cell(inputs, shares)
        return found


class DartsFrame(Frame):
    kinds = ("normal", "reduction")

    def __init__(self, space: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self.groups = {kind: group_edges(DARTS_EDGES, 2, at * len(DARTS_EDGES)) for at, kind in enumerate(self.kinds)}
        self.edge_targets = [at * 10 + target for at in range(2) for _, target in DARTS_EDGES]
        self.stem = without_statistics(make_stem(space.image_channels, STEM_TIMES * space.channels))
        self.plans = cell_plans(space.channels, space.cells, space.image)
        self.older, self.newer, self.cells = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        self.work = [[0.0] * len(space.ops) for _ in range(2 * len(DARTS_EDGES))]
        for plan in self.plans:
            older, newer = (without_statistics(one) for one in make_inputs(plan, affine=False))
            self.older.append(older)
            self.newer.append(newer)
            groups = self.groups[plan.kind]
            mixed = [
                MixedOp(group, space.ops, plan.channels, plan.stride(group.sources[0]), normalise_pools=True, **options) for group in groups
            ]
            self.cells.append(Cell(groups, mixed, 2, concatenate=True))
            _add_work(self.work, groups, mixed, space.ops, plan.size_out**2)
        self.head = make_head(4 * self.plans[-1].channels, space.classes)

    def all_cells(self) -> list[tuple[str, Cell]]:
        return [(plan.kind, cell) for plan, cell in zip(self.plans, self.cells, strict=True)]  # type: ignore[misc]

    def forward(self, x: Tensor, shares: dict[str, Shares], recompute: bool) -> Tensor:
        older = newer = self.stem(x)
        for plan, to_older, to_newer, cell in zip(self.plans, self.older, self.newer, self.cells, strict=True):
            states = (to_older(older), to_newer(newer))
            older, newer = newer, run_cell(cell, states, shares[plan.kind], recompute)  # type: ignore[arg-type]
        logits: Tensor = self.head(newer)
        return logits


class Cells201Frame(Frame):
    kinds = ("cell",)

    def __init__(self, space: Any, options: dict[str, Any]) -> None:
        super().__init__()
        groups = group_edges(cells201.EDGES, 1)
        self.groups = {"cell": groups}
        self.edge_targets = [target for _, target in cells201.EDGES]
        self.stem = without_statistics(cells201.make_stem(space.image_channels, space.channels))
        self.layers = nn.ModuleList()
        self.work = [[0.0] * len(space.ops) for _ in cells201.EDGES]
        for stage, (channels, size) in enumerate(space.stages()):
            if stage:
                self.layers.append(without_statistics(cells201.Reduction(channels // 2, channels)))
            for _ in range(space.cells):
                mixed = [MixedOp(group, space.ops, channels, 1, normalise_pools=False, **options) for group in groups]
                self.layers.append(Cell(groups, mixed, 1, concatenate=False))
                _add_work(self.work, groups, mixed, space.ops, size**2)
        self.head = without_statistics(cells201.make_head(space.channels * 4, space.classes))

    def all_cells(self) -> list[tuple[str, Cell]]:
        return [("cell", layer) for layer in self.layers if isinstance(layer, Cell)]

    def forward(self, x: Tensor, shares: dict[str, Shares], recompute: bool) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = run_cell(layer, (x,), shares["cell"], recompute) if isinstance(layer, Cell) else layer(x)
        logits: Tensor = self.head(x)
        return logits


def _add_work(work: list[list[float]], groups: Sequence[Group], mixed: Sequence[MixedOp], ops: Sequence[str], places: int) -> None:
    for group, one in zip(groups, mixed, strict=True):
        for row in group.rows:
            for column, name in enumerate(ops):
                work[row][column] += places * _work(name, one.channels, one.stride)


def _work(name: str, channels: int, stride: int) -> float:
    """Multiply-adds an output place; for a user's op those of its convolutions are not known: a 3x3 convolution's."""
    if name == "none" or (name in SKIPS and stride == 1):
        return 0.0
    if name in SKIPS:
        return float(channels * channels)
    if name in POOLS:
        return 9.0 * channels
    if name in SEPARABLE:
        return 2.0 * channels * (SEPARABLE[name] ** 2 + channels)
    if name in DILATED:
        return float(channels * (DILATED[name] ** 2 + channels))
    return float(channels * channels * DENSE.get(name, 3) ** 2)
