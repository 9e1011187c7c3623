"""What a chip is worth: latency, energy, area and power of the models on it.

    Problem(base, rules, workloads by batch, mapper's objective)
    Choice ──build──> SpatialArraySpec ──map_layers──> every layer mapped ──fuse──> cycles, energy ──> Evaluated

    latency_s   one pass of `batch` samples of every model, one model after another            [s]
    sample_s    time between samples at full rate: latency / batch, in a pipeline of cores the slowest stage's time / batch
    energy_j    of one sample of every model: MACs, memories (the outermost too), network, host, and leakage of the whole
                chip for as long as the pass takes (in a pipeline, for as long as the slowest stage)
    power_w     leakage + the hungriest layer's energy over its time; in a pipeline at least that of all stages together
    bound       what no mapping can beat: one MAC a PE and cycle; weights read once, and activations that cannot stay on chip

A chip that cannot hold a layer is Evaluated with the reason in `infeasible`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ....core.errors import TargetSpecError
from ....target.array import OPERANDS, SpatialArraySpec
from ....workload.graph import Workload
from ..cost import InfeasibleMappingError
from ..layer import Layer, layers_of
from ..network import NetworkMapping, map_layers
from .chip import build, describe
from .fusion import Fused, buffer_of, fuse
from .rules import Rules
from .space import Choice

SAFETY = 1 - 1e-9
"""A bound is lowered by this: sums of floats in another order may differ in their last digits."""


@dataclass(frozen=True, slots=True)
class Problem:
    """All that a chip's worth depends on, besides the choice."""

    base: SpatialArraySpec
    workloads: Mapping[int, tuple[Workload, ...]]
    """The models, by batch."""
    rules: Rules = field(default_factory=Rules)
    objective: str = "edp"
    """Of the mapper, for each layer."""

    def portable(self) -> Problem:
        """Without what cannot be sent to another process."""
        return replace(self, workloads={b: tuple(replace(w, rebatch=None) for w in each) for b, each in self.workloads.items()})

    def work_key(self, batch: int) -> str:
        """Changes with the models' layers, whatever their names."""
        text = repr([workload.ops for workload in self.workloads[batch]])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A choice and what it is worth."""

    choice: dict[str, Any]
    chip: dict[str, Any]
    area_mm2: float
    static_w: float
    latency_s: float = 0.0
    sample_s: float = 0.0
    energy_j: float = 0.0
    power_w: float = 0.0
    utilisation: float = 0.0
    kept_bytes: int = 0
    """Fused layers spare the outermost memory this many bytes a pass."""
    fusion: tuple[tuple[str, ...], ...] = ()
    """Groups of layers that hand activations on in the buffer."""
    models: tuple[dict[str, Any], ...] = ()
    infeasible: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def from_json(data: Mapping[str, Any]) -> Evaluated:
    """Read what `Evaluated.to_json` wrote, after JSON made tuples lists."""
    fusion = tuple(tuple(group) for group in data["fusion"])
    return Evaluated(**{**data, "fusion": fusion, "models": tuple(data["models"])})


@dataclass(frozen=True, slots=True)
class Pass:
    """One model on a chip."""

    network: NetworkMapping
    fused: Fused

    @property
    def cycles(self) -> int:
        return sum(layer.cycles for layer in self.fused.spent)

    @property
    def latency_s(self) -> float:
        return self.cycles / self.network.array.clock_hz.value + sum(op.seconds for op in self.network.host)

    @property
    def interval_s(self) -> float:
        """Nothing is fused in a pipeline, so the network's own interval holds."""
        return self.network.interval_s if _is_pipeline(self.network.array) else self.latency_s

    @property
    def dynamic_j(self) -> float:
        return sum(layer.dynamic_pj for layer in self.fused.spent) * 1e-12

    @property
    def energy_j(self) -> float:
        host = sum(op.energy_pj for op in self.network.host) * 1e-12
        return self.dynamic_j + host + self.network.array.static_w * self.interval_s

    @property
    def power_w(self) -> float:
        clock = self.network.array.clock_hz.value
        peak = max((layer.dynamic_pj * 1e-12 * clock / layer.cycles for layer in self.fused.spent), default=0.0)
        if _is_pipeline(self.network.array):
            peak = max(peak, self.dynamic_j / self.interval_s)
        return self.network.array.static_w + peak

    @property
    def groups(self) -> list[list[str]]:
        return self.fused.groups([layer.mapped.cost.layer.name for layer in self.network.layers])

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.network.workload.model,
            "latency_s": self.latency_s,
            "interval_s": self.interval_s,
            "energy_j": self.energy_j / self.network.workload.batch,
            "power_w": self.power_w,
            "host_s": sum(op.seconds for op in self.network.host),
            "mappings_optimal": all(layer.mapped.optimal for layer in self.network.layers),
        }


def _is_pipeline(array: SpatialArraySpec) -> bool:
    return array.cores.use == "pipeline" and array.cores.count > 1


