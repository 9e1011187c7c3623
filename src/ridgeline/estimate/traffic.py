"""Bytes each memory level delivers to an op: reuse inside the op from a tiling model, reuse between ops from residency.

    level i delivers to what lies inside it; the tile that fits inside decides how often an operand is re-read:
      matmul (B, M, N, K), tile m x n:   a · ceil(N/n) + b · ceil(M/m) + out       [B], at least a + b + out
      an operand that fits inside whole is read once; everything else streams: each operand once
    a level that `retains` serves operands last touched fewer bytes ago than it holds; levels beyond it see nothing

Per-level intensity is FLOPs over these bytes. Ref: Hong and Kung 1981 for the tile bound; Mattson 1970 for stack
distance. Not modelled: conflict misses, write-back of results that are never used again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt

from ..target.spec import Memory, ProcessorSpec
from ..workload.graph import LoopNest, Op, Operand

ACCUMULATOR_BYTES = 4


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes by level, nearest first, and the working set that decided them."""

    bytes: dict[str, int]
    working_set: int


def reuse_distances(ops: Sequence[Op]) -> list[tuple[float, ...]]:
    """For every operand of every op, bytes of other data touched since it was last touched, passes repeating for ever."""
    recent: OrderedDict[str, int] = OrderedDict()
    for op in ops:  # one pass to warm up: weights were last touched in the pass before
        for operand in op.operands:
            _touch(recent, operand)
    fresh = _made_each_pass(ops)
    distances = []
    for op in ops:
        row = []
        for operand in op.operands:
            if operand.value in fresh:  # an activation of the last pass is dead data under a reused name
                fresh.discard(operand.value)
                row.append(0.0 if operand in op.outputs else inf)
            else:
                row.append(_distance(recent, operand.value))
        for operand in op.operands:
            _touch(recent, operand)
        distances.append(tuple(row))
    return distances


def _made_each_pass(ops: Sequence[Op]) -> set[str]:
    return {o.value for op in ops for o in op.operands if o.role == "activations"}


def _touch(recent: OrderedDict[str, int], operand: Operand) -> None:
    size = max(operand.bytes, recent.get(operand.value, 0))
    recent[operand.value] = size
    recent.move_to_end(operand.value)


def _distance(recent: OrderedDict[str, int], value: str) -> float:
    total = 0
    for name in reversed(recent):
        if name == value:
            return float(total)
        total += recent[name]
    return inf


def level_traffic(op: Op, spec: ProcessorSpec, distances: tuple[float, ...] | None = None) -> Traffic:
    """Bytes every level of `spec` delivers to one op; `distances` matter only to levels that retain."""
    levels = list(spec.memories.items())
    served_by = [
        _home(operand, distance, levels) for operand, distance in zip(op.operands, distances or [inf] * len(op.operands), strict=True)
    ]
    result: dict[str, int] = {}
    for index, (name, _memory) in enumerate(levels):
        inside = levels[index - 1][1] if index else None
        repeats = _repeats(op, spec, inside)
        result[name] = sum(
            operand.bytes * repeat for operand, repeat, home in zip(op.operands, repeats, served_by, strict=True) if index <= home
        )
    return Traffic(result, op.bytes)


def _home(operand: Operand, distance: float, levels: Sequence[tuple[str, Memory]]) -> int:
    """Index of the nearest level that still holds the operand; the outermost holds everything."""
    for index, (_name, memory) in enumerate(levels[:-1]):
        if memory.retains and distance + operand.bytes <= memory.capacity_bytes.value:
            return index
    return len(levels) - 1


def _repeats(op: Op, spec: ProcessorSpec, inside: Memory | None) -> list[int]:
    """How many times each operand crosses into the memory `inside` (None: into registers)."""
    once = [1] * len(op.operands)
    if not op.loops or len(op.inputs) < 2:
        return once
    loop = op.loops[0]
    if inside is None:
        tiles = spec.units[spec.peak(op.kind, op.dtype)[0]].tiles
        tile = max(tiles, key=lambda t: t[0] * t[1]) if tiles else None
        return _tile_repeats(op, loop, tile) if tile else once
    room = inside.capacity_bytes.value / inside.copies
    if min(o.bytes for o in _factors(op)) / max(loop.as_matmul()[0], 1) <= room:
        return once
    _, m, n, _ = loop.as_matmul()
    return _tile_repeats(op, loop, _square_tile(m, n, room))


def _factors(op: Op) -> tuple[Operand, ...]:
    """The two operands a matmul multiplies: the largest inputs (a bias or mask is small)."""
    return tuple(sorted(op.inputs, key=lambda o: -o.bytes)[:2])


def _square_tile(m: int, n: int, room_bytes: float) -> tuple[int, int]:
    """The tile of accumulators that fits: square, or as long as the short side of the output allows."""
    area = max(room_bytes / ACCUMULATOR_BYTES, 1.0)
    side = max(int(sqrt(area)), 1)
    rows = min(m, side)
    columns = min(n, max(int(area / rows), 1))
    return min(m, max(int(area / columns), 1)), columns


def _tile_repeats(op: Op, loop: LoopNest, tile: tuple[int, int]) -> list[int]:
    """Rows of A are read once per column of tiles, columns of B once per row of tiles."""
    _, m, n, _ = loop.as_matmul()
    per_a, per_b = max(ceil(n / tile[1]), 1), max(ceil(m / tile[0]), 1)
    first, second = _factors(op)[0], _factors(op)[1]
    # In conv and linear the weights are B; otherwise inputs come in the order a, b.
    b = first if first.role == "weights" else second if second.role == "weights" else op.inputs[1]
    repeats = []
    for operand in op.inputs:
        if operand not in (first, second):
            repeats.append(1)
        else:
            repeats.append(per_b if operand is b else per_a)
    return repeats + [1] * len(op.outputs)
