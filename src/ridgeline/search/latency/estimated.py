"""A table for a target that is not here: each block through the estimate that `ridgeline compare` uses.

    "eyeriss", "rram-64", "h200", file.toml ──> estimate(capture(block)) ──> entries: seconds, joules where the target gives them
                                                estimate(capture(net)) ──> errors of the sum of blocks

Nothing is fitted: what is off is what a network's layers share across blocks (fused epilogues, fixed costs of one pass). These errors are
against the estimator; how far the estimator is from silicon its own benchmarks say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from ...core.errors import OptionError
from ...estimate.processor import estimate
from ...target.load import Target, load_target
from ...workload.capture import capture
from .build import Plan, Report, checked_blocks, distinct_points, identity
from .clock import Conditions, inputs_of
from .fit import errors_of, fit_nonnegative
from .journal import open_journal
from .table import Entry, Errors, LatencyTable

if TYPE_CHECKING:
    from ...core.profile import Total
    from ..spaces.space import Space

TotalOf = Callable[[nn.Module, tuple[Any, ...]], "Total"]


def estimator(target: Target, batch: int) -> TotalOf:
    """From module and input shape to the estimate's totals."""
    conditions = Conditions(batch=batch)

    def total(module: nn.Module, shape: tuple[Any, ...]) -> Total:
        return estimate(capture(module.eval(), tuple(inputs_of(shape, conditions))), target).total

    return total


def estimated_table(space: Space, target: str, batch: int, plan: Plan, journal: Path | None, say: Report) -> LatencyTable:
    """`build_table` for anything but this machine."""
    spec, conditions = load_target(target), Conditions(batch=batch)
    total, blocks = estimator(spec, batch), checked_blocks(space)
    about = {**identity(space, conditions), "machine": spec.name}
    digest = hashlib.sha256(spec.model_dump_json().encode()).hexdigest()
    lengths = {block.key: (3, 4) for block in blocks}  # joules where the target gives them
    with open_journal(journal, {**about, "batch": batch, "target": digest}, lengths) as kept:
        for place, block in enumerate(blocks):
            if block.key not in kept.known(0):
                kept.put(0, {block.key: _numbers(total(block.make(), block.shape))})
            say(f"{place + 1} of {len(blocks)} blocks estimated")
        entries = {block.key: _entry(*kept.known(0)[block.key]) for block in blocks}
    table = LatencyTable(**about, target=target, method="estimated", batch=batch, overhead_s=0.0, entries=entries)
    return table.model_copy(update={"errors": estimated_errors(table, space, total, plan.check, plan.seed, say)})


def _numbers(total: Total) -> tuple[float, ...]:
    known = (float(total.time_s), float(total.bytes), float(total.flops))
    return known if total.energy_j is None else (*known, float(total.energy_j))


def _entry(seconds: float, moved: float, flops: float, energy_j: float | None = None) -> Entry:
    return Entry(seconds=seconds, bytes=int(moved), flops=int(flops), energy_j=energy_j)


def estimated_errors(table: LatencyTable, space: Space, total: TotalOf, nets: int, seed: int, say: Report) -> Errors:
    """The sum of blocks against the estimate of whole networks."""
    points = distinct_points(space, nets, seed)
    whole, flops = [], []
    for place, point in enumerate(points):
        one = total(space.build(point, seed=0), space.input_shape)
        whole.append(float(one.time_s))
        flops.append([1.0, float(one.flops)])
        say(f"{place + 1} of {nets} networks estimated")
    seconds, lines = np.array(whole), np.array(flops)
    if not (seconds > 0).all():
        raise OptionError(f"networks that take no time on {table.target}", why="the estimate of one is 0 s", do="choose another target")
    predicted = np.array([table.predict(space, point) for point in points])
    return errors_of(predicted, lines @ fit_nonnegative(lines, seconds), seconds, points)
