"""Random layers, mappings and transform sequences, and what torch says their outputs are.

random_layer(random) ──> Layer          convolutions, grouped, depthwise, dilated, strided, padded, matmuls; odd sizes
random_plan(random, layer) ──> MappingPlan on ARRAY, factors that need not divide
random_transforms(random, nest) ──> Nest
operands(layer) ──> whole numbers small enough that every sum is exact in float32; reference(…) ──> conv2d in float64
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy
import torch

from ridgeline.core.spec import parse_spec
from ridgeline.estimate.spatial.layer import REDUCTION, Layer
from ridgeline.estimate.spatial.lowering import Nest, naive, reorder, shapes, tile, unroll, vectorise
from ridgeline.estimate.spatial.mapping import MappingPlan, check_mapping
from ridgeline.target.array import DIMENSIONS, OPERANDS, SpatialArraySpec


def toy_array() -> SpatialArraySpec:
    """4 x 3 PEs; weights in every PE, sums in every column, a buffer for inputs and sums."""
    port = {"p": {"direction": "read_write", "bits_per_cycle": 64}}
    plain: dict[str, Any] = {"capacity_bits": 1e6, "read_pj": 1.0, "write_pj": 1.0, "access_bits": 8, "ports": port}
    data = {
        "version": 1,
        "kind": "array",
        "name": "toy",
        "clock_hz": 1e9,
        "axes": {"D1": 4, "D2": 3},
        "mac": {"energy_pj": 1.0},
        "memories": {
            "rf_w": {"operands": ["W"], **plain},
            "rf_o": {"operands": ["O"], "shared_over": ["D2"], **plain},
            "glb": {"operands": ["I", "O"], "shared_over": ["D1", "D2"], **plain},
            "dram": {"operands": ["W", "I", "O"], "shared_over": ["D1", "D2"], **plain},
        },
    }
    return parse_spec(SpatialArraySpec, data, "toy.toml")


ARRAY = toy_array()


def random_layer(random: Random, number: int) -> Layer:
    """The kinds take turns, so that none is missing from a short run."""
    kind = ("conv", "grouped", "depthwise", "matmul", "dilated", "strided", "linear")[number % 7]
    dims = {"B": random.randint(1, 2), "K": random.randint(1, 11), "C": random.randint(1, 9), "P": random.randint(1, 13)}
    if kind == "matmul":
        return Layer(f"{kind}{number}", dims | {"G": random.randint(1, 3)})
    if kind == "linear":
        return Layer(f"{kind}{number}", {"K": dims["K"], "C": 4 * dims["C"]})
    dims |= {"Q": random.randint(1, 19), "R": random.randint(1, 4), "S": random.randint(1, 4)}
    if kind in ("grouped", "depthwise"):
        dims |= {"G": random.randint(2, 5)} | ({"K": random.randint(1, 2), "C": 1} if kind == "depthwise" else {})
    stride = (random.randint(1, 3), random.randint(1, 3)) if kind != "conv" else (1, 1)
    dilation = (random.randint(1, 3), random.randint(1, 3)) if kind == "dilated" else (1, 1)
    bare = Layer(f"{kind}{number}", dims, stride, dilation)
    padding, size = [], []
    for axis in (0, 1):
        reach = bare.window(axis)[0]
        padding.append(random.randint(0, min(2, (reach - 1) // 2)))
        size.append(reach - 2 * padding[-1] + random.randrange(stride[axis]))  # rows a stride skips at the end
    return replace(bare, padding=tuple(padding), input_size=tuple(size))


def random_plan(random: Random, layer: Layer) -> MappingPlan:
    """Lanes and loops drawn at random until every dimension is covered, in any order, with any cuts."""
    spatial = {}
    for axis, places in ARRAY.axes.items():
        first = random.randint(1, places)
        spatial[axis] = ((random.choice(DIMENSIONS), first), (random.choice(DIMENSIONS), random.randint(1, places // first)))
    loops = []
    for dim, size in layer.dims.items():
        reached = MappingPlan(spatial, (), {}).unrolled(dim)
        while reached < size:
            loops.append((dim, factor := random.randint(1, size)))
            reached *= factor
    random.shuffle(loops)
    cuts = {op: tuple(sorted(random.randint(0, len(loops)) for _ in ARRAY.ladder(op)[1:])) for op in OPERANDS}
    plan = MappingPlan(spatial, tuple(loops), cuts)
    check_mapping(layer, ARRAY, plan)
    return plan


def random_transforms(random: Random, nest: Nest, count: int = 5) -> Nest:
    """Splits, unrollings and orders at random, and mostly a vector at the end."""
    nest = replace(nest, transfers=())
    for _ in range(count):
        free = [loop for loop in nest.loops if loop.kind not in ("vector", "unrolled")]
        if not free:
            break
        loop = random.choice(free)
        if random.random() < 0.4:
            nest = tile(nest, loop.index, random.randint(1, loop.extent + 2))
        elif len([one for one in nest.loops if one.kind == "unrolled"]) < 3:
            nest = unroll(nest, loop.index, random.randint(1, 3), reassociate=True)
        if random.random() < 0.7:
            nest = reorder(nest, random.sample(nest.order, len(nest.loops)))
    free = [loop for loop in nest.loops if loop.kind not in ("vector", "unrolled")]
    if free and random.random() < 0.8:
        return random_block(random, nest, random.choice(free).index)
    return nest


def random_block(random: Random, nest: Nest, vector: str) -> Nest:
    """What register tiling looks like: the vector innermost, unrolled loops around it, some reductions around those, all else outside."""
    kinds = {loop.index: (loop.kind == "unrolled") * 2 + (loop.dim in REDUCTION) for loop in nest.loops}
    order = sorted(random.sample(nest.order, len(nest.loops)), key=lambda name: (name == vector, kinds[name] >= 2, kinds[name]))
    if random.random() < 0.3:
        order = [name for name in random.sample(nest.order, len(nest.loops)) if name != vector] + [vector]
    return vectorise(reorder(nest, order), vector, random.choice((2, 4, 8)), reassociate=True)


def random_order(random: Random, layer: Layer) -> Nest:
    return naive(layer, random.sample([dim.lower() for dim in DIMENSIONS], len(DIMENSIONS)))


def operands(layer: Layer, seed: int, dtype: str = "float32") -> tuple[Any, Any]:
    """(W, I) of whole numbers from -4 to 4: the largest sum here stays far below 2^24."""
    drawn = numpy.random.default_rng(seed)
    return tuple(drawn.integers(-4, 5, shapes(layer)[operand]).astype(dtype) for operand in ("W", "I"))  # type: ignore[return-value]


def convolve(layer: Layer, weights: Any, inputs: Any, dtype: torch.dtype) -> Any:
    made = torch.nn.functional.conv2d(
        torch.tensor(inputs, dtype=dtype),
        torch.tensor(weights, dtype=dtype),
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        groups=layer.dims["G"],
    )
    return made.numpy()
