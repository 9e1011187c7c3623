"""The four dataflows on one layer or one network, side by side, and why the best one is.

    Workload, SpatialArraySpec ──map_layers, once a dataflow──> Candidate(ws | is | os | rs)
      footprints   {memory: {operand: bits}}    largest tile of any layer; the outermost memory holds whole operands
      reuse        {operand: {memory: x}}       multiplications for each element a memory gives to those below (W, I) or takes from them (O)
      accesses     [{memory, operand, direction, words, word_bits, elements, energy_pj}], summed over layers
      bandwidth    bits that pass the outermost memory's ports / (cycles * bits its ports could move)
    ──> DataflowComparison(candidates, best, reasons)

The reason names the one term (of energy_terms or cycle_parts, whichever makes more of the difference) that sets a candidate
furthest apart from the best. A dataflow that the control does not run, or that does not fit, is listed with why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log
from typing import Any

from ...core.errors import OptionError
from ...target.array import DATAFLOWS, OPERANDS, SpatialArraySpec
from ...workload.graph import Workload
from .breakdown import Term, bottlenecks, cycle_parts, energy_terms, outermost_of, sharing_cores, term_text, total_of
from .cost import InfeasibleMappingError
from .mapper import OBJECTIVES
from .network import MappedOp, NetworkMapping, Progress, map_layers

SCHEMA = "ridgeline/dataflows/1"
SAME_WITHIN = 0.005
PHRASES = {"edp": "energy-delay product", "energy": "energy", "latency": "cycles"}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One dataflow: its mapping, or why there is none."""

    dataflow: str
    network: NetworkMapping | None
    why_not: str = ""

    @property
    def layers(self) -> tuple[MappedOp, ...]:
        return self.network.layers if self.network else ()

    @property
    def energy_pj(self) -> float:
        """On the array; what the host does is the same for all."""
        return sum(layer.energy_pj for layer in self.layers)

    @property
    def cycles(self) -> int:
        return sum(layer.cycles for layer in self.layers)

    def value(self, objective: str) -> float:
        return {"energy": self.energy_pj, "latency": float(self.cycles), "edp": self.energy_pj * self.cycles}[objective]

    @property
    def bottleneck(self) -> str:
        """What limits the layers that take most of the cycles."""
        return next(iter(bottlenecks(self.layers, self.network.array)), "") if self.network else ""

    def footprints(self) -> dict[str, dict[str, int]]:
        if self.network is None:
            return {}
        array, outermost = self.network.array, outermost_of(self.network.array)
        held: dict[str, dict[str, int]] = {name: {} for name in array.memories}
        for layer in self.layers:
            cost = layer.mapped.cost
            whole = {(outermost, op): cost.layer.elements(op) * getattr(cost.layer.bits, "F" if op == "O" else op) for op in OPERANDS}
            for (memory, operand), bits in ({(r.memory, r.operand): r.tile_bits for r in cost.refills} | whole).items():
                held[memory][operand] = max(held[memory].get(operand, 0), bits)
        return held

    def reuse(self) -> dict[str, dict[str, float]]:
        macs = sum(layer.macs for layer in self.layers)
        found: dict[str, dict[str, float]] = {operand: {} for operand in OPERANDS}
        for access in self.accesses():
            if access["direction"] == ("wr_up" if access["operand"] == "O" else "rd_down") and access["elements"]:
                found[access["operand"]][access["memory"]] = macs / access["elements"]
        return found

    def accesses(self) -> list[dict[str, Any]]:
        rows: dict[Term, dict[str, Any]] = {}
        for layer in self.layers:
            times = layer.cores * layer.op.calls
            for a in layer.mapped.cost.accesses:
                key = a.memory, a.operand, a.direction
                fresh = {"memory": a.memory, "operand": a.operand, "direction": a.direction, "words": 0, "word_bits": a.word_bits}
                row = rows.setdefault(key, {**fresh, "elements": 0, "energy_pj": 0.0})
                for name in ("words", "elements", "energy_pj"):
                    row[name] += getattr(a, name) * times
        return list(rows.values())

    @property
    def bandwidth_efficiency(self) -> float:
        if self.network is None or not self.cycles:
            return 0.0
        outermost = outermost_of(self.network.array)
        moved = sum(row["words"] * row["word_bits"] for row in self.accesses() if row["memory"] == outermost)
        ports = self.network.array.memories[outermost].ports.values()
        return float(moved / (self.cycles * sum(port.bits_per_cycle for port in ports)))

    def to_json(self) -> dict[str, Any]:
        if self.network is None:
            return {"dataflow": self.dataflow, "feasible": False, "why_not": self.why_not}
        terms = total_of(energy_terms(layer) for layer in self.layers)
        return {
            "dataflow": self.dataflow,
            "feasible": True,
            "energy_pj": self.energy_pj,
            "cycles": self.cycles,
            "seconds": self.cycles / self.network.array.clock_hz.value,
            "utilisation": self.network.utilisation,
            "bandwidth_efficiency": self.bandwidth_efficiency,
            "bottleneck": self.bottleneck,
            "footprint_bits": self.footprints(),
            "reuse": self.reuse(),
            "accesses": self.accesses(),
            "energy_by_pj": {term_text(term): energy for term, energy in terms.items()},
            "cycles_by": total_of(cycle_parts(layer, self.network.array) for layer in self.layers),
            "optimal_within_space": all(layer.mapped.optimal for layer in self.layers),
        }


