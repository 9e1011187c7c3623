"""Attention, forward and backward: dtypes, layouts, grouped heads, ragged and unequal lengths, against float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ridgeline.core.errors import OptionError
from ridgeline.kernel import replace, tuning
from ridgeline.kernel.attention import (
    FAR,
    _like,
    _ready,
    attention,
    attention_backward_op,
    attention_op,
    flash_attention,
    scaled_dot_product_attention,
)
from tests.kernel.support import FLOATS, check

SHAPES = (  # B, H, Hkv, T, S, D, causal
    (1, 2, 2, 40, 40, 32, True),
    (2, 4, 2, 33, 70, 24, True),
    (1, 2, 1, 70, 33, 16, True),
    (1, 2, 2, 37, 50, 64, False),
    (1, 1, 1, 1, 1, 128, True),
)


def _inputs(shape: tuple[Any, ...], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    batch, heads, shared, T, S, D, _ = shape
    sizes = ((batch, heads, T, D), (batch, shared, S, D), (batch, shared, S, D))
    return tuple(torch.randn(size, device=device).to(dtype).requires_grad_() for size in sizes)


def _formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None = None) -> torch.Tensor:
    """Every score in memory, in the dtype of the inputs."""
    group = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ keys.mT * (query.shape[3] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[2:], dtype=torch.bool, device=query.device).tril(), float("-inf"))
    return scores.softmax(-1) @ values


def _yardstick(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None = None) -> torch.Tensor:
    """Torch's own in float32, rounded at the end: in bfloat16 itself its error is so near 1 % that a planted one would not be seen."""
    group = query.shape[1] // key.shape[1]
    keys, values = key.float().repeat_interleave(group, 1), value.float().repeat_interleave(group, 1)
    with sdpa_kernel(SDPBackend.MATH):  # the others refuse some layouts and head widths
        return F.scaled_dot_product_attention(query.float(), keys, values, is_causal=causal, scale=scale).to(query.dtype)


def _compared(inputs: tuple[torch.Tensor, ...], causal: bool, scale: float | None = None, yardstick: Any = _yardstick) -> None:
    """Output and the three gradients of ours against torch's own and the formula in float64."""
    exact_in = tuple(tensor.detach().double().requires_grad_() for tensor in inputs)
    exact = _formula(*exact_in, causal, scale)
    plain = yardstick(*inputs, causal, scale)
    ours = flash_attention(*inputs, causal, scale)
    grad = torch.randn_like(plain)
    check(ours.detach(), plain.detach(), exact.detach())
    results = (torch.autograd.grad(out, given, grad.to(out.dtype)) for out, given in ((ours, inputs), (plain, inputs), (exact, exact_in)))
    for mine, theirs, true in zip(*results, strict=True):
        check(mine, theirs, true)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: tuple[Any, ...], dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    _compared(_inputs(shape, dtype, device), shape[-1])


@pytest.mark.parametrize("tile", [(16, 32), (32, 32), (64, 16)], ids=str)
def test_every_relation_of_tile_sizes(tile: tuple[int, int], device: str) -> None:
    torch.manual_seed(1)
    chosen = {"block_m": tile[0], "block_n": tile[1], "warps": 4, "stages": 2}
    inputs = _inputs((1, 2, 1, 67, 59, 16, True), torch.float32, device)
    with tuning.forced("attention", chosen), tuning.forced("attention_dkv", chosen), tuning.forced("attention_dq", chosen):
        _compared(inputs, True)
        _compared(inputs, False)


def test_scale(device: str) -> None:
    torch.manual_seed(2)
    inputs = _inputs((1, 1, 1, 20, 20, 16, True), torch.float32, device)
    _compared(inputs, True, 0.7)
    for scale in (0.0, -0.3):  # torch's own takes the root of the scale
        _compared(inputs, True, scale, yardstick=_formula)


def test_large_scores_do_not_overflow(device: str) -> None:
    torch.manual_seed(3)
    query, key, value = (tensor.detach() * 40 for tensor in _inputs((1, 1, 1, 40, 40, 16, True), torch.float32, device))
    exact = _formula(query.double(), key.double(), value.double(), True)
    check(flash_attention(query, key, value), _yardstick(query, key, value, True), exact)


