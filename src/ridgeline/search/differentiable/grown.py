"""The network that aso-se grows: residual cells in stages, every edge one op, opened to all ops while it is searched.

    images ─> stem conv ─> stage 0: C ─> ½ size ─> stage 1: 2C ─> ½ size ─> stage 2: 4C ─> norm, pool, linear ─> logits
    a cell   x + gain · node 3        node j = Σ over i < j of edge (i, j) of node i, node 0 = x        6 edges, as in NAS-Bench-201
    an edge  its op, and ops a growth set beside it; open: Σ share_o op_o in place of its op

    Plan (JSON) ──build──> GrownNet ──open_stage──> mixtures ──close_stage──> the chosen ops, their weights kept
A stage's cells have the same ops, so one row of the architecture stands for an edge of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import OptionError
from ..spaces.ops import make_op, op_names

NODES = 4
EDGES = tuple((source, node) for node in range(1, NODES) for source in range(node))
STAGES = 3
SCHEMA = 1
MOST_CHANNELS, MOST_CELLS, MOST_CLASSES = 4096, 256, 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """All that decides the network's modules; `edges[stage][edge]` names its op first, then the ops set beside it."""

    channels: int
    cells: tuple[int, ...]
    edges: tuple[tuple[tuple[str, ...], ...], ...]
    classes: int
    image_channels: int = 3

    @property
    def depth(self) -> int:
        return sum(self.cells)

    def to_json(self) -> dict[str, Any]:
        settings = {"channels": self.channels, "cells": list(self.cells), "classes": self.classes, "image_channels": self.image_channels}
        return {"schema": SCHEMA, "space": "aso-se", "settings": settings, "stages": [[list(ops) for ops in stage] for stage in self.edges]}

    def with_edge(self, stage: int, edge: int, ops: tuple[str, ...]) -> Plan:
        rows = tuple(ops if index == edge else row for index, row in enumerate(self.edges[stage]))
        return replace(self, edges=tuple(rows if index == stage else other for index, other in enumerate(self.edges)))

    def with_cell(self, stage: int) -> Plan:
        return replace(self, cells=tuple(count + (index == stage) for index, count in enumerate(self.cells)))


def plan_from_json(given: Any) -> Plan:
    """The plan a genotype names; anything else is an OptionError."""
    try:
        settings, stages = given["settings"], given["stages"]
        if given["schema"] != SCHEMA or given["space"] != "aso-se" or set(settings) != {"channels", "cells", "classes", "image_channels"}:
            raise ValueError(f"schema {SCHEMA}, space aso-se and four settings are needed")
        edges = tuple(tuple(tuple(ops) for ops in stage) for stage in stages)
        plan = Plan(settings["channels"], tuple(settings["cells"]), edges, settings["classes"], settings["image_channels"])
        _check(plan)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise OptionError(
            "a genotype of aso-se that cannot be read", why=str(error) or type(error).__name__, do="give one as `Grown.genotype` is written"
        ) from None
    return plan


def _check(plan: Plan) -> None:
    numbers = ((plan.channels, MOST_CHANNELS), (plan.classes, MOST_CLASSES), (plan.image_channels, MOST_CHANNELS))
    for value, most in (*numbers, *((count, MOST_CELLS) for count in plan.cells)):
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"{value!r} where a whole number from 1 to {most} is needed")
    if len(plan.cells) != STAGES or len(plan.edges) != STAGES or any(len(stage) != len(EDGES) for stage in plan.edges):
        raise ValueError(f"{STAGES} stages of {len(EDGES)} edges are needed")
    known = op_names()
    for ops in (ops for stage in plan.edges for ops in stage):
        if not 1 <= len(ops) <= 8 or any(not isinstance(op, str) or op not in known for op in ops):
            raise ValueError(f"{list(ops)!r} where one to eight names of ops are needed")


class Edge(nn.Module):
    """The ops between two nodes; `share` [ops] replaces the first by the mixture while the edge is open."""

    def __init__(self, names: Sequence[str], channels: int) -> None:
        super().__init__()
        self.names = tuple(names)
        self.paths = nn.ModuleList([make_op(name, channels, channels) for name in self.names])
        self.candidates: nn.ModuleList | None = None

    def forward(self, x: Tensor, share: Tensor | None = None) -> Tensor:
        if self.candidates is None or share is None:
            total = self.paths[0](x)
        else:
            parts = [s * op(x) for s, op in zip(share.unbind(), self.candidates, strict=True)]
            total = sum(parts[1:], parts[0])  # not stacked: that would copy, and give up channels-last
        for beside in self.paths[1:]:
            total = total + beside(x)
        return total  # type: ignore[no-any-return]


