"""Small targets and workloads for the estimate's tests."""

from __future__ import annotations

from typing import Any

from ridgeline.core.spec import parse_spec
from ridgeline.target.spec import ProcessorSpec
from ridgeline.workload.graph import LoopNest, Op, Operand, Workload


def processor(peak: float = 2e12, bandwidth: float = 1e12, **more: Any) -> ProcessorSpec:
    """One unit, one memory, nothing else unless asked for."""
    data: dict[str, Any] = {
        "version": 1,
        "kind": "processor",
        "name": "plain",
        "units": {"alu": {"peak_flops": dict.fromkeys(("float32", "float16", "int8"), peak)}},
        "memories": {"dram": {"bandwidth_bps": bandwidth, "capacity_bytes": 80e9}},
    }
    return parse_spec(ProcessorSpec, data | more, "plain.toml")


LEVELS = {
    "l1": {"bandwidth_bps": 8e12, "capacity_bytes": 1e5},
    "l2": {"bandwidth_bps": 4e12, "capacity_bytes": 1e6},
    "dram": {"bandwidth_bps": 1e12, "capacity_bytes": 80e9},
}


def tensor(value: str, elements: int, role: str = "activations", dtype: str = "float32") -> Operand:
    return Operand(value, role, (elements,), dtype, elements)  # type: ignore[arg-type]


def matmul(m: int, n: int, k: int, name: str = "linear", dtype: str = "float32", source: str = "x", result: str = "y") -> Op:
    loop = LoopNest("matmul", {"B": 1, "M": m, "N": n, "K": k})
    inputs = (tensor(source, m * k, dtype=dtype), tensor(f"{name}.w", n * k, "weights", dtype))
    return Op(name, name, "linear", "linear", dtype, inputs, (tensor(result, m * n, dtype=dtype),), 2 * m * n * k, 2 * m * n * k, (loop,))


def pointwise(name: str, elements: int, source: str, result: str, operator: str = "relu") -> Op:
    return Op(name, name, "pointwise", operator, "float32", (tensor(source, elements),), (tensor(result, elements),), elements)


def workload(*ops: Op, **more: Any) -> Workload:
    return Workload("test", 1, "float32", ops, "test", **more)
