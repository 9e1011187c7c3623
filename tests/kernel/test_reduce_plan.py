"""The planner of reductions, which needs no kernels: every element is visited exactly once, whatever the strides."""

from __future__ import annotations

from itertools import combinations, permutations, product
from math import prod

import pytest

from ridgeline.kernel.reduce_plan import GRID_MOST, SMS, Plan, copied_shape, default, kind_of, normalize, plan, reduced_shape, schedule


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def addresses(p: Plan) -> list[list[int]]:
    """Of the elements of every output, in the kernel's order of outputs."""
    return [
        sorted(b * p.sb + s * p.ss + k * p.sk + r * p.sr for s in range(p.s) for r in range(p.r)) for b in range(p.b) for k in range(p.k)
    ]


def expected(shape: tuple[int, ...], strides: tuple[int, ...], dims: tuple[int, ...], p: Plan) -> list[list[int]]:
    """The same, worked out from the definition; the kept dimensions in the order the plan says."""
    kept = [d for d in range(len(shape)) if d not in dims and shape[d] != 1]
    if p.order is not None:  # kept[i] stands at place order[i] of the kernel's output
        kept = [d for _, d in sorted(zip(p.order, kept, strict=True))]
    rows = []
    for at in product(*(range(shape[d]) for d in kept)):
        base = sum(i * strides[d] for i, d in zip(at, kept, strict=True))
        rows.append(
            sorted(base + sum(i * strides[d] for i, d in zip(r, dims, strict=True)) for r in product(*(range(shape[d]) for d in dims)))
        )
    return rows


@pytest.mark.parametrize("shape", [(6,), (4, 5), (3, 4, 5), (2, 1, 5), (2, 3, 2, 4)])
def test_every_element_once(shape: tuple[int, ...]) -> None:
    fitted = 0
    for order in permutations(range(len(shape))):
        dense = contiguous(tuple(shape[d] for d in order))
        strides = tuple(dense[order.index(d)] for d in range(len(shape)))
        for size in range(1, len(shape) + 1):
            for dims in combinations(range(len(shape)), size):
                p = plan(shape, strides, dims)
                if p is not None:
                    fitted += 1
                    assert addresses(p) == expected(shape, strides, dims, p), (shape, strides, dims)
    assert fitted


@pytest.mark.parametrize(("strides", "dims"), [((0, 7, 1), (1, 2)), ((20, 0, 1), (2,)), ((40, 10, 2), (0, 2)), ((40, 10, 2), (1,))])
def test_gaps_and_repeats(strides: tuple[int, ...], dims: tuple[int, ...]) -> None:
    shape = (3, 4, 5)
    p = plan(shape, strides, dims)
    assert p is not None
    assert sorted(addresses(p)) == sorted(expected(shape, strides, dims, p))


@pytest.mark.parametrize(
    ("shape", "dims", "kind"),
    [
        ((64, 4096, 4096), (0, 1, 2), "full"),
        ((64, 4096, 4096), (2,), "inner"),
        ((64, 4096, 4096), (0, 1), "outer"),
        ((64, 4096, 4096), (1,), "outer"),
        ((8, 16777216), (1,), "split"),
    ],
)
def test_kinds(shape: tuple[int, ...], dims: tuple[int, ...], kind: str) -> None:
    p = plan(shape, contiguous(shape), dims)
    assert p is not None
    assert p.kind == kind_of(shape, dims) == kind
    assert p.align == 16
    cut = schedule(p, default(p, 4), 4)
    assert 4 * SMS >= prod(cut.grid) > 3.8 * SMS or prod(cut.grid) > 15 * SMS, "all run at once, or many more"
    assert cut.even


@pytest.mark.parametrize("r", [1, 5, 4096, 100_000, 2**31 + 17])
@pytest.mark.parametrize("kept", [1, 3, 500])
@pytest.mark.parametrize("inner", [True, False])
def test_pieces_cover_the_row(r: int, kept: int, inner: bool) -> None:
    shape, dims = ((kept, r), (1,)) if inner else ((r, kept), (0,))
    p = plan(shape, contiguous(shape), dims)
    assert p is not None
    cut = schedule(p, default(p, 4), 4)
    assert (cut.chunks - 1) * cut.tile_reduced < p.r, "every piece has a tile"
    assert cut.once == (cut.chunks * cut.tile_reduced >= p.r)
    assert cut.r_units * (p.align if p.axis else 1) == p.r and cut.k_units * (1 if p.axis else p.align) == p.k
    assert prod(cut.grid) == cut.blocks * cut.splits and max(cut.grid[1:]) <= GRID_MOST
    for tile in (cut.tile_kept, cut.tile_reduced, cut.combine, cut.finish_kept, cut.finish_combine, cut.warps):
        assert tile & (tile - 1) == 0 and tile > 0


@pytest.mark.parametrize(("dims", "grid"), [((0, 1, 2), (1, 448, 1)), ((2,), (2048, 1, 1)), ((0, 1), (28, 32, 1))])
def test_small_reads_everything_at_once(dims: tuple[int, ...], grid: tuple[int, int, int]) -> None:
    p = plan((4, 512, 896), contiguous((4, 512, 896)), dims)
    assert p is not None
    cut = schedule(p, default(p, 4), 4)
    assert cut.grid == grid and cut.once


def test_counts_beyond_a_grid() -> None:
    p = plan((100_000, 64, 70), contiguous((100_000, 64, 70)), (1,))
    assert p is not None
    cut = schedule(p, default(p, 4), 4)
    assert cut.linear and cut.grid == (cut.blocks, 1, 1) and cut.blocks == 100_000


def test_alignment_is_what_divides() -> None:
    for columns, align in ((1000, 8), (1001, 1), (896, 16), (36, 4)):
        p = plan((64, columns), (columns, 1), (1,))
        assert p is not None and p.align == align
    gap = plan((64, 32), (64, 2), (1,))
    assert gap is not None and gap.align == 1, "no wide loads over gaps"


def test_too_many_runs_are_copied() -> None:
    shape = (2, 3, 2, 3, 2, 3)
    assert plan(shape, contiguous(shape), (0, 2, 4)) is None
    order, flat = copied_shape(shape, (0, 2, 4))
    assert order == [1, 3, 5, 0, 2, 4] and flat == (27, 8)
    assert plan((4, 5), (1, 4), (0, 1), in_order=True) is None, "argmax counts in x's order"
    assert plan((4, 5), (1, 4), (0, 1)) is not None


def test_dims_as_torch_takes_them() -> None:
    assert normalize(None, 3) == normalize((), 3) == (0, 1, 2)
    assert normalize(-1, 3) == (2,) and normalize((2, -3), 3) == (0, 2)
    assert normalize(0, 0) == normalize(-1, 0) == ()
    with pytest.raises(IndexError, match="Dimension out of range"):
        normalize(3, 3)
    with pytest.raises(RuntimeError, match="appears multiple times"):
        normalize((0, -3), 3)
    assert reduced_shape((2, 3, 4), (1,), True) == [2, 1, 4] and reduced_shape((2, 3, 4), (1,), False) == [2, 4]
