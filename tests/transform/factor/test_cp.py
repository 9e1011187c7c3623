"""CP of convolutions: exact tensors are recovered, errors are as stated, chains are their dense reconstruction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ridgeline.core.errors import TransformError
from ridgeline.transform.factor.cp import CpPlan, _first_factors, _sweep, als, cp_cost
from ridgeline.transform.factor.step import factor_layer
from tests.support import full_or_tenth
from tests.transform.factor.convolutions import CONVOLUTIONS, convolution, dense, with_weight


def exact(rank: int, seed: int, sizes: tuple[int, int, int, int] = (8, 6, 3, 3)) -> Tensor:
    torch.manual_seed(seed)
    return torch.einsum("or,ir,hr,wr->oihw", *(torch.randn(size, rank, dtype=torch.float64) for size in sizes))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_tensor_of_known_rank_is_recovered(rank: int) -> None:
    weight = exact(rank, seed=rank)
    found = als(weight[None], rank, starts=6)
    assert torch.allclose(found.dense()[0], weight, atol=1e-2 * weight.abs().max().item())
    assert 1.0 - found.energy < 1e-4


@settings(max_examples=full_or_tenth(60), deadline=None)
@given(config=CONVOLUTIONS, seed=st.integers(0, 9), rank=st.integers(1, 3))
def test_the_chain_is_its_dense_reconstruction_and_the_error_is_as_stated(config: dict[str, Any], seed: int, rank: int) -> None:
    layer = convolution(config, seed=seed)
    built = CpPlan(layer, seed=seed).build((rank,))
    weight = dense(built.layer, layer)
    x = torch.randn(2, 4, 7, 8, dtype=torch.float64)
    assert torch.allclose(built.layer(x), with_weight(layer, weight)(x))
    assert built.error == pytest.approx(((layer.weight - weight).norm() / layer.weight.norm()).item(), rel=1e-6, abs=1e-7)


def test_each_sweep_lowers_the_error_and_states_it_exactly() -> None:
    torch.manual_seed(1)
    weight = torch.randn(2, 7, 5, 3, 3, dtype=torch.float64)
    norms = weight.square().sum((1, 2, 3, 4))
    modes, before = _first_factors(weight, 4, 1, 0), torch.full((2,), torch.inf, dtype=torch.float64)
    for _ in range(10):
        modes, stated = _sweep(weight, norms, modes)
        true = (weight - torch.einsum("gor,gir,ghr,gwr->goihw", *modes)).square().sum((1, 2, 3, 4))
        assert torch.allclose(stated, true, rtol=1e-8)
        assert (stated <= before * (1 + 1e-9)).all()
        before = stated


def test_rank_one_is_the_least_squares_optimum() -> None:
    """At a stationary point of rank 1, each factor is the contraction of the weight with the other three."""
    torch.manual_seed(2)
    weight = torch.randn(1, 5, 4, 3, 3, dtype=torch.float64)
    found = als(weight, 1, starts=8)
    b, c, d = (factor[0, :, 0] for factor in (found.into, found.vertical, found.horizontal))
    wanted = torch.einsum("oihw,i,h,w->o", weight[0], b, c, d) / (b.square().sum() * c.square().sum() * d.square().sum())
    assert torch.allclose(found.out[0, :, 0], wanted, rtol=1e-2, atol=1e-3)


def test_more_starts_are_never_worse_and_a_seed_repeats() -> None:
    torch.manual_seed(3)
    weight = torch.randn(1, 6, 6, 3, 3, dtype=torch.float64)
    assert als(weight, 4, starts=5, seed=1).energy >= als(weight, 4, starts=1, seed=1).energy - 1e-6
    assert torch.equal(als(weight, 4, seed=7).dense(), als(weight, 4, seed=7).dense())


def test_the_ladder_saves_and_energy_picks_from_it() -> None:
    layer = nn.Conv2d(16, 16, 3)
    with torch.no_grad():
        layer.weight.copy_(exact(4, 0, (16, 16, 3, 3)))
    plan = CpPlan(layer)
    rungs = plan.rungs()
    assert 0 < len(rungs) <= 8 and all(rung.cost < plan.dense for rung in rungs)
    built = factor_layer(layer, "cp", energy=0.98)
    assert built.energy > 0.98 and len(built.layer) == 4
    assert cp_cost(plan.shape, built.layer[0].out_channels) == sum(piece.weight.numel() for piece in built.layer)
    with pytest.raises(TransformError, match="saves nothing"):
        factor_layer(layer, "cp", rank=61)  # 16·16·9 / (16 + 16 + 3 + 3) = 60.6


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_huge_and_tiny_weights_are_factored(scale: float) -> None:
    layer = nn.Conv2d(8, 8, 3, bias=False)
    with torch.no_grad():
        layer.weight.copy_(scale * exact(1, 0, (8, 8, 3, 3)))
    found = dense(factor_layer(layer, "cp", rank=2).layer, layer)
    assert torch.allclose(found / scale, layer.weight / scale, atol=1e-4)


def test_zero_weights_stay_zero() -> None:
    layer = nn.Conv2d(8, 8, 3, bias=False)
    nn.init.zeros_(layer.weight)
    assert not factor_layer(layer, "cp", rank=2).layer(torch.randn(1, 8, 5, 5)).any()
