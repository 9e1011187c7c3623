"""What a mask is: nothing, causal, or kept; from its values, never from its looks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ridgeline.transform.graph.capture import capture_graph
from ridgeline.transform.graph.masks import kind_of, mask_values, nothing_left
from tests.transform.graph.pattern_cases import Formula

T = 4


def rows() -> Tensor:
    return torch.arange(T)


def causal() -> Tensor:
    return rows()[None, :] <= rows()[:, None]


CASES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "causal": (lambda x: causal(), "causal"),
    "all": (lambda x: causal() | True, "none"),
    "diagonal hidden": (lambda x: rows()[None, :] < rows()[:, None], "kept"),
    "window": (lambda x: causal() & (rows()[None, :] > rows()[:, None] - 2), "kept"),
    "transposed": (lambda x: causal().T, "kept"),
    "batch of causal": (lambda x: causal().expand(x.size(0), 1, T, T), "causal"),
    "added": (lambda x: torch.where(causal(), 0.0, -math.inf), "causal"),
    "added, weak": (lambda x: torch.where(causal(), 0.0, -5.0), "kept"),
    "changes with the batch": (lambda x: causal() | (torch.arange(x.size(0)) > 1)[:, None, None], "kept"),
    "of the input": (lambda x: causal() & (x[:, :1, None] > 0), "kept"),
}


@pytest.mark.parametrize("case", CASES)
def test_kinds(case: str) -> None:
    function, wanted = CASES[case]
    graph = capture_graph(Formula(lambda x: (function(x), x * 2.0)), (torch.randn(2, T),))
    mask = next(node for node in graph.module.graph.nodes if node.op == "output").args[0][0]
    assert kind_of(graph, mask) == wanted


def test_values_at_several_batch_sizes() -> None:
    graph = capture_graph(Formula(lambda x: (causal().expand(x.size(0), T, T), x * 2.0)), (torch.randn(5, T),))
    mask = next(node for node in graph.module.graph.nodes if node.op == "output").args[0][0]
    assert [len(value) for value in mask_values(graph, mask)] == [1, 2, 3, 5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_nothing_is_left_of_a_masked_score(dtype: torch.dtype) -> None:
    scores = torch.tensor([100.0, -100.0], dtype=dtype) + torch.tensor([nothing_left(dtype), 0.0], dtype=dtype)
    assert torch.softmax(scores, 0)[0] == 0
