"""FLOPs, loops and touched elements of ONNX operators, by the conventions of `formulas.py`.

    Call("Conv", inputs, attributes, outputs) ──ONNX_FORMULAS["Conv"]──> Cost
      inputs keep their positions, with None where an optional one is left out

Where ONNX and torch mean the same operator the torch formula is used. Reshape, Squeeze, Unsqueeze, Flatten, Identity and
Dropout (inference) are views, as runtimes make them; Transpose, Slice, Split, Expand and Cast are copies, because ONNX
tensors have no strides. An operator found nowhere here is `None`: the caller lists it as uncounted.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from .formulas import FORMULAS, Call, Cost, attention_cost, conv_cost, matmul_cost
from .graph import LoopNest
from .tensors import TensorInfo

Formula = Callable[[Call], Cost]
Shape = tuple[int, ...]

VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout"})
COPIES = frozenset({
    "Transpose", "Slice", "Split", "Concat", "Pad", "Expand", "Tile", "Cast", "CastLike", "BitCast", "DepthToSpace", "SpaceToDepth",
    "Trilu", "ReverseSequence", "CenterCropPad", "Col2Im", "OneHot", "TopK", "NonZero", "Compress", "Unique", "Scatter",
    "ScatterElements", "ScatterND", "TensorScatter", "MaxUnpool", "Multinomial", "NonMaxSuppression",
})  # fmt: skip
CREATES = frozenset({
    "Constant", "ConstantOfShape", "Range", "Shape", "Size", "EyeLike", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike", "Bernoulli", "HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix",
})  # fmt: skip
POINTWISE = frozenset({
    "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr",
    "BitwiseXor", "Ceil", "Celu", "Clip", "Cos", "Cosh", "Div", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater",
    "GreaterOrEqual", "HardSigmoid", "HardSwish", "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean", "Min",
    "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign",
    "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tan", "Tanh", "ThresholdedRelu", "Where", "Xor",
    "QuantizeLinear", "DequantizeLinear",
})  # fmt: skip
REDUCTIONS = frozenset({
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum",
    "ReduceSumSquare", "ArgMax", "ArgMin", "CumSum", "CumProd", "Hardmax",
})  # fmt: skip
# FLOPs an input element of operators that read their first input once.
PER_INPUT = {
    "Softmax": ("softmax", 5), "LogSoftmax": ("softmax", 5),
    "LayerNormalization": ("norm", 7), "GroupNormalization": ("norm", 7), "InstanceNormalization": ("norm", 7),
    "MeanVarianceNormalization": ("norm", 7), "RMSNormalization": ("norm", 4), "BatchNormalization": ("norm", 2),
    "LpNormalization": ("norm", 2),  # one to sum, one to divide
    "GlobalAveragePool": ("pool", 1), "GlobalMaxPool": ("pool", 1), "GlobalLpPool": ("pool", 1),
    "DynamicQuantizeLinear": ("pointwise", 3),  # the smallest, the largest, the division
    "RotaryEmbedding": ("pointwise", 3),  # x·cos + turned x·sin
}  # fmt: skip

ONNX_FORMULAS: dict[str, Formula] = {}


def onnx_cost(call: Call) -> Cost | None:
    """The cost of one node, or None when no formula knows its operator."""
    name = call.operator
    if name in ONNX_FORMULAS:
        return ONNX_FORMULAS[name](call)
    if name in PER_INPUT:
        kind, each = PER_INPUT[name]
        return Cost(kind, each * call.args[0].numel)
    if name in REDUCTIONS:
        return Cost("reduction", call.args[0].numel)
    if name in VIEWS:
        return Cost("view", reads=(), writes=())
    if name in CREATES:
        return Cost("create", reads=())
    if name in COPIES:
        return Cost("copy")
    if name in POINTWISE:
        # Sum, Mean, Max and Min take any number of inputs: one FLOP for each that is joined to the first.
        joined = max(1, len(call.tensors()) - 1) if name in ("Sum", "Mean", "Max", "Min") else 1
        return Cost("pointwise", joined * call.outputs[0].numel)
    return None


def _formula(*names: str) -> Callable[[Formula], Formula]:
    def register(function: Formula) -> Formula:
        ONNX_FORMULAS.update(dict.fromkeys(names, function))
        return function

    return register


@_formula("Gather", "GatherElements", "GatherND")
def _gather(call: Call) -> Cost:
    return FORMULAS["gather"](call)


@_formula("Conv", "ConvInteger", "ConvTranspose", "QLinearConv")
def _conv(call: Call) -> Cost:
    data, weight = call.args[0], call.args[3 if call.operator == "QLinearConv" else 1]
    rank, output = len(weight.shape) - 2, call.outputs[0].shape
    stride, dilation = (_sizes(call, name, rank, 1) for name in ("strides", "dilations"))
    transposed = call.operator == "ConvTranspose"
    positions = (output, data.shape) if transposed else (data.shape, output)
    padding = _padding(call, weight.shape[2:], stride, dilation, *(p[-rank:] for p in positions))
    return conv_cost(data.shape, weight.shape, output, int(call.kwargs.get("group", 1)), stride, padding, dilation, transposed)


def _sizes(call: Call, name: str, rank: int, default: int) -> Shape:
    return tuple(int(v) for v in call.kwargs.get(name) or (default,) * rank)


def _padding(call: Call, kernel: Shape, stride: Shape, dilation: Shape, wide: Shape, narrow: Shape) -> Shape:
    """Padding at the start of each dimension; SAME pads so that the narrow side has ceil(wide / stride) positions."""
    auto = call.kwargs.get("auto_pad", "NOTSET")
    if auto == "VALID":
        return (0,) * len(kernel)
    if auto == "NOTSET":
        return _sizes(call, "pads", 2 * len(kernel), 0)[: len(kernel)]
    total = [(n - 1) * s + (k - 1) * d + 1 - w for n, s, k, d, w in zip(narrow, stride, kernel, dilation, wide, strict=True)]
    return tuple(max(0, t) // 2 if auto == "SAME_UPPER" else -(-max(0, t) // 2) for t in total)


@_formula("MatMul", "MatMulInteger", "QLinearMatMul")
def _matmul(call: Call) -> Cost:
    a, b = call.args[0], call.args[3 if call.operator == "QLinearMatMul" else 1]
    if len(a.shape) <= 2 and len(b.shape) <= 2 and "weights" in (a.role, b.role):
        return matmul_cost("linear", 1, a.numel // a.shape[-1], b.numel // a.shape[-1], a.shape[-1])
    return FORMULAS["matmul"](Call("matmul", (a, b), {}, call.outputs))


@_formula("Gemm")
def _gemm(call: Call) -> Cost:
    a, b = call.args[0], call.args[1]
    m, k = reversed(a.shape) if call.kwargs.get("transA") else a.shape
    n = b.shape[0 if call.kwargs.get("transB") else 1]
    return matmul_cost("linear" if "weights" in (a.role, b.role) else "matmul", 1, m, n, k)


@_formula("Einsum")
def _einsum(call: Call) -> Cost:
    return FORMULAS["einsum"](Call("einsum", (call.kwargs["equation"], *call.args), {}, call.outputs))


@_formula("Attention")
def _attention(call: Call) -> Cost:
    """Q, K and V as [B,heads,T,width], or [B,T,heads·width] with the heads in attributes; past keys lengthen K and V."""
    query, key, value = (_heads(call, tensor, f"{which}_num_heads") for tensor, which in zip(call.args[:3], ("q", "kv", "kv"), strict=True))
    past = call.arg(4, "past_key")
    keys = key[2] + (past.shape[2] if isinstance(past, TensorInfo) else 0)
    return attention_cost(query, (*key[:2], keys, key[3]), (*value[:2], keys, value[3]))


def _heads(call: Call, tensor: TensorInfo, attribute: str) -> Shape:
    if len(tensor.shape) == 4:
        return tensor.shape
    batch, length, width = tensor.shape
    heads = int(call.kwargs[attribute])
    return batch, heads, length, width // heads


@_formula("LSTM", "GRU", "RNN")
def _recurrent(call: Call) -> Cost:
    """X [T,B,in] (or [B,T,in]), W [directions,gates·hidden,in], R [directions,gates·hidden,hidden]."""
    steps, weights = prod(call.args[0].shape[:-1]), call.args[1:3]
    loops = tuple(
        LoopNest("matmul", {"B": 1, "M": steps, "N": w.shape[1], "K": w.shape[2]}) for _ in range(weights[0].shape[0]) for w in weights
    )
    matmul = 2 * sum(loop.macs for loop in loops)
    return Cost("recurrent", matmul + sum(steps * loop.dims["N"] for loop in loops), matmul, loops)


@_formula("MaxPool", "AveragePool", "LpPool")
def _pool(call: Call) -> Cost:
    return Cost("pool", prod(call.kwargs["kernel_shape"]) * call.outputs[0].numel)


@_formula("Resize", "Upsample", "GridSample")
def _interpolate(call: Call) -> Cost:
    mode = call.kwargs.get("mode", "linear" if call.operator == "GridSample" else "nearest")
    taps = {"nearest": 0, "cubic": 4, "bicubic": 4}.get(mode, 2)
    return Cost("pointwise", 2 * taps ** (len(call.args[0].shape) - 2) * call.outputs[0].numel) if taps else Cost("copy")


@_formula("LRN")
def _local_response(call: Call) -> Cost:
    """Square, sum over `size` channels, scale, add, power, divide."""
    return Cost("norm", (int(call.kwargs["size"]) + 5) * call.outputs[0].numel)


@_formula("SwiGLU")
def _swiglu(call: Call) -> Cost:
    return Cost("pointwise", 2 * call.outputs[0].numel)
