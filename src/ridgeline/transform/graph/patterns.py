"""A small matcher: a formula written as a tree of calls, looked for in a graph of aten ops.

    Call(MUL, Input("x"), Call(SIGMOID, Input("x")), swap=True)          x * sigmoid(x), in either order
        │ Scene(graph).match(pattern, node)       goes from the result towards the inputs, trying both orders of `swap`
        ▼
    Match(root, inside, outside, names)           names["x"]: the node;  a name met twice must be the same node
        │ scene.objection(match, "x")             another consumer inside, a write in between, a narrower dtype: the reason, or None
        ▼
    replace(scene, match, new)                    the result's users use `new`; what nobody reads any more is erased

Between two calls of a pattern may stand what changes no value (dropout outside training, contiguous, a cast to the same dtype) and
casts between floats; `objection` refuses those that lose digits. An input is taken below such nodes: they may have other consumers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .edit import aliases, argument, bytes_of, constant, is_op, mutates, same_sizes, storages, update_value, written_arguments

if TYPE_CHECKING:
    from .capture import Captured

aten = torch.ops.aten
ADD = (aten.add, aten.add_)
MUL = (aten.mul, aten.mul_, aten.multiply)
DIV = (aten.div, aten.div_, aten.divide, aten.true_divide)
CASTS = (aten.to, aten._to_copy, aten.type_as)
COPIES = (aten.contiguous, aten.clone, aten.alias, aten.detach, aten.lift_fresh, aten.expand, aten.view, aten.reshape)


@dataclass(frozen=True, slots=True)
class Input:
    """Any node, by a name; the same name is the same node."""

    name: str


@dataclass(frozen=True, slots=True)
class Number:
    """A number of the graph: a Python one, or a constant of one element. `equals`: this one, to 6 digits."""

    name: str = ""
    equals: float | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one of these ops. `args` are patterns of its first arguments; `fixed` what others must be, by schema name."""

    ops: tuple[Any, ...]
    args: tuple[Pattern, ...]
    swap: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, ops: Any, *args: Pattern, swap: bool = False, **fixed: Any) -> Call:
        return cls(ops if isinstance(ops, tuple) else (ops,), args, swap, fixed)


@dataclass(frozen=True, slots=True)
class Either:
    """The first of these that leads to a match."""

    choices: tuple[Pattern, ...]

    @classmethod
    def of(cls, *choices: Pattern) -> Either:
        return cls(choices)


Pattern = Input | Number | Call | Either


def product(left: Pattern, right: Pattern) -> Call:
    return Call.of(MUL, left, right, swap=True)


def total(left: Pattern, right: Pattern) -> Call:
    return Call.of(ADD, left, right, swap=True, alpha=1)


@dataclass(frozen=True, slots=True)
class Match:
    """Where a pattern was found."""

    names: Mapping[str, Any]
    inside: tuple[fx.Node, ...]  # the result first
    outside: tuple[fx.Node, ...]  # casts and copies of inputs that were looked through

    @property
    def root(self) -> fx.Node:
        return self.inside[0]


