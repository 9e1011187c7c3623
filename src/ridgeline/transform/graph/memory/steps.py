"""Turn the nodes of a graph into steps that run in an arena.

node ──> view of the arena or of a weight     made now, no step at all          (`bound`)
     ──> view of an input or output, in-place op     run as it is
     ──> op with a Writer                     writes into its place in the arena
     ──> any other op                         runs, its result is copied into its place
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.dlpack import from_dlpack

from ..edit import attribute, written_arguments
from .facts import ARENA, Facts, TensorFact, flat, tensors_in
from .lifetimes import homes_of
from .outs import Writer
from .plan import Plan

Env = dict[fx.Node, Any]
Arguments = Callable[[Env], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do at run time."""

    index: int  # of the node in the graph
    node: fx.Node
    run: Callable[[Env], None]


class Builder:
    """Turns nodes into steps; `bound` holds the values that are the same tensors in every run."""

    def __init__(self, module: fx.GraphModule, facts: Facts, writers: dict[str, Writer], layout: Plan, arena: torch.Tensor) -> None:
        self.module, self.facts, self.writers, self.device = module, facts, writers, arena.device
        self.homes = homes_of(module.graph, facts)
        # A storage of its own for each place: as_strided counts from the start of a storage.
        self.places = {
            interval.storage: from_dlpack(arena[offset : offset + interval.bytes])
            for interval, offset in zip(layout.intervals, layout.offsets, strict=True)
        }
        self.bound: Env = {}
        self.copied: set[fx.Node] = set()
        self.steps: list[Step] = []
        with torch.no_grad():
            for index, node in enumerate(module.graph.nodes):
                self.add(index, node)

    def add(self, index: int, node: fx.Node) -> None:
        if node.op == "get_attr":
            self.bound[node] = attribute(self.module, str(node.target))
        if node.op != "call_function":
            return
        writes = bool(written_arguments(node))
        if not writes and not self.facts.tensors[node.name]:
            self.bound[node] = self.facts.values[node.name]
        elif not writes and not self.facts.made_by(node.name) and all(source in self.bound for source in node.all_input_nodes):
            args, kwargs = self.arguments(node)({})
            self.bound[node] = _target(node)(*args, **kwargs)
        else:
            self.steps.append(Step(index, node, self.step(node, writes)))

    def step(self, node: fx.Node, writes: bool) -> Callable[[Env], None]:
        """What to do at run time for a node that computes, writes, or looks at something new in every run."""
        facts, made, value = self.facts.tensors[node.name], self.facts.made_by(node.name), self.facts.values[node.name]
        arguments, target = self.arguments(node), _target(node)
        inside = bool(facts) and all(self.homes[fact.storage] == ARENA and fact.plain for fact in facts)
        if inside:
            self.bound[node] = pytree.tree_map(lambda leaf: self.place(leaf) if isinstance(leaf, TensorFact) else leaf, value)
        if made and inside and not writes and len(made) == len(facts) and node.name in self.writers:
            return _writing(self.writers[node.name], arguments, tensors_in(self.bound[node]))
        if any(self.homes[storage] == ARENA for storage in made):
            self.copied.add(node)
            return self.copying(node, arguments, inside)
        return _calling(node, target, arguments, keep=not inside)

    def place(self, fact: TensorFact) -> torch.Tensor:
        """The tensor of the arena that a fact describes."""
        if fact.storage not in self.places:  # nothing in it
            return torch.empty_strided(fact.size, fact.stride, dtype=fact.dtype, device=self.device)
        return torch.as_strided(self.row(fact), fact.size, fact.stride, fact.offset)

    def row(self, fact: TensorFact) -> torch.Tensor:
        """The whole place of a storage as one row of the fact's dtype."""
        place = self.places[fact.storage]
        width = fact.dtype.itemsize
        return place[: place.numel() // width * width].view(fact.dtype)

    def copying(self, node: fx.Node, arguments: Arguments, inside: bool) -> Callable[[Env], None]:
        """Run the op, copy what belongs into the arena; what leaves the graph is kept as the op made it."""
        facts, target, value = self.facts.tensors[node.name], _target(node), self.facts.values[node.name]
        made = self.facts.made_by(node.name)
        first = {fact.storage: position for position, fact in reversed(list(enumerate(facts))) if fact.storage in made}
        rows = [(position, self.row(facts[position])) for storage, position in first.items() if storage in self.places]

        def run(env: Env) -> None:
            args, kwargs = arguments(env)
            result = target(*args, **kwargs)
            tensors = tensors_in(result)
            for position, row in rows:
                row.copy_(flat(tensors[position]))
            if not inside:
                mine = iter(tensors)
                env[node] = pytree.tree_map(lambda leaf: self.kept(leaf, next(mine)) if isinstance(leaf, TensorFact) else leaf, value)

        return run

    def kept(self, fact: TensorFact, tensor: torch.Tensor) -> torch.Tensor:
        return self.place(fact) if self.homes[fact.storage] == ARENA else tensor

    def arguments(self, node: fx.Node) -> Arguments:
        """The node's arguments at run time; those known now are put in now."""
        known = fx.map_arg((node.args, node.kwargs), lambda source: self.bound.get(source, source))
        if all(source in self.bound for source in node.all_input_nodes):
            return lambda env: known
        return lambda env: fx.map_arg(known, env.__getitem__)


def _writing(writer: Writer, arguments: Arguments, places: list[torch.Tensor]) -> Callable[[Env], None]:
    def run(env: Env) -> None:
        args, kwargs = arguments(env)
        writer(args, kwargs, places)

    return run


def _calling(node: fx.Node, target: Callable[..., Any], arguments: Arguments, keep: bool) -> Callable[[Env], None]:
    def run(env: Env) -> None:
        args, kwargs = arguments(env)
        result = target(*args, **kwargs)
        if keep:
            env[node] = result

    return run


def _target(node: fx.Node) -> Callable[..., Any]:
    assert callable(node.target), "observe() has run this node"
    return node.target
