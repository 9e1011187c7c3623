"""Low rank by singular values, against Eckart & Young, brute force and the dense layer itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ridgeline.core.errors import TransformError
from ridgeline.transform.factor.moments import patches, second_moments
from ridgeline.transform.factor.ranks import largest_saving_rank
from ridgeline.transform.factor.step import factor_layer
from ridgeline.transform.factor.svd import SvdPlan, cholesky_root
from tests.support import full_or_tenth
from tests.transform.factor.convolutions import CONVOLUTIONS, convolution


def linear(rows: int, columns: int, seed: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(columns, rows, bias=bias, dtype=torch.float64)


def discard(_: Tensor) -> None:
    """For a pass that is only run for its hooks."""


def product(pair: nn.Sequential) -> Tensor:
    first, last = pair
    assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
    return last.weight @ first.weight


@settings(max_examples=full_or_tenth(100), deadline=None)
@given(rows=st.integers(2, 24), columns=st.integers(2, 24), seed=st.integers(0, 99), data=st.data())
def test_error_squared_is_the_sum_of_discarded_squares(rows: int, columns: int, seed: int, data: st.DataObject) -> None:
    layer = linear(rows, columns, seed)
    rank = data.draw(st.integers(1, min(rows, columns)))
    built = SvdPlan(layer).build((rank,))
    singular = torch.linalg.svdvals(layer.weight)
    error = (layer.weight - product(built.layer)).square().sum()
    assert torch.allclose(error, singular[rank:].square().sum(), rtol=1e-9, atol=1e-18)
    assert built.error == pytest.approx((error.sqrt() / layer.weight.norm()).item(), rel=1e-6, abs=1e-7)
    first, last = built.layer
    assert torch.allclose(first.weight.norm(dim=1), last.weight.norm(dim=0)), "the two factors share each singular value evenly"


def test_two_layers_compute_the_product_and_keep_the_bias() -> None:
    layer = linear(30, 20, 1)
    built = factor_layer(layer, rank=5)
    x = torch.randn(2, 7, 20, dtype=torch.float64)
    assert torch.allclose(built.layer(x), x @ product(built.layer).mT + layer.bias)
    assert [type(part) for part in built.layer] == [nn.Linear, nn.Linear] and built.layer[0].bias is None


def test_pieces_keep_dtype_mode_and_what_is_trained() -> None:
    layer = nn.Linear(16, 16, dtype=torch.bfloat16).requires_grad_(False).eval()
    pair = factor_layer(layer, rank=3).layer
    assert all(p.dtype is torch.bfloat16 and not p.requires_grad for p in pair.parameters()) and not pair.training
    assert all(p.requires_grad for p in factor_layer(nn.Conv2d(8, 8, 1), rank=3).layer.parameters())


@given(rows=st.integers(1, 300), columns=st.integers(1, 300))
def test_largest_saving_rank_is_the_last_that_saves(rows: int, columns: int) -> None:
    rank = largest_saving_rank(rows, columns)
    assert rank * (rows + columns) < rows * columns <= (rank + 1) * (rows + columns)


def test_a_rank_that_saves_nothing_is_refused() -> None:
    layer = linear(20, 30, 0)  # 20·30 / 50 = 12: rank 12 costs exactly as much
    assert sum(p.numel() for p in factor_layer(layer, rank=11).layer.parameters()) < sum(p.numel() for p in layer.parameters())
    with pytest.raises(TransformError, match=r"rank 12 saves nothing(.|\n)*at most 11"):
        factor_layer(layer, rank=12)
    with pytest.raises(TransformError, match="cannot be kept"):
        factor_layer(layer, energy=1.0)
    with pytest.raises(TransformError, match="not even rank 1 saves"):
        factor_layer(linear(1, 30, 0), energy=0.5)


def test_energy_picks_the_smallest_rank_that_reaches_it() -> None:
    layer = linear(40, 40, 3)
    squares = torch.linalg.svdvals(layer.weight).square()
    for energy in (0.1, 0.5, 0.7):
        rank = factor_layer(layer, energy=energy).layer[0].out_features
        assert squares[:rank].sum() >= energy * squares.sum() > squares[: rank - 1].sum()


def test_a_matrix_of_rank_three_is_found_at_rank_three() -> None:
    layer = linear(16, 16, 0)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(16, 3, dtype=torch.float64) @ torch.randn(3, 16, dtype=torch.float64))
    built = factor_layer(layer, energy=1.0)
    assert built.layer[0].out_features == 3
    assert torch.allclose(product(built.layer), layer.weight)


@pytest.mark.parametrize("value", [0.0, 1e30, 1e-30])
def test_constant_weights_have_rank_one(value: float) -> None:
    layer = nn.Linear(8, 8)
    nn.init.constant_(layer.weight, value)
    built = factor_layer(layer, energy=1.0)
    assert built.layer[0].out_features == 1
    assert torch.allclose(product(built.layer), layer.weight, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    layer = linear(8, 8, 0)
    with torch.no_grad():
        layer.weight[3, 3] = value
    with pytest.raises(TransformError, match="not finite"):
        factor_layer(layer, rank=1)


def output_error(layer: nn.Linear, weight: Tensor, x: Tensor) -> Tensor:
    return (x @ (layer.weight - weight).mT).square().sum()


def test_activation_aware_error_is_the_brute_force_optimum() -> None:
    layer = linear(6, 5, 0, bias=False)
    x = (
        torch.randn(400, 5, dtype=torch.float64)
        @ torch.randn(5, 5, dtype=torch.float64)
        @ torch.diag(torch.tensor([5, 2, 1, 0.1, 0.01])).double()
    )
    moment = second_moments(lambda: discard(layer(x)), {"": layer})[""]
    assert torch.allclose(moment[0], x.mT @ x / 400)
    aware, plain = (product(SvdPlan(layer, moment=m).build((2,)).layer) for m in (moment, None))
    best = output_error(layer, aware, x)
    # the optimum of rank 2: discarded singular values of the outputs themselves
    assert torch.allclose(best, torch.linalg.svdvals(x @ layer.weight.mT)[2:].square().sum(), rtol=1e-6)
    assert best < 0.9 * output_error(layer, plain, x)
    # nothing a search by gradient finds is better
    assert all(searched_error(layer, x, rank=2, seed=seed) >= best.item() * (1 - 1e-9) for seed in range(2))


def searched_error(layer: nn.Linear, x: Tensor, rank: int, seed: int) -> float:
    """The output error that a quasi-Newton search over both factors ends with."""
    torch.manual_seed(seed)
    a, b = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((rank, 5), (6, rank)))
    search = torch.optim.LBFGS([a, b], max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        error = output_error(layer, b @ a, x)
        error.backward()
        return error

    search.step(closure)
    return output_error(layer, b @ a, x).item()


def test_reported_energy_of_activation_aware_is_that_of_the_outputs() -> None:
    layer = linear(6, 5, 0, bias=False)
    x = torch.randn(300, 5, dtype=torch.float64) * torch.tensor([9.0, 3.0, 1.0, 1.0, 0.1], dtype=torch.float64)
    built = SvdPlan(layer, moment=(x.mT @ x / 300)[None]).build((2,))
    share = 1 - output_error(layer, product(built.layer), x) / (x @ layer.weight.mT).square().sum()
    assert built.energy == pytest.approx(share.item(), rel=1e-6)


def test_inputs_that_never_vary_do_not_break_the_root() -> None:
    x = torch.zeros(10, 6, dtype=torch.float64)
    x[:, :2] = torch.randn(10, 2, dtype=torch.float64)  # four dead inputs: a singular moment
    layer = linear(5, 6, 0, bias=False)
    built = SvdPlan(layer, moment=(x.mT @ x)[None]).build((2,))
    assert torch.allclose(built.layer(x), layer(x), atol=1e-6)
    with pytest.raises(TransformError, match="not finite"):
        cholesky_root(torch.full((1, 2, 2), torch.nan))
    with pytest.raises(TransformError, match="not positive"):
        cholesky_root(-torch.eye(3)[None] * torch.tensor([1.0, 1.0, -9.0]))


@settings(max_examples=full_or_tenth(200), deadline=None)
@given(config=CONVOLUTIONS, seed=st.integers(0, 9))
def test_a_convolution_at_full_rank_is_the_same_function(config: dict[str, Any], seed: int) -> None:
    layer = convolution(config, seed=seed)
    plan = SvdPlan(layer)
    x = torch.randn(2, 4, 7, 8, dtype=torch.float64)
    assert torch.allclose(plan.build((len(plan.shares),)).layer(x), layer(x))


@settings(max_examples=full_or_tenth(100), deadline=None)
@given(config=CONVOLUTIONS, seed=st.integers(0, 9))
def test_patches_are_what_a_convolution_multiplies(config: dict[str, Any], seed: int) -> None:
    layer = convolution({**config, "bias": False}, seed=seed)
    x = torch.randn(2, 4, 7, 8, dtype=torch.float64)
    rows = patches(layer, x)  # [groups, B·L, n]
    out = rows @ layer.weight.reshape(layer.groups, 6 // layer.groups, -1).mT  # [groups, B·L, out/groups]
    assert torch.allclose(out.reshape(layer.groups, 2, -1, 6 // layer.groups).permute(1, 0, 3, 2).flatten(1, 2), layer(x).flatten(2))


def test_a_grouped_convolution_reaches_its_reported_output_error() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 12, 3, padding=1, stride=2, groups=2, dtype=torch.float64)
    x = torch.randn(16, 8, 9, 9, dtype=torch.float64)
    moment = second_moments(lambda: discard(layer(x)), {"": layer})[""]
    built = SvdPlan(layer, moment=moment).build((3,))
    quiet = layer(x) - layer.bias.view(1, -1, 1, 1)
    assert built.error == pytest.approx(((built.layer(x) - layer(x)).norm() / quiet.norm()).item(), rel=1e-6)
    assert [type(part) for part in built.layer] == [nn.Conv2d, nn.Conv2d] and built.layer[0].groups == 2
