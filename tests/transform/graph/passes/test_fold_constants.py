"""Arithmetic on weights and numbers is done once; never random ops, written tensors, outputs, or more than the budget."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.transform.graph.passes.small_passes import after, changes, refusals

BOTH = ["fold_constants", "dead"]


def test_weights_masks_and_ranges_fold() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        mask = torch.ones(4, 4, dtype=torch.float64).tril().bool()
        return (x @ (net.weight.t() * 2)).masked_fill(mask[0], 0.0) + torch.arange(4) + net.table.double()

    graph, reports, left = after(BOTH, function)
    assert set(left) == {"matmul", "masked_fill", "add"}
    assert len(changes(reports, "fold_constants")) == 4
    assert not any(name.startswith("weight") for name, _ in graph.module.named_parameters())


def test_a_view_of_a_weight_costs_nothing_and_the_budget_holds() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        return x @ net.weight.t() + x @ (net.weight + 1)

    _, reports, left = after(BOTH, function, constant_budget_bytes=0)
    assert left["t"] == 0 and left["add"] == 2
    assert refusals(reports, "fold_constants") == ["128 more bytes of constants are over the budget"]
    assert after(BOTH, function, constant_budget_bytes=128)[2]["add"] == 1


def test_random_written_and_returned_values_stay() -> None:
    def function(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        counter = torch.zeros(4, dtype=torch.float64)
        counter.add_(x.sum(0))
        return x + counter + torch.rand(4), torch.arange(4) * 2

    _, reports, left = after(BOTH, function)
    assert left["zeros"] == 1 and left["rand"] == 1 and left["arange"] == 1
    assert refusals(reports, "fold_constants") == ["it is an output: the caller may write it"]


def test_a_size_that_depends_on_the_batch_stays() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[0])[:, None]

    assert after(BOTH, function)[2]["arange"] == 1
