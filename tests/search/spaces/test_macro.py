"""Macro nets and transformers: what has no effect is blank, images never vanish, users' blocks work."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ridgeline.core.errors import OptionError
from ridgeline.search.spaces import load_space
from ridgeline.search.spaces.macro import FIELDS, MacroSpace
from ridgeline.search.spaces.macro_blocks import block_names, make_attention, register_block
from ridgeline.search.spaces.transformer import Attention, TransformerSpace
from tests.support import full_or_tenth

SPACE = MacroSpace()


@settings(max_examples=full_or_tenth(200), deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_point_is_a_net_whose_image_stays(seed: int) -> None:
    random = np.random.default_rng(seed)
    point = tuple(int(random.integers(len(decision.choices))) for decision in SPACE.decisions)  # strides everywhere
    for drawn in (point, SPACE.random(random)):
        layers = SPACE.layers(drawn)
        assert 10 <= len(layers) <= 50
        assert all(layer.size_out >= 2 for layer in layers)
        assert {layer.channels for layer in layers} <= {width for stage in SPACE.widths for width in stage}
        for before, layer in pairwise(layers):
            assert layer.channels_in == before.channels
        assert all(not layer.skip or (layer.stride == 1 and layer.channels_in == layer.channels) for layer in layers)


def test_what_has_no_effect_is_blank() -> None:
    point = [0] * len(SPACE.decisions)
    late = 1 + 10 * len(FIELDS)
    for place in range(late, len(point)):
        point[place] = 1
    point[1 + FIELDS.index("reduction")] = 2  # attention is none
    assert SPACE.canonical(tuple(point)) == (0,) * len(point)
    point[1 + FIELDS.index("attention")] = 1
    assert SPACE.canonical(tuple(point))[1 + FIELDS.index("reduction")] == 2
    point[1 + FIELDS.index("stride")] = point[1 + FIELDS.index("skip")] = 1
    assert SPACE.canonical(tuple(point))[1 + FIELDS.index("skip")] == 0


def test_random_nets_halve_anywhere() -> None:
    random = np.random.default_rng(0)
    halvings = [sum(layer.stride == 2 for layer in SPACE.layers(SPACE.random(random))) for _ in range(50)]
    assert set(halvings) == {1, 2, 3, 4}


def test_a_table_of_all_blocks_is_of_a_size_to_measure() -> None:
    assert 2000 < len(SPACE.all_blocks()) < 3000
    assert len(load_space("transformer").all_blocks()) == 50


@pytest.mark.parametrize("name", ["attention", "se", "cbam"])
@pytest.mark.parametrize("reduction", [4, 16])
def test_attention_keeps_the_shape_and_looks_at_the_whole_map(name: str, reduction: int) -> None:
    torch.manual_seed(0)
    module, x = make_attention(name, 64, reduction).double(), torch.randn(2, 64, 5, 5, dtype=torch.float64, requires_grad=True)
    for part in module.modules():
        if hasattr(part, "squeeze"):
            nn.init.ones_(part.squeeze.bias)  # no dead ReLU
    out = module(x)
    assert out.shape == x.shape
    out[0, 0, 0, 0].backward()
    assert x.grad is not None
    assert bool((x.grad[0, :, 4, 4] != 0).any())  # a far corner counts
    assert bool((x.grad[1] == 0).all())  # another sample does not


def test_blocks_of_your_own() -> None:
    if "tests_plain" not in block_names():
        register_block("tests_plain", lambda channels_in, channels, kernel, stride, act: nn.Conv2d(channels_in, channels, 1, stride))
    space = MacroSpace(kinds=("tests_plain",), depths=(3, 3), widths=((4,), (8,)), image=8)
    point = space.random(np.random.default_rng(0))
    assert sum(type(layer.body) is nn.Conv2d for layer in space.build(point).layers) == 3
    assert space.from_genotype(space.genotype(point)) == space.canonical(point)
    assert {block.key for block in space.blocks(point)} <= {block.key for block in space.all_blocks()}
    with pytest.raises(OptionError):
        register_block("conv", lambda *arguments: nn.Identity())


def test_a_stride_that_is_not_possible_is_refused() -> None:
    space = MacroSpace(depths=(3, 3), widths=((4,), (4,)), image=2)  # one halving would leave 1x1
    genotype = space.genotype((0,) * len(space.decisions))
    genotype["layers"][0]["stride"] = 2
    with pytest.raises(OptionError, match="layer 0"):
        space.from_genotype(genotype)


def test_a_transformer_layer_is_softmax_attention() -> None:
    torch.manual_seed(0)
    layer, x = Attention(12, 3).double(), torch.randn(2, 5, 12, dtype=torch.float64)
    query, key, value = (part.view(2, 5, 3, 4) for part in layer.project(layer.norm(x)).split(12, dim=-1))
    weights = torch.einsum("bqhd,bkhd->bhqk", query, key).div(2).softmax(-1)
    mixed = torch.einsum("bhqk,bkhd->bqhd", weights, value).reshape(2, 5, 12)
    assert torch.allclose(layer(x), x + layer.out(mixed), atol=1e-12)


def test_layers_past_a_transformers_depth_are_blank() -> None:
    space = TransformerSpace(depths=(1, 2), widths=(12,), heads=(2, 3), ratios=(1, 2))
    assert space.canonical((0, 0, 1, 1, 1, 1)) == (0, 0, 1, 1, 0, 0)
    assert space.canonical((1, 0, 1, 1, 1, 1)) == (1, 0, 1, 1, 1, 1)
