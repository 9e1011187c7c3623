"""Energy and cycles of one mapping, from its exact counts.

energy  = MACs * mac + words * word bits * energy a bit (every memory, the outermost always) + hops + leakage * time    [pJ]
cycles  = see `latency`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import takewhile
from math import prod
from typing import Any

import numpy as np

from ...core.errors import OptionError
from ...target.array import DIMENSIONS, DIRECTIONS, OPERANDS, SpatialArraySpec
from .counts import Blocks, Flow, Unrolled, boundary_flows, returned_partials
from .latency import Latency, Refill, latency, noc_cycles, one, refills
from .layer import REDUCTION, RELEVANT, Layer
from .mapping import MappingPlan, check_mapping
from .tiles import Slide

Flows = dict[tuple[str, int], dict[tuple[str, str], Flow]]
"""(operand, place of the memory above on its ladder) -> (memory, direction) -> flow."""


WINDOW = ("P", "Q", "R", "S")
REPORTED_ACCESS = ("memory", "operand", "direction", "words", "word_bits", "elements", "energy_pj")


class InfeasibleMappingError(OptionError):
    """A layer, or a mapping of it, that does not fit into a memory."""


@dataclass(frozen=True, slots=True)
class Access:
    """What one operand does at one memory, in one direction."""

    memory: str
    operand: str
    direction: str
    port: str
    words: int
    word_bits: int
    elements: int
    transfers: int
    cycles: int
    energy_pj: float

    @property
    def moved_bits(self) -> int:
        return self.words * self.word_bits


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Everything a mapping costs."""

    layer: Layer
    plan: MappingPlan
    accesses: tuple[Access, ...]
    refills: tuple[Refill, ...]
    energy_by_pj: Mapping[str, float]
    latency: Latency
    port_cycles: Mapping[str, int]
    utilisation: float
    """Multiplications done, of those all PEs could do in the cycles it takes."""
    seconds: float

    @property
    def cycles(self) -> int:
        return self.latency.cycles

    @property
    def spatial_utilisation(self) -> float:
        """The same while computing: idle PEs only."""
        return min(1.0, self.utilisation * self.cycles / self.latency.compute)

    @property
    def energy_pj(self) -> float:
        return sum(self.energy_by_pj.values())

    @property
    def edp(self) -> float:
        """Energy-delay product [pJ cycles]."""
        return self.energy_pj * self.cycles

    @property
    def limits(self) -> dict[str, int]:
        """Cycles each part needs by itself; the largest is the bottleneck."""
        time = self.latency
        waiting = {"exposed refills": time.compute + time.exposed} if time.exposed > time.compute // 10 else {}
        return {"compute": time.compute, **waiting, **self.port_cycles, "fill and drain": time.fill + time.drain}

    @property
    def bottleneck(self) -> str:
        limits = self.limits
        return max(limits, key=lambda name: limits[name])  # the first of equals: compute before what merely keeps up with it

    def words(self, memory: str, operand: str, direction: str) -> int:
        return next((a.words for a in self.accesses if (a.memory, a.operand, a.direction) == (memory, operand, direction)), 0)

    def objective(self, name: str) -> float:
        return {"energy": self.energy_pj, "latency": float(self.cycles), "edp": self.edp}[name]

    def to_json(self) -> dict[str, Any]:
        return {
            "layer": self.layer.name,
            "energy_pj": self.energy_pj,
            "energy_by_pj": dict(self.energy_by_pj),
            "cycles": self.cycles,
            "cycles_by": asdict(self.latency),
            "port_cycles": dict(self.port_cycles),
            "seconds": self.seconds,
            "utilisation": self.utilisation,
            "spatial_utilisation": self.spatial_utilisation,
            "bottleneck": self.bottleneck,
            "mapping": self.plan.to_json(),
            "accesses": [{name: getattr(a, name) for name in REPORTED_ACCESS} for a in self.accesses],
            "tiles": [asdict(r) for r in self.refills],
        }


