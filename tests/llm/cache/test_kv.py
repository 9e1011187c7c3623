"""KVCache: the formula is what is allocated, what is written is read, padding goes nowhere, int8 within half a step."""

from __future__ import annotations

import random

import pytest
import torch

from ridgeline.core.errors import OptionError
from ridgeline.llm.cache.kv import KVCache, formula_bytes, pages_for, quantise
from ridgeline.llm.model.config import ModelConfig
from tests.support import full_or_tenth


def config(layers: int = 2, heads: int = 4, kv_heads: int = 2, head_dim: int = 8) -> ModelConfig:
    return ModelConfig(
        family="llama", vocab=32, hidden=heads * head_dim, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        intermediate=64, context=128,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 4), (3, 2, 8), (2, 4, 64)])
def test_the_formula_is_what_is_allocated(dtype: torch.dtype, int8: bool, shape: tuple[int, int, int]) -> None:
    layers, kv_heads, head_dim = shape
    this = config(layers, 4, kv_heads, head_dim)
    cache = KVCache(this, 5, 16, dtype, int8=int8)
    tensors = cache.keys + cache.values + (cache.key_scales or []) + (cache.value_scales or [])
    allocated = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert cache.bytes == allocated == formula_bytes(this, 5, 16, dtype.itemsize, int8)
    if not int8:
        assert cache.bytes == this.kv_bytes_per_token(dtype.itemsize) * 6 * 16


@pytest.mark.parametrize("int8", [False, True])
def test_pages_for_is_the_most_that_fit(int8: bool) -> None:
    this = config()
    for pages in (1, 2, 100):
        exact = formula_bytes(this, pages, 16, 2, int8)
        assert pages_for(this, exact, 16, 2, int8) == pages
        if pages > 1:
            assert pages_for(this, exact - 1, 16, 2, int8) == pages - 1
    with pytest.raises(OptionError, match="key-value cache"):
        pages_for(this, formula_bytes(this, 1, 16, 2, int8) - 1, 16, 2, int8)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_what_is_written_is_read_back_and_padding_goes_nowhere(page_size: int, int8: bool) -> None:
    this, draw = config(), random.Random(page_size)
    torch.manual_seed(0)
    for _ in range(full_or_tenth(50)):
        cache = KVCache(this, 12, page_size, torch.float32, int8=int8)
        pages = draw.sample(range(12), draw.randint(1, 12))
        length = draw.randint((len(pages) - 1) * page_size + 1, len(pages) * page_size)
        key, value = torch.randn(2, length, this.kv_heads, this.head_dim)
        slots = torch.tensor([pages[at // page_size] * page_size + at % page_size for at in range(length)])
        for part in torch.arange(length).split(draw.randint(1, length)):  # in chunks, each padded with junk
            junk = torch.full((2, this.kv_heads, this.head_dim), 1e9)
            where = torch.cat([slots[part], torch.tensor([-1, -1])])
            cache.write(1, torch.cat([key[part], junk]), torch.cat([value[part], junk]), where)
        got_key, got_value = cache.read(1, torch.tensor(pages, dtype=torch.int32), length)
        for got, wanted in ((got_key, key), (got_value, value)):
            assert got.dtype == torch.float32 and got.shape == wanted.shape
            step = wanted.abs().amax(-1, keepdim=True) / 127
            assert ((got - wanted).abs() <= (step * 0.57 if int8 else 0)).all()  # 1/2, and 2^-11 of the largest: 127 / 2048 steps
        for stored in cache.keys + cache.values:
            assert stored[:12].float().abs().max() <= 127  # no junk in a page that can be handed out
        assert not cache.keys[0].any(), "another layer was written"
        untouched = [page for page in range(12) if page not in pages]
        assert not cache.keys[1][untouched].any()


def test_bfloat16_is_stored_as_it_is() -> None:
    cache = KVCache(config(), 2, 4)
    key = torch.randn(3, 2, 8, dtype=torch.bfloat16)
    cache.write(0, key, -key, torch.tensor([4, 5, 6]))
    got_key, got_value = cache.read(0, torch.tensor([1]), 3)
    assert torch.equal(got_key, key) and torch.equal(got_value, -key) and got_key.dtype == torch.bfloat16


def test_int8_uses_all_of_its_range_for_every_token_and_head_alone() -> None:
    x = torch.randn(50, 3, 64, dtype=torch.float64) * 10.0 ** torch.randint(-4, 4, (50, 3, 1))
    quantised, scale = quantise(x)
    assert scale.dtype == torch.float16 and scale.shape == (50, 3)
    assert ((quantised.abs().amax(-1) >= 126) | (scale < 6.1e-5)).all()  # a subnormal scale is coarse
    back = quantised.double() * scale.double().unsqueeze(-1)
    assert ((back - x).abs().amax(-1) <= 0.5 * scale.double() + 127 * (scale.double() * 2**-11 + 2**-25) + 1e-12).all()
    noise_db = 10 * torch.log10((x**2).sum(-1) / ((x - back) ** 2).sum(-1))
    assert noise_db[scale > 6.1e-5].min() > 38  # Gaussian rows of 64: 40 to 45 dB


@pytest.mark.parametrize("value", [0.0, 1e-9, 6e4, -3e38])
def test_int8_of_extreme_values_is_finite_or_says_so(value: float) -> None:
    quantised, scale = quantise(torch.full((1, 1, 4), value))
    back = quantised.float() * scale.float().unsqueeze(-1)
    if abs(value) < 127 * 65504:
        assert (back - value).abs().max() <= max(4e-6, abs(value) / 127)
    else:
        assert not back.isfinite().all()


def test_a_row_that_is_not_a_number_stays_so() -> None:
    cache = KVCache(config(), 2, 4, torch.float32, int8=True)
    key = torch.zeros(2, 2, 8)
    key[0, 0, 0] = float("nan")
    cache.write(0, key, key, torch.tensor([0, 1]))
    got, _ = cache.read(0, torch.tensor([0]), 2)
    assert got[0, 0].isnan().all() and not got[1].isnan().any() and not got[0, 1].isnan().any()


@pytest.mark.parametrize("int8", [False, True])
def test_copy_page_copies_every_layer(int8: bool) -> None:
    cache = KVCache(config(), 3, 4, torch.float32, int8=int8)
    for layer in range(2):
        key, value = torch.randn(2, 4, 2, 8)
        cache.write(layer, key, value, torch.arange(4))
    cache.copy_page(0, 2)
    for layer in range(2):
        source, target = cache.read(layer, torch.tensor([0]), 4), cache.read(layer, torch.tensor([2]), 4)
        assert torch.equal(source[0], target[0]) and torch.equal(source[1], target[1]) and source[0].any()


def test_write_asks_the_host_nothing() -> None:
    """On the meta device there are no values: anything that depends on them would fail, as it would in a CUDA graph."""
    for int8 in (False, True):
        cache = KVCache(config(), 2, 4, torch.float32, device="meta", int8=int8)
        key = torch.zeros(3, 2, 8, device="meta")
        cache.write(0, key, key, torch.zeros(3, dtype=torch.int64, device="meta"))
