"""GPTQ: against a slow rendering of the paper, against round to nearest on its own objective, and awkward inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.core.errors import TransformError
from ridgeline.transform.quantise.gptq import clipped_scales, gptq, output_error
from ridgeline.transform.quantise.grid import Grid, dequantise, quantise, quantise_with
from tests.support import full_or_tenth


def layer(rows: int, columns: int, seed: int = 0, samples: int = 400) -> tuple[Tensor, Tensor]:
    """(weight, gram of correlated inputs)."""
    make = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=make, dtype=torch.float64) / columns**0.5 + torch.eye(columns)
    x = torch.randn(samples, columns, generator=make, dtype=torch.float64) @ mix
    return torch.randn(rows, columns, generator=make), x.t() @ x


def paper(weight: Tensor, gram: Tensor, grid: Grid, damping: float) -> Tensor:
    """Optimal brain quantisation in a fixed order, the inverse Hessian shrunk by elimination after each column: no Cholesky, float64."""
    left = weight.double().clone()
    inverse = torch.linalg.inv(gram / gram.diagonal().mean() + damping * torch.eye(len(gram), dtype=torch.float64))
    out = torch.zeros_like(left)
    columns = weight.shape[1]
    for at in range(columns):
        if at % grid.group == 0:
            done = quantise(left[:, at : at + grid.group].float(), Grid(grid.bits, grid.symmetric, "channel"))
            scale, zero = done.scale.double()[:, 0], 0.0 if done.zero is None else done.zero.double()[:, 0]
        code = (torch.round(left[:, at] / scale) + zero).clamp(grid.low, grid.high)
        out[:, at] = (code - zero) * scale
        error = (left[:, at] - out[:, at]) / inverse[at, at]
        left[:, at:] -= error[:, None] * inverse[at, at:]
        inverse = inverse - torch.outer(inverse[:, at], inverse[at]) / inverse[at, at]
    return out


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("columns", [24, 20])
def test_is_the_papers_rule(symmetric: bool, columns: int) -> None:
    weight, gram = layer(6, columns)
    grid = Grid(4, symmetric, "group", 8)
    for block in (8, 12, 16, 128):  # a block ends where a group does
        found = dequantise(gptq(weight, gram, grid, columns=block), torch.float64)
        assert torch.allclose(found, paper(weight, gram, grid, 0.01), atol=1e-5)


@settings(max_examples=full_or_tenth(60), deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), bits=st.integers(2, 8), order=st.booleans(), granularity=st.sampled_from(["tensor", "channel", "group"]))
def test_outputs_are_nearer_than_by_rounding(seed: int, bits: int, order: bool, granularity: str) -> None:
    weight, gram = layer(24, 64, seed)
    for symmetric in (True, False):
        grid = Grid(bits, symmetric, granularity, 16)  # type: ignore[arg-type]
        ours = output_error(weight, dequantise(gptq(weight, gram, grid, act_order=order)), gram)
        nearest = output_error(weight, dequantise(quantise(weight, grid)), gram)
        assert ours < 0.95 * nearest


def test_independent_inputs_leave_rounding_to_nearest() -> None:
    weight, _ = layer(8, 32)
    gram = torch.eye(32, dtype=torch.float64) * 7
    for order in (False, True):
        for grid in (Grid(4), Grid(4, False, "group", 8), Grid(4, False, "group", 8, "minimum")):
            assert torch.equal(gptq(weight, gram, grid, act_order=order).codes, quantise(weight, grid).codes)


def test_columns_without_inputs_are_rounded_to_nearest() -> None:
    weight, gram = layer(8, 32)
    gram[5], gram[:, 5] = 0, 0
    for order in (False, True):
        done = gptq(weight, gram, Grid(8), act_order=order)
        assert torch.equal(done.codes[:, 5], quantise(weight, Grid(8)).codes[:, 5])
    nothing = gptq(weight, torch.zeros_like(gram), Grid(8))
    assert torch.equal(nothing.codes, quantise(weight, Grid(8)).codes)


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e20])
def test_size_of_the_inputs_does_not_matter(size: float) -> None:
    weight, gram = layer(8, 32)
    expected = gptq(weight, gram, Grid(4, False, "group", 16))
    assert torch.equal(gptq(weight, gram * size, Grid(4, False, "group", 16)).codes, expected.codes)


@pytest.mark.parametrize("granularity", ["tensor", "channel", "group"])
def test_clipped_ranges_lose_no_more_by_their_own_measure(granularity: str) -> None:
    weight, gram = layer(8, 40)
    weight[:, 3] *= 6  # an outlier that few inputs reach
    importance = gram.diagonal().clone()
    importance[3] *= 1e-3
    for symmetric in (True, False):
        grid = Grid(3, symmetric, granularity, 16)  # type: ignore[arg-type]
        losses = []
        for measure in (None, importance):
            scale, zero = clipped_scales(weight, measure, grid, "fc")
            back = dequantise(quantise_with(weight, scale, zero, grid))
            losses.append(float(((weight - back).square() * importance).sum()))
        assert losses[1] < 0.9 * losses[0]
    for order in (False, True):
        both = [output_error(weight, dequantise(gptq(weight, gram, grid, act_order=order, clip=clip)), gram) for clip in (False, True)]
        assert both[1] < 1.5 * both[0]


def test_fewer_samples_than_columns() -> None:
    weight, gram = layer(8, 64, samples=5)
    done = gptq(weight, gram, Grid(4, False, "group", 16))
    assert output_error(weight, dequantise(done), gram) < output_error(
        weight, dequantise(quantise(weight, Grid(4, False, "group", 16))), gram
    )


def test_output_error_is_that_of_the_outputs() -> None:
    make = torch.Generator().manual_seed(0)
    x, weight = torch.randn(50, 16, generator=make), torch.randn(5, 16, generator=make)
    other = dequantise(quantise(weight, Grid(3)))
    exact = (x @ (weight - other).t()).square().sum() / (x @ weight.t()).square().sum()
    assert output_error(weight, other, x.t().double() @ x.double()) == pytest.approx(float(exact), rel=1e-4)


def test_what_is_refused() -> None:
    weight, gram = layer(4, 16)
    with pytest.raises(TransformError, match="gptq of fc"):
        gptq(weight, gram[:8, :8], Grid(4), name="fc")
    with pytest.raises(TransformError, match="damping = 0"):
        gptq(weight, gram, Grid(4), damping=0)
    gram[0, 0] = float("nan")
    with pytest.raises(TransformError, match="finite"):
        gptq(weight, gram, Grid(4))
    weight[0, 0] = float("inf")
    with pytest.raises(TransformError, match=r"quantise fc: 1 of 64"):
        gptq(weight, gram, Grid(4), name="fc")
