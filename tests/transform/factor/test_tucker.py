"""Tucker-2 of convolutions: the same function at full rank, the stated error below it, HOOI never worse than HOSVD."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ridgeline.core.errors import TransformError
from ridgeline.transform.factor.step import factor_layer
from ridgeline.transform.factor.tucker import TuckerPlan, hooi, project, tucker_cost
from tests.support import full_or_tenth
from tests.transform.factor.convolutions import CONVOLUTIONS, convolution, dense, with_weight


@settings(max_examples=full_or_tenth(150), deadline=None)
@given(config=CONVOLUTIONS, seed=st.integers(0, 9))
def test_full_rank_is_the_same_function(config: dict[str, Any], seed: int) -> None:
    layer = convolution(config, seed=seed)
    plan = TuckerPlan(layer)
    full = plan.at(99)
    x = torch.randn(2, 4, 7, 8, dtype=torch.float64)
    built = plan.build(full.ranks)
    assert torch.allclose(built.layer(x), layer(x)) and built.energy == pytest.approx(1.0)


@settings(max_examples=full_or_tenth(100), deadline=None)
@given(config=CONVOLUTIONS, seed=st.integers(0, 9), rank_out=st.integers(1, 3), rank_in=st.integers(1, 2))
def test_the_chain_is_its_dense_reconstruction_and_the_error_is_as_stated(
    config: dict[str, Any], seed: int, rank_out: int, rank_in: int
) -> None:
    layer = convolution(config, seed=seed)
    plan = TuckerPlan(layer)
    most_out, most_in = plan.shares.shape
    built = plan.build((min(rank_out, most_out), min(rank_in, most_in)))
    weight = dense(built.layer, layer)
    x = torch.randn(2, 4, 7, 8, dtype=torch.float64)
    assert torch.allclose(built.layer(x), with_weight(layer, weight)(x))
    assert built.error == pytest.approx(((layer.weight - weight).norm() / layer.weight.norm()).item(), rel=1e-6, abs=1e-7)


@settings(max_examples=full_or_tenth(50), deadline=None)
@given(seed=st.integers(0, 999), rank_out=st.integers(1, 5), rank_in=st.integers(1, 5))
def test_hooi_never_loses_energy_and_keeps_orthonormal_bases(seed: int, rank_out: int, rank_in: int) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(1, 8, 6, 9, dtype=torch.float64)
    outer = torch.linalg.svd(weight.flatten(2), full_matrices=False)[0][:, :, :rank_out]
    inner = torch.linalg.svd(weight.transpose(1, 2).flatten(2), full_matrices=False)[0][:, :, :rank_in]
    before = project(weight, outer, inner).square().sum()
    outer, inner, core = hooi(weight, outer, inner)
    assert core.square().sum() >= before * (1 - 1e-12)
    assert torch.allclose(outer.mT @ outer, torch.eye(rank_out, dtype=torch.float64)[None], atol=1e-10)
    rebuilt = torch.einsum("gabk,goa,gib->goik", core, outer, inner)
    assert torch.allclose((weight - rebuilt).square().sum(), weight.square().sum() - core.square().sum())


def test_hooi_improves_on_hosvd_where_there_is_something_to_gain() -> None:
    gains = 0
    for seed in range(10):
        torch.manual_seed(seed)
        plan = TuckerPlan(nn.Conv2d(8, 8, 3, dtype=torch.float64))
        gains += plan.build((2, 2)).energy > plan.at(2).energy + 1e-4
    assert gains >= 5


def test_a_weight_of_known_ranks_is_found() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(12, 16, 3, dtype=torch.float64)
    with torch.no_grad():
        parts = torch.randn(16, 3), torch.randn(3, 2, 3, 3), torch.randn(2, 12)
        layer.weight.copy_(torch.einsum("oa,abhw,bi->oihw", *(part.double() for part in parts)))
    built = factor_layer(layer, "tucker", energy=1.0)
    assert [piece.weight.shape[0] for piece in built.layer] == [2, 3, 16]
    assert torch.allclose(dense(built.layer, layer), layer.weight)


def test_rungs_rise_in_cost_and_energy_and_all_save() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(16, 24, 3, groups=2)
    plan = TuckerPlan(layer)
    rungs = plan.rungs()
    assert all(a.cost < b.cost and a.energy <= b.energy for a, b in pairwise(rungs))
    assert rungs[-1].cost < plan.dense == layer.weight.numel()
    for rung in rungs[::5]:
        assert rung.cost == sum(piece.weight.numel() for piece in plan.build(rung.ranks).layer)


def test_flops_count_each_piece_where_it_runs() -> None:
    layer = nn.Conv2d(8, 8, 3, stride=2, padding=1)
    places = (64, 32, 16)  # an 8x8 image to 4x4
    plan = TuckerPlan(layer, places)
    assert plan.dense == 8 * 8 * 9 * 16
    assert tucker_cost(plan.shape, 3, 2) == 8 * 2 * 64 + 2 * 3 * 9 * 16 + 3 * 8 * 16


def test_ranks_that_save_nothing_are_refused() -> None:
    layer = nn.Conv2d(8, 8, 3)
    with pytest.raises(TransformError, match="rank 8 saves nothing"):
        factor_layer(layer, "tucker", rank=8)
    with pytest.raises(TransformError, match="1x1"):
        factor_layer(nn.Conv2d(8, 8, 1), "tucker", rank=1)
    with pytest.raises(TransformError, match="for convolutions"):
        factor_layer(nn.Linear(8, 8), "tucker", rank=1)
