"""How a reduction is cut into programs: pure Python over shapes and strides.

    shape, strides, dims ──plan──> Plan: x seen as [b, s, k, r], kept b and k, reduced s and r, each with a size and a stride
    Plan, configuration  ──schedule──> Schedule: tile KEPT x RED, pieces of r, programs, warps

Dimensions are sorted by stride and merged where they lie end to end, so a transposed tensor costs nothing. At most two kept and two
reduced runs can be seen as [b, s, k, r]; `plan` returns None for more, and the caller copies to [kept, reduced]. Kinds:
  inner  r is closest in memory: a row, or several short ones, a program
  outer  k is closest: a tile of columns, added down the rows, nothing is transposed
  full   one output; split  few outputs, long r: many programs share an output, and its pieces are combined at the end
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, prod
from pathlib import Path

from .jit import cdiv, next_power_of_2
from .tuning import space

SMS = 132
"""Multiprocessors of an H200, which the defaults are made for; more or fewer only change the speed."""
COUNTERS = 1024
"""Blocks of outputs that one launch may combine by itself; more take a second launch."""
MOST_PIECES = 2048
"""Pieces one program may combine; the partial results of more are reduced as a tensor of their own."""

GRID_MOST = 65535
"""Programs along the second and third axis of a grid."""
SMALL = 16 << 20
"""Bytes that the device can ask for at once, about: below, latency counts, and every program reads one tile."""

_SOURCE = str(Path(__file__).with_name("reduce_kernels.py"))
# tile, columns, warps, programs an SM, launches
_INNER = ((1024, 1, 1), (2048, 1, 1), (1024, 1, 2), (2048, 1, 2), (2048, 1, 4), (4096, 1, 4), (4096, 1, 8), (8192, 1, 8))
_SPACES = {
    "reduce_inner": [(*chosen, 8, 1) for chosen in _INNER],
    "reduce_full": [
        (2048, 1, 4, 8, 1), (4096, 1, 4, 4, 1), (4096, 1, 8, 4, 1), (4096, 1, 8, 4, 2), (4096, 1, 8, 6, 1), (8192, 1, 8, 2, 1),
        (8192, 1, 8, 3, 1), (8192, 1, 8, 3, 2), (16384, 1, 16, 1, 1), (4096, 1, 8, 64, 1),
    ],
    "reduce_split": [
        (4096, 1, 4, 4, 1), (4096, 1, 8, 4, 1), (8192, 1, 8, 2, 1), (8192, 1, 8, 3, 1), (8192, 1, 8, 4, 1), (8192, 1, 8, 32, 1),
        (16384, 1, 8, 2, 1), (16384, 1, 16, 1, 1), (16384, 1, 16, 2, 1),
    ],
    "reduce_outer": [
        (1024, 32, 2, 16, 1), (2048, 16, 4, 8, 1), (2048, 32, 4, 8, 1), (2048, 64, 4, 8, 1), (2048, 32, 4, 8, 2), (4096, 128, 4, 4, 1),
        (4096, 128, 8, 4, 1), (8192, 256, 8, 3, 1), (8192, 512, 8, 3, 1), (8192, 1024, 8, 16, 1),
    ],
}  # fmt: skip
for _name, _candidates in _SPACES.items():
    space(_name, _SOURCE, [dict(zip(("TILE", "COLS", "WARPS", "PER_SM", "LAUNCHES"), each, strict=True)) for each in _candidates])


@dataclass(frozen=True, slots=True)
class Plan:
    """x as [b, s, k, r]; strides in elements."""

    kind: str
    b: int
    s: int
    k: int
    r: int
    sb: int
    ss: int
    sk: int
    sr: int
    axis: int
    """1: r is the closest in memory; 0: k is."""
    align: int
    order: tuple[int, ...] | None
    """The kept dimensions in the order of the kernel's output, where that is not theirs in x."""
    sizes: tuple[int, ...]
    """Their sizes, in the kernel's order."""

    @property
    def kept(self) -> int:
        """Outputs."""
        return self.b * self.k


@dataclass(frozen=True, slots=True)
class Schedule:
    """The numbers of one launch."""

    grid: tuple[int, int, int]
    """Blocks of k, splits, b; all in the first where they do not fit."""
    linear: bool
    wide: bool
    """An int32 does not count the outputs along the first axis of the grid."""
    blocks: int
    """Blocks of outputs."""
    splits: int
    """Pieces of an output: chunks for each s."""
    chunks: int
    k_units: int
    r_units: int
    tile_kept: int
    tile_reduced: int
    flat: bool
    even: bool
    once: bool
    """A piece is one tile."""
    combine: int
    """Pieces combined at a time."""
    finish_kept: int
    """Outputs of a program of the second launch, and pieces it combines at a time."""
    finish_combine: int
    warps: int
    two_launches: bool


