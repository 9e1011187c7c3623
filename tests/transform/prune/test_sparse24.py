"""N:M masks against brute force, packing exact to the bit, storage smaller than dense."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ridgeline.core.errors import OptionError, TransformError
from ridgeline.transform.kinds import build, describe
from ridgeline.transform.prune.masks import Masks
from ridgeline.transform.prune.sparse24 import NMLinear, nm_mask, pack_positions, parse_pattern, position_bits, unpack_positions
from tests.support import full_or_tenth

PATTERNS = [(2, 4), (1, 2), (1, 4), (4, 8), (3, 5), (1, 16), (5, 20)]


def sparse_linear(n: int, m: int, groups: int = 3, rows: int = 5, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    layer = nn.Linear(groups * m, rows).to(dtype)
    Masks(layer, {"weight": nm_mask(layer.weight.detach().abs().float(), n, m)})
    return layer


@settings(max_examples=full_or_tenth(200), deadline=None)
@given(st.sampled_from([(2, 4), (1, 4), (3, 5)]), st.integers(0, 10_000))
def test_mask_is_the_best_of_all(pattern: tuple[int, int], seed: int) -> None:
    """No other choice of n of m keeps more magnitude, by trying them all; exactly n stay."""
    n, m = pattern
    weight = torch.randint(-3, 4, (4, 2 * m), generator=torch.Generator().manual_seed(seed)).float()  # many ties
    kept = ~nm_mask(weight.abs(), n, m)
    for group, keep in zip(weight.view(-1, m), kept.view(-1, m), strict=True):
        best = max(sum(abs(float(group[i])) for i in chosen) for chosen in itertools.combinations(range(m), n))
        assert int(keep.sum()) == n and float(group.abs()[keep].sum()) == best


def test_convolutions_group_input_channels() -> None:
    scores = torch.rand(6, 8, 3, 3)
    pruned = nm_mask(scores, 2, 4)
    assert torch.equal(pruned.view(6, 2, 4, 3, 3).sum(2), torch.full((6, 2, 3, 3), 2))
    assert torch.equal(pruned[1, :, 2, 0], nm_mask(scores[1:2, :, 2, 0], 2, 4)[0])


def test_ties_keep_the_first() -> None:
    assert nm_mask(torch.ones(1, 4), 2, 4).tolist() == [[False, False, True, True]]


@settings(max_examples=full_or_tenth(1000), deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.lists(st.integers(0, 255), max_size=50))
def test_positions_round_trip(bits: int, values: list[int]) -> None:
    given = torch.tensor([v & ((1 << bits) - 1) for v in values], dtype=torch.uint8)
    packed = pack_positions(given, bits)
    assert len(packed) == -(-len(values) * bits // 8)
    assert torch.equal(unpack_positions(packed, bits, len(values)), given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_packing_is_exact(pattern: tuple[int, int], dtype: torch.dtype) -> None:
    n, m = pattern
    layer = sparse_linear(n, m, dtype=dtype)
    layer.weight.data[0, :m] = 0  # a group with fewer than n
    layer.weight.data[1, : m - 1] = 0
    packed = NMLinear.pack(layer, n, m)
    assert torch.equal(packed.dense(), layer.weight)
    x = torch.randn(7, layer.in_features).to(dtype)
    assert torch.equal(packed(x), layer(x)) and not packed.has_kernel


def test_a_planted_change_shows() -> None:
    """One weight off by one per cent, or one position moved, changes the layer."""
    layer = sparse_linear(2, 4)
    packed = NMLinear.pack(layer, 2, 4)
    x = torch.randn(3, 12)
    before = packed(x)
    packed.values.data[2, 1] *= 1.01
    assert not torch.equal(packed.dense(), layer.weight)
    packed = NMLinear.pack(layer, 2, 4)
    packed.positions[0] ^= 1
    assert not torch.equal(packed(x), before)


def test_bytes_and_description() -> None:
    """bfloat16 2:4 takes 0.5625 of the dense bytes; the description builds a layer the state fits into."""
    layer = sparse_linear(2, 4, groups=64, rows=128, dtype=torch.bfloat16)
    packed = NMLinear.pack(layer, 2, 4)
    state = packed.state_dict()
    stored = sum(t.numel() * t.element_size() for name, t in state.items() if name != "bias")
    assert stored == 0.5625 * layer.weight.numel() * 2
    description = describe(packed)
    assert description is not None and packed.logical_parameters() == 256 * 128 + 128
    assert packed.logical_nonzeros() == int(layer.weight.count_nonzero()) + int(layer.bias.count_nonzero()) <= 128 * 128 + 128
    twin = build(description)
    twin.load_state_dict(state, strict=True)
    assert isinstance(twin, NMLinear) and torch.equal(twin.dense(), layer.weight) and twin.values.dtype == torch.bfloat16


def test_reload_and_copy_do_not_use_an_old_weight() -> None:
    """The rebuilt weight is dropped when the stored one changes, and copies keep none."""
    first, second = (NMLinear.pack(sparse_linear(2, 4, seed=seed), 2, 4) for seed in (0, 1))
    x = torch.randn(2, 12)
    wanted = second(x)
    first(x)
    assert copy.deepcopy(first)._ready is None
    first.load_state_dict(second.state_dict())
    assert torch.equal(first(x), wanted)


def test_what_is_refused() -> None:
    for pattern in ("4:2", "2:2", "0:4", "a:b", "24", "1:9999", "²:4"):
        with pytest.raises(OptionError, match="pattern"):
            parse_pattern(pattern)
    assert parse_pattern("2:4") == (2, 4) and position_bits(16) == 4 and position_bits(17) == 8
    with pytest.raises(TransformError, match="multiple of 4"):
        nm_mask(torch.ones(2, 6), 2, 4)
    with pytest.raises(TransformError, match="not 2:4"):
        NMLinear.pack(nn.Linear(8, 8), 2, 4)
    broken = NMLinear.pack(sparse_linear(3, 5), 3, 5)
    broken.positions.fill_(255)
    with pytest.raises(TransformError, match="beyond"):
        broken(torch.randn(1, 15))
