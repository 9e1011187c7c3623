"""Words and energy of a mapping as ZigZag 3.9.1 counts them, so that the two tools can be compared word by word.

    row of its results ──read_result──> Layer, spatial, temporal ──replay──> ZigzagCounts(words, energy)
    MappingPlan.spatial ───levels_of──> spatial                  └─plan_of─> MappingPlan, for `cost.evaluate`

    pieces = ⌈elements of a transfer * bits / word_bits⌉ * transfers * instances            accesses of word_bits
    words  = ⌊pieces * word_bits / bits_per_cycle⌋                                          accesses of the full width
    energy = words * energy of a full-width access + MACs * energy of a MAC                 [pJ]

Where these counts differ from the exact ones of `counts`:

    words     a stream is rounded down to whole full-width words once, over the whole layer
    edges     a dimension that does not divide is spread evenly: 1000 over 32 lanes in 32 steps are 31.25 lanes. Tiles, and
              instances at work, are means, rounded to whole ones
    windows   rows of padding count like any others, up to the rows the input has; rows a memory holds already are fetched again;
              part of an output or of a tap counts as none; a lane's outputs are taken for neighbours, and rows that lanes share
              are counted once for each row of a lane
    sums      a memory that returns partial sums returns them on every visit, the first included, and to every lane. They have
              O bits where a reduction loop is still to come, else F bits: also those that lanes have yet to add up on the way
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, gcd, prod
from typing import Any, NamedTuple

from ...core.errors import OptionError
from ...target.array import DIMENSIONS, DIRECTIONS, OPERANDS, READS, SpatialArraySpec
from .layer import RELEVANT, Layer
from .mapping import Loop, MappingPlan, mapping_from_json

Lane = tuple[str, float]
Spatial = Mapping[str, Sequence[Sequence[Lane]]]
"""{operand: loops unrolled between the PEs and its first memory, between that and the second, …}, lanes at work on average."""
Temporal = Mapping[str, Sequence[Sequence[Loop]]]
"""{operand: loops in time of its first memory, innermost first, of the second, …}."""
Stream = tuple[str, str, str]
"""(memory, operand, direction)."""

OUR_NAME = {"B": "B", "G": "G", "K": "K", "C": "C", "OY": "P", "OX": "Q", "FY": "R", "FX": "S", "D": "P"}
"""ZigZag's dimensions; D are the rows of a matmul."""
ADDED_UP = ("O", "W", "I")  # the order ZigZag adds energies in; another one gives other last digits
WINDOW_AXIS = {"P": 0, "R": 0, "Q": 1, "S": 1}

_LOOP = r"\(\w+,\d+(?:\.\d+)?\)"
_LEVEL = rf"\[(?:{_LOOP},?)*\]"
_LADDER = rf"[WIO]:\[(?:{_LEVEL},?)*\]"


@dataclass(frozen=True, slots=True)
class ZigzagCounts:
    """Every stream of every memory; what never moves counts 0."""

    words: Mapping[Stream, int]
    """Accesses of a port's full width, rounded down."""
    pieces: Mapping[Stream, int]
    """Accesses of a port's word_bits, before that rounding: what `LayerCost.words` counts."""
    energy_pj: float
    mac_energy_pj: float
    energy_by: Mapping[tuple[str, str], float]
    """{(operand, memory): pJ}."""


class Transfers(NamedTuple):
    """All transfers of one stream, by the place of its memory on the operand's ladder."""

    place: int
    direction: str
    elements: int
    bits: int
    times: int


