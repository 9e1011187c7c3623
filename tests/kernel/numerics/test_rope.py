"""Rotary positions and their gradients against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ridgeline.core.errors import OptionError
from ridgeline.kernel import rope
from ridgeline.kernel.tuning import forced, spaces
from tests.kernel.support import FLOATS, check, layouts


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def tables(tokens: int, dim: int, device: str, batch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Halves that differ, so that a kernel that reads one of them fails."""
    shape = (batch, tokens, dim) if batch else (tokens, dim)
    return torch.randn(shape, device=device), torch.randn(shape, device=device)


def plain_one(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, signed: bool = False, seq_dim: int = 1) -> torch.Tensor:
    heads_dim = -2 if seq_dim == 1 else -3
    cos, sin = cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second if signed else -second, first), dim=-1) * sin


def plain_rope(query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return plain_one(query, *args, **options), plain_one(key, *args, **options)


def compared(dtype: torch.dtype, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **options: Any) -> None:
    """Results and gradients of query and key."""
    results = []
    cos, sin = cos.to(dtype), sin.to(dtype)
    for function, kind in ((rope.rope, dtype), (plain_rope, dtype), (plain_rope, torch.float64)):
        pair = [x.detach().to(kind).requires_grad_() for x in (query, key)]
        outs = function(*pair, cos.to(kind), sin.to(kind), **options)
        torch.manual_seed(1)
        torch.autograd.backward(outs, [torch.randn(out.shape, device=out.device).to(dtype).to(kind) for out in outs])
        results.append([*(out.detach() for out in outs), *(x.grad for x in pair)])
    for triple in zip(*results, strict=True):
        check(*triple)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seq_dim", [1, 2])
def test_layouts(dtype: torch.dtype, seq_dim: int, device: str) -> None:
    cos, sin = tables(3, 8, device)
    shape, key_shape = ((2, 3, 4, 8), (2, 3, 2, 8)) if seq_dim == 1 else ((2, 4, 3, 8), (2, 2, 3, 8))
    for (_, query), (_, key) in zip(layouts(shape, dtype, device), layouts(key_shape, dtype, device), strict=True):
        compared(dtype, query, key, cos, sin, seq_dim=seq_dim)
        compared(dtype, query, key.contiguous(), cos, sin, seq_dim=seq_dim, signed=True)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 2), (2, 3, 5, 3, 12), (1, 5, 40, 8, 16), (2, 4, 3, 7, 6), (1, 2, 6, 6, 96), (2, 0, 4, 2, 8),
                                   (1, 7, 70, 1, 4), (0, 2, 2, 2, 8)])  # fmt: skip
def test_shapes(shape: tuple[int, ...], device: str) -> None:
    batch, tokens, heads, key_heads, dim = shape
    query, key = torch.randn(batch, tokens, heads, dim, device=device), torch.randn(batch, tokens, key_heads, dim, device=device)
    compared(torch.float32, query, key, *tables(tokens, dim, device))
    if batch:
        compared(torch.float32, query, key, *tables(tokens, dim, device, batch=1))
        compared(torch.float32, query, key, *tables(tokens, dim, device, batch=batch))
        wide = tables(tokens, 2 * dim, device)
        compared(torch.float32, query, key, wide[0][:, ::2], wide[1][:, :dim])


