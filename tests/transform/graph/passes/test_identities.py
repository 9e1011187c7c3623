"""Ops that do nothing go, reshapes and permutes join, sizes are left to the op; copies stay where they matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.transform.graph.passes.small_passes import after, refusals

PASSES = ["identities", "fold_constants", "dead"]
NOTHING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "add 0": lambda net, x: x + 0,
    "0 plus": lambda net, x: torch.zeros(4, dtype=torch.float64) + x,
    "times 1": lambda net, x: x * 1.0,
    "over 1": lambda net, x: x / 1,
    "minus 0": lambda net, x: x - torch.zeros(()),
    "clone": lambda net, x: x.clone(),
    "to": lambda net, x: x.to(torch.float64),
    "contiguous": lambda net, x: x.contiguous(),
    "dropout": lambda net, x: F.dropout(x, 0.5, training=False),
    "slice": lambda net, x: x[:, :],
    "expand": lambda net, x: x.expand(x.shape[0], 4),
    "view": lambda net, x: x.view(x.shape[0], -1),
    "two permutes": lambda net, x: x.t().t(),
    "permute": lambda net, x: x.permute(0, 1),
    "three": lambda net, x: x.view(-1, 2, 2).transpose(1, 2).permute(0, 2, 1).reshape(-1, 4),
    "squeeze": lambda net, x: x.unsqueeze(1).squeeze(1),
    "there and back": lambda net, x: x.reshape(-1).reshape(x.shape[0], 4),
    "cat": lambda net, x: torch.cat([x], dim=1),
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_does_nothing_goes(name: str) -> None:
    function = NOTHING[name]
    left = after(PASSES, lambda net, x: torch.tanh(function(net, torch.relu(x))))[2]
    assert left == {"relu": 1, "tanh": 1}


def test_what_does_something_stays() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        square = x @ net.weight  # [B, 4]
        turned = square.view(-1, 2, 2).transpose(1, 2)
        return turned * 2 + turned.permute(0, 2, 1) + x[:, ::4, None] + (x / 2).view(-1, 2, 2) + torch.ones(2, 2)

    left = after(PASSES, function)[2]
    assert left["transpose"] == 1 and left["add"] == 4 and left["mul"] == 1 and left["div"] == 1


def test_type_promotion_is_no_identity() -> None:
    left = after(PASSES, lambda net, x: x + net.table[:1] * 0.0 + torch.zeros(1, dtype=torch.float64), torch.randn(2, 4))[2]
    assert left["add"] == 1  # float32 + float32 zero goes, + float64 zero makes it float64


def test_reshapes_join_and_sizes_are_inferred() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        hidden = torch.relu(x).reshape(x.shape[0], 2, 2).reshape(x.shape[0], 4, 1)
        return torch.tanh(hidden.view(hidden.shape[0], 1, 4)) + net.table.expand(x.shape[0], 1, 4)

    graph, _, left = after(PASSES, function)
    assert left["reshape"] + left["view"] == 1
    view = next(node for node in graph.module.graph.nodes if "view" in node.name or "reshape" in node.name)
    assert view.args[1] == [-1, 1, 4]
    assert left["sym_size"] == 1  # the expand still needs it


def test_copies_stay_where_someone_could_tell() -> None:
    def function(net: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.relu(x)
        kept = hidden.clone()
        hidden.add_(1.0)
        return hidden, kept, x.clone()

    _, reports, left = after(PASSES, function)
    assert left["clone"] == 2 and len(refusals(reports, "identities")) == 2


def test_a_copy_made_before_a_write_stays() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        hidden = torch.relu(x)
        kept = hidden.clone()
        hidden.add_(1.0)
        return torch.tanh(hidden) + torch.sigmoid(kept)

    assert after(PASSES, function)[2]["clone"] == 1


def test_permutes_join_in_the_right_order() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        return torch.tanh(x.permute(0, 2, 3, 1).permute(0, 3, 2, 1)) + torch.relu(x.permute(0, 2, 3, 1).transpose(1, 2)).permute(0, 3, 1, 2)

    left = after(["identities", "dead"], function, torch.randn(2, 2, 2, 2, dtype=torch.float64))[2]
    assert left["permute"] == 3 and left["transpose"] == 0


def test_joined_views_write_the_same_memory() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        hidden = torch.relu(x)
        hidden.view(-1, 2, 2).transpose(1, 2).transpose(1, 2).mul_(3.0)
        hidden.reshape(-1, 2, 2).reshape(-1, 4)[:, 0].add_(1.0)
        return hidden * 2

    assert after(PASSES, function)[2]["transpose"] == 0
