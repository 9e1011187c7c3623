"""The oracle against fractions on small random chips, against plain torch where the chip loses nothing, and its gradients.

random chip, x, w ──reference.matmul──> codes == product_of_fractions, digit for digit;  out to 1e-12
16-bit operands, an ADC with a code for every sum ──linear, conv2d──> torch's own result
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from ridgeline.core.errors import OptionError
from ridgeline.crossbar import adc, noise
from ridgeline.crossbar.cells import Cells, program
from ridgeline.crossbar.engine import reference
from ridgeline.crossbar.plan import Draw, Plan
from ridgeline.target.crossbar import CrossbarSpec
from tests.crossbar.support import chip, product_of_fractions

FINE = {"operands_x_slices": [1, 4, 4, 4, 4], "operands_w_slices": [1, 4, 4, 4, 4], "dac_levels": 16, "cell_levels": 16}
LOSSLESS = FINE | {
    "array_rows": 8,
    "array_columns": 8,
    "operands_x_granularity": [1, 8],
    "operands_w_granularity": [8, 8],
    "adc_levels": 8 * 15 * 15 + 1,
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


@st.composite
def small_products(draw: Any) -> tuple[CrossbarSpec, Tensor, Tensor]:
    """A chip of at most 4 x 3 cells and operands with whole, zero and random entries, so that ties and empty blocks occur."""
    widths = st.lists(st.integers(1, 2), min_size=1, max_size=2).map(lambda rest: [1, *rest])
    granularity = st.one_of(st.sampled_from(["per-matrix", "per-row", "per-col"]), st.lists(st.integers(1, 7), min_size=2, max_size=2))
    w_slices = draw(widths)
    levels = st.one_of(st.integers(2, 40), st.lists(st.integers(2, 40), min_size=len(w_slices), max_size=len(w_slices)))
    on = chip(
        array_rows=draw(st.integers(1, 4)), array_columns=draw(st.integers(1, 3)), operands_format=draw(st.sampled_from(["int", "bfp"])),
        operands_x_slices=draw(widths), operands_w_slices=w_slices, operands_x_granularity=draw(granularity),
        operands_w_granularity=draw(granularity), operands_x_tile_rows=draw(st.integers(1, 3)), dac_levels=draw(st.integers(2, 6)),
        cell_levels=draw(st.integers(4, 6)), adc_levels=draw(levels), adc_clip=draw(st.booleans()),
    )  # fmt: skip
    m, k, n = draw(st.integers(1, 4)), draw(st.integers(1, 7)), draw(st.integers(1, 4))
    entry = st.one_of(st.integers(-4, 4).map(float), st.floats(-3, 3, width=32))
    x, w = (draw(st.lists(entry, min_size=count, max_size=count)) for count in (m * k, k * n))
    return on, torch.tensor(x, dtype=torch.float64).reshape(m, k), torch.tensor(w, dtype=torch.float64).reshape(k, n)


def differing_codes(on: CrossbarSpec, x: Tensor, w: Tensor) -> int:
    """How many codes are not the fractions'; the outputs must follow the codes."""
    analog = reference.matmul(x, w, on)
    codes, out = product_of_fractions(x.tolist(), w.tolist(), on)
    wrong = sum(int(analog.codes[place]) != code for place, code in codes.items())
    if not wrong:
        expected = torch.tensor([[float(value) for value in row] for row in out], dtype=torch.float64)
        assert float((analog.out - expected).abs().max()) <= 1e-12 * max(1e-9, float(x.abs().max() * w.abs().max()) * len(w))
        assert int(analog.codes.count_nonzero()) == sum(code != 0 for code in codes.values())  # nothing in the padding
    return wrong


@given(small_products())
def test_codes_are_those_of_fractions(case: tuple[CrossbarSpec, Tensor, Tensor]) -> None:
    assert differing_codes(*case) == 0


