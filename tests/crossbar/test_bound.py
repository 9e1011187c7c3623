"""Weights without outliers: clamped where they were beyond, untouched elsewhere, and cells then err by less."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ridgeline.core.errors import OptionError
from ridgeline.crossbar.layer.bound import BoundWeights, bound_weights_
from ridgeline.crossbar.layer.convert import set_chip, to_crossbar
from ridgeline.train.fit import fit
from tests.crossbar.support import chip


def network() -> nn.Sequential:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 4)).eval()
    with torch.no_grad():
        net[0].weight[0, 0, 0, 0] = 4.0  # type: ignore[index]
    return net


def test_only_outliers_change() -> None:
    analog = to_crossbar(network(), chip(), engine="blocked")
    before = [parameter.detach().clone() for parameter in analog.parameters()]
    assert bound_weights_(analog, 2.0) == 2
    for old, new in zip(before, analog.parameters(), strict=True):
        limit = 2 * old.std(correction=0) if old.ndim > 1 else torch.tensor(float("inf"))  # biases stay digital
        torch.testing.assert_close(new.detach(), torch.clamp(old, -limit, limit), rtol=0, atol=0)


def spread_over_chips(analog: nn.Module, x: Tensor) -> float:
    """Standard deviation of a layer's output from chip to chip, against the mean size of its weights."""
    found = []
    for number in range(12):
        set_chip(analog, number)
        with torch.no_grad():
            found.append(analog(x))
    weight = analog[0].weight  # type: ignore[index]
    return float(torch.stack(found).std(0).mean() / weight.detach().abs().median())


def test_cells_of_bounded_weights_err_by_less() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(32, 16)).eval(), torch.randn(20, 32)
    with torch.no_grad():
        net[0].weight[::4, ::8] = 1.0  # type: ignore[index]
    analog = to_crossbar(net, chip(cell_stuck_high=0.01, cell_stuck_low=0.02), engine="blocked").eval()
    before = spread_over_chips(analog, x)
    bound_weights_(analog, 1.0)
    assert spread_over_chips(analog, x) < 0.6 * before


def test_fit_keeps_them_bounded() -> None:
    analog, bound = to_crossbar(network(), chip(cell_write_sigma=0.1), engine="blocked"), BoundWeights(1.5)
    images, targets = torch.randn(24, 3, 8, 8), torch.arange(24) % 4
    losses: list[str] = []
    fit(analog, (images, targets), epochs=2, batch=8, learning_rate=0.05, after_step=bound, report=losses.append, progress=False)
    for layer in (analog[0], analog[3]):  # type: ignore[index]
        weight = layer.weight.detach()
        # clamping makes the deviation itself smaller: what was clamped at 1.5 of it lies somewhat beyond 1.5 of the new one
        assert float(weight.abs().max() / weight.std(correction=0)) < 2.0
        assert int((weight.abs() == weight.abs().max()).sum()) > 1  # several at the limit
    assert len(losses) == 2


def test_what_cannot_be_bounded_is_said() -> None:
    with pytest.raises(OptionError, match="to_crossbar"):
        bound_weights_(network())
    with pytest.raises(OptionError, match="standard deviations"):
        bound_weights_(to_crossbar(network(), chip(), engine="blocked"), 0.0)
