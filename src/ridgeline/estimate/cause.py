"""Which limit binds, and why: a name for the bottleneck and a sentence with the number behind it.

parts of one op ──> "compute" | "memory" | "communication" | "overhead", "a+b" when the two largest lie within 10 %
                ──> cause: padding or wave quantisation, a dtype the unit lacks, a working set over a level's
                    capacity (which, by how much), low reuse, layout conversion, host copy, synchronisation, launch, page faults, power
"""

from __future__ import annotations

from collections.abc import Mapping

from ..target.spec import ProcessorSpec
from ..workload.graph import Op
from .limits import Parts

CLOSE = 0.9
PADDED = 0.8
SYNCHRONISING = frozenset({"item", "_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero"})
LAYOUT = frozenset({"contiguous", "clone", "reshape", "flatten", "transpose", "permute", "_to_copy", "to", "copy", "copy_"})


def bottleneck(parts: Mapping[str, float]) -> str:
    """The largest part's name, or two joined by + when they lie within 10 %."""
    ranked = sorted(parts.items(), key=lambda item: -item[1])
    if not ranked or ranked[0][1] <= 0:
        return "overhead"
    close = [name for name, value in ranked[:2] if value >= CLOSE * ranked[0][1]]
    return "+".join(close)


def cause_of(op: Op, parts: Parts, limit: str, spec: ProcessorSpec, launch_s: float, fault_s: float = 0.0) -> str:
    """Why the binding limit binds."""
    first = limit.split("+")[0]
    if op.kind == "view":
        return "a view: no data moves" if launch_s == 0 else f"launch: {launch_s * 1e6:.1f} µs to make a view"
    if op.operator in SYNCHRONISING:
        return "synchronisation: the host waits for a value"
    if first == "overhead" and fault_s > launch_s and spec.fault_s_per_byte:
        return f"page faults: {fault_s / spec.fault_s_per_byte.value:,.0f} B given back to the system and faulted in again"
    if first == "overhead":
        return f"launch: {launch_s * 1e6:.1f} µs to hand over {parts.limit_s * 1e6:.1f} µs of work"
    if first == "communication":
        return "host copy" if op.kind == "host_copy" else "communication between devices"
    if first == "compute":
        return _compute_cause(op, parts, spec)
    return _memory_cause(op, parts, spec)


def _compute_cause(op: Op, parts: Parts, spec: ProcessorSpec) -> str:
    if parts.power_s > parts.compute_s:
        return f"power: {spec.power.limit_w.value if spec.power else 0:.0f} W allow {parts.roof_flops / 1e12:.3g} TFLOP/s"
    if parts.computed_in != op.dtype:
        return f"dtype: {parts.unit} has no {op.dtype} and computes in {parts.computed_in}"
    if parts.utilisation < PADDED:
        return f"padding and wave quantisation: {parts.utilisation:.0%} of {parts.unit}'s tiles hold work"
    return f"{parts.unit} at its {op.dtype} peak"


def _memory_cause(op: Op, parts: Parts, spec: ProcessorSpec) -> str:
    level = parts.slowest_level
    levels = list(spec.memories)
    if op.operator in LAYOUT and op.kind == "copy":
        return f"layout conversion: {parts.traffic.bytes[level]:,} B through {level} compute nothing"
    if (place := levels.index(level)) > 0:
        inner = levels[place - 1]
        room = spec.memories[inner].capacity_bytes.value
        over = parts.traffic.working_set - room
        if over > 0 and (spec.memories[inner].retains or parts.traffic.bytes[level] > op.bytes):
            return f"working set {parts.traffic.working_set:,} B is {over:,.0f} B over {inner} ({room:,.0f} B)"
    intensity = op.flops / parts.traffic.bytes[level] if parts.traffic.bytes[level] else 0.0
    ridge = spec.units[parts.unit].peak_flops[parts.computed_in].value / spec.memories[level].bandwidth_bps.value
    return f"low reuse: {intensity:.3g} FLOP a byte of {level}, {ridge:.3g} needed"
