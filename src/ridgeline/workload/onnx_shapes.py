"""The shape of every value of an ONNX graph, and what can be computed before any data is there.

    graph inputs [batch,3,224,224] ──fix_inputs(options)──> [1,3,224,224]
        │ onnx.shape_inference over the whole graph
        ▼
    Shapes.visit(node), in order ──> types, and values of small constants (Shape → Gather → Concat → Reshape chains)
      a shape the first pass missed is inferred again, with the values of the node's inputs now known

Constants are followed up to 1024 elements, and only through operators that compute shapes. That is done here and not by onnx's
own data propagation, in which a damaged Slice can take all memory. Shapes the file claims stand in only where inference finds
none, and nothing is computed from them. A value whose shape depends on data (NonZero) has none. No weight is read: large
initialisers keep their dimensions and lose their data.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ..core.errors import CaptureError, ModelFileError, OptionError
from .case import CaseOptions

SMALL = 1024
PLAIN = ("", "ai.onnx")
DATA_FIELDS = ("raw_data", "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
FOLDED = frozenset({
    "Gather", "GatherElements", "GatherND", "Concat", "Unsqueeze", "Squeeze", "Reshape", "Flatten", "Identity", "Add", "Sub", "Mul",
    "Div", "Mod", "Neg", "Abs", "Cast", "Slice", "Range", "Expand", "ConstantOfShape", "Where", "Equal", "Less", "Greater",
    "LessOrEqual", "GreaterOrEqual", "Not", "And", "Or", "Min", "Max", "Sum", "ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin",
    "Ceil", "Floor", "Round", "Sqrt", "Pow", "Reciprocal", "Tile", "Transpose", "CumSum", "ScatterND", "ScatterElements",
})  # fmt: skip
SAME_AS_FIRST = frozenset({
    "GroupNormalization", "MeanVarianceNormalization", "LayerNormalization", "RMSNormalization", "BatchNormalization",
})  # fmt: skip
LENGTHS = ("seq", "len", "context", "token", "past", "total", "time")


def fix_inputs(graph: Any, options: CaseOptions, model: str) -> tuple[int, list[str]]:
    """Give every open dimension of the graph's inputs a size; returns the batch and a note for each symbol that was set."""
    inputs = real_inputs(graph)
    for value in inputs:
        if not value.type.tensor_type.HasField("shape"):
            raise CaptureError(
                f"input {value.name!r} has no shape", why="its sizes decide the work", do="export the model with its input shapes"
            )
    dims = [(value.name, index, dim) for value in inputs for index, dim in enumerate(value.type.tensor_type.shape.dim)]
    open_dims = [(name, index, dim) for name, index, dim in dims if dim.dim_value <= 0]
    decode = any("past" in dim.dim_param.lower() for _, _, dim in open_dims)
    sizes: dict[str, int] = {}
    batched = lengthened = False
    for name, index, dim in open_dims:
        symbol = dim.dim_param
        if length := any(word in symbol.lower() for word in LENGTHS):
            size = _length(name, index, symbol, options.context, decode)
        else:
            size = _batch(name, index, symbol, options.batch)
        batched, lengthened = batched or not length, lengthened or length
        sizes[symbol or f"{name}[{index}]"] = size
        dim.Clear()
        dim.dim_value = size
    if options.context is not None and not lengthened:
        why = "no input has an open dimension named like a length"
        raise OptionError(f"context {options.context} for {model}", why=why, do="leave the context out")
    _substitute(graph, sizes)
    notes = [f"input dimension {symbol} set to {size}" for symbol, size in sizes.items()]
    return _settled_batch(inputs, options.batch, batched, model), notes


def real_inputs(graph: Any) -> list[Any]:
    """Graph inputs that are tensors and not initialisers listed as inputs (IR version 3)."""
    stored = {tensor.name for tensor in graph.initializer} | {sparse.values.name for sparse in graph.sparse_initializer}
    return [value for value in graph.input if value.name not in stored and value.type.HasField("tensor_type")]


