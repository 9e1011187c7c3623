"""Layers on a chip: against the reference, and as modules: cached cells, copies, state dicts, autocast, torch.compile."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.core.errors import OptionError
from ridgeline.crossbar.engine import reference
from ridgeline.crossbar.layer import product as product_module
from ridgeline.crossbar.layer.convert import digital_state_dict, to_crossbar
from ridgeline.crossbar.layer.layers import CrossbarConv, CrossbarLinear, set_call, set_chip, set_engine
from ridgeline.crossbar.layer.product import checked_ranges, loses_nothing
from tests.crossbar.support import chip

CHIP = chip(adc_levels=4097)
NEARLY_DIGITAL: dict[str, Any] = {
    "operands_x_slices": [1, 1, 2, 4, 4], "operands_w_slices": [1, 1, 2, 4, 4], "dac_levels": 16, "cell_levels": 16, "adc_levels": 7201
}  # fmt: skip  # 12 bits, and an ADC that loses nothing


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_linear_is_the_references() -> None:
    digital, x = nn.Linear(70, 40), torch.randn(2, 5, 70)
    with torch.no_grad():
        out = CrossbarLinear(digital, CHIP)(x)
    torch.testing.assert_close(out.double(), reference.linear(x, digital.weight, CHIP, digital.bias).detach(), rtol=1e-6, atol=1e-6)
    assert float((out - digital(x).detach()).abs().max()) > 1e-3  # it is not the digital layer that answered


@pytest.mark.parametrize("shape", [(70,), (3, 70), (2, 3, 70), (2, 2, 3, 70), (0, 70)])
def test_linear_shapes(shape: tuple[int, ...]) -> None:
    digital, x = nn.Linear(70, 8), torch.randn(shape)
    assert CrossbarLinear(digital, CHIP)(x).shape == digital(x).shape


@pytest.mark.parametrize(
    "window", [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": (2, 0)}, {"groups": 4, "padding": 1}, {"padding": "same"}]
)
def test_convolution_is_the_references(window: dict[str, Any]) -> None:
    digital, x = nn.Conv2d(8, 12, 3, **window), torch.randn(2, 8, 7, 6)
    padding = (1, 1) if window.get("padding") == "same" else digital.padding
    options: dict[str, Any] = {"stride": digital.stride, "padding": padding, "dilation": digital.dilation, "groups": digital.groups}
    with torch.no_grad():
        out = CrossbarConv(digital, CHIP)(x)
        wanted = reference.conv2d(x, digital.weight, CHIP, digital.bias, **options)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("digital", "size"),
    [
        (nn.Conv1d(4, 6, 4, padding="same", dilation=3), (2, 4, 17)),  # 9 zeros in all: 4 before, 5 after
        (nn.Conv1d(4, 6, 3, stride=2, padding=1, padding_mode="circular"), (2, 4, 9)),
        (nn.Conv2d(4, 6, (2, 3), padding=(1, 2), padding_mode="reflect"), (2, 4, 6, 7)),
        (nn.Conv2d(4, 6, 3, padding="valid"), (4, 6, 7)),
        (nn.Conv3d(4, 6, (2, 3, 2), stride=(1, 2, 1), padding=(1, 0, 1), groups=2), (2, 4, 4, 7, 5)),
        (nn.Conv2d(6, 6, 3, groups=6, bias=False), (2, 6, 5, 5)),
    ],
)
def test_every_window_is_near_the_digital(digital: nn.Module, size: tuple[int, ...]) -> None:
    x = torch.randn(size)
    with torch.no_grad():
        out, wanted = CrossbarConv(digital, chip(**NEARLY_DIGITAL))(x), digital(x)  # type: ignore[arg-type]
    assert out.shape == wanted.shape
    assert float((out - wanted).abs().max()) < 4e-3 * float(wanted.abs().max())


def counted_programs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    real = product_module.program
    monkeypatch.setattr(product_module, "program", lambda *given: calls.append(1) or real(*given))
    return calls


def test_cells_are_programmed_once_and_again_when_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted_programs(monkeypatch)
    layer, x = CrossbarLinear(nn.Linear(40, 8), chip(adc_levels=4097, cell_write_sigma=0.01)).eval(), torch.randn(3, 40)
    changes = [
        lambda: None,
        lambda: layer.weight.data.mul_(1),  # not a change that torch counts
        lambda: layer.weight.mul_(2),
        lambda: setattr(layer, "weight", nn.Parameter(layer.weight.clone())),
        lambda: set_chip(layer, 3),
        lambda: set_engine(layer, "reference"),
        lambda: layer.load_state_dict(nn.Linear(40, 8).state_dict()),
    ]
    seen = []
    for change in changes:
        with torch.no_grad():
            change()
            layer(x)
        seen.append(len(calls))
    assert seen == [1, 1, 2, 3, 4, 5, 6]


def test_a_changed_weight_changes_the_answer() -> None:
    layer, x = CrossbarLinear(nn.Linear(40, 8, bias=False), CHIP), torch.randn(3, 40)
    with torch.no_grad():
        before = layer(x)
        layer.weight.mul_(2)
        torch.testing.assert_close(layer(x), 2 * before)


def test_weights_made_in_inference_mode_are_never_stale() -> None:
    with torch.inference_mode():
        layer, x = CrossbarLinear(nn.Linear(40, 8, bias=False), CHIP), torch.randn(3, 40)
        before = layer(x)
        layer.weight.mul_(2)
        torch.testing.assert_close(layer(x), 2 * before)
    assert float(before.abs().max()) > 0


def test_inference_keeps_nothing_for_backward() -> None:
    layer, x = CrossbarLinear(nn.Linear(40, 8), CHIP), torch.randn(3, 40)
    with torch.inference_mode():
        first = layer(x)
    assert layer._prepared is not None and layer._prepared.values is None
    out = layer(x)  # now with a gradient, from the same weight
    assert out.requires_grad and torch.equal(out, first)


def test_copies_stand_alone() -> None:
    layer, x = CrossbarLinear(nn.Linear(40, 8), CHIP), torch.randn(3, 40)
    before = layer(x)
    twin = copy.deepcopy(layer)
    assert twin._prepared is None
    with torch.no_grad():
        twin.weight.zero_()
    assert torch.equal(layer(x), before) and not torch.equal(twin(x), before)


def test_state_dicts_go_both_ways() -> None:
    digital = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    analog = to_crossbar(digital, CHIP)
    assert list(analog.state_dict()) == list(digital.state_dict())
    other = copy.deepcopy(digital)
    with torch.no_grad():
        other[0].weight.add_(1.0)
    analog.load_state_dict(other.state_dict())
    digital.load_state_dict(analog.state_dict())
    assert torch.equal(digital[0].weight, other[0].weight)


def test_another_chip_is_programmed_and_read_as_its_file_says() -> None:
    digital, x = nn.Linear(40, 8), torch.randn(3, 40)
    for changes in ({"adc_levels": 16}, {"cell_write_sigma": 0.2}, {"operands_sign": "differential"}):
        layer = CrossbarLinear(digital, chip())
        with torch.no_grad():
            before = layer(x)
            layer.chip = chip(**changes)
            assert torch.equal(layer(x), CrossbarLinear(digital, chip(**changes))(x)) and not torch.equal(layer(x), before), changes


def test_ranges_travel_in_the_state_dict() -> None:
    calibrated = chip(adc_levels=256, adc_range="calibrated", adc_clip=True)
    layer, x = CrossbarLinear(nn.Linear(40, 8), calibrated), torch.randn(3, 40)
    with pytest.raises(OptionError, match="calibrate_"):
        layer(x)
    layer.ranges = (90, 91, 92, 93)
    stored = layer.state_dict()
    assert stored["ranges"].tolist() == [90, 91, 92, 93]
    other = CrossbarLinear(nn.Linear(40, 8), calibrated)
    other.load_state_dict(stored)
    assert other.ranges == layer.ranges and torch.equal(other(x), layer(x))
    other.load_state_dict(nn.Linear(40, 8).state_dict())  # a digital one has none: they stay
    assert other.ranges == layer.ranges
    assert set(digital_state_dict(layer)) == {"weight", "bias"}
    full = CrossbarLinear(nn.Linear(40, 8), chip(adc_levels=256))
    full.load_state_dict(stored)
    assert full.ranges == (), "the file of this chip says its range"
    with pytest.raises(OptionError, match="each of the 4 slices"):
        checked_ranges((1, 2), calibrated, "layer")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_only_the_dtype_that_comes_out(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    analog, x = to_crossbar(model, CHIP), torch.randn(2, 3, 4, 4)
    first: Any = analog[0]
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        assert first(x).dtype == model[0](x).dtype == dtype
        assert torch.equal(first(x), first.forward(x))
        hidden = first(x)
        assert analog(x).dtype == model(x).dtype
    with torch.no_grad():
        torch.testing.assert_close(hidden, first(x).to(dtype), rtol=0, atol=0)


def test_half_and_double_modules() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        digital, x = nn.Linear(40, 8).to(dtype), torch.randn(3, 40, dtype=dtype)
        out = CrossbarLinear(digital, CHIP)(x)
        wanted = reference.linear(x, digital.weight, CHIP, digital.bias)
        assert out.dtype == dtype
        most = 1e-2 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(out.double(), wanted, rtol=most, atol=most)


def test_compiled_gives_the_same() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).eval()
    analog, x = to_crossbar(model, CHIP), torch.randn(2, 3, 4, 4)
    compiled: Any = torch.compile(analog, backend="eager")  # the graphs around the products are what could go wrong
    with torch.no_grad():
        assert torch.equal(compiled(x), analog(x))
    compiled(x).sum().backward()
    mine = analog[0].weight.grad.clone()  # type: ignore[union-attr, operator]
    analog.zero_grad()
    analog(x).sum().backward()
    assert torch.equal(mine, analog[0].weight.grad)  # type: ignore[arg-type]


def test_calls_move_on_only_where_reads_are_noisy() -> None:
    def two(on: Any) -> tuple[Tensor, Tensor, CrossbarLinear]:
        torch.manual_seed(0)
        layer, x = CrossbarLinear(nn.Linear(40, 8), on).eval(), torch.randn(3, 40)
        with torch.no_grad():
            return layer(x), layer(x), layer

    first, second, layer = two(chip(adc_levels=257, adc_noise_lsb=0.5))
    assert not torch.equal(first, second) and layer.draw.call == 2
    set_call(layer, 0)
    x = torch.randn(3, 40)
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x)) and layer.draw.call == 0
        set_call(layer, None)
        assert not torch.equal(layer(x), layer(x))
    first, second, layer = two(chip(adc_levels=257))
    assert torch.equal(first, second) and layer.draw.call == 0


def test_report_names_engine_and_shortcuts() -> None:
    layer, x = CrossbarLinear(nn.Linear(40, 70), chip(**NEARLY_DIGITAL), engine="fused"), torch.randn(3, 40)
    assert layer.report()["engine"] is None
    layer(x)
    told = layer.report()
    assert told["engine"] == "blocked" and told["why"].startswith("fused")
    assert told["arrays"] == 2 * 3 * 5  # 40 rows on 32, 70 columns on 32, 5 slices
    assert loses_nothing(layer.plan) and not loses_nothing(CrossbarLinear(nn.Linear(40, 70), CHIP).plan)
