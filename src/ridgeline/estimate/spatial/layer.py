"""One layer as a nest of eight loops, whatever it was in the network.

    for b, g, k, p, q:                     O[b, g, k, p, q]        outputs
      for c, r, s:                         W[g, k, c, r, s]        weights (second operand of a matmul)
        O += W * I[b, g, c, y, x]          y = p * stride + r * dilation - padding, likewise x from q and s

    conv    B images, G groups, K output and C input channels a group, P x Q outputs, R x S taps
    matmul  (M x K) @ (K x N): P = M rows, K = N columns, C = K reduction, R = S = Q = 1; a second operand that
            differs from batch to batch (attention) makes the batches groups; if only the first is the same for all,
            the product is taken transposed: W is the first operand, I the second

Inputs outside [0, height) x [0, width) are padding: never stored, never moved. A multiplication with padding is still done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ...core.errors import OptionError
from ...target.array import DIMENSIONS, OperandBits
from ...workload.graph import LoopNest, Op

RELEVANT: dict[str, tuple[str, ...]] = {
    "W": ("G", "K", "C", "R", "S"),
    "I": ("B", "G", "C", "P", "Q", "R", "S"),
    "O": ("B", "G", "K", "P", "Q"),
}
"""Dimensions whose loops change which element of an operand is used; for O the others are the reduction."""
REDUCTION = ("C", "R", "S")
TAPS = ("R", "S", "T")
"""Of a captured convolution, one for each dimension of its kernel."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Loop bounds, geometry of the input window, operand widths."""

    name: str
    dims: Mapping[str, int]
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    input_size: tuple[int, int] = (0, 0)
    bits: OperandBits = field(default_factory=OperandBits)
    kind: str = "conv"
    calls: int = 1

    def __post_init__(self) -> None:
        full = {d: int(self.dims.get(d, 1)) for d in DIMENSIONS}
        for name, size in {**full, **{k: v for k, v in self.dims.items() if k not in full}}.items():
            if name not in full or size < 1:
                why = "a loop runs at least once, over one of " + " ".join(DIMENSIONS)
                raise OptionError(f"dims.{name} = {size} in layer {self.name}", why=why, do="correct the layer's dimensions")
        object.__setattr__(self, "dims", full)
        if not all(self.input_size):
            reach = [self.window(axis)[0] - 2 * pad for axis, pad in enumerate(self.padding)]
            object.__setattr__(self, "input_size", (max(1, reach[0]), max(1, reach[1])))

    def window(self, axis: int) -> tuple[int, int, int]:
        """(rows spanned with padding, outputs, taps) along y (axis 0) or x (axis 1)."""
        out, taps = self.dims["PQ"[axis]], self.dims["RS"[axis]]
        return (out - 1) * self.stride[axis] + (taps - 1) * self.dilation[axis] + 1, out, taps

    @property
    def macs(self) -> int:
        return prod(self.dims.values())

    def elements(self, operand: str) -> int:
        """Distinct elements the layer touches."""
        if operand != "I":
            return prod(self.dims[d] for d in RELEVANT[operand])
        return self.dims["B"] * self.dims["G"] * self.dims["C"] * self._touched(0) * self._touched(1)

    def _touched(self, axis: int) -> int:
        _, outs, taps = self.window(axis)
        step, gap, pad, size = self.stride[axis], self.dilation[axis], self.padding[axis], self.input_size[axis]
        return len({y for o in range(outs) for t in range(taps) if 0 <= (y := o * step + t * gap - pad) < size})

    def with_dims(self, **dims: int) -> Layer:
        """The same layer with some loop bounds changed, its stored input unchanged."""
        return replace(self, dims={**self.dims, **dims})

    def to_json(self) -> dict[str, Any]:
        return {
            "layer": self.name,
            "kind": self.kind,
            "dims": dict(self.dims),
            "stride": list(self.stride),
            "dilation": list(self.dilation),
            "padding": list(self.padding),
            "input_size": list(self.input_size),
            "bits": self.bits.model_dump(),
            "macs": self.macs,
            "calls": self.calls,
        }


def layers_of(op: Op, bits: OperandBits) -> list[Layer]:
    """The loop nests of a captured op; empty for an op without multiplications to map."""
    name = op.layer or op.name
    size = (0, 0)
    if op.kind == "conv" and op.inputs and op.loops:  # an input may come without its batch
        size = _pair(op.inputs[0].shape[-sum(dim in op.loops[0].dims for dim in TAPS) :], 1)
    return [_from_nest(nest, name + (f".{i}" if len(op.loops) > 1 else ""), bits, op.calls, size) for i, nest in enumerate(op.loops)]


def _from_nest(nest: LoopNest, name: str, bits: OperandBits, calls: int, input_size: tuple[int, int]) -> Layer:
    if nest.kind == "matmul" or nest.transposed or len(nest.stride) > 2:
        batches, rows, columns, depth = nest.as_matmul()
        if is_transposed(nest):
            rows, columns = columns, rows
        shared = nest.kind == "matmul" and bool(nest.shared)
        dims = {"B" if shared else "G": batches, "P": rows, "K": columns, "C": depth}
        kind = "matmul" if batches == 1 or shared else "attention"
        return Layer(name, dims, bits=bits, kind="conv" if nest.kind == "conv" else kind, calls=calls)
    d = nest.dims
    stride, dilation, padding = (_pair(v, default) for v, default in ((nest.stride, 1), (nest.dilation, 1), (nest.padding, 0)))
    kind = "depthwise" if d["G"] > 1 and d["C"] == 1 else "conv"
    return Layer(name, dict(d), stride, dilation, padding, input_size, bits=bits, kind=kind, calls=calls)


def is_transposed(nest: LoopNest) -> bool:
    """Whether the first operand of a product is W: it alone is the same for the whole batch."""
    return nest.kind == "matmul" and nest.shared == ("a",)


def _pair(values: tuple[int, ...], default: int) -> tuple[int, int]:
    """(y, x); a one-dimensional convolution runs along y."""
    return (values[0] if values else default, values[1] if len(values) > 1 else default)
