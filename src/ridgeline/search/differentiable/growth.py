"""Which growth a cycle of aso-se makes, and where.

kind    progress towards its limit      wider: log(C / C0) / log(Cmax / C0)   deeper: cells added / allowed   branch: ops added / allowed
        the kind that has come least far; one whose last growth left the validation loss higher waits; ties: more gain per work first
how many  as many as must be made now for all limits to be reached in the cycles left
where   wider: all stages          deeper: the stage with fewest cells, the later of equals
        branch: the edge and op with the largest share that was not chosen, of ops that can start as 0; one an edge
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..spaces.ops import make_op
from .grow_net import KINDS, branch, deeper, last_norm, next_width, wider
from .grown import EDGES, STAGES, GrownNet


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a network may grow; the start counts as no progress."""

    start_channels: int
    start_depth: int
    channels: int
    depth: int
    branches: int


@dataclass(slots=True)
class Record:
    """What growth needs to remember; JSON-ready."""

    gains: dict[str, float] = field(default_factory=dict)  # of the last growth of a kind: fall of the validation loss per work added
    shares: dict[str, list[list[float]]] = field(default_factory=dict)  # stage ──> [edges, ops] at the end of its last search

    def to_json(self) -> dict[str, Any]:
        return {"gains": dict(self.gains), "shares": dict(self.shares)}


def branches_of(net: GrownNet) -> int:
    return sum(len(ops) - 1 for stage in net.plan.edges for ops in stage)


def progress(net: GrownNet, limits: Limits) -> dict[str, float]:
    """0 at the start, 1 at the limit, of each kind."""
    width = math.log(limits.channels / limits.start_channels)
    return {
        "wider": math.log(net.plan.channels / limits.start_channels) / width if width > 0 else 1.0,
        "deeper": _share(net.plan.depth - limits.start_depth, limits.depth - limits.start_depth),
        "branch": _share(branches_of(net), limits.branches),
    }


def _share(done: int, allowed: int) -> float:
    return done / allowed if allowed > 0 else 1.0


def missing(net: GrownNet, limits: Limits) -> int:
    """Growths until every limit is reached."""
    width, steps = net.plan.channels, 0
    while width < limits.channels:
        width, steps = min(next_width(width), limits.channels), steps + 1
    return steps + max(limits.depth - net.plan.depth, 0) + max(limits.branches - branches_of(net), 0)


def choose(net: GrownNet, limits: Limits, gains: Mapping[str, float]) -> str | None:
    """The kind to grow by, None where nothing has room."""
    done = progress(net, limits)
    room = [kind for kind in KINDS if done[kind] < 1.0]
    return min(room, key=lambda kind: (gains.get(kind, 0.0) < 0.0, done[kind], -gains.get(kind, 0.0)), default=None)


def grow(net: GrownNet, kind: str, limits: Limits, record: Record, ops: Sequence[str], seed: int) -> tuple[GrownNet, str] | None:
    """The grown network and what was done to it; None where this kind has no place left."""
    if kind == "wider":
        channels = min(next_width(net.plan.channels), limits.channels)
        return wider(net, channels, seed=seed), f"wider: {net.plan.channels} to {channels} channels"
    if kind == "deeper":
        stage = min(range(STAGES), key=lambda s: (net.plan.cells[s], -s))
        return deeper(net, stage), f"deeper: a cell in stage {stage}"
    place = _branch_place(net, record, ops)
    if place is None:
        return None
    stage, edge, op = place
    source, target = EDGES[edge]
    return branch(net, stage, edge, op), f"branch: {op} from node {source} to {target} in stage {stage}"


def _branch_place(net: GrownNet, record: Record, ops: Sequence[str]) -> tuple[int, int, str] | None:
    can_start_as_zero = {op for op in ops if last_norm(make_op(op, 8, 8)) is not None}
    found = [
        (share, int(stage), edge, op)
        for stage, rows in record.shares.items()
        for edge, row in enumerate(rows)
        for op, share in zip(ops, row, strict=True)
        if op in can_start_as_zero and op not in net.plan.edges[int(stage)][edge] and len(net.plan.edges[int(stage)][edge]) < 2
    ]
    return max(found, key=lambda item: item[0])[1:] if found else None
