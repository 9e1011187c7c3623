"""The integer ADC against fractions, and the two errors it exists to avoid: rounding half up, and ties a float decides.

every column sum of an array ──convert_exact──> codes  ==  round(Fraction)   (Python rounds a Fraction half to even)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.core.errors import OptionError
from ridgeline.crossbar import noise
from ridgeline.crossbar.adc import AddedInTurn, added_lsb, convert, convert_exact, full_scale, is_tie, round_half_even, to_codes
from ridgeline.crossbar.plan import Draw, Plan
from tests.crossbar.support import chip

Adc = Callable[[Tensor, int, int], Tensor]


def wrong_sums(adc: Adc, levels: int, full: int) -> list[int]:
    """Column sums, of all there can be, whose code is not the fraction's."""
    codes = adc(torch.arange(full + 1), levels, full).tolist()
    return [total for total, code in enumerate(codes) if code != round(Fraction(total * (levels - 1), full))]


@given(st.integers(1, 40), st.integers(2, 9), st.integers(2, 9), st.integers(2, 70_000))
def test_codes_are_the_rounded_fractions(rows: int, dac_levels: int, cell_levels: int, levels: int) -> None:
    assert wrong_sums(convert_exact, levels, full_scale(rows, dac_levels, cell_levels)) == []


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**5))
def test_rounding_holds_for_negative_numbers_too(numerator: int, denominator: int) -> None:
    assert round_half_even(torch.tensor([numerator]), denominator).item() == round(Fraction(numerator, denominator))


@given(st.integers(1, 300), st.integers(2, 5000))
def test_ties_are_the_halves(full: int, levels: int) -> None:
    halves = [Fraction(total * (levels - 1), full) % 1 == Fraction(1, 2) for total in range(full + 1)]
    assert is_tie(torch.arange(full + 1), levels, full).tolist() == halves


def half_up(total: Tensor, levels: int, full: int) -> Tensor:
    return torch.div(2 * total * (levels - 1) + full, 2 * full, rounding_mode="floor")


def by_current(dtype: torch.dtype) -> Adc:
    """The same conversion in amperes: 0.2 V, 10 nS to 10 µS, 4 levels each."""
    unit_a = 0.2 * (1e-5 - 1e-8) / 9

    def adc(total: Tensor, levels: int, full: int) -> Tensor:
        current = total.to(dtype) * unit_a
        return torch.round(current / (unit_a * full) * (levels - 1)).to(torch.int64)

    return adc


@pytest.mark.parametrize("levels", [64, 4096])  # with some other numbers of levels the floats happen to be right
@pytest.mark.parametrize("planted", [half_up, by_current(torch.float32), by_current(torch.float64)], ids=["half up", "float32", "float64"])
def test_planted_rounding_is_caught_at_ties_and_only_there(planted: Adc, levels: int) -> None:
    full = full_scale(32, 4, 4)
    wrong = wrong_sums(planted, levels, full)
    assert wrong
    assert bool(is_tie(torch.tensor(wrong), levels, full).all())
    assert wrong_sums(convert_exact, levels, full) == []


def test_levels_one_above_a_power_of_two_never_tie() -> None:
    full = full_scale(32, 4, 4)
    assert bool(is_tie(torch.arange(full + 1), 4096, full).any())
    assert not bool(is_tie(torch.arange(full + 1), 4097, full).any())


def test_currents_follow_the_same_formula() -> None:
    full, reference_a = full_scale(32, 4, 4), 6.4e-5
    current = torch.arange(full + 1, dtype=torch.float64) * (reference_a / full)
    assert torch.equal(convert(current, 4097, reference_a), convert_exact(torch.arange(full + 1), 4097, full))


def test_clipping_holds_noisy_currents_in_range() -> None:
    current = torch.tensor([-1.0, 0.4, 3.0], dtype=torch.float64)
    assert convert(current, 11, 2.0).tolist() == [-5, 2, 15]
    assert convert(current, 11, 2.0, clip=True).tolist() == [0, 2, 10]


