"""int8 and int4 products against the same with dequantised weights, in every layout the CPU has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import linear, silu

from ridgeline.core.errors import OptionError
from ridgeline.llm.model.config import ModelConfig
from ridgeline.llm.model.linear import Int4Linear, Int8Linear, Linear, quantise_decoder_
from ridgeline.llm.model.weights import random_decoder
from tests.llm.model.support import Text, random_tokens

CONFIG = ModelConfig("llama", 97, 64, 2, 4, 2, 16, 96, 128, qkv_bias=True)
KINDS: dict[str, Any] = {"int8": Int8Linear, "int4": Int4Linear}


def _weight(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, columns) * columns**-0.5).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64))
@pytest.mark.parametrize("shape", ((96, 128), (48, 192), (33, 70)))
@pytest.mark.parametrize("rows", (1, 7, 40))
def test_products_are_those_of_dequantised_weights(kind: str, dtype: torch.dtype, shape: tuple[int, int], rows: int) -> None:
    weight, x, bias = _weight(*shape, dtype), torch.randn(rows, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
    layer = KINDS[kind](weight, bias)
    dense = layer.dequantised().double()
    exact = linear(x.double(), dense, bias.double())
    error = (layer(x).double() - exact).norm() / exact.norm()
    plain = (linear(x, dense.to(dtype), bias).double() - exact).norm() / exact.norm()
    assert error <= 2 * plain + 4 * torch.finfo(dtype).eps
    half = (weight.double() - dense).abs().max() / weight.abs().max()
    rounding = torch.finfo(dtype).eps  # of the scale, and of the dequantised weight itself
    assert half <= (0.5 / 127 if kind == "int8" else 0.5 * 2 / 15) * 1.01 + 2 * rounding, "codes are not the nearest"
    assert layer.nbytes < weight.nbytes * (0.6 if kind == "int8" else 0.45)


@pytest.mark.parametrize("kind", ("dense", *KINDS))
def test_gated_is_silu_of_one_half_times_the_other(kind: str) -> None:
    weight, x = _weight(128, 64, torch.float32), torch.randn(3, 64)
    layer: Any = Linear(64, 128) if kind == "dense" else KINDS[kind](weight)
    if kind == "dense":
        layer.weight.copy_(weight)
    gate, up = layer(x).chunk(2, -1)
    torch.testing.assert_close(layer.gated(x), silu(gate) * up)


def test_int4_of_a_weight_on_a_grid_of_blocks_keeps_it() -> None:
    """What a Q4_1 file holds: code * scale + minimum in blocks of 32."""
    scale, minimum = (torch.rand(48, 4, 1) * 0.1).bfloat16(), (torch.randn(48, 4, 1) * 0.3).bfloat16()
    weight = (torch.randint(16, (48, 4, 32)) * scale.float() + minimum.float()).flatten(1)
    layer = Int4Linear(weight.to(torch.float32), group=32)
    torch.testing.assert_close(layer.dequantised(), weight, rtol=0, atol=1e-6)


def test_which_kernel_runs_is_said() -> None:
    assert Int8Linear(_weight(32, 64, torch.bfloat16)).runs_packed
    assert Int4Linear(_weight(32, 64, torch.bfloat16)).runs_packed
    odd = Int4Linear(_weight(33, 70, torch.bfloat16))
    assert not odd.runs_packed and "33 x 70" in odd.reason
    assert "float32" in Int8Linear(_weight(32, 64, torch.float32)).reason
    assert "multiple of 32" in Int8Linear(_weight(32, 70, torch.bfloat16)).reason


@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_decoder_is_that_of_its_dequantised_weights(kind: str, tied: bool) -> None:
    from dataclasses import replace

    config = replace(CONFIG, tied=tied)
    decoder, table = random_decoder(config, seed=3), random_decoder(config, seed=3).embed.weight
    assert quantise_decoder_(decoder, kind, group=32) is decoder
    assert torch.equal(decoder.embed.weight, table), "the input table stays dense"
    assert not any(isinstance(module, Linear) for module in decoder.modules())
    dense = random_decoder(config, seed=3)
    for name, module in decoder.named_modules():
        if isinstance(module, Int8Linear | Int4Linear):
            dense.get_submodule(name).weight = torch.nn.Parameter(module.dequantised(), requires_grad=False)
    texts = [Text(model, [random_tokens(30, 1), random_tokens(9, 2)]) for model in (decoder, dense, random_decoder(config, seed=3))]
    for text in texts:
        text.step({0: 20, 1: 8})
        text.step({0: 1, 1: 1}, rows=True)
    ours, same, before = (text.all_logits(0) for text in texts)
    torch.testing.assert_close(ours, same, rtol=0, atol=1e-4)
    off = ((ours - before).norm() / before.norm()).item()
    assert 1e-4 < off < (0.03 if kind == "int8" else 0.5), off


def test_dense_weights_are_let_go() -> None:
    import gc
    import weakref

    decoder = random_decoder(CONFIG)
    kept = [weakref.ref(module.weight) for module in decoder.modules() if isinstance(module, Linear)]
    quantise_decoder_(decoder, "int8")
    gc.collect()
    assert not [reference for reference in kept if reference() is not None]


def test_moving_a_quantised_decoder_is_refused() -> None:
    decoder = quantise_decoder_(random_decoder(CONFIG), "int8")
    decoder.to("cpu").eval()  # where it is already
    with pytest.raises(OptionError, match=r"laid out for torch\.float32"):
        decoder.bfloat16()
    with pytest.raises(OptionError, match="int8 or int4"):
        quantise_decoder_(decoder, "int3")