def _length(name: str, index: int, symbol: str, context: int | None, decode: bool) -> int:
    if context is None:
        raise CaptureError(
            f"input {name!r} has an open dimension {index} ({symbol})",
            why="how long the sequence is decides the work",
            do="give a context, e.g. --context 128",
        )
    if not decode:
        return context
    # With keys and values of earlier tokens given, the pass is one new token: the past holds the rest of the context.
    if "+" in symbol or "total" in symbol.lower() or "mask" in name.lower():
        return context
    return context - 1 if "past" in symbol.lower() else 1


def _batch(name: str, index: int, symbol: str, batch: int | None) -> int:
    if index == 0 or "batch" in symbol.lower():
        return 1 if batch is None else batch
    raise CaptureError(
        f"input {name!r} has an open dimension {index}{f' ({symbol})' if symbol else ''}",
        why="it is neither the batch nor named like a sequence length, so no option sets it",
        do=f"fix it: python -m onnxruntime.tools.make_dynamic_shape_fixed --input_name {name} --input_shape SIZES model.onnx fixed.onnx",
    )


def _settled_batch(inputs: list[Any], asked: int | None, batched: bool, model: str) -> int:
    first = next((v.type.tensor_type.shape.dim[0].dim_value for v in inputs if v.type.tensor_type.shape.dim), 1)
    if asked is None:
        return 1 if batched else int(first)
    if not batched and asked != first:
        raise OptionError(
            f"batch {asked} for {model}",
            why=f"the file fixes the batch to {first}",
            do="export it with an open batch dimension, or leave it out",
        )
    return asked


def _substitute(graph: Any, sizes: dict[str, int]) -> None:
    for value in (*graph.value_info, *graph.output):
        for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
            if dim.dim_param in sizes:
                size = sizes[dim.dim_param]
                dim.Clear()
                dim.dim_value = size


def strip_data(tensor: Any) -> None:
    """Drop the numbers of a large tensor, so that inference does not copy them; negative dimensions are refused."""
    if any(size < 0 for size in tensor.dims):
        what = f"tensor {tensor.name!r} has dimensions {list(tensor.dims)}"
        raise ModelFileError(what, why="a size is below zero", do="export the model again")
    if prod(tensor.dims) > SMALL:
        for field in DATA_FIELDS:
            tensor.ClearField(field)


def _take_claims(graph: Any) -> dict[str, Any]:
    """The types the file gives for values inside the graph, taken out of it so that inference does not lean on them."""
    claimed = {}
    for value in (*graph.value_info, *graph.output):
        kind = type(value.type)()
        kind.CopyFrom(value.type)
        claimed[value.name] = kind
    del graph.value_info[:]
    for value in graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    return claimed


