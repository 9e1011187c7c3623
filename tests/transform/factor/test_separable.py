"""Depthwise-separable replacement: slice by slice the best rank, the same function with enough kernels a channel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ridgeline.core.errors import TransformError
from ridgeline.transform.factor.separable import SeparablePlan
from ridgeline.transform.factor.step import factor_layer
from tests.support import full_or_tenth
from tests.transform.factor.convolutions import CONVOLUTIONS, convolution, dense, with_weight


@settings(max_examples=full_or_tenth(150), deadline=None)
@given(config=CONVOLUTIONS, seed=st.integers(0, 9), multiplier=st.integers(1, 2))
def test_the_pair_is_its_dense_reconstruction_and_slices_lose_what_they_must(config: dict[str, Any], seed: int, multiplier: int) -> None:
    layer = convolution(config, seed=seed)
    plan = SeparablePlan(layer)
    built = plan.build(plan.at(multiplier).ranks)
    weight = dense(built.layer, layer)
    x = torch.randn(2, 4, 7, 8, dtype=torch.float64)
    assert torch.allclose(built.layer(x), with_weight(layer, weight)(x))
    lost = torch.zeros((), dtype=torch.float64)
    rows = 6 // layer.groups
    for group in range(layer.groups):
        for channel in range(layer.weight.shape[1]):
            piece = layer.weight[group * rows : (group + 1) * rows, channel].flatten(1)
            lost += torch.linalg.svdvals(piece)[multiplier:].square().sum().detach()
    assert torch.allclose((layer.weight - weight).square().sum(), lost, rtol=1e-9, atol=1e-15)
    assert built.error == pytest.approx((lost.sqrt() / layer.weight.norm()).item(), rel=1e-6, abs=1e-7)


def test_a_separable_weight_is_found_exactly() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 16, 3, padding=1, stride=2, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.einsum("oi,ihw->oihw", torch.randn(16, 8).double(), torch.randn(8, 3, 3).double()))
    built = factor_layer(layer, "separable", energy=1.0)
    depthwise, pointwise = built.layer
    assert (depthwise.groups, depthwise.out_channels, pointwise.kernel_size) == (8, 8, (1, 1))
    x = torch.randn(2, 8, 9, 9, dtype=torch.float64)
    assert torch.allclose(built.layer(x), layer(x))


def test_too_many_kernels_a_channel_are_refused() -> None:
    layer = nn.Conv2d(8, 16, 3)  # 1152 weights; m·8·(9 + 16) = 200·m
    assert [rung.cost for rung in SeparablePlan(layer).rungs()] == [200, 400, 600, 800, 1000]
    with pytest.raises(TransformError, match="rank 6 saves nothing"):
        factor_layer(layer, "separable", rank=6)
    with pytest.raises(TransformError, match="depthwise"):
        factor_layer(nn.Conv2d(8, 8, 3, groups=8), "separable", rank=1)
