"""ADC ranges from data: the largest sum a plain loop finds, shares of sums, least error, and ranges that lose nothing."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

from ridgeline.core.errors import OptionError
from ridgeline.crossbar.engine.reference import encode_input, encode_weight
from ridgeline.crossbar.layer.calibrate import Histogram, calibrate_, widened
from ridgeline.crossbar.layer.convert import to_crossbar
from ridgeline.crossbar.layer.layers import CrossbarLinear, products
from ridgeline.crossbar.numbers import Operand
from ridgeline.crossbar.plan import Plan
from tests.crossbar.support import chip

CALIBRATED: dict[str, Any] = {"adc_range": "calibrated", "adc_clip": True}


def levels_of(operand: Operand, levels: int) -> torch.Tensor:
    """Digits → the nearest levels, on whole numbers."""
    most = torch.tensor(operand.slices.largest)[:, None, None]
    return operand.digits.sign() * ((2 * operand.digits.abs() * (levels - 1) + most) // (2 * most))


def largest_sums(x: torch.Tensor, weight: torch.Tensor, on: Any) -> list[int]:
    """By slice of w, one array and one pair of slices after the other."""
    a = levels_of(encode_input(x, on), on.dac.levels)  # (M, K tiles, Sx, 1, rows)
    b = levels_of(encode_weight(weight.T, on), on.cell.levels)  # (K tiles, N tiles, Sw, rows, columns)
    found = [0] * b.shape[2]
    for array in range(min(a.shape[1], b.shape[0])):
        for i in range(a.shape[2]):
            for j in range(b.shape[2]):
                for across in range(b.shape[1]):
                    found[j] = max(found[j], int((a[:, array, i, 0] @ b[array, across, j]).abs().max()))
    return found


@pytest.mark.parametrize("changes", [{}, {"operands_sign": "differential"}, {"operands_x_granularity": "per-matrix"}], ids=str)
def test_all_sums_give_the_largest(changes: dict[str, Any]) -> None:
    on = chip(adc_levels=17, **CALIBRATED, **changes)
    layer, x = CrossbarLinear(nn.Linear(70, 40), on), torch.randn(9, 70)
    assert calibrate_(layer, [x]) == {"": layer.ranges}
    assert list(layer.ranges) == largest_sums(x, layer.weight.detach(), on)
    with torch.no_grad():
        layer(x)


def test_offset_columns_count_for_the_first_slice() -> None:
    on = chip(adc_levels=17, operands_sign="offset", **CALIBRATED)
    layer, x = CrossbarLinear(nn.Linear(70, 40), on), torch.randn(9, 70)
    calibrate_(layer, [x])
    driven = levels_of(encode_input(x, on), on.dac.levels).sum(-1).max() * (on.cell.levels - 1)
    assert layer.ranges[0] == int(driven) > layer.ranges[2]


def test_convolutions_groups_and_batches_add_up() -> None:
    on = chip(adc_levels=17, **CALIBRATED)
    analog = to_crossbar(nn.Sequential(nn.Conv2d(4, 6, 3, groups=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3)), on)
    batches = [torch.randn(2, 4, 4, 4), torch.randn(2, 4, 4, 4)]
    both = calibrate_(analog, batches)
    each = [calibrate_(analog, [one]) for one in batches]
    assert both == {name: tuple(map(max, each[0][name], each[1][name])) for name in both} and set(both) == {"0", "3"}


def test_ranges_that_fit_the_codes_lose_nothing() -> None:
    plan = Plan(chip(adc_levels=256), 64, 8)
    assert [widened(limit, plan, 0) for limit in (0, 1, 50, 51, 52, 85, 86, 255, 256)] == [1, 1, 51, 51, 85, 85, 255, 255, 256]
    signed = Plan(chip(adc_levels=257, operands_sign="differential"), 64, 8)
    assert [widened(limit, signed, 0) for limit in (3, 65, 128, 129)] == [4, 128, 128, 129]
    assert widened(100, Plan(chip(adc_levels=256, operands_sign="differential"), 64, 8), 0) == 127
    on = chip(adc_levels=513, **CALIBRATED)  # more codes than any sum
    layer, x = CrossbarLinear(nn.Linear(70, 40), on), torch.randn(9, 70)
    calibrate_(layer, [x])
    lossless = CrossbarLinear(nn.Linear(70, 40), chip(adc_levels=32 * 9 + 1))
    lossless.weight, lossless.bias = layer.weight, layer.bias
    with torch.no_grad():
        torch.testing.assert_close(layer(x), lossless(x))


def test_shares_and_least_error() -> None:
    histogram = Histogram(Plan(chip(adc_levels=5), 64, 8))
    histogram.add(1, 0, torch.cat([torch.arange(100.0).repeat(10), torch.tensor([250.0])]))
    assert histogram.ranges(100.0)[0] == 250 and histogram.ranges(98.9)[0] == 98
    least = histogram.ranges("mse")[0]
    errors = {limit: histogram._error(0, limit) for limit in range(1, 251)}
    assert errors[least] <= 1.05 * min(errors.values()) and least < 150
    assert histogram.ranges(100.0)[1] == 1  # nothing was seen there


def test_a_network_keeps_its_mode_and_answers_after_it() -> None:
    analog: Any = to_crossbar(nn.Sequential(nn.Linear(20, 8), nn.Dropout(), nn.LSTM(8, 4)), chip(adc_levels=255, **CALIBRATED)).train()
    x = torch.randn(5, 20)
    with pytest.raises(OptionError, match="calibrate_"):
        analog(x)
    found = calibrate_(analog, [(x,), x], percentile="mse")
    assert analog.training and len(found) == 3 and all(product.watch is None for product in products(analog).values())
    analog(x)


def test_an_error_weighs_as_much_as_its_input_slice() -> None:
    histogram, seen = Histogram(Plan(chip(adc_levels=5), 64, 8)), {1: [3, 17, 40], 3: [200, 250]}
    for i, sums in seen.items():
        histogram.add(i, 0, torch.tensor(sums, dtype=torch.float32))
    worth = {1: 1 * 16, 3: 3 * 1}  # the largest digit times the weight, of slices of 1, 1, 2 and 2 bits
    for limit in (20, 40, 200, 250):
        codes = {total: min(4, round(Fraction(4 * total, limit))) for sums in seen.values() for total in sums}
        wanted = sum((worth[i] * (total - codes[total] * limit / 4)) ** 2 for i, sums in seen.items() for total in sums)
        assert histogram._error(0, limit) == pytest.approx(wanted)


def test_parts_that_were_frozen_stay_so() -> None:
    model = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    analog: Any = to_crossbar(model, chip(adc_levels=255, **CALIBRATED), fold=False).train()
    analog[1].eval()
    calibrate_(analog, [torch.randn(3, 20)])
    assert [module.training for module in analog] == [True, False, True] and analog.training


@pytest.mark.parametrize("tokens", [5, 7])
def test_products_of_activations_are_seen_anew_in_every_call(tokens: int) -> None:
    on, batches = chip(adc_levels=5, **CALIBRATED), [torch.randn(2, 5, 12), torch.randn(2, tokens, 12)]
    analog = to_crossbar(nn.MultiheadAttention(12, 3, batch_first=True).eval(), on, attention=True)
    both = calibrate_(analog, [(x, x, x) for x in batches])
    each = [calibrate_(analog, [(x, x, x)]) for x in batches]
    assert both == {name: tuple(map(max, each[0][name], each[1][name])) for name in both} and len(both) == 6


def test_full_range_chips_are_left_alone() -> None:
    layer = CrossbarLinear(nn.Linear(20, 8), chip())
    assert calibrate_(layer, [torch.randn(2, 20)]) == {} and layer.ranges == ()


def test_wrong_options() -> None:
    layer = CrossbarLinear(nn.Linear(20, 8), chip(adc_levels=17, **CALIBRATED))
    for percentile in (0.0, 100.5):
        with pytest.raises(OptionError, match="percentile"):
            calibrate_(layer, [torch.randn(2, 20)], percentile=percentile)
    with pytest.raises(OptionError, match="no batches"):
        calibrate_(layer, [])