@dataclass(slots=True)
class _Run:
    """Dimensions that lie end to end."""

    size: int
    stride: int
    reduced: bool


def normalize(dims: Sequence[int] | int | None, ndim: int) -> tuple[int, ...]:
    """Dimensions as torch takes them (None or none: all; negative), sorted, or torch's error."""
    if isinstance(dims, int):
        dims = (dims,)
    if dims is None or len(dims) == 0:
        return tuple(range(ndim))
    reach = max(ndim, 1)
    for d in dims:
        if not -reach <= d < reach:
            raise IndexError(f"Dimension out of range (expected to be in range of [{-reach}, {reach - 1}], but got {d})")
    found = sorted(d % reach for d in dims)
    for d, after in pairwise(found):
        if d == after:
            raise RuntimeError(f"dim {d} appears multiple times in the list of dims")
    return tuple(found) if ndim else ()


def reduced_shape(shape: Sequence[int], dims: tuple[int, ...], keepdim: bool) -> list[int]:
    """The result's shape; `dims` normalized."""
    if keepdim:
        return [1 if d in dims else size for d, size in enumerate(shape)]
    return [size for d, size in enumerate(shape) if d not in dims]


def kind_of(shape: Sequence[int], dims: tuple[int, ...]) -> str:
    """The kind of a contiguous tensor's reduction, without a plan: what the dispatch table is asked with."""
    if len(dims) >= len(shape):
        return "full"
    if dims[-1] != len(shape) - 1:
        return "outer"
    rows = 1
    for size in shape[: dims[0]]:
        rows *= size
    return "split" if rows < 2 * SMS and shape[-1] >= 65536 else "inner"


def plan(shape: Sequence[int], strides: Sequence[int], dims: tuple[int, ...], *, in_order: bool = False) -> Plan | None:
    """See x as [b, s, k, r], or None where it cannot be; `in_order` asks for one reduced run that counts as x does (argmax)."""
    # a dimension of stride 0 repeats what follows: it goes outermost, or its neighbours would lose their contiguity
    numbers = [d for d, size in enumerate(shape) if size != 1]
    numbers.sort(key=lambda d: -(strides[d] or 1 << 62))
    runs: list[_Run] = []
    for d in numbers:
        size, stride, reduced = shape[d], strides[d], d in dims
        if runs and runs[-1].reduced == reduced and runs[-1].stride == stride * size:
            runs[-1] = _Run(runs[-1].size * size, stride, reduced)
        else:
            runs.append(_Run(size, stride, reduced))
    kept = [run for run in runs if not run.reduced]
    reduced_runs = [run for run in runs if run.reduced]
    counted = [d for d in numbers if d in dims]
    if len(kept) > 2 or len(reduced_runs) > 2 or (in_order and (len(reduced_runs) > 1 or counted != sorted(counted))):
        return None
    axis = 0 if runs and not runs[-1].reduced else 1
    b, k = _pair(kept)
    s, r = _pair(reduced_runs)
    kept_numbers = [d for d in numbers if d not in dims]
    sizes = tuple(shape[d] for d in kept_numbers)
    order = None if kept_numbers == sorted(kept_numbers) else tuple(_rank(kept_numbers))
    align = _alignment(k if axis == 0 else r, [run for run in (b, s, k, r) if run is not (k if axis == 0 else r)])
    kind = _kind(axis, b.size * k.size, r.size)
    return Plan(kind, b.size, s.size, k.size, r.size, b.stride, s.stride, k.stride, r.stride, axis, align, order, sizes)


def _pair(runs: list[_Run]) -> tuple[_Run, _Run]:
    """Outer and inner run; an absent one has size 1."""
    first = runs[-2] if len(runs) > 1 else _Run(1, 0, False)
    return first, runs[-1] if runs else _Run(1, 0, False)


def _rank(numbers: list[int]) -> list[int]:
    """Where each kept dimension, in x's order, stands in the kernel's output."""
    return [numbers.index(d) for d in sorted(numbers)]


def _alignment(closest: _Run, others: list[_Run]) -> int:
    """Power of two up to 16 that divides the closest run's size and the others' strides; 1 where the closest has gaps."""
    if closest.stride != 1:
        return 1
    return gcd(16, closest.size, *(run.stride for run in others if run.size > 1))


def _kind(axis: int, kept: int, r: int) -> str:
    if kept == 1:
        return "full"
    if axis == 0:
        return "outer"
    return "split" if kept < 2 * SMS and r >= 65536 else "inner"


