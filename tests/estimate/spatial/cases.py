"""Random small layers, arrays and mappings, as crooked as the formats allow.

    random_case(random.Random(seed)) ──> Case(layer, array, plan)      for bulk runs
    cases()                          ──> hypothesis strategy of the same; every draw goes through hypothesis, so it shrinks

What turns up: groups, strides, dilations, padding, inputs larger than the window; one to three axes; ladders of one to four
memories, private or shared, by one operand or several, with ports of every width; several dimensions on an axis, one
dimension on several axes, axes not filled, lanes past the edge; dimensions split into several interleaved loops that do not
divide, overshoot or run once; uneven cuts; inputs that slide: taps inside a tile, outputs in the loop above it. Every draw takes
its simplest value at its lowest, and every plan passes check_mapping.
"""

from __future__ import annotations

from math import prod
from random import Random
from typing import Any, NamedTuple

from hypothesis import strategies as st

from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.mapping import Loop, MappingPlan
from ridgeline.target.array import DIMENSIONS, OPERANDS, OperandBits, SpatialArraySpec

MOST_MACS = 400
MOST_MEMORIES_BELOW = 3  # of one operand, below the outermost one
AXES = ("x", "y", "z")
GRANULES = (8, 16, 24, 32, 64, 128)
STREAMS = {"read": ("rd_down", "rd_up"), "write": ("wr_up", "wr_down")}
TAPS = {"P": "R", "Q": "S"}


class Case(NamedTuple):
    layer: Layer
    array: SpatialArraySpec
    plan: MappingPlan


def cases(most_macs: int = MOST_MACS) -> st.SearchStrategy[Case]:
    return st.randoms(use_true_random=False).map(lambda random: random_case(random, most_macs))


def random_case(random: Random, most_macs: int = MOST_MACS) -> Case:
    bits = OperandBits(W=random.choice((8, 4, 16)), I=random.choice((8, 4, 16)), O=random.choice((16, 24, 32)), F=random.choice((8, 16)))
    window = random.choice("PQ") if happens(random, 2, 5) else ""
    layer = random_layer(random, bits, most_macs, window)
    array = random_array(random, bits)
    return Case(layer, array, random_plan(random, layer, array, window))


def happens(random: Random, times: int, out_of: int) -> bool:
    """True so many times out of so many; shrinks to False."""
    return random.randint(1, out_of) > out_of - times


def random_layer(random: Random, bits: OperandBits, most_macs: int = MOST_MACS, window: str = "") -> Layer:
    """With `window` (P or Q), several outputs and taps along it wherever there is room for them."""
    sizes, left = dict.fromkeys(DIMENSIONS, 1), random.randint(1, most_macs)
    order = list(DIMENSIONS)
    random.shuffle(order)
    wanted = (window, TAPS.get(window))
    order.sort(key=lambda dim: dim not in wanted)
    for dim in order:
        sizes[dim] = random.randint(min(left, 2 if dim in wanted else 1), min(left, 3 if dim in "BG" else 7))
        left //= sizes[dim]
    stride, dilation, padding = (tuple(random.randint(low, high) for _ in "yx") for low, high in ((1, 3), (1, 2), (0, 2)))
    layer = Layer("random", sizes, stride, dilation, padding, bits=bits)  # type: ignore[arg-type]
    if not happens(random, 1, 3):
        return layer
    larger = tuple(size + random.randint(0, 2) for size in layer.input_size)
    return Layer("random", sizes, stride, dilation, padding, larger, bits=bits)  # type: ignore[arg-type]


def random_array(random: Random, bits: OperandBits) -> SpatialArraySpec:
    axes = {axis: random.randint(1, 4) for axis in AXES[: random.randint(1, len(AXES))]}
    memories: dict[str, dict[str, Any]] = {}
    shared: dict[str, set[str]] = {operand: set() for operand in OPERANDS}
    room = {operand: random.randint(0, MOST_MEMORIES_BELOW) for operand in OPERANDS}
    while any(room.values()):
        open_to = [operand for operand in OPERANDS if room[operand]]
        held = [operand for operand in open_to if happens(random, 1, 2)] or [random.choice(open_to)]
        over = set().union(*(shared[operand] for operand in held)) | {axis for axis in axes if happens(random, 1, 3)}
        memories[f"m{len(memories)}"] = random_memory(random, held, [axis for axis in axes if axis in over])
        for operand in held:
            room[operand] -= 1
            shared[operand] = over
    memories["outermost"] = random_memory(random, list(OPERANDS), list(axes))
    return small_array(axes, memories, bits, noc=random.choice(({}, {"hop_pj": 0.5, "hop_bits": 8}, {"bits_per_cycle": 32, "hop_pj": 1.0})))


