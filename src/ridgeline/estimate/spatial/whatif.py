"""What a change to the array would bring: the change is made and the layers are mapped again.

    NetworkMapping ──heaviest shapes──> ops ──each change──> map_layers on the changed array ──> ArrayAdvice
      changes      a memory twice as large, the outermost memory's ports twice as wide, another dataflow, half the bits, twice the PEs
      gain         of the objective, for the whole pass: layers that were not mapped again, and the host, count as they were

Distinct shapes are mapped again, the heaviest first, until they make up COVERED of the pass or MOST_SHAPES are taken; every advice
says which. Costs a search a shape and change, of which none is done twice. A change that gains less than 2 % is left out.
Not modelled: that a larger memory takes more energy a word, and that a narrower multiplier takes less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...core.errors import RidgelineError
from ...core.profile import Advice
from ...core.spec import Constant
from ...target.array import DATAFLOWS, ArrayMemory, OperandBits, SpatialArraySpec
from .breakdown import outermost_of
from .layer import layers_of
from .network import MappedOp, NetworkMapping, Progress, map_layers

LEAST_GAIN = 1.02
COVERED = 0.5
MOST_SHAPES = 2
NAMED = 3
MOST_PES = 65536  # along one axis, as the target file allows
Change = tuple[str, str, SpatialArraySpec, str]
"""Its name, what it means, the changed array, the dataflow to map with."""


@dataclass(frozen=True, slots=True)
class ArrayAdvice(Advice):
    """Advice that may pay in energy as well as in time."""

    energy_gain: float = 1.0
    """Energy before over energy after."""
    before_pj: float = 0.0
    after_pj: float = 0.0
    area_ratio: float = 1.0
    """Area after over area before; 1 where the file states none."""
    basis: str = ""
    """Which layers were mapped again."""

    @property
    def energy_text(self) -> str:
        gain = self.energy_gain
        return "the same energy" if abs(gain - 1) < 0.005 else f"{gain:.2f}x less energy" if gain > 1 else f"{1 / gain:.2f}x more energy"

    def gain(self, objective: str) -> float:
        speed, energy = self.predicted_speedup, self.energy_gain
        return {"latency": speed, "energy": energy, "edp": speed * energy}[objective]


def advise_on_array(network: NetworkMapping, progress: Progress | None = None) -> list[ArrayAdvice]:
    """What would help this network on this array, best first by its objective; empty where nothing would."""
    chosen, share = heaviest(network)
    if not chosen:
        return []
    names, basis = {layer.op.name for layer in chosen}, _basis(chosen, share, network)
    part = replace(network.workload, ops=tuple(op for op in network.workload.ops if op.name in names))
    found = []
    for name, detail, array, dataflow in changes(network):
        if progress:
            progress(name)
        try:
            after = map_layers(part, array, dataflow=dataflow, objective=network.objective)
        except RidgelineError:
            continue  # a change that does not fit this network is no advice
        advice = replace(_advice(name, detail, network, chosen, after), basis=basis)
        if advice.gain(network.objective) >= LEAST_GAIN:
            found.append(advice)
    return sorted(found, key=lambda advice: -advice.gain(network.objective))


def _advice(name: str, detail: str, network: NetworkMapping, chosen: Sequence[MappedOp], after: NetworkMapping) -> ArrayAdvice:
    clock = network.array.clock_hz.value
    before_s, before_pj = network.seconds, network.energy_pj
    after_s = before_s - sum(layer.cycles for layer in chosen) / clock + after.cycles / after.array.clock_hz.value
    after_pj = before_pj - sum(layer.energy_pj for layer in chosen) + sum(layer.energy_pj for layer in after.layers)
    area = after.array.area_mm2 / network.array.area_mm2 if network.array.area_mm2 else 1.0
    return ArrayAdvice(
        change=name,
        predicted_speedup=before_s / after_s,
        next_limit=_limit(after),
        detail=detail,
        before_s=before_s,
        after_s=after_s,
        energy_gain=before_pj / after_pj,
        before_pj=before_pj,
        after_pj=after_pj,
        area_ratio=area,
    )


def _limit(after: NetworkMapping) -> str:
    """What binds the layer that takes longest now."""
    slowest = max(after.layers, key=lambda layer: layer.cycles)
    name, needed = slowest.limit
    return f"{name} ({needed:,} of {slowest.cycles // slowest.op.calls:,} cycles of {slowest.mapped.cost.layer.name})"


def heaviest(network: NetworkMapping) -> tuple[list[MappedOp], float]:
    """(layers of the heaviest shapes, their share of the objective)."""
    groups: dict[str, list[MappedOp]] = {}
    shape_of = {layer.op.name: _shape(layer, network.array.bits) for layer in network.layers}
    for layer in network.layers:
        groups.setdefault(shape_of[layer.op.name], []).append(layer)
    weights = {shape: sum(_share(layer, network) for layer in members) for shape, members in groups.items()}
    chosen: list[MappedOp] = []
    covered = 0.0
    for shape in sorted(groups, key=lambda name: -weights[name])[:MOST_SHAPES]:
        if covered < COVERED:
            chosen += groups[shape]
            covered += weights[shape]
    return chosen, min(1.0, covered)


def _shape(layer: MappedOp, bits: OperandBits) -> str:
    """The same for ops whose loop nests are the same."""
    return str([replace(nest, name="", calls=1).to_json() for nest in layers_of(layer.op, bits)])


def _share(layer: MappedOp, network: NetworkMapping) -> float:
    """Of the array's cycles, of its energy, or the mean of both."""
    energies = sum(one.energy_pj for one in network.layers)
    cycles, energy = layer.cycles / network.cycles, layer.energy_pj / energies if energies else 0.0
    return {"latency": cycles, "energy": energy, "edp": (cycles + energy) / 2}[network.objective]