def evaluate(layer: Layer, array: SpatialArraySpec, plan: MappingPlan, unrolled: Unrolled | None = None) -> LayerCost:
    """Exact cost of a mapping; raises if it is malformed or a tile does not fit. `unrolled`: that of one with the same unrolling."""
    check_mapping(layer, array, plan)
    unrolled = unrolled or Unrolled(layer, array, plan.spatial)
    points = {op: boundary_points(unrolled, plan, op) for op in OPERANDS}
    tiles = tile_bits(unrolled, points)
    check_capacity(layer, array, tiles)
    flows: Flows = {(op, place): found for op in OPERANDS for place, found in enumerate(_flows(unrolled, plan, op, points[op]))}
    accesses = _accesses(array, flows)
    hops_bits, injected_bits = _network(unrolled, points, flows)
    rows = refills(unrolled, points, tiles, {(a.memory, a.operand, a.direction): (a.port, a.cycles, a.elements) for a in accesses})
    ports = _port_cycles(accesses) | ({"noc": noc_cycles(unrolled, injected_bits)} if array.noc.bits_per_cycle else {})
    time = latency(unrolled, points, rows, ports)
    energy = _energy(unrolled, accesses, hops_bits, time.cycles)
    return LayerCost(
        layer, plan, accesses, rows, energy, time, ports, layer.macs / (time.cycles * array.pes), time.cycles / array.clock_hz.value
    )


def boundary_points(unrolled: Unrolled, plan: MappingPlan, operand: str) -> list[Blocks]:
    """Blocks at each boundary's refill position, PEs first."""
    first = 0 if operand == "O" else plan.refill_position(operand, 0)  # a PE adds into O every cycle
    positions = [first, *(plan.refill_position(operand, cut) for cut in plan.cuts[operand])]
    return [{d: np.array([plan.block(d, pos)]) for d in DIMENSIONS} for pos in positions]


def _flows(unrolled: Unrolled, plan: MappingPlan, operand: str, points: list[Blocks]) -> list[dict[tuple[str, str], Flow]]:
    back = returned_partials(unrolled, points) if operand == "O" else [None] * len(points)
    slides = [sliding(unrolled.array, plan, operand, place) for place in range(len(points))]
    return [boundary_flows(unrolled, operand, place, blocks, back[place], slides[place]) for place, blocks in enumerate(points)]


def sliding(array: SpatialArraySpec, plan: MappingPlan, operand: str, place: int) -> Slide | None:
    """How a memory that streams inputs moves on: along the loop its refill sits in, if that is over P, Q, R or S."""
    if operand != "I" or place == 0 or array.memories[array.ladder("I")[place - 1]].refill != "stream":
        return None
    above = [loop for loop in plan.loops[plan.refill_position("I", plan.cuts["I"][place - 1]) :] if loop[1] > 1]
    if not above or above[0][0] not in WINDOW:
        return None
    same = takewhile(lambda loop: loop[0] == above[0][0], above)
    return Slide(above[0][0], prod(factor for _, factor in same))


def tile_bits(unrolled: Unrolled, points: Mapping[str, list[Blocks]]) -> dict[tuple[str, str], int]:
    """{(memory, operand): bits of the largest tile an instance holds}, outermost memories holding the whole operand."""
    array, widths, bits = unrolled.array, unrolled.layer.bits, {}
    for operand in OPERANDS:
        ladder = array.ladder(operand)
        for place, name in enumerate(ladder):
            last = place == len(ladder) - 1
            elements = (
                unrolled.layer.elements(operand)
                if last
                else one(unrolled.largest(operand, points[operand][place + 1], array.memories[name].shared_over))
            )
            width = getattr(widths, operand)
            if operand == "O" and place and one(unrolled.count(REDUCTION, points["O"][place])) == 1:
                width = widths.F  # only finished outputs arrive here
            bits[name, operand] = elements * width
    return bits


def check_capacity(layer: Layer, array: SpatialArraySpec, tiles: Mapping[tuple[str, str], int]) -> None:
    """Raise naming the memory and the bytes over."""
    for name, memory in array.memories.items():
        used = {op: tiles[name, op] for op in memory.operands}
        over = sum(used.values()) - int(memory.capacity_bits.value)
        if over > 0:
            parts = " + ".join(f"{op} {bits // 8} B" for op, bits in used.items())
            raise InfeasibleMappingError(
                f"layer {layer.name} needs {-(-over // 8)} B more than memory {name} of {array.name} has",
                why=f"its tiles take {parts}; capacity is {int(memory.capacity_bits.value) // 8} B",
                do=f"choose smaller tiles, or give {name} more room",
            )


