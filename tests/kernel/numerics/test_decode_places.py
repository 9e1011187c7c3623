"""Slots and angles of a decode step against plain arithmetic."""

from __future__ import annotations

import pytest
import torch

from ridgeline.core.errors import OptionError
from ridgeline.kernel.decode_places import _decode_places, _reference, decode_places


@pytest.mark.parametrize("width, page", [(32, 16), (24, 8), (128, 64)])
def test_places_and_angles(width: int, page: int, device: str) -> None:
    torch.manual_seed(0)
    positions = torch.tensor([0, 5, page, 7 * page + 3, 8 * page, 3], device=device)  # the fifth lies beyond the table
    table = torch.randperm(6 * 8, device=device).int().view(6, 8)
    frequency = 1e4 ** -(torch.arange(width, device=device) % (width // 2) / (width / 2)).float()
    slots, cos, sin = decode_places(positions, table, frequency, page, 1.25)
    for row, position in enumerate(positions.tolist()):
        expected = int(table[row, position // page]) * page + position % page if position < 8 * page else -1
        assert int(slots[row]) == expected
    angle = positions[:, None].double() * frequency.double()
    assert (cos.double() - 1.25 * angle.cos()).abs().max() < 1e-4 and (sin.double() - 1.25 * angle.sin()).abs().max() < 1e-4
    plain = _reference(positions, table, frequency, page, 1.25)
    assert torch.equal(slots, plain[0])
    torch.testing.assert_close((cos, sin), plain[1:], rtol=0, atol=2e-6)


def test_opcheck_and_refusals(device: str) -> None:
    positions, table = torch.tensor([3, 20], device=device), torch.zeros(2, 4, dtype=torch.int32, device=device)
    frequency = torch.ones(16, device=device)
    torch.library.opcheck(_decode_places.overload, (positions, table, frequency, 16, 1.0))
    for wrong in ((positions[:1], table, frequency, 16), (positions.int(), table, frequency, 16), (positions, table, frequency, 0)):
        with pytest.raises(OptionError):
            decode_places(*wrong)


def test_positions_before_the_first_and_a_strided_table(device: str) -> None:
    """What lies before the first has no place; a table may be a column of another tensor."""
    table = torch.randperm(32, device=device).int().view(8, 4)
    positions = torch.tensor([-1, -15, -16, -17, -64, -100, 17, 63], device=device)
    strided = torch.stack((table, table + 100), 2)[..., 0]
    assert not strided.is_contiguous()
    frequency = torch.ones(16, device=device)
    slots = decode_places(positions, strided, frequency, 16)[0]
    assert slots.tolist() == [-1] * 6 + [int(table[6, 1]) * 16 + 1, int(table[7, 3]) * 16 + 15]