class Shapes:
    """Types of all values, and the values of small constants; `visit` every node in order."""

    def __init__(self, model: Any) -> None:
        import onnx

        self.onnx = onnx
        self.claimed = _take_claims(model.graph)
        graph = onnx.shape_inference.infer_shapes(model, strict_mode=False).graph
        self.opsets = model.opset_import
        self.version = max((o.version for o in self.opsets if o.domain in PLAIN), default=1)
        self.types: dict[str, Any] = {value.name: value.type for value in (*graph.input, *graph.value_info, *graph.output)}
        self.values: dict[str, Any] = {}

    def store(self, graph: Any) -> None:
        """Take in the initialisers of a graph."""
        for tensor in graph.initializer:
            self._store(tensor.name, tensor)
        for sparse in graph.sparse_initializer:
            self.types[sparse.values.name] = self.onnx.helper.make_tensor_type_proto(sparse.values.data_type, list(sparse.dims))

    def rename(self, inner: str, outer: str) -> None:
        """What a nested graph calls `inner` is `outer` to the node around it."""
        for known in (self.types, self.values):
            if inner in known:
                known[outer] = known[inner]

    def _store(self, name: str, tensor: Any) -> None:
        self.types[name] = self.onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
        if prod(tensor.dims) <= SMALL and tensor.data_location != self.onnx.TensorProto.EXTERNAL:
            self.values[name] = self.onnx.numpy_helper.to_array(tensor)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The static shape of a tensor, or None where it is not known."""
        kind = self.types.get(name)
        if kind is None or not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
            return None
        dims = kind.tensor_type.shape.dim
        return tuple(int(d.dim_value) for d in dims) if all(d.HasField("dim_value") and d.dim_value >= 0 for d in dims) else None

    def element_type(self, name: str) -> int:
        return int(self.types[name].tensor_type.elem_type)

    def visit(self, node: Any) -> None:
        """Settle the outputs of one node whose inputs are settled."""
        plain = node.domain in PLAIN
        if plain and node.op_type == "Constant":
            self._constant(node)
            return
        if plain and any(self.shape(name) is None for name in node.output if name):
            self._infer(node)
        unknown = [name for name in node.output if name and self.shape(name) is None]
        self.types |= {name: self.claimed[name] for name in unknown if name in self.claimed}
        if plain and not unknown:
            self._fold(node)

    def _constant(self, node: Any) -> None:
        attribute = node.attribute[0]
        if attribute.name == "value":
            self._store(node.output[0], attribute.t)
        elif attribute.name.startswith(("value_int", "value_float")):
            import numpy as np

            kind = np.int64 if "int" in attribute.name else np.float32
            self._store(node.output[0], self.onnx.numpy_helper.from_array(np.array(self.onnx.helper.get_attribute_value(attribute), kind)))

    def _infer(self, node: Any) -> None:
        known = {name: self.types[name] for name in node.input if name in self.types}
        data = {name: self.onnx.numpy_helper.from_array(self.values[name]) for name in node.input if name in self.values}
        try:
            schema = self.onnx.defs.get_schema(node.op_type, self.version, "")
            found = self.onnx.shape_inference.infer_node_outputs(schema, node, known, data, opset_imports=self.opsets)
        except Exception:  # onnx raises many types here; without a shape the node is listed as uncounted
            found = {}
        self.types |= {name: kind for name, kind in found.items() if name}
        if node.op_type in SAME_AS_FIRST and self.shape(node.output[0]) is None and node.input[0] in self.types:
            self.types[node.output[0]] = self.types[node.input[0]]

    def _fold(self, node: Any) -> None:
        import numpy as np

        if node.op_type in ("Shape", "Size"):
            shape = self.shape(node.input[0])
            if shape is not None:
                bounds = {a.name: a.i for a in node.attribute}
                part = shape[bounds.get("start", 0) : bounds.get("end", len(shape))]
                self.values[node.output[0]] = np.array(part if node.op_type == "Shape" else prod(shape), np.int64)
            return
        inputs, outputs = list(dict.fromkeys(name for name in node.input if name)), [name for name in node.output if name]
        shapes = [self.shape(name) for name in outputs]
        if node.op_type in FOLDED and all(n in self.values for n in inputs) and all(s is not None and prod(s) <= SMALL for s in shapes):
            self._evaluate(node, inputs, outputs)

    def _evaluate(self, node: Any, inputs: list[str], outputs: list[str]) -> None:
        import numpy as np
        from onnx.reference import ReferenceEvaluator

        helper = self.onnx.helper
        described = [[helper.make_value_info(name, self.types[name]) for name in names] for names in (inputs, outputs)]
        model = helper.make_model(helper.make_graph([node], "node", *described), opset_imports=self.opsets)
        try:
            with np.errstate(all="ignore"):
                results = ReferenceEvaluator(model).run(None, {name: self.values[name] for name in inputs})
        except Exception:  # numpy refuses what the node asks for: its value stays unknown, its shape is kept
            return
        self.values |= {name: np.asarray(result) for name, result in zip(outputs, results, strict=True)}
