"""The matcher: orders, names, numbers, what it looks through, and what it objects to; then random mixtures of formulas and writes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.transform.graph import fused_ops
from ridgeline.transform.graph.capture import Captured, capture_graph
from ridgeline.transform.graph.passes.merge_qkv import MergeLinears
from ridgeline.transform.graph.patterns import Call, Either, Input, Number, Scene, aten, product, total
from tests.support import full_or_tenth
from tests.transform.graph.pattern_cases import Formula, run

SQUARE_SUM = total(product(Input("x"), Input("x")), Number("shift"))


def captured(function: Callable[..., Any], *inputs: Tensor, **buffers: Tensor) -> Captured:
    return capture_graph(Formula(function, **buffers), inputs or (torch.randn(2, 3),), dynamic_batch=False)


def last(graph: Captured) -> Any:
    return next(node for node in reversed(graph.module.graph.nodes) if node.op == "call_function")


@pytest.mark.parametrize("function", [lambda x: x * x + 2.5, lambda x: 2.5 + x * x, lambda x: torch.add(x.contiguous() * x, 2.5)])
def test_either_order_through_copies(function: Callable[[Tensor], Tensor]) -> None:
    graph = captured(function)
    match = Scene(graph).match(SQUARE_SUM, last(graph))
    assert match is not None
    assert match.names["shift"] == 2.5
    assert match.names["x"].op == "placeholder"


@pytest.mark.parametrize("function", [lambda x: x * (x + 1) + 2.5, lambda x: torch.add(x * x, 2.5, alpha=2), lambda x: x * x - 2.5])
def test_one_name_is_one_node_and_options_count(function: Callable[[Tensor], Tensor]) -> None:
    graph = captured(function)
    assert Scene(graph).match(SQUARE_SUM, last(graph)) is None


def test_constants_of_one_element_are_numbers() -> None:
    graph = captured(lambda x, c: x * x + c, c=torch.tensor(1.5))
    match = Scene(graph).match(SQUARE_SUM, last(graph))
    assert match is not None
    assert match.names["shift"] == 1.5
    wide = captured(lambda x, c: x * x + c, c=torch.tensor([1.5, 2.0, 1.0]))
    assert Scene(wide).match(SQUARE_SUM, last(wide)) is None


def test_all_orders_are_given() -> None:
    graph = captured(lambda x: torch.sin(x) * torch.cos(x))
    matches = list(Scene(graph).matches(product(Input("a"), Input("b")), last(graph)))
    assert [match.names["a"].name for match in matches] == ["sin", "cos"]


def test_either_tries_the_next_choice() -> None:
    pattern = Either.of(Call.of(aten.sin, Call.of(aten.cos, Input("x"))), Call.of(aten.sin, Input("x")))
    graph = captured(lambda x: torch.sin(torch.tanh(x)))
    match = Scene(graph).match(pattern, last(graph))
    assert match is not None
    assert match.names["x"].name == "tanh"


def test_objections_name_the_node() -> None:
    twice = captured(lambda x: ((y := x * x) + 2.5, y))
    scene = Scene(twice)
    match = scene.match(SQUARE_SUM, last(twice))
    assert match is not None
    assert scene.objection(match, "x") == "mul has 2 consumers"
    narrow = captured(lambda x: x.float() * x.float() + 2.5, torch.randn(2, 3, dtype=torch.float64))
    scene = Scene(narrow)
    match = scene.match(SQUARE_SUM, last(narrow))
    if match is not None:  # two casts of one tensor are two nodes: not the same input
        assert scene.objection(match, "x") is not None


def attention(a: Tensor, b: Tensor) -> Tensor:
    return torch.softmax(a @ b.transpose(-2, -1) * 0.5, -1) @ b


def rms(a: Tensor, b: Tensor) -> Tensor:
    return a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 0.1)


def layer(a: Tensor, b: Tensor) -> Tensor:
    return (a - a.mean(-1, keepdim=True)) / torch.sqrt(a.var(-1, unbiased=False, keepdim=True) + 0.1)


def gelu(a: Tensor, b: Tensor) -> Tensor:
    return 0.5 * a * (1.0 + torch.tanh(0.7978845608028654 * (a + 0.044715 * torch.pow(a, 3.0))))


def gate(a: Tensor, b: Tensor) -> Tensor:
    return torch.nn.functional.silu(a) * b


def rotated(a: Tensor, b: Tensor) -> Tensor:
    cos, sin = b[0].cos(), b[0].sin()
    a = a.unsqueeze(1)
    return (a * cos + torch.cat((-a[..., 4:], a[..., :4]), -1) * sin).squeeze(1)


def added(a: Tensor, b: Tensor) -> Tensor:
    return torch.rms_norm(a + b, (8,), eps=0.1)


class Mixture(nn.Module):
    """Formulas that passes look for, with views, sums, shared linears and in-place writes between, by a seed."""

    FORMULAS = (attention, rms, layer, gelu, gate, rotated, added)

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        torch.manual_seed(seed)
        self.linears = nn.ModuleList(nn.Linear(8, 8, bias=bool(index % 2), dtype=torch.float64) for index in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        choose = random.Random(self.seed)
        values = [x + 0.0, torch.tanh(x)]
        for _ in range(choose.randint(4, 9)):
            a, b = choose.choice(values), choose.choice(values)
            kind = choose.random()
            if kind < 0.5:
                values.append(choose.choice(self.FORMULAS)(a, b))
            elif kind < 0.7:
                values.append(self.linears[choose.randrange(4)](a))
            elif kind < 0.8:
                a.mul_(0.5)
            elif kind < 0.9:
                values.append(a.reshape(a.size(0), -1).view(a.size(0), 5, 8))
            else:
                a.transpose(1, 2)[:, :2].add_(0.25)
        return tuple(values[choose.randrange(len(values)) :])


PASSES = (MergeLinears(always=True), "attention", "rope", "norm", "gated")


@pytest.mark.parametrize("seed", range(full_or_tenth(150)))
def test_mixtures_keep_their_answers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All the passes, one after another, as if every kernel won."""
    monkeypatch.setattr(fused_ops, "no_win", lambda *args, **kwargs: None)
    x = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    run(Mixture(seed), (x,), *PASSES, dynamic_batch=seed % 2 == 0)
