"""How each operator of an exported torch graph is said in ONNX.

    torch.fx node of Core ATen ──OPERATORS[target](graph, node)──> ONNX nodes, the name of their result

Sizes that depend on the batch are not known here: in a Reshape one of them becomes -1, in a Slice "to the end" stays open. What
cannot be said is an error with the operator's name and the layer it came from. Semantics: ONNX operators of opset 20.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ..core.errors import TransformError

INT32, BOOL = 6, 9  # onnx.TensorProto's numbers
END = 2**63 - 1  # torch's and ONNX's "to the end" of a slice
NUMPY_TYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)


@dataclass(slots=True)
class Graph:
    """The ONNX graph as it grows: nodes, constants, and the name of each torch value."""

    nodes: list[Any] = field(default_factory=list)
    constants: dict[str, Tensor] = field(default_factory=dict)
    names: dict[fx.Node, Any] = field(default_factory=dict)  # a name, or a number where the value is a size
    count: int = 0

    def add(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        """One node with one result."""
        import onnx

        self.count += 1
        name = f"{kind.lower()}_{self.count}"
        self.nodes.append(onnx.helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, value: Tensor) -> str:
        """A tensor of the graph's own."""
        self.count += 1
        name = f"constant_{self.count}"
        self.constants[name] = value
        return name

    def numbers(self, values: Sequence[int]) -> str:
        return self.constant(torch.tensor(list(values), dtype=torch.int64))

    def value(self, given: Any, like: Tensor | None = None) -> str:
        """The name of a torch value; a Python number becomes a constant of the dtype of `like`."""
        if isinstance(given, fx.Node):
            return str(self.names[given])
        if given is None:
            return ""
        return self.constant(torch.tensor(given, dtype=like.dtype if like is not None else None))


Convert = Callable[[Graph, fx.Node], Any]
OPERATORS: dict[Any, Convert] = {}
aten = torch.ops.aten


def says(*targets: Any) -> Callable[[Convert], Convert]:
    """Register the converter of some operators."""

    def register(convert: Convert) -> Convert:
        OPERATORS.update({target: convert for target in targets})
        return convert

    return register


def refused(node: fx.Node, why: str) -> TransformError:
    """The error for what ONNX, or this converter, cannot say."""
    layer = next((str(entry[0]) for entry in reversed((node.meta.get("nn_module_stack") or {}).values())), "") or "the model"
    return TransformError(
        f"{node.target} of {layer.removeprefix('L__self___')} cannot be exported to ONNX",
        why=why,
        do="replace that layer, or save the model as safetensors with save_model",
    )


