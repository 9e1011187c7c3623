"""From a graph and costs to a plan: which ops run channels-last, where a tensor is converted, what that gains.

    graph ──seen──> strides as they are ──find_region──> ops that may run either way
      ──probe──> seconds and result orders ──> Problem (one variable an op, fixed ones for rigid neighbours) ──choose──> labels
    Plan: labels of the nodes, edges to convert, seconds of the graph as it was and as planned

An op that cannot be probed (it raises, or answers in neither order) is pinned: it stays as it was, and the region is found again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .choose import LAST, NEVER, PLAIN, Choice, Problem, Value, choose, conversions, total_seconds
from .cost import Call, Costs, Operand
from .order import OTHER, Frame, Seen, constant_order, dense_strides, label_of, orders, see
from .regions import Kind, Region, find_region, is_convolution, main_tensor

if TYPE_CHECKING:
    from ..capture import Captured


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor on its way to one op."""

    source: fx.Node
    user: fx.Node
    frame: Frame
    produced: int  # variables of the problem
    consumed: int


@dataclass(slots=True)
class Plan:
    """What to do with a graph."""

    region: Region
    seen: dict[fx.Node, Any]
    taken: dict[fx.Node, int]  # the variable of a node's inputs
    given: dict[fx.Node, int]  # the variable of its result; missing where both orders are the same
    edges: list[Edge]
    problem: Problem
    before: tuple[int, ...]  # labels of the graph as it is
    choice: Choice
    pinned: frozenset[str]
    calls: list[Call]

    @property
    def before_s(self) -> float:
        return total_seconds(self.problem, self.before)

    @property
    def after_s(self) -> float:
        return self.choice.seconds

    @property
    def converted(self) -> list[Edge]:
        """Edges whose tensor has to be converted (several of one source may share a copy)."""
        return [edge for edge in self.edges if self.choice.labels[edge.produced] != self.choice.labels[edge.consumed]]


@dataclass(slots=True)
class _Builder:
    graph: Captured
    region: Region
    seen: dict[fx.Node, Any]
    costs: Costs
    calls: dict[fx.Node, Call]
    seconds: list[tuple[float, float]] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    taken: dict[fx.Node, int] = field(default_factory=dict)
    given: dict[fx.Node, int] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)

    def variable(self, seconds: tuple[float, float], before: int) -> int:
        self.seconds.append(seconds)
        self.before.append(before if seconds[before] < math.inf else 1 - before)
        return len(self.seconds) - 1

    def fixed(self, label: int) -> int:
        return self.variable((0.0, math.inf) if label == PLAIN else (math.inf, 0.0), label)


def make_plan(graph: Captured, costs: Costs, pinned: frozenset[str] = frozenset(), most_conversions: float = 0.1) -> Plan | None:
    """The fastest plan with fewer conversions than this fraction of the nodes (two are always allowed); None where no op has a choice."""
    seen = see(graph)
    while True:
        region = find_region(graph, seen, pinned)
        if not region.inside:
            return None
        calls = {node: call_of(region, node, seen) for node in region.inside if region.kinds[node] is Kind.COMPUTE}
        costs.prepare(graph, region, seen, calls)
        builder = _Builder(graph, region, seen, costs, calls)
        stuck = {node.name for node in region.inside if not _add_op(builder, node)}
        if not stuck:
            break
        pinned |= stuck
    for node in graph.module.graph.nodes:
        _add_value(builder, node)
    problem = Problem(tuple(builder.seconds), tuple(builder.values))
    choice = _choose_calmly(problem, most=max(2, math.ceil(most_conversions * len(graph.module.graph.nodes)) - 1))
    return Plan(
        region, seen, builder.taken, builder.given, builder.edges, problem, tuple(builder.before), choice, pinned, list(calls.values())
    )


def _choose_calmly(problem: Problem, most: int) -> Choice:
    """The fastest plan with at most `most` conversions : beyond that, conversions count dearer, step by step.

    Many conversions that each save little are what errors of the timings look like.
    """
    best = choose(problem)
    factor = 1.0
    while sum(conversions(value, best.labels) for value in problem.values) > most and factor < 1024:
        factor *= 1.5
        dearer = tuple(replace(value, convert_s=(factor * value.convert_s[0], factor * value.convert_s[1])) for value in problem.values)
        found = choose(Problem(problem.seconds, dearer))
        best = Choice(found.labels, total_seconds(problem, found.labels), exact=False)
    return best