def chip_of(problem: Problem, choice: Choice) -> SpatialArraySpec | str:
    """The chip, or why there is none."""
    try:
        return build(problem.base, choice, problem.rules)
    except TargetSpecError as error:
        return f"{error.what.partition(' in a chip')[0]}: {error.why}"


def evaluate_chip(problem: Problem, choice: Choice) -> Evaluated:
    """Map every layer, fuse, add up."""
    array = chip_of(problem, choice)
    if isinstance(array, str):
        return Evaluated(choice.to_json(), {}, 0.0, 0.0, infeasible=array)
    found = Evaluated(choice.to_json(), describe(array), array.area_mm2, array.static_w)
    try:
        passes = [_pass(workload, array, choice, problem.objective) for workload in problem.workloads[choice.batch]]
    except InfeasibleMappingError as error:
        return replace(found, infeasible=f"{error.what}: {error.why}")
    return _summed(found, passes, array, choice)


def _pass(workload: Workload, array: SpatialArraySpec, choice: Choice, objective: str) -> Pass:
    network = map_layers(workload, array, dataflow=choice.dataflow, objective=objective)
    return Pass(network, fuse(network, choice.fusion))


def _summed(found: Evaluated, passes: Sequence[Pass], array: SpatialArraySpec, choice: Choice) -> Evaluated:
    cycles = sum(one.cycles for one in passes)
    places = array.pes * array.cores.count
    return replace(
        found,
        latency_s=sum(one.latency_s for one in passes),
        sample_s=sum(one.interval_s for one in passes) / choice.batch,
        energy_j=sum(one.energy_j for one in passes) / choice.batch,
        power_w=max(one.power_w for one in passes),
        utilisation=sum(one.network.macs for one in passes) / (cycles * places) if cycles else 0.0,
        kept_bytes=sum(layer.saved_bits for one in passes for layer in one.fused.spent) // 8,
        fusion=tuple(tuple(group) for one in passes for group in one.groups),
        models=tuple(one.to_json() for one in passes),
    )


@dataclass(frozen=True, slots=True)
class Bound:
    """No mapping of the models onto this chip does better."""

    latency_s: float
    sample_s: float
    energy_j: float


def bound_of(problem: Problem, choice: Choice, array: SpatialArraySpec) -> Bound:
    """From the layers' multiplications and what must pass the outermost memory; cheap."""
    outermost = array.memories[list(array.memories)[-1]]
    ways = {op: "wr_up" if op == "O" else "rd_down" for op in OPERANDS}
    ports = {op: outermost.port_of(op, way) for op, way in ways.items()}
    pipeline = _is_pipeline(array)
    places = array.pes * (1 if pipeline else array.cores.count)
    cycles, dynamic_pj = 0.0, 0.0
    for workload in problem.workloads[choice.batch]:
        layers = _array_layers(workload, array)
        for place, layer in enumerate(layers):
            bits = _compulsory_bits(layer, array, choice.fusion, first=place == 0, last=place == len(layers) - 1)
            by_port = {port: sum(bits[op] for op in OPERANDS if ports[op] == port) for port in ports.values()}
            moving = max(total / outermost.ports[port].bits_per_cycle for port, total in by_port.items())
            cycles += layer.calls * max(layer.macs / places, moving)
            moved_pj = sum(bits[op] * outermost.energy_per_bit_pj(ways[op]) for op in OPERANDS)
            dynamic_pj += layer.calls * (layer.macs * array.mac.energy_pj.value + moved_pj)
    latency_s = cycles / array.clock_hz.value * SAFETY
    interval_s = latency_s / (array.cores.count if pipeline else 1)
    energy_j = (dynamic_pj * 1e-12 + array.static_w * interval_s) * SAFETY
    return Bound(latency_s, interval_s / choice.batch, energy_j / choice.batch)


def _compulsory_bits(layer: Layer, array: SpatialArraySpec, fusion: bool, first: bool, last: bool) -> dict[str, int]:
    """Bits of each operand that pass the outermost memory however the layer is mapped and fused."""
    bits = {"W": layer.bits.W, "I": layer.bits.I, "O": min(layer.bits.O, layer.bits.F)}
    whole = {op: layer.elements(op) * bits[op] for op in OPERANDS}
    buffer = buffer_of(array) if fusion and not _is_pipeline(array) else None
    if buffer is None:
        return whole
    room = int(array.memories[buffer].capacity_bits.value) * array.cores.count
    wide = max(layer.bits.F, layer.bits.I)  # a kept tensor is stored as it is read
    for op, at_the_end in (("I", first), ("O", last)):
        if not at_the_end and layer.elements(op) * wide <= room:
            whole[op] = 0
    return whole


def _array_layers(workload: Workload, array: SpatialArraySpec) -> list[Layer]:
    """The layers `map_layers` gives to the array."""
    found = []
    for op in workload.ops:
        layers = layers_of(op, array.bits) if op.kind != "view" else []
        found += layers if all(layer.kind in array.runs for layer in layers) else []
    return found