@dataclass(frozen=True, slots=True)
class DataflowComparison:
    """All four, the best, and what sets the others apart from it."""

    workload: Workload
    array: SpatialArraySpec
    objective: str
    layer: str | None
    candidates: tuple[Candidate, ...]
    best: Candidate
    reasons: Mapping[str, str]
    """A sentence for every dataflow that can run and is not the best."""

    @property
    def feasible(self) -> tuple[Candidate, ...]:
        return tuple(one for one in self.candidates if one.network)

    def wins(self) -> dict[str, int]:
        """Layers each dataflow is best for; the first of equals."""
        counts = {one.dataflow: 0 for one in self.feasible}
        for same in zip(*(one.layers for one in self.feasible), strict=True):
            values = [_value(layer, self.objective) for layer in same]
            counts[self.feasible[values.index(min(values))].dataflow] += 1
        return counts

    def to_json(self) -> dict[str, Any]:
        """The documented schema of `ridgeline map --dataflow compare --json`."""
        return {
            "schema": SCHEMA,
            "model": self.workload.model,
            "batch": self.workload.batch,
            "target": self.array.name,
            "objective": self.objective,
            "layer": self.layer,
            "recommended": self.best.dataflow,
            "reasons": dict(self.reasons),
            "best_for_layers": self.wins(),
            "dataflows": [one.to_json() for one in self.candidates],
        }


def compare_dataflows(
    workload: Workload,
    array: SpatialArraySpec,
    *,
    objective: str = "edp",
    layer: str | None = None,
    progress: Progress | None = None,
) -> DataflowComparison:
    """Map with each dataflow in turn; raises only when none of them can run."""
    if objective not in OBJECTIVES:
        raise OptionError(f"objective {objective!r}", why=f"the objectives are {', '.join(OBJECTIVES)}", do="choose one of them")
    candidates = []
    infeasible: InfeasibleMappingError | None = None
    for flow in DATAFLOWS:
        if flow not in array.dataflows:
            candidates.append(Candidate(flow, None, f"the control of {array.name} runs {', '.join(array.dataflows)}"))
            continue
        try:
            report = _prefixed(progress, flow)
            candidates.append(
                Candidate(flow, map_layers(workload, array, dataflow=flow, objective=objective, layer=layer, progress=report))
            )
        except InfeasibleMappingError as error:
            infeasible = error
            candidates.append(Candidate(flow, None, f"{error.what}: {error.why}"))
    able = [one for one in candidates if one.layers]
    if not able:
        raise infeasible or OptionError(
            f"nothing of {workload.model} runs on {array.name}", why=f"it runs {', '.join(array.runs)}", do="choose another model or array"
        )
    best = min(able, key=lambda one: one.value(objective))
    reasons = {one.dataflow: reason(one, best, objective) for one in able if one is not best}
    return DataflowComparison(workload, array, objective, layer, tuple(candidates), best, reasons)


