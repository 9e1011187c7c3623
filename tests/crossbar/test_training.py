"""Straight-through gradients against the reference and the stored case, and training with noise through fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ridgeline.crossbar.engine import reference
from ridgeline.crossbar.layer import straight_through
from ridgeline.crossbar.layer.convert import to_crossbar
from ridgeline.crossbar.layer.layers import CrossbarConv, CrossbarLinear, products
from ridgeline.crossbar.layer.product import TRAINING_CHIPS
from ridgeline.train.fit import fit
from tests.crossbar.support import chip, chip_of_case

CASES = Path(__file__).parent / "cases"
CHIP = chip(adc_levels=4097)


def relative(ours: Any, wanted: Any) -> float:
    return float((ours.double() - wanted.double()).norm() / wanted.double().norm())


def test_stored_gradients_of_a_linear_layer() -> None:
    with np.load(CASES / "linear_bias.npz") as stored:
        case = {name: torch.from_numpy(stored[name]) for name in ("x", "w", "b", "grad_x", "grad_w", "grad_b", "out64")}
        on = chip_of_case(json.loads(str(stored["cfg"])))
    digital = nn.Linear(70, 40)
    with torch.no_grad():
        digital.weight.copy_(case["w"])
        digital.bias.copy_(case["b"])
    layer, x = CrossbarLinear(digital, on), case["x"].float().requires_grad_()
    out = layer(x)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
    assert relative(out.detach(), case["out64"]) < 1e-6
    for ours, name in ((x.grad, "grad_x"), (layer.weight.grad, "grad_w"), (layer.bias.grad, "grad_b")):  # type: ignore[union-attr]
        assert relative(ours, case[name]) < 1e-6, name


@pytest.mark.parametrize("window", [{"padding": 1}, {"stride": 2, "padding": 1, "dilation": 2}, {"groups": 3, "padding": 1}])
@pytest.mark.parametrize("granularity", [[1, 64], "per-matrix"], ids=str)
@pytest.mark.parametrize("piece_bytes", [1, 2**28])  # image by image, and all at once
def test_convolution_gradients(window: dict[str, Any], granularity: Any, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(straight_through, "CACHE_BYTES", piece_bytes)
    on = chip(adc_levels=4097, operands_x_granularity=granularity)
    digital, x = nn.Conv2d(6, 9, 3, **window).double().float(), torch.randn(3, 6, 8, 7)
    mine, theirs = x.clone().requires_grad_(), x.clone().double().requires_grad_()
    layer, weight = CrossbarConv(digital, on), digital.weight.detach().double().requires_grad_()
    options: dict[str, Any] = {"stride": digital.stride, "padding": digital.padding, "dilation": digital.dilation, "groups": digital.groups}
    out, wanted = layer(mine), reference.conv2d(theirs, weight, on, digital.bias.detach(), **options)  # type: ignore[union-attr]
    gradient = torch.randn_like(out)
    out.backward(gradient)
    wanted.backward(gradient.double())
    assert relative(mine.grad, theirs.grad) < 1e-6 and relative(layer.weight.grad, weight.grad) < 1e-6
    again = digital.weight.detach().double().requires_grad_()
    if granularity == [1, 64]:  # the average over an image's patches is another gradient: the test can tell them apart
        reference.conv2d(theirs, again, on, **options, weight_gradient="image").backward(gradient.double())
        assert relative(layer.weight.grad, again.grad) > 1e-4


@pytest.mark.parametrize("piece_bytes", [1, 4 * 4 * 70 * 4, 2**28])
@pytest.mark.parametrize("granularity", [[1, 64], [2, 64], "per-matrix"], ids=str)
def test_linear_gradients_in_pieces(granularity: Any, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(straight_through, "CACHE_BYTES", piece_bytes)
    on = chip(adc_levels=4097, operands_x_granularity=granularity)
    digital, x = nn.Linear(70, 9), torch.randn(3, 5, 70)
    weight = digital.weight.detach().double().requires_grad_()
    layer = CrossbarLinear(digital, on)
    out, wanted = layer(x), reference.linear(x.double(), weight, on)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    wanted.backward(gradient.double())
    assert relative(layer.weight.grad, weight.grad) < 1e-6


def test_frozen_weights_get_no_gradient_and_inputs_still_do() -> None:
    layer, x = CrossbarLinear(nn.Linear(40, 8).requires_grad_(False), CHIP), torch.randn(3, 40, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None


def test_gradient_is_of_the_weights_the_forward_used() -> None:
    layer, x = CrossbarLinear(nn.Linear(40, 8, bias=False), CHIP), torch.randn(3, 40, requires_grad=True)
    out = layer(x)
    wanted = torch.ones_like(out) @ straight_through.weight_as_matrices(layer._prepared.values, 1)[0].reshape(40, 8).T  # type: ignore[union-attr, arg-type]
    with torch.no_grad():
        layer.weight.zero_()
        layer(x)
    out.sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, wanted)


def test_every_training_pass_is_another_chip() -> None:
    layer, x = CrossbarLinear(nn.Linear(40, 8), chip(adc_levels=4097, cell_write_sigma=0.1)), torch.randn(3, 40)
    layer.train()
    first, second = layer(x), layer(x)
    assert not torch.equal(first, second) and layer.draw.chip == TRAINING_CHIPS + 2
    layer.eval()
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x)) and layer.draw.chip == 0
    twin = CrossbarLinear(nn.Linear(40, 8), layer.chip)
    twin.load_state_dict(layer.state_dict())
    assert twin.passes == 2  # a run that is taken up again goes on with the noise it would have had
    twin.train()
    assert torch.equal(twin(x), layer.train()(x))


def test_ideal_chips_count_nothing() -> None:
    layer = CrossbarLinear(nn.Linear(40, 8), CHIP).train()
    layer(torch.randn(3, 40))
    assert layer.passes == 0 and set(layer.state_dict()) == {"weight", "bias"}


def test_fit_trains_on_a_noisy_chip() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(256, 20)
    targets = (inputs[:, :10].sum(1) > inputs[:, 10:].sum(1)).long()
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
    analog = to_crossbar(model, chip(adc_levels=257, cell_write_sigma=0.05, cell_read_sigma=0.02))
    history = fit(analog, (inputs, targets), epochs=6, batch=32, learning_rate=0.1, progress=False)
    analog.eval()
    with torch.no_grad():
        accuracy = float((analog(inputs).argmax(1) == targets).float().mean())
    assert accuracy > 0.9 and history is not None
    assert all(product.passes == 48 for product in products(analog).values())


def test_products_are_computed_as_before_once_training_is_over() -> None:
    torch.manual_seed(0)
    analog = to_crossbar(nn.Sequential(nn.Linear(6, 4)), chip(), engine="blocked")
    fit(analog, (torch.randn(8, 6), torch.arange(8) % 4), epochs=1, batch=4, progress=False)
    assert torch.get_float32_matmul_precision() == "highest"  # raises where the GPU's and the CPU's settings do not belong together
    analog.eval()(torch.randn(2, 6))
