"""Compute cheap values again instead of keeping them, until a graph's arena fits a budget.

    peak step t: what is alive there, but neither read nor written until a later step u > t?
      made by a cheap op (pointwise, cast, view, norm, a constant mask) from values that can be had at u
         ──> a copy of the op before u; the users from u on read the copy; the first value dies before t
      chosen: what brings most bytes under the budget for the fewest bytes computed again; repeat until the plan fits

The answers do not change by one bit: the same op reads the same values. Ops that draw numbers, and storages some op writes
into, are left alone. A budget that cannot be met is an error that names the tensors at the peak, and the graph stays as it was.
Ref: Chen et al. 2016 (recompute cheap layers); here one value at a time, by measured lifetimes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ....core.errors import TransformError
from ....core.profile import Timing
from ....core.timing import time_callable
from ..check import state_kept
from ..edit import is_random, mutates, tidy
from .facts import ARENA, Facts, copied, observe
from .lifetimes import Interval, homes_of, lifetimes, live_bytes, round_up, touched
from .order import reorder
from .plan import ALIGN, Plan, plan

if TYPE_CHECKING:
    from ..capture import Captured

aten = torch.ops.aten
CHEAP = {
    aten.layer_norm, aten.rms_norm, aten.batch_norm, aten.group_norm, aten.softmax, aten._softmax, aten.embedding,
    aten.to, aten._to_copy, aten.contiguous, aten.clone, aten.reshape, aten.flatten, aten.relu6, aten.type_as, aten.pad,
    aten.full, aten.zeros, aten.ones, aten.arange, aten.full_like, aten.zeros_like, aten.ones_like, aten.cat, aten.stack, aten.mean,
    aten.dropout, aten.constant_pad_nd, aten.one_hot, aten.tril, aten.triu, aten.repeat, aten.repeat_interleave,
}  # fmt: skip
"""Beside ops tagged pointwise and views: ops that read and write each byte a few times."""
CANDIDATES = 8  # the largest idle values at the peak are tried
STEPS = 400  # values computed again, at most


@dataclass(frozen=True, slots=True)
class Recomputed:
    """One value that is computed again."""

    nodes: tuple[str, ...]  # what is computed again
    before: str  # the node that needs it
    bytes: int  # no longer kept


@dataclass(slots=True)
class Rematerialised:
    """What was gained and what it costs. Times are None where not measured."""

    budget_bytes: int
    arena_before_bytes: int
    arena_after_bytes: int
    recomputed: list[Recomputed] = field(default_factory=list)
    recomputed_bytes: int = 0  # written once more in every run
    seconds_before: float | None = None
    seconds_after: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        size = f"arena {self.arena_before_bytes:,} -> {self.arena_after_bytes:,} B, {len(self.recomputed)} values computed again"
        if self.seconds_before is None or self.seconds_after is None:
            return size
        return f"{size}, {self.seconds_before * 1e3:.3g} -> {self.seconds_after * 1e3:.3g} ms"


def rematerialise(
    captured: Captured, budget_bytes: int, *, facts: Facts | None = None, order: bool = True, measure: bool = True
) -> Rematerialised:
    """Edit the graph so that its arena fits `budget_bytes`: first a better order (free), then values computed again."""
    facts = observe(captured) if facts is None else facts
    first = plan(lifetimes(captured, facts))
    report = Rematerialised(budget_bytes, first.arena_bytes, first.arena_bytes)
    if first.arena_bytes <= budget_bytes:
        return report
    timing = _timed(captured) if measure else None
    old = list(captured.module.graph.nodes)
    if order:
        reorder(captured, facts)
    search = _Search(captured, facts, budget_bytes)
    fitted = search.fit()
    if fitted is None:
        error = _infeasible(captured, search.facts, budget_bytes)
        search.undo_all()
        _restore(captured, old)
        raise error
    tidy(captured)
    report.arena_after_bytes = fitted.arena_bytes
    report.recomputed = [edit.what for edit in search.edits]
    report.recomputed_bytes = sum(edit.written_bytes for edit in search.edits)
    if timing is not None:
        report.seconds_before, report.seconds_after = timing.median_s, _timed(captured).median_s
    return report


def _timed(captured: Captured) -> Timing:
    device = captured.inputs[0].device.type if captured.inputs else "cpu"
    with state_kept(captured), torch.no_grad():
        return time_callable(lambda: captured.module(*captured.inputs), device=device, min_repeats=5, budget_s=1.0)


def _restore(captured: Captured, old: list[fx.Node]) -> None:
    """The order as it was."""
    for node in old[:-1]:
        old[-1].prepend(node)
    tidy(captured)


@dataclass(slots=True)
class _Edit:
    """One change of the graph, and how to take it back."""

    copies: dict[fx.Node, fx.Node]  # old → new, in the order they were made
    rewired: list[tuple[fx.Node, fx.Node, fx.Node]]  # (user, old, new)
    facts: Facts  # as they were before
    what: Recomputed
    written_bytes: int

    def undo(self, graph: fx.Graph) -> None:
        for user, old, new in self.rewired:
            user.replace_input_with(new, old)
        for new in reversed(self.copies.values()):
            graph.erase_node(new)


class _Search:
    """Edits the graph step by step; every edit lowers the bytes above the goal."""

    def __init__(self, captured: Captured, facts: Facts, budget: int) -> None:
        self.captured, self.graph, self.facts, self.goal, self.budget = captured, captured.module.graph, facts, budget, budget
        self.edits: list[_Edit] = []

    def fit(self) -> Plan | None:
        """Edit until the planned arena fits; None when no edit helps any more."""
        for _ in range(STEPS):
            intervals = lifetimes(self.captured, self.facts)
            if self.excess(intervals) == 0:
                planned = plan(intervals)
                if planned.arena_bytes <= self.budget:
                    return planned
                self.goal -= planned.arena_bytes - self.budget
            elif not self.improve(intervals):
                return None
        return None

    def excess(self, intervals: list[Interval]) -> int:
        """Bytes above the goal, summed over the steps; copies make steps, so the highest step counts most."""
        over = [size - self.goal for size in live_bytes(intervals, ALIGN) if size > self.goal]
        return max(over, default=0) * (1 << 20) + len(over)

    def improve(self, intervals: list[Interval]) -> bool:
        """Make the best of the edits possible at the peak."""
        now = self.excess(intervals)
        best: tuple[float, int, str, bool] | None = None
        live = live_bytes(intervals, ALIGN)
        peak = live.index(max(live))
        for interval in self.idle(intervals, peak):
            for deep in (False, True):
                edit = self.edit(interval, peak, intervals, deep)
                if edit is None:
                    continue
                gain = now - self.excess(lifetimes(self.captured, self.facts))
                self.undo(edit)
                score = gain / (1 + edit.written_bytes)
                if gain > 0 and (best is None or score > best[0]):
                    best = (score, interval.storage, interval.node, deep)
        if best is None:
            return False
        chosen = next(interval for interval in intervals if interval.storage == best[1])
        done = self.edit(chosen, peak, intervals, best[3])
        assert done is not None, "it was tried just now"
        self.edits.append(done)
        return True

    def idle(self, intervals: list[Interval], peak: int) -> list[Interval]:
        """The largest values alive at the peak that wait there for a later use and are cheap to make."""
        nodes = list(self.graph.nodes)
        busy = touched(nodes[peak], self.facts)
        makers = {node.name: node for node in nodes}
        waiting = [
            interval
            for interval in intervals
            if interval.first < peak < interval.last
            and interval.storage not in busy
            and self.cheap(makers[interval.node], interval.storage)
        ]
        return sorted(waiting, key=lambda interval: -interval.bytes)[:CANDIDATES]

    def cheap(self, node: fx.Node, storage: int) -> bool:
        """Whether the maker of a storage may be run again."""
        if mutates(node) or is_random(node) or storage in self.facts.written:
            return False
        if any(source in self.facts.written for source in touched(node, self.facts)):
            return False
        packet = getattr(node.target, "overloadpacket", None)
        return packet in CHEAP or torch.Tag.pointwise in getattr(node.target, "tags", ())

    def edit(self, interval: Interval, peak: int, intervals: list[Interval], deep: bool) -> _Edit | None:
        """Copy what makes this storage to before its first use after the peak, and let later users read the copy."""
        step = {node: number for number, node in enumerate(self.graph.nodes)}
        later = [node for node, number in step.items() if number > peak and interval.storage in touched(node, self.facts)]
        if not later or any(node.op == "output" for node in later):
            return None
        again = {interval.storage}
        if deep:
            again |= self.also(interval, step[later[0]], intervals)
        rewired: list[tuple[fx.Node, fx.Node, fx.Node]] = []
        copies: dict[fx.Node, fx.Node] = {}
        with self.graph.inserting_before(later[0]):
            for user in later:
                for source in user.all_input_nodes:
                    if step.get(source, peak) < peak and self.looks_at(source, {interval.storage}):
                        new = self.copy(source, again, copies)
                        user.replace_input_with(source, new)
                        rewired.append((user, source, new))
        before = self.facts
        self.facts = copied(self.facts, {new.name: old.name for old, new in copies.items()})
        written = sum(self.facts.storages[storage].bytes for new in copies.values() for storage in self.facts.made_by(new.name))
        what = Recomputed(tuple(old.name for old in copies), later[0].name, interval.bytes)
        return _Edit(copies, rewired, before, what, written)

    def looks_at(self, node: fx.Node, storages: set[int]) -> bool:
        return any(tensor.storage in storages for tensor in self.facts.tensors.get(node.name, ()))

    def copy(self, node: fx.Node, again: set[int], copies: dict[fx.Node, fx.Node]) -> fx.Node:
        """A copy of a node and of all it is made from that is to be computed again."""
        if not self.looks_at(node, again):
            return node
        if node not in copies:
            sources = {source: self.copy(source, again, copies) for source in node.all_input_nodes}
            new = self.graph.node_copy(node, lambda source: sources[source])
            copies[node] = new
        return copies[node]

    def also(self, interval: Interval, use: int, intervals: list[Interval]) -> set[int]:
        """Storages the maker reads that are dead by then and cheap to make: computed again too."""
        known = {span.storage: span for span in intervals}
        makers = {node.name: node for node in self.graph.nodes}
        homes = homes_of(self.graph, self.facts)
        found: set[int] = set()
        waiting = [makers[interval.node]]
        while waiting:
            for storage in touched(waiting.pop(), self.facts):
                span = known.get(storage)
                if span is None or storage in found or storage == interval.storage or homes[storage] != ARENA or span.last >= use:
                    continue
                if self.cheap(makers[span.node], storage):
                    found.add(storage)
                    waiting.append(makers[span.node])
        return found

    def undo(self, edit: _Edit) -> None:
        edit.undo(self.graph)
        self.facts = edit.facts

    def undo_all(self) -> None:
        for edit in reversed(self.edits):
            self.undo(edit)
        self.edits.clear()


def _infeasible(captured: Captured, facts: Facts, budget: int) -> TransformError:
    """Name what is alive at the peak that is left."""
    intervals = lifetimes(captured, facts)
    live = live_bytes(intervals, ALIGN)
    peak = live.index(max(live))
    alive = sorted((interval for interval in intervals if interval.first <= peak <= interval.last), key=_size, reverse=True)
    named = ", ".join(f"{interval.node} {interval.bytes} B" for interval in alive[:6]) + (", …" if len(alive) > 6 else "")
    node = list(captured.module.graph.nodes)[peak]
    over = max(live) - budget
    why = f"at {node.name} {max(live)} B are alive: {named}" if over > 0 else "offsets that fit were not found"
    return TransformError(
        f"a memory budget of {budget} B cannot be met: {max(over, 0)} B over",
        why=why,
        do=f"give a budget of at least {max(live)} B, a smaller batch, or a smaller input",
    )


def _size(interval: Interval) -> int:
    return round_up(interval.bytes, ALIGN)
