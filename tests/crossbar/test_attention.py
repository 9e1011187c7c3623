"""Attention on a nearly digital chip against torch's: projections, masks, encoder layers, and products of activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.core.errors import RidgelineError
from ridgeline.crossbar.layer.attention import AttentionProducts, CrossbarMatmul
from ridgeline.crossbar.layer.convert import to_crossbar
from ridgeline.crossbar.layer.layers import products
from tests.crossbar.support import chip

FINE = chip(
    operands_x_slices=[1, 1, 2, 4, 4], operands_w_slices=[1, 1, 2, 4, 4], dac_levels=16, cell_levels=16, adc_levels=7201
)  # fmt: skip
COARSE = chip(adc_levels=65)


def near(ours: Tensor, torchs: Tensor, most: float = 4e-3) -> bool:
    return ours.shape == torchs.shape and float((ours.detach() - torchs).abs().max()) < most


@pytest.mark.parametrize("on_products", [False, True])
@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"kdim": 5, "vdim": 7}, {"bias": False}], ids=repr)
def test_multihead_as_torch_does(options: dict[str, Any], on_products: bool) -> None:
    digital = nn.MultiheadAttention(12, 3, **options).eval()
    analog = to_crossbar(digital, FINE, attention=on_products)
    wide = {"kdim": options.get("kdim", 12), "vdim": options.get("vdim", 12)}
    query, key, value = torch.randn(4, 4, 12), torch.randn(4, 4, wide["kdim"]), torch.randn(4, 4, wide["vdim"])
    hidden = torch.zeros(4, 4, dtype=torch.bool)
    hidden[:, -1] = True
    ahead = torch.ones(4, 4, dtype=torch.bool).triu(1)
    with torch.no_grad():
        for extra in ({}, {"key_padding_mask": hidden}, {"attn_mask": ahead}, {"attn_mask": ahead.expand(12, 4, 4), "need_weights": False}):
            ours, plain = analog(query, key, value, **extra), digital(query, key, value, **extra)
            assert near(ours[0], plain[0])
            assert (ours[1] is None) == (plain[1] is None)
            if plain[1] is not None:
                assert near(ours[1], plain[1])
        assert near(analog(query[0], key[0], value[0])[0], digital(query[0], key[0], value[0])[0])
    assert set(analog.state_dict()) == set(digital.state_dict())


def test_encoder_layers_do_not_pass_the_arrays_by() -> None:
    digital = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 3, 24, batch_first=True), 2).eval()
    x = torch.randn(2, 5, 12)
    with torch.no_grad():
        plain = digital(x)
        fine, coarse = to_crossbar(digital, FINE)(x), to_crossbar(digital, COARSE)(x)
        only_linear = to_crossbar(digital, COARSE, overrides={"*self_attn*": {"digital": True}})(x)
    assert near(fine, plain, 2e-2)
    assert float((coarse - plain).abs().max()) > 0.1 and float((only_linear - plain).abs().max()) > 0.1


def test_matmul_of_activations_and_its_gradients() -> None:
    a, b = torch.randn(2, 3, 4, 40, requires_grad=True), torch.randn(2, 3, 40, 6, requires_grad=True)
    matmul = CrossbarMatmul(FINE)
    out = matmul(a, b)
    assert near(out, (a @ b).detach(), 5e-2)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    assert a.grad is not None and b.grad is not None
    assert near(a.grad, gradient @ b.detach().transpose(-2, -1), 2e-2)
    assert near(b.grad, a.detach().transpose(-2, -1) @ gradient, 2e-2)


def test_matmul_never_reads_cells_of_an_earlier_call() -> None:
    matmul, a = CrossbarMatmul(FINE), torch.eye(4)[None]
    with torch.no_grad():
        for _ in range(5):  # a freed tensor's address is used again
            b = torch.randn(1, 4, 3)
            assert near(matmul(a, b), b)
            del b


class Own(nn.Module):
    """Attention as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_attention_inside_a_users_module() -> None:
    digital, x = Own().eval(), torch.randn(2, 5, 12)
    with torch.no_grad():
        plain = digital(x)
        analog = to_crossbar(digital, FINE, attention=True)
        assert near(analog(x), plain, 1e-2)
        assert analog.crossbar_attention.scores.report()["groups"] == 6  # type: ignore[union-attr, operator]
        assert len(products(analog)) == 4
        projections_only, all_of_it = to_crossbar(digital, COARSE)(x), to_crossbar(digital, COARSE, attention=True)(x)
        assert not torch.equal(projections_only, all_of_it)
        assert torch.equal(digital(x), plain)  # the mode ends with the call


def test_the_mode_ends_with_an_error_too() -> None:
    analog = to_crossbar(Own(), COARSE, attention=True)
    with pytest.raises(RidgelineError):
        analog(torch.randn(2, 5, 11))
    query = torch.randn(1, 1, 2, 4)
    assert torch.equal(functional.scaled_dot_product_attention(query, query, query[..., :1] * 0 + 1), torch.ones(1, 1, 2, 1))


def test_arguments_of_scaled_dot_product_attention() -> None:
    on_chip = AttentionProducts(FINE)
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 3)
    for extra in ({"enable_gqa": True}, {"enable_gqa": True, "scale": 0.1}, {"enable_gqa": True, "attn_mask": torch.rand(5, 6) > 0.5}):
        assert near(
            on_chip(query, key, value, **extra).nan_to_num(),
            functional.scaled_dot_product_attention(query, key, value, **extra).nan_to_num(),
        )
