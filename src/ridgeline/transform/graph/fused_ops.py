"""Ops that passes put into a graph for a GPU: our kernel where it wins, plain torch for everybody who looks inside.

    torch.ops.ridgeline.graph_rope, graph_rope_one, graph_rms_norm, graph_add_rms_norm, graph_swiglu
      eager, CUDA, no gradient wanted, a win in the shipped table at this size     kernel/
      torch.compile, torch.export's decompositions, CPU, gradients, smaller sizes  plain torch: Inductor fuses it with what is around it

So an optimised module may be compiled afterwards and loses nothing: Inductor sees formulas, not calls it cannot look into. The choice
is made at each call, by the sizes it really has. `no_win` asks the same question for nodes of the graph, when a pass runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from ...kernel.library import without_gradient
from ...kernel.replace import load_wins, worth
from ...kernel.rms_norm import add_rms_norm, rms_norm
from ...kernel.rope import rope, rope_one
from ...kernel.softmax import columns_kind
from ...kernel.swiglu import swiglu
from .edit import COMPUTES, shape_of

if TYPE_CHECKING:
    from .capture import Captured

_library = torch.library.Library("ridgeline", "FRAGMENT")


def no_win(graph: Captured, op: str, *nodes: fx.Node, columns: bool = False) -> str | None:
    """Why our kernel would not help for these operands at the example's sizes; None where the shipped table has it ahead of eager."""
    first = nodes[0].meta["val"]
    if not first.is_cuda:
        return f"torch has no op that does all of it, and the kernel for {op} is for GPUs"
    load_wins()
    sizes = [shape_of(graph, node) for node in nodes]
    count = sum(torch.Size(size).numel() for size in sizes)
    if worth(op, first, count, columns_kind(sizes[0][-1]) if columns else ""):
        return None
    return f"the kernel for {op} has no measured win on this device at {count:,} elements of {str(first.dtype).removeprefix('torch.')}"


def _ours(op: str, count: int, kind: str, first: Tensor, *rest: Tensor | None) -> bool:
    return without_gradient(first, *rest) and worth(op, first, count, kind)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, signed: bool, seq_dim: int) -> Tensor:
    heads_dim = 3 - seq_dim
    cos, sin = ((part if part.dim() == 3 else part.unsqueeze(0)).unsqueeze(heads_dim) for part in (cos, sin))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second if signed else -second, first), dim=-1) * sin


def _rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, signed: bool, seq_dim: int) -> tuple[Tensor, Tensor]:
    if _ours("rope", query.numel() + key.numel(), "", query, key, cos, sin):
        return rope(query, key, cos, sin, signed=signed, seq_dim=seq_dim)
    return _turned(query, cos, sin, signed, seq_dim), _turned(key, cos, sin, signed, seq_dim)


def _rope_one(x: Tensor, cos: Tensor, sin: Tensor, signed: bool, seq_dim: int) -> Tensor:
    if _ours("rope", x.numel(), "", x, cos, sin):
        return rope_one(x, cos, sin, signed=signed, seq_dim=seq_dim)
    return _turned(x, cos, sin, signed, seq_dim)


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if _ours("rms_norm", x.numel(), columns_kind(x.shape[-1]), x, weight):
        return rms_norm(x, weight, eps)
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    if _ours("add_rms_norm", x.numel(), columns_kind(x.shape[-1]), x, residual, weight):
        return add_rms_norm(x, residual, weight, eps)
    summed = x + residual
    return _rms_norm(summed, weight, eps), summed


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    if _ours("swiglu", gate.numel(), "", gate, up):
        return swiglu(gate, up)
    return functional.silu(gate) * up


def _define(schema: str, function: Any) -> Any:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, function, "CompositeImplicitAutograd")
    overload = getattr(torch.ops.ridgeline, name).default
    COMPUTES.add(overload)
    return overload


graph_rope = _define("graph_rope(Tensor query, Tensor key, Tensor cos, Tensor sin, bool signed, int seq_dim) -> (Tensor, Tensor)", _rope)
graph_rope_one = _define("graph_rope_one(Tensor x, Tensor cos, Tensor sin, bool signed, int seq_dim) -> Tensor", _rope_one)
graph_rms_norm = _define("graph_rms_norm(Tensor x, Tensor? weight, float eps) -> Tensor", _rms_norm)
graph_add_rms_norm = _define("graph_add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps) -> (Tensor, Tensor)", _add_rms_norm)
graph_swiglu = _define("graph_swiglu(Tensor gate, Tensor up) -> Tensor", _swiglu)
