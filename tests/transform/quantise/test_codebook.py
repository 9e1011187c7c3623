"""Codebooks: tables against published values, nearest entries by brute force, and learned ones against uniform steps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import TransformError
from ridgeline.transform.quantise.codebook import learn_table, log_table, nf4_table, quantise_as, quantise_lloyd, quantise_log, quantise_nf4
from ridgeline.transform.quantise.grid import Grid, Quantised, dequantise, quantise, sqnr_db
from tests.support import full_or_tenth

PUBLISHED_NF4 = [  # Dettmers 2023, appendix E
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434,
    0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def normal(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def assert_nearest(weight: torch.Tensor, done: Quantised) -> None:
    """No entry of the table is nearer than the one chosen."""
    assert done.codebook is not None
    rows = weight.double().reshape(done.codes.shape)
    scale = done.scale.double()
    if done.grid.granularity == "group":
        scale = scale.repeat_interleave(done.grid.group, 1)[:, : rows.shape[1]]
    table = (done.codebook.double()[:, None] * scale[..., None]).expand(*rows.shape, -1)
    least = (table - rows[..., None]).abs().amin(2)
    taken = (dequantise(done, torch.float64).reshape(rows.shape) - rows).abs()
    assert bool((taken <= least * (1 + 1e-9) + 1e-300).all())


def test_nf4_table_is_the_published_one() -> None:
    assert torch.allclose(nf4_table()[0], torch.tensor(PUBLISHED_NF4, dtype=torch.float64), atol=1e-6)


def test_log_table() -> None:
    assert log_table(3)[0].tolist() == [-1.0, -0.5, -0.25, 0.0, 0.0, 0.25, 0.5, 1.0]


@pytest.mark.parametrize("form", ["log", "codebook", "nf4"])
@settings(max_examples=full_or_tenth(100), deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), bits=st.integers(2, 8), rows=st.integers(1, 3), columns=st.integers(1, 80), size=st.integers(-15, 15))
def test_nearest_entry_is_taken(form: str, seed: int, bits: int, rows: int, columns: int, size: int) -> None:
    weight = normal(rows, columns, seed) * 10.0**size
    bits = 4 if form == "nf4" else bits
    for granularity in ("tensor", "channel"):
        assert_nearest(weight, quantise_as(weight, form, Grid(bits, True, granularity)))  # type: ignore[arg-type]


def test_log_scales_are_powers_of_two_and_error_is_at_most_a_third() -> None:
    weight = normal(8, 512)
    done = quantise_log(weight, 6)
    exponent = torch.log2(done.scale)
    assert torch.equal(exponent, exponent.round())
    back = dequantise(done)
    large = weight.abs() > done.scale * 2.0**-28
    assert bool(((back - weight).abs()[large] <= weight.abs()[large] / 3 * (1 + 1e-6)).all())


@pytest.mark.parametrize(("bits", "mse"), [(2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_learned_table_reaches_max_1960_on_normal_weights(bits: int, mse: float) -> None:
    weight = normal(64, 4096)
    back = dequantise(quantise_lloyd(weight, bits))
    variance = float(weight.var())
    assert float((back - weight).square().mean()) / variance == pytest.approx(mse, rel=0.03)
    even = dequantise(quantise(weight, Grid(bits, False, "tensor")))
    assert sqnr_db(weight, back) > sqnr_db(weight, even) + 3


@pytest.mark.parametrize(("method", "db"), [("log", 14.6), ("codebook", 20.3), ("nf4", 20.7)])
def test_sqnr_of_four_bits_is_pinned(method: str, db: float) -> None:
    weight = normal(64, 1024)
    assert sqnr_db(weight, dequantise(quantise_as(weight, method, Grid(4, True, "channel")))) == pytest.approx(db, abs=0.5)


def test_learning_is_deterministic_and_each_entry_is_the_mean_of_its_cell() -> None:
    rows = normal(2, 3000).double()
    table = learn_table(rows, 3)
    assert torch.equal(table, learn_table(rows.clone(), 3))
    for row, entries in zip(rows, table, strict=True):
        owner = (row[:, None] - entries).abs().argmin(1)
        for index, entry in enumerate(entries):
            assert float(row[owner == index].mean()) == pytest.approx(float(entry), abs=1e-9)


def test_few_values_are_kept_exactly() -> None:
    weight = torch.tensor([[1.0, -3.0, 1.0, 2.0]]).repeat(2, 30)
    for bits in (3, 4):
        assert torch.allclose(dequantise(quantise_lloyd(weight, bits, "channel")), weight, atol=1e-6)


@pytest.mark.parametrize("form", ["log", "codebook", "nf4"])
def test_out_of_the_ordinary(form: str) -> None:
    grid = Grid(4)
    for value in (0.0, 1.0, -0.5, 1e38, 2.0**-100):
        weight = torch.full((2, 5), value)
        assert torch.allclose(dequantise(quantise_as(weight, form, grid)), weight, rtol=0.34 if form == "log" else 1e-6, atol=0.0)
    assert torch.isfinite(dequantise(quantise_as(torch.tensor([[3e38, -1e38, 1e-40]]), form, grid))).all()
    assert torch.isfinite(dequantise(quantise_as(torch.tensor([[1e-44]]), form, grid))).all()
    with pytest.raises(TransformError, match=r"quantise fc: 1 of 2"):
        quantise_as(torch.tensor([[math.nan, 1.0]]), form, grid, "fc")


def test_what_is_refused() -> None:
    with pytest.raises(TransformError, match="nf4 with 3 bits"):
        quantise_as(torch.ones(2, 2), "nf4", Grid(3))
    with pytest.raises(TransformError, match="format = 'lut'"):
        quantise_as(torch.ones(2, 2), "lut", Grid(3))
    with pytest.raises(TransformError, match="learned codebook a group"):
        quantise_lloyd(torch.ones(2, 2), 4, "group")
    assert quantise_nf4(torch.ones(2, 100), 64).scale.shape == (2, 2)
