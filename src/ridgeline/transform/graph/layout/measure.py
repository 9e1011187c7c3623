"""Time the ops of a region where they stand: the whole graph run plain and channels-last in turns, a clock around each op.

    for each round, for each label:  inputs ──op by op──> every op of the region gets its tensors and weights in that order
        seconds[op][label] = the fastest round        result[op][label] = shape and strides it gave

An op timed alone finds its weights and inputs in the cache; in the graph it finds what the op before left it, as it will when
the plan is carried out. Conversions are made outside the clock. Rounds are taken in turns, so a slow moment meets both labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ....core.timing import garbage_collector_off, sampler
from .choose import LAST, PLAIN
from .order import Seen, constant_order, label_of, laid_out, orders, seen_of
from .regions import Kind, Region, main_tensor

if TYPE_CHECKING:
    from ..capture import Captured

LEAST_ROUNDS, MOST_ROUNDS, BUDGET_S = 5, 25, 1.0


@dataclass(slots=True)
class Timed:
    """Seconds of an op in (plain, last) and what it answered; no result where it could not run so."""

    seconds: list[float] = field(default_factory=lambda: [float("inf"), float("inf")])
    results: list[Seen | None] = field(default_factory=lambda: [None, None])


def time_in_graph(graph: Captured, region: Region, seen: dict[fx.Node, Any], device: torch.device) -> dict[fx.Node, Timed]:
    """The region's computing ops, timed in both orders."""
    found = {node: Timed() for node in region.inside if region.kinds[node] is Kind.COMPUTE}
    runs = [_Run(graph, region, seen, found, label, device) for label in (PLAIN, LAST)]
    start, rounds = perf_counter(), 0
    with torch.no_grad(), garbage_collector_off():
        while rounds < LEAST_ROUNDS or (rounds < MOST_ROUNDS and perf_counter() - start < BUDGET_S):
            for run in runs:
                inputs = [tensor.clone() if isinstance(tensor, Tensor) else tensor for tensor in graph.inputs]
                run.run(*inputs, enable_io_processing=False)
            rounds += 1
    return found


def time_both(before: Captured, after: Captured, device: torch.device) -> tuple[float, float]:
    """The fastest run of each of two graphs on the example inputs, in turns [s]."""
    best = [float("inf"), float("inf")]
    with torch.no_grad(), garbage_collector_off():
        start, rounds = perf_counter(), 0
        while rounds < LEAST_ROUNDS or (rounds < MOST_ROUNDS and perf_counter() - start < BUDGET_S):
            for position, graph in enumerate((before, after)):
                inputs = [tensor.clone() if isinstance(tensor, Tensor) else tensor for tensor in graph.inputs]
                sample = sampler(partial(graph.module, *inputs), str(device))
                best[position] = min(best[position], sample())
            rounds += 1
    return best[0], best[1]


class _Run(fx.Interpreter):
    """One run of the graph with its region in one order."""

    def __init__(
        self, graph: Captured, region: Region, seen: dict[fx.Node, Any], found: dict[fx.Node, Timed], label: int, device: torch.device
    ) -> None:
        super().__init__(graph.module)
        self.region, self.seen, self.found, self.label = region, seen, found, label
        cuda: Any = torch.cuda  # parts of it are untyped
        self.synchronize: Callable[[], None] = cuda.synchronize if device.type == "cuda" else lambda: None
        self.constants: dict[tuple[fx.Node, tuple[int, ...]], Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return self._rigid(n) if n.op == "output" else super().run_node(n)
        timed = self.found.get(n)
        if n not in self.region.inside:
            return self._rigid(n)
        args, kwargs = self._arguments(n, {source: self._order(n, source) for source in n.all_input_nodes if self._takes_order(n, source)})
        if timed is None:
            return n.target(*args, **kwargs)  # type: ignore[operator]
        self.synchronize()
        start = perf_counter()
        try:
            result = n.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, NotImplementedError):  # not in this order: go on with the order it had
            return self._rigid(n)
        self.synchronize()
        timed.seconds[self.label] = min(timed.seconds[self.label], perf_counter() - start)
        timed.results[self.label] = seen_of(result) if isinstance(result, Tensor) else None
        return result

    def _takes_order(self, node: fx.Node, source: fx.Node) -> bool:
        """Images and constants of their rank are put into the order of the run; what an op writes into stays itself."""
        found = main_tensor(self.seen.get(source))
        if found is None or not isinstance(self.seen[source], Seen) or len(found.shape) != len(self.region.inside[node]):
            return False
        return self.region.kinds[node] not in (Kind.IN_PLACE, Kind.VIEW, Kind.PERMUTE)

    def _order(self, node: fx.Node, source: fx.Node) -> tuple[int, ...]:
        frame = self.region.inside[node]
        return constant_order(self.seen[source].shape, frame, self.label) if source.op == "get_attr" else orders(frame)[self.label]

    def _rigid(self, node: fx.Node) -> Any:
        """A node with its tensors in the order they have outside this run."""
        wanted = {}
        for source in node.all_input_nodes:
            found, frame = main_tensor(self.seen.get(source)), self.region.outside.get(source)
            if found is None or frame is None or not isinstance(self.seen[source], Seen):
                continue
            label = label_of(found.shape, found.strides, frame)
            if label in (PLAIN, LAST):
                wanted[source] = orders(frame)[label]
        args, kwargs = self._arguments(node, wanted)
        return args[0] if node.op == "output" else node.target(*args, **kwargs)  # type: ignore[operator]

    def _arguments(self, node: fx.Node, wanted: dict[fx.Node, tuple[int, ...]]) -> Any:
        """The values of a node's arguments, those in `wanted` in the order asked for."""

        def value(source: fx.Node) -> Any:
            known = self.env[source]
            if source not in wanted:
                return known
            if source.op != "get_attr":
                return laid_out(known, wanted[source], exactly=False)
            key = source, wanted[source]
            if key not in self.constants:
                self.constants[key] = laid_out(known, wanted[source])
            return self.constants[key]

        return fx.node.map_arg(node.args, value), fx.node.map_arg(node.kwargs, value)