def replay(layer: Layer, array: SpatialArraySpec, spatial: Spatial, temporal: Temporal) -> ZigzagCounts:
    """Words and energy of a mapping by ZigZag's rules; an OptionError says where it does not fit. Capacity is not checked."""
    plan, lanes = _checked(layer, array, spatial, temporal)
    streams = [(name, operand, way) for operand in OPERANDS for name in array.ladder(operand) for way in DIRECTIONS]
    pieces, words = dict.fromkeys(streams, 0), dict.fromkeys(streams, 0)
    for operand in OPERANDS:
        ladder, climb = array.ladder(operand), Climb(layer, plan, operand, lanes[operand])
        for move in climb.output_transfers() if operand == "O" else climb.input_transfers():
            memory = array.memories[ladder[move.place]]
            port = memory.ports[memory.port_of(operand, move.direction)]
            each, instances = ceil(move.elements * move.bits / port.granule), climb.instances[move.place]
            stream = ladder[move.place], operand, move.direction
            pieces[stream] = each * move.times * instances
            words[stream] = int(each * (port.granule / port.bits_per_cycle) * move.times * instances)
    return _with_energy(layer, array, words, pieces)


def _with_energy(layer: Layer, array: SpatialArraySpec, words: Mapping[Stream, int], pieces: Mapping[Stream, int]) -> ZigzagCounts:
    energy_by: dict[tuple[str, str], float] = {}
    for operand in ADDED_UP:
        for name in array.ladder(operand):
            memory = array.memories[name]
            spent = dict.fromkeys(DIRECTIONS, 0.0)
            for way in DIRECTIONS:
                if port := memory.ports.get(memory.port_of(operand, way)):
                    access_pj = (memory.read_pj if way in READS else memory.write_pj).value * (port.bits_per_cycle / memory.access_bits)
                    spent[way] = words[name, operand, way] * access_pj
            energy_by[operand, name] = (spent["rd_up"] + spent["rd_down"]) + (spent["wr_down"] + spent["wr_up"])
    mac_pj = array.mac.energy_pj.value * layer.macs
    return ZigzagCounts(words, pieces, sum(energy_by.values()) + mac_pj, mac_pj, energy_by)