def _strided(kind: str, size: tuple[int, ...], device: str) -> torch.Tensor:
    batch, heads, T, D = size
    return {
        "tokens first": lambda: torch.randn(batch, T, heads, D, device=device).transpose(1, 2),
        "fused": lambda: torch.randn(batch, T, 3, heads, D, device=device)[:, :, 1].transpose(1, 2),
        "columns strided": lambda: torch.randn(batch, heads, D, T, device=device).transpose(2, 3),
        "sliced": lambda: torch.randn(batch, heads, T, 2 * D, device=device)[..., ::2],
        "offset": lambda: torch.randn(batch, heads, T, D + 5, device=device)[..., 3:-2],
        "broadcast": lambda: torch.randn(1, 1, T, D, device=device).expand(size),
    }[kind]()


@pytest.mark.parametrize("kind", ["tokens first", "fused", "columns strided", "sliced", "offset", "broadcast"])
def test_layouts(kind: str, device: str) -> None:
    torch.manual_seed(4)
    inputs = tuple(_strided(kind, (2, heads, 35, 16), device).requires_grad_() for heads in (4, 2, 2))
    _compared(inputs, True)


def test_token_first_layout_is_kept(device: str) -> None:
    query = torch.randn(2, 20, 4, 16, device=device).transpose(1, 2)
    assert flash_attention(query, query, query).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("shape", [(0, 2, 2, 5, 5, 16), (1, 2, 2, 0, 5, 16), (1, 2, 2, 5, 0, 16), (1, 0, 0, 5, 5, 16)], ids=str)
def test_empty(shape: tuple[int, ...], device: str) -> None:
    inputs = _inputs((*shape, False), torch.float32, device)
    out = flash_attention(*inputs, False)
    assert torch.equal(out, torch.zeros_like(out))
    for mine, given in zip(torch.autograd.grad(out.sum(), inputs), inputs, strict=True):
        assert torch.equal(mine, torch.zeros_like(given))


def test_gradcheck_in_float64(device: str) -> None:
    torch.manual_seed(5)
    inputs = _inputs((1, 2, 1, 4, 5, 3, True), torch.float64, device)
    assert torch.autograd.gradcheck(flash_attention, inputs)


def test_only_the_gradients_asked_for(device: str) -> None:
    torch.manual_seed(6)
    whole = _inputs((1, 2, 1, 20, 20, 16, True), torch.float32, device)
    expected = torch.autograd.grad(flash_attention(*whole).sum(), whole)
    for wanted in itertools.product((True, False), repeat=3):
        if any(wanted):
            inputs = [tensor.detach().requires_grad_(want) for tensor, want in zip(whole, wanted, strict=True)]
            flash_attention(*inputs).sum().backward()
            for given, want, true in zip(inputs, wanted, expected, strict=True):
                assert torch.equal(given.grad, true) if want else given.grad is None


