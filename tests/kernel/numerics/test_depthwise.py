"""Banks of depthwise convolutions and their gradients against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from ridgeline.kernel import depthwise
from ridgeline.kernel.depthwise import Bank, bank_forward, bank_grad_input, bank_grad_weight, chosen_way, make_bank, start_places
from tests.kernel.support import check
from tests.support import FULL

CASES = [  # places by kernel size, sizes, inputs, stride, dilation, image, channels, dtype
    ([(0, 0, 1), (0, 1)], (3, 5), 2, 1, 1, (5, 7), 1, torch.float32),
    ([(0, 2)], (3,), 3, 2, 1, (5, 4), 2, torch.bfloat16),
    ([(0, 0)], (3,), 1, 2, 2, (6, 6), 2, torch.float32),
    ([(0, 1), (1,)], (5, 3), 2, 1, 2, (4, 5), 1, torch.bfloat16),
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def plain(x: torch.Tensor, weights: list[torch.Tensor], bank: Bank) -> torch.Tensor:
    """Branch by branch."""
    inputs = functional.relu(x).split(bank.channels, dim=1)
    out = []
    for places, weight in zip(bank.places, weights, strict=True):
        for place, one in zip(places, weight, strict=True):
            padding = bank.dilation * (one.shape[-1] // 2)
            out.append(functional.conv2d(inputs[place], one[:, None].to(x.dtype), None, bank.stride, padding, bank.dilation, bank.channels))
    return torch.cat(out, dim=1)


def results(function: str, x: torch.Tensor, weights: list[torch.Tensor], grad: torch.Tensor, bank: Bank) -> list[torch.Tensor]:
    if function == "plain":
        leaves = [x.clone().requires_grad_(), *(weight.clone().requires_grad_() for weight in weights)]
        out = plain(leaves[0], leaves[1:], bank)
        out.backward(grad)
        return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]
    args: Any = (x, weights, bank, function)
    return [bank_forward(*args), bank_grad_input(grad, *args), *bank_grad_weight(grad, *args)]


@pytest.mark.parametrize("way", ["triton", "torch"])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_against_float64(case: int, way: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == 1 or (case == 3 and FULL):
        monkeypatch.setattr(depthwise, "TILE", 16)  # several blocks of places, a share of the weights' gradient for every image
    places, sizes, inputs, stride, dilation, image, channels, dtype = CASES[case]
    bank = make_bank(places, inputs, channels, stride, dilation, device=device)
    x = torch.randn(3, channels * inputs, *image, device=device).to(dtype)
    weights = [torch.randn(len(one), channels, k, k, device=device).to(dtype) for one, k in zip(places, sizes, strict=True)]
    grad = torch.randn_like(plain(x.float(), [weight.float() for weight in weights], bank)).to(dtype)
    assert chosen_way(x, way) == way
    ours, same = (results(one, x, weights, grad, bank) for one in (way, "plain"))
    exact = results("plain", x.double(), [weight.double() for weight in weights], grad.double(), bank)
    for triple in zip(ours, same, exact, strict=True):
        check(*triple)


def test_float32_weights_and_empty_sizes(device: str) -> None:
    bank = make_bank([(0, 1), ()], 2, 1, device=device)
    x = torch.randn(2, 2, 4, 4, device=device).to(torch.bfloat16)
    weights = [torch.randn(2, 1, 3, 3, device=device), torch.randn(0, 1, 5, 5, device=device)]
    out, again = (bank_forward(x, weights, bank, way) for way in ("triton", "torch"))
    assert out.shape == (2, 2, 4, 4) and torch.allclose(out.float(), again.float(), atol=0.1)
    for way in ("triton", "torch"):
        found = bank_grad_weight(out, x, weights, bank, way)
        assert [one.dtype for one in found] == [torch.float32] * 2 and found[1].shape == (0, 1, 5, 5)
        assert bank_grad_input(out, x, weights, bank, way).shape == x.shape


def test_start_places_and_ways() -> None:
    assert start_places((0, 0, 2), 3) == [0, 2, 2, 3]
    assert chosen_way(torch.zeros(1, dtype=torch.float64), "triton") == "torch"
    assert chosen_way(torch.zeros(1), "torch") == "torch"