def test_planted_rounding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    on = chip(array_rows=4, adc_levels=16, operands_w_granularity="per-matrix", operands_x_granularity="per-matrix")
    x, w = normal(6, 12), normal(12, 6, seed=1)
    assert differing_codes(on, x, w) == 0
    monkeypatch.setattr(adc, "round_half_even", lambda n, d: torch.div(2 * n + d, 2 * d, rounding_mode="floor"))
    assert differing_codes(on, x, w) > 0


def test_planted_sign_and_slice_order_are_caught() -> None:
    on, x, w = chip(array_rows=4), normal(3, 6), normal(6, 3, seed=1)
    right = reference.matmul(x, w, on)
    assert not torch.equal(right.codes, right.codes.flip(-4))
    assert differing_codes(on, x, w) == 0
    assert error(right.out, -x @ w) > 1 > 0.2 > error(right.out, x @ w)


def test_an_adc_with_a_code_for_every_sum_loses_nothing() -> None:
    x, w = normal(2, 5, 21), normal(21, 10, seed=1)
    analog = reference.matmul(x, w, chip(**LOSSLESS))
    assert error(analog.out, analog.xq @ analog.wq) < 1e-13
    assert error(analog.out, x @ w) < 1e-3
    assert error(analog.out * 1.01, analog.xq @ analog.wq) > 1e-3


def test_ideal_voltages_and_conductances_give_the_same_codes() -> None:
    on, x, w = chip(adc_levels=4097), normal(5, 70), normal(70, 40, seed=1)
    exact = reference.matmul(x, w, on)
    v, g = reference.ideal_voltage(reference.encode_input(x, on), on), reference.ideal_conductance(reference.encode_weight(w, on), on)
    for given_parts in ({"voltage": v}, {"conductance": g}, {"voltage": v, "conductance": g}):
        assert torch.equal(reference.matmul(x, w, on, **given_parts).codes, exact.codes)
    assert not torch.equal(reference.matmul(x, w, on, conductance=g * 1.01).codes, exact.codes)


def test_a_coarser_dac_and_each_slices_own_adc_are_used() -> None:
    x, w = normal(5, 70), normal(70, 40, seed=1)
    same, own = (reference.matmul(x, w, chip(adc_levels=levels)) for levels in (4096, [4096, 4096, 64, 4096]))
    changed = (same.codes != own.codes).flatten(-2).any(-1)  # (arrays, x slices, w slices)
    assert changed[..., 2].any() and not changed[..., [0, 1, 3]].any()
    assert not torch.equal(same.out, reference.matmul(x, w, chip(dac_levels=3)).out)


def test_blocks_of_x_and_w_may_pad_k_differently() -> None:
    x, w = normal(3, 130), normal(130, 4, seed=1)
    mixed = reference.matmul(x, w, chip(operands_w_granularity=[128, 64]))
    assert mixed.x_digits.shape[1] == 6 and mixed.w_digits.shape[0] == 8 and mixed.codes.shape[0] == 5
    assert error(mixed.out, x @ w) < 0.2


SIGNS = ["slice", "differential", "offset"]


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("number_format", ["int", "bfp"])
def test_every_sign_loses_nothing_with_a_code_for_every_sum(sign: str, number_format: str) -> None:
    x, w = normal(2, 5, 21), normal(21, 10, seed=1)
    levels = 2 * (LOSSLESS["adc_levels"] - 1) + 1  # of a signed sum, each half of the range has as many  # type: ignore[operator]
    analog = reference.matmul(x, w, chip(**LOSSLESS | {"adc_levels": levels}, operands_sign=sign, operands_format=number_format))
    assert error(analog.out, analog.xq @ analog.wq) < 1e-13
    assert error(analog.out, x @ w) < 1e-3
    assert bool((analog.codes < 0).any()) == (sign == "differential")


