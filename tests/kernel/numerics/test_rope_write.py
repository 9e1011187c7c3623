"""Rotation and the write into pages in one launch, against the two done apart."""

from __future__ import annotations

import pytest
import torch

from ridgeline.core.errors import OptionError
from ridgeline.kernel.rope_write import _reference, _rope_write, rope_write
from tests.kernel.support import FLOATS, check

Made = tuple[list[torch.Tensor], list[torch.Tensor]]


def made(dtype: torch.dtype, device: str, int8: bool, width: int = 32) -> Made:
    """(query, key, value, cos, sin, slots), (caches, scales): parts of one product's output; one slot is outside, one in another page."""
    torch.manual_seed(0)
    qkv = torch.randn(5, 8 * width, device=device).to(dtype).unflatten(1, (8, width))
    angle = torch.randn(5, width // 2, device=device).repeat(1, 2)
    slots = torch.tensor([7, -1, 40, 16, 48], device=device)
    stored = torch.int8 if int8 else dtype
    caches = [torch.randint(-9, 9, (3, 16, 2, width), device=device).to(stored) for _ in range(2)]
    scales = [torch.rand(3, 16, 2, device=device).half() for _ in range(2)] if int8 else []
    return [qkv[:, :4], qkv[:, 4:6], qkv[:, 6:], angle.cos(), angle.sin(), slots], [*caches, *scales]


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("width", [32, 24])
@pytest.mark.parametrize("dtype", FLOATS)
def test_values(dtype: torch.dtype, width: int, int8: bool, device: str) -> None:
    given, stores = made(dtype, device, int8, width)
    expected = [store.clone() for store in stores]
    ours = rope_write(*given, *stores)
    plain = _reference(*given, *expected, *([None, None] if not int8 else []))
    query, cos, sin = given[0].double(), given[3].double()[:, None], given[4].double()[:, None]
    exact = query * cos + torch.cat((-query[..., width // 2 :], query[..., : width // 2]), -1) * sin
    check(ours, plain, exact)
    check(stores[1].float(), expected[1].float(), expected[1].double())  # values: nothing is done to them, or int8 alike
    if int8:
        assert (stores[0].int() - expected[0].int()).abs().max() <= 1  # a tie may fall either way
        torch.testing.assert_close(stores[2], expected[2], rtol=2e-3, atol=0)
        assert torch.equal(stores[3], expected[3])
    else:
        torch.testing.assert_close(stores[0], expected[0])


def test_reference_is_rotation_and_write(device: str) -> None:
    given, stores = made(torch.float64, device, False)
    _reference(*given, *stores, None, None)
    first, second = given[1][2].chunk(2, -1)
    cos, sin = given[3][2, :16].double(), given[4][2, :16].double()
    torch.testing.assert_close(stores[0][2, 8], torch.cat((first * cos - second * sin, second * cos + first * sin), -1))
    assert torch.equal(stores[1][2, 8], given[2][2])


def test_int8_comes_back_within_half_a_step(device: str) -> None:
    given, stores = made(torch.float32, device, True)
    rope_write(*given, *stores)
    back = stores[1][2, 8].float() * stores[3][2, 8].float()[:, None]
    assert ((back - given[2][2]).abs() <= 0.501 * stores[3][2, 8].float()[:, None] + 1e-3).all()


def test_opcheck_and_refusals(device: str) -> None:
    given, stores = made(torch.float32, device, False)
    torch.library.opcheck(_rope_write.overload, (*given, *stores, None, None))
    _, int8 = made(torch.float32, device, True)
    for wrong in ((*given, *int8[:2]), (*given, *int8[:3]), (*given[:5], given[5][:2], *stores), (*given, stores[0][:, :, :1], stores[1])):
        with pytest.raises(OptionError):
            rope_write(*wrong)