def _accesses(array: SpatialArraySpec, flows: Mapping[tuple[str, int], Mapping[tuple[str, str], Flow]]) -> tuple[Access, ...]:
    found: dict[tuple[str, str, str], Access] = {}
    for (operand, _), at_boundary in flows.items():
        for (name, direction), flow in at_boundary.items():
            memory = array.memories[name]
            port = memory.port_of(operand, direction)
            words, granule = one(flow.words), memory.ports[port].granule
            energy = words * granule * memory.energy_per_bit_pj(direction)
            elements, transfers, cycles = (one(values) for values in (flow.elements, flow.transfers, flow.cycles))
            found[name, operand, direction] = Access(name, operand, direction, port, words, granule, elements, transfers, cycles, energy)
    order = {name: i for i, name in enumerate(array.memories)}
    return tuple(sorted(found.values(), key=lambda a: (order[a.memory], OPERANDS.index(a.operand), DIRECTIONS.index(a.direction))))


def crosses_noc(array: SpatialArraySpec, operand: str, place: int) -> bool:
    """Whether the boundary below memory `place` spreads words over an axis."""
    ladder = array.ladder(operand)
    below = set(array.memories[ladder[place - 1]].shared_over) if place else set()
    return bool(set(array.memories[ladder[place]].shared_over) - below)


def noc_traffic(
    unrolled: Unrolled, operand: str, place: int, blocks: Blocks, at_boundary: Mapping[tuple[str, str], Flow]
) -> tuple[Any, Any]:
    """(deliveries in bits, injected bits) of a boundary that crosses the NoC: one hop a word and place it reaches."""
    ladder = unrolled.array.ladder(operand)
    above, below = ladder[place], ladder[place - 1] if place else None
    injected = sum((flow.elements * flow.bits for (name, _), flow in at_boundary.items() if name == above), np.zeros(1, np.int64))
    if below:
        return sum((flow.elements * flow.bits for (name, _), flow in at_boundary.items() if name == below), np.zeros(1, np.int64)), injected
    others = [d for d in DIMENSIONS if d not in RELEVANT[operand]]
    bits = getattr(unrolled.layer.bits, operand)
    each_pe = unrolled.flow(operand, blocks, above, "rd_down", None, bits).elements * unrolled.active(others, blocks, ())
    back = at_boundary[above, "rd_down"].elements if operand == "O" else 0  # what returns goes to one PE of those added up
    return (each_pe + back) * bits, injected


def _network(unrolled: Unrolled, points: Mapping[str, list[Blocks]], flows: Flows) -> tuple[int, int]:
    """(bits times places reached, bits put in) over all boundaries that cross the NoC."""
    crossing = [(op, place) for op, place in flows if crosses_noc(unrolled.array, op, place)]
    both = [noc_traffic(unrolled, op, place, points[op][place], flows[op, place]) for op, place in crossing]
    return sum(one(hops) for hops, _ in both), sum(one(injected) for _, injected in both)


def _energy(unrolled: Unrolled, accesses: tuple[Access, ...], hops_bits: int, cycles: int) -> dict[str, float]:
    array = unrolled.array
    energy = {"mac": unrolled.layer.macs * array.mac.energy_pj.value}
    for access in accesses:
        energy[access.memory] = energy.get(access.memory, 0.0) + access.energy_pj
    energy["noc"] = hops_bits / array.noc.hop_bits * array.noc.hop_pj.value
    energy["static"] = array.static_w * cycles / array.clock_hz.value * 1e12
    return energy


def _port_cycles(accesses: tuple[Access, ...]) -> dict[str, int]:
    busy: dict[str, int] = {}
    for access in accesses:
        name = f"{access.memory}.{access.port}"
        busy[name] = busy.get(name, 0) + access.cycles
    return busy