class Cell(nn.Module):
    """x + gain · what four nodes make of x."""

    def __init__(self, edges: Sequence[Sequence[str]], channels: int, gain: float = 1.0) -> None:
        super().__init__()
        self.edges = nn.ModuleList([Edge(names, channels) for names in edges])
        self.gain = nn.Parameter(torch.full((1,), gain))

    def forward(self, x: Tensor, shares: Tensor | None = None) -> Tensor:
        states = [x]
        for node in range(1, NODES):
            into = [index for index, (_, target) in enumerate(EDGES) if target == node]
            parts = [self.edges[index](states[EDGES[index][0]], None if shares is None else shares[index]) for index in into]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            states.append(total)
        return x + self.gain * states[-1]


class GrownNet(nn.Module):
    """The network of a plan; with `mixture` set, the open stage runs all candidates."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        widths = [plan.channels << stage for stage in range(STAGES)]
        self.stem = nn.Sequential(nn.Conv2d(plan.image_channels, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]))
        self.halves = nn.ModuleList([_half(before, after) for before, after in pairwise(widths)])
        self.stages = nn.ModuleList(
            [nn.ModuleList([Cell(plan.edges[s], width) for _ in range(plan.cells[s])]) for s, width in enumerate(widths)]
        )
        self.tail = nn.Sequential(nn.BatchNorm2d(widths[-1]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(widths[-1], plan.classes)
        self.open_stages: tuple[int, ...] = ()
        self.mixture: nn.Parameter | None = None  # [open stages, edges, ops]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        shares = None if self.mixture is None else self.mixture.softmax(-1)
        for index, stage in enumerate(self.stages):
            if index:
                x = self.halves[index - 1](x)
            row = shares[self.open_stages.index(index)] if shares is not None and index in self.open_stages else None
            for cell in stage:  # type: ignore[attr-defined]
                x = cell(x, row)
        return self.classifier(self.tail(x))  # type: ignore[no-any-return]

    def weight_parameters(self) -> list[nn.Parameter]:
        return [p for name, p in self.named_parameters() if name != "mixture"]


def _half(channels_in: int, channels_out: int) -> nn.Sequential:
    convolution = nn.Conv2d(channels_in, channels_out, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(nn.ReLU(), convolution, nn.BatchNorm2d(channels_out))


def open_stages(net: GrownNet, stages: Sequence[int], ops: Sequence[str], *, head_start: float, seed: int) -> None:
    """Set every op of `ops` on every edge of these stages; an edge's own op keeps its weights and has the share `head_start`."""
    device, tie = net.classifier.weight.device, torch.Generator().manual_seed(seed)
    weights = torch.randn(len(stages), len(EDGES), len(ops), generator=tie) * 1e-3
    bonus = float(torch.logit(torch.tensor(head_start, dtype=torch.float64))) + float(torch.tensor(max(len(ops) - 1, 1)).log())
    for row, stage in enumerate(stages):
        for edge, names in enumerate(net.plan.edges[stage]):
            if names[0] in ops:
                weights[row, edge, list(ops).index(names[0])] += bonus
        width = net.plan.channels << stage
        for cell in net.stages[stage]:  # type: ignore[attr-defined]
            for edge in cell.edges:
                made = [edge.paths[0] if name == edge.names[0] else make_op(name, width, width) for name in ops]
                edge.candidates = nn.ModuleList(made).to(device).train(net.training)
    net.open_stages, net.mixture = tuple(stages), nn.Parameter(weights.to(device))


def close_stages(net: GrownNet, ops: Sequence[str], chosen: Sequence[Sequence[int]]) -> None:
    """Keep one op of every open edge, `chosen[open stage][edge]`, with its weights; the others are gone."""
    for row, stage in zip(chosen, net.open_stages, strict=True):
        for index, op in enumerate(row):
            net.plan = net.plan.with_edge(stage, index, (ops[op], *net.plan.edges[stage][index][1:]))
        for cell in net.stages[stage]:  # type: ignore[attr-defined]
            for edge, op in zip(cell.edges, row, strict=True):
                edge.names = (ops[op], *edge.names[1:])
                edge.paths[0], edge.candidates = edge.candidates[op], None
    net.open_stages, net.mixture = (), None
