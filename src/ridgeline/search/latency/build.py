"""A table from a space: measured on this machine, or estimated for a target that is not here.

    "cpu", "cuda" ──> blocks and calibration nets timed in PASSES passes of interleaved rounds (clock.py) ──journal──┐
                      ──fit.py: how blocks add up──> entries, overhead_s ──> errors on nets the fit has not seen ────┼──> LatencyTable
    any other name or file.toml ──> estimated.py ────────────────────────────────────────────────────────────────────┘

Blocks are visited GROUP at a time, since a space may have thousands; a pass goes through all of them, and a block's time is the
least of its passes: what else runs on the machine only ever adds. Where the last pass was still faster for many, the machine was busy,
and more passes follow, at most as many again.
"""

from __future__ import annotations

import random as python_random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ... import __version__
from ...core.errors import OptionError
from ...measure.environment import machine_name
from ...target.load import LOCAL_TARGETS
from .clock import Conditions, Turn, block_turn, inputs_of, mode_named, net_turn, time_in_rounds, under, usual_mode
from .fit import errors_of, fit_nonnegative
from .journal import Journal, open_journal
from .table import Correction, Entry, LatencyTable

if TYPE_CHECKING:
    from ..spaces.space import Block, Point, Space

GROUP, PASSES, BLOCK_ROUNDS, NET_ROUNDS = 64, 4, 3, 3
CALIBRATION_NETS, CHECK_NETS = 16, 12
FASTER, MANY = 0.03, 0.1
"""A pass that made this share of all times this much less than any before it shows that the machine was busy."""
MOST_BLOCKS = 50_000
MOST_MISSES = 500
"""Draws in a row that gave nothing new: the space has no more, or hardly any."""
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and how often."""

    calibration: int = CALIBRATION_NETS
    check: int = CHECK_NETS
    passes: int = PASSES
    block_rounds: int = BLOCK_ROUNDS
    net_rounds: int = NET_ROUNDS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.calibration < 6 or self.check < 2 or min(self.passes, self.block_rounds, self.net_rounds) < 1:
            raise OptionError(
                f"{self.calibration} calibration nets, {self.check} to check, {self.passes} passes",
                why="four terms are fitted and an error needs nets of its own",
                do="take at least 6 calibration nets, 2 to check and 1 pass",
            )


def build_table(
    space: Space,
    target: str = "cpu",
    *,
    batch: int = 1,
    dtype: str = "float32",
    mode: str | None = None,
    threads: int | None = None,
    plan: Plan | None = None,
    journal: Path | None = None,
    report: Report | None = None,
) -> LatencyTable:
    """Every block of `space` on `target`; with a `journal`, a build that was killed goes on where it was.

    `mode` None is graph on cuda, where an eager pass of one sample takes the host's time, not the GPU's; eager on cpu.
    """
    chosen, say = plan or Plan(), report or (lambda message: None)
    if target.partition(":")[0] not in LOCAL_TARGETS:
        from .estimated import estimated_table

        idle = {"dtype": dtype != "float32", "mode": mode is not None, "threads": threads is not None}
        if unused := [name for name, given in idle.items() if given]:
            why = "its table is estimated, not measured: nothing would change"
            raise OptionError(f"{', '.join(unused)} for {target}", why=why, do="leave it out, or build on cpu or cuda")
        return estimated_table(space, target, batch, chosen, journal, say)
    conditions = Conditions(target, batch, dtype, mode_named(mode or usual_mode(target)), threads or torch.get_num_threads())
    blocks, points = checked_blocks(space), distinct_points(space, chosen.calibration + chosen.check, chosen.seed)
    fixed = identity(space, conditions)
    lengths = {f"block {block.key}": (1 if conditions.on_cuda else 2,) for block in blocks} | {
        f"net {place}": (1,) for place in range(len(points))
    }
    with open_journal(journal, {**fixed, **conditions.to_json(), "plan": repr(chosen)}, lengths) as kept:
        passes = _measure(space, blocks, points, conditions, chosen, kept, say)
        times = _combined(kept, passes)
    return _assembled(space, blocks, points, times, chosen, fixed, conditions, say)


def checked_blocks(space: Space) -> list[Block]:
    blocks = space.all_blocks()
    if not 0 < len(blocks) <= MOST_BLOCKS:
        raise OptionError(
            f"space {space.name} has {len(blocks)} blocks", why=f"a table holds 1 to {MOST_BLOCKS}", do="bound the space by its settings"
        )
    return blocks


def distinct_points(space: Space, count: int, seed: int) -> list[Point]:
    """Random points that compute different things."""
    random, found = np.random.default_rng(seed), dict[Any, Any]()
    misses = 0
    while misses < MOST_MISSES:
        point = space.random(random)
        misses = misses + 1 if found.setdefault(space.canonical(point), point) is not point else 0
        if len(found) >= count:
            return list(found.values())
    raise OptionError(
        f"{count} different networks of space {space.name}", why=f"random draws found {len(found)}", do="ask for fewer networks"
    )


def identity(space: Space, conditions: Conditions) -> dict[str, Any]:
    """What the table says of itself before anything is measured."""
    point = space.random(np.random.default_rng(0))
    versions = {"ridgeline": __version__, "torch": str(torch.__version__), "numpy": version("numpy")}
    if conditions.on_cuda and torch.version.cuda:
        versions["cuda"] = str(torch.version.cuda)
    return {"space": space.name, "settings": space.genotype(point)["settings"], "machine": machine_name(conditions.device),
            "versions": versions}  # fmt: skip


def _measure(
    space: Space, blocks: Sequence[Block], points: Sequence[Point], conditions: Conditions, plan: Plan, journal: Journal, say: Report
) -> int:
    """Fill the journal with what it does not know yet; how many passes it holds then."""
    makers: dict[str, Callable[[], Turn]] = {}
    for block in blocks:
        makers[f"block {block.key}"] = lambda block=block: block_turn(block.make(), block.shape, conditions)  # type: ignore[misc]
    nets: dict[str, Callable[[], Turn]] = {}
    for place, point in enumerate(points):
        nets[f"net {place}"] = lambda point=point: net_turn(space.build(point, seed=0), space.input_shape, conditions)  # type: ignore[misc]
    total, done = plan.passes * (len(makers) + len(nets)), 0
    for pass_ in range(2 * plan.passes):
        if pass_ >= plan.passes and _settled(journal, pass_):
            return pass_
        for part, rounds, size in ((makers, plan.block_rounds, GROUP), (nets, plan.net_rounds, 2 * GROUP)):
            names = list(part)
            python_random.Random(plan.seed + pass_).shuffle(names)
            for start in range(0, len(names), size):
                group = names[start : start + size]
                done += len(group)
                if any(name not in journal.known(pass_) for name in group):
                    journal.put(pass_, _timed({name: part[name] for name in group}, conditions, rounds, plan.seed + pass_))
                say(f"pass {pass_ + 1} of {plan.passes}: {done} of {total} timed")
    return 2 * plan.passes


def _settled(journal: Journal, passes: int) -> bool:
    """Whether the last of so many passes found hardly anything faster than those before it; a single one has nothing to be held against."""
    if passes == 1:
        return True
    before, last = _combined(journal, passes - 1), journal.known(passes - 1)
    return sum(last[name][0] < (1 - FASTER) * before[name][0] for name in last) < MANY * len(last)


def _timed(makers: dict[str, Callable[[], Turn]], conditions: Conditions, rounds: int, seed: int) -> dict[str, tuple[float, ...]]:
    with under(conditions):
        return time_in_rounds({name: make() for name, make in makers.items()}, rounds, seed)


def _combined(journal: Journal, passes: int) -> dict[str, tuple[float, ...]]:
    """Each one's least over the passes."""
    names = journal.known(0)
    rows = {name: [journal.known(pass_)[name] for pass_ in range(passes)] for name in names}
    return {name: tuple(min(values) for values in zip(*row, strict=True)) for name, row in rows.items()}