@given(st.integers(2, 300), st.integers(1, 300), st.booleans(), st.booleans())
def test_codes_of_any_sign_and_range(levels: int, top: int, signed: bool, clips: bool) -> None:
    plan = Plan(chip(adc_levels=levels, adc_clip=clips, operands_sign="differential" if signed else "slice"), 32, 4, ranges=(top,) * 4)
    totals = list(range(-288 if signed else 0, 289))
    most = (levels - 1) // 2 if signed else levels - 1
    codes = [round(Fraction(total * (levels - 1), top * (2 if signed else 1))) for total in totals]
    expected = [min(max(code, -most if signed else 0), most) if clips else code for code in codes]
    assert to_codes(torch.tensor(totals), plan, 2).tolist() == expected
    shifted = to_codes(torch.tensor(totals), plan, 2, torch.full((len(totals),), 3.0, dtype=torch.float64))
    assert clips or (shifted - torch.tensor(codes) - 3).abs().max() <= 1  # a tie may go either way where something is added


def test_what_integers_cannot_decide_is_an_error() -> None:
    with pytest.raises(OptionError, match="62 bits"):
        convert_exact(torch.tensor([1]), 1 << 24, full_scale(65536, 1 << 12, 1 << 12))
    with pytest.raises(OptionError, match="float64"):
        convert_exact(torch.tensor([1.0], dtype=torch.float64), 16, 288)


def places(plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """row (7, 1, 1), column (groups * N, 1), array."""
    return torch.arange(7)[:, None, None] + 3, torch.arange(plan.groups * plan.n)[:, None], torch.arange(plan.arrays)


def test_four_slice_pairs_of_a_conversion_share_a_counter() -> None:
    on = chip(adc_noise_lsb=2.0, operands_x_slices=[1, 2, 2], operands_w_slices=[1, 1, 1, 1, 2])
    plan, draw = Plan(on, 70, 3, 2), Draw(1, 2, 3, 4)
    row, column, array = places(plan)
    assert plan.arrays == 3
    for i in range(3):
        for j in range(5):
            found = added_lsb(plan, draw, row, column, array, i, j)
            index = ((row * 6 + column) * 3 + array) * 16 + j * 3 + i  # 15 pairs, so 16 numbers
            assert found is not None and torch.equal(found, 2 * noise.normal(draw, noise.Kind.ADC, index))


@pytest.mark.parametrize(("sigma", "offset"), [(0.5, 0.0), (0.0, 2.0), (0.5, 2.0), (0.0, 0.0)])
def test_pairs_in_turn_are_the_single_ones_at_a_quarter_of_the_draws(monkeypatch: pytest.MonkeyPatch, sigma: float, offset: float) -> None:
    plan, draw = Plan(chip(adc_noise_lsb=sigma, adc_offset_lsb=offset, operands_x_slices=[1, 2, 2]), 70, 3), Draw(1, 2, 3, 4)
    single = {(i, j): added_lsb(plan, draw, *places(plan), i, j) for j in range(4) for i in range(3)}
    drawn, plain = [], noise._philox

    def counted(index: Tensor, draw: Draw, kind: noise.Kind) -> list[Tensor]:
        drawn.append(kind)
        return plain(index, draw, kind)

    monkeypatch.setattr(noise, "_philox", counted)
    turn = AddedInTurn(plan, draw, *places(plan))
    for (i, j), expected in single.items():
        found, narrow = turn.of(i, j), AddedInTurn(plan, draw, *places(plan)).of(i, j, torch.float32) if (i, j) == (1, 2) else None
        assert (found is None) == (expected is None) == (sigma == offset == 0)
        if found is not None and expected is not None:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
            assert narrow is None or narrow.dtype == torch.float32
    assert drawn.count(noise.Kind.ADC) == (4 if sigma else 0)  # 12 pairs are 3 counters, and one more for the narrow one


@pytest.mark.parametrize("levels", [2, 16, 255, 256, 4096])
def test_a_ramp_rounds_down(levels: int) -> None:
    """Its counter has not passed what lies between two codes: floor, of negative sums as well."""
    for sign, low in (("slice", 0), ("differential", -1)):
        slices = [1, 2] if sign == "slice" else [2, 2]
        on = chip(adc_levels=levels, adc_kind="ramp", array_rows=8, operands_sign=sign, operands_x_slices=slices, operands_w_slices=slices)
        plan = Plan(on, 8, 1)
        totals = torch.arange(low * plan.full, plan.full + 1)
        expected = [math.floor(int(total) * plan.scale(0)) for total in totals]
        assert to_codes(totals, plan, 0).tolist() == expected
        assert all(round(int(total) * plan.scale(0) + plan.shift(0)) == code for total, code in zip(totals, expected, strict=True))