def random_memory(random: Random, operands: list[str], shared_over: list[str]) -> dict[str, Any]:
    ports = {"all": random_port(random, "read_write")}
    if happens(random, 1, 2):
        ports = {"in": random_port(random, "write"), "out": random_port(random, "read")}
    for way, directions in STREAMS.items():
        for direction in directions:
            named = [f"{operand} {direction}" for operand in operands if happens(random, 1, 4)]
            if named:
                ports[direction] = random_port(random, way) | {"carries": tuple(named)}
    refill = random.choice(("double", "single", "stream", "stream"))
    return memory(operands, shared_over, ports=ports, refill=refill, latency_cycles=random.randint(0, 3))


def random_port(random: Random, direction: str) -> dict[str, Any]:
    granule = random.choice(GRANULES)
    width = granule * random.randint(1, 4)
    return {"direction": direction, "bits_per_cycle": width} | ({"word_bits": granule} if width > granule else {})


def memory(operands: Any, shared_over: Any = (), granule: int = 8, **more: Any) -> dict[str, Any]:
    """The fields of an ArrayMemory: room for anything, one port unless given, energies of no importance."""
    port = {"direction": "read_write", "bits_per_cycle": granule}
    data = {"operands": tuple(operands), "shared_over": tuple(shared_over), "capacity_bits": 1e9, "access_bits": 8}
    return data | {"read_pj": 1.0, "write_pj": 1.0, "ports": {"all": port}} | more


def small_array(
    axes: dict[str, int], memories: dict[str, dict[str, Any]], bits: OperandBits | None = None, **more: Any
) -> SpatialArraySpec:
    data = {"version": 1, "kind": "array", "name": "small", "clock_hz": 1e9, "axes": axes, "mac": {"energy_pj": 1.0}, "memories": memories}
    return SpatialArraySpec.model_validate(data | {"bits": bits or OperandBits()} | more)


def random_plan(random: Random, layer: Layer, array: SpatialArraySpec, window: str = "") -> MappingPlan:
    """With `window` (P or Q), its taps and some other loops first, then one over its outputs, and most cuts of I between the two."""
    worth = [dim for dim in DIMENSIONS if layer.dims[dim] > 1]
    spatial: dict[str, tuple[Loop, ...]] = {}
    for axis, size in array.axes.items():
        # now and then a dimension of size 1 is unrolled too: all its lanes but the first lie past the edge
        chosen = random_unrolling(random, size, list(DIMENSIONS) if happens(random, 1, 8) or not worth else worth)
        if chosen or happens(random, 1, 2):
            spatial[axis] = chosen
    unrolled = {dim: prod(factor for loops in spatial.values() for d, factor in loops if d == dim) for dim in DIMENSIONS}
    loops = [(dim, factor) for dim in DIMENSIONS for factor in random_factors(random, -(-layer.dims[dim] // unrolled[dim]))]
    random.shuffle(loops)
    cuts = {operand: tuple(sorted(random.randint(0, len(loops)) for _ in array.ladder(operand)[1:])) for operand in OPERANDS}
    if window:
        inside = {dim: dim == TAPS[window] or (dim != window and happens(random, 1, 3)) for dim in DIMENSIONS}
        first = next((i for i, (dim, factor) in enumerate(loops) if dim == window and factor > 1), 0)
        loops = sorted([loops[first], *loops[:first], *loops[first + 1 :]] if loops else [], key=lambda loop: not inside[loop[0]])
        between = sum(inside[dim] for dim, _ in loops)
        cuts["I"] = tuple(sorted(between if happens(random, 3, 4) else cut for cut in cuts["I"]))
    return MappingPlan(spatial, tuple(loops), cuts)


def random_unrolling(random: Random, size: int, dims: list[str]) -> tuple[Loop, ...]:
    found: list[Loop] = []
    while size > 1 and happens(random, 3, 4):
        factor = random.randint(1, size)
        found.append((random.choice(dims), factor))
        size //= factor
    return tuple(found)


def random_factors(random: Random, needed: int) -> list[int]:
    """Loop factors whose product is at least `needed`: they need not divide, may overshoot, and may be 1."""
    factors: list[int] = []
    while needed > 1 and happens(random, 1, 2):
        factors.append(random.randint(1, needed))
        needed = -(-needed // factors[-1])
    if needed > 1:
        factors.append(needed)
    if happens(random, 1, 6):
        factors.append(random.randint(1, 3))  # a loop nobody needs: overshoots when more than 1
    elif factors and happens(random, 1, 6):
        factors[-1] += random.randint(1, 2)
    random.shuffle(factors)
    return factors
