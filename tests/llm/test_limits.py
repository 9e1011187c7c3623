"""The decode limit: bytes counted by hand, for every way weights and keys are stored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.llm.cache.kv import KVCache
from ridgeline.llm.limits import Limit, cache_bytes, decode_limit, read_bandwidth, weight_bytes
from ridgeline.llm.load import load_model
from ridgeline.llm.model.config import ModelConfig
from ridgeline.llm.model.decoder import Decoder
from ridgeline.llm.model.linear import quantise_decoder_

SMALL = ModelConfig("llama", vocab=96, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128, context=64)


def decoder(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    made = Decoder(config)
    torch.manual_seed(0)
    for weight in made.parameters():
        weight.data.normal_(std=0.02)
    return made.to(dtype)


def products(config: ModelConfig) -> int:
    """Weights of every matrix a token is multiplied by."""
    layer = config.hidden * (config.heads + 2 * config.kv_heads) * config.head_dim + config.heads * config.head_dim * config.hidden
    return config.layers * (layer + 3 * config.hidden * config.intermediate) + config.vocab * config.hidden


NORMS = (2 * SMALL.layers + 1) * SMALL.hidden


@pytest.mark.parametrize("tied", [False, True])
def test_dense_weights_are_read_once_and_the_input_table_not_at_all(tied: bool) -> None:
    config = replace(SMALL, tied=tied)
    assert weight_bytes(decoder(config)) == 2 * (products(config) + NORMS)
    assert weight_bytes(decoder(config, torch.float32)) == 4 * (products(config) + NORMS)


def test_quantised_weights_count_as_stored_with_their_scales() -> None:
    rows = SMALL.layers * ((SMALL.heads + 2 * SMALL.kv_heads) * SMALL.head_dim + 2 * SMALL.hidden + 2 * SMALL.intermediate) + SMALL.vocab
    int8 = quantise_decoder_(decoder(SMALL), "int8")
    assert weight_bytes(int8) == products(SMALL) + 2 * rows + 2 * NORMS
    int4 = weight_bytes(quantise_decoder_(decoder(SMALL), "int4"))
    assert products(SMALL) / 2 < int4 < 0.75 * products(SMALL)  # half a byte each, and scales of groups


def test_keys_and_values_of_the_length_within_the_window() -> None:
    cache, small = KVCache(SMALL, 4), KVCache(SMALL, 4, int8=True)
    assert cache_bytes(SMALL, cache, 10) == SMALL.kv_bytes_per_token(2) * 10 == 2 * 2 * 2 * 16 * 2 * 10
    assert cache_bytes(SMALL, small, 10) == 2 * 2 * 2 * (16 + 2) * 10
    windowed = replace(SMALL, windows=(4, None))
    assert cache_bytes(windowed, cache, 10) == cache_bytes(SMALL, cache, 10) * (4 + 10) / 20


def test_per_cent_is_of_the_bytes_at_the_bandwidth() -> None:
    limit = Limit(weight_bytes=900, cache_bytes=100, sequences=2, bandwidth_bps=1e6)
    assert limit.step_s == pytest.approx(1e-3) and limit.tokens_per_s == pytest.approx(2000) and limit.bytes_per_token == 500
    assert limit.percent(1000) == pytest.approx(50)
    row = limit.to_json(1000)
    assert row["limit_ms_per_token"] == pytest.approx(0.5) and row["percent_of_limit"] == pytest.approx(50)


def test_a_batch_shares_the_weights() -> None:
    model, cache = decoder(SMALL), KVCache(SMALL, 4)
    one, four = (decode_limit(model, SMALL, cache, [10.0] * count, 1e9) for count in (1, 4))
    assert four.step_bytes - one.step_bytes == 3 * one.cache_bytes and four.bytes_per_token < one.bytes_per_token


def test_the_builtin_model_in_full() -> None:
    loaded = load_model("builtin", dtype="bfloat16")
    assert weight_bytes(loaded.model) == 2 * sum(weight.numel() for weight in set(loaded.model.parameters()))


def test_bandwidth_is_measured() -> None:
    read_bandwidth.cache_clear()
    assert 1e8 < read_bandwidth("cpu") < 1e13
