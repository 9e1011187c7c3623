"""Equal calls become one, unless someone could tell."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.transform.graph.passes.common import key
from tests.transform.graph.passes.small_passes import after, changes, refusals


def test_equal_calls_become_one_also_on_equal_arguments() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        return torch.tanh(x.view(-1, 2, 2)).exp() + torch.tanh(x.view(-1, 2, 2)).exp()

    _, reports, left = after(["common", "dead"], function)
    assert left["tanh"] == left["exp"] == 1 and len(changes(reports, "common")) >= 3


def test_never_over_a_write() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        hidden = torch.relu(x)
        before = torch.tanh(hidden)
        hidden.view(-1).add_(1.0)
        return before + torch.tanh(hidden)

    _, reports, left = after(["common"], function)
    assert left["tanh"] == 2 and refusals(reports, "common") == ["an op writes what they read or give"]


def test_not_when_one_of_the_two_is_written() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        left, right = torch.tanh(x), torch.tanh(x)
        left.mul_(2.0)
        return left + right

    assert after(["common"], function)[2]["tanh"] == 2


def test_not_random_ops_nor_two_outputs() -> None:
    def function(net: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tanh(x), torch.tanh(x), torch.rand_like(x) + torch.rand_like(x)

    _, reports, left = after(["common"], function)
    assert left["tanh"] == 2 and left["rand_like"] == 2 and refusals(reports, "common") == ["both are outputs"]


def test_numbers_of_different_kinds_differ() -> None:
    assert len({key(1), key(1.0), key(True), key(0.0), key(-0.0), key(None)}) == 6
    assert key([1, [2]]) == key((1, (2,)))