def _add_op(builder: _Builder, node: fx.Node) -> bool:
    """Variables for a node's inputs and result; False where it cannot take part."""
    region = builder.region
    before = _label_before(builder, node)
    if region.kinds[node] is not Kind.COMPUTE:
        builder.taken[node] = builder.given[node] = builder.variable((0.0, 0.0), before)
        return True
    try:
        probe = builder.costs.probe(builder.calls[node])
    except Exception:  # an op that refuses one of the two orders raises whatever its author chose
        return False
    seconds = tuple(math.inf if result == OTHER else second for second, result in zip(probe.seconds, probe.results, strict=True))
    possible = [label for label in (PLAIN, LAST) if seconds[label] < math.inf]
    results = {probe.results[label] for label in possible}
    if not possible:
        return False
    follows = all(probe.results[label] == label for label in possible)
    if not follows and len(results) > 1:
        return False
    builder.taken[node] = builder.variable((seconds[0], seconds[1]), before)
    if follows:
        builder.given[node] = builder.taken[node]
    elif (result := results.pop()) in (PLAIN, LAST):
        builder.given[node] = builder.fixed(result)
    return True


def _label_before(builder: _Builder, node: fx.Node) -> int:
    """The order a node ran in so far: its result's, else its first input's."""
    frames = [(node, builder.region.outside[node])] if node in builder.region.outside else []
    frames += [(source, builder.region.inside[node]) for source in builder.region.inputs(node, builder.seen)]
    for one, frame in frames:
        found = main_tensor(builder.seen[one])
        label = label_of(found.shape, found.strides, frame) if found is not None else OTHER
        if label in (PLAIN, LAST):
            return label
    return PLAIN


def call_of(region: Region, node: fx.Node, seen: dict[fx.Node, Any]) -> Call:
    """A node as something to time: its tensors by shape and strides, images and constants of their rank in both orders."""
    frame = region.inside[node]
    images = set(region.inputs(node, seen))

    def operand(source: fx.Node) -> Any:
        found = seen[source]
        if not isinstance(found, Seen):
            return found
        strides = (found.strides, found.strides)
        both = orders(frame) if source in images else None
        if is_laid_out(source, found, frame):
            both = constant_order(found.shape, frame, PLAIN), constant_order(found.shape, frame, LAST)
        if both:
            strides = dense_strides(found.shape, both[PLAIN]), dense_strides(found.shape, both[LAST])
        return Operand(found.shape, str(found.dtype).removeprefix("torch."), strides)

    args, kwargs = fx.node.map_arg(node.args, operand), fx.node.map_arg(node.kwargs, operand)
    tags = getattr(node.target, "tags", ())
    return Call(node.target, args, dict(kwargs), region.outside.get(node), torch.Tag.pointwise in tags, is_convolution(node))


def is_laid_out(source: fx.Node, found: Any, frame: Frame) -> bool:
    """Whether a constant is put into the order of the op that uses it: weights of convolutions, image-shaped constants."""
    return source.op == "get_attr" and isinstance(found, Seen) and len(found.shape) == len(frame)


def _add_value(builder: _Builder, node: fx.Node) -> None:
    """The tensor a node makes and all who read it."""
    by_frame: dict[Frame, list[tuple[fx.Node, int]]] = {}
    found = main_tensor(builder.seen.get(node))
    if found is None:
        return
    own = builder.region.outside.get(node)
    for user in node.users:
        if user in builder.region.inside and node in builder.region.inputs(user, builder.seen):
            by_frame.setdefault(builder.region.inside[user], []).append((user, builder.taken[user]))
        elif own is not None and node in builder.given:
            label = label_of(found.shape, found.strides, own)
            if label in (PLAIN, LAST):
                by_frame.setdefault(own, []).append((user, builder.fixed(label)))
    for frame, users in by_frame.items():
        produced = builder.given[node] if own is not None else builder.fixed(label_of(found.shape, found.strides, frame))
        _connect(builder, node, found, frame, produced, users)


def _connect(builder: _Builder, node: fx.Node, found: Seen, frame: Frame, produced: int, users: list[tuple[fx.Node, int]]) -> None:
    """Edges from a tensor to its readers, and what converting it costs."""
    builder.edges.extend(Edge(node, user, frame, produced, consumed) for user, consumed in users)
    shape = tuple(found.shape[dimension] for dimension in orders(frame)[PLAIN])
    convert = builder.costs.convert(shape, str(found.dtype).removeprefix("torch."))
    if isinstance(builder.seen[node], list | tuple):
        convert = NEVER  # a list of tensors cannot be converted, its items can
    tied = [consumed for user, consumed in users if builder.region.kinds[user] is Kind.IN_PLACE and user.args[0] is node]
    free = tuple(consumed for _, consumed in users if consumed not in tied)
    if free:
        builder.values.append(Value(produced, free, convert, shared=node not in builder.region.written))
    builder.values.extend(Value(produced, (consumed,), NEVER) for consumed in tied)
