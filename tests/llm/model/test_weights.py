"""Tensors of a file meet their places, or the error names the tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgeline.core.errors import ModelFileError
from ridgeline.llm.model.config import ModelConfig
from ridgeline.llm.model.weights import from_huggingface, huggingface_places, random_decoder

CONFIG = ModelConfig("qwen2", 50, 32, 2, 4, 2, 8, 48, 64, qkv_bias=True)
QUERY = "model.layers.1.self_attn.q_proj.weight"


def _tensors(config: ModelConfig = CONFIG) -> dict[str, Tensor]:
    return {name: torch.randn(place.shape) for name, place in huggingface_places(config).items()}


def test_pieces_of_a_product_lie_in_order_whatever_order_they_come_in() -> None:
    tensors = _tensors()
    decoder = from_huggingface(CONFIG, reversed(tensors.items()))
    parts = [tensors[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(decoder.layers[0].attention.qkv.weight, torch.cat(parts))
    both = [tensors[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(decoder.layers[1].perceptron.up.weight, torch.cat(both))
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in decoder.parameters()) and not decoder.training


def test_dtype_and_tied_tables() -> None:
    from dataclasses import replace

    config = replace(CONFIG, tied=True)
    tensors = {**_tensors(config), "lm_head.weight": torch.zeros(1), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    decoder = from_huggingface(config, tensors, dtype=torch.bfloat16)
    assert decoder.lm_head.weight is decoder.embed.weight
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("fault", ("missing", "extra", "shape", "nan", "integers", "twice"))
def test_errors_name_the_tensor(fault: str) -> None:
    tensors = _tensors()
    pairs = list(tensors.items())
    if fault == "missing":
        del tensors[QUERY]
    elif fault == "extra":
        tensors["model.layers.2.self_attn.q_proj.weight"] = torch.zeros(32, 32)
    elif fault == "shape":
        tensors[QUERY] = torch.zeros(32, 31)
    elif fault == "nan":
        tensors[QUERY][3, 4] = float("nan")
    elif fault == "integers":
        tensors[QUERY] = torch.zeros(32, 32, dtype=torch.int32)
    named = "layers.2" if fault == "extra" else QUERY
    with pytest.raises(ModelFileError, match=named):
        from_huggingface(CONFIG, [*pairs, (QUERY, tensors[QUERY])] if fault == "twice" else tensors, origin="model.safetensors")


def test_a_config_that_promises_more_than_the_file_holds_allocates_nothing() -> None:
    huge = ModelConfig("llama", 2**20, 2**16, 1000, 1024, 1024, 64, 2**18, 2**24)  # 2 · 10^14 weights
    with pytest.raises(ModelFileError, match="embed_tokens"):
        from_huggingface(huge, {"model.embed_tokens.weight": torch.zeros(4, 4)})


def test_random_decoders_repeat_and_stay_finite() -> None:
    one, two = random_decoder(CONFIG, seed=1), random_decoder(CONFIG, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.embed.weight, random_decoder(CONFIG, seed=2).embed.weight)
