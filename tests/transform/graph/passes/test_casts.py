"""Only exact casts cancel or move; the numbers stay bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.transform.graph.capture import capture_graph
from ridgeline.transform.graph.manager import PassContext, run_passes
from ridgeline.transform.graph.passes.casts import FLOATS, INTEGERS, holds
from tests.transform.graph.passes.small_passes import Calls, after, changes, refusals

PASSES = ["casts", "dead"]
FLOAT = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def test_exact_pairs_cancel_also_through_views() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        there = torch.relu(x).double().float()
        viewed = torch.relu(x).double().view(-1, 2, 2).transpose(1, 2).float()
        return there.tanh() + viewed.reshape(-1, 4).tanh()

    _, reports, left = after(PASSES, function, FLOAT)
    assert left["to"] == 0 and len(changes(reports, "casts")) == 2


def test_a_lossy_first_cast_stays() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        return torch.relu(x).bfloat16().float() + torch.relu(x).half().double()

    assert after(PASSES, function, FLOAT)[2]["to"] == 4


def test_two_casts_become_one() -> None:
    _, reports, left = after(PASSES, lambda net, x: torch.relu(x).float().half() + 1, FLOAT.bfloat16())
    assert left["to"] == 1 and changes(reports, "casts") == ["bfloat16 -> float32 -> float16 is exact: one cast or none"]


def test_a_cast_goes_to_the_smaller_side() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        wide = torch.relu(x)[:, None].expand(-1, 8, -1).double()
        part = torch.tanh(x).double()[:, :1]
        return wide * part[..., None]

    _, reports, _ = after(PASSES, function, FLOAT)
    assert changes(reports, "casts") == ["the cast goes before the expand"]
    _, reports, _ = after(["identities", *PASSES], lambda net, x: torch.tanh(x).double()[:, :1] * 2, FLOAT)
    assert changes(reports, "casts") == ["the cast goes after the slice"]


def test_a_cast_over_a_write_stays() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        hidden = torch.relu(x)
        wide = hidden.double()
        hidden.add_(1.0)
        return wide.float() + hidden

    _, reports, left = after(PASSES, function, FLOAT)
    assert left["to"] == 2 and refusals(reports, "casts")


@pytest.mark.parametrize("narrow", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("wide", [*FLOATS, *INTEGERS], ids=str)
def test_holds_means_that_every_value_comes_back(wide: torch.dtype, narrow: torch.dtype) -> None:
    if narrow == torch.bool:
        values = torch.tensor([False, True])
    elif narrow in INTEGERS:
        info = torch.iinfo(narrow)
        values = torch.tensor([info.min, info.max, info.max - 1, 0, 1, info.max // 3], dtype=narrow)
    else:
        info_f = torch.finfo(narrow)
        values = torch.tensor([info_f.max, -info_f.max, info_f.tiny, 1 + info_f.eps, 0.1, float("inf")], dtype=torch.float64).to(narrow)
    back = values.to(wide).to(narrow) if holds(wide, narrow) else values
    assert torch.equal(back, values)


def test_holds_says_no_where_values_are_lost() -> None:
    lost = [(torch.float32, torch.int32), (torch.float16, torch.bfloat16), (torch.uint8, torch.int8), (torch.float32, torch.float64)]
    assert not any(holds(wide, narrow) for wide, narrow in lost)


def test_bits_stay() -> None:
    def function(net: Any, x: Tensor) -> Tensor:
        return torch.tanh(x.double().float()) * x.bfloat16().float().double().float()

    graph = capture_graph(Calls(function), (FLOAT,))
    expected = graph.copy().module(FLOAT)
    run_passes(graph, PASSES, PassContext())
    assert torch.equal(graph.module(FLOAT), expected)
