"""How a matrix is cut into arrays (tiles), and which arrays share one quantisation scale (blocks).

    matrix (…, H, W) ──padded──> (…, H', W') ──cut──> tiles (…, tile rows, tile columns, r, c) ──join──> (…, H, W)
      block = the granularity, rounded UP on each axis to whole tiles;  H', W' = whole blocks, filled with zeros
      block_maximum: max |v| of each block, repeated for every tile of it (…, tile rows, tile columns)

"per-matrix" is one block, "per-row" one for each row of tiles, "per-col" one for each column of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Granularity = str | tuple[int, int]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Of one matrix of `shape`; all pairs are (down, across)."""

    shape: tuple[int, int]
    tile: tuple[int, int]
    block: tuple[int, int]

    @property
    def padded(self) -> tuple[int, int]:
        return _round_up(self.shape[0], self.block[0]), _round_up(self.shape[1], self.block[1])

    @property
    def tiles(self) -> tuple[int, int]:
        return self.padded[0] // self.tile[0], self.padded[1] // self.tile[1]

    def pad(self, matrix: Tensor) -> Tensor:
        """(…, H, W) → (…, H', W')."""
        down, across = self.padded[0] - self.shape[0], self.padded[1] - self.shape[1]
        return torch.nn.functional.pad(matrix, (0, across, 0, down))

    def cut(self, matrix: Tensor) -> Tensor:
        """(…, H, W) → (…, tile rows, tile columns, r, c)."""
        return _split(self.pad(matrix), self.tile)

    def join(self, tiles: Tensor) -> Tensor:
        """(…, tile rows, tile columns, r, c) → (…, H, W), the padding dropped."""
        whole = tiles.transpose(-3, -2).reshape(*tiles.shape[:-4], *self.padded)
        return whole[..., : self.shape[0], : self.shape[1]]

    def block_maximum(self, matrix: Tensor) -> Tensor:
        """(…, H, W) → max |v| of the block each tile lies in: (…, tile rows, tile columns)."""
        blocks = _split(self.pad(matrix).abs(), self.block).amax((-2, -1))
        down, across = self.block[0] // self.tile[0], self.block[1] // self.tile[1]
        return blocks.repeat_interleave(down, -2).repeat_interleave(across, -1)


def plan(shape: tuple[int, int], tile: tuple[int, int], granularity: Granularity) -> Tiling:
    """The tiling of a matrix of `shape` on arrays of `tile` cells, quantised by `granularity`."""
    wanted = _wanted(shape, granularity)
    return Tiling(shape, tile, (_round_up(wanted[0], tile[0]), _round_up(wanted[1], tile[1])))


def merge_maxima(maxima: Tensor, count: int, axis: int) -> Tensor:
    """Along `axis`, the maximum of every `count` neighbours (0: of all), in place of each of them."""
    length = maxima.shape[axis]
    if count == 1 or length == 0:
        return maxima
    if count == 0 or count >= length:
        return maxima.amax(axis, keepdim=True).expand_as(maxima)
    parts = [part.amax(axis, keepdim=True).expand_as(part) for part in maxima.split(count, axis)]
    return torch.cat(parts, axis)


def _wanted(shape: tuple[int, int], granularity: Granularity) -> tuple[int, int]:
    """The block as asked for, before it is rounded up to whole tiles."""
    height, width = max(shape[0], 1), max(shape[1], 1)  # an empty batch has blocks too: none of them
    named = {"per-matrix": (height, width), "per-row": (1, width), "per-col": (height, 1)}
    return named[granularity] if isinstance(granularity, str) else granularity


def _split(matrix: Tensor, size: tuple[int, int]) -> Tensor:
    *lead, height, width = matrix.shape
    split = matrix.reshape(*lead, height // size[0], size[0], width // size[1], size[1])
    return split.transpose(-3, -2)


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