def _argument(node: fx.Node, place: int, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else default


def _shape(node: Any) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def _simple(kind: str, **attributes: Any) -> Convert:
    return lambda graph, node: graph.add(kind, [graph.value(node.args[0])], **attributes)


for _target, _kind in (
    (aten.relu.default, "Relu"), (aten.sigmoid.default, "Sigmoid"), (aten.tanh.default, "Tanh"), (aten.exp.default, "Exp"),
    (aten.neg.default, "Neg"), (aten.sqrt.default, "Sqrt"), (aten.abs.default, "Abs"), (aten.erf.default, "Erf"),
    (aten.log.default, "Log"), (aten.reciprocal.default, "Reciprocal"), (aten.hardswish.default, "HardSwish"),
    (aten.clone.default, "Identity"), (aten.alias.default, "Identity"), (aten.detach.default, "Identity"),
):  # fmt: skip
    OPERATORS[_target] = _simple(_kind)


def _binary(kind: str) -> Convert:
    def convert(graph: Graph, node: fx.Node) -> str:
        left, right = node.args[0], node.args[1]
        like = node.meta["val"]
        second = graph.value(right, like)
        if node.kwargs.get("alpha", 1) != 1:
            second = graph.add("Mul", [second, graph.value(node.kwargs["alpha"], like)])
        return graph.add(kind, [graph.value(left, like), second])

    return convert


for _targets, _kind in (
    ((aten.add.Tensor, aten.add.Scalar), "Add"), ((aten.sub.Tensor, aten.sub.Scalar), "Sub"), ((aten.mul.Tensor, aten.mul.Scalar), "Mul"),
    ((aten.div.Tensor, aten.div.Scalar), "Div"), ((aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor), "Pow"),
    ((aten.maximum.default,), "Max"), ((aten.minimum.default,), "Min"),
):  # fmt: skip
    OPERATORS.update(dict.fromkeys(_targets, _binary(_kind)))


@says(aten.rsqrt.default)
def _rsqrt(graph: Graph, node: fx.Node) -> str:
    return graph.add("Reciprocal", [graph.add("Sqrt", [graph.value(node.args[0])])])


@says(aten.convolution.default)
def _convolution(graph: Graph, node: fx.Node) -> str:
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = node.args
    inputs = [graph.value(x), graph.value(weight), *([graph.value(bias)] if bias is not None else [])]
    attributes = {"strides": list(stride), "pads": [*padding, *padding], "dilations": list(dilation), "group": groups}  # type: ignore[arg-type,misc]
    if transposed:
        return graph.add("ConvTranspose", inputs, output_padding=list(output_padding), **attributes)  # type: ignore[arg-type]
    return graph.add("Conv", inputs, **attributes)


@says(aten._native_batch_norm_legit_no_training.default)
def _batch_norm(graph: Graph, node: fx.Node) -> str:
    x, weight, bias, mean, variance, _, eps = node.args
    like, channels = node.meta["val"][0], _shape(node.args[0])[1]
    gain = graph.value(weight) if weight is not None else graph.constant(torch.ones(channels, dtype=like.dtype))
    shift = graph.value(bias) if bias is not None else graph.constant(torch.zeros(channels, dtype=like.dtype))
    return graph.add("BatchNormalization", [graph.value(x), gain, shift, graph.value(mean), graph.value(variance)], epsilon=eps)


@says(aten.native_layer_norm.default)
def _layer_norm(graph: Graph, node: fx.Node) -> str:
    x, normalized, weight, bias, eps = node.args
    like = node.meta["val"][0]
    gain = graph.value(weight) if weight is not None else graph.constant(torch.ones(list(normalized), dtype=like.dtype))  # type: ignore[arg-type]
    inputs = [graph.value(x), gain, *([graph.value(bias)] if bias is not None else [])]
    return graph.add("LayerNormalization", inputs, axis=-len(normalized), epsilon=eps)  # type: ignore[arg-type]


@says(aten.max_pool2d_with_indices.default)
def _max_pool(graph: Graph, node: fx.Node) -> str:
    kernel = _argument(node, 1)
    stride, padding = _argument(node, 2) or kernel, _pair(_argument(node, 3, [0, 0]))
    attributes = {"dilations": _pair(_argument(node, 4, [1, 1])), "ceil_mode": int(_argument(node, 5, False))}
    return graph.add(
        "MaxPool", [graph.value(node.args[0])], kernel_shape=_pair(kernel), strides=_pair(stride), pads=padding * 2, **attributes
    )


@says(aten.avg_pool2d.default)
def _average_pool(graph: Graph, node: fx.Node) -> str:
    kernel = _argument(node, 1)
    stride, padding = _argument(node, 2) or kernel, _pair(_argument(node, 3, [0, 0]))
    if _argument(node, 6) is not None:
        raise refused(node, "it divides by a number of its own")
    attributes = {"ceil_mode": int(_argument(node, 4, False)), "count_include_pad": int(_argument(node, 5, True))}
    return graph.add(
        "AveragePool", [graph.value(node.args[0])], kernel_shape=_pair(kernel), strides=_pair(stride), pads=padding * 2, **attributes
    )


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value) * (2 // len(value))


@says(operator.getitem)
def _getitem(graph: Graph, node: fx.Node) -> Any:
    source, place = node.args
    found = graph.names[source]  # type: ignore[index]
    if isinstance(found, list):
        return found[place]  # type: ignore[index]
    if place != 0:
        raise refused(node, f"only the first result of {source.target} is converted")  # type: ignore[union-attr]
    return found


@says(aten.addmm.default)
def _addmm(graph: Graph, node: fx.Node) -> str:
    bias, left, right = (graph.value(one) for one in node.args)
    factors = {"alpha": float(node.kwargs.get("alpha", 1)), "beta": float(node.kwargs.get("beta", 1))}  # type: ignore[arg-type]
    return graph.add("Gemm", [left, right, bias], **factors)


@says(aten.mm.default, aten.bmm.default)
def _matmul(graph: Graph, node: fx.Node) -> str:
    return graph.add("MatMul", [graph.value(one) for one in node.args])


@says(aten.permute.default)
def _permute(graph: Graph, node: fx.Node) -> str:
    rank = len(_shape(node.args[0]))
    return graph.add("Transpose", [graph.value(node.args[0])], perm=[one % rank for one in node.args[1]])  # type: ignore[operator,union-attr]


@says(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(graph: Graph, node: fx.Node) -> str:
    sizes = [-1 if isinstance(size, fx.Node | torch.SymInt) else size for size in node.args[1]]  # type: ignore[union-attr]
    if sizes.count(-1) > 1:
        raise refused(node, f"its shape {sizes} has more than one size that is not fixed")
    return graph.add("Reshape", [graph.value(node.args[0]), graph.numbers(sizes)])  # type: ignore[arg-type]


@says(aten.expand.default)
def _expand(graph: Graph, node: fx.Node) -> str:
    sizes = [1 if isinstance(size, fx.Node | torch.SymInt) or size == -1 else size for size in node.args[1]]  # type: ignore[union-attr]
    return graph.add("Expand", [graph.value(node.args[0]), graph.numbers(sizes)])  # type: ignore[arg-type]


@says(aten.unsqueeze.default)
def _unsqueeze(graph: Graph, node: fx.Node) -> str:
    return graph.add("Unsqueeze", [graph.value(node.args[0]), graph.numbers([node.args[1]])])  # type: ignore[list-item]


@says(aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(graph: Graph, node: fx.Node) -> str:
    asked = node.args[1]
    shape = _shape(node.args[0])
    axes = [one for one in (asked if isinstance(asked, list | tuple) else [asked]) if shape[one] == 1]  # type: ignore[index]
    return graph.add("Squeeze", [graph.value(node.args[0]), graph.numbers(axes)])  # type: ignore[arg-type]


@says(aten.slice.Tensor)
def _slice(graph: Graph, node: fx.Node) -> str:
    axis, start, end, step = (_argument(node, place, default) for place, default in ((1, 0), (2, None), (3, None), (4, 1)))
    parts = [0 if start is None else start, END if end is None or isinstance(end, fx.Node) else end, axis, step]
    if any(isinstance(part, fx.Node) for part in parts):
        raise refused(node, "it starts at a size that is not fixed")
    return graph.add("Slice", [graph.value(node.args[0]), *(graph.numbers([part]) for part in parts)])


@says(aten.select.int)
def _select(graph: Graph, node: fx.Node) -> str:
    place = graph.constant(torch.tensor(node.args[2], dtype=torch.int64))
    return graph.add("Gather", [graph.value(node.args[0]), place], axis=node.args[1])


@says(aten.cat.default)
def _cat(graph: Graph, node: fx.Node) -> str:
    return graph.add("Concat", [graph.value(one) for one in node.args[0]], axis=_argument(node, 1, 0))  # type: ignore[union-attr]


@says(aten.constant_pad_nd.default)
def _pad(graph: Graph, node: fx.Node) -> str:
    given = list(node.args[1])  # type: ignore[arg-type]
    rank = len(_shape(node.args[0]))
    pairs = [(given[place], given[place + 1]) for place in range(0, len(given), 2)]  # last dimension first
    pairs = [(0, 0)] * (rank - len(pairs)) + pairs[::-1]
    fill = graph.value(float(_argument(node, 2, 0.0)), node.meta["val"])
    return graph.add("Pad", [graph.value(node.args[0]), graph.numbers([p[0] for p in pairs] + [p[1] for p in pairs]), fill])


@says(aten.mean.dim, aten.sum.dim_IntList, aten.amax.default)
def _reduce(graph: Graph, node: fx.Node) -> str:
    kind = {aten.mean.dim: "ReduceMean", aten.sum.dim_IntList: "ReduceSum", aten.amax.default: "ReduceMax"}[node.target]  # type: ignore[index]
    axes = _argument(node, 1) or list(range(len(_shape(node.args[0]))))
    return graph.add(kind, [graph.value(node.args[0]), graph.numbers(axes)], keepdims=int(_argument(node, 2, False)))


@says(aten.eq.Scalar, aten.eq.Tensor)
def _equal(graph: Graph, node: fx.Node) -> str:
    return graph.add("Equal", [graph.value(node.args[0]), graph.value(node.args[1], node.args[0].meta["val"])])  # type: ignore[union-attr]


@says(aten.logical_not.default)
def _not(graph: Graph, node: fx.Node) -> str:
    return graph.add("Not", [graph.value(node.args[0])])


@says(aten.any.dim)
def _any(graph: Graph, node: fx.Node) -> str:
    counted = graph.add("Cast", [graph.value(node.args[0])], to=INT32)
    largest = graph.add("ReduceMax", [counted, graph.numbers([node.args[1]])], keepdims=int(_argument(node, 2, False)))  # type: ignore[list-item]
    return graph.add("Cast", [largest], to=BOOL)


@says(aten.where.self)
def _where(graph: Graph, node: fx.Node) -> str:
    return graph.add("Where", [graph.value(one, node.meta["val"]) for one in node.args])


@says(aten.full_like.default)
def _full_like(graph: Graph, node: fx.Node) -> str:
    size = graph.add("Shape", [graph.value(node.args[0])])
    return graph.add("Expand", [graph.value(node.args[1], node.meta["val"]), size])


@says(aten.full.default, aten.scalar_tensor.default)
def _full(graph: Graph, node: fx.Node) -> str:
    value = node.args[1] if node.target == aten.full.default else node.args[0]
    sizes = list(node.meta["val"].shape)
    if not all(isinstance(size, int) for size in sizes):
        raise refused(node, "it makes a tensor of a size that is not fixed")
    return graph.constant(torch.full(sizes, value, dtype=node.meta["val"].dtype))  # type: ignore[arg-type]


@says(aten._softmax.default)
def _softmax(graph: Graph, node: fx.Node) -> str:
    return graph.add("Softmax", [graph.value(node.args[0])], axis=node.args[1])


@says(aten._log_softmax.default)
def _log_softmax(graph: Graph, node: fx.Node) -> str:
    return graph.add("LogSoftmax", [graph.value(node.args[0])], axis=node.args[1])


@says(aten.gelu.default)
def _gelu(graph: Graph, node: fx.Node) -> str:
    return graph.add("Gelu", [graph.value(node.args[0])], approximate=node.kwargs.get("approximate", "none"))


@says(aten.leaky_relu.default)
def _leaky_relu(graph: Graph, node: fx.Node) -> str:
    return graph.add("LeakyRelu", [graph.value(node.args[0])], alpha=float(_argument(node, 1, 0.01)))


@says(aten.clamp.default, aten.hardtanh.default)
def _clamp(graph: Graph, node: fx.Node) -> str:
    whole = node.target == aten.hardtanh.default
    like = node.meta["val"]
    ends = [_argument(node, 1, -1.0 if whole else None), _argument(node, 2, 1.0 if whole else None)]
    return graph.add("Clip", [graph.value(node.args[0]), *("" if end is None else graph.value(end, like) for end in ends)])


@says(aten.embedding.default)
def _embedding(graph: Graph, node: fx.Node) -> str:
    return graph.add("Gather", [graph.value(node.args[0]), graph.value(node.args[1])], axis=0)


@says(aten.sym_size.int, operator.mul, operator.add, operator.sub, operator.floordiv)
def _size(graph: Graph, node: fx.Node) -> int:
    return -1  # not fixed; only shapes read it


@says(aten._assert_scalar.default, aten._assert_tensor_metadata.default)
def _nothing(graph: Graph, node: fx.Node) -> None:
    return None


def _grid(graph: Graph, node: fx.Node) -> list[str]:
    x, scale, zero = node.args
    grid = [torch.tensor(scale, dtype=torch.float32), torch.tensor(zero, dtype=torch.uint8)]
    return [graph.value(x), *map(graph.constant, grid)]


def _dequantize_channels(graph: Graph, node: fx.Node) -> str:
    codes, scales = node.args
    zeros = graph.constant(torch.zeros(_shape(scales)[0], dtype=torch.int8))
    return graph.add("DequantizeLinear", [graph.value(codes), graph.value(scales), zeros], axis=0)


GRIDS: dict[str, Convert] = {  # the operators of onnx_view.py
    "ridgeline_onnx.quantize.default": lambda graph, node: graph.add("QuantizeLinear", _grid(graph, node)),
    "ridgeline_onnx.dequantize.default": lambda graph, node: graph.add("DequantizeLinear", _grid(graph, node)),
    "ridgeline_onnx.dequantize_channels.default": _dequantize_channels,
}


def converter(node: fx.Node) -> Convert:
    """The converter of a node's operator, or the error that names it."""
    found = OPERATORS.get(node.target) or GRIDS.get(str(node.target))
    if found is None:
        raise refused(node, "no ONNX form of this operator is known here")
    return found
