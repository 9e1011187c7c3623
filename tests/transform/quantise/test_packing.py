"""Packed codes: every width comes back, the bytes are those a loop over single bits makes, and wrong input is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import TransformError
from ridgeline.transform.quantise.packing import WIDTHS, pack, packed_width, to_signed, to_unsigned, unpack


def bit_by_bit(codes: list[int], bits: int) -> list[int]:
    """The layout written out: code i, bit j → bit i * bits + j of the row."""
    out = [0] * (-(-len(codes) * bits // 8))
    for index, code in enumerate(codes):
        for bit in range(bits):
            place = index * bits + bit
            out[place // 8] |= ((code >> bit) & 1) << (place % 8)
    return out


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(bits=st.sampled_from(list(WIDTHS)), data=st.data(), rows=st.integers(1, 3), count=st.integers(0, 40))
def test_round_trip_and_layout(bits: int, data: st.DataObject, rows: int, count: int) -> None:
    raw = data.draw(st.binary(min_size=rows * count, max_size=rows * count))
    codes = (torch.tensor(list(raw), dtype=torch.uint8) & ((1 << bits) - 1)).reshape(rows, count)
    packed = pack(codes, bits)
    assert packed.dtype is torch.uint8 and packed.shape == (rows, packed_width(bits, count))
    assert packed.tolist() == [bit_by_bit(row, bits) for row in codes.tolist()]
    assert torch.equal(unpack(packed, bits, count), codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_signed_codes(bits: int) -> None:
    half = 1 << (bits - 1)
    codes = torch.arange(-half, half).to(torch.int8)[None]
    stored = to_unsigned(codes, bits)
    assert torch.equal(to_signed(unpack(pack(stored, bits), bits, 2 * half), bits), codes)
    assert torch.equal(stored.long(), torch.arange(-half, half)[None] % (1 << bits))


def test_eight_bit_signed_codes_are_int8_as_they_lie() -> None:
    codes = torch.randint(-128, 128, (3, 5), dtype=torch.int8)
    assert torch.equal(pack(to_unsigned(codes, 8), 8).view(torch.int8), codes)


def test_packing_many_dimensions_and_a_long_row() -> None:
    codes = torch.randint(0, 8, (2, 3, 1001), dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes, 3), 3, 1001), codes)


def test_what_is_refused() -> None:
    codes = torch.zeros(4, dtype=torch.uint8)
    for bits in (1, 9, 0):
        with pytest.raises(TransformError, match=f"bits = {bits}"):
            pack(codes, bits)
    with pytest.raises(TransformError, match="code 9 in 3 bits"):
        pack(codes + 9, 3)
    with pytest.raises(TransformError, match="int32"):
        pack(codes.int(), 4)
    with pytest.raises(TransformError, match="fill 3 bytes"):
        unpack(codes, 4, 5)