def test_transposed_views_are_read_and_written_in_place(device: str) -> None:
    cos, sin = tables(5, 8, device)
    query, key = torch.randn(2, 5, 4, 8, device=device).transpose(1, 2), torch.randn(2, 5, 2, 8, device=device).transpose(1, 2)
    out = rope.rope(query, key, cos, sin, seq_dim=2)
    assert out[0].stride() == query.stride() and out[1].stride() == key.stride()
    token_major = rope.rope(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    assert all(torch.equal(x, y.transpose(1, 2)) for x, y in zip(out, token_major, strict=True))
    fused = torch.randn(2, 5, 3 * 32, device=device)
    views = [part.view(2, 5, 4, 8) for part in fused.split(32, dim=-1)[:2]]
    for ours, plain in zip(rope.rope(*views, cos, sin), plain_rope(*views, cos, sin), strict=True):
        assert torch.allclose(ours, plain, atol=1e-6) and ours.is_contiguous()


def test_the_conventions_agree_on_usual_tables(device: str) -> None:
    query, key, cos, sin = rope.BENCH.make((2, 6, 4, 2, 16), torch.float32, device)
    ours, plain = rope.rope(query, key, cos, sin), rope.BENCH.plain(query, key, cos, sin)
    first, second = sin.chunk(2, dim=-1)
    signed = rope.rope(query, key, cos, torch.cat((-first, second), dim=-1), signed=True)
    for one, two, three in zip(ours, plain, signed, strict=True):
        assert torch.allclose(one, two, atol=1e-6) and torch.equal(one, three)


def test_one_and_gradients_only_where_needed(device: str) -> None:
    cos, sin = tables(3, 8, device)
    x = torch.randn(2, 3, 4, 8, device=device)
    check(rope.rope_one(x, cos, sin), plain_one(x, cos, sin), plain_one(x.double(), cos.double(), sin.double()))
    for index in (0, 1):
        results = []
        for function in (rope.rope, plain_rope):
            pair = [x.clone(), x[:, :, :2].clone()]
            pair[index].requires_grad_()
            function(*pair, cos, sin)[index].square().sum().backward()
            assert pair[1 - index].grad is None
            results.append(pair[index].grad)
        assert torch.allclose(*results, rtol=1e-4, atol=1e-5)
    mixed = rope.rope(x.bfloat16(), x, cos, sin)
    assert mixed[0].dtype is torch.bfloat16 and mixed[1].dtype is torch.float32


def test_errors(device: str) -> None:
    cos, sin = tables(3, 8, device)
    x = torch.randn(2, 3, 4, 8, device=device)
    asking = cos.clone().requires_grad_()
    for args in (
        (x[0], cos, sin),
        (x, cos[:2], sin[:2]),
        (x[..., :7], cos[:, :7], sin[:, :7]),
        (x, cos[None].expand(3, 3, 8), sin),
        (x, asking, sin),
    ):
        with pytest.raises(OptionError):
            rope.rope_one(*args)
    for key in (x[:1], x[:, :2], x[..., :4], x.transpose(1, 2)):
        with pytest.raises(OptionError):
            rope.rope(x, key, cos, sin)
    for seq_dim in (0, 2):
        with pytest.raises(OptionError):
            rope.rope(x, x, cos, sin, seq_dim=seq_dim)


def test_gradcheck_and_registration(device: str) -> None:
    cos, sin = (table.double() for table in tables(2, 4, device))
    query = torch.randn(1, 2, 2, 4, device=device, dtype=torch.float64, requires_grad=True)
    key = torch.randn(1, 2, 1, 4, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q, k: rope.rope(q, k, cos, sin), (query, key), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda q: rope.rope_one(q, cos, sin, signed=True), (key,), fast_mode=True)
    tail = (cos.float(), sin.float(), False, False)
    pair = [x.detach().float().requires_grad_() for x in (query, key)]
    torch.library.opcheck(torch.ops.ridgeline.rope.default, (*pair, *tail, 1))
    swapped = [x.detach().transpose(1, 2).requires_grad_() for x in pair]
    torch.library.opcheck(torch.ops.ridgeline.rope.default, (*swapped, *tail, 2))
    torch.library.opcheck(torch.ops.ridgeline.rope_one.default, (pair[0].detach().transpose(2, 3).contiguous().transpose(2, 3), *tail, 1))


@pytest.mark.parametrize("chosen", spaces()["rope"])
def test_the_same_on_every_run_and_right_with_every_configuration(device: str, chosen: dict[str, int]) -> None:
    query, key, cos, sin = (x.detach() for x in rope.BENCH.make((1, 6, 12, 3, 16), torch.float32, device))
    with forced("rope", chosen):
        first, again = rope.rope(query, key, cos, sin), rope.rope(query, key, cos, sin)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    plain, exact = plain_rope(query, key, cos, sin), plain_rope(query.double(), key.double(), cos.double(), sin.double())
    for triple in zip(first, plain, exact, strict=True):
        check(*triple)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_than_two_to_the_31_elements() -> None:
    tokens, heads = 2**17 + 1, 128
    x = torch.ones(1, tokens, heads, 128, dtype=torch.bfloat16, device="cuda")
    cos, sin = torch.full((tokens, 128), 2.0, device="cuda"), torch.ones(tokens, 128, device="cuda")
    for seq_dim, view in ((1, x), (2, x.view(1, heads, tokens, 128))):
        out = rope.rope_one(view, cos, sin, seq_dim=seq_dim)
        assert bool((out[..., :64] == 1).all()) and bool((out[..., 64:] == 3).all())
        del out


def test_only_the_gradient_needed_is_computed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of both results sends both gradients back, and only one is asked for."""
    cos, sin = tables(3, 8, device)
    x = torch.randn(2, 3, 4, 8, device=device)
    for index in (0, 1):
        pair = [x.clone(), x[:, :, :2].clone()]
        pair[index].requires_grad_()
        with monkeypatch.context() as patch:
            outs = rope.rope(*pair, cos, sin)
            patch.setattr(rope, "_rope", lambda *args: pytest.fail("both gradients were computed"))
            (outs[0].sum() + outs[1].sum()).backward()
        assert pair[index].grad is not None and pair[1 - index].grad is None
