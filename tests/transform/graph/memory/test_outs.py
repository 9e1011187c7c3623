"""Writers: found by schema or known, used only where every bit agrees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx

from ridgeline.transform.graph.memory import outs
from ridgeline.transform.graph.memory.outs import find_writer, out_overload, overwritable, same_bits

aten = torch.ops.aten


def call(target: Any, *args: Any) -> tuple[fx.Node, tuple[Any, ...], Any]:
    graph = fx.Graph()
    sources = tuple(graph.placeholder(f"p{place}") if isinstance(arg, torch.Tensor) else arg for place, arg in enumerate(args))
    return graph.call_function(target, sources), args, target(*args)


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


CASES = {
    "add": (aten.add.Tensor, x(3, 4), x(4)),
    "relu": (aten.relu.default, x(3, 4)),
    "linear": (aten.linear.default, x(2, 3, 4), x(5, 4), x(5)),
    "matmul": (aten.matmul.default, x(2, 3, 4, 5), x(2, 3, 5, 4)),
    "cast": (aten.to.dtype, x(3, 4), torch.float64),
    "copying reshape": (aten.reshape.default, x(3, 4).t(), [12]),
    "batch_norm": (aten.batch_norm.default, x(2, 3, 4, 4), x(3), x(3), x(3), x(3).abs(), False, 0.1, 1e-5, True),
    "pad": (aten.pad.default, x(2, 3), [1, 2, 0, 1], "constant", 0.5),
    "embedding": (aten.embedding.default, x(6, 4), torch.tensor([[1, 5], [0, 1]])),
    "full": (aten.full.default, [2, 3], 1.5),
}


@pytest.mark.parametrize("name", CASES)
def test_writers_fill_rubbish_with_the_same_bits(name: str) -> None:
    node, args, result = call(*CASES[name])
    writer = find_writer(node, args, {}, result)
    assert writer is not None
    place = torch.full_like(result, float("nan"))
    writer(args, {}, [place])
    assert same_bits(place, result)


def test_an_out_variant_that_sums_in_another_order_is_not_used() -> None:
    node, args, result = call(aten.adaptive_avg_pool2d.default, x(2, 8, 7, 7), [1, 1])
    assert out_overload(node.target) is not None
    place = torch.empty_like(result)
    out_overload(node.target)(*args, out=place)
    assert (find_writer(node, args, {}, result) is not None) == same_bits(place, result)


def test_a_wrong_writer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[torch.Tensor]) -> None:
        places[0].copy_(args[0].clamp_min(0) * (1 + 1e-6))

    def lazy(args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[torch.Tensor]) -> None:
        places[0].flatten()[1:].copy_(args[0].clamp_min(0).flatten()[1:])

    node, args, result = call(aten.relu.default, x(3, 4))
    for planted in (wrong, lazy):
        monkeypatch.setitem(outs.KNOWN, aten.relu, planted)
        assert find_writer(node, args, {}, result) is not planted


def test_only_what_may_be_written_over_is_said_to_be() -> None:
    node, args, result = call(aten.add.Tensor, x(3, 4), x(4))
    writer = find_writer(node, args, {}, result)
    assert writer is not None and overwritable(writer, node, args, {}, result) == (0,)
    node, args, result = call(aten.matmul.default, x(3, 3), x(3, 3))
    writer = find_writer(node, args, {}, result)
    assert writer is not None and overwritable(writer, node, args, {}, result) == ()


def test_bits_are_stricter_than_equality() -> None:
    zero = torch.zeros(2)
    assert not same_bits(zero, -zero)
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same_bits(zero, zero.double())
    assert same_bits(torch.tensor(1 + 2j), torch.tensor(1 + 2j))