class Climb:
    """One operand on its way between the PEs and its last memory.

    Boundary b lies below memory b, the PEs being below memory 0. Per boundary: `tiles` elements in what is below it, `times`
    these are replaced, `still_to_sum` how often an output is added to above it. Per memory: `fan_out` different tiles below it,
    `instances` at work.
    """

    def __init__(self, layer: Layer, plan: MappingPlan, operand: str, lanes: Sequence[Sequence[Lane]]) -> None:
        self.layer, self.operand = layer, operand
        places = _settled(layer, plan, operand)
        time = [plan.loops[a:b] for a, b in pairwise((0, *places[1:]))]
        cycles = prod(factor for _, factor in plan.loops)
        self.times = [cycles // prod(factor for _, factor in plan.loops[:place]) for place in places]
        grown, _ = self._split([(), *((*loops, *below) for loops, below in zip(time, lanes[:-1], strict=True))])
        self.tiles = [round(prod(grown[: i + 1])) for i in range(len(grown))]
        _, summed = self._split([lanes[0], *((*loops, *above) for loops, above in zip(time, lanes[1:], strict=True))])
        self.still_to_sum = [prod(summed[i + 1 :]) for i in range(len(summed))]
        wide, shared = self._split(lanes)
        distinct = [prod(wide[i:]) for i in range(len(wide))]
        self.fan_out = [round(below / above) for below, above in pairwise(distinct)]
        at_work = [prod(w * s for w, s in zip(wide[i:], shared[i:], strict=True)) for i in range(1, len(wide))]
        self.instances = [round(round(count, 3)) for count in at_work]  # to 3 places first: quotients of floats are not quite whole

    def _split(self, levels: Sequence[Sequence[Lane]]) -> tuple[list[float], list[float]]:
        """Each level's loops as two factors: how many more elements they reach, and how often they use the same ones again."""
        grown, used_again = [], []
        blocks, rows, uses = dict.fromkeys(DIMENSIONS, 1.0), [1, 1], [1.0, 1.0]
        windowed = WINDOW_AXIS if self.operand == "I" and self.layer.kind != "matmul" else {}
        for loops in levels:
            grow, again = 1.0, 1.0
            for dim, factor in loops:
                blocks[dim] *= factor
                if dim in windowed:
                    axis = windowed[dim]
                    outs, taps = blocks["PQ"[axis]], blocks["RS"[axis]]
                    now = _rows(self.layer, axis, int(outs), int(taps))
                    grow *= now / rows[axis]
                    again *= outs * taps / now / uses[axis]
                    rows[axis], uses[axis] = now, outs * taps / now
                elif dim in RELEVANT[self.operand]:
                    grow *= factor
                else:
                    again *= factor
            grown.append(grow)
            used_again.append(again)
        return grown, used_again

    def input_transfers(self) -> Iterator[Transfers]:
        bits = getattr(self.layer.bits, self.operand)
        for place, fan_out in enumerate(self.fan_out):
            yield Transfers(place, "rd_down", self.tiles[place] * fan_out, bits, self.times[place])
            if place + 1 < len(self.fan_out):
                yield Transfers(place, "wr_down", self.tiles[place + 1], bits, self.times[place + 1])

    def output_transfers(self) -> Iterator[Transfers]:
        for place, fan_out in enumerate(self.fan_out):
            yield from self._up_and_back(place, "wr_up", "rd_down", place, self.tiles[place] * fan_out)
            if place + 1 < len(self.fan_out):
                yield from self._up_and_back(place, "rd_up", "wr_down", place + 1, self.tiles[place + 1])

    def _up_and_back(self, place: int, up: str, back: str, boundary: int, elements: int) -> Iterator[Transfers]:
        """What goes up at a boundary comes back as often, if reduction loops run above it."""
        returned = int(self.layer.elements("O") * (self.still_to_sum[boundary] - 1)) != 0
        widths = self.layer.bits
        yield Transfers(place, up, elements, widths.O if returned else widths.F, self.times[boundary])
        if returned:
            yield Transfers(place, back, elements, widths.O, self.times[boundary])


def _rows(layer: Layer, axis: int, outs: int, taps: int) -> int:
    """Input rows under `outs` neighbouring outputs and `taps` neighbouring taps, as if without padding."""
    step, gap = layer.stride[axis], layer.dilation[axis]
    common = gcd(step, gap)
    met_again = max(0, taps - step // common) * (outs - gap // common)
    return min(layer.input_size[axis], outs * taps - met_again)


def _settled(layer: Layer, plan: MappingPlan, operand: str) -> list[int]:
    """Before which loop the PEs, then each memory, replace what they hold: loops that do not change it leave it in place."""
    idle = [dim for dim in DIMENSIONS if dim not in RELEVANT[operand] and layer.dims[dim] > 1]

    def after(cut: int) -> int:
        return next((i for i in range(cut, len(plan.loops)) if plan.loops[i][0] not in idle), len(plan.loops))

    at_pes = 0 if operand == "O" else after(0)  # a PE reads and writes its sum every cycle
    return [at_pes, *(after(cut) for cut in plan.cuts[operand]), len(plan.loops)]


def _checked(
    layer: Layer, array: SpatialArraySpec, spatial: Spatial, temporal: Temporal
) -> tuple[MappingPlan, dict[str, list[list[Lane]]]]:
    """The time loops as one order with cuts, and each operand's lanes as one list a memory with an empty one on top."""
    plan = mapping_from_json({"spatial": {}, "temporal": temporal})
    lanes: dict[str, list[list[Lane]]] = {}
    for operand in OPERANDS:
        memories = len(array.ladder(operand))
        levels = [list(level) for level in spatial.get(operand, ())]
        for what, given in (("time loops", len(temporal[operand])), ("lanes", min(len(levels), memories))):
            if given != memories:
                raise _wrong(layer, f"{given} lists of {what} for {operand}", f"{operand} has {memories} memories on {array.name}")
        for place, level in enumerate(levels):
            room = prod(array.axes[axis] for axis in _new_axes(array, operand, place))
            if not all(factor >= 1 for _, factor in level) or not prod(factor for _, factor in level) <= room:
                raise _wrong(layer, f"lanes {level} in list {place} of {operand}", f"{array.name} has {room} there")
        for dim in DIMENSIONS:
            _check_steps(layer, dim, operand, [f for level in levels for d, f in level if d == dim], plan.block(dim, len(plan.loops)))
        lanes[operand] = [*levels[:memories], []]
    return plan, lanes


def _check_steps(layer: Layer, dim: str, operand: str, factors: Sequence[float], steps: int) -> None:
    size = needed = layer.dims[dim]
    for factor in factors:
        needed = ceil(needed / factor)
    if needed != steps:
        raise _wrong(
            layer, f"{dim} = {size} takes {needed} steps over {[*factors]} lanes of {operand}", f"its time loops make {steps} steps"
        )


def _new_axes(array: SpatialArraySpec, operand: str, place: int) -> list[str]:
    """Axes the memory at `place` is the first on the operand's ladder to be shared over."""
    ladder = array.ladder(operand)
    here = array.memories[ladder[place]].shared_over if place < len(ladder) else ()
    below = array.memories[ladder[place - 1]].shared_over if place else ()
    return [axis for axis in here if axis not in below]


def levels_of(layer: Layer, array: SpatialArraySpec, along: Mapping[str, Sequence[Loop]]) -> Spatial:
    """Whole lanes asked for along each axis as ZigZag uses them: those of a dimension all at work in every step, on average."""
    mean: dict[tuple[str, str], float] = {}
    for axis, loops in along.items():
        if axis not in array.axes:
            raise _wrong(layer, f"axis {axis!r}", f"the axes of {array.name} are {', '.join(array.axes)}")
        for dim, factor in loops:
            mean[axis, dim] = mean.get((axis, dim), 1.0) * factor
    for dim, size in layer.dims.items():
        asked = [(axis, mean[axis, dim]) for axis in array.axes if (axis, dim) in mean]
        if asked:
            first = max(asked, key=lambda one: one[1])  # the largest takes the fraction, the first of equals
            before = prod(lanes for _, lanes in asked[: asked.index(first)])
            mean[first[0], dim] = size / ceil(size / (first[1] * before)) / before
    spatial: dict[str, list[list[Lane]]] = {operand: [] for operand in OPERANDS}
    for operand, levels in spatial.items():
        for place in range(len(array.ladder(operand)) + 1):
            merged: dict[str, float] = {}
            for new in _new_axes(array, operand, place):
                for (axis, dim), lanes in mean.items():
                    if axis == new:
                        merged[dim] = merged.get(dim, 1.0) * lanes
            levels.append([*merged.items()])
    return spatial


def plan_of(layer: Layer, array: SpatialArraySpec, spatial: Spatial, temporal: Temporal) -> MappingPlan:
    """The same mapping for the exact engine: whole lanes, laid along the axes in their order."""
    timed, lanes = _checked(layer, array, spatial, temporal)
    finest = max(OPERANDS, key=lambda operand: sum(map(len, lanes[operand])))
    along: dict[str, list[Loop]] = {axis: [] for axis in array.axes}
    for place, level in enumerate(lanes[finest]):
        axes = _new_axes(array, finest, place)
        for dim, mean in level:
            while axes and prod(factor for _, factor in along[axes[0]]) * ceil(mean) > array.axes[axes[0]]:
                axes.pop(0)
            if not axes:
                raise _wrong(layer, f"no axis left for {ceil(mean)} lanes of {dim}", f"the axes of {array.name} are {array.axes}")
            along[axes[0]].append((dim, ceil(mean)))
    return MappingPlan({axis: tuple(loops) for axis, loops in along.items()}, timed.loops, timed.cuts)


def read_result(row: Mapping[str, Any], array: SpatialArraySpec) -> tuple[Layer, Spatial, Temporal]:
    """One row of stored results: shape, spatial_mapping (text) and temporal_mapping, in our names and with the array's widths."""
    try:
        name = str(row.get("layer", "without a name"))
        shape = {str(key): _whole(value) for key, value in row["shape"].items()}
        dims = {_our(key): size for key, size in shape.items() if key in OUR_NAME}
        if len(dims) < sum(key in OUR_NAME for key in shape) or not all(shape.get(key, 1) for key in ("stride", "dilation")):
            raise ValueError(f"shape {shape} has a step of 0, or rows both as D and as OY")
        stated = _parse(row["spatial_mapping"])
        temporal = {op: [[(_our(d), _whole(f)) for d, f in level] for level in row["temporal_mapping"][op]] for op in OPERANDS}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise OptionError(
            "this is not a row of ZigZag results",
            why=f"{type(error).__name__}: {error}",
            do="give shape, spatial_mapping and temporal_mapping as ZigZag 3.9 states them",
        ) from error
    stride, dilation, pad = (shape.get(key, default) for key, default in (("stride", 1), ("dilation", 1), ("pad", 0)))
    size, kind = (shape.get("IY", 0), shape.get("IX", 0)), "matmul" if "D" in shape else "conv"
    layer = Layer(name, dims, (stride, stride), (dilation, dilation), (pad, pad), size, array.bits, kind)
    return layer, _with_fractions(layer, stated, temporal), temporal


def _with_fractions(layer: Layer, stated: Spatial, temporal: Temporal) -> Spatial:
    """Results state lanes without their fraction; the steps in time tell what it was, where a dimension is unrolled once."""
    steps = {dim: prod(factor for level in temporal["W"] for d, factor in level if d == dim) for dim in DIMENSIONS}
    spatial: dict[str, list[list[Lane]]] = {}
    for operand, levels in stated.items():
        spatial[operand] = [list(level) for level in levels]
        for dim, size in layer.dims.items():
            entries = [(factor, level, i) for level in spatial[operand] for i, (d, factor) in enumerate(level) if d == dim]
            whole = all(factor.is_integer() for factor, _, _ in entries)
            if not entries or not whole or prod(factor for factor, _, _ in entries) * steps[dim] == size:
                continue
            largest, level, i = max(entries, key=lambda entry: entry[0])
            mean = _mean(size, steps[dim], largest) if len(entries) == 1 or sum(factor > 1 for factor, _, _ in entries) == 1 else None
            if mean is None:
                lanes = " x ".join(f"{factor:g}" for factor, _, _ in entries)
                raise _wrong(layer, f"{dim} = {size} over {lanes} lanes of {operand}", f"no fraction left out makes it {steps[dim]} steps")
            level[i] = dim, mean
    return spatial


def _mean(size: int, steps: int, stated: float) -> float | None:
    """Lanes at work on average: `size` evenly over the steps that some whole number of lanes needs."""
    # a quotient of floats can lie just above a whole number: ZigZag then makes one step more than its lanes need
    for needed in (steps, steps - 1):
        fits = needed > 0 and int(size / needed) == stated and ceil(size / ceil(size / needed)) == needed
        if fits and ceil(size / (size / needed)) == steps:
            return size / needed
    return None


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _our(name: str) -> str:
    if name not in OUR_NAME:
        raise ValueError(f"{name!r} is not one of the dimensions {' '.join(OUR_NAME)}")
    return OUR_NAME[name]


def _parse(text: str) -> dict[str, list[list[Lane]]]:
    """`{O: [[], [(K, 32)]], W: …}` as lists."""
    bare = "".join(text.split())
    if not re.fullmatch(rf"\{{(?:{_LADDER},?)*\}}", bare):
        raise ValueError(f"spatial_mapping {text[:80]!r} is not like {{O: [[], [(K, 32)]], W: …}}")
    ladders = ((found[0], found[3:-1]) for found in re.findall(_LADDER, bare))
    return {op: [[_lane(loop) for loop in re.findall(_LOOP, level)] for level in re.findall(_LEVEL, levels)] for op, levels in ladders}


def _lane(loop: str) -> Lane:
    dim, _, factor = loop.strip("()").partition(",")
    return _our(dim), float(factor)


def _wrong(layer: Layer, what: str, why: str) -> OptionError:
    return OptionError(f"this mapping does not fit layer {layer.name}: {what}", why=why, do="correct the mapping")
