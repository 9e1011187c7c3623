"""Recurrent layers on a nearly digital chip against torch's: layers, directions, packed sequences, projections, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ridgeline.crossbar.layer.convert import to_crossbar
from tests.crossbar.support import chip

FINE = chip(
    operands_x_slices=[1, 1, 2, 4, 4], operands_w_slices=[1, 1, 2, 4, 4], dac_levels=16, cell_levels=16, adc_levels=7201
)  # fmt: skip
KINDS = [
    nn.LSTM(5, 6),
    nn.LSTM(5, 6, num_layers=2, bidirectional=True, batch_first=True),
    nn.LSTM(5, 6, proj_size=3, bidirectional=True),
    nn.GRU(5, 6, num_layers=2, bias=False),
    nn.GRU(5, 6, bidirectional=True, batch_first=True),
    nn.RNN(5, 6, nonlinearity="relu"),
    nn.RNN(5, 6),
]


def flat(result: Any) -> list[Tensor]:
    out, state = result
    first = [out.data] if isinstance(out, PackedSequence) else [out]
    return first + (list(state) if isinstance(state, tuple) else [state])


def close(ours: Any, torchs: Any) -> None:
    for one, other in zip(flat(ours), flat(torchs), strict=True):
        assert one.shape == other.shape
        assert float((one - other).abs().max()) < 5e-3


@pytest.mark.parametrize("digital", KINDS, ids=repr)
def test_as_torch_does(digital: Any) -> None:
    analog, x = to_crossbar(digital, FINE), torch.randn(4, 3, 5)
    with torch.no_grad():
        plain, ours = digital(x), analog(x)
        close(ours, plain)
        close(analog(x[:, 0]), digital(x[:, 0]))  # without a batch
        state = ours[1]
        close(analog(x, state), digital(x, state))
        assert float((analog(x, state)[0] - ours[0]).abs().max()) > 1e-3  # the state that came in counts
        packed = pack_sequence([torch.randn(3, 5), torch.randn(4, 5), torch.randn(1, 5)], enforce_sorted=False)
        close(analog(packed), digital(packed))
    assert set(analog.state_dict()) == set(digital.state_dict())


def test_gradients_are_near_torchs() -> None:
    digital, x = nn.LSTM(5, 6, batch_first=True), torch.randn(2, 4, 5)
    analog = to_crossbar(digital, FINE)
    analog(x)[0].pow(2).sum().backward()
    digital(x)[0].pow(2).sum().backward()
    for name, parameter in digital.named_parameters():
        ours = dict(analog.named_parameters())[name].grad
        assert ours is not None and parameter.grad is not None
        assert float((ours - parameter.grad).abs().max()) < 2e-2 * float(parameter.grad.abs().max()), name


def test_every_step_draws_its_own_noise() -> None:
    noisy = chip(adc_levels=257, adc_noise_lsb=0.5)
    analog: Any = to_crossbar(nn.RNN(5, 6, nonlinearity="relu", bias=False), noisy).eval()
    with torch.no_grad():
        analog.weight_ih_l0.zero_()
        out = analog(torch.zeros(3, 1, 5), torch.ones(1, 1, 6))[0]
        driven = [product.draw.call for product in analog.arrays.values()]
    assert driven == [3, 3]
    assert not torch.equal(out[0], out[1])


def test_autocast_dtype() -> None:
    digital, x = nn.GRU(5, 6), torch.randn(4, 3, 5)
    analog = to_crossbar(digital, FINE)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert analog(x)[0].dtype == torch.bfloat16


def test_fed_back_cells_are_read_anew_at_every_step() -> None:
    digital = nn.RNN(1, 1, nonlinearity="relu", bias=False)
    with torch.no_grad():
        digital.weight_ih_l0.zero_()
        digital.weight_hh_l0.fill_(1.0)
        analog = to_crossbar(digital, chip(cell_read_sigma=0.2))
        out = analog(torch.zeros(6, 1, 1), torch.ones(1, 1, 1))[0].flatten()
    assert len((out[1:] / out[:-1]).unique()) == 5  # one number, its own largest: it is coded alike at every step
