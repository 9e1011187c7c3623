"""Uniform quantisers: rules against a scalar loop, SQNR against theory, GGUF blocks given back, and weights out of the ordinary."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.core.errors import TransformError
from ridgeline.transform.quantise.grid import Grid, Quantised, dequantise, fake_quantise, quantise, quantise_with, sqnr_db
from tests.support import full_or_tenth

FORMS = {"symmetric": (True, "zero"), "zero": (False, "zero"), "minimum": (False, "minimum")}
BLOCKS = Grid(4, False, "group", 32, "minimum", "float16")


def scalar_rule(group: list[float], grid: Grid) -> tuple[list[int], float, float]:
    """One group by the rule of the docstring, in Python's floats."""
    low, high = min(group), max(group)
    if grid.symmetric:
        scale = max(abs(low), abs(high)) / grid.high or 1.0
        zero = 0.0
    else:
        low, high = min(low, 0.0), max(high, 0.0)
        scale = (high - low) / (2**grid.bits - 1) or 1.0
        scale = float(torch.tensor(scale, dtype=torch.float32))
        zero = min(max(round(-low / scale), 0), 2**grid.bits - 1)
    scale = float(torch.tensor(scale, dtype=torch.float32))
    codes = [min(max(round(float(torch.tensor(w) / torch.tensor(scale))) + int(zero), grid.low), grid.high) for w in group]
    return codes, scale, zero


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
def test_rule_against_a_scalar_loop(bits: int, symmetric: bool) -> None:
    torch.manual_seed(bits)
    weight = torch.randn(3, 11)
    grid = Grid(bits, symmetric, "group", 4)
    done = quantise(weight, grid)
    for row in range(3):
        for group in range(3):
            span = slice(4 * group, 4 * group + 4)
            codes, scale, zero = scalar_rule(weight[row, span].tolist(), grid)
            assert done.codes[row, span].tolist() == codes
            assert float(done.scale[row, group]) == scale
            assert done.zero is None or float(done.zero[row, group]) == zero


