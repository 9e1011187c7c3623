"""The same supernet, one module for every edge and op: what DARTS's formula says, word for word. The oracle of the batched one.

plain_of(supernet) ──> PlainSupernet with the same weights (copied) and the same architecture weights
pairs(plain, supernet) ──> (plain parameter, batched parameter, index): which part of a batched weight is which plain one
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..spaces.ops import make_op
from .batched import Dense, Family, Reducing, Separable
from .cells import Cell, DartsFrame
from .mixed import POOLS, MixedOp, without_statistics
from .network import Supernet

Index = tuple[int, ...]


class PlainCell(nn.Module):
    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.groups, self.concatenate = cell.groups, cell.concatenate
        self.edges = nn.ModuleDict()
        self.parts = [1]
        for group, mixed in zip(cell.groups, cell.mixed, strict=True):
            assert isinstance(mixed, MixedOp)
            self.parts, self.stride = [mixed.parts], mixed.stride
            for edge, row in enumerate(group.rows):
                self.edges[str(row)] = nn.ModuleList([_op(mixed, edge, column) for column in range(len(mixed.ops))])

    def forward(self, inputs: list[Tensor], shares: Tensor, edge_shares: Tensor | None) -> Tensor:
        states = dict(enumerate(inputs))
        for group in self.groups:
            for edge, row in enumerate(group.rows):
                source, target = group.sources[group.source_place(edge)], group.targets[group.target_place(edge)]
                value = self.edge(states[source], row, shares)
                value = value if edge_shares is None else value * edge_shares[row]
                states[target] = states[target] + value if target in states else value
        nodes = [states[state] for state in range(len(inputs), len(states))]
        return torch.cat(nodes, dim=1) if self.concatenate else nodes[-1]

    def edge(self, x: Tensor, row: int, shares: Tensor) -> Tensor:
        """Σ over ops of share x op(x); with parts, of the first channels, the others beside it, shuffled."""
        ops: Any = self.edges[str(row)]
        parts = self.parts[0]
        worked = x[:, : x.shape[1] // parts]
        value: Tensor = sum(share * op(worked) for share, op in zip(shares[row], ops, strict=True))
        if parts == 1:
            return value
        rest = x[:, x.shape[1] // parts :]
        rest = functional.max_pool2d(rest, 2, 2, ceil_mode=True) if value.shape[2] != x.shape[2] else rest
        return functional.channel_shuffle(torch.cat((value, rest), dim=1), parts)


def _op(mixed: MixedOp, edge: int, column: int) -> nn.Module:
    if f"{edge}:{column}" in mixed.single:
        return copy.deepcopy(mixed.single[f"{edge}:{column}"])
    name = mixed.ops[column]
    made = make_op(name, mixed.channels, mixed.channels, mixed.stride, False)
    if name in POOLS and mixed.normalise_pools:
        made = nn.Sequential(made, nn.BatchNorm2d(mixed.channels, affine=False))
    return without_statistics(made)


class PlainSupernet(nn.Module):
    """In training, policies all and partial."""

    def __init__(self, supernet: Supernet) -> None:
        super().__init__()
        self.architecture = copy.deepcopy(supernet.architecture)
        self.frame = copy.deepcopy(supernet.frame)
        self.cells = nn.ModuleList([PlainCell(cell) for _, cell in supernet.frame.all_cells()])
        for _, cell in self.frame.all_cells():
            cell.mixed = nn.ModuleList()  # the batched weights are not this net's

    def forward(self, x: Tensor) -> Tensor:
        shares = self.architecture.shares()
        edges = self.architecture.edge_shares() if self.architecture.edge_weights is not None else None
        frame: Any = self.frame
        x = frame.stem(x)
        if isinstance(frame, DartsFrame):
            older = newer = x
            for to_older, to_newer, cell in zip(frame.older, frame.newer, self.cells, strict=True):
                older, newer = newer, cell([to_older(older), to_newer(newer)], shares, edges)
            logits: Tensor = frame.head(newer)
            return logits
        cells = iter(self.cells)
        for layer in frame.layers:
            x = next(cells)([x], shares, edges) if isinstance(layer, Cell) else layer(x)
        logits = frame.head(x)
        return logits


def plain_of(supernet: Supernet) -> PlainSupernet:
    weight = next(supernet.parameters())
    plain = PlainSupernet(supernet).to(weight.device, weight.dtype)
    with torch.no_grad():
        for mine, theirs, index in pairs(plain, supernet):
            mine.copy_(theirs[index].view_as(mine))
    return plain


def pairs(plain: PlainSupernet, supernet: Supernet) -> Iterator[tuple[nn.Parameter, nn.Parameter, Index]]:
    """Of the cells; stem, inputs, head and users' ops have the same names in both."""
    for (_, cell), other in zip(supernet.frame.all_cells(), plain.cells, strict=True):
        for group, mixed in zip(cell.groups, cell.mixed, strict=True):
            for family in mixed.families:  # type: ignore[union-attr]
                for place, column in enumerate(family.ops):
                    for edge, row in enumerate(group.rows):
                        op: Any = other.edges[str(row)][column]  # type: ignore[index]
                        convolutions = [one.weight for one in op.modules() if isinstance(one, nn.Conv2d)]
                        yield from zip(convolutions, *zip(*_parts(family, place, edge), strict=True), strict=True)


def _parts(family: Family, place: int, edge: int) -> list[tuple[nn.Parameter, Index]]:
    """The batched weights of one branch, in the order of its convolutions."""
    if isinstance(family, Separable):
        found: list[tuple[nn.Parameter, Index]] = []
        for stage, matrices in enumerate(family.matrices):
            depthwise: Any = family.depthwise[stage]
            found += [(depthwise[place], (edge,)), (matrices, (place * family.group.edges + edge,))]
        return found
    if isinstance(family, Dense):
        return [(family.weight, (edge,))]
    assert isinstance(family, Reducing)
    return [(family.even, (edge,)), (family.odd, (edge,))]
