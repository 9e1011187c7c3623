"""Predicted errors against published figures, numerical integration and measurement."""

from __future__ import annotations

import math

import pytest
import torch

from ridgeline.core.errors import TransformError
from ridgeline.transform.quantise.grid import Grid, dequantise, quantise
from ridgeline.transform.quantise.theory import (
    best_uniform,
    distortion_bound,
    high_rate_mse,
    lloyd_max,
    normal_uniform_mse,
    rate_distortion,
    step_noise,
    uniform_sqnr_db,
)


@pytest.mark.parametrize(("levels", "mse"), [(1, 1.0), (2, 0.3634), (4, 0.1175), (8, 0.03454), (16, 0.009497), (32, 0.002499)])
def test_lloyd_max_is_the_published_table(levels: int, mse: float) -> None:
    """Max 1960, table I; its last digits are rounded."""
    table, found = lloyd_max(levels)
    assert found == pytest.approx(mse, rel=2.5e-3)
    assert torch.allclose(table, -table.flip(0), atol=1e-8)


@pytest.mark.parametrize(("bits", "step", "mse"), [(1, 1.596, 0.3634), (2, 0.9957, 0.1188), (3, 0.5860, 0.03744), (4, 0.3352, 0.01154)])
def test_best_uniform_is_the_published_table(bits: int, step: float, mse: float) -> None:
    """Max 1960, table II: equal steps."""
    limit, found = best_uniform(bits)
    assert found == pytest.approx(mse, rel=1e-3)
    assert 2 * limit / (2**bits - 1) == pytest.approx(step, rel=1e-3)


def test_normal_mse_by_numerical_integration() -> None:
    x = torch.linspace(-12, 12, 400_001, dtype=torch.float64)
    levels = torch.linspace(-2.0, 2.0, 8, dtype=torch.float64)
    nearest = levels[(x[:, None] - levels).abs().argmin(1)]
    density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    integral = torch.trapezoid((x - nearest) ** 2 * density, x)
    assert normal_uniform_mse(3, 2.0) == pytest.approx(float(integral), rel=1e-6)


def test_formulas() -> None:
    assert step_noise(0.6) == pytest.approx(0.03)
    assert uniform_sqnr_db(8) == pytest.approx(48.16, abs=0.01)
    assert distortion_bound(2.0, 3) == pytest.approx(2 / 64)
    assert lloyd_max(64)[1] == pytest.approx(high_rate_mse(6), rel=0.04)


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_step_noise_predicts_the_measured_error(bits: int) -> None:
    weight = torch.randn(128, 2048, generator=torch.Generator().manual_seed(0))
    done = quantise(weight, Grid(bits, True, "channel"))
    measured = (dequantise(done, torch.float64) - weight.double()).square().mean(1)
    predicted = done.scale.double()[:, 0] ** 2 / 12
    assert torch.allclose(measured, predicted, rtol=0.25)
    assert float(measured.mean() / predicted.mean()) == pytest.approx(1, abs=0.01)


def test_curve_of_normal_weights() -> None:
    weight = torch.randn(64, 2048, generator=torch.Generator().manual_seed(0)) * 0.02
    rows = rate_distortion(weight)
    assert {row.method for row in rows if row.bits == 4} == {"symmetric", "asymmetric", "log", "lloyd-max", "nf4"}
    by = {(row.method, row.bits): row for row in rows}
    for row in rows:
        assert row.mse > row.bound_mse, row
        if row.predicted_mse is not None and row.bits > 2:
            assert row.mse == pytest.approx(row.predicted_mse, rel=0.06), row
    for bits in range(2, 9):
        assert by["lloyd-max", bits].mse < by["asymmetric", bits].mse
        if bits > 2:
            gain = by["asymmetric", bits].sqnr_db - by["asymmetric", bits - 1].sqnr_db
            assert gain == pytest.approx(6.02, abs=0.9)
    assert set(rows[0].to_dict()) >= {"bits", "mse", "sqnr_db", "predicted_mse", "bound_mse"}


def test_what_is_refused() -> None:
    with pytest.raises(TransformError, match="method 'cubic'"):
        rate_distortion(torch.randn(4, 4), methods=("cubic",))
    with pytest.raises(TransformError, match="0 levels"):
        lloyd_max(0)
