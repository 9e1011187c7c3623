"""Run passes over a captured graph, in order and in rounds, each one checked and reported.

    run_passes(captured, None, context)
      round 1..10:  dead, fold_constants, …, epilogue      until a whole round changes nothing
      then once:    layout, prepack                        (`last = True`: their result is not for other passes to match)
         each:  pass.run edits the graph ──> PassResult(changed, refused) ──check──> PassReport, or PassError with its name

A pass that changed nothing is not checked again: its graph is the one checked before.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import fx

from ...core.errors import unknown_name
from .edit import layer_of, refresh_values

if TYPE_CHECKING:
    from .capture import Captured

MAX_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Site:
    """One place a pass changed, or could not."""

    nodes: tuple[str, ...]  # names of the nodes before
    layer: str  # module path of the first
    what: str  # "conv2d + batch_norm -> conv2d", or why not: "its output has 2 consumers"
    saved_bytes: int = 0  # intermediate bytes no longer written and read
    picture: Mapping[str, Any] | None = None  # {"before": {...}, "after": {...}}: filled by the manager from `nodes`


def site(nodes: Sequence[fx.Node], what: str, saved_bytes: int = 0) -> Site:
    """A Site of these nodes; make it before the nodes are erased."""
    return Site(tuple(node.name for node in nodes), layer_of(nodes[0]), what, saved_bytes)


@dataclass(slots=True)
class PassResult:
    """What one run of a pass did."""

    changed: list[Site] = field(default_factory=list)
    refused: list[Site] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PassContext:
    """What a pass may need to know beside the graph."""

    target: str = "cpu"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    constant_budget_bytes: int = 64 << 20  # how much larger constant folding may make the model
    report: Callable[[str], None] = lambda message: None


class Pass(Protocol):
    """A rewrite of the graph in place. Class attribute `last = True`: runs once, after the rounds."""

    name: str

    def run(self, graph: Captured, context: PassContext) -> PassResult: ...


@dataclass(slots=True)
class PassReport:
    """One run of one pass."""

    name: str
    round: int
    nodes_before: int
    nodes_after: int
    changed: list[Site]
    refused: list[Site]
    seconds: float
    check_error: float = 0.0  # the largest relative difference found by the check
    predicted_gain: float | None = None
    measured_gain: float | None = None


PASSES: dict[str, str] = {
    name: f".passes.{name}"
    for name in "dead fold_constants common identities casts fold_norm merge_qkv attention rope norm gated epilogue layout prepack".split()
}
"""Pass → module that registers it, relative to this package, in the order of the default pipeline."""
_KNOWN: dict[str, Callable[[], Pass]] = {}
Made = TypeVar("Made", bound=Callable[..., Any])


def register(name: str) -> Callable[[Made], Made]:
    """Class decorator: `name` makes this pass with its default settings."""

    def put(made: Made) -> Made:
        if name in _KNOWN and getattr(_KNOWN[name], "__qualname__", None) != getattr(made, "__qualname__", None):
            raise ValueError(f"pass {name!r} is registered twice")
        _KNOWN[name] = made
        return made

    return put


def find_pass(name: str) -> Pass:
    """A pass by name, with default settings."""
    if name not in _KNOWN:
        if name not in PASSES:
            raise unknown_name("pass", name, {*PASSES, *_KNOWN}, see="docs/optimize.md")
        importlib.import_module(PASSES[name], __package__)
    return _KNOWN[name]()


def run_passes(
    captured: Captured,
    passes: Sequence[str | Pass] | None,
    context: PassContext,
    *,
    check: bool = True,
    rounds: int = MAX_ROUNDS,
) -> list[PassReport]:
    """Run passes (all, by default) over the graph in place; one report for each run that changed or refused something, all of round 1."""
    from .check import Checker

    chosen = [find_pass(one) if isinstance(one, str) else one for one in (PASSES if passes is None else passes)]
    checker = Checker.of(captured) if check else None
    reports: list[PassReport] = []
    repeated = [one for one in chosen if not getattr(one, "last", False)]
    number = 0
    for number in range(1, rounds + 1):
        done = [_run_one(one, captured, context, checker, number) for one in repeated]
        reports.extend(done if number == 1 else [report for report in done if report.changed])
        if not any(report.changed for report in done):
            break
    final = [one for one in chosen if getattr(one, "last", False)]
    reports.extend(_run_one(one, captured, context, checker, number) for one in final)
    return reports


def _run_one(one: Pass, captured: Captured, context: PassContext, checker: Any, number: int) -> PassReport:
    """One pass: run, then check if it changed anything."""
    from .check import state_kept

    context.report(f"{one.name}, round {number}")
    before, start = len(captured.module.graph.nodes), time.perf_counter()
    old = Snapshot.of(captured.module.graph)
    with state_kept(captured):  # a pass may run the graph to see or time it
        result = one.run(captured, context)
    if result.changed:
        refresh_values(captured, {node.name for node in captured.module.graph.nodes} - set(old.ops))
    seconds = time.perf_counter() - start
    error = checker.check(captured, one.name) if checker is not None and result.changed else 0.0
    changed = [replace(place, picture=old.picture(place.nodes, captured.module.graph)) for place in result.changed]
    after = len(captured.module.graph.nodes)
    return PassReport(one.name, number, before, after, changed, result.refused, seconds, error)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Names, ops and edges of a graph as it was."""

    ops: Mapping[str, str]
    inputs: Mapping[str, tuple[str, ...]]
    users: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, graph: fx.Graph) -> Snapshot:
        nodes = list(graph.nodes)
        return cls(
            {node.name: op_name(node) for node in nodes},
            {node.name: tuple(source.name for source in node.all_input_nodes) for node in nodes},
            {node.name: tuple(user.name for user in node.users) for node in nodes},
        )

    def picture(self, names: Sequence[str], after: fx.Graph) -> dict[str, Any]:
        """The region around `names` before, and what stands between the same neighbours after."""
        inside = {name for name in names if name in self.ops}
        border = {near for name in inside for near in (*self.inputs[name], *self.users[name])} - inside
        now = Snapshot.of(after)
        kept = (border | inside) & set(now.ops)
        fresh = {name for near in kept for name in (*now.inputs[near], *now.users[near]) if name not in self.ops}
        return {"before": self._region(inside | border, inside), "after": now._region(kept | fresh, fresh)}

    def _region(self, names: set[str], marked: set[str]) -> dict[str, Any]:
        order = [name for name in self.ops if name in names]
        return {
            "nodes": [{"name": name, "op": self.ops[name], "marked": name in marked} for name in order],
            "edges": [[source, name] for name in order for source in self.inputs[name] if source in names],
        }


def op_name(node: fx.Node) -> str:
    """A short name of what a node does: "conv2d", "placeholder", "get_attr"."""
    if node.op != "call_function":
        return node.op
    packet = getattr(node.target, "overloadpacket", None)
    return str(getattr(packet, "__name__", None) or getattr(node.target, "__name__", node.target))
