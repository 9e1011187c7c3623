"""Banks of depthwise convolutions and their gradients against float64."""

from __future__ import annotations

from dataclasses import replace
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


def test_no_gradient_where_the_input_is_exactly_zero(device: str) -> None:
    """As behind another ReLU: half of all inputs."""
    bank = make_bank([(0, 1)], 2, 1, device=device)
    x, weight = torch.randn(2, 2, 5, 4, device=device).relu(), torch.randn(2, 1, 3, 3, device=device)
    grad = torch.randn_like(x)
    ours = bank_grad_input(grad, x, [weight], bank, "triton")
    assert not ours[x == 0].any() and ours[x > 0].all()
    torch.testing.assert_close(ours, results("plain", x, [weight], grad, bank)[1])


def test_branches_that_are_off_send_nothing_back(device: str) -> None:
    """Nothing of theirs is read, of one kernel size or the other: nan would show."""
    bank = make_bank([(0, 0, 1), (0, 1)], 2, 1, device=device)
    on = (torch.tensor([1.0, 0.0, 1.0], device=device), torch.tensor([0.0, 1.0], device=device))
    x = torch.randn(2, 2, 5, 4, device=device)
    weights = [torch.randn(3, 1, 3, 3, device=device), torch.randn(2, 1, 5, 5, device=device)]
    grad = torch.randn(2, 5, 5, 4, device=device)
    few = make_bank([(0, 1), (1,)], 2, 1, device=device)
    kept = torch.cat(on) != 0
    expected = results("plain", x, [weight[one != 0] for weight, one in zip(weights, on, strict=True)], grad[:, kept], few)
    grad[:, ~kept] = float("nan")
    for weight, one in zip(weights, on, strict=True):
        weight[one == 0] = float("nan")
    out, grad_input, *grad_weights = results("triton", x, weights, grad, replace(bank, on=on))
    torch.testing.assert_close(out[:, kept], expected[0])
    torch.testing.assert_close(grad_input, expected[1], rtol=1e-4, atol=1e-5)
    assert not out[:, ~kept].any()
    for ours, true, one in zip(grad_weights, expected[2:], on, strict=True):
        torch.testing.assert_close(ours[one != 0], true, rtol=1e-4, atol=1e-4)
        assert not ours[one == 0].any()


def test_without_relu(device: str) -> None:
    """As of inputs that need none: negative ones count, and get gradients."""
    bank = replace(make_bank([(0, 1)], 2, 1, device=device), relu=False)
    x, weight, grad = torch.randn(2, 2, 5, 4, device=device), torch.randn(2, 1, 3, 3, device=device), torch.randn(2, 2, 5, 4, device=device)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = functional.conv2d(*leaves, padding=1, groups=2)
    out.backward(grad)
    for way in ("triton", "torch"):
        for ours, true in zip(results(way, x, [weight], grad, bank), (out, *(leaf.grad for leaf in leaves)), strict=True):
            torch.testing.assert_close(ours, true.detach(), rtol=1e-4, atol=1e-5)
