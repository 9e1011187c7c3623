"""What must be computed: a Workload is a list of Ops, in execution order, free of any hardware.

    Workload ── ops ──> Op(kind, layer, FLOPs) ── inputs/outputs ──> Operand(value, role, bytes)
                          └── loops ──> LoopNest(dims, stride, padding, groups)   for matmul- and conv-like ops

Bytes are compulsory: each operand counted once, however often it is used. Roles split them into weights,
activations and KV cache. `value` names the storage behind an operand, so that views share it and liveness and
cache residency can be followed from op to op. FLOPs count a multiply and an add as two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any, Literal

from ..core.dtypes import BITS, FLOATING, bytes_of

Role = Literal["weights", "activations", "kv_cache"]
ROLES: tuple[Role, ...] = ("weights", "activations", "kv_cache")


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor an op reads or writes, and how many distinct elements of it the op touches."""

    value: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    elements: int

    @property
    def bytes(self) -> int:
        return bytes_of(self.elements, self.dtype)


@dataclass(frozen=True, slots=True)
class LoopNest:
    """The loops of a matmul- or conv-like op.

    matmul: B batches, M rows, N columns, K reduction; `shared` lists operands ("a", "b") that do not vary with B.
    conv:   B images, G groups, K output channels a group, C input channels a group, P (Q, …) output positions,
            R (S, …) kernel taps; spatial dims are given as tuples.
    """

    kind: Literal["matmul", "conv"]
    dims: Mapping[str, int]
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    transposed: bool = False
    shared: tuple[str, ...] = ()

    @property
    def macs(self) -> int:
        return prod(self.dims.values())

    def as_matmul(self) -> tuple[int, int, int, int]:
        """(batches, M, N, K) of the matrix product that does the same multiplications."""
        d = self.dims
        if self.kind == "matmul":
            return d["B"], d["M"], d["N"], d["K"]
        out = prod(v for k, v in d.items() if k in ("P", "Q", "O"))
        taps = prod(v for k, v in d.items() if k in ("R", "S", "T"))
        return d["G"], d["B"] * out, d["K"], d["C"] * taps


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call, before decomposition."""

    name: str
    layer: str
    kind: str
    operator: str
    dtype: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    flops: int
    matmul_flops: int = 0
    loops: tuple[LoopNest, ...] = ()
    parts: tuple[str, ...] = ()
    calls: int = 1

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.inputs + self.outputs

    @property
    def bytes(self) -> int:
        return sum(o.bytes for o in self.operands)

    def bytes_of(self, role: Role) -> int:
        return sum(o.bytes for o in self.operands if o.role == role)

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes if self.bytes else 0.0


def row_fields(op: Op) -> dict[str, Any]:
    """What an OpRow says of an op whoever fills in its times."""
    return {
        "name": op.name,
        "layer": op.layer,
        "kind": op.kind,
        "operator": op.operator,
        "dtype": op.dtype,
        "input_shapes": tuple(o.shape for o in op.inputs),
        "output_shapes": tuple(o.shape for o in op.outputs),
        "flops": op.flops,
        "matmul_flops": op.matmul_flops,
        "bytes": op.bytes,
        "bytes_by": {role: op.bytes_of(role) for role in ROLES},
        "intensity": op.intensity,
        "loops": tuple({**asdict(loop), "dims": dict(loop.dims)} for loop in op.loops),
        "parts": op.parts,
    }


@dataclass(frozen=True, slots=True)
class Uncounted:
    """An operator for which there is no formula: listed, never dropped."""

    name: str
    operator: str
    layer: str
    zero_flop: bool
    why: str


@dataclass(frozen=True, slots=True)
class Workload:
    """All ops of one forward pass, with what surrounds them."""

    model: str
    batch: int
    dtype: str
    ops: tuple[Op, ...]
    captured_by: str
    parameters: int = 0
    peak_activation_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    phase: str | None = None
    context: int | None = None
    uncounted: tuple[Uncounted, ...] = ()
    notes: tuple[str, ...] = ()
    stored_weights: tuple[Operand, ...] = ()
    """Every weight storage once and whole, whatever part of it the ops touch."""
    peak_cache_bytes: int = 0
    """KV cache alive at once: what is passed in, plus copies the pass makes of it."""
    rebatch: Callable[[int], Workload] | None = field(default=None, compare=False, repr=False)

    @property
    def flops(self) -> int:
        return sum(op.flops for op in self.ops)

    @property
    def matmul_flops(self) -> int:
        return sum(op.matmul_flops for op in self.ops)

    @property
    def bytes(self) -> int:
        return sum(op.bytes for op in self.ops)

    def bytes_of(self, role: Role) -> int:
        return sum(op.bytes_of(role) for op in self.ops)

    @property
    def weight_bytes(self) -> int:
        """All weights as stored; of a workload that does not say, the largest part of each that an op touches."""
        if self.stored_weights:
            return sum(o.bytes for o in self.stored_weights)
        sizes: dict[str, int] = {}
        for operand in (o for op in self.ops for o in op.operands if o.role == "weights"):
            sizes[operand.value] = max(sizes.get(operand.value, 0), operand.bytes)
        return sum(sizes.values())

    def with_dtype(self, dtype: str, roles: Iterable[Role] = ROLES) -> Workload:
        """The same work with the floating-point operands of `roles` stored in `dtype`; ops compute in it when every role changes.

        Peaks go with the width of the activations and of the KV cache: the few integers among them are taken to shrink along.
        """
        chosen = set(roles)
        whole = chosen == set(ROLES)

        def recast(o: Operand) -> Operand:
            return replace(o, dtype=dtype) if o.role in chosen and o.dtype in FLOATING else o

        ops = tuple(
            replace(
                op,
                inputs=tuple(map(recast, op.inputs)),
                outputs=tuple(map(recast, op.outputs)),
                dtype=dtype if whole and op.dtype in FLOATING else op.dtype,
            )
            for op in self.ops
        )

        def narrowed(role: Role, peak: int) -> int:
            return -(-peak * BITS[dtype] // BITS[self.dtype]) if role in chosen and self.dtype in FLOATING else peak

        return replace(
            self,
            ops=ops,
            dtype=dtype if whole else self.dtype,
            peak_activation_bytes=narrowed("activations", self.peak_activation_bytes),
            stored_weights=tuple(map(recast, self.stored_weights)),
            peak_cache_bytes=narrowed("kv_cache", self.peak_cache_bytes),
        )
