"""Cutting a matrix into arrays: nothing is lost, and every tile gets the maximum of the block it lies in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.crossbar.tiling import Tiling, plan

sizes = st.tuples(st.integers(1, 9), st.integers(1, 9))
granularities: Any = st.one_of(st.sampled_from(["per-matrix", "per-row", "per-col"]), sizes)


def some_matrix(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("granularity", "block", "tiles"),
    [
        ((1, 64), (4, 64), (3, 4)),
        ((5, 33), (8, 64), (4, 4)),
        ("per-matrix", (12, 96), (3, 3)),
        ("per-row", (4, 96), (3, 3)),
        ("per-col", (12, 32), (3, 3)),
    ],
)
def test_granularity_is_rounded_up_to_whole_arrays(granularity: Any, block: tuple[int, int], tiles: tuple[int, int]) -> None:
    tiling = plan((10, 70), (4, 32), granularity)
    assert (tiling.block, tiling.tiles) == (block, tiles)


@given(sizes, sizes, granularities)
def test_what_is_cut_can_be_joined(shape: tuple[int, int], tile: tuple[int, int], granularity: Any) -> None:
    tiling, matrix = plan(shape, tile, granularity), some_matrix(shape)
    tiles = tiling.cut(matrix)
    assert tiles.shape == (2, *tiling.tiles, *tile)
    assert torch.equal(tiling.join(tiles), matrix)
    assert tiles.abs().sum().item() == pytest.approx(matrix.abs().sum().item(), rel=1e-12)  # the padding is zero


def maxima_by_loops(tiling: Tiling, matrix: torch.Tensor) -> list[list[float]]:
    (down, across), (r, c), block = tiling.tiles, tiling.tile, tiling.block
    found = [[0.0] * across for _ in range(down)]
    for i in range(down):
        for j in range(across):
            top, left = i * r // block[0] * block[0], j * c // block[1] * block[1]
            inside = matrix[top : top + block[0], left : left + block[1]]
            found[i][j] = max((abs(v) for row in inside.tolist() for v in row), default=0.0)
    return found


@given(sizes, sizes, granularities)
def test_block_maxima_are_those_of_loops(shape: tuple[int, int], tile: tuple[int, int], granularity: Any) -> None:
    tiling, matrix = plan(shape, tile, granularity), some_matrix(shape)
    assert tiling.block_maximum(matrix)[1].tolist() == maxima_by_loops(tiling, matrix[1])


def test_planted_wrong_block_is_caught() -> None:
    matrix = some_matrix((8, 8))
    right, wrong = plan((8, 8), (2, 2), (4, 4)), plan((8, 8), (2, 2), (2, 2))
    assert wrong.block_maximum(matrix)[0].tolist() != maxima_by_loops(right, matrix[0])


def test_an_empty_batch_has_no_tiles() -> None:
    for granularity in ("per-matrix", "per-row", (1, 4)):
        assert plan((0, 4), (1, 4), granularity).cut(torch.zeros(0, 4)).shape == (0, 1, 1, 4)