def default(p: Plan, itemsize: int, how: str = "fold") -> Mapping[str, int]:
    """A configuration for an H200: 64 kB in flight an SM; large sums in programs that all run at once, so that all end at once."""
    size = max(itemsize, 2)
    tile, columns, warps = 16384 // size, 1, 8
    # one full wave, as many programs as registers allow; kernels that take more of them get many waves instead of one and a half
    per_sm = 4 if how == "fold" else 16
    small = p.kept * p.s * p.r * itemsize <= SMALL
    if small:
        per_sm = 8
    if p.kind == "outer":
        # adding up across warps meets bank conflicts that grow with columns and warps: 1024 cycles a program for 128 and 8;
        # of more than four loads a thread, the assembler waits for the first before it asks for the rest
        tile, columns, warps = (8192 // size, 128 // size, 4) if small else (tile, 512 // size, 8)
    elif p.kind == "inner" and small and p.r * itemsize <= 4096:
        tile, warps = 4096 // size, 1  # a warp a row: no barrier
    return {"TILE": tile, "COLS": columns, "WARPS": warps, "PER_SM": per_sm, "LAUNCHES": 1}


def bucket(p: Plan, itemsize: int, how: str = "fold") -> tuple[str, str, int, int, int]:
    """Reductions that share a configuration."""
    return how, p.kind, itemsize, next_power_of_2(p.kept), next_power_of_2(p.s * p.r)


def schedule(p: Plan, chosen: Mapping[str, int], itemsize: int) -> Schedule:
    """Cut a plan into programs."""
    tile = chosen["TILE"]
    if p.axis == 0:
        flat = p.b > 1 and p.k < 32
        wide = p.kept if flat else p.k
        kept = min(next_power_of_2(wide), max(chosen["COLS"], 16))
        reduced = min(next_power_of_2(p.r), max(tile // kept, 1))
        kept = min(next_power_of_2(wide), max(kept, tile // reduced)) if flat else kept
    else:
        flat = p.b > 1
        reduced = min(next_power_of_2(p.r), tile)
        kept = min(next_power_of_2(p.kept), tile // reduced)
        while kept * reduced > 512 and kept > 1 and cdiv(p.kept, kept) * p.s < 4 * SMS:  # 2 kB are the least a warp should read
            kept //= 2
    across, batches = (cdiv(p.kept, kept), 1) if flat else (cdiv(p.k, kept), p.b)
    blocks = across * batches
    chunks = _chunks(p, blocks, cdiv(p.r, reduced), SMS * chosen["PER_SM"])
    splits = chunks * p.s
    unit_k, unit_r = (p.align, 1) if p.axis == 0 else (1, p.align)
    even = p.r % reduced == 0 and (p.kept if flat else p.k) % kept == 0
    finish_kept = min(next_power_of_2(p.kept), 32 if splits > 32 else 256)
    linear = splits > GRID_MOST or batches > GRID_MOST
    return Schedule(
        grid=(blocks * splits, 1, 1) if linear else (across, splits, batches), linear=linear, wide=across * kept >= 1 << 31,
        blocks=blocks, splits=splits, chunks=chunks,
        k_units=p.k // unit_k, r_units=p.r // unit_r, tile_kept=kept, tile_reduced=reduced, flat=flat, even=even,
        once=chunks * reduced >= p.r,
        combine=min(next_power_of_2(splits), max(1, 8192 // kept)),
        finish_kept=finish_kept, finish_combine=min(next_power_of_2(splits), 4096 // finish_kept),
        warps=_warps(kept * reduced * itemsize, chosen["WARPS"]), two_launches=chosen.get("LAUNCHES", 1) == 2,
    )  # fmt: skip


def _chunks(p: Plan, blocks: int, pieces: int, wanted: int) -> int:
    """Programs to share the tiles of r, so that `wanted` run in all, not one more: a second wave for the last would cost as much again."""
    programs = blocks * p.s
    if 2 * programs > wanted:
        return 1
    share = wanted // programs
    # with few tiles a program, some would have one more than others: short programs in several waves even that out
    return pieces if pieces <= 4 * share and pieces * p.s <= MOST_PIECES else min(share, pieces)


def _warps(tile_bytes: int, most: int) -> int:
    """Two kB a warp: four 128-bit loads a thread."""
    return max(1, min(most, next_power_of_2(cdiv(tile_bytes, 2048))))


def copied_shape(shape: Sequence[int], dims: tuple[int, ...]) -> tuple[list[int], tuple[int, int]]:
    """Where no plan fits: the order to copy the dimensions in, and the copy's [kept, reduced]."""
    kept = [d for d in range(len(shape)) if d not in dims]
    return kept + list(dims), (prod(shape[d] for d in kept), prod(shape[d] for d in dims))
