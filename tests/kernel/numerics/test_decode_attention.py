"""Rotation, write and attention in one launch against the three done apart: shares, windows, int8, lengths, groups, dtypes."""

from __future__ import annotations

import pytest
import torch

import ridgeline.kernel.decode_attention as implementation
from ridgeline.core.errors import OptionError
from ridgeline.kernel import tuning
from ridgeline.kernel.decode_attention import _reference, decode_attention, decode_attention_op
from ridgeline.kernel.overlap import weights_are_still
from ridgeline.kernel.paged_attention import paged_attention_reference
from tests.kernel.support import FLOATS, check

LENGTHS = (37, 1, 64, 17, 0)


def made(dtype: torch.dtype, device: str, int8: bool = False, width: int = 32, heads: int = 4, shared: int = 2, page: int = 16) -> list:  # type: ignore[type-arg]
    """qkv, cos, sin, slots, caches, page table, lengths, tickets, scales; what no sequence holds is nan, or a scale of nan."""
    torch.manual_seed(0)
    batch, most = len(LENGTHS), -(-64 // page)
    qkv = torch.randn(batch, heads + 2 * shared, width, device=device).to(dtype)
    angle = torch.randn(batch, width // 2, device=device).repeat(1, 2)
    table = torch.randperm(batch * most, device=device).to(torch.int32).view(batch, most)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    shape = (batch * most, page, shared, width)
    caches = [torch.zeros(shape, dtype=torch.int8, device=device) if int8 else torch.full(shape, float("nan"), device=device, dtype=dtype)
              for _ in range(2)]  # fmt: skip
    scales = [torch.full(shape[:3], float("nan"), device=device).half() for _ in range(2)] if int8 else []
    for sequence, length in enumerate(LENGTHS):
        places = torch.arange(max(length - 1, 0), device=device)
        at = table[sequence, places // page].long(), places % page
        for cache in caches:
            cache[at] = (torch.randint(-127, 128, (len(places), *shape[2:]), device=device) / (1 if int8 else 64)).to(cache.dtype)
        for scale in scales:
            scale[at] = torch.rand(len(places), shared, device=device).half() / 64
    last = (lengths - 1).clamp(min=0).long()
    slots = table.gather(1, (last // page)[:, None])[:, 0].long() * page + last % page
    slots[3] = -1  # nowhere
    return [
        qkv,
        angle.cos(),
        angle.sin(),
        slots,
        *caches,
        table,
        lengths,
        torch.zeros(batch * shared, dtype=torch.int32, device=device),
        *scales,
    ]


def compared(inputs: list[torch.Tensor], window: int | None = None) -> None:
    """The result, and what stands in the caches."""
    int8, stores = len(inputs) > 9, (4, 5, 9, 10)
    apart = [x.clone() for x in inputs]
    exact = [x.double() if x.is_floating_point() and place not in (9, 10) else x.clone() for place, x in enumerate(inputs)]
    scale = inputs[0].shape[2] ** -0.5
    scales = [None, None] if not int8 else []
    plain = _reference(*apart[:9], scale, window or 0, *apart[9:], *scales)
    if not int8:  # rounding to int8 in float64 would round other numbers
        wide = _reference(*exact[:9], scale, window or 0, *exact[9:], *scales)
    ours = decode_attention(*inputs[:9], None, window, *inputs[9:])
    rows = [0, 1, 2, 4]  # the fourth has no place for its token, which only the kernel lets it see
    check(ours[rows], plain[rows], (plain.double() if int8 else wide)[rows])
    assert torch.equal(ours[4], torch.zeros_like(ours[4]))
    assert not inputs[8].any()
    for place in stores[: 4 if int8 else 2]:
        torch.testing.assert_close(
            inputs[place].float(), apart[place].float(), rtol=1e-2, atol=1 if place < 6 and int8 else 1e-2, equal_nan=True
        )


@pytest.fixture(params=["a program a head", "shares"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels on the same small inputs."""
    monkeypatch.setattr(implementation, "_short", lambda *sizes: request.param == "a program a head")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width, heads, shared", [(32, 4, 2), (24, 3, 1), (16, 2, 2)])
def test_values(dtype: torch.dtype, width: int, heads: int, shared: int, device: str) -> None:
    compared(made(dtype, device, False, width, heads, shared))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_windows_and_int8_of_a_head(int8: bool, window: int | None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "_short", lambda *sizes: True)  # the interpreter has too few processors for it
    compared(made(torch.float32, device, int8), window)
    compared(made(torch.float16, device, int8, page=32), window)


@pytest.mark.parametrize("waves", [1, 64])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_shares_windows_and_int8(waves: int, int8: bool, window: int | None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "_short", lambda *sizes: False)
    op = "paged_attention_int8" if int8 else "paged_attention"
    with tuning.forced(op, {"block_n": 16, "warps": 4, "stages": 2, "waves": waves}):
        compared(made(torch.float32, device, int8), window)
        compared(made(torch.float16, device, int8, page=32), window)


@pytest.mark.usefixtures("way")
def test_a_token_without_a_place_sees_itself(device: str) -> None:
    inputs = made(torch.float32, device)
    inputs[7][3] = 1
    out = decode_attention(*inputs)
    torch.testing.assert_close(out[3], inputs[0][3, 6:].repeat_interleave(2, 0))


def test_reference_is_rotation_write_and_attention(device: str) -> None:
    inputs = made(torch.float64, device)
    qkv, cos, sin, _, keys, values, table = inputs[:7]
    out = _reference(*inputs[:9], 0.3, 0, None, None)

    def turn(x: torch.Tensor) -> torch.Tensor:
        return x * cos[0].double() + torch.cat((-x[:, 16:], x[:, :16]), -1) * sin[0].double()

    places = torch.arange(37, device=device)
    seen_keys, seen_values = (c[table[0, places // 16].long(), places % 16].repeat_interleave(2, 1) for c in (keys, values))
    torch.testing.assert_close(seen_keys[36, ::2], turn(qkv[0, 4:6]))
    weights = (torch.einsum("hd,thd->ht", turn(qkv[0, :4]), seen_keys) * 0.3).softmax(-1)
    torch.testing.assert_close(out[0], torch.einsum("ht,thd->hd", weights, seen_values))


def test_few_heads_and_few_tokens_have_a_program_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "processors", lambda device: 4)
    assert implementation._short(8, 512, 0) and not implementation._short(9, 512, 0) and not implementation._short(8, 513, 0)


def test_opcheck_and_refusals(device: str) -> None:
    inputs = made(torch.float32, device)
    torch.library.opcheck(decode_attention_op.overload, (*inputs, 0.2, 0, None, None), test_utils=("test_schema", "test_faketensor"))
    _, int8 = inputs, made(torch.float32, device, True)
    wrong = (
        [*inputs[:4], *int8[4:6], *inputs[6:]],
        [*inputs[:8], inputs[8][:3]],
        [*inputs[:3], inputs[3][:2], *inputs[4:]],
        [inputs[0][:, :4], *inputs[1:]],
    )
    for given in wrong:
        with pytest.raises(OptionError):
            decode_attention(*given)
    with pytest.raises(OptionError):
        decode_attention(*inputs, None, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="large sizes need a GPU")
@pytest.mark.parametrize("context, pages", [(200, 32), (500, 32), (200, 512), (5000, 512)])
@pytest.mark.parametrize("batch", [1, 3, 40])
@pytest.mark.parametrize("int8", [False, True])
def test_large_and_again_in_a_graph(context: int, pages: int, batch: int, int8: bool) -> None:
    """A program a head; and shares of several programs, combined by whichever ends last: the same bits each time."""
    torch.manual_seed(0)
    qkv = torch.randn(batch, 48, 128, device="cuda").bfloat16()
    angle = torch.randn(batch, 64, device="cuda").repeat(1, 2)
    caches = [torch.randint(-127, 128, (pages * batch, 16, 8, 128), device="cuda").to(torch.int8) for _ in range(2)]
    scales = [torch.rand(pages * batch, 16, 8, device="cuda").half() / 64 for _ in range(2)] if int8 else []
    caches = caches if int8 else [cache.bfloat16() / 64 for cache in caches]
    table = torch.randperm(pages * batch, device="cuda").int().view(batch, pages)
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    slots = table[:, (context - 1) // 16].long() * 16 + (context - 1) % 16
    tickets = torch.zeros(batch * 8, dtype=torch.int32, device="cuda")
    inputs = [qkv, angle.cos(), angle.sin(), slots, *caches, table, lengths, tickets, *scales]
    apart = [x.clone() for x in inputs]
    plain = _reference(*apart[:9], 128**-0.5, 0, *(apart[9:] or [None, None]))
    # what the reference wrote stands in its caches: float64 attention over them is exact
    query = turned(qkv[:, :32].double(), angle.double())
    keys, values = (
        (c.double() * s.double()[..., None] for c, s in zip(apart[4:6], apart[9:], strict=True))
        if int8
        else (c.double() for c in apart[4:6])
    )
    exact = paged_attention_reference(query.bfloat16().double(), keys, values, table, lengths, 128**-0.5)
    ours = decode_attention(*inputs[:9], None, None, *inputs[9:])
    check(ours, plain, exact)
    torch.cuda.synchronize()
    with weights_are_still():
        for _ in range(20):
            assert torch.equal(decode_attention(*inputs[:9], None, None, *inputs[9:]), ours)
    assert not tickets.any()


def turned(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * angle.cos()[:, None] + torch.cat((-second, first), -1) * angle.sin()[:, None]


@pytest.mark.usefixtures("way")
def test_lengths_beyond_the_table_stop_at_its_end(device: str) -> None:
    """And do not go on in the table of the next sequence."""
    inputs, same = made(torch.float32, device), made(torch.float32, device)
    inputs[7][2] += 20  # of 64, as many as its table has
    assert torch.equal(decode_attention(*inputs)[2], decode_attention(*same)[2])


@pytest.mark.usefixtures("way")
def test_keys_and_values_of_zero_in_int8(device: str) -> None:
    """Their scale is zero, which nothing may be divided by: the numbers stored are zeros, not nan cut off to the largest there is."""
    inputs = made(torch.float32, device, int8=True)
    inputs[0][:, 4:] = 0
    out = decode_attention(*inputs[:9], None, None, *inputs[9:])
    assert out.isfinite().all()
    slots = inputs[3][:3]
    for cache, scale in zip(inputs[4:6], inputs[9:], strict=True):
        assert not cache[slots // 16, slots % 16].any() and not scale[slots // 16, slots % 16].any()


@pytest.mark.parametrize("int8", [False, True])
def test_windows_over_several_shares(int8: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first share starts inside a tile; where a sequence is shorter than the window, at its start."""
    torch.manual_seed(1)
    monkeypatch.setattr(implementation, "_short", lambda *sizes: False)
    lengths = torch.tensor((128, 103, 40), dtype=torch.int32, device=device)
    table = torch.randperm(24, device=device).int().view(3, 8)
    last = (lengths - 1).long()
    slots = table.gather(1, (last // 16)[:, None])[:, 0].long() * 16 + last % 16
    caches = [torch.randint(-127, 128, (24, 16, 1, 16), device=device) / (1 if int8 else 64) for _ in range(2)]
    caches = [cache.to(torch.int8 if int8 else torch.float32) for cache in caches]
    scales = [torch.rand(24, 16, 1, device=device).half() / 64 for _ in range(2)] if int8 else []
    angle = torch.randn(3, 8, device=device).repeat(1, 2)
    tickets = torch.zeros(3, dtype=torch.int32, device=device)
    inputs = [torch.randn(3, 4, 16, device=device), angle.cos(), angle.sin(), slots, *caches, table, lengths, tickets, *scales]
    plain = _reference(*[x.clone() for x in inputs[:9]], 0.3, 70, *([x.clone() for x in scales] or [None, None]))
    with tuning.forced("paged_attention_int8" if int8 else "paged_attention", {"block_n": 16, "warps": 4, "stages": 2, "waves": 8}):
        ours = decode_attention(*inputs[:9], 0.3, 70, *scales)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert not tickets.any()


@pytest.mark.parametrize("int8", [False, True])
def test_the_reference_too_lets_a_token_without_a_place_see_itself(int8: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "_short", lambda *sizes: False)
    inputs = made(torch.float32, device, int8)
    apart = [x.clone() for x in inputs]
    ours = decode_attention(*inputs[:9], None, None, *inputs[9:])
    plain = _reference(*apart[:9], inputs[0].shape[2] ** -0.5, 0, *(apart[9:] or [None, None]))
    torch.testing.assert_close(ours[3], plain[3])
    for place in (4, 5):
        torch.testing.assert_close(inputs[place].float(), apart[place].float(), equal_nan=True, rtol=1e-4, atol=1 if int8 else 1e-5)