class Scene:
    """A graph as it was when last looked at, and the questions patterns ask of it."""

    def __init__(self, graph: Captured) -> None:
        self.graph = graph
        self.order: dict[fx.Node, int] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look at the graph again: after every change."""
        self.order = {node: number for number, node in enumerate(self.graph.module.graph.nodes)}
        for name in ("_storages", "_writes"):
            self.__dict__.pop(name, None)

    def match(self, pattern: Pattern, node: fx.Node) -> Match | None:
        """The pattern with `node` as its result."""
        return next(self.matches(pattern, node), None)

    def matches(self, pattern: Pattern, node: fx.Node) -> Iterator[Match]:
        """All the ways the pattern has `node` as its result: products and sums read in either order."""
        if isinstance(pattern, Call) and not is_op(node, *pattern.ops):
            return
        yield from self._found(pattern, node, Match({}, (), ()))

    def _found(self, pattern: Pattern, value: Any, so_far: Match) -> Iterator[Match]:
        if isinstance(pattern, Either):
            for choice in pattern.choices:
                yield from self._found(choice, value, so_far)
        elif isinstance(pattern, Number):
            number = self.number(value)
            if number is not None and (pattern.equals is None or abs(number - pattern.equals) <= 1e-6 * abs(pattern.equals)):
                yield Match({**so_far.names, pattern.name: number}, so_far.inside, so_far.outside)
        elif isinstance(value, fx.Node) and isinstance(pattern, Input):
            node, passed = below(value, narrowing=False)
            if so_far.names.get(pattern.name, node) is node:
                yield Match({**so_far.names, pattern.name: node}, so_far.inside, (*so_far.outside, *passed))
        elif isinstance(value, fx.Node) and isinstance(pattern, Call):
            yield from self._calls(pattern, value, so_far)

    def _calls(self, pattern: Call, value: fx.Node, so_far: Match) -> Iterator[Match]:
        node, passed = below(value, stop=pattern.ops)
        if not is_op(node, *pattern.ops) or len(node.args) < len(pattern.args):
            return
        if any(argument(node, name, wanted) != wanted for name, wanted in pattern.fixed.items()):
            return
        here = Match(so_far.names, (*so_far.inside, *passed, node), so_far.outside)
        given = node.args[: len(pattern.args)]
        for args in (given, given[::-1]) if pattern.swap else (given,):
            yield from self._all(tuple(zip(pattern.args, args, strict=True)), here)

    def _all(self, pairs: Sequence[tuple[Pattern, Any]], so_far: Match) -> Iterator[Match]:
        if not pairs:
            yield so_far
            return
        (pattern, value), *rest = pairs
        for found in self._found(pattern, value, so_far):
            yield from self._all(rest, found)

    def number(self, value: Any) -> float | None:
        """A Python number, or what a constant of one element holds."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        tensor = constant(self.graph, below(value)[0]) if isinstance(value, fx.Node) else None
        return float(tensor) if tensor is not None and tensor.numel() == 1 and not tensor.is_meta else None

    def objection(self, match: Match, *inputs: str) -> str | None:
        """Why a match must stay as it is; None where it may be replaced. `inputs`: names whose dtype the arithmetic must not fall below."""
        leaves = [match.names[name] for name in inputs]
        return (
            self.consumers(match.inside)
            or self.disturbed(match, [leaf for leaf in match.names.values() if isinstance(leaf, fx.Node)])
            or narrower((*match.inside, *match.outside), leaves)
        )

    def consumers(self, inside: Sequence[fx.Node]) -> str | None:
        """A node other than the result (the first) that something else reads too."""
        known = set(inside)
        for node in inside[1:]:
            if not set(node.users) <= known:
                return f"{node.name} has {len(node.users)} consumers"
        return None

    def disturbed(self, match: Match, leaves: Sequence[fx.Node]) -> str | None:
        """An op that writes memory the match reads, between its first read and its result; or writes the result."""
        if not self._writes:
            return None
        nodes = [*match.inside, *match.outside]
        first, last = min(self.order[node] for node in nodes), self.order[match.root]
        outside = {base for leaf in leaves for base in self._storages[leaf]}
        touched = outside | {base for node in nodes for base in self._storages[node]}
        for writer, bases in self._writes:
            own = writer in match.inside
            if first <= self.order[writer] <= last and bases & (outside if own else touched):
                return f"{writer.name} writes what it reads"
            if not own and bases & self._storages[match.root]:
                return f"{writer.name} writes its result in place"
        return None

    @cached_property
    def _storages(self) -> dict[fx.Node, frozenset[fx.Node]]:
        return storages(self.graph)

    @cached_property
    def _writes(self) -> list[tuple[fx.Node, frozenset[fx.Node]]]:
        found = []
        for node in self.order:
            if mutates(node):
                found.append((node, frozenset(base for target in written_arguments(node) for base in self._storages[target])))
        return found


def given(node: Any, index: int) -> Any:
    """One positional argument of a call (fx types them too widely to work with)."""
    return node.args[index]


