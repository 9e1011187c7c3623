"""A mapping written out as the loops it stands for.

    Layer, SpatialArraySpec, MappingPlan ──lower──> Nest
      time loops    outermost first, as the plan orders them; `above` says whose tiles they change
      lanes         parallel loops innermost, the first axis of the array innermost of all
      transfers     a load in the innermost loop above a memory's cut that its operand depends on, a store at that loop's end

Partial sums that come back are loaded (zeros the first time); those that are finished in one go are only cleared.
The guard of a dimension whose factors reach past the layer's edge makes the loops skip what is not there.
"""

from __future__ import annotations

from math import prod

from ....target.array import OPERANDS, SpatialArraySpec
from ..layer import REDUCTION, RELEVANT, Layer
from ..mapping import MappingPlan, check_mapping
from .nest import Guard, Loop, Nest, Transfer, TransferKind


def lower(layer: Layer, array: SpatialArraySpec, plan: MappingPlan) -> Nest:
    """The tiled loop nest of a mapped layer; loops of one turn are left out.

    A convolution on 4 x 3 PEs that unroll K and C, with weights in every PE (rf_w) and sums in every column (rf_o), reads

        # conv: K 6, C 4, P 5, Q 5, R 3
        for k1 in 0..2:  # K by 4, above rf_w, glb (O)
          clear O tile (K 4 x P 5 x Q 5): in glb
          for c1 in 0..2:  # C by 2, above rf_w, glb (I)
            load I tile (C 2 x P 5 x Q 5 x R 3): dram -> glb
            load W tile (R 3): dram -> rf_w, at each place along D1, D2
            for q0 in 0..5:  # Q, above rf_o
              load O tile (P 5): glb -> rf_o, at each place along D1
              for r0 in 0..3:  # R
                for p0 in 0..5:  # P
                  parallel c0 in 0..2:  # C, along D2
                    parallel k0 in 0..4:  # K, along D1, while 4*k1 + k0 < 6
                      O[0, 0, 4*k1 + k0, p0, q0] += W[0, 4*k1 + k0, 2*c1 + c0, r0, 0] * I[0, 0, 2*c1 + c0, p0 + r0 - 1, q0]
              store O tile (P 5): rf_o -> glb, at each place along D1
          store O tile (K 4 x P 5 x Q 5): glb -> dram
    """
    check_mapping(layer, array, plan)
    loops, names = _loops(array, plan)
    guards = []
    for dim, size in layer.dims.items():
        mine = [loop for loop in loops if loop.dim == dim]
        if prod(loop.extent for loop in mine) > size:
            guards.append(Guard(dim, tuple((loop.index, loop.step) for loop in mine), size))
    return Nest(layer, tuple(loops), tuple(guards), tuple(_transfers(array, plan, names)))


def _loops(array: SpatialArraySpec, plan: MappingPlan) -> tuple[list[Loop], dict[int, str]]:
    """Loops outermost first, and the index of each time loop by its place in the plan."""
    reach, count = dict.fromkeys("BGKCPQRS", 1), dict.fromkeys("BGKCPQRS", 0)
    found: list[Loop] = []
    names: dict[int, str] = {}
    lanes = [(axis, dim, factor) for axis in array.axes for dim, factor in plan.spatial.get(axis, ())]
    turns = [("", dim, factor) for dim, factor in plan.loops]
    for place, (axis, dim, factor) in enumerate([*lanes, *turns], start=-len(lanes)):
        if factor == 1:
            continue
        index = f"{dim.lower()}{count[dim]}"
        above = () if axis else _above(array, plan, place)
        found.append(Loop(index, dim, factor, reach[dim], "parallel" if axis else "serial", above, axis))
        names[place] = index
        count[dim] += 1
        reach[dim] *= factor
    return found[::-1], names


def _above(array: SpatialArraySpec, plan: MappingPlan, place: int) -> tuple[str, ...]:
    """The widest memory of each operand that lies wholly below the loop; an operand is named where its memory's others do not."""
    below: dict[str, list[str]] = {}
    for operand in OPERANDS:
        covered = [memory for memory, cut in zip(array.ladder(operand), plan.cuts[operand], strict=False) if cut <= place]
        if covered and plan.loops[place][0] in RELEVANT[operand]:
            below.setdefault(covered[-1], []).append(operand)
    return tuple(
        memory if set(below[memory]) == set(array.memories[memory].operands) else f"{memory} ({', '.join(below[memory])})"
        for memory in array.memories
        if memory in below
    )


def _transfers(array: SpatialArraySpec, plan: MappingPlan, names: dict[int, str]) -> list[Transfer]:
    loads: list[Transfer] = []
    stores: list[Transfer] = []
    for operand in OPERANDS:
        ladder = array.ladder(operand)
        for memory, outer, cut in zip(ladder, ladder[1:], plan.cuts[operand], strict=False):
            position = plan.refill_position(operand, cut)
            again = any(dim in REDUCTION and factor > 1 for dim, factor in plan.loops[position + 1 :])
            kind: TransferKind = "load" if operand != "O" or again else "clear"
            shared = array.memories[memory].shared_over
            tile = tuple((dim, size) for dim in RELEVANT[operand] if (size := plan.block(dim, cut) * plan.unrolled(dim, shared)) > 1)
            each = tuple(axis for axis in array.axes if axis not in shared and prod(f for _, f in plan.spatial.get(axis, ())) > 1)
            loads.append(Transfer(kind, operand, memory, outer, names.get(position), tile, each))
            if operand == "O":
                stores.append(Transfer("store", operand, memory, outer, names.get(position), tile, each))
    widest_first = list(array.memories)[::-1]
    return sorted(loads, key=lambda t: widest_first.index(t.memory)) + stores
