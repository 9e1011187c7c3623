"""One call for tests of the small passes: a function of tensors in, its graph after a pass, checked, out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.transform.graph.capture import Captured, capture_graph
from ridgeline.transform.graph.check import Checker
from ridgeline.transform.graph.manager import PassContext, PassReport, op_name, run_passes


class Calls(nn.Module):
    """A module around a function; it holds one weight and one table for the function to use."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 16, dtype=torch.float64).reshape(4, 4))
        self.register_buffer("table", torch.arange(4, dtype=torch.float32))

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def after(
    passes: list[Any], function: Callable[..., Any], *inputs: Tensor, **context: Any
) -> tuple[Captured, list[PassReport], Counter[str]]:
    """The graph after these passes (checked against the one before), their reports, and how many calls of each op are left."""
    given = inputs or (torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),)
    graph = capture_graph(Calls(function), given)
    assert graph.batch_dynamic, graph.notes
    checker = Checker.of(graph)
    reports = run_passes(graph, passes, PassContext(**context))
    checker.check(graph, "all")
    return graph, reports, Counter(op_name(node) for node in graph.module.graph.nodes if node.op == "call_function")


def changes(reports: list[PassReport], name: str) -> list[str]:
    return [place.what for report in reports if report.name == name for place in report.changed]


def refusals(reports: list[PassReport], name: str) -> list[str]:
    return [place.what for report in reports if report.name == name for place in report.refused]
