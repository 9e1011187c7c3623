"""DARTS cells: node numbers make no difference, the size is the published one, derivation is DARTS's rule."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ridgeline.search.spaces import load_space, register_op
from ridgeline.search.spaces.darts import EDGES, OPS, DartsSpace
from ridgeline.search.spaces.darts_network import CellPlan, DartsCell
from ridgeline.search.spaces.genotype import CellGenotype
from ridgeline.search.spaces.ops import DropPath, op_names, set_drop_path
from tests.support import full_or_tenth

SPACE = DartsSpace(channels=4, cells=3, image=8)
SECOND_ORDER = {
    "normal": [
        [["sep_conv_3x3", 0], ["sep_conv_3x3", 1]],
        [["sep_conv_3x3", 0], ["sep_conv_3x3", 1]],
        [["sep_conv_3x3", 1], ["skip_connect", 0]],
        [["skip_connect", 0], ["dil_conv_3x3", 2]],
    ],
    "reduction": [
        [["max_pool_3x3", 0], ["max_pool_3x3", 1]],
        [["skip_connect", 2], ["max_pool_3x3", 1]],
        [["max_pool_3x3", 0], ["skip_connect", 2]],
        [["skip_connect", 2], ["max_pool_3x3", 1]],
    ],
}
"""The cells of the paper's second-order search on CIFAR-10."""


def test_the_published_parameter_count() -> None:
    space = load_space("darts", channels=36, cells=20)
    point = space.from_genotype({"schema": 1, "space": "darts", "settings": space.genotype((0,) * 24)["settings"], "cells": SECOND_ORDER})
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in space.build(point).parameters()) == 3_349_342


def swapped(nodes: CellGenotype, place: int) -> CellGenotype | None:
    """Nodes `place` and `place + 1` numbered the other way round, where neither is the other's input."""
    low = place + 2
    if any(source == low for _, source in nodes[place + 1]):
        return None
    number = {low: low + 1, low + 1: low}
    renamed = [[(name, number.get(source, source)) for name, source in into] for into in nodes]
    renamed[place], renamed[place + 1] = renamed[place + 1], renamed[place]
    return renamed


@settings(max_examples=full_or_tenth(200), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), place=st.integers(0, 2))
def test_nodes_numbered_otherwise_have_one_form_and_compute_the_same(seed: int, place: int) -> None:
    random = np.random.default_rng(seed)
    point = SPACE.random(random)
    genotype = SPACE.genotype(point)
    named = SPACE.named(point)
    other = swapped(named["normal"], place)
    if other is None:
        return
    genotype["cells"]["normal"] = [[[name, source] for name, source in into] for into in other]
    assert SPACE.canonical(SPACE.from_genotype(genotype)) == SPACE.canonical(point)

    plan = CellPlan("normal", 4, (4, 6, 6), (4, 6, 6))
    first, second = DartsCell(plan, named["normal"], 0.0).eval(), DartsCell(plan, other, 0.0).eval()
    for edge in range(8):
        moved = {place: place + 1, place + 1: place}.get(edge // 2, edge // 2) * 2 + edge % 2
        second.ops[moved].load_state_dict(first.ops[edge].state_dict())
    for name in ("older", "newer"):
        getattr(second, name).load_state_dict(getattr(first, name).state_dict())
    x = torch.randn(2, 2, 4, 6, 6)
    order = [0, 1, 2, 3]
    order[place], order[place + 1] = order[place + 1], order[place]
    parts = list(first(x[0], x[1]).split(4, dim=1))
    assert torch.allclose(second(x[0], x[1]), torch.cat([parts[old] for old in order], dim=1), atol=1e-5)


def test_derivation_takes_the_two_strongest_edges_and_never_none() -> None:
    weights = np.full((28, 8), -5.0)
    weights[:, OPS.index("none")] = 9.0
    for kind in range(2):
        for source, target in EDGES:
            weights[14 * kind + EDGES.index((source, target)), 1 + (source + target + kind) % 7] = source  # later sources are stronger
    names = SPACE.named(SPACE.derive(weights))
    real = OPS[1:]
    for kind, cell in enumerate(names.values()):
        for target, into in enumerate(cell, 2):
            assert into == [(real[(source + target + kind) % 7], source) for source in (target - 2, target - 1)]


def test_the_share_decides_not_the_weight() -> None:
    weights = np.zeros((28, 8))
    weights[:, 4] = 1.0
    weights[EDGES.index((0, 3)), :] += 50.0  # a larger weight throughout is the same share
    weights[EDGES.index((1, 3)), 4] = weights[EDGES.index((2, 3)), 4] = 1.5
    assert [source for _, source in SPACE.named(SPACE.derive(weights))["normal"][1]] == [1, 2]


def test_edge_blocks_are_what_a_choice_adds() -> None:
    point = SPACE.random(np.random.default_rng(0))
    table, added = SPACE.edge_blocks(), []
    for kind, nodes in enumerate(SPACE.named(point).values()):
        for target, into in enumerate(nodes, 2):
            for name, source in into:
                blocks = table[14 * kind + EDGES.index((source, target))][OPS.index(name)]
                added += [block.key for block in blocks for _ in range(block.count)]
    listed = [block.key for block in SPACE.blocks(point) for _ in range(block.count)]
    frame = ("darts_", "sum", "concat", "factorized", "conv1x1")
    assert sorted(added) == sorted(key for key in listed if not key.startswith(frame))


def test_drop_path_drops_in_training_only() -> None:
    space = DartsSpace(channels=4, cells=3, image=8, drop_path=0.3)
    point = space.random(np.random.default_rng(1))
    dropping, plain = space.build(point, seed=0), SPACE.build(point, seed=0)
    x = torch.randn(4, *space.input_shape)
    assert torch.equal(dropping.eval()(x), plain.eval()(x))
    assert not torch.allclose(dropping.train()(x), plain.train()(x))
    set_drop_path(dropping, 0.0)
    assert torch.allclose(dropping(x), plain(x), atol=1e-5)
    drop = DropPath(0.25)
    torch.manual_seed(0)
    ones = drop(torch.ones(20_000, 1, 1, 1))
    assert set(ones.unique().tolist()) == {0.0, 1 / 0.75} or len(ones.unique()) == 2
    assert abs(float(ones.mean()) - 1) < 0.02


def test_ops_of_your_own() -> None:
    if "tests_wide" not in op_names():
        register_op("tests_wide", lambda channels_in, channels_out, stride, affine: nn.Conv2d(channels_in, channels_out, 7, stride, 3))
    space = DartsSpace(channels=4, cells=3, image=8, ops=("none", "tests_wide", "skip_connect"))
    net = space.build((0,) * 24)
    assert sum(isinstance(module, nn.Conv2d) and module.kernel_size == (7, 7) for module in net.modules()) == 8 * 3
    assert any(block.key.startswith("tests_wide/") for block in space.all_blocks())
    assert net.eval()(torch.zeros(1, 3, 8, 8)).shape == (1, 10)
