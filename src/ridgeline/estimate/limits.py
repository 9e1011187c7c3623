"""What no implementation can beat: the parts of one op's time on a processor.

    Op, ProcessorSpec ──> Parts(compute_s, memory_s by level, power_s, roof_flops, the unit and dtype used)
      compute_s = FLOPs / (peak of the best unit for this op and dtype x share of its tiles that hold work)
      memory_s[level] = bytes that level delivers / its bandwidth
      power_s = energy / (power limit − idle power)                        where the spec has energies
    limit_s = largest part + (1 − overlap) · the other parts

The best unit is the one that finishes first: a tensor core raises the ceiling for what fits it and never lowers it.
Ref: Williams, Waterman, Patterson 2009 (roofline); Choi 2013 (power roof).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ..core.dtypes import STAND_INS
from ..target.spec import ComputeUnit, ProcessorSpec
from ..workload.graph import Op
from .traffic import Traffic, level_traffic

SPLIT_K = 256  # a reduction is split over idle copies only in pieces at least this long


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one op's time, before efficiency, communication and dispatch."""

    compute_s: float
    memory_s: dict[str, float]
    power_s: float
    limit_s: float
    roof_flops: float
    unit: str
    computed_in: str
    utilisation: float
    traffic: Traffic
    energy_j: float | None

    @property
    def slowest_level(self) -> str:
        return max(self.memory_s, key=lambda level: self.memory_s[level])

    @property
    def worst_memory_s(self) -> float:
        return max(self.memory_s.values(), default=0.0)


def parts_of(op: Op, spec: ProcessorSpec, distances: tuple[float, ...] | None = None, sparse: bool = False) -> Parts:
    """Place one op under the roofs of a processor."""
    traffic = level_traffic(op, spec, distances)
    unit, dtype, peak, utilisation = best_unit(op, spec)
    if sparse and op.loops and any(o.role == "weights" for o in op.inputs):
        peak *= spec.units[unit].sparse_speedup
    compute_s = op.flops / (peak * utilisation)
    memory_s = {level: traffic.bytes[level] / memory.bandwidth_bps.value for level, memory in spec.memories.items()}
    energy_j = dynamic_energy(op, spec, dtype, traffic)
    power_s = energy_j / (spec.power.limit_w.value - spec.power.idle_w.value) if spec.power and energy_j is not None else 0.0
    pieces = [compute_s, power_s, *memory_s.values()]
    largest = max(pieces)
    limit_s = largest + (1.0 - spec.overlap.value) * (sum(pieces) - largest)
    attainable = [peak, *(op.flops / s for s in memory_s.values() if s > 0), *([op.flops / power_s] if power_s > 0 else [])]
    roof = min(attainable) if op.flops else 0.0
    return Parts(compute_s, memory_s, power_s, limit_s, roof, unit, dtype, utilisation, traffic, energy_j)


def best_unit(op: Op, spec: ProcessorSpec) -> tuple[str, str, float, float]:
    """(unit, dtype it computes in, peak, share of its tiles holding work) of the unit that would finish first."""
    for dtype in (op.dtype, *STAND_INS.get(op.dtype, ())):
        offers = [
            (unit.peak_flops[dtype].value * utilisation_of(op, unit), name)
            for name, unit in spec.units.items()
            if unit.serves_kind(op.kind) and dtype in unit.peak_flops
        ]
        if offers:
            name = max(offers)[1]
            unit = spec.units[name]
            return name, dtype, unit.peak_flops[dtype].value, utilisation_of(op, unit)
    name, dtype, rate = spec.peak(op.kind, op.dtype)
    return name, dtype, rate, utilisation_of(op, spec.units[name])


def utilisation_of(op: Op, unit: ComputeUnit) -> float:
    """Share of the unit's work that is useful: edge tiles are padded, the last wave leaves copies idle."""
    if not op.loops or not unit.tiles:
        return 1.0
    return max(_tile_utilisation(op, tile, unit.copies) for tile in unit.tiles)


def _tile_utilisation(op: Op, tile: tuple[int, int], copies: int) -> float:
    useful = spent = 0.0
    for loop in op.loops:
        batch, m, n, k = loop.as_matmul()
        if not batch * m * n * k:
            continue
        rows, columns = ceil(m / tile[0]), ceil(n / tile[1])
        tiles = batch * rows * columns * max(min(k // SPLIT_K, copies // max(batch * rows * columns, 1)), 1)
        padded = batch * rows * tile[0] * columns * tile[1] * k
        waves = ceil(tiles / copies)
        useful += batch * m * n * k
        spent += padded * (waves * copies / tiles)
    return useful / spent if spent else 1.0


def dynamic_energy(op: Op, spec: ProcessorSpec, dtype: str, traffic: Traffic) -> float | None:
    """Joules of arithmetic and data movement; None where the spec has no energies."""
    power = spec.power
    if power is None or not power.energy_j_per_flop:
        return None
    per_flop = power.energy_j_per_flop.get(dtype) or max(power.energy_j_per_flop.values(), key=lambda c: c.value)
    moved = sum(traffic.bytes[name] * memory.energy_j_per_byte.value for name, memory in spec.memories.items() if memory.energy_j_per_byte)
    return op.flops * per_flop.value + moved
