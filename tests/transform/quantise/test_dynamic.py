"""Dynamic int8 against an int64 product of the same codes."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ridgeline.core.errors import TransformError
from ridgeline.transform.kinds import build, describe
from ridgeline.transform.quantise.dynamic import DynamicInt8Linear, quantise_dynamic_, row_codes
from ridgeline.transform.quantise.grid import Grid, quantise
from ridgeline.transform.quantise.int8_layers import int_mm_works
from tests.support import full_or_tenth


def layer_of(linear: nn.Linear, bits: int = 8) -> DynamicInt8Linear:
    return DynamicInt8Linear.from_quantised(quantise(linear.weight.detach(), Grid(bits)), linear.bias)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(1, 24), (2, 3, 24), (33, 24)])
def test_outputs_equal_the_integer_product(bits: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = layer_of(nn.Linear(24, 10), bits)
    x = torch.randn(*shape) * torch.logspace(-3, 3, shape[0]).view(-1, *[1] * (len(shape) - 1))
    codes, scale = row_codes(x.reshape(-1, 24))
    sums = codes.long() @ layer.integers().long().t()
    exact = sums.double() * scale.double() * layer.scale.double().view(1, -1) + layer.bias.double()
    torch.testing.assert_close(layer(x).reshape(-1, 10).double(), exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))


def test_error_against_float_is_that_of_eight_bits() -> None:
    torch.manual_seed(1)
    linear = nn.Linear(256, 64)
    x = torch.randn(128, 256)
    exact = linear.double()(x.double())
    noise = (layer_of(linear.float())(x).double() - exact).norm() / exact.norm()
    assert noise < 0.012  # about 40 dB a factor
    assert (layer_of(linear)(x * 1.01).double() - exact).norm() / exact.norm() > noise / 2 + 0.004  # a planted 1 % is seen


@given(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=32))
@settings(max_examples=full_or_tenth(300), deadline=None)
def test_row_codes_stay_within_half_a_step(values: list[float]) -> None:
    x = torch.tensor([values])
    codes, scale = row_codes(x)
    assert int(codes.abs().max()) <= 127
    assert ((codes.double() * scale.double() - x.double()).abs() <= 0.5001 * scale.double()).all()


def test_rows_do_not_touch_each_other_and_zeros_stay_zeros() -> None:
    torch.manual_seed(2)
    layer = layer_of(nn.Linear(16, 8, bias=False))
    x = torch.randn(3, 16)
    alone = layer(x[:1])
    x[1] = 0
    x[2] = 1e30
    assert torch.equal(layer(x)[:1], alone) and torch.equal(layer(x)[1], torch.zeros(8))
    x[2, 0] = torch.nan
    assert torch.equal(layer(x)[:1], alone) and not layer(x)[2].isfinite().any()


def test_config_state_copy_and_types() -> None:
    layer = layer_of(nn.Linear(16, 8), 3)
    x = torch.randn(2, 16)
    twin = build(json.loads(json.dumps(describe(layer))))
    twin.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(twin(x), layer(x)) and torch.equal(copy.deepcopy(layer).half()(x), layer(x))
    assert layer(x.bfloat16()).dtype is torch.bfloat16
    assert layer.logical_parameters() == 16 * 8 + 8 and layer.packed.nbytes == 8 * 6
    assert (
        layer.runs_packed("cpu")[0] == int_mm_works()
        and layer.runs_packed("cuda")[0]
        and not layer_of(nn.Linear(15, 8)).runs_packed("cuda")[0]
    )


def test_a_whole_model() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    x = torch.randn(5, 1, 4, 4)
    wanted = model(x)
    rows, notes = quantise_dynamic_(model, skip=["4"])
    assert [row.name for row in rows] == ["2"] and isinstance(model[2], DynamicInt8Linear) and isinstance(model[0], nn.Conv2d)
    assert any("1 convolutions stay" in note for note in notes) and rows[0].sqnr_db > 38
    assert (model(x) - wanted).norm() / wanted.norm() < 0.03


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(TransformError, match="no linear layer"):
        quantise_dynamic_(nn.Sequential(nn.Conv2d(1, 1, 1)))
