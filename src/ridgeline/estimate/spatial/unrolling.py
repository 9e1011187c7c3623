"""Which loops lie across the array: every sensible unrolling, and the four dataflows as constraints on it.

    axis of 14 PEs ──> [("P", 14)]  or  [("R", 3), ("K", 4)]  or …      up to three dimensions share an axis
    ws  weights stay in a PE until every product with them is done      unrolls G K C R S
    is  inputs stay                                                     unrolls B G C P Q R S
    os  outputs stay until they are finished                            unrolls B G K P Q
    rs  a PE convolves rows: filter rows R along one axis, output rows P along another, the rest of the array B G K C

An unrolling is kept unless another one needs no more cycles and reuses each of the three operands at least as often across PEs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from math import prod

from ...target.array import DATAFLOWS, DIMENSIONS, OPERANDS, SpatialArraySpec
from .layer import RELEVANT, Layer
from .mapping import Loop

Spatial = Mapping[str, tuple[Loop, ...]]
UNROLLS = {"ws": RELEVANT["W"], "is": RELEVANT["I"], "os": RELEVANT["O"], "rs": ("B", "G", "K", "C", "P", "R"), "any": DIMENSIONS}
COMBINATIONS = 200_000
"""Combinations of the axes' options looked at."""
STATIONARY = {"ws": "W", "is": "I", "os": "O"}


@dataclass(frozen=True, slots=True)
class Unrolling:
    """Loops along each axis, and what they bring."""

    spatial: Spatial
    cycles: int
    reuse: tuple[int, int, int]
    """PEs an element of W, of I, of O serves at once."""


def stationary_place(array: SpatialArraySpec, operand: str) -> int:
    """The cut of the memory in the PEs, or of their registers where an operand has none."""
    ladder = array.ladder(operand)
    private = not array.memories[ladder[0]].shared_over
    return 1 if (private and len(ladder) > 1) or operand == "O" else 0


def unrollings(layer: Layer, array: SpatialArraySpec, dataflow: str) -> list[Unrolling]:
    """Candidates of a dataflow, fewest cycles first; `any` has those of all four among its own."""
    flows = ("any", *DATAFLOWS) if dataflow == "any" else (dataflow,)
    found = {tuple(one.spatial.items()): one for flow in flows for one in _of_dataflow(layer, array, flow)}
    return sorted(found.values(), key=lambda one: (one.cycles, [-r for r in one.reuse]))


def _of_dataflow(layer: Layer, array: SpatialArraySpec, dataflow: str) -> list[Unrolling]:
    axes = list(array.axes)
    allowed = {a: [d for d in UNROLLS[dataflow] if d in array.unroll.get(a, DIMENSIONS)] for a in axes}
    options = [_axis_options(layer, array.axes[a], allowed[a], 3) for a in axes]
    for most in (2, 1):  # arrays of three and four axes: fewer dimensions on each
        if prod(len(o) for o in options) > COMBINATIONS:
            options = [_axis_options(layer, array.axes[a], allowed[a], most) for a in axes]
    found: dict[tuple[object, ...], Unrolling] = {}
    long = [(d, size) for d, size in layer.dims.items() if size > 1]
    for chosen in product(*options):
        lanes: dict[str, int] = {}
        for loops in chosen:
            for dim, factor in loops:
                lanes[dim] = lanes.get(dim, 1) * factor
        if any(lanes[d] > layer.dims[d] for d in lanes) or (
            dataflow == "rs" and not _row_stationary(layer, chosen, list(array.axes.values()))
        ):
            continue
        cycles = prod(-(-size // lanes.get(d, 1)) for d, size in long)
        reuse = tuple(prod(f for d, f in lanes.items() if d not in RELEVANT[op]) for op in OPERANDS)
        shape = tuple(sorted(lanes.items())) if _alike(array) else tuple(chosen)
        found.setdefault((cycles, reuse, shape), Unrolling(dict(zip(axes, chosen, strict=True)), cycles, reuse))  # type: ignore[arg-type]
    one_pe = [one for one in found.values() if not any(one.spatial.values())]  # what needs least room, however slow
    best = _undominated(found.values())
    return best + [one for one in one_pe if one not in best]


def _axis_options(layer: Layer, size: int, dims: Iterable[str], most: int) -> list[tuple[Loop, ...]]:
    """Ways to fill one axis: up to `most` dimensions, the small ones whole, then one more cut evenly over the PEs left."""
    long = [d for d in dims if layer.dims[d] > 1]
    options: list[tuple[Loop, ...]] = [()]
    for count in range(1, most + 1):
        for group in combinations(long, count):
            for last in group:
                whole = [(d, layer.dims[d]) for d in group if d != last]
                room = size // max(1, prod(f for _, f in whole))
                if room < 2:
                    continue
                options.append((*whole, (last, even_share(layer.dims[last], room))))
    halves = [(d, f) for d in long for f in (2, 4, 8, 16) if f < min(size, layer.dims[d])] if most > 2 else []
    for first, second in product(halves, long):
        if first[0] != second and size // first[1] > 1:
            options.append((first, (second, even_share(layer.dims[second], size // first[1]))))
    return list(dict.fromkeys(tuple(sorted(o)) for o in options))


def even_share(size: int, lanes: int) -> int:
    """Lanes used when `size` is cut into the fewest steps, all about equal."""
    return -(-size // -(-size // lanes))


def _row_stationary(layer: Layer, chosen: Iterable[tuple[Loop, ...]], sizes: list[int]) -> bool:
    """Filter rows along one axis, whole or, where they are more than it has PEs, in the fewest folds; output rows along another."""
    axes = [dict(loops) for loops in chosen]
    rows = [i for i, loops in enumerate(axes) if loops.get("R", 1) == even_share(layer.dims["R"], sizes[i])]
    rows = rows if layer.dims["R"] > 1 else list(range(len(axes)))
    outs = [i for i, loops in enumerate(axes) if loops.get("P", 1) > 1] if layer.dims["P"] > 1 else list(range(len(axes)))
    return any(i != j for i in rows for j in outs) if len(axes) > 1 else bool(rows and outs)


def _alike(array: SpatialArraySpec) -> bool:
    """Whether swapping axes changes nothing: equal sizes, and every memory is shared over all of them or none."""
    return (
        len(set(array.axes.values())) == 1
        and not array.unroll
        and all(len(m.shared_over) in (0, len(array.axes)) for m in array.memories.values())
    )


def _undominated(candidates: Iterable[Unrolling]) -> list[Unrolling]:
    """Those that no other matches in cycles and in the reuse of every operand."""
    ranked = sorted(candidates, key=lambda u: (u.cycles, [-r for r in u.reuse], sum(len(loops) for loops in u.spatial.values())))
    first = {one.reuse: one for one in reversed(ranked)}  # of equal reuse the fastest: what is no better than it need not be compared
    kept: list[Unrolling] = []
    for one in ranked:
        if first[one.reuse] is one and not any(all(a >= b for a, b in zip(k.reuse, one.reuse, strict=True)) for k in kept):
            kept.append(one)
    return kept
