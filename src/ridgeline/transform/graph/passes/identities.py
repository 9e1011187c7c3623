"""Ops that hand on what they got, and reshapes that one reshape says as well.

    view of the same shape, to(same dtype), dropout(eval), permute(0, 1, 2), slice of all     ──> their argument
    clone, x + 0, x * 1, x / 1, cat of one: equal, but new memory                             ──> their argument, where nobody writes either
    reshape(reshape(x)), squeeze(unsqueeze(x))  ──> one reshape, or x       permute(permute(x)), t(t(x))  ──> one permute, or x
    view(x, [size(x, 0), 4, 8])                 ──> view(x, [-1, 4, 8])     size(h, 0), if it is the batch ──> size(input, 0)

Shapes are compared as formulas of the batch, so a rewrite holds at every batch size. An output never becomes an input, a
constant or another output. x + 0 is taken for x: it differs for x = -0.0 only, which becomes +0.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import fx

from ..capture import Captured
from ..edit import aliases, bytes_of, replace_all, returned, storages, tidy, written
from ..manager import PassContext, PassResult, op_name, register, site
from . import identity_rules as rules


@register("identities")
@dataclass(frozen=True, slots=True)
class Identities:
    """Identity and reshape simplification."""

    name: str = "identities"

    def run(self, graph: Captured, context: PassContext) -> PassResult:
        work = _Work(graph)
        rules.join_batch_sizes(graph, work.result)
        for node in list(graph.module.graph.nodes):
            if node.op == "call_function":
                work.simplify(node)
        if work.result.changed:
            tidy(graph)
        return work.result


@dataclass(slots=True)
class _Work:
    """One run: what is written and returned, and what was done so far."""

    graph: Captured
    result: PassResult = field(default_factory=PassResult)
    where: dict[fx.Node, frozenset[fx.Node]] = field(init=False)
    changed: set[fx.Node] = field(init=False)
    outputs: set[fx.Node] = field(init=False)

    def __post_init__(self) -> None:
        self.where, self.changed, self.outputs = storages(self.graph), written(self.graph), returned(self.graph)

    def bases(self, node: fx.Node) -> frozenset[fx.Node]:
        """The storages a node's value may lie in; a node a rule has just made is a view of its arguments."""
        if node not in self.where:
            self.where[node] = frozenset().union(*(self.bases(source) for source in node.all_input_nodes))
        return self.where[node]

    def simplify(self, node: fx.Node) -> None:
        """Apply the first rule that fits."""
        same = rules.same_memory(node)
        if same is not None:
            self._replace(node, same, f"{op_name(node)} that changes nothing")
            return
        equal = rules.equal_value(self.graph, node, self.changed)
        if equal is not None:
            self._replace_copy(node, equal)
            return
        rewrites: tuple[Callable[[Captured, fx.Node], str | None], ...] = (rules.join_permutes, rules.join_reshapes, rules.infer_size)
        for rewrite in rewrites:
            if rewrite is rules.join_reshapes and self.bases(node) & self.changed:
                continue
            before = [node, *(source for source in node.all_input_nodes if aliases(source))]
            place = site(before[::-1], "")
            what = rewrite(self.graph, node)
            if what is not None:
                self.result.changed.append(replace(place, what=what))
                return

    def _replace_copy(self, node: fx.Node, source: fx.Node) -> None:
        """A copy that equals its source: only where nobody could tell the two apart."""
        ours, theirs = self.bases(node), self.bases(source)
        if (ours | theirs) & self.changed:
            self.result.refused.append(site([source, node], f"{op_name(node)} is a copy, and an op writes one of the two"))
        elif ours & self.outputs and (theirs & self.outputs or any(base.op in ("placeholder", "get_attr") for base in theirs)):
            self.result.refused.append(site([source, node], f"{op_name(node)} is an output; its argument is not to be given away"))
        else:
            self._replace(node, source, f"{op_name(node)} that changes nothing", bytes_of(self.graph, node))
            self._moved(node, theirs)

    def _moved(self, node: fx.Node, theirs: frozenset[fx.Node]) -> None:
        """What lay in the memory of `node` now lies in `theirs`."""
        for view, bases in self.where.items():
            if node in bases:
                self.where[view] = (bases - {node}) | theirs
        if node in self.outputs:
            self.outputs |= theirs

    def _replace(self, node: fx.Node, source: fx.Node, what: str, saved: int = 0) -> None:
        self.result.changed.append(site([node], what, saved))
        replace_all(node, source)
        self.graph.module.graph.erase_node(node)
