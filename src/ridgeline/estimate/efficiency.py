"""How near its limit an op of this family and size gets, learned from single ops timed on the machine.

    spec.probes ──limit(probe) / measured seconds──> efficiency points, by family and dtype
    op ──family, log2 features──> the nearest points, weighted by 1/distance² ──> efficiency in (0, 1]

Features: log2 of (batches, M, N, K, taps) for matmul- and conv-like ops, log2 bytes for all others. Without probes
every efficiency is 1 and the estimate is the limit itself. Probes are stored as times, so that a better limit model
improves old calibrations too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log, log2, prod
from statistics import median

from ..target.spec import Probe, ProcessorSpec
from ..workload.graph import LoopNest, Op, Operand

NEIGHBOURS = 4
FLOOR, CEILING = 0.002, 1.0
HEAVY = frozenset("gelu gelu_ silu silu_ sigmoid tanh exp erf pow rsqrt sqrt log mish softplus hardswish elu sin cos".split())


def family_of(op: Op) -> str:
    """The family whose probes speak for an op."""
    if op.kind == "conv":
        dims = op.loops[0].dims
        return "conv_depthwise" if dims["G"] > 1 and dims["C"] == 1 else "conv"
    if op.kind in ("linear", "matmul", "recurrent"):
        return "matmul"
    if op.kind == "pointwise":
        return "pointwise_heavy" if op.operator in HEAVY else "pointwise"
    if op.kind == "norm":
        return "batch_norm" if "batch_norm" in op.operator else "layer_norm"
    return op.kind


def features_of(op: Op) -> tuple[float, ...]:
    """log2 sizes; the same number of them for every op of a family."""
    if op.loops:
        taps = prod(v for k, v in op.loops[0].dims.items() if k in ("R", "S", "T")) if op.kind == "conv" else 1
        return (*_logs(op.loops[0].as_matmul()), 2 * log2(taps))
    return _logs((op.bytes,))


def _logs(sizes: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(log2(max(size, 1)) for size in sizes)


@dataclass(frozen=True, slots=True)
class Point:
    features: tuple[float, ...]
    dtype: str
    efficiency: float
    host_s: float | None = None


@dataclass(frozen=True, slots=True)
class EfficiencyModel:
    """Points by family; `predict` interpolates between the nearest."""

    points: dict[str, tuple[Point, ...]]

    def predict(self, op: Op, channels_last: bool = False) -> float:
        family = family_of(op)
        known = self.points.get(f"{family}_nhwc" if channels_last else family) or self.points.get(family)
        if not known or op.kind == "view":
            return 1.0
        same = [p for p in known if p.dtype == op.dtype] or list(known)
        wanted = features_of(op)
        near = sorted((_distance(p.features, wanted), p.efficiency) for p in same)[:NEIGHBOURS]
        weights = [1.0 / (distance + 0.05) for distance, _ in near]
        mean = sum(w * log(e) for w, (_, e) in zip(weights, near, strict=True)) / sum(weights)
        return min(max(exp(mean), FLOOR), CEILING)

    def host_s(self, op: Op) -> float | None:
        """Median host time of handing over an op of this family; None where it was not measured."""
        known = [p for p in self.points.get(family_of(op), ()) if p.host_s is not None]
        same = [p.host_s for p in known if p.dtype == op.dtype] or [p.host_s for p in known]
        return median(s for s in same if s is not None) if same else None


def _distance(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))


def learn(spec: ProcessorSpec, limit_s: Callable[[Op], float]) -> EfficiencyModel:
    """Efficiency points of a target's probes under the given limit model."""
    points: dict[str, list[Point]] = {}
    for number, probe in enumerate(spec.probes):
        op = probe_op(probe, number)
        efficiency = min(max(limit_s(op) / probe.seconds, FLOOR), CEILING)
        points.setdefault(probe.family, []).append(Point(features_of(op), probe.dtype, efficiency, probe.host_s))
    return EfficiencyModel({family: tuple(found) for family, found in points.items()})


KINDS = {"conv_depthwise": "conv", "conv_nhwc": "conv", "conv_depthwise_nhwc": "conv", "pointwise_heavy": "pointwise", "batch_norm": "norm",
         "layer_norm": "norm"}  # fmt: skip


def probe_op(probe: Probe, number: int = 0) -> Op:
    """The op a probe timed, rebuilt from what the spec keeps of it."""
    kind = KINDS.get(probe.family, probe.family)
    bits = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}.get(probe.dtype, 4)
    roles = ("activations", "weights") if kind in ("conv", "matmul") else ("activations", "activations")

    def operand(index: int, size: int, role: str) -> Operand:
        return Operand(
            f"probe{number}.{index}", "weights" if role == "weights" else "activations", (size // bits,), probe.dtype, size // bits
        )

    reads = tuple(operand(i, size, roles[min(i, 1)]) for i, size in enumerate(probe.read_bytes))
    loops: tuple[LoopNest, ...] = ()
    if probe.matmul:
        batches, m, n, k = probe.matmul
        if kind == "conv":
            dims = {"B": m, "G": batches, "K": n, "C": k // probe.taps, "R": probe.taps}
            loops = (LoopNest("conv", dims),)
        else:
            loops = (LoopNest("matmul", {"B": batches, "M": m, "N": n, "K": k}),)
    operator = "gelu" if probe.family == "pointwise_heavy" else "batch_norm" if probe.family == "batch_norm" else probe.family
    return Op(
        f"probe{number}", "", kind, operator, probe.dtype, reads, (operand(-1, probe.write_bytes, "activations"),), probe.flops, loops=loops
    )
