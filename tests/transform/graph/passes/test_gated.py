"""Activations by hand become torch's; silu(gate) * up one kernel where it wins; near misses stay."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.transform.graph import fused_ops
from tests.transform.graph.pattern_cases import Formula, run

ROOT = math.sqrt(2 / math.pi)


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 10, dtype=torch.float64, generator=generator), torch.randn(3, 10, dtype=torch.float64, generator=generator)


FORMS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "gpt2": (lambda x, y: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))), "gelu"),
    "half last": (lambda x, y: x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * x * x * x))) * 0.5, "gelu"),
    "cube by products": (lambda x, y: x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * (x * x * x)))) * 0.5, "gelu"),
    "erf": (lambda x, y: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), "gelu"),
    "silu": (lambda x, y: x * torch.sigmoid(x), "silu"),
    "silu turned": (lambda x, y: torch.sigmoid(x) * x, "silu"),
}


@pytest.mark.parametrize("form", FORMS)
def test_activations_by_hand(form: str) -> None:
    formula, wanted = FORMS[form]
    ran = run(Formula(formula), inputs(), "gated")
    assert len(ran.changed) == 1
    assert ran.count(wanted) == 1
    assert ran.count("mul", "tanh", "erf", "sigmoid") == 0


NEAR_MISSES: dict[str, Callable[..., object]] = {
    "another root": lambda x, y: 0.5 * x * (1.0 + torch.tanh(0.79 * (x + 0.044715 * torch.pow(x, 3.0)))),
    "another cube": lambda x, y: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.045 * torch.pow(x, 3.0)))),
    "quick gelu": lambda x, y: x * torch.sigmoid(1.702 * x),
    "sigmoid of the other": lambda x, y: x * torch.sigmoid(y),
    "sigmoid read twice": lambda x, y: (x * (s := torch.sigmoid(x)), s),
    "erf of twice": lambda x, y: x * 0.5 * (1.0 + torch.erf(x / 2.0)),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_stay(case: str) -> None:
    assert run(Formula(NEAR_MISSES[case]), inputs(), "gated", tolerance=0.0).changed == []


def test_gate_and_up_in_one_where_the_kernel_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    formula = Formula(lambda gate, up: functional.silu(gate) * up)
    assert "GPUs" in run(formula, inputs(), "gated", tolerance=0.0).refused[0]
    monkeypatch.setattr(fused_ops, "no_win", lambda *args, **kwargs: None)
    ran = run(formula, inputs(), "gated")
    node = ran.only("graph_swiglu")
    assert [source.name for source in node.args] == [source.name for source in ran.graph.module.graph.nodes if source.op == "placeholder"]


def test_the_activation_says_which_is_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """silu of `up` makes that one the gate; the answer shows if they were exchanged."""
    monkeypatch.setattr(fused_ops, "no_win", lambda *args, **kwargs: None)
    ran = run(Formula(lambda gate, up: gate * functional.silu(up)), inputs(), "gated")
    first, second = (node for node in ran.graph.module.graph.nodes if node.op == "placeholder")
    assert ran.only("graph_swiglu").args == (second, first)


def test_a_gate_read_twice_or_broadcast_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_ops, "no_win", lambda *args, **kwargs: None)
    assert run(Formula(lambda gate, up: ((s := functional.silu(gate)) * up, s)), inputs(), "gated", tolerance=0.0).changed == []
    assert run(Formula(lambda gate, up: functional.silu(gate) * up[:, :1]), inputs(), "gated", tolerance=0.0).changed == []
    assert run(Formula(lambda gate, up: functional.gelu(gate) * up), inputs(), "gated", tolerance=0.0).changed == []