def _assembled(
    space: Space, blocks: Sequence[Block], points: Sequence[Point], times: dict[str, tuple[float, ...]], plan: Plan,
    fixed: dict[str, Any], conditions: Conditions, say: Report,
) -> LatencyTable:  # fmt: skip
    say("counting FLOPs")
    raw = {block.key: times[f"block {block.key}"] for block in blocks}
    counts = {block.key: counted(block, conditions.batch) for block in blocks}
    features = np.array([_features(space, point, raw) for point in points])  # [nets, 4]: 1, blocks, Σ alone, Σ cold
    flops = np.array([[1.0, sum(counts[b.key][1] * b.count for b in space.blocks(point))] for point in points])
    seconds = np.array([times[f"net {place}"][0] for place in range(len(points))])
    known = slice(0, plan.calibration)
    overhead_s, per_block_s, alone, cold = map(float, fit_nonnegative(features[known], seconds[known]))
    by_flops = flops @ fit_nonnegative(flops[known], seconds[known])
    entries = {}
    for block in blocks:
        one, *rest = raw[block.key]
        first = rest[0] if rest else None
        added = per_block_s + alone * one + (cold * first if first is not None else 0.0)
        moved, work = counts[block.key]
        entries[block.key] = Entry(seconds=added, bytes=moved, flops=work, alone_s=one, cold_s=first)
    predicted = np.array([overhead_s + sum(entries[b.key].seconds * b.count for b in space.blocks(point)) for point in points])
    unseen = slice(plan.calibration, None)
    return LatencyTable(
        **fixed, target=conditions.device, method="measured", mode=conditions.mode, batch=conditions.batch, dtype=conditions.dtype,
        threads=0 if conditions.on_cuda else conditions.threads, overhead_s=overhead_s, entries=entries,
        correction=Correction(nets=plan.calibration, per_block_s=per_block_s, alone=alone, cold=cold),
        errors=errors_of(predicted[unseen], by_flops[unseen], seconds[unseen], points[unseen]),
    )  # fmt: skip


def _features(space: Space, point: Point, raw: dict[str, tuple[float, ...]]) -> list[float]:
    blocks = space.blocks(point)
    sums = [sum(raw[b.key][place] * b.count for b in blocks if place < len(raw[b.key])) for place in (0, 1)]
    return [1.0, float(sum(b.count for b in blocks)), *sums]


def counted(block: Block, batch: int) -> tuple[int, int]:
    """(bytes, FLOPs) of one call."""
    from ...workload.capture import capture

    workload = capture(block.make().eval(), tuple(inputs_of(block.shape, Conditions(batch=batch))))
    return workload.bytes, workload.flops
