"""What a decode step needs of its positions, in one launch: where keys and values go, and the angles of rotary positions.

    positions int64 [B], page_table int32 [B, pages], frequency float32 [D] ──a program a sequence──> slots int64 [B], cos, sin [B, D]
      slot = page_table[b, position // page_size] · page_size + position % page_size     angle = position · frequency; cos, sin times growth

Seven small kernels of torch otherwise, of a microsecond or two each, in a step of half a millisecond. A position beyond the table: -1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.errors import OptionError
from .jit import jit, launch, next_power_of_2, tl
from .library import operator


@jit
def decode_places_kernel(positions_ptr, table_ptr, frequency_ptr, slots_ptr, cos_ptr, sin_ptr, table_b, pages, growth,  # type: ignore[no-untyped-def]
                         PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row)
    place = position // PAGE
    page = tl.load(table_ptr + row * table_b + tl.minimum(tl.maximum(place, 0), pages - 1)).to(tl.int64)
    slot = page * PAGE + position % PAGE
    tl.store(slots_ptr + row, tl.where((position >= 0) & (place < pages), slot, -1))
    columns = tl.arange(0, BLOCK_D)
    angle = position.to(tl.float32) * tl.load(frequency_ptr + columns, mask=columns < D, other=0.0)
    tl.store(cos_ptr + row * D + columns, tl.cos(angle) * growth, mask=columns < D)
    tl.store(sin_ptr + row * D + columns, tl.sin(angle) * growth, mask=columns < D)


def _launch(positions: Tensor, page_table: Tensor, frequency: Tensor, page_size: int, growth: float) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = positions.shape[0], frequency.shape[0]
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    slots = torch.empty_like(positions, memory_format=torch.contiguous_format)
    cos, sin = (torch.empty((rows, width), dtype=torch.float32, device=positions.device) for _ in range(2))
    launch(
        decode_places_kernel, (rows,), positions.contiguous(), page_table, frequency.contiguous(), slots, cos, sin, page_table.stride(0),
        page_table.shape[1], growth, PAGE=page_size, D=width, BLOCK_D=next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return slots, cos, sin


def _reference(positions: Tensor, page_table: Tensor, frequency: Tensor, page_size: int, growth: float) -> tuple[Tensor, Tensor, Tensor]:
    place = positions // page_size
    inside = (place >= 0) & (place < page_table.shape[1])
    page = page_table.gather(1, place.clamp(0, page_table.shape[1] - 1)[:, None])[:, 0].long()
    angle = positions[:, None].float() * frequency
    return torch.where(inside, page * page_size + positions % page_size, -1), angle.cos() * growth, angle.sin() * growth


def _fake(positions: Tensor, page_table: Tensor, frequency: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    angles = [positions.new_empty((positions.shape[0], frequency.shape[0]), dtype=torch.float32) for _ in range(2)]
    return positions.new_empty(positions.shape), angles[0], angles[1]


_decode_places = operator(
    "decode_places(Tensor positions, Tensor page_table, Tensor frequency, int page_size, float growth) -> (Tensor, Tensor, Tensor)",
    launch=_launch, reference=_reference, fake=_fake,
)  # fmt: skip


def decode_places(
    positions: Tensor, page_table: Tensor, frequency: Tensor, page_size: int, growth: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(slots [B], cos [B, D], sin [B, D]) of one token a sequence."""
    if positions.dim() != 1 or page_table.dim() != 2 or page_table.shape[0] != positions.shape[0] or not page_table.shape[1]:
        what = f"positions {tuple(positions.shape)} and page_table {tuple(page_table.shape)}"
        raise OptionError(what, why="shapes do not fit", do="give int64 [B] and int32 [B, pages]")
    if positions.dtype != torch.int64 or frequency.dtype != torch.float32 or frequency.dim() != 1 or page_size < 1:
        what = f"positions of {positions.dtype}, frequency of {frequency.dtype}, page_size = {page_size}"
        raise OptionError(what, why="they do not fit", do="give int64 positions, float32 frequencies [D] and a page of one token or more")
    slots, cos, sin = _decode_places(positions, page_table, frequency, page_size, growth)
    return slots, cos, sin
