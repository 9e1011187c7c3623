"""Where each loop of a layer runs: across the array, or in time, and in which memory each operand waits meanwhile.

    spatial   {"D1": [("K", 32)], "D2": [("C", 32)]}          loops unrolled along each axis of the array
    loops     [("S", 3), ("R", 3), ("P", 14), …]              loops in time, innermost first, one order for all operands
    cuts      {"W": (2, 3), "I": (3,), "O": (1, 3)}           how many of these loops each memory below the outermost one covers

A memory covers the loops before its cut: their product, for the dimensions an operand depends on, is its tile. Cuts of
different operands may fall at different places (uneven mapping). With U_d PEs unrolled over dimension d, block b_d of
its loops before a cut and lane s, the index is

    index_d = (time index) * U_d + s            the array takes U_d neighbouring indices in one cycle

so a tile shared by the whole array is always a run of b_d * U_d neighbouring indices, and the last one may be cut short
by the layer's edge: factors need not divide. Loops that would run past the edge are skipped.

A refill sits in the innermost loop above the cut that the operand depends on: loops before it leave the tile in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from ...core.errors import OptionError
from ...target.array import DIMENSIONS, OPERANDS, SpatialArraySpec
from .layer import RELEVANT, Layer

Loop = tuple[str, int]


@dataclass(frozen=True, slots=True)
class MappingPlan:
    """Spatial unrolling, loop order and cuts."""

    spatial: Mapping[str, tuple[Loop, ...]]
    loops: tuple[Loop, ...]
    cuts: Mapping[str, tuple[int, ...]]
    dataflow: str = ""

    def unrolled(self, dim: str, axes: Iterable[str] | None = None) -> int:
        """PEs a dimension is spread over, along all axes or the given ones."""
        chosen = self.spatial if axes is None else axes
        return prod(factor for axis in chosen for d, factor in self.spatial.get(axis, ()) if d == dim)

    def block(self, dim: str, cut: int) -> int:
        """Product of a dimension's time loops before `cut`."""
        return prod(factor for d, factor in self.loops[:cut] if d == dim)

    def refill_position(self, operand: str, cut: int) -> int:
        """Index of the first loop at or after `cut` that the operand depends on; len(loops) if there is none."""
        relevant = RELEVANT[operand]
        return next((i for i in range(cut, len(self.loops)) if self.loops[i][0] in relevant and self.loops[i][1] > 1), len(self.loops))

    def to_json(self) -> dict[str, Any]:
        """Spatial unrolling, and per operand and memory, innermost first, its loops in order."""
        temporal = {}
        for operand in OPERANDS:
            edges = (0, *self.cuts[operand], len(self.loops))
            temporal[operand] = [[list(loop) for loop in self.loops[a:b]] for a, b in pairwise(edges)]
        return {
            "spatial": {axis: [list(loop) for loop in loops] for axis, loops in self.spatial.items()},
            "temporal": temporal,
            "dataflow": self.dataflow,
        }


def mapping_from_json(data: Mapping[str, Any]) -> MappingPlan:
    """Read what `MappingPlan.to_json` wrote: the operands' lists must be cuts of one loop order."""
    try:
        temporal = {op: [[_loop(item) for item in level] for level in data["temporal"][op]] for op in OPERANDS}
        spatial = {str(axis): tuple(_loop(item) for item in loops) for axis, loops in data["spatial"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise OptionError("this is not a mapping", why=f"{type(error).__name__}: {error}", do="see docs/npu.md for the schema") from error
    orders = {op: tuple(loop for level in levels for loop in level) for op, levels in temporal.items()}
    if len(set(orders.values())) != 1:
        raise OptionError(
            "the operands of this mapping have different loop orders",
            why=str(orders),
            do="give every operand the same loops in the same order",
        )
    cuts = {op: tuple(sum(len(level) for level in levels[: i + 1]) for i in range(len(levels) - 1)) for op, levels in temporal.items()}
    return MappingPlan(spatial, orders["W"], cuts, str(data.get("dataflow", "")))


def _loop(item: Sequence[Any]) -> Loop:
    dim, factor = item
    if dim not in DIMENSIONS or isinstance(factor, bool) or not isinstance(factor, int) or factor < 1:
        raise ValueError(f"{item!r} is not [dimension, whole factor]")
    return str(dim), factor


def check_mapping(layer: Layer, array: SpatialArraySpec, plan: MappingPlan) -> None:
    """Raise an OptionError naming what does not fit: an axis, a dimension not covered, a cut out of order (capacity: see `cost`)."""
    for axis, loops in plan.spatial.items():
        if axis not in array.axes:
            raise _wrong(layer, f"axis {axis!r}", f"the axes of {array.name} are {', '.join(array.axes)}")
        if (used := prod(f for _, f in loops)) > array.axes[axis]:
            raise _wrong(layer, f"{used} PEs along {axis}", f"{array.name} has {array.axes[axis]} there")
        allowed = array.unroll.get(axis, DIMENSIONS)
        for dim, factor in loops:
            if factor > 1 and dim not in allowed:
                raise _wrong(layer, f"{dim} along {axis}", f"{array.name} unrolls only {', '.join(allowed)} there")
    for dim, size in layer.dims.items():
        covered = plan.unrolled(dim) * plan.block(dim, len(plan.loops))
        if covered < size:
            raise _wrong(layer, f"loops over {dim} reach {covered}", f"the layer has {size}")
    for operand in OPERANDS:
        cuts, levels = plan.cuts.get(operand, ()), len(array.ladder(operand)) - 1
        if len(cuts) != levels:
            raise _wrong(
                layer, f"{len(cuts)} cuts for {operand}", f"{operand} has {levels} memories below the outermost one on {array.name}"
            )
        if any(a > b for a, b in zip((0, *cuts), (*cuts, len(plan.loops)), strict=True)):
            raise _wrong(layer, f"cuts {cuts} for {operand}", f"cuts must rise and end by {len(plan.loops)}, the number of loops")


def _wrong(layer: Layer, what: str, why: str) -> OptionError:
    return OptionError(
        f"this mapping does not fit layer {layer.name}: {what}", why=why, do="correct the mapping, or let `ridgeline map` search one"
    )
