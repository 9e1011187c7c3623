"""The nodes of an ONNX graph, in order, into Ops.

    node ──Shapes.visit──> TensorInfo of inputs and outputs ──onnx_cost──> Op, or Uncounted
      initialisers and Constant nodes are weights, inputs named like a cache are KV cache, the rest activations

Views share the value they look at. What a runtime computes once, when it loads the model (shapes, transposed weights), is
folded: no op of the run, only counted in `folded`. An If whose condition is known is walked through the branch it takes;
other control flow, operators of other domains and shapes that depend on data are listed as uncounted.
"""

from __future__ import annotations

import re
from typing import Any

from ..core.dtypes import BITS, FLOATING, bytes_of
from .exported import is_cache
from .formulas import Call, Cost
from .graph import Op, Operand, Role, Uncounted
from .onnx_formulas import COPIES, VIEWS, onnx_cost
from .onnx_shapes import PLAIN, Shapes, real_inputs
from .recorder import compute_dtype
from .tensors import TensorInfo

CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})
# What runtimes leave to the run although all inputs are stored: unpacking weights, drawing numbers, nested graphs.
NOT_FOLDED = CONTROL_FLOW | {"DequantizeLinear", "Bernoulli", "Multinomial", "RandomNormalLike", "RandomUniformLike"}
DTYPES = {
    "FLOAT": "float32", "DOUBLE": "float64", "UINT16": "int16", "UINT32": "int32", "UINT64": "int64", "STRING": "uint8", "UINT4": "int4",
    "FLOAT4E2M1": "int4", "UINT2": "int4", "INT2": "int4",
}  # fmt: skip


class Walk:
    """Collects the ops of one graph."""

    def __init__(self, model: Any) -> None:
        import onnx

        self.onnx = onnx
        self.shapes = Shapes(model)
        self.infos: dict[str, TensorInfo] = {}
        self.storage_bytes: dict[str, int] = {}
        self.ops: list[Op] = []
        self.uncounted: list[Uncounted] = []
        self.folded = 0
        self.inputs = [info for value in real_inputs(model.graph) if (info := self._bind(value.name, self._input_role(value.name)))]
        self.outputs = [value.name for value in model.graph.output]
        self.weights: list[TensorInfo] = []

    def graph(self, graph: Any) -> None:
        """Record every node of a graph, or of the branch an If takes."""
        self.shapes.store(graph)
        stored = (*(t.name for t in graph.initializer), *(s.values.name for s in graph.sparse_initializer))
        self.weights += [info for name in stored if (info := self._bind(name, "weights"))]
        for node in graph.node:
            self.shapes.visit(node)
            if node.domain in PLAIN and node.op_type == "Constant":
                self._bind(node.output[0], "weights")
            elif node.domain in PLAIN and node.op_type == "If" and node.input[0] in self.shapes.values:
                self._branch(node)
            else:
                self._node(node)

    def _branch(self, node: Any) -> None:
        taken = "then_branch" if self.shapes.values[node.input[0]].item() else "else_branch"
        branch = next(a.g for a in node.attribute if a.name == taken)
        self.graph(branch)
        for outer, inner in zip(node.output, (value.name for value in branch.output), strict=True):
            self.shapes.rename(inner, outer)
            if inner in self.infos:
                self.infos[outer] = self.infos[inner]

    def _input_role(self, name: str) -> Role:
        cached = is_cache(name.replace(".", "_")) or name.startswith("past_")
        return "kv_cache" if cached and len(self.shapes.shape(name) or ()) > 2 else "activations"

    def _bind(self, name: str, role: Role, source: TensorInfo | None = None) -> TensorInfo | None:
        """Describe one value, a view of `source` if that is given; None where the shape is not known."""
        shape = self.shapes.shape(name)
        if shape is None:
            return None
        info = TensorInfo(source.value if source else name, source.role if source else role, shape, self._dtype(name))
        if source is None:
            self.storage_bytes[name] = bytes_of(info.numel, info.dtype)
        self.infos[name] = info
        return info

    def _dtype(self, name: str) -> str:
        plain = self.onnx.TensorProto.DataType.Name(self.shapes.element_type(name))
        plain = DTYPES.get(plain, "float8" if plain.startswith(("FLOAT8", "FLOAT6")) else plain.lower())
        return plain if plain in BITS else "uint8"

    def _node(self, node: Any) -> None:
        args = tuple(self.infos.get(name) for name in node.input)
        inputs, known_inputs = [a for a in args if a], all(name in self.infos for name in node.input if name)
        names = [name for name in node.output if name]
        plain = node.domain in PLAIN
        stored = plain and known_inputs and bool(inputs) and all(a.role == "weights" for a in inputs)
        folded = plain and node.op_type not in NOT_FOLDED and (stored or all(name in self.shapes.values for name in names))
        role: Role = "weights" if folded or stored else "kv_cache" if _keeps_cache(node, inputs) else "activations"
        source = inputs[0] if plain and node.op_type in VIEWS and not folded and known_inputs else None
        bound = [self._bind(name, _output_role(node, i, role), source if i == 0 else None) for i, name in enumerate(names)]
        outputs = tuple(info for info in bound if info)
        if folded:
            self.folded += 1
            return
        call = Call(node.op_type, args, {a.name: _plain_value(a, self.onnx) for a in node.attribute}, outputs)
        # The mask some Dropouts return has no shape before opset 10, and nothing in inference reads it.
        self._record(node, call, _why_not(node, known_inputs and (bool(source and outputs) or len(outputs) == len(names))))

    def _record(self, node: Any, call: Call, why: str) -> None:
        name, layer = node.name or f"{node.op_type}_{len(self.ops)}", layer_of(node)
        cost = None if why else onnx_cost(call)
        if cost is None or cost.uncounted:
            zero = bool(call.outputs) and not any(o.dtype in FLOATING for o in call.outputs)
            reason = why or (cost.uncounted if cost else "no formula for this operator")
            self.uncounted.append(Uncounted(name, node.op_type, layer, zero_flop=zero, why=reason))
            cost = cost or Cost("other")
        reads = cost.reads if cost.reads is not None else _once(call.tensors())
        writes = cost.writes if cost.writes is not None else _once(list(call.outputs))
        # The scales of a quantised product are floating point; what it multiplies is its first input.
        dtype = call.tensors()[0].dtype if cost.loops else compute_dtype(reads, writes)
        self.ops.append(Op(name, layer, cost.kind, call.operator, dtype, reads, writes, cost.flops, cost.matmul_flops, cost.loops))


