"""Run the ops of a graph in an order that keeps fewer bytes alive.

    Captured + Facts ──must_follow──> which node waits for which: data, writes against reads of one storage, random ops in turn
      ──beam search──> order with the lowest peak found ──> graph edited in place, or left as it was when nothing is lower

A node that allocates nothing beyond the peak so far and leaves no more alive than before is run at once: that can only help.
Otherwise the beam keeps the partial orders with the lowest (peak, live bytes). The answers do not change by one bit: the
same ops read the same values. Finding the best order is NP-hard (Sethi 1975).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from ..edit import is_random, mutates, written_arguments
from .facts import ARENA, Facts, observe
from .lifetimes import homes_of, lifetimes, peak_bytes, round_up, touched
from .plan import ALIGN

if TYPE_CHECKING:
    from ..capture import Captured

WIDTHS = (1, 8, 32)  # of the beam: each is tried while time is left
CONSIDERED = 24  # at most this many of the ready nodes are looked at for each partial order
TIME_LIMIT_S = 1.5


@dataclass(frozen=True, slots=True)
class Reordered:
    """What reordering did; the peaks are live bytes, each storage rounded up to 64."""

    peak_before_bytes: int
    peak_after_bytes: int
    moved: int  # nodes that stand elsewhere now


def reorder(captured: Captured, facts: Facts | None = None, *, time_limit_s: float = TIME_LIMIT_S) -> Reordered:
    """Sort the graph, in place, so that its peak is lower; a graph for which nothing lower is found stays as it is."""
    facts = observe(captured) if facts is None else facts
    graph = captured.module.graph
    before = peak_bytes(lifetimes(captured, facts), ALIGN)
    problem = _Problem(graph, facts)
    best: tuple[int, list[int]] | None = None
    start = time.perf_counter()
    spent = 0.0
    for width in WIDTHS:
        if spent * 8 > time_limit_s - (time.perf_counter() - start):
            break
        begun = time.perf_counter()
        found = problem.beam(width)
        spent = time.perf_counter() - begun
        if best is None or found[0] < best[0]:
            best = found
    if best is None or best[0] >= before:
        return Reordered(before, before, 0)
    moved = _apply(graph, [problem.nodes[number] for number in best[1]])
    captured.module.recompile()
    return Reordered(before, peak_bytes(lifetimes(captured, facts), ALIGN), moved)


def _apply(graph: fx.Graph, order: list[fx.Node]) -> int:
    old = [node for node in graph.nodes if node.op == "call_function"]
    last = next(node for node in reversed(graph.nodes) if node.op == "output")
    for node in order:
        last.prepend(node)
    graph.lint()
    return sum(before is not after for before, after in zip(old, order, strict=True))


def must_follow(nodes: list[fx.Node], facts: Facts) -> list[set[int]]:
    """For each call the earlier calls it has to come after."""
    number = {node: i for i, node in enumerate(nodes)}
    waits: list[set[int]] = [{number[source] for source in node.all_input_nodes if source in number} for node in nodes]
    readers: dict[int, list[int]] = {}
    writer: dict[int, int] = {}
    in_turn: int | None = None
    for i, node in enumerate(nodes):
        writes = {tensor.storage for target in written_arguments(node) for tensor in facts.tensors.get(target.name, ())}
        for storage in touched(node, facts) & facts.written:
            if storage in writer:
                waits[i].add(writer[storage])
            if storage in writes:
                waits[i].update(readers.pop(storage, ()))
                writer[storage] = i
            else:
                readers.setdefault(storage, []).append(i)
        if is_random(node) or (mutates(node) and not writes):
            if in_turn is not None:
                waits[i].add(in_turn)
            in_turn = i
        waits[i].discard(i)
    return waits


@dataclass(slots=True)
class _Partial:
    """A partial order: which nodes have run (bits), what is alive, and what may run next."""

    peak: int
    live: int
    done: int
    ready: frozenset[int]
    last: int
    before: _Partial | None


class _Problem:
    """The graph as numbers: bytes each call makes, and which calls must have run before a storage is free."""

    def __init__(self, graph: fx.Graph, facts: Facts) -> None:
        self.nodes = [node for node in graph.nodes if node.op == "call_function"]
        homes = homes_of(graph, facts)
        waits = must_follow(self.nodes, facts)
        self.waits = [sum(1 << j for j in mine) for mine in waits]
        self.followers: list[list[int]] = [[] for _ in self.nodes]
        for i, mine in enumerate(waits):
            for j in mine:
                self.followers[j].append(i)
        self.size = {s: round_up(fact.bytes, ALIGN) for s, fact in enumerate(facts.storages) if homes[s] == ARENA}
        self.touches = [[s for s in touched(node, facts) if s in self.size] for node in self.nodes]
        self.users: dict[int, int] = dict.fromkeys(self.size, 0)
        for i, storages in enumerate(self.touches):
            for s in storages:
                self.users[s] |= 1 << i
        self.makes = [sum(self.size[s] for s in facts.made_by(node.name) if s in self.size) for node in self.nodes]

    def run(self, state: _Partial, i: int) -> tuple[int, int, int]:
        """(peak, live, done) after call i."""
        done = state.done | 1 << i
        highest = state.live + self.makes[i]
        freed = sum(self.size[s] for s in self.touches[i] if not self.users[s] & ~done)
        return max(state.peak, highest), highest - freed, done

    def after(self, state: _Partial, i: int, outcome: tuple[int, int, int]) -> _Partial:
        peak, live, done = outcome
        fresh = [j for j in self.followers[i] if not self.waits[j] & ~done]
        return _Partial(peak, live, done, (state.ready - {i}).union(fresh), i, state)

    def settle(self, state: _Partial) -> _Partial:
        """Run at once whatever cannot hurt."""
        waiting = sorted(state.ready)
        while waiting:
            i = waiting.pop(0)
            outcome = self.run(state, i)
            if outcome[0] == state.peak and outcome[1] <= state.live:
                before = state.ready
                state = self.after(state, i, outcome)
                waiting = sorted({*waiting, *(state.ready - before)})
        return state

    def beam(self, width: int) -> tuple[int, list[int]]:
        """The best order found with this many partial orders kept at a time, and its peak."""
        start = frozenset(i for i, waits in enumerate(self.waits) if not waits)
        states = [self.settle(_Partial(0, 0, 0, start, -1, None))]
        whole = (1 << len(self.nodes)) - 1
        finished: _Partial | None = None
        while states:
            found: dict[int, tuple[int, int, int, _Partial]] = {}
            for state in states:
                for i in sorted(state.ready)[:CONSIDERED]:
                    peak, live, done = self.run(state, i)
                    if done not in found or (peak, live) < found[done][:2]:
                        found[done] = (peak, live, i, state)
            chosen = sorted((peak, live, i, done) for done, (peak, live, i, _) in found.items())[:width]
            moved = [self.settle(self.after(found[done][3], i, (peak, live, done))) for peak, live, i, done in chosen]
            complete = [state for state in (moved or states) if state.done == whole]
            if complete:
                finished = min(complete, key=lambda state: state.peak)
                break
            states = moved
        assert finished is not None, "every node of an acyclic graph becomes ready"
        return finished.peak, self._order(finished)

    def _order(self, state: _Partial | None) -> list[int]:
        order: list[int] = []
        while state is not None and state.last >= 0:
            order.append(state.last)
            state = state.before
        return order[::-1]
