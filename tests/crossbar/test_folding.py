"""Norms found by running a model that cannot be traced: only where nobody else reads the convolution."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.crossbar.layer.convert import to_crossbar
from ridgeline.crossbar.layer.folding import pairs_by_running
from tests.crossbar.support import chip


class Branching(nn.Module):
    """Its forward asks for values, so torch.fx cannot trace it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.read_twice, self.second_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.called_twice, self.third_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.shown, self.fourth_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first_norm(self.first(x))
        x = x if float(x.mean()) > 100 else x.relu()
        kept = self.read_twice(x)
        x = self.second_norm(kept) + kept
        x = self.third_norm(self.called_twice(self.called_twice(x)))
        shown = self.shown(x)
        return self.fourth_norm(shown), shown


def trained() -> Branching:
    model = Branching().train()
    for _ in range(3):
        model(torch.randn(4, 3, 6, 6) * 2 + 1)
    return model.eval()


def test_only_safe_pairs_are_found() -> None:
    assert pairs_by_running(trained(), (torch.randn(1, 3, 6, 6),)) == [("first", "first_norm")]


def test_folded_by_example() -> None:
    model, x = trained(), torch.randn(2, 3, 6, 6)
    fine = chip(operands_x_slices=[1, 1, 2, 4, 4], operands_w_slices=[1, 1, 2, 4, 4], dac_levels=16, cell_levels=16, adc_levels=7201)
    without, folded = to_crossbar(model, fine), to_crossbar(model, fine, example=x)
    assert without.crossbar_report()["norms_folded"] == [] and folded.crossbar_report()["norms_folded"] == ["first_norm"]  # type: ignore[operator]
    assert folded.crossbar_report()["norms_left"] == ["second_norm", "third_norm", "fourth_norm"]  # type: ignore[operator]
    with torch.no_grad():
        assert float((folded(x)[0] - model(x)[0]).abs().max()) < 2e-2


def test_every_module_keeps_its_mode() -> None:
    model = trained().train()
    model.first_norm.eval()
    assert pairs_by_running(model, (torch.randn(1, 3, 6, 6),))
    assert model.training and model.second_norm.training and not model.first_norm.training
