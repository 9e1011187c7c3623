"""Bitmap and values: the same bits come back, whatever they are."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import ModelFileError
from ridgeline.transform.sparse_file import ENTRY_BYTES, decode, encode, nonzero_count, sparse_bytes, worth
from tests.support import full_or_tenth

WIDTHS = {
    torch.float32: (numpy.uint32, 4),
    torch.float16: (numpy.uint16, 2),
    torch.bfloat16: (numpy.uint16, 2),
    torch.float64: (numpy.uint64, 8),
}
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(BITS[tensor.element_size()])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bit patterns: NaNs of every payload, infinities, −0.0, subnormals, and many zeros."""
    dtype = draw(st.sampled_from(list(WIDTHS)))
    kind, width = WIDTHS[dtype]
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    count = int(numpy.prod(shape, dtype=int))
    values = draw(st.lists(st.one_of(st.just(0), st.integers(0, 2 ** (8 * width) - 1)), min_size=count, max_size=count))
    raw = numpy.array(values, dtype=kind).reshape(shape)
    return torch.from_numpy(raw.copy().view({2: numpy.int16, 4: numpy.int32, 8: numpy.int64}[width])).view(dtype)


@settings(max_examples=full_or_tenth(1500), deadline=None)
@given(tensors())
def test_every_bit_comes_back(tensor: torch.Tensor) -> None:
    bitmap, values = encode(tensor)
    back = decode(bitmap, values, tuple(tensor.shape))
    assert back.dtype == tensor.dtype and back.shape == tensor.shape
    assert torch.equal(bits(back), bits(tensor))
    kept = sum(int(one) != 0 for one in bits(tensor).flatten().tolist())  # counted one by one
    assert nonzero_count(tensor) == kept == values.numel()
    assert bitmap.numel() == (tensor.numel() + 7) // 8


def test_negative_zero_and_nan_are_values() -> None:
    tensor = torch.tensor([0.0, -0.0, float("nan"), 1.0])
    bitmap, values = encode(tensor)
    assert bitmap.tolist() == [0b1110]
    assert values.numel() == 3
    back = decode(bitmap, values, (4,))
    assert torch.equal(back.signbit(), tensor.signbit()) and bool(back[2].isnan())


@pytest.mark.parametrize(("share", "smaller"), [(0.02, False), (0.05, True), (0.8, True), (1.0, True)])
def test_worth_says_whether_the_file_shrinks(share: float, smaller: bool) -> None:
    tensor = torch.ones(10_000)
    tensor[: int(share * 10_000)] = 0
    kept = worth(tensor)
    assert (kept is not None) == smaller == (sparse_bytes(10_000, 10_000 - int(share * 10_000), 4) + ENTRY_BYTES < 40_000)


def test_only_floats_are_thinned() -> None:
    assert worth(torch.zeros(1000, dtype=torch.uint8)) is None
    assert worth(torch.zeros(1000, dtype=torch.int64)) is None
    assert worth(torch.zeros(0)) is None
    assert worth(torch.zeros(1000)) == 0


def test_decode_refuses_what_does_not_belong_together() -> None:
    bitmap, values = encode(torch.tensor([0.0, 1.0, 2.0]))
    for wrong in (
        (bitmap, values[:1], (3,)),  # too few values
        (bitmap, values, (9,)),  # a bitmap too short
        (bitmap, values, (1,)),  # marks beyond the last element
        (bitmap.float(), values, (3,)),
        (bitmap | 0xF0, values, (3,)),
        (bitmap, values.reshape(2, 1), (3,)),
    ):
        with pytest.raises(ModelFileError, match="cannot be decoded"):
            decode(*wrong)
