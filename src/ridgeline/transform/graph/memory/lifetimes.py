"""When each storage of a graph is alive, from the facts of one run.

    graph + Facts ──lifetimes──> [Interval(node, storage, bytes, first, last, aliases)]    steps = positions in the graph
      peak live bytes = max over steps of the bytes alive: no arena can be smaller

A storage is alive from the step that makes it to the last step that reads or writes any view of it; what an op reads and
what it writes are alive together. Home "input" and "weight" belong to the caller, "output" leaves the graph: only "arena"
is planned. Sizes are those of the example inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from .facts import ARENA, OUTPUT, Facts, observe

if TYPE_CHECKING:
    from ..capture import Captured


@dataclass(frozen=True, slots=True)
class Interval:
    """One storage and the steps it is alive, both ends included."""

    node: str  # the node that made it
    storage: int
    bytes: int
    first: int
    last: int
    aliases: tuple[str, ...] = ()  # other nodes that look at it


def lifetimes(captured: Captured, facts: Facts | None = None) -> list[Interval]:
    """The intervals of all storages that live and die inside the graph, in the order they are made."""
    facts = observe(captured) if facts is None else facts
    homes = homes_of(captured.module.graph, facts)
    return [interval for interval in _intervals(captured.module.graph, facts) if homes[interval.storage] == ARENA and interval.bytes]


def homes_of(graph: fx.Graph, facts: Facts) -> list[str]:
    """Where each storage lives; what the graph made and returns is "output"."""
    homes = [storage.home for storage in facts.storages]
    returned = next(node for node in reversed(graph.nodes) if node.op == "output")
    for node in returned.all_input_nodes:
        for tensor in facts.tensors[node.name]:
            if homes[tensor.storage] == ARENA:
                homes[tensor.storage] = OUTPUT
    return homes


def _intervals(graph: fx.Graph, facts: Facts) -> list[Interval]:
    """All storages, wherever they live."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    looking: dict[int, list[str]] = {}
    for step, node in enumerate(graph.nodes):
        for tensor in facts.tensors.get(node.name, ()):
            first.setdefault(tensor.storage, step)
            looking.setdefault(tensor.storage, []).append(node.name)
        for storage in touched(node, facts):
            last[storage] = step
    return [
        Interval(
            facts.storages[storage].maker,
            storage,
            facts.storages[storage].bytes,
            start,
            last[storage],
            tuple(name for name in dict.fromkeys(looking[storage]) if name != facts.storages[storage].maker),
        )
        for storage, start in first.items()
    ]


def touched(node: fx.Node, facts: Facts) -> set[int]:
    """The storages a step reads, writes or makes; getitem touches only what it takes out."""
    mine = {tensor.storage for tensor in facts.tensors.get(node.name, ())}
    if node.target is operator.getitem:
        return mine
    return mine.union(tensor.storage for source in node.all_input_nodes for tensor in facts.tensors.get(source.name, ()))


def live_bytes(intervals: Iterable[Interval], align: int = 1) -> list[int]:
    """Bytes alive at each step; each storage rounded up to `align`."""
    chosen = list(intervals)
    if not chosen:
        return [0]
    change = [0] * (max(interval.last for interval in chosen) + 2)
    for interval in chosen:
        size = round_up(interval.bytes, align)
        change[interval.first] += size
        change[interval.last + 1] -= size
    live, now = [], 0
    for difference in change[:-1]:
        now += difference
        live.append(now)
    return live


def peak_bytes(intervals: Iterable[Interval], align: int = 1) -> int:
    """The most bytes alive at one step."""
    return max(live_bytes(intervals, align))


def round_up(size: int, align: int) -> int:
    """The next multiple of `align`."""
    return -(-size // align) * align