QUICK = ("test_schema", "test_faketensor")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_opcheck(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(7)
    query, key, value = (tensor.detach() for tensor in _inputs((2, 2, 1, 6, 8, 16, True), dtype, device))
    out, lse = attention_op(query, key, value, True, 0.25)
    whole = dtype == torch.float32
    inputs = tuple(tensor.clone().requires_grad_() for tensor in (query, key, value)) if whole else (query, key, value)
    torch.library.opcheck(attention_op.overload, (*inputs, True, 0.25), **({} if whole else {"test_utils": QUICK}))
    for needs in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(attention_backward_op.overload, (out, query, key, value, out, lse, True, 0.25, *needs), test_utils=QUICK)


@pytest.mark.parametrize("kind", ["tokens first", "columns strided", "sliced", "broadcast"])
def test_opcheck_of_strides(kind: str, device: str) -> None:
    query, key, value = (_strided(kind, (2, heads, 6, 16), device) for heads in (2, 1, 1))
    out, lse = attention_op(query, key, value, True, 0.25)
    torch.library.opcheck(attention_op.overload, (query, key, value, True, 0.25), test_utils=("test_faketensor",))
    torch.library.opcheck(
        attention_backward_op.overload, (out, query, key, value, out, lse, True, 0.25, True, True), test_utils=("test_faketensor",)
    )


def test_deterministic(device: str) -> None:
    torch.manual_seed(8)
    inputs = _inputs((1, 4, 2, 50, 50, 16, True), torch.bfloat16, device)

    def run() -> tuple[torch.Tensor, ...]:
        out = flash_attention(*inputs)
        return out.detach(), *torch.autograd.grad(out.square().sum(), inputs)

    assert all(torch.equal(one, two) for one, two in zip(run(), run(), strict=True))


def test_stand_in(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(9)
    query, key, value = (tensor.detach() for tensor in _inputs((1, 4, 2, 20, 24, 16, True), torch.float32, device))
    assert scaled_dot_product_attention(query[:, :2], key, value, attn_mask=torch.ones(20, 24, device=device)) is NotImplemented
    monkeypatch.setattr(replace, "_everywhere", True)
    two = query[:, :2]
    for options in ({}, {"is_causal": True}, {"scale": 0.3}, {"is_causal": True, "scale": 2.0}):
        torch.testing.assert_close(
            scaled_dot_product_attention(two, key, value, **options), F.scaled_dot_product_attention(two, key, value, **options)
        )
    torch.testing.assert_close(
        scaled_dot_product_attention(query, key, value, enable_gqa=True), F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    )
    mask = torch.ones(20, 24, device=device, dtype=torch.bool)
    refused = (
        ((query, key, value), {}),  # 4 query heads over 2 without enable_gqa
        ((two, key, value), {"attn_mask": mask}),
        ((two, key, value), {"dropout_p": 0.1}),
        ((two[0], key[0], value[0]), {}),
        ((two, key, value[..., :8]), {}),
        ((two.double(), key.double(), value.double()), {}),
    )
    for given, options in refused:
        assert scaled_dot_product_attention(*given, **options) is NotImplemented
    assert replace.REPLACEMENTS[F.scaled_dot_product_attention] == ("attention", scaled_dot_product_attention)


def test_public_function_is_right_by_either_road(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(10)
    query, key, value = (tensor.detach() for tensor in _inputs((1, 4, 2, 20, 24, 16, True), torch.float32, device))
    for everywhere in (False, True):
        monkeypatch.setattr(replace, "_everywhere", everywhere)
        for causal in (True, False):
            check(
                attention(query, key, value, causal),
                _yardstick(query, key, value, causal),
                _formula(query.double(), key.double(), value.double(), causal),
            )


def test_wrong_inputs_are_refused() -> None:
    x = torch.zeros(1, 2, 4, 16)
    for given in ((x[0], x, x), (x, x, x[..., :8]), (torch.zeros(1, 3, 4, 16), x, x), (x, x.double(), x), (x.int(), x.int(), x.int())):
        with pytest.raises(OptionError):
            attention(*given)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(2, 8, 2, 1000, 1000, 128, True), (1, 4, 4, 777, 1111, 64, False), (1, 2, 2, 600, 500, 256, True)], ids=str
)
def test_default_tiles_on_the_gpu(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(11)
    _compared(_inputs(shape, dtype, "cuda"), shape[-1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_beyond_32_bit_offsets() -> None:
    """Sequences 2^31 elements apart, in a view of one large tensor."""
    torch.manual_seed(12)
    large = torch.empty((2, 2, 1 << 19, 1 << 11), dtype=torch.bfloat16, device="cuda")  # 8 GiB, 2^32 elements
    query = large[:, :, :: 1 << 10, :64]  # rows 2^21 elements apart: still read in place
    query.normal_()
    key, value = torch.randn_like(query).contiguous(), torch.randn_like(query).contiguous()
    _compared(tuple(tensor.detach().requires_grad_() for tensor in (query, key, value)), True)


def test_stand_in_leaves_autocast_to_torch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which multiplies in the half type, and gives one."""
    monkeypatch.setattr(replace, "_everywhere", True)
    x = torch.randn(1, 2, 8, 16, device=device)
    assert scaled_dot_product_attention(x, x, x) is not NotImplemented
    with torch.autocast(device, dtype=torch.bfloat16):
        assert scaled_dot_product_attention(x, x, x) is NotImplemented


def test_rows_too_far_apart_for_32_bits_are_copied() -> None:
    """Of tensors without memory: one more than 2^22 - 1 elements from row to row, and tiles of 256 rows would leave 32 bits."""
    for far in (FAR - 16, FAR):
        x = torch.empty(1, 8, far // 16, 16, device="meta").transpose(1, 2)  # 16 apart in a row of heads: `far` from token to token
        for kept in (_ready(x), _like(x)):
            assert kept.shape == x.shape and (kept.stride() == x.stride()) is (far < FAR) and kept.stride(2) < FAR
