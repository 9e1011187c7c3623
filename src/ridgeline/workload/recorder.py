"""Turns operator calls on tensors, in the order they happen, into Ops.

    torch.export graph ─┐
    dispatch mode ──────┴─> Recorder.call(name, layer, operator, args, kwargs, result) ──> Op, Uncounted

Tensors are told apart by storage: views share it, so an Op's operands carry the storage's name, and liveness and
residency can follow data through reshapes. What an op writes in place keeps the name and role of what it wrote to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..core.dtypes import BITS, FLOATING
from .formulas import Call, Cost, cost_of
from .graph import Op, Operand, Role, Uncounted
from .operators import IDENTITIES
from .tensors import TensorInfo, describe, dtype_name

CACHE_KEEPERS = frozenset(
    {"cat", "index_copy", "slice_scatter", "index_put", "repeat_interleave", "repeat", "clone", "contiguous", "reshape"}
)


class Recorder:
    """Collects the ops of one forward pass."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.uncounted: list[Uncounted] = []
        self.storage_bytes: dict[str, int] = {}
        self.roles: dict[str, Role] = {}
        self.input_values: list[str] = []
        self.cache_values: list[str] = []
        self.stored_weights: list[Operand] = []
        self._values: dict[int, tuple[str, StorageWeakRef]] = {}
        self._count = 0
        self._attention_values: set[str] = set()

    def bind(self, tensor: torch.Tensor, role: Role, value: str | None = None) -> TensorInfo:
        """Give the storage behind `tensor` a name (or join it to a known value) and a role."""
        storage = tensor.untyped_storage()
        if value is None:
            self._count += 1
            value = f"v{self._count}"
            self.storage_bytes[value] = storage.nbytes()
            self.roles[value] = role
            if role == "weights" and self._known(tensor) is None:
                self.stored_weights.append(_whole(tensor, value))
        self._values[storage._cdata] = (value, StorageWeakRef(storage))
        return describe(tensor, value, self.roles[value])

    def bind_input(self, tensor: torch.Tensor, role: Role, tied: bool = False) -> None:
        """An input of the pass: activations live from its start, caches throughout; a `tied` weight is stored under another name."""
        value = self.bind(tensor, role).value
        if tied and self.stored_weights[-1:] and self.stored_weights[-1].value == value:
            self.stored_weights.pop()
        if role == "activations":
            self.input_values.append(value)
        elif role == "kv_cache":
            self.cache_values.append(value)

    def info(self, tensor: torch.Tensor) -> TensorInfo:
        """The TensorInfo of a tensor seen before; one never seen (a constant) is a weight."""
        known = self._known(tensor)
        return describe(tensor, known, self.roles[known]) if known else self.bind(tensor, "weights")

    def _known(self, tensor: torch.Tensor) -> str | None:
        storage = tensor.untyped_storage()
        found = self._values.get(storage._cdata)
        # A freed storage's address can be given out again, so the name holds only while the first owner lives.
        return found[0] if found and not found[1].expired() else None

    def call(self, name: str, layer: str, operator: Any, args: Any, kwargs: Any, result: Any) -> Op:
        """Record one call whose tensors are real, meta or fake."""
        base, packet = base_name(operator), _swap(args, self.info)
        keywords: dict[str, Any] = _swap(kwargs, self.info)
        results = [t for t in _flatten(result) if isinstance(t, torch.Tensor)]
        inputs = _infos(packet, keywords)
        identity = (base in IDENTITIES and not (len(packet) > 2 and packet[2] is True)) or self._merges_heads(base, inputs)
        alias = identity or (bool(results) and all(self._known(t) for t in results) and not base.endswith("_"))
        outputs = tuple(self._output(t, base, inputs, identity) for t in results)
        tags = getattr(operator, "tags", ())
        call = Call(base, packet, keywords, outputs, pointwise=torch.Tag.pointwise in tags, alias=alias)
        if base in IDENTITIES and not identity:
            call = Call("mul", packet, keywords, outputs, pointwise=True)
        op = self._op(name, layer, call)
        if op.kind == "attention":
            self._attention_values |= {o.value for o in op.outputs}
        self.ops.append(op)
        return op

    def _merges_heads(self, base: str, inputs: list[TensorInfo]) -> bool:
        """Whether this joins the heads of an attention result: fused attention writes it as [batch, time, heads, width], so this is a view.

        The meta device alone shows it as [batch, heads, time, width], and the join as a copy.
        """
        return base in ("reshape", "flatten", "contiguous") and bool(inputs) and inputs[0].value in self._attention_values

    def _output(self, tensor: torch.Tensor, base: str, inputs: list[TensorInfo], identity: bool) -> TensorInfo:
        known = self._known(tensor)
        if known:
            return describe(tensor, known, self.roles[known])
        if identity:
            return self.bind(tensor, inputs[0].role, inputs[0].value)
        from_cache = base in CACHE_KEEPERS and any(i.role == "kv_cache" for i in inputs)
        return self.bind(tensor, "kv_cache" if from_cache else "activations")

    def _op(self, name: str, layer: str, call: Call) -> Op:
        cost = cost_of(call)
        if cost is None or cost.uncounted:
            why = cost.uncounted if cost else "no formula for this operator"
            floating = any(o.dtype in FLOATING for o in call.outputs)
            self.uncounted.append(Uncounted(name, call.operator, layer, zero_flop=not floating, why=why))
            cost = cost or Cost("other")
        reads = cost.reads if cost.reads is not None else self._once(call.tensors())
        writes = cost.writes if cost.writes is not None else self._once(list(call.outputs))
        return Op(
            name, layer, cost.kind, call.operator, compute_dtype(reads, writes), reads, writes, cost.flops, cost.matmul_flops, cost.loops
        )

    def _once(self, tensors: list[TensorInfo]) -> tuple[Operand, ...]:
        """Each distinct view once (x * x reads x once), and together no more than the storage behind them holds."""
        distinct = {(t.value, t.offset, t.shape, t.strides): t for t in tensors}
        room = {t.value: self.storage_bytes.get(t.value, t.elements * 16) * 8 // BITS[t.dtype] for t in tensors}
        operands = []
        for tensor in distinct.values():
            elements = min(tensor.elements, room[tensor.value])
            room[tensor.value] -= elements
            if elements:
                operands.append(tensor.operand(elements))
        return tuple(operands)


def _whole(tensor: torch.Tensor, value: str) -> Operand:
    """All that the storage behind a weight holds."""
    dtype = dtype_name(tensor.dtype)
    elements = tensor.untyped_storage().nbytes() * 8 // BITS[dtype]
    return Operand(value, "weights", (elements,), dtype, elements)


def base_name(operator: Any) -> str:
    """`aten.conv2d.padding` → `conv2d`; plain Python functions keep their own name."""
    packet = getattr(operator, "overloadpacket", None)
    return str(getattr(packet if packet is not None else operator, "__name__", operator))


def compute_dtype(reads: tuple[Operand, ...], writes: tuple[Operand, ...]) -> str:
    """The type an op computes in: the widest floating type among its data, else what it writes or reads."""
    floating = [o.dtype for o in (*reads, *writes) if o.dtype in FLOATING]
    if floating:
        return max(floating, key=lambda d: BITS[d])
    return next((o.dtype for o in (*writes, *reads)), "float32")


def _infos(args: Any, kwargs: dict[str, Any]) -> list[TensorInfo]:
    return [item for item in _flatten((args, list(kwargs.values()))) if isinstance(item, TensorInfo)]


def _flatten(item: Any) -> Iterator[Any]:
    if isinstance(item, list | tuple):
        for part in item:
            yield from _flatten(part)
    else:
        yield item


def _swap(item: Any, function: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return function(item)
    if isinstance(item, dict):
        return {key: _swap(value, function) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return tuple(_swap(part, function) for part in item)
    return item
