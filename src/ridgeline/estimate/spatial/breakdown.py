"""Where the cycles and the energy of mapped layers go, and how near each port is to its roof.

    MappedOp ──cycle_parts──> {cause: cycles}                     adds up to its cycles
             ──energy_terms──> {(memory, operand, direction): pJ} adds up to its energy; ("mac" | "noc" | "static", "", "") for the rest
    [MappedOp] ──port_roofs──> [PortRoof]                         operations a byte through a port, against its bits a cycle
      attainable = operations a byte * bandwidth of all instances      [op/s], two operations a multiplication

Every number here is a sum over calls and cores, so layers can be added up. Ref. of the roofs: Williams, Waterman, Patterson 2009.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ...target.array import SpatialArraySpec
from .network import MappedOp

Name = TypeVar("Name", bound=Hashable)
Term = tuple[str, str, str]
VERBS = {"rd_down": "reading", "wr_up": "collecting", "wr_down": "refilling", "rd_up": "handing up"}
"""What a memory does with an operand, by direction."""


def outermost_of(array: SpatialArraySpec) -> str:
    """Name of the last memory."""
    return list(array.memories)[-1]


def cycle_parts(layer: MappedOp, array: SpatialArraySpec) -> dict[str, int]:
    """Cycles by cause, in the order they pass; their sum is `layer.cycles`."""
    time, calls = layer.mapped.cost.latency, layer.op.calls
    inside = time.on_chip + time.exposed - time.exposed_on_chip
    parts = {
        "fill": time.fill,
        "compute": time.compute,
        "exposed refills": time.exposed,
        "on-chip ports": inside - time.compute - time.exposed,
        "drain": time.drain,
    }
    whole = {name: cycles * calls for name, cycles in parts.items()}
    return {**whole, f"waiting for {outermost_of(array)}": layer.cycles - sum(whole.values())}


def energy_terms(layer: MappedOp) -> dict[Term, float]:
    """Energy by what spends it [pJ]; the sum is `layer.energy_pj`."""
    cost, times = layer.mapped.cost, layer.cores * layer.op.calls
    terms: dict[Term, float] = {(a.memory, a.operand, a.direction): a.energy_pj * times for a in cost.accesses}
    rest = {"mac": cost.energy_by_pj["mac"] * times, "noc": cost.energy_by_pj["noc"] * times, "static": layer.static_pj}
    return terms | {(name, "", ""): energy for name, energy in rest.items()}


def term_text(term: Term) -> str:
    """`sram reading W`, `mac`."""
    name, operand, direction = term
    return f"{name} {VERBS[direction]} {operand}" if operand else name


def energy_by_part(layer: MappedOp) -> dict[str, float]:
    """Energy by memory, and of arithmetic, network and leakage [pJ]."""
    own = {name: energy * layer.cores * layer.op.calls for name, energy in layer.mapped.cost.energy_by_pj.items()}
    return own | {"static": layer.static_pj}


def total_of(parts: Iterable[Mapping[Name, float]]) -> dict[Name, float]:
    """Sums by name, in the order names turn up."""
    whole: dict[Name, float] = {}
    for part in parts:
        for name, value in part.items():
            whole[name] = whole.get(name, 0.0) + value
    return whole


@dataclass(frozen=True, slots=True)
class PortRoof:
    """One port under its roof."""

    memory: str
    port: str
    bytes: float
    """Moved through it, all instances together."""
    operations: int
    seconds: float
    bandwidth_bps: float
    """Bytes a second of all instances."""
    busy: float
    """Share of the cycles its busiest instance moves something."""

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.operations / self.bytes

    @property
    def attainable(self) -> float:
        """Operations a second if nothing but this port limited them."""
        return self.intensity * self.bandwidth_bps

    @property
    def achieved(self) -> float:
        return self.operations / self.seconds

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "intensity": self.intensity, "attainable_ops": self.attainable, "achieved_ops": self.achieved}


def peak_ops(array: SpatialArraySpec) -> float:
    """Operations a second with every PE of the cores that share a layer at work."""
    return 2 * array.pes * array.clock_hz.value * sharing_cores(array)


def port_roofs(layers: Sequence[MappedOp], array: SpatialArraySpec) -> list[PortRoof]:
    """Every port that moves anything, nearest memory first."""
    outermost, clock = outermost_of(array), array.clock_hz.value
    moved: dict[tuple[str, str], float] = {}
    busy: dict[tuple[str, str], int] = {}
    for layer in layers:
        cost, calls = layer.mapped.cost, layer.op.calls
        for access in cost.accesses:
            key = access.memory, access.port
            moved[key] = moved.get(key, 0.0) + access.moved_bits / 8 * layer.cores * calls
            # the cores take turns at the ports of the memory they share
            busy[key] = busy.get(key, 0) + access.cycles * calls * (layer.cores if access.memory == outermost else 1)
    cycles, operations = sum(layer.cycles for layer in layers), 2 * sum(layer.macs for layer in layers)
    order = {name: place for place, name in enumerate(array.memories)}
    found = []
    for (memory, port), size in sorted(moved.items(), key=lambda item: order[item[0][0]]):
        if size:
            instances = array.instances(memory) * (1 if memory == outermost else sharing_cores(array))
            bandwidth = array.memories[memory].ports[port].bits_per_cycle / 8 * clock * instances
            found.append(PortRoof(memory, port, size, operations, cycles / clock, bandwidth, busy[memory, port] / cycles))
    return found


def level_roofs(layers: Sequence[MappedOp], array: SpatialArraySpec) -> list[PortRoof]:
    """Of each memory the port that is busiest, nearest memory first: the roof that memory puts over these layers."""
    best: dict[str, PortRoof] = {}
    for roof in port_roofs(layers, array):
        if roof.memory not in best or roof.busy > best[roof.memory].busy:
            best[roof.memory] = roof
    return list(best.values())


def bottleneck_of(layer: MappedOp, array: SpatialArraySpec) -> str:
    """What limits a layer; cores that wait for each other at the memory they share are limited by its busiest port."""
    cost = layer.mapped.cost
    if layer.cycles == cost.cycles * layer.op.calls:
        return cost.bottleneck
    shared = {name: cycles for name, cycles in cost.port_cycles.items() if name.startswith(f"{outermost_of(array)}.")}
    return max(shared, key=lambda name: shared[name])


def bottlenecks(layers: Iterable[MappedOp], array: SpatialArraySpec) -> dict[str, int]:
    """Cycles of layers by what limits them, most first."""
    spent: dict[str, int] = {}
    for layer in layers:
        name = bottleneck_of(layer, array)
        spent[name] = spent.get(name, 0) + layer.cycles
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def sharing_cores(array: SpatialArraySpec) -> int:
    """Cores that can work on one layer together."""
    return array.cores.count if array.cores.use == "split" else 1