def below(node: fx.Node, *, narrowing: bool = True, stop: tuple[Any, ...] = ()) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """What a node holds, looked for through copies and float casts; `narrowing=False` stops at casts that lose digits."""
    passed: list[fx.Node] = []
    while not (stop and is_op(node, *stop)) and (changes_nothing(node) or widens_or_narrows(node, narrowing)):
        passed.append(node)
        node = given(node, 0)
    return node, tuple(passed)


def changes_nothing(node: fx.Node) -> bool:
    """Whether a call returns its first argument's values, in its shape, dtype and device."""
    if is_op(node, aten.dropout, aten.feature_dropout, aten.alpha_dropout, aten.native_dropout):
        return is_op(node, aten.dropout, aten.feature_dropout, aten.alpha_dropout) and (not given(node, 2) or given(node, 1) == 0)
    if not is_op(node, *COPIES, *CASTS):
        return False
    before, after = given(node, 0).meta["val"], node.meta["val"]
    return bool(before.dtype == after.dtype and before.device == after.device and same_sizes(before, after))


def widens_or_narrows(node: fx.Node, narrowing: bool) -> bool:
    """Whether a call only casts between float dtypes."""
    if not is_op(node, *CASTS):
        return False
    before, after = given(node, 0).meta["val"], node.meta["val"]
    if not (before.is_floating_point() and after.is_floating_point() and before.device == after.device):
        return False
    return narrowing or torch.promote_types(before.dtype, after.dtype) == after.dtype


def narrower(nodes: Iterable[fx.Node], leaves: Sequence[fx.Node]) -> str | None:
    """A node computed in a dtype with fewer digits than its inputs: replacing it would change the answer."""
    for leaf in leaves:
        wanted = leaf.meta["val"].dtype
        if is_op(leaf, *CASTS) and given(leaf, 0).meta["val"].dtype == torch.float64 != wanted:
            return f"{leaf.name} rounds float64 numbers to {wanted}"
        for node in nodes:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                continue
            if torch.promote_types(value.dtype, wanted) != value.dtype:
                return f"{node.name} is in {value.dtype}, narrower than the {wanted} of its input"
    return None


def between(graph: Captured, match: Match) -> int:
    """Bytes a fused op no longer writes and reads again: the results inside a match, views and in-place results not counted."""
    return sum(2 * bytes_of(graph, node) for node in set(match.inside[1:]) if not aliases(node))


def replace(scene: Scene, match: Match, new: fx.Node) -> None:
    """Users of the result use `new`; the nodes of the match that nobody reads any more are erased."""
    match.root.replace_all_uses_with(new)
    erase(scene.graph, (*match.inside, *match.outside))
    loosen_views(scene.graph, [new])
    scene.refresh()


def erase(graph: Captured, nodes: Iterable[fx.Node]) -> None:
    """Erase those of the nodes that are not read, last first, together with attributes that nobody reads any more."""
    left = {node for node in nodes if node.op in ("call_function", "get_attr")}
    gone = True
    while gone:
        unread = [node for node in left if not node.users]
        gone = bool(unread)
        for node in unread:
            left.discard(node)
            left.update(source for source in node.all_input_nodes if source.op == "get_attr")
            graph.module.graph.erase_node(node)


def loosen_views(graph: Captured, changed: Iterable[fx.Node]) -> None:
    """Sizes and strides of all that follows, again; a `view` of a result laid out otherwise than before becomes a `reshape`."""
    reached = set(changed)
    loose = set(reached)  # results laid out otherwise, and views of them
    for node in graph.module.graph.nodes:
        if node in reached or node.op != "call_function" or not reached.intersection(node.all_input_nodes):
            continue
        if loose.intersection(node.all_input_nodes) and aliases(node):
            loose.add(node)
            if is_op(node, aten.view):
                node.target = aten.reshape.default
        before = node.meta.get("val")
        try:
            update_value(graph, node)
        except RuntimeError:
            if not is_op(node, aten.view):
                raise
            node.target = aten.reshape.default
            update_value(graph, node)
        if not _same_layout(before, node.meta["val"]) or node in loose:
            reached.add(node)


def _same_layout(before: Any, after: Any) -> bool:
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return same_sizes(before, after) and all(str(a) == str(b) for a, b in zip(before.stride(), after.stride(), strict=True))
    return False