def _keeps_cache(node: Any, inputs: list[TensorInfo]) -> bool:
    return (node.op_type in COPIES or node.op_type == "Attention") and any(i.role == "kv_cache" for i in inputs)


def _output_role(node: Any, index: int, role: Role) -> Role:
    """Of what attention returns, only the lengthened keys and values are cache."""
    return "activations" if node.op_type == "Attention" and index not in (1, 2) else role


def _why_not(node: Any, known: bool) -> str:
    if node.domain not in PLAIN:
        return f"an operator of the domain {node.domain}"
    if node.op_type in CONTROL_FLOW:
        return "its nested graph runs a data-dependent number of times"
    return "" if known else "a shape depends on data and is not known before the run"


def _plain_value(attribute: Any, onnx: Any) -> Any:
    """Numbers and text as Python has them; tensors and graphs are of no interest to a formula."""
    kinds = onnx.AttributeProto
    if attribute.type not in (kinds.FLOAT, kinds.INT, kinds.STRING, kinds.FLOATS, kinds.INTS):
        return None
    value = onnx.helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else value


def _once(tensors: list[TensorInfo]) -> tuple[Operand, ...]:
    """Each storage once: x * x reads x once."""
    first: dict[str, TensorInfo] = {}
    for tensor in tensors:
        first.setdefault(tensor.value, tensor)
    return tuple(tensor.operand() for tensor in first.values() if tensor.elements)


def layer_of(node: Any) -> str:
    """The module path a node came from: `/layer1/layer1.0/conv1/Conv` → `layer1.0.conv1`; else its own name."""
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            scopes = re.findall(r"'([^']*)'", entry.value)
            return scopes[-2] if len(scopes) > 1 else ""
    if "/" not in node.name:
        return str(node.name)
    path: list[str] = []
    for part in node.name.strip("/").split("/")[:-1]:
        if path and part.startswith(path[-1] + "."):  # a container and its child: layer1, layer1.0
            path.pop()
        path.append(part)
    return ".".join(path)