@pytest.mark.parametrize("sign", SIGNS)
def test_programmed_cells_are_used(sign: str) -> None:
    on, x, w = chip(operands_sign=sign), normal(5, 70), normal(70, 40, seed=1)
    plan = Plan(on, 70, 40)
    cells, plain = program(w[None], plan, Draw()), reference.matmul(x, w, on)
    given_cells = reference.matmul(x, w, on, cells=cells)
    assert torch.equal(given_cells.codes, plain.codes) and error(given_cells.out, plain.out) < 1e-14
    raised = Cells(cells.planes + 1, cells.step, cells.values, True)
    assert torch.equal(reference.matmul(x, w, on, cells=raised).codes, plain.codes) == (sign == "differential")  # a pair's difference stays
    doubled = Cells(cells.planes, cells.step * 2, cells.values, True)
    assert error(reference.matmul(x, w, on, cells=doubled).out, 2 * plain.out) < 1e-14


def test_ranges_and_clipping_are_each_slices_own() -> None:
    x, w, full = normal(5, 70), normal(70, 40, seed=1), 32 * 9
    wide, narrow = (full, full, full, full), (full, full, 40, full)
    for clips in (False, True):
        on = chip(adc_levels=256, adc_clip=clips)
        whole, cut = (reference.matmul(x, w, on, plan=Plan(on, 70, 40, ranges=ranges)).codes for ranges in (wide, narrow))
        assert torch.equal(whole, reference.matmul(x, w, on).codes)
        changed = (whole != cut).flatten(-2).any(-1)
        assert changed[..., 2].any() and not changed[..., [0, 1, 3]].any()
        assert (int(cut.max()) > 255) == (not clips)


def test_noise_of_the_converters_is_the_named_one() -> None:
    """One conversion each, by hand: the index of contract, sigma and rounding."""
    x, w, draw = normal(2, 3, 5), normal(5, 4, seed=1), Draw(3, 1, 2, 7)
    quiet, loud = (
        chip(array_rows=4, adc_levels=64, adc_noise_lsb=2 * on, adc_offset_lsb=3 * on, dac_noise_sigma=0.3 * on) for on in (0.0, 1.0)
    )
    plan = Plan(loud, 5, 4)
    codes = reference.matmul(x, w, loud, draw=draw).codes
    assert torch.equal(reference.matmul(x, w, loud).codes, reference.matmul(x, w, quiet, draw=draw).codes)
    b, a, i, j, m, n = 1, 1, 2, 3, 2, 3  # the second array holds k = 4 alone
    level_x = int(reference.levels_of(reference.encode_input(x, quiet).digits, plan.x, 4)[b, m, a, i, 0, 0])
    level_w = int(reference.levels_of(reference.encode_weight(w, quiet).digits, plan.w, 4)[a, 0, j, 0, n])

    def drawn(kind: noise.Kind, index: int) -> float:
        return float(noise.normal(draw, kind, torch.tensor([index])))

    voltage = level_x * (1 + 0.3 * drawn(noise.Kind.DAC, ((b * 3 + m) * 5 + 4) * 4 + i))
    conversion = (((b * 3 + m) * 4 + n) * 2 + a) * 16 + j * 4 + i
    added = 2 * drawn(noise.Kind.ADC, conversion) + 3 * drawn(noise.Kind.OFFSET, (a * 4 + n) * 4 + j)
    assert int(codes[b, a, i, j, m, n]) == round(voltage * level_w * float(plan.scale(j)) + added)


def test_an_empty_batch_gives_an_empty_output() -> None:
    assert reference.matmul(normal(0, 70), normal(70, 40), chip()).out.shape == (0, 40)


SHAPES = [
    {"stride": 1, "padding": 1, "dilation": 1, "groups": 1},
    {"stride": (2, 1), "padding": (1, 0), "dilation": 1, "groups": 2},
    {"stride": 3, "padding": 2, "dilation": (1, 2), "groups": 4},
]