def _prefixed(progress: Progress | None, flow: str) -> Callable[[str], None] | None:
    return (lambda message: progress(f"{flow}, {message}")) if progress else None


def _value(layer: MappedOp, objective: str) -> float:
    return {"energy": layer.energy_pj, "latency": float(layer.cycles), "edp": layer.energy_pj * layer.cycles}[objective]


def reason(other: Candidate, best: Candidate, objective: str) -> str:
    """What sets `other` apart from `best`, from the largest difference between their terms."""
    times = other.value(objective) / best.value(objective)
    if times - 1 < SAME_WITHIN:
        return f"as good as {best.dataflow}: {times:.3f}x its {PHRASES[objective]}"
    energy, cycles = (log(max(a, 1e-300) / max(b, 1e-300)) for a, b in ((other.energy_pj, best.energy_pj), (other.cycles, best.cycles)))
    by_energy = objective == "energy" or (objective == "edp" and energy >= cycles)
    head = f"{times:.2f}x the {PHRASES[objective]} of {best.dataflow}"
    if objective == "edp":
        head += f" ({other.energy_pj / best.energy_pj:.2f}x the energy, {other.cycles / best.cycles:.2f}x the cycles)"
    return f"{head}: {_energy_reason(other, best) if by_energy else _cycles_reason(other, best)}"


def _energy_reason(other: Candidate, best: Candidate) -> str:
    ours, theirs = (total_of(energy_terms(layer) for layer in one.layers) for one in (best, other))
    term = max(theirs, key=lambda name: theirs[name] - ours.get(name, 0.0))
    where = f"in {term_text(term)}" if term[1] else f"on {term[0]}"
    before, after = ours.get(term, 0.0), theirs[term]
    if not before:
        return f"it spends {joules_text(after)} {where}, {best.dataflow} none"
    return f"it spends {after / before:.2f}x as much {where} ({joules_text(after)} against {joules_text(before)})"


def _cycles_reason(other: Candidate, best: Candidate) -> str:
    assert other.network and best.network
    ours, theirs = (total_of(cycle_parts(layer, best.network.array) for layer in one.layers) for one in (best, other))
    part = max(theirs, key=lambda name: theirs[name] - ours[name])
    if part == "compute":
        pes = best.network.array.pes * sharing_cores(best.network.array)
        busy = [one.network.macs / (parts["compute"] * pes) for one, parts in ((other, theirs), (best, ours)) if one.network]
        return (
            f"{100 * busy[0]:.0f} % of the PEs work while it computes, {100 * busy[1]:.0f} % with {best.dataflow} "
            f"({theirs[part]:,.0f} cycles of computing against {ours[part]:,.0f})"
        )
    return f"{theirs[part]:,.0f} cycles of {part} against {ours[part]:,.0f}{_busiest_port(other, best, part)}"


def _busiest_port(other: Candidate, best: Candidate, part: str) -> str:
    """Of the ports that can be behind waiting for them, the one with most more to move."""
    assert best.network
    outermost = f"{outermost_of(best.network.array)}."
    outside = {"on-chip ports": False, f"waiting for {outermost[:-1]}": True}.get(part)
    ours, theirs = (
        total_of({name: cycles * layer.op.calls for name, cycles in layer.mapped.cost.port_cycles.items()} for layer in one.layers)
        for one in (best, other)
    )
    grown = {name: cycles - ours[name] for name, cycles in theirs.items() if name.startswith(outermost) == outside}
    if not grown or max(grown.values()) <= 0:
        return ""
    port = max(grown, key=lambda name: grown[name])
    return f", most of all {port}, which moves for {theirs[port]:,.0f} cycles against {ours[port]:,.0f}"


def joules_text(energy_pj: float) -> str:
    """Three digits and the unit that suits them: 12.3 µJ."""
    for power, unit in ((12, "J"), (9, "mJ"), (6, "µJ"), (3, "nJ")):
        if energy_pj >= 10**power:
            return f"{energy_pj / 10**power:.3g} {unit}"
    return f"{energy_pj:.3g} pJ"
