"""Norms that follow a chip: statistics equal those of what the chip's layer gives, nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ridgeline.core.errors import OptionError
from ridgeline.crossbar.layer.convert import set_chip, to_crossbar
from ridgeline.crossbar.layer.settle import settle_norms_
from tests.crossbar.support import chip

NOISY = {"cell_write_sigma": 0.2, "cell_stuck_low": 0.05}


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, momentum=0.3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 4)).eval()


def test_statistics_are_those_of_the_chips_layer() -> None:
    analog = to_crossbar(network(), chip(**NOISY), engine="blocked", fold=False).eval()
    set_chip(analog, 5)
    images = torch.randn(12, 3, 8, 8)
    weights = {name: value.clone() for name, value in analog.state_dict().items() if "running" not in name and "tracked" not in name}
    assert settle_norms_(analog, images.split(4)) == 1
    with torch.no_grad():
        given = analog[0](images)  # type: ignore[index]
    norm = analog[1]  # type: ignore[index]
    torch.testing.assert_close(norm.running_mean, given.mean((0, 2, 3)))
    parts = torch.stack([part.var((0, 2, 3)) for part in given.split(4)]).mean(0)
    torch.testing.assert_close(norm.running_var, parts)
    assert norm.momentum == 0.3 and not any(module.training for module in analog.modules())
    assert all(torch.equal(value, analog.state_dict()[name]) for name, value in weights.items())


def test_another_chip_settles_elsewhere() -> None:
    analog, images = to_crossbar(network(), chip(**NOISY), engine="blocked", fold=False).eval(), torch.randn(8, 3, 8, 8)
    found = []
    for number in (0, 1, 0):
        set_chip(analog, number)
        settle_norms_(analog, [images])
        found.append(analog[1].running_mean.clone())  # type: ignore[index]
    assert torch.equal(found[0], found[2]) and not torch.allclose(found[0], found[1])


def test_a_network_in_training_settles_on_the_chip_that_was_set() -> None:
    analog, images = to_crossbar(network(), chip(**NOISY), engine="blocked", fold=False).eval(), torch.randn(8, 3, 8, 8)
    set_chip(analog, 2)
    settle_norms_(analog, [images])
    wanted = analog[1].running_mean.clone()  # type: ignore[index]
    analog.train()
    settle_norms_(analog, [images])
    assert torch.equal(analog[1].running_mean, wanted) and all(module.training for module in analog.modules())  # type: ignore[index]


def test_what_cannot_be_settled_is_said_and_nothing_is_left_in_training() -> None:
    folded = to_crossbar(network(), chip(), engine="blocked").eval()
    with pytest.raises(OptionError, match="fold=False"):
        settle_norms_(folded, [torch.randn(2, 3, 8, 8)])
    analog = to_crossbar(network(), chip(), engine="blocked", fold=False).eval()
    before = {name: value.clone() for name, value in analog.state_dict().items()}
    with pytest.raises(OptionError, match="no batch"):
        settle_norms_(analog, [])
    with pytest.raises(RuntimeError):
        settle_norms_(analog, [torch.randn(2, 3, 8, 8), torch.randn(2, 5, 8, 8)])
    assert all(torch.equal(value, before[name]) for name, value in analog.state_dict().items()), "the statistics are as before"
    assert not any(module.training for module in analog.modules()) and analog[1].momentum == 0.3  # type: ignore[index]
