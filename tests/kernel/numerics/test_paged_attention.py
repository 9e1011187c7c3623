"""Paged decode attention and the scatter into pages: page sizes, groups, shares of a sequence, lengths, dtypes, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ridgeline.core.errors import OptionError
from ridgeline.kernel import tuning
from ridgeline.kernel.paged_attention import (
    _shares,
    paged_attention,
    paged_attention_op,
    paged_attention_reference,
    paged_write,
    paged_write_op,
    paged_write_reference,
)
from tests.kernel.support import FLOATS, check

LENGTHS = (37, 0, 64, 1)


def _made(dtype: torch.dtype, device: str, *, heads: int = 4, shared: int = 2, D: int = 32, page: int = 16) -> tuple[torch.Tensor, ...]:
    """Four sequences in shuffled pages; what no sequence holds is nan, so that reading it would show."""
    most = -(-64 // page)
    query = torch.randn(4, heads, D, device=device).to(dtype)
    caches = [torch.full((4 * most + 1, page, shared, D), float("nan"), device=device, dtype=dtype) for _ in range(2)]
    table = torch.randperm(4 * most + 1, device=device)[: 4 * most].to(torch.int32).view(4, most)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    for sequence, length in enumerate(LENGTHS):
        places = torch.arange(length, device=device)
        for cache in caches:
            cache[table[sequence, places // page].long(), places % page] = torch.randn(length, shared, D, device=device).to(dtype)
    return query, *caches, table, lengths


def _compared(inputs: tuple[torch.Tensor, ...], scale: float | None = None) -> None:
    query, key_cache, value_cache, table, lengths = inputs
    used = query.shape[2] ** -0.5 if scale is None else scale
    exact = paged_attention_reference(query.double(), key_cache.double(), value_cache.double(), table, lengths, used)
    plain = paged_attention_reference(query.float(), key_cache.float(), value_cache.float(), table, lengths, used).to(query.dtype)
    ours = paged_attention(*inputs, scale)
    check(ours, plain, exact)
    assert torch.equal(ours[1], torch.zeros_like(ours[1]))  # length 0


def test_reference_is_attention_over_the_tokens_written(device: str) -> None:
    """The oracle itself, against one sequence at a time and no pages."""
    torch.manual_seed(0)
    query, key_cache, value_cache, table, lengths = _made(torch.float64, device)
    out = paged_attention_reference(query, key_cache, value_cache, table, lengths, 0.3)
    for sequence, length in enumerate(LENGTHS):
        if length:
            places = torch.arange(length, device=device)
            keys, values = (c[table[sequence, places // 16].long(), places % 16].repeat_interleave(2, 1) for c in (key_cache, value_cache))
            weights = (torch.einsum("hd,thd->ht", query[sequence], keys) * 0.3).softmax(-1)
            torch.testing.assert_close(out[sequence], torch.einsum("ht,thd->hd", weights, values))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("waves", [1, 16], ids=["one share", "shares"])
def test_values(dtype: torch.dtype, waves: int, device: str) -> None:
    torch.manual_seed(1)
    with tuning.forced("paged_attention", {"block_n": 16, "warps": 4, "stages": 2, "waves": waves}):
        _compared(_made(dtype, device))


@pytest.mark.parametrize("options", [
    {"page": 32}, {"page": 64}, {"heads": 2}, {"heads": 3, "shared": 1, "D": 24}, {"heads": 20, "shared": 1, "D": 16}, {"D": 128},
], ids=str)  # fmt: skip
def test_shapes(options: dict[str, int], device: str) -> None:
    torch.manual_seed(2)
    for block_n, waves in ((16, 16), (32, 1)):
        with tuning.forced("paged_attention", {"block_n": block_n, "warps": 4, "stages": 2, "waves": waves}):
            _compared(_made(torch.float32, device, **options))


def _int8(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 and its float16 scale a token and head; where nothing was written, numbers that would show."""
    scales = (cache.float().abs().amax(-1) / 127).nan_to_num(nan=500.0).half()
    quantised = (cache.float() / scales.float()[..., None]).round().nan_to_num(nan=127.0)
    return quantised.to(torch.int8), scales


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("waves", [1, 16], ids=["one share", "shares"])
@pytest.mark.parametrize("window, int8", [(5, False), (20, False), (None, True), (20, True), (1000, False)])
def test_window_and_int8(window: int | None, int8: bool, waves: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(12)
    query, key_cache, value_cache, table, lengths = _made(dtype, device)
    scales: tuple[torch.Tensor, ...] = ()
    if int8:
        (key_cache, key_scale), (value_cache, value_scale) = _int8(key_cache), _int8(value_cache)
        scales = (key_scale, value_scale)
    keys, values = (
        cache.double() * scale.double()[..., None]
        for cache, scale in zip((key_cache, value_cache), scales or (torch.ones(1, device=device),) * 2, strict=True)
    )
    exact = paged_attention_reference(query.double(), keys, values, table, lengths, 0.2, window or 0)
    plain = paged_attention_reference(query.float(), keys.float(), values.float(), table, lengths, 0.2, window or 0).to(dtype)
    with tuning.forced("paged_attention_int8" if int8 else "paged_attention", {"block_n": 16, "warps": 4, "stages": 2, "waves": waves}):
        ours = paged_attention(query, key_cache, value_cache, table, lengths, 0.2, window, *scales)
    check(ours, plain, exact)
    assert torch.equal(ours[1], torch.zeros_like(ours[1]))  # length 0
    reference = paged_attention_reference(query, key_cache, value_cache, table, lengths, 0.2, window or 0, *scales)
    torch.testing.assert_close(reference, plain, rtol=2e-2, atol=2e-2)


def test_reference_of_a_window_is_attention_over_its_last_tokens(device: str) -> None:
    torch.manual_seed(13)
    query, key_cache, value_cache, table, lengths = _made(torch.float64, device)
    out = paged_attention_reference(query, key_cache, value_cache, table, lengths, 0.3, 7)
    for sequence, length in enumerate(LENGTHS):
        if length:
            places = torch.arange(max(0, length - 7), length, device=device)
            keys, values = (c[table[sequence, places // 16].long(), places % 16].repeat_interleave(2, 1) for c in (key_cache, value_cache))
            weights = (torch.einsum("hd,thd->ht", query[sequence], keys) * 0.3).softmax(-1)
            torch.testing.assert_close(out[sequence], torch.einsum("ht,thd->hd", weights, values))


def test_scale(device: str) -> None:
    torch.manual_seed(3)
    inputs = _made(torch.float32, device)
    for scale in (1.0, 0.05):
        _compared(inputs, scale)
    assert paged_attention(*inputs, -0.3).isfinite().all()


def test_layouts(device: str) -> None:
    """Strided query, table and lengths; caches that are halves of one tensor."""
    torch.manual_seed(4)
    query, key_cache, value_cache, table, lengths = _made(torch.float32, device)
    both = torch.stack((key_cache, value_cache), 1)
    strided = torch.stack((query, query), 3)[..., 0]
    wide = torch.stack((table, table), 2)[..., 0]
    long = torch.stack((lengths, lengths), 1)[:, 0].long()
    ours = paged_attention(strided, both[:, 0], both[:, 1], wide.long(), long)
    assert torch.equal(ours, paged_attention(query, key_cache, value_cache, table, lengths))


def test_lengths_beyond_the_table_stop_at_its_end(device: str) -> None:
    torch.manual_seed(5)
    query, key_cache, value_cache, table, lengths = _made(torch.float32, device)
    full = (query[2:3], key_cache, value_cache, table[2:3])
    assert torch.equal(paged_attention(*full, lengths[2:3] + 1000), paged_attention(*full, lengths[2:3]))


def test_empty(device: str) -> None:
    query, key_cache, value_cache, table, lengths = _made(torch.float32, device)
    assert paged_attention(query[:0], key_cache, value_cache, table[:0], lengths[:0]).shape == (0, 4, 32)
    assert not paged_attention(query, key_cache, value_cache, table[:, :0], lengths * 0).any()
    before = key_cache.clone()
    paged_write(query[:0, :2], query[:0, :2], key_cache, value_cache, lengths[:0])
    torch.testing.assert_close(key_cache, before, equal_nan=True)


def test_deterministic(device: str) -> None:
    torch.manual_seed(6)
    inputs = _made(torch.bfloat16, device)
    assert torch.equal(paged_attention(*inputs), paged_attention(*inputs))


def test_number_of_shares_comes_from_shapes() -> None:
    assert _shares(pairs=256, capacity=4096, block_n=64, waves=4, processors=132) == 2
    assert _shares(pairs=8, capacity=32768, block_n=64, waves=4, processors=132) == 66
    assert _shares(pairs=8, capacity=64, block_n=64, waves=4, processors=132) == 1
    assert _shares(pairs=4096, capacity=1 << 20, block_n=64, waves=4, processors=132) == 1
    assert _shares(pairs=0, capacity=0, block_n=64, waves=4, processors=132) == 1


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("strided", [False, True])
def test_write(dtype: torch.dtype, strided: bool, device: str) -> None:
    torch.manual_seed(7)
    caches = [torch.randn(3, 16, 3, 24, device=device).to(dtype) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    new = [torch.randn(5, 3, 24, device=device).to(dtype) for _ in range(2)]
    if strided:
        new = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in new]
    slots = torch.tensor([7, -1, 40, 16, 48], device=device)  # the second and the last are outside
    paged_write(*new, *caches, slots)
    paged_write_reference(*new, *expected, slots)
    for cache, true, tokens in zip(caches, expected, new, strict=True):
        assert torch.equal(cache, true)
        assert torch.equal(cache[2, 8], tokens[2])


def test_write_then_attend(device: str) -> None:
    torch.manual_seed(8)
    key, value = (torch.randn(20, 2, 16, device=device) for _ in range(2))
    caches = [torch.zeros(4, 16, 2, 16, device=device) for _ in range(2)]
    table = torch.tensor([[3, 1]], dtype=torch.int32, device=device)
    places = torch.arange(20, device=device)
    paged_write(key, value, *caches, (table[0].long()[places // 16] * 16 + places % 16).int())
    query = torch.randn(1, 2, 16, device=device)
    weights = (torch.einsum("hd,thd->ht", query[0], key) / 4).softmax(-1)
    out = paged_attention(query, *caches, table, torch.tensor([20], dtype=torch.int32, device=device))
    torch.testing.assert_close(out[0], torch.einsum("ht,thd->hd", weights, value))


def test_opcheck(device: str) -> None:
    torch.manual_seed(9)
    query, key_cache, value_cache, table, lengths = _made(torch.float32, device)
    given = (query, key_cache.nan_to_num(), value_cache.nan_to_num(), table, lengths, 0.2)
    torch.library.opcheck(paged_attention_op.overload, given)
    torch.library.opcheck(
        paged_attention_op.overload, (query.transpose(0, 1).contiguous().transpose(0, 1), *given[1:]), test_utils=("test_faketensor",)
    )
    torch.library.opcheck(paged_write_op.overload, (query[:, :2], query[:, 2:], given[1], given[2], lengths))


def test_wrong_inputs_are_refused() -> None:
    cache, query, table, lengths = torch.zeros(4, 16, 2, 8), torch.zeros(1, 4, 8), torch.zeros(1, 2).int(), torch.ones(1).int()
    refused: tuple[tuple[Any, ...], ...] = (
        (query, cache[:, :12], cache[:, :12], table, lengths),
        (query[..., :4], cache, cache, table, lengths),
        (query[:, :3], cache, cache, table, lengths),
        (query.half(), cache, cache, table, lengths),
        (query, cache, cache[:2], table, lengths),
        (query, cache.mT.contiguous().mT, cache, table, lengths),
        (query, cache, cache, table[:0], lengths),
        (query, cache, cache, table, lengths, None, 0),
        (query, cache, cache, table, lengths, None, None, cache[..., 0], cache[..., 0]),
        (query, cache.to(torch.int8), cache.to(torch.int8), table, lengths, None, None, cache[..., 0].contiguous(), None),
    )
    for given in refused:
        with pytest.raises(OptionError):
            paged_attention(*given)
    with pytest.raises(OptionError):
        paged_write(query, query, cache, cache, lengths)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page", [16, 64, 256])
def test_default_configuration_on_the_gpu(page: int, dtype: torch.dtype) -> None:
    torch.manual_seed(10)
    batch, most = 3, 4096 // page
    query = torch.randn(batch, 32, 128, device="cuda").to(dtype)
    caches = [torch.randn(batch * most, page, 8, 128, device="cuda").to(dtype) for _ in range(2)]
    table = torch.randperm(batch * most, device="cuda").int().view(batch, most)
    lengths = torch.tensor([4096, 0, 1234], dtype=torch.int32, device="cuda")
    _compared((query, *caches, table, lengths))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cache_beyond_32_bit_offsets() -> None:
    torch.manual_seed(11)
    caches = [torch.zeros(140_000, 16, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]  # 2.3e9 elements each
    new = [torch.randn(16, 8, 128, device="cuda").bfloat16() for _ in range(2)]
    paged_write(*new, *caches, 139_999 * 16 + torch.arange(16, device="cuda"))
    table, lengths = torch.tensor([[139_999]], device="cuda").int(), torch.tensor([16], device="cuda").int()
    query = torch.randn(1, 8, 128, device="cuda").bfloat16()
    small = [cache[-1:].clone() for cache in caches]
    assert torch.equal(small[0][0], new[0])
    assert torch.equal(paged_attention(query, *caches, table, lengths), paged_attention(query, *small, table * 0, lengths))


def test_strided_table_and_lengths_of_32_bits(device: str) -> None:
    """A conversion to 64 bits would have copied them."""
    torch.manual_seed(14)
    query, key_cache, value_cache, table, lengths = _made(torch.float32, device)
    expected = paged_attention(query, key_cache, value_cache, table, lengths)
    wide, long = torch.stack((table, table + 3), 2)[..., 0], torch.stack((lengths, lengths + 7), 1)[:, 0]
    assert torch.equal(paged_attention(query, key_cache, value_cache, wide, lengths), expected)
    assert torch.equal(paged_attention(query, key_cache, value_cache, table, long), expected)


def test_shares_without_tokens_are_not_read(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in memory for them is whatever was there before, which may be nan."""
    torch.manual_seed(15)
    inputs, empty = _made(torch.float32, device), torch.empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        found = empty(*size, **options)
        return found.fill_(float("nan")) if found.is_floating_point() else found

    with tuning.forced("paged_attention", {"block_n": 16, "warps": 4, "stages": 2, "waves": 16}):
        expected = paged_attention(*inputs)
        monkeypatch.setattr(torch, "empty", poisoned)
        ours = paged_attention(*inputs)
    assert ours.isfinite().all() and torch.equal(ours, expected)


@pytest.mark.parametrize("int8", [False, True])
def test_windows_over_several_shares(int8: bool, device: str) -> None:
    """The first share starts inside a tile; where a sequence is shorter than the window, at its start."""
    torch.manual_seed(16)
    query, table = torch.randn(3, 2, 16, device=device), torch.randperm(24, device=device).int().view(3, 8)
    lengths = torch.tensor((128, 103, 40), dtype=torch.int32, device=device)
    caches = [torch.randn(24, 16, 1, 16, device=device) for _ in range(2)]
    scales = ()
    if int8:
        (key_cache, key_scale), (value_cache, value_scale) = (_int8(cache) for cache in caches)
        caches, scales = [key_cache, value_cache], (key_scale, value_scale)
    ones = (torch.ones(24, 16, 1, device=device),) * 2
    keys, values = (cache.double() * scale.double()[..., None] for cache, scale in zip(caches, scales or ones, strict=True))
    exact = paged_attention_reference(query.double(), keys, values, table, lengths, 0.3, 70)
    plain = paged_attention_reference(query, keys.float(), values.float(), table, lengths, 0.3, 70)
    assert _shares(pairs=3, capacity=70, block_n=16, waves=8, processors=1) == 2
    with tuning.forced("paged_attention_int8" if int8 else "paged_attention", {"block_n": 16, "warps": 4, "stages": 2, "waves": 8}):
        check(paged_attention(query, *caches, table, lengths, 0.3, 70, *scales), plain, exact)
