"""Dead code goes, with the weights only it read; writes and random draws stay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.transform.graph.passes.small_passes import after


def test_unused_calls_and_weights_go() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        torch.tanh(x @ net.weight)
        return torch.relu(x)

    graph, reports, left = after(["dead"], function)
    assert left == {"relu": 1} and len(reports[0].changed) == 2 and reports[0].changed[0].saved_bytes == 64
    assert not list(graph.module.parameters()) and not list(graph.module.buffers())


def test_a_write_stays_though_its_result_is_not_used() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        hidden = torch.relu(x)
        hidden[:, :2].add_(1.0)
        return hidden * 2

    assert after(["dead"], function)[2]["add_"] == 1


def test_a_random_op_stays_so_that_the_next_draws_the_same() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        torch.rand_like(x)
        return x + torch.rand_like(x)

    assert after(["dead"], function)[2]["rand_like"] == 2