def test_halves_go_to_even() -> None:
    weight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert quantise(weight, Grid(8)).codes.tolist() == [[127, 0, 2, 2, 0, -2]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("granularity", ["tensor", "channel", "group"])
@settings(max_examples=full_or_tenth(200), deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), bits=st.integers(2, 8), rows=st.integers(1, 4), columns=st.integers(1, 70), size=st.integers(-20, 20))
def test_error_is_at_most_half_a_step(form: str, granularity: str, seed: int, bits: int, rows: int, columns: int, size: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 10.0**size
    symmetric, kind = FORMS[form]
    done = quantise(weight, Grid(bits, symmetric, granularity, 16, kind))  # type: ignore[arg-type]
    step = done.scale.double()
    if granularity == "group":
        step = step.repeat_interleave(16, 1)[:, :columns]
    error = (dequantise(done, torch.float64) - weight.double()).abs()
    # the zero point rounds the range by up to half a step, so its ends may be cut by that much more
    allowed = step * (1.0 if form == "zero" else 0.5) * (1 + 1e-5) + weight.abs().max() * 1e-6 + 1e-40
    assert bool((error <= allowed).all())
    assert int(done.codes.min()) >= done.grid.low and int(done.codes.max()) <= done.grid.high


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_sqnr_of_an_evenly_spread_weight_is_six_decibels_a_bit(bits: int) -> None:
    weight = torch.rand(64, 4096, generator=torch.Generator().manual_seed(0)) * 2 - 1
    grid = Grid(bits, False, "tensor")
    found = sqnr_db(weight, dequantise(quantise(weight, grid)))
    # 2**bits - 1 steps over the range, not 2**bits
    assert found == pytest.approx(20 * math.log10(2**bits - 1), abs=0.05)
    assert found == pytest.approx(20 * bits * math.log10(2), abs=0.65)
    symmetric = sqnr_db(weight, dequantise(quantise(weight, Grid(bits, True, "tensor"))))
    assert symmetric == pytest.approx(20 * math.log10(2**bits - 2), abs=0.05)


def test_sqnr_of_normal_weights_is_pinned() -> None:
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    found = {
        (bits, granularity): sqnr_db(weight, dequantise(quantise(weight, Grid(bits, False, granularity, 64))))  # type: ignore[arg-type]
        for bits in (4, 8)
        for granularity in ("tensor", "channel", "group")
    }
    expected = {
        (4, "tensor"): 15.24, (4, "channel"): 17.9, (4, "group"): 20.8, (8, "tensor"): 39.83, (8, "channel"): 42.5, (8, "group"): 45.3,
    }  # fmt: skip
    for key, db in expected.items():
        assert found[key] == pytest.approx(db, abs=0.3), key


def test_a_planted_scale_error_lowers_the_sqnr() -> None:
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    done = quantise(weight, Grid(8))
    off = Quantised(done.codes, done.scale * 1.01, None, done.shape, done.grid)
    assert sqnr_db(weight, dequantise(done)) > sqnr_db(weight, dequantise(off)) + 2


def q4_1(seed: int, blocks: int, low: int = 0, high: int = 15) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes, d, m, values) of blocks as a GGUF file has them: value = d * code + m in float32."""
    make = torch.Generator().manual_seed(seed)
    codes = torch.randint(low, high + 1, (blocks, 32), generator=make, dtype=torch.uint8)
    d = (torch.rand(blocks, 1, generator=make) * 0.05 + 1e-3).half()
    m = (-torch.rand(blocks, 1, generator=make)).half()
    return codes, d, m, d.float() * codes + m.float()


def test_blocks_of_a_file_come_back_exactly() -> None:
    codes, d, m, _ = q4_1(0, 2000)
    codes[:, 0], codes[:, 1] = 0, 15  # as every block of such a file has them: its range decided them
    values = d.float() * codes + m.float()
    done = quantise(values, BLOCKS)
    assert done.zero is not None
    assert torch.equal(done.codes, codes) and torch.equal(done.scale, d) and torch.equal(done.zero, m)


@pytest.mark.parametrize(("low", "high"), [(0, 14), (1, 15), (3, 9), (0, 1), (7, 8), (15, 15), (0, 0)])
def test_blocks_that_do_not_use_every_code_keep_their_values(low: int, high: int) -> None:
    codes, d, _, values = q4_1(low * 16 + high, 500, low, high)
    done = quantise(values, BLOCKS)
    assert torch.equal(dequantise(done), values)
    if low == 0 and high == 14:
        adjacent = (codes[:, :, None].int() - codes[:, None].int() == 1).any(2).any(1)
        used = adjacent & (codes.min(1).values == 0) & (codes.max(1).values == 14)
        assert int(used.sum()) > 300 and torch.equal(done.scale[used], d[used]) and torch.equal(done.codes[used], codes[used])


def test_blocks_of_a_real_file_come_back_exactly() -> None:
    from ridgeline.core.errors import RidgelineError
    from ridgeline.workload.data.find import find_file
    from ridgeline.workload.gguf import open_gguf

    try:
        file = open_gguf(find_file("SmolLM2-135M-Instruct.Q4_1.gguf", get="not needed"))
    except RidgelineError:
        pytest.skip("no SmolLM2 under RIDGELINE_DATA")
    for name in ("blk.0.attn_q.weight", "blk.29.ffn_down.weight"):
        codes, d, m = file.raw_blocks(name)
        assert m is not None
        weight = (d.float()[..., None] * codes + m.float()[..., None]).flatten(1)
        done = quantise(weight, BLOCKS)
        assert done.zero is not None and torch.equal(done.codes, codes.flatten(1))
        assert torch.equal(done.scale, d) and torch.equal(done.zero, m) and torch.equal(dequantise(done), weight)


def test_quantising_twice_changes_nothing() -> None:
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    for grid in (BLOCKS, Grid(4, True, "group", 32), Grid(8), Grid(3, True, "tensor")):
        once = dequantise(quantise(weight, grid))
        assert torch.equal(dequantise(quantise(once, grid)), once)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 0.1, 1e38, -3e38, 1e-30])
def test_constant_weights(form: str, value: float) -> None:
    symmetric, kind = FORMS[form]
    weight = torch.full((2, 9), value)
    back = dequantise(quantise(weight, Grid(4, symmetric, "group", 4, kind)))  # type: ignore[arg-type]
    assert torch.allclose(back, weight, rtol=2e-7, atol=0.0)


@pytest.mark.parametrize("form", FORMS)
def test_out_of_the_ordinary(form: str) -> None:
    symmetric, kind = FORMS[form]
    grid = Grid(8, symmetric, "channel", 64, kind)  # type: ignore[arg-type]
    single = torch.tensor([[0.3]])
    assert torch.allclose(dequantise(quantise(single, grid)), single, rtol=1e-6)
    vector = torch.randn(7, generator=torch.Generator().manual_seed(1))
    assert sqnr_db(vector, dequantise(quantise(vector, grid))) > 35
    huge = torch.tensor([[3e38, -3e38, 1e38, 0.0]])
    back = dequantise(quantise(huge, grid), torch.float64)
    assert bool(torch.isfinite(back).all()) and sqnr_db(huge, back) > 35
    tiny = torch.tensor([[1e-44, -3e-45, 2e-40, 0.0]])
    assert float((dequantise(quantise(tiny, grid)) - tiny).abs().max()) <= torch.finfo(torch.float32).tiny
    outlier = torch.zeros(1, 100)
    outlier[0, 3] = 5.0
    assert torch.allclose(dequantise(quantise(outlier, grid)), outlier, rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused_by_name(bad: float) -> None:
    weight = torch.ones(2, 3)
    weight[1, 1] = bad
    with pytest.raises(TransformError, match=r"quantise layer1.conv: 1 of 6 weights"):
        quantise(weight, Grid(8), "layer1.conv")


def test_other_weights_that_are_refused() -> None:
    with pytest.raises(TransformError, match="does not fit float16"):
        quantise(torch.tensor([[1e38]]), Grid(8, scale_type="float16"), "head")
    with pytest.raises(TransformError, match="quantise head"):
        quantise(torch.zeros(0, 3), Grid(8), "head")
    with pytest.raises(TransformError, match="int64"):
        quantise(torch.zeros(2, 3, dtype=torch.int64), Grid(8), "head")
    for options in ({"bits": 1}, {"bits": 9}, {"granularity": "row"}, {"group": 0, "granularity": "group"}, {"form": "x"},
                    {"scale_type": "float8"}):  # fmt: skip
        with pytest.raises(TransformError):
            Grid(**options)  # type: ignore[arg-type]


def test_scales_too_small_for_float16_still_cover_the_weights() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 1e-7
    back = dequantise(quantise(weight, Grid(4, False, "group", 32, "zero", "float16")))
    assert float((back - weight).abs().max()) <= 2.0**-24


def test_fake_quantise_equals_quantise_then_dequantise() -> None:
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(0))
    for symmetric in (True, False):
        grid = Grid(4, symmetric, "channel")
        done = quantise(weight, grid)
        zero = None if done.zero is None else done.zero.float()
        fake = fake_quantise(weight, done.scale, zero, grid.low, grid.high)
        assert torch.equal(fake, dequantise(done))
        assert torch.equal(quantise_with(weight, done.scale, done.zero, grid).codes, done.codes)


def test_straight_through_gradients() -> None:
    x = torch.tensor([-30.0, -1.2, 0.3, 0.7, 7.0, 40.0], requires_grad=True)
    scale = torch.tensor(1.0, requires_grad=True)
    fake_quantise(x, scale, None, -8, 7).backward(torch.ones(6))
    assert x.grad is not None and x.grad.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    # Esser 2020: the end's code outside, round(x) - x inside
    expected = -8 + (-1 + 1.2) + (0 - 0.3) + (1 - 0.7) + 0 + 7
    assert scale.grad is not None and float(scale.grad) == pytest.approx(expected, abs=1e-5)
    y = torch.tensor([-3.0, 0.4, 20.0], requires_grad=True)
    out = fake_quantise(y, torch.tensor(1.0), torch.tensor(2.0), 0, 15)
    assert out.tolist() == [-2.0, 0.0, 13.0]
    out.sum().backward()
    assert y.grad is not None and y.grad.tolist() == [0.0, 1.0, 0.0]


def test_a_short_last_group_has_the_range_of_its_own_weights() -> None:
    """Far from 0, so that whatever it were filled up with would show."""
    weight = torch.cat((torch.linspace(-1, 1, 16), torch.linspace(5, 6, 4)))[None]
    done = quantise(weight, Grid(4, False, "group", 16, "minimum"))
    assert done.zero is not None
    assert done.scale[0].tolist() == pytest.approx([2 / 15, 1 / 15]) and done.zero[0].tolist() == pytest.approx([-1, 5])
