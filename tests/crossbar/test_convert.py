"""Conversion of whole models: what is replaced, what is folded, what stays digital, and what overrides do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from ridgeline.core.errors import OptionError, TargetSpecError, TransformError, UnknownNameError
from ridgeline.crossbar.layer.convert import changed_chip, digital_state_dict, fields_of, to_crossbar
from ridgeline.crossbar.layer.layers import CrossbarConv, CrossbarLinear, products
from ridgeline.target.crossbar import CrossbarSpec
from ridgeline.transform.quantise.fold import fold_norms_
from ridgeline.workload.case import CaseOptions
from ridgeline.workload.models import build_named
from tests.crossbar.support import chip

FINE = chip(
    operands_x_slices=[1, 1, 2, 4, 4], operands_w_slices=[1, 1, 2, 4, 4], dac_levels=16, cell_levels=16, adc_levels=7201
)  # fmt: skip
CHIP = chip(adc_levels=4097)


def report_of(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = model.crossbar_report()
    return found


@pytest.mark.parametrize(
    ("name", "layers", "norms"), [("resnet18", 21, 20), ("mobilenet-v2", 53, 52), ("resnet20", 20, 19), ("resnet56", 56, 55)]
)
def test_named_networks_fold_wholly(name: str, layers: int, norms: int) -> None:
    told = report_of(to_crossbar(build_named(name, CaseOptions(device="meta")).module.eval(), CHIP))
    assert (len(told["layers"]), len(told["norms_folded"]), told["norms_left"], told["digital"]) == (layers, norms, [], [])


def test_a_network_on_a_fine_chip_is_near_itself() -> None:
    model: Any = build_named("resnet20", CaseOptions(device="cpu")).module.eval()
    with torch.no_grad():
        for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(0.5, 2)
        x = torch.randn(1, 3, 32, 32)
        out, wanted = to_crossbar(model, FINE)(x), model(x)
    assert float((out - wanted).abs().max()) < 2e-2 * float(wanted.abs().max())


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.tied = nn.Linear(8, 10, bias=False)
        self.tied.weight = self.table.weight
        self.grow = nn.ConvTranspose1d(8, 8, 2)
        self.spectral = parametrizations.weight_norm(nn.Linear(8, 8))
        self.own = nn.Parameter(torch.randn(8, 8))
        self.twice = nn.Linear(8, 8)
        self.again = self.twice

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.grow(self.table(tokens).transpose(1, 2)).transpose(1, 2)
        return self.tied(self.again(self.twice(self.spectral(x) @ self.own)))  # type: ignore[no-any-return]


def test_what_stays_digital_is_listed() -> None:
    model = Mixed()
    analog: Any = to_crossbar(model, CHIP)
    told = report_of(analog)
    assert [row["name"] for row in told["layers"]] == ["tied", "twice"]
    kinds = {row["name"]: row["why"] for row in told["digital"]}
    assert "looked up" in kinds["table"] and "transposed" in kinds["grow"] and "" in kinds
    assert any(name.startswith("spectral") for name in kinds)
    assert analog.tied.weight is analog.table.weight and analog.twice is analog.again
    analog(torch.tensor([[1, 2, 3]]))
    assert isinstance(model.twice, nn.Linear) and type(model.tied) is nn.Linear  # the model itself is as it was


def test_overrides_change_single_layers() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(36, 8), nn.Linear(8, 2))
    analog: Any = to_crossbar(model, CHIP, overrides={
        "*": {"engine": "blocked"},
        "0": {"w_slices": [1, 2, 2], "x_slices": [1, 1, 2], "rows": 16, "columns": 8, "adc_levels": 33, "cell_write_sigma": 0.1},
        "3": {"digital": True},
        "4": {"sign": "differential", "engine": "reference"},
    })  # fmt: skip
    first = analog[0].chip
    assert (first.operands.w_slices, first.array.rows, first.array.columns, first.adc.levels) == ((1, 2, 2), 16, 8, 33)
    assert first.cell.write_sigma.value == 0.1 and analog[1].chip is CHIP
    assert type(analog[3]) is nn.Linear and analog[4].chip.operands.sign == "differential"
    with torch.no_grad():
        assert analog(torch.randn(1, 3, 7, 7)).shape == (1, 2)
    assert [row["engine"] for row in report_of(analog)["layers"]] == ["blocked", "blocked", "reference"]
    assert report_of(analog)["digital"] == [{"name": "3", "kind": "Linear", "why": "set digital"}]


@pytest.mark.parametrize(
    ("overrides", "error", "says"),
    [
        ({"layer9.*": {"rows": 32}}, OptionError, "no layer has such a name"),
        ({"0": {"row": 32}}, OptionError, "rows"),
        ({"0": {"rows": 0}}, TargetSpecError, "array.rows"),
        ({"0": {"digital": "yes"}}, OptionError, "True or False"),
        ({"0": {"engine": "abacus"}}, UnknownNameError, "abacus"),
        ({"0": {"w_slices": [1, 8]}}, TargetSpecError, "levels"),
    ],
)
def test_wrong_overrides(overrides: dict[str, dict[str, Any]], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        to_crossbar(nn.Sequential(nn.Linear(4, 4)), CHIP, overrides=overrides)


def test_fields_are_the_chips() -> None:
    known = fields_of()
    assert known["rows"] == ("array", "rows") and known["adc_levels"] == ("adc", "levels") and known["read_sigma"] == ("cell", "read_sigma")
    assert "levels" not in known and "noise_sigma" in known
    assert changed_chip(CHIP, {}, "*") is CHIP
    assert CrossbarSpec.model_validate(CHIP.model_dump(mode="json")) == CHIP


def test_nothing_to_convert() -> None:
    with pytest.raises(TransformError, match="nothing of Sequential"):
        to_crossbar(nn.Sequential(nn.ReLU(), nn.ConvTranspose2d(2, 2, 2)), CHIP)
    with pytest.raises(UnknownNameError):
        to_crossbar(nn.Linear(2, 2), CHIP, engine="quick")


def test_state_dict_of_a_folded_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    folded = copy.deepcopy(model)
    fold_norms_(folded)
    analog = to_crossbar(model, CHIP)
    folded.load_state_dict(digital_state_dict(analog))
    analog.load_state_dict(folded.state_dict())
    kept = to_crossbar(model, CHIP, fold=False)
    assert set(kept.state_dict()) == set(model.state_dict()) and isinstance(kept[1], nn.BatchNorm2d)  # type: ignore[index]


def test_layers_draw_from_streams_of_their_own() -> None:
    analog = to_crossbar(
        nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4, num_layers=2), nn.MultiheadAttention(4, 2)), CHIP, seed=5, attention=True
    )
    draws = [product.draw for product in products(analog).values()]
    assert len({draw.layer for draw in draws}) == len(draws) and {draw.seed for draw in draws} == {5}


def test_copies_report_on_themselves() -> None:
    analog = to_crossbar(nn.Sequential(nn.Linear(4, 4)), CHIP)
    twin = copy.deepcopy(analog)
    analog(torch.randn(2, 4))
    assert report_of(analog)["layers"][0]["engine"] and report_of(twin)["layers"][0]["engine"] is None


def test_a_single_layer_and_a_chip_by_name() -> None:
    assert isinstance(to_crossbar(nn.Linear(4, 4), "rram-64"), CrossbarLinear)
    assert isinstance(to_crossbar(nn.Conv3d(4, 4, 1), CHIP), CrossbarConv)
