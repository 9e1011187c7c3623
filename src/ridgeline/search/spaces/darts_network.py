"""The network DARTS cells make, and its blocks.

cell_plans(C, cells, image) ──> one CellPlan a cell: channels and sizes in and out, shared by `DartsNetwork` and the blocks
stem: conv3x3 to 3C, batch norm; inputs of a cell: relu, conv1x1, batch norm, or FactorizedReduce where the cell before reduced
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from .base import Concat, Sum, block
from .genotype import CellGenotype
from .ops import DropPath, FactorizedReduce, make_op, relu_conv
from .space import Block, Shape

STEM_TIMES = 3


@dataclass(frozen=True, slots=True)
class CellPlan:
    """`older` and `newer` are the shapes of the outputs of the two cells before; all nodes have `channels`."""

    kind: str
    channels: int
    older: Shape
    newer: Shape

    @property
    def size_in(self) -> int:
        return self.newer[1]

    @property
    def size_out(self) -> int:
        return -(-self.size_in // 2) if self.kind == "reduction" else self.size_in

    def stride(self, source: int) -> int:
        return 2 if self.kind == "reduction" and source < 2 else 1


def cell_plans(channels: int, cells: int, image: int) -> list[CellPlan]:
    older = newer = (STEM_TIMES * channels, image, image)
    plans = []
    for place in range(cells):
        reduction = place in (cells // 3, 2 * cells // 3)
        if reduction:
            channels *= 2
        plan = CellPlan("reduction" if reduction else "normal", channels, older, newer)
        plans.append(plan)
        older, newer = newer, (4 * channels, plan.size_out, plan.size_out)
    return plans


def make_stem(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False), nn.BatchNorm2d(channels_out))


def make_head(channels: int, classes: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def make_inputs(plan: CellPlan, affine: bool = True) -> tuple[nn.Module, nn.Module]:
    """What brings the outputs of the two cells before to this cell's channels and size."""
    newer = relu_conv(plan.newer[0], plan.channels, 1, affine=affine)
    if plan.older[1] != plan.newer[1]:
        return FactorizedReduce(plan.older[0], plan.channels, affine), newer
    return relu_conv(plan.older[0], plan.channels, 1, affine=affine), newer


class DartsCell(nn.Module):
    """`ops` in the order of the genotype: two for each node."""

    def __init__(self, plan: CellPlan, nodes: CellGenotype, drop_path: float) -> None:
        super().__init__()
        self.older, self.newer = make_inputs(plan)
        self.sources = [source for into in nodes for _, source in into]
        edges = [edge for into in nodes for edge in into]
        self.ops = nn.ModuleList([make_op(name, plan.channels, plan.channels, plan.stride(source)) for name, source in edges])
        # a path that is the identity is never dropped: it is what the others are dropped against
        dropped = [drop_path > 0 and not isinstance(op, nn.Identity) for op in self.ops]
        self.drops = nn.ModuleList([DropPath(drop_path) if drop else nn.Identity() for drop in dropped])

    def forward(self, older: Tensor, newer: Tensor) -> Tensor:
        nodes = [self.older(older), self.newer(newer)]
        for place in range(0, len(self.ops), 2):
            first, second = (self.drops[edge](self.ops[edge](nodes[self.sources[edge]])) for edge in (place, place + 1))
            nodes.append(first + second)
        return torch.cat(nodes[2:], dim=1)


class DartsNetwork(nn.Module):
    def __init__(
        self,
        genotype: dict[str, CellGenotype],
        channels: int,
        cells: int,
        classes: int,
        image: int = 32,
        image_channels: int = 3,
        *,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        plans = cell_plans(channels, cells, image)
        self.stem = make_stem(image_channels, STEM_TIMES * channels)
        self.cells = nn.ModuleList([DartsCell(plan, genotype[plan.kind], drop_path) for plan in plans])
        self.head = make_head(4 * plans[-1].channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        older = newer = self.stem(x)
        for cell in self.cells:
            older, newer = newer, cell(older, newer)
        logits: Tensor = self.head(newer)
        return logits


def frame_blocks(plans: list[CellPlan], channels: int, classes: int, input_shape: Shape) -> Iterator[Block]:
    """Everything that is in every net: stem, the cells' inputs, head."""
    wide, last = STEM_TIMES * channels, plans[-1]
    yield block("darts_stem", partial(make_stem, input_shape[0], wide), input_shape, detail=str(wide))
    for plan in plans:
        for place, shape in enumerate((plan.older, plan.newer)):
            reduces = place == 0 and plan.older[1] != plan.newer[1]
            name = "factorized_reduce" if reduces else "conv1x1"
            make = partial(FactorizedReduce, shape[0], plan.channels) if reduces else partial(relu_conv, shape[0], plan.channels, 1)
            yield block(name, make, shape, detail=f"{plan.channels}/s{2 if reduces else 1}")
    shape = (4 * last.channels, last.size_out, last.size_out)
    yield block("darts_head", partial(make_head, shape[0], classes), shape, detail=str(classes))


def edge_block(plan: CellPlan, name: str, source: int) -> Block:
    stride, channels = plan.stride(source), plan.channels
    size = plan.size_in if source < 2 else plan.size_out
    return block(name, partial(make_op, name, channels, channels, stride), (channels, size, size), detail=f"{channels}/s{stride}")


def node_blocks(plan: CellPlan) -> list[Block]:
    """What joins the ops: a sum for each of four nodes, and the output."""
    shape = (plan.channels, plan.size_out, plan.size_out)
    return [block("sum", Sum, shape, shape)] * 4 + [block("concat", Concat, *[shape] * 4)]