@pytest.mark.parametrize("options", SHAPES)
@pytest.mark.parametrize("weight_gradient", ["patch", "image"])
def test_convolutions_are_torchs_when_nothing_is_lost(options: dict[str, Any], weight_gradient: Any) -> None:
    on = chip(**LOSSLESS)
    inputs = [normal(2, 4, 7, 6), normal(8, 4 // options["groups"], 3, 2, seed=1), normal(8, seed=2)]
    ours, torchs = ([tensor.clone().requires_grad_() for tensor in inputs] for _ in range(2))
    out = reference.conv2d(ours[0], ours[1], on, ours[2], weight_gradient=weight_gradient, **options)
    expected = functional.conv2d(*torchs, **options)
    assert out.shape == expected.shape and error(out, expected) < 1e-3
    gradient = normal(*out.shape, seed=3)
    out.backward(gradient)
    expected.backward(gradient)
    for found, right in zip(ours, torchs, strict=True):
        assert found.grad is not None and right.grad is not None and error(found.grad, right.grad) < 1e-3


def test_gradients_use_dequantised_operands() -> None:
    on, gradient = chip(adc_levels=16), normal(5, 40, seed=3)
    x, weight, bias = normal(5, 70).requires_grad_(), normal(40, 70, seed=1).requires_grad_(), normal(40, seed=2).requires_grad_()
    reference.linear(x, weight, on, bias).backward(gradient)
    analog = reference.matmul(x, weight.T, on)
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    assert error(x.grad, gradient @ analog.wq.T) < 1e-14 and error(weight.grad, gradient.T @ analog.xq) < 1e-14
    assert torch.equal(bias.grad, gradient.sum(0))
    assert error(x.grad, gradient @ weight.detach()) > 1e-3  # the weights themselves would be a planted error


def test_the_gradient_of_a_convolution_is_each_patchs_own() -> None:
    on, x, weight = chip(adc_levels=64), normal(1, 12, 6, 6), normal(4, 12, 3, 3, seed=1).requires_grad_()
    out = reference.conv2d(x, weight, on, padding=1)
    gradient = normal(*out.shape, seed=2)
    out.backward(gradient)
    patches = functional.unfold(x, 3, padding=1).transpose(1, 2)
    xq = reference.matmul(patches, weight.flatten(1).T, on).xq
    assert weight.grad is not None
    assert error(weight.grad.flatten(1), gradient.flatten(2)[0] @ xq[0]) < 1e-14


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: reference.matmul(normal(3, 4), normal(5, 2), chip()), r"\(3, 4\) times w of shape \(5, 2\)"),
        (lambda: reference.matmul(normal(4), normal(4, 2), chip()), r"\(4,\)"),
        (lambda: reference.matmul(normal(3, 0), normal(0, 2), chip()), "not empty"),
        (lambda: reference.matmul(normal(3, 4) / 0, normal(4, 2), chip()), "not finite"),
        (lambda: reference.matmul(normal(3, 4), normal(4, 2), chip(), voltage=normal(3, 4)), "a voltage of shape"),
        (lambda: reference.matmul(normal(3, 4), normal(4, 2), chip(), conductance=normal(4, 2)), "a conductance of shape"),
        (lambda: reference.matmul(normal(3, 4), normal(4, 2), chip(operands_sign="offset"), voltage=normal(3, 4)), "give programmed cells"),
        (lambda: reference.matmul(normal(3, 4), normal(4, 2), chip(adc_range="calibrated")), "calibrate the model"),
        (lambda: reference.matmul(normal(3, 4), normal(4, 2), chip(), plan=Plan(chip(), 4, 2, ranges=(9, 9))), "ADC ranges"),
        (lambda: reference.conv2d(normal(1, 4, 5, 5), normal(2, 3, 3, 3), chip()), "weight"),
        (lambda: reference.conv2d(normal(1, 4, 5, 5), normal(3, 2, 3, 3), chip(), groups=2), "2 groups"),
        (lambda: reference.conv2d(normal(1, 4, 2, 2), normal(3, 4, 3, 3), chip()), "kernel"),
    ],
)
def test_what_cannot_be_computed_is_an_error(call: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        call()
