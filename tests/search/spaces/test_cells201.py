"""NAS-Bench-201's cells: dead edges make no difference, the rows agree with a plain search for paths, sizes are the published ones."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ridgeline.search.spaces import load_space, register_op
from ridgeline.search.spaces.cells201 import EDGES, OPS, Cell, Cells201Space, canonical_rows, cell_name, feature_rows
from ridgeline.search.spaces.ops import make_op, op_names
from tests.support import full_or_tenth

cells = st.tuples(*[st.integers(0, 4)] * 6)
SPACE = Cells201Space(channels=4, cells=1, image=8)


def reached(point: tuple[int, ...], start: int, forward: bool) -> set[int]:
    """Nodes from which, or to which, there is a way of edges that are not none."""
    found = {start}
    for _ in range(3):
        for op, (source, target) in zip(point, EDGES, strict=True):
            if OPS[op] != "none" and (source if forward else target) in found:
                found.add(target if forward else source)
    return found


@settings(max_examples=full_or_tenth(400), deadline=None)
@given(point=cells)
def test_the_canonical_form_keeps_the_edges_on_a_way_from_input_to_output(point: tuple[int, ...]) -> None:
    before, after = reached(point, 0, True), reached(point, 3, False)
    live = [OPS[op] != "none" and source in before and target in after for op, (source, target) in zip(point, EDGES, strict=True)]
    assert SPACE.canonical(point) == tuple(op if keep else 1 for op, keep in zip(point, live, strict=True))


@settings(max_examples=full_or_tenth(100), deadline=None)
@given(point=cells)
def test_dead_edges_make_no_difference_to_a_cell_that_computes_them(point: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    whole = nn.ModuleList([make_op(OPS[op], 4, 4) for op in point]).double().eval()
    form = [OPS[op] for op in SPACE.canonical(point)]
    cell = Cell(form, 4).double().eval()
    for place, (source, target) in enumerate(EDGES):
        if form[place] != "none":
            cell.ops[f"{source}-{target}"].load_state_dict(whole[place].state_dict())
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    nodes: list[Any] = [x]
    for node in (1, 2, 3):
        nodes.append(sum(whole[place](nodes[source]) for place, (source, target) in enumerate(EDGES) if target == node))
    assert torch.allclose(cell(x), nodes[3], rtol=0, atol=1e-12)


def test_points_of_one_form_give_the_same_net() -> None:
    dead = (1, 2, 3, 4, 4, 2)  # node 1 is never reached
    first, second = (SPACE.build(point, seed=0).eval() for point in (dead, SPACE.canonical(dead)))
    x = torch.randn(1, *SPACE.input_shape)
    assert SPACE.canonical(dead) != dead
    assert torch.equal(first(x), second(x))


def test_the_published_parameter_counts() -> None:
    space = load_space("nb201")
    counts = [sum(p.numel() for p in space.build((op,) * 6).parameters()) for op in (2, 0)]
    assert counts == [1_531_546, 73_306]  # NAS-Bench-201's largest net, and the one of skips alone


def test_rows_of_all_cells() -> None:
    every = np.array(list(itertools.product(range(5), repeat=6)), dtype=np.uint8)
    forms = canonical_rows(every)
    assert np.array_equal(canonical_rows(forms), forms)
    assert len(np.unique(forms, axis=0)) == len(np.unique(feature_rows(every), axis=0)) == 9445
    assert [SPACE.canonical(tuple(map(int, row))) for row in every[::997]] == [tuple(map(int, row)) for row in forms[::997]]


def test_names_are_the_tables() -> None:
    assert cell_name((2, 1, 0, 3, 4, 2)) == "|conv3x3~0|+|none~0|conv1x1~1|+|skip~0|avgpool~1|conv3x3~2|"


def test_the_largest_op_of_each_edge_is_derived() -> None:
    weights = np.random.default_rng(0).normal(size=(6, 5))
    assert SPACE.derive(weights) == tuple(int(row.argmax()) for row in weights)


def test_edge_blocks_are_what_a_choice_adds() -> None:
    table = SPACE.edge_blocks()
    point = (2, 3, 4, 0, 2, 3)
    added = [block.key for place, op in enumerate(point) for block in table[place][op] for _ in range(block.count)]
    listed = [block.key for block in SPACE.blocks(point) for _ in range(block.count)]
    rest = [key for key in listed if key.startswith(("nb201_", "sum"))]
    assert sorted(added + rest) == sorted(listed)
    assert table[0][1] == []


def test_ops_of_your_own() -> None:
    if "tests_double" not in op_names():
        register_op(
            "tests_double", lambda channels_in, channels_out, stride, affine: nn.Conv2d(channels_in, channels_out, 2 * stride - 1, stride)
        )
    space = Cells201Space(channels=4, cells=1, image=8, ops=("none", "tests_double", "conv1x1"))
    point = space.from_genotype(space.genotype((1,) * 6))
    convs = [module for module in space.build(point).modules() if isinstance(module, nn.Conv2d) and module.bias is not None]
    assert point == (1,) * 6
    assert len(convs) == 18
    assert space.canonical((0, 1, 1, 1, 1, 1)) == (0, 1, 1, 0, 0, 1)
