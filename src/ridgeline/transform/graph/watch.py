"""What each pass gained, beside what it did: every pass is wrapped, and its graph looked at before and after.

    Watch.over(pass) ──run──> the pass runs ──changed something?──> estimate again, and where asked time both graphs in alternation
    Watch.fill(reports) ──> predicted_gain, measured_gain of each PassReport; report_json ──> what a Change keeps

Time spent looking is not counted as the pass's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ...measure.ab import ab
from ...train.evaluate import device_of
from .manager import Pass, PassContext, PassReport, PassResult, Site

if TYPE_CHECKING:
    from .capture import Captured
    from .predict import Predictor

ROUNDS = 7
MOST_CHANGED, MOST_REFUSED, MOST_PICTURES = 200, 200, 3


class Watch:
    """Looks at the graph around every pass."""

    def __init__(
        self, captured: Captured, predictor: Predictor | None, *, measure: bool, report: Callable[[str], None] = lambda message: None
    ) -> None:
        self.predictor, self.measure, self.report = predictor, measure, report
        self.found: dict[str, list[tuple[float | None, float | None, float]]] = {}
        self.wrapped: dict[str, bool] = {}
        if predictor is not None:
            predictor.start(captured.module, captured.inputs)

    def over(self, one: Pass) -> Pass:
        """The pass, watched."""
        watched = _Watched(one, self)
        self.wrapped[one.name] = watched.last
        return watched

    @property
    def predicted_whole(self) -> float | None:
        return self.predictor.whole if self.predictor is not None else None

    @property
    def notes(self) -> Sequence[str]:
        return self.predictor.notes if self.predictor is not None else ()

    def fill(self, reports: Sequence[PassReport]) -> None:
        """Gains and seconds into the reports: the n-th run of a pass is its n-th round, a last pass runs once."""
        for one in reports:
            runs = self.found.get(one.name, [])
            at = 0 if self.wrapped.get(one.name) else one.round - 1
            if at < len(runs):
                one.predicted_gain, one.measured_gain, one.seconds = runs[at]

    def run(self, one: Pass, graph: Captured, context: PassContext) -> PassResult:
        before = shared_copy(graph.module) if self.measure else None
        start = time.perf_counter()
        result = one.run(graph, context)
        seconds = time.perf_counter() - start
        predicted = measured = None
        if result.changed:
            predicted = self.predictor.gain(graph.module, graph.inputs) if self.predictor is not None else None
            if before is not None:
                self.report(f"timing {one.name}")
                measured = gain_between(before, graph.module, graph.inputs)
        self.found.setdefault(one.name, []).append((predicted, measured, seconds))
        return result


class _Watched:
    def __init__(self, one: Pass, watch: Watch) -> None:
        self.one, self.watch = one, watch
        self.name, self.last = one.name, bool(getattr(one, "last", False))

    def run(self, graph: Captured, context: PassContext) -> PassResult:
        return self.watch.run(self.one, graph, context)


def shared_copy(module: fx.GraphModule) -> fx.GraphModule:
    """The graph as it is now, over the same weights."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, val_map={}))
    graph._codegen = module.graph._codegen
    return fx.GraphModule(module, graph)


def gain_between(before: fx.GraphModule, after: fx.GraphModule, inputs: tuple[Any, ...]) -> float:
    """Seconds of the first over seconds of the second, the median of pairs."""

    def call(module: fx.GraphModule) -> Callable[[], None]:
        def one() -> None:
            with torch.inference_mode():
                module(*inputs)

        return one

    return 1.0 / ab(call(before), call(after), rounds=ROUNDS, warmup=2, device=str(device_of(after))).ratio


def report_json(one: PassReport) -> dict[str, Any]:
    """A report as JSON: all the numbers, the places up to a limit, pictures of a few."""
    pictured = sorted((place for place in one.changed if place.picture), key=lambda place: -place.saved_bytes)[:MOST_PICTURES]
    kept = {id(place) for place in pictured}
    shown = [*pictured, *(place for place in one.changed if id(place) not in kept)][:MOST_CHANGED]
    return {
        "name": one.name,
        "round": one.round,
        "nodes_before": one.nodes_before,
        "nodes_after": one.nodes_after,
        "changed_sites": len(one.changed),
        "refused_sites": len(one.refused),
        "saved_bytes": sum(place.saved_bytes for place in one.changed),
        "seconds": one.seconds,
        "check_error": one.check_error,
        "predicted_gain": one.predicted_gain,
        "measured_gain": one.measured_gain,
        "changed": [_site(place, id(place) in kept) for place in shown],
        "refused": [_site(place, False) for place in one.refused[:MOST_REFUSED]],
    }


def _site(place: Site, picture: bool) -> dict[str, Any]:
    return {
        "nodes": list(place.nodes[:50]),
        "layer": place.layer,
        "what": place.what,
        "saved_bytes": place.saved_bytes,
        "picture": place.picture if picture else None,
    }
