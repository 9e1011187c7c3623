"""What every space promises: points that stay valid, one canonical form, genotypes that come back, blocks that add up to the net."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import OptionError, RidgelineError
from ridgeline.search.spaces import Space, load_space, point_of, register_space, space_names
from ridgeline.search.spaces.base import counted
from ridgeline.workload.capture import capture
from tests.support import FULL, full_or_tenth

SMALL: dict[str, dict[str, Any]] = {
    "darts": {"channels": 4, "cells": 4, "image": 9},
    "nb201": {"channels": 4, "cells": 1, "image": 9},
    "macro": {"depths": (2, 9), "widths": ((4, 6), (6, 8), (8, 8)), "image": 11},
    "residual": {"channels": 4, "widths": ((1, 1.5), (2, 3)), "blocks_each": (1, 2), "image": 9},
    "transformer": {"depths": (1, 3), "widths": (12, 24), "heads": (2, 3), "ratios": (1, 2.5), "image": 8},
}
SPACES = {name: load_space(name, **chosen) for name, chosen in SMALL.items()}
by_name = pytest.mark.parametrize("name", list(SPACES))
seeds = st.integers(0, 2**32 - 1)


def points(name: str, seed: int, count: int) -> tuple[Space, list[tuple[int, ...]], np.random.Generator]:
    random = np.random.default_rng(seed)
    return SPACES[name], [SPACES[name].random(random) for _ in range(count)], random


@by_name
@settings(max_examples=full_or_tenth(300), deadline=None)
@given(seed=seeds)
def test_points_stay_valid_and_canonical_forms_are_final(name: str, seed: int) -> None:
    space, (first, second), random = points(name, seed, 2)
    child = space.crossed(first, second, random)
    mutant = space.mutated(child, random)
    for point in (first, second, child, mutant):
        assert len(point) == len(space.decisions)
        assert all(0 <= index < len(decision.choices) for index, decision in zip(point, space.decisions, strict=True))
        form = space.canonical(point)
        assert space.canonical(form) == form
    assert all(gene in pair for gene, *pair in zip(child, first, second, strict=True))
    assert sum(before != after for before, after in zip(child, mutant, strict=True)) == 1
    assert space.canonical(mutant) != space.canonical(child)


@by_name
@settings(max_examples=full_or_tenth(100), deadline=None)
@given(seed=seeds)
def test_features_tell_canonical_forms_apart(name: str, seed: int) -> None:
    space, drawn, random = points(name, seed, 3)
    mutants = [space.mutated(point, random) for point in drawn]
    forms = [space.canonical(point) for point in (*drawn, *mutants)]
    rows = space.features([*drawn, *mutants])
    assert rows.dtype == bool
    assert np.array_equal(rows, space.features(forms))
    for place, form in enumerate(forms):
        for other in range(place):
            assert np.array_equal(rows[place], rows[other]) == (form == forms[other])


@by_name
@settings(max_examples=full_or_tenth(100), deadline=None)
@given(seed=seeds)
def test_genotypes_come_back(name: str, seed: int) -> None:
    space, (point,), _ = points(name, seed, 1)
    found_space, found = point_of(json.loads(json.dumps(space.genotype(point))))
    assert found_space == space
    assert space.canonical(found) == space.canonical(point)


@by_name
@settings(max_examples=full_or_tenth(30), deadline=None)
@given(seed=seeds)
def test_blocks_add_up_to_the_net(name: str, seed: int) -> None:
    space, (point,), _ = points(name, seed, 1)
    net, parts, known = space.build(point), space.blocks(point), {block.key: block for block in space.all_blocks()}
    assert sum(block.count * weights(block.make()) for block in parts) == weights(net)
    assert len({block.key for block in parts}) == len(parts)
    for block in parts:
        assert known[block.key].shape == block.shape
        assert weights(known[block.key].make()) == weights(block.make())
    assert net.eval()(torch.zeros(2, *space.input_shape)).shape == (2, 10)


def weights(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@by_name
@pytest.mark.skipif(not FULL, reason="takes seconds: RIDGELINE_FULL=1")
def test_captured_work_of_blocks_is_the_nets(name: str) -> None:
    space, (point,), _ = points(name, 3, 1)
    whole = work(space.build(point, seed=0), (space.input_shape,))
    parts = 0.0
    for block in space.blocks(point):
        shapes = block.shape if isinstance(block.shape[0], tuple) else (block.shape,)
        parts += block.count * work(block.make(), shapes)
    assert parts == whole > 0


def work(module: torch.nn.Module, shapes: Any) -> float:
    return sum(op.flops for op in capture(module.eval(), tuple(torch.zeros(1, *shape) for shape in shapes)).ops)


@by_name
def test_a_seed_gives_the_same_net_and_leaves_torchs_generator(name: str) -> None:
    space, (point,), _ = points(name, 0, 1)
    state = torch.get_rng_state()
    first, second, third = (space.build(point, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not all(torch.equal(first[key], third[key]) for key in first)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99) | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, entry in inner for found in places(entry, (*path, key)))]


@by_name
@settings(max_examples=full_or_tenth(500), deadline=None)
@given(seed=seeds, junk=JSON)
def test_a_broken_genotype_is_an_error_of_ours(name: str, seed: int, junk: Any) -> None:
    space, (point,), random = points(name, seed, 1)
    genotype = copy.deepcopy(space.genotype(point))
    path = places(genotype)[1:][int(random.integers(len(places(genotype)) - 1))]
    holder = genotype
    for key in path[:-1]:
        holder = holder[key]
    unchanged = json.dumps(holder[path[-1]]) == json.dumps(junk)
    holder[path[-1]] = junk
    try:
        other, found = point_of(genotype)
    except OptionError:
        assert not unchanged
    else:  # junk that makes sense, such as another number of classes
        assert other.canonical(other.canonical(found)) == other.canonical(found)


@pytest.mark.parametrize(
    "junk", [None, 3, [], {}, {"schema": 2}, {"schema": True, "space": "darts", "settings": {}}, {"schema": 1, "space": []}]
)
def test_what_is_no_genotype_is_refused(junk: Any) -> None:
    with pytest.raises(OptionError):
        point_of(junk)


@by_name
def test_points_of_the_wrong_size_are_refused(name: str) -> None:
    space, (point,), _ = points(name, 0, 1)
    for wrong in (point[:-1], (*point[:-1], 99), (-1, *point[1:])):
        with pytest.raises(OptionError):
            space.build(wrong)


@pytest.mark.parametrize(
    "name, chosen",
    [
        ("darts", {"channels": 0}), ("darts", {"channels": True}), ("darts", {"cells": 2}), ("darts", {"ops": ["none"]}),
        ("darts", {"ops": ["sep_conv_9x9"]}), ("darts", {"drop_path": 1.0}), ("darts", {"colour": 1}), 
        ("nb201", {"ops": ["skip", "conv1x1"]}),
        ("macro", {"widths": [[8], [8, 16]]}), ("macro", {"depths": [9, 3]}), ("macro", {"kernels": [4]}), ("macro", {"kinds": ["mb"]}),
        ("macro", {"attentions": []}), ("macro", {"widths": 3}), ("transformer", {"heads": [5]}), ("transformer", {"patch": 5}),
        ("transformer", {"ratios": [float("nan")]}), ("transformer", {"depths": []}), ("residual", {"widths": [[1, 1]]}),
        ("residual", {"widths": [2]}), ("residual", {"blocks_each": [0]}), ("residual", {"kinds": ["basc"]}), ("dart", {}),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(name: str, chosen: dict[str, Any]) -> None:
    with pytest.raises(RidgelineError):
        load_space(name, **chosen)


def test_a_space_of_your_own() -> None:
    name = "tests_own_space"
    if name not in space_names():
        register_space(name, lambda: SPACES["nb201"])
    assert load_space(name) == SPACES["nb201"]
    with pytest.raises(OptionError):
        register_space(name, lambda: SPACES["nb201"])
    with pytest.raises(OptionError):
        register_space("darts", lambda: SPACES["nb201"])


def test_equal_blocks_are_counted_once() -> None:
    blocks = SPACES["nb201"].blocks((2,) * 6)
    assert [block.count for block in counted([*blocks, *blocks])] == [2 * block.count for block in blocks]