def _basis(chosen: Sequence[MappedOp], share: float, network: NetworkMapping) -> str:
    if len(chosen) == len(network.layers):
        return "every layer mapped again"
    names = list(dict.fromkeys(layer.op.layer or layer.op.name for layer in chosen))
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    what = {"latency": "cycles", "energy": "energy", "edp": "cycles and energy"}[network.objective]
    return f"mapped again: {', '.join(names[:NAMED])}{more} ({100 * share:.0f} % of the {what}), the rest as it was"


def changes(network: NetworkMapping) -> Iterator[Change]:
    """Every change that can be made to the array, whether or not it pays."""
    array, flow = network.array, network.dataflow
    flow = flow if flow in DATAFLOWS else "any"
    outermost = outermost_of(array)
    for name, memory in array.memories.items():
        if name != outermost:
            capacity = memory.capacity_bits.value
            detail = f"{_room(2 * capacity)} instead of {_room(capacity)}, at the same energy a word; leakage and area double"
            yield f"twice the {name}", detail, _with_memory(array, name, _larger(memory)), flow
    yield f"twice the bandwidth of {outermost}", "its ports move twice the bits a cycle", _wider(array, outermost), flow
    yield from _dataflows(network)
    if max(array.bits.W, array.bits.I) > 1:
        yield _half_precision(array, flow)
    for axis in list(array.axes)[:1] if _alike(array) else array.axes:
        size = array.axes[axis]
        if 2 * size <= MOST_PES:
            changed = _rebuilt(array, axes={**array.axes, axis: 2 * size})
            yield (
                f"twice the PEs along {axis}",
                f"{2 * size} instead of {size}, with their own memories; shared ports as they are",
                changed,
                flow,
            )


def _dataflows(network: NetworkMapping) -> Iterator[Change]:
    """Dataflows the mapping was not free to take: by choice, or because the control cannot run them."""
    array = network.array
    if network.dataflow in DATAFLOWS:
        for flow in array.dataflows:
            if flow != network.dataflow:
                yield f"dataflow {flow}", f"the array runs it as well; {network.dataflow} was asked for", array, flow
    for flow in DATAFLOWS:
        if flow not in array.dataflows:
            changed = _rebuilt(array, dataflows=(*array.dataflows, flow), unroll={})
            yield f"dataflow {flow}", f"a control that runs {flow} too, and axes that spread any loop", changed, flow


def _alike(array: SpatialArraySpec) -> bool:
    """Whether it does not matter which axis grows: as long, spreading the same loops, sharing the same memories."""
    shared = {tuple(axis in memory.shared_over for memory in array.memories.values()) for axis in array.axes}
    return len(set(array.axes.values())) == 1 and len(shared) == 1 and not array.unroll and not array.systolic


def _half_precision(array: SpatialArraySpec, flow: str) -> Change:
    """Products of narrower operands are narrower: sums lose as many bits, but no more than half of theirs."""
    old = array.bits
    narrow = {name: max(1, getattr(old, name) // 2) for name in ("W", "I", "F")}
    sums = max(-(-old.O // 2), old.O - (old.W - narrow["W"]) - (old.I - narrow["I"]))
    bits = OperandBits(**narrow, O=sums)
    detail = (
        f"weights of {bits.W} bits, inputs of {bits.I}, sums of {bits.O}, outputs of {bits.F}: check the accuracy; the MACs as they are"
    )
    return "half the precision", detail, _rebuilt(array, bits=bits), flow


def _room(bits: float) -> str:
    for size, unit in ((8 * 1024**2, "MiB"), (8 * 1024, "KiB"), (8, "B")):
        if bits >= size:
            return f"{bits / size:,.4g} {unit}"
    return f"{bits:,.0f} b"


def _larger(memory: ArrayMemory) -> ArrayMemory:
    doubled = {name: _twice(getattr(memory, name)) for name in ("capacity_bits", "area_mm2", "static_w")}
    return memory.model_copy(update=doubled)


def _wider(array: SpatialArraySpec, name: str) -> SpatialArraySpec:
    memory = array.memories[name]
    ports = {
        label: port.model_copy(update={"bits_per_cycle": 2 * port.bits_per_cycle, "word_bits": port.granule})
        for label, port in memory.ports.items()
    }
    return _with_memory(array, name, memory.model_copy(update={"ports": ports}))


def _twice(value: Constant) -> Constant:
    return value.model_copy(update={"value": 2 * value.value})


def _with_memory(array: SpatialArraySpec, name: str, memory: ArrayMemory) -> SpatialArraySpec:
    return _rebuilt(array, memories={**array.memories, name: memory})


def _rebuilt(array: SpatialArraySpec, **fields: Any) -> SpatialArraySpec:
    return array.model_copy(update=fields)
