"""A base array of a few PEs and networks of tiny layers: a chip takes a few hundredths of a second.

pebble_net()    conv ── relu ── conv ── linear, as capture would give it
BASE            4 PEs, a register file each, one buffer, DRAM: every constant stated, one way to unroll a layer
SPACE           200 chips of it
"""

from __future__ import annotations

from math import prod
from typing import Any

from ridgeline.estimate.spatial.codesign.evaluate import Problem
from ridgeline.estimate.spatial.codesign.space import DesignSpace
from ridgeline.target.array import SpatialArraySpec
from ridgeline.workload.graph import LoopNest, Op, Operand, Workload

ALL = ("W", "I", "O")


def port(direction: str, bits: int, word: int = 8) -> dict[str, Any]:
    return {"direction": direction, "bits_per_cycle": bits, "word_bits": word}


def memory(bits: int, pj: float, area: float, wide: int, shared: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "operands": ALL, "shared_over": shared, "capacity_bits": bits, "read_pj": pj, "write_pj": pj, "access_bits": 8,
        "area_mm2": area, "static_w": area / 100, "ports": {"read": port("read", wide), "write": port("write", wide)},
    }  # fmt: skip


AXES = ("columns", "rows")
BASE = SpatialArraySpec.model_validate(
    {
        "version": 1, "kind": "array", "name": "pebble", "clock_hz": 1e8, "axes": {"columns": 2, "rows": 2},
        "unroll": {"columns": ["K"], "rows": ["C"]},
        "bits": {"W": 8, "I": 8, "O": 16, "F": 8}, "mac": {"energy_pj": 0.3, "area_mm2": 0.001, "static_w": 1e-5},
        "memories": {
            "registers": memory(384, 0.1, 0.002, 32), "buffer": memory(16384, 1.0, 0.05, 64, AXES),
            "dram": {**memory(10**9, 100.0, 0.0, 16, AXES), "ports": {"channel": port("read_write", 16)}},
        },
        "noc": {"hop_pj": 0.05, "hop_bits": 8, "bits_per_cycle": 64},
        "host": {"ops_per_s": 1e9, "bytes_per_s": 1e9, "pj_per_op": 5.0, "pj_per_byte": 10.0},
    }
)  # fmt: skip

SPACE = DesignSpace(
    rows=(1, 2), columns=(1, 2), buffer_bits=(1024, 2048, 4096, 8192, 16384), bandwidth_bits=(8, 16, 32, 64, 128), fusion=(True, False)
)


def operand(value: str, shape: tuple[int, ...], role: str = "activations") -> Operand:
    return Operand(value, role, shape, "float32", prod(shape))  # type: ignore[arg-type]


def conv(name: str, source: str, batch: int, channels: tuple[int, int], size: int, taps: int = 1) -> Op:
    """`size` outputs each way, padded so that it keeps its size."""
    (inputs, outputs), pad = channels, taps // 2
    dims = {"B": batch, "G": 1, "K": outputs, "C": inputs, "P": size, "Q": size, "R": taps, "S": taps}
    nest = LoopNest("conv", dims, (1, 1), (pad, pad), (1, 1))
    weights = operand(f"{name}.weight", (outputs, inputs, taps, taps), "weights")
    read, made = operand(source, (batch, inputs, size, size)), operand(f"{name}.out", (batch, outputs, size, size))
    return Op(name, name, "conv", "conv2d", "float32", (read, weights), (made,), 2 * nest.macs, 2 * nest.macs, (nest,))


def linear(name: str, source: str, rows: int, depth: int, columns: int) -> Op:
    nest = LoopNest("matmul", {"B": 1, "M": rows, "N": columns, "K": depth})
    read, made = operand(source, (rows, depth)), operand(f"{name}.out", (rows, columns))
    weights = operand(f"{name}.weight", (columns, depth), "weights")
    return Op(name, name, "linear", "linear", "float32", (read, weights), (made,), 2 * nest.macs, 2 * nest.macs, (nest,))


def relu(name: str, source: Operand) -> Op:
    made = operand(f"{name}.out", source.shape)
    return Op(name, name, "pointwise", "relu", "float32", (source,), (made,), source.elements)


def pebble_net(batch: int = 1) -> Workload:
    """Two convolutions with a relu between, and a linear behind the second."""
    first = conv("first", "image", batch, (2, 4), 4)
    after = relu("after", first.outputs[0])
    second = conv("second", "after.out", batch, (4, 2), 4)
    last = linear("last", "second.out", batch, 32, 2)
    return Workload("pebble-net", batch, "float32", (first, after, second, last), "by hand")


def pebble_problem(*batches: int, base: SpatialArraySpec = BASE) -> Problem:
    return Problem(base, {batch: (pebble_net(batch),) for batch in batches or (1,)})
