"""Quantisation and digits against plain Python numbers: halves, maxima at powers of two, zero blocks, the extremes of two's complement."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import OptionError
from ridgeline.crossbar.numbers import SliceKind, Slices, block_scale, dequantise, encode, quantise, whole_numbers
from tests.crossbar.support import Quantised

widths = st.lists(st.integers(1, 5), min_size=1, max_size=5).map(lambda rest: (1, *rest))
values = st.floats(-1e6, 1e6, width=32)
blocks: Any = st.lists(st.lists(values, min_size=3, max_size=3), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", ["twos", "magnitude", "offset"])
@given(cut=widths, data=st.data())
def test_digits_hold_every_integer(kind: SliceKind, cut: tuple[int, ...], data: st.DataObject) -> None:
    slices = Slices(cut, kind)
    most = 2 ** (slices.span - 1) - 1
    least = -most if kind == "magnitude" else -most - 1
    integers = torch.tensor([[least, most, 0, -1, data.draw(st.integers(least, most))]])
    digits = slices.digits(integers)
    assert digits.shape == (len(cut), 1, 5)
    assert all(int(digits[i].abs().max()) <= largest for i, largest in enumerate(slices.largest))
    assert bool((digits * integers.sign() >= 0).all() if kind == "magnitude" else (digits >= 0).all())
    assert torch.equal(slices.assemble(digits), integers)


def test_kinds_of_digits() -> None:
    given_integers = torch.tensor([[-27, 5]])
    assert Slices((1, 1, 2, 2), "magnitude").digits(given_integers).squeeze(1).T.tolist() == [[0, -1, -2, -3], [0, 0, 1, 1]]
    assert Slices((2, 2, 2), "offset").digits(given_integers).squeeze(1).T.tolist() == [[0, 1, 1], [2, 1, 1]]
    assert Slices((2, 2), "magnitude").weights == (4, 1) and Slices((2, 2), "magnitude").span == 5


@given(blocks, st.integers(2, 20), st.sampled_from(["int", "bfp"]))
def test_quantising_in_float32_gives_the_same_integers(matrix: Any, bits: int, number_format: str) -> None:
    values = torch.tensor(matrix, dtype=torch.float32)
    values[0, 0] = values.abs().max() * (2 * (1 << (bits - 1)) - 3) / (2 * (1 << (bits - 1)) - 2)  # near half a step
    maximum = values.abs().amax(1, keepdim=True)
    found = whole_numbers(values, maximum, bits, number_format, values.dtype)
    expected = quantise(values.double(), block_scale(maximum.double(), number_format), bits, number_format)
    assert torch.equal(found.long(), expected)


def test_planted_float32_rounding_would_be_caught() -> None:
    """Halves of a step whose float32 product falls to the other side: without the repetition in float64 some integers differ."""
    values = torch.rand(200_000, generator=torch.Generator().manual_seed(0))
    maximum = torch.tensor(0.7310586)
    expected = quantise(values.double(), maximum.double(), 12, "int")
    assert torch.equal(whole_numbers(values, maximum, 12, "int", values.dtype).long(), expected)
    assert not torch.equal((values * (2047 / maximum)).round().long(), expected)


def test_digits_are_most_significant_first() -> None:
    assert Slices((1, 1, 2, 2)).digits(torch.tensor([[-32, 27, -1]])).squeeze(1).T.tolist() == [[1, 0, 0, 0], [0, 1, 2, 3], [1, 1, 3, 3]]
    assert Slices((1, 1, 2, 2)).weights == (-32, 16, 4, 1)


@given(blocks, widths, st.sampled_from(["int", "bfp"]), st.sampled_from(["per-matrix", "per-row", "per-col", (2, 2)]))
def test_integers_are_those_of_python(matrix: Any, cut: tuple[int, ...], number_format: str, granularity: Any) -> None:
    operand = encode(torch.tensor(matrix, dtype=torch.float64), Slices(cut), number_format, (1, 2), granularity)
    expected = Quantised(matrix, cut, number_format, (1, 2), granularity)
    assert operand.tiling.join(Slices(cut).assemble(operand.digits)).tolist() == expected.integer
    step = operand.tiling.join(operand.step[..., None, None].expand((*operand.step.shape, 1, 2)))
    dequantised = [float(q * s) for row in zip(expected.integer, expected.step, strict=True) for q, s in zip(*row, strict=True)]
    assert step.flatten().tolist() == pytest.approx([float(s) for row in expected.step for s in row], rel=1e-15)
    assert operand.values.flatten().tolist() == pytest.approx(dequantised, rel=1e-15)


def test_halves_go_to_the_even_integer() -> None:
    exact = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5], dtype=torch.float64)
    assert quantise(exact, torch.tensor(7.0, dtype=torch.float64), 4, "int").tolist() == [0, 2, 2, 0, -2]
    assert quantise(exact, torch.tensor(2.0, dtype=torch.float64), 4, "bfp").tolist() == [0, 2, 2, 0, -2]


@pytest.mark.parametrize("power", [-30, -3, 0, 1, 9, 100])
def test_block_exponent_at_a_power_of_two(power: int) -> None:
    at = 2.0**power
    below, above = math.nextafter(at, 0.0) - (1e-9 if power > -30 and power < 20 else 0.0), at * 1.5
    found = block_scale(torch.tensor([at, below, above], dtype=torch.float64), "bfp").tolist()
    expected_below = power if power == -30 else power - 1  # 1e-10 lifts a maximum of 2^-30 less an ulp over the power
    assert found == [power, expected_below, power]


def test_block_floating_point_clips_only_upwards() -> None:
    operand = encode(torch.tensor([[1.999, -1.999, 1.0]]), Slices((1, 1, 2)), "bfp", (1, 3), "per-matrix")
    assert Slices((1, 1, 2)).assemble(operand.digits).flatten().tolist() == [7, -8, 4]


def test_a_magnitude_clips_both_ways_and_its_values_say_so() -> None:
    slices = Slices((1, 1, 2), "magnitude")
    operand = encode(torch.tensor([[1.999, -1.999, 1.0]]), slices, "bfp", (1, 3), "per-matrix")
    assert slices.assemble(operand.digits).flatten().tolist() == [15, -15, 8]
    assert operand.values.flatten().tolist() == [15 / 8, -15 / 8, 1.0]


@pytest.mark.parametrize("number_format", ["int", "bfp"])
def test_a_zero_block_is_zero(number_format: str) -> None:
    operand = encode(torch.zeros(2, 3), Slices((1, 3)), number_format, (1, 3), "per-row")
    assert not bool(operand.digits.any()) and not bool(operand.values.any())
    assert operand.scale.unique().tolist() == [0.0 if number_format == "int" else -34.0]


def test_values_are_dequantised_in_float64() -> None:
    q, scale = torch.tensor([[5]]), torch.tensor([[0.1]], dtype=torch.float64)
    assert dequantise(q, scale, 6, "int").item() == 5 / 31 * 0.1
    assert dequantise(q, torch.tensor([[3.0]], dtype=torch.float64), 6, "bfp").item() == 5 * 2.0**-1


@pytest.mark.parametrize("wrong", [(), (1,), (2, 2), (1, 0), (1, 16, 16)])
def test_slices_that_cannot_be_are_errors(wrong: tuple[int, ...]) -> None:
    with pytest.raises(OptionError, match="slices"):
        Slices(wrong)


def test_what_has_no_digit_is_an_error() -> None:
    for bad in (math.nan, math.inf):
        with pytest.raises(OptionError, match="not finite"):
            encode(torch.tensor([[bad, 1.0]]), Slices((1, 3)), "int", (1, 2), "per-row")
    with pytest.raises(OptionError, match="fp8"):
        encode(torch.ones(1, 2), Slices((1, 3)), "fp8", (1, 2), "per-row")
