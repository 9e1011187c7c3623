"""FLOPs, loops and touched elements of every operator family, from shapes alone.

    Call(operator, args, kwargs, outputs) ──FORMULAS[base name]──> Cost(kind, flops, matmul_flops, loops, reads, writes)

Conventions: a multiply and an add are two FLOPs; bias adds of matmul-like ops ride in the epilogue and are not
counted, so `matmul_flops` equals torch's FlopCounterMode; causal attention is counted in full, as torch does;
pointwise ops count one FLOP an output element, reductions one an input element, softmax 5, layer norm 7, RMS norm 4,
batch norm in inference 2. Ops that only move or view data count zero. An operator found nowhere here is `None`:
the caller lists it as uncounted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import log2, prod
from typing import Any

from .graph import LoopNest, Operand
from .operators import COPIES, CREATES, IDENTITIES, IGNORED, MAY_COPY, POINTWISE_EXTRA, VIEWS
from .tensors import TensorInfo


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call with TensorInfo in place of tensors; `operator` is the base name, e.g. `conv2d`."""

    operator: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[TensorInfo, ...]
    pointwise: bool = False  # torch tags the operator as pointwise
    alias: bool = False  # the schema says the output may share the input's storage

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def tensors(self) -> list[TensorInfo]:
        return list(_tensors_in((self.args, tuple(self.kwargs.values()))))


@dataclass(frozen=True, slots=True)
class Cost:
    """What a call costs; `reads`/`writes` are None where every operand is touched once in full."""

    kind: str
    flops: int = 0
    matmul_flops: int = 0
    loops: tuple[LoopNest, ...] = ()
    reads: tuple[Operand, ...] | None = None
    writes: tuple[Operand, ...] | None = None
    uncounted: str = field(default="")


Formula = Callable[[Call], Cost]
FORMULAS: dict[str, Formula] = {}


def formula(*names: str) -> Callable[[Formula], Formula]:
    """Register one formula for several operators; a name given twice is a bug."""

    def register(function: Formula) -> Formula:
        for name in names:
            if name in FORMULAS:
                raise ValueError(f"two formulas for {name}")
            FORMULAS[name] = function
        return function

    return register


def _tensors_in(item: Any) -> Iterator[TensorInfo]:
    if isinstance(item, TensorInfo):
        yield item
    elif isinstance(item, list | tuple):
        for part in item:
            yield from _tensors_in(part)


def matmul_cost(kind: str, batch: int, m: int, n: int, k: int, shared: tuple[str, ...] = ()) -> Cost:
    """A (batched) matrix product: 2·B·M·N·K."""
    loop = LoopNest("matmul", {"B": batch, "M": m, "N": n, "K": k}, shared=shared)
    return Cost(kind, 2 * loop.macs, 2 * loop.macs, (loop,))


SPATIAL, TAPS = ("P", "Q", "O"), ("R", "S", "T")


def conv_cost(
    data: tuple[int, ...],
    weight: tuple[int, ...],
    output: tuple[int, ...],
    groups: int,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    transposed: bool = False,
) -> Cost:
    """A convolution of any rank; a transposed one does its multiplications once per input position."""
    rank = len(weight) - 2
    positions = (data if transposed else output)[-rank:]
    batch = prod(output[: -rank - 1])
    # torch keeps transposed weights as (C_in, K/G, taps), others as (K, C/G, taps)
    out_channels, in_channels = (weight[1], weight[0] // groups) if transposed else (weight[0] // groups, weight[1])
    dims = {"B": batch, "G": groups, "K": out_channels, "C": in_channels}
    dims |= dict(zip(SPATIAL, positions, strict=False)) | dict(zip(TAPS, weight[2:], strict=False))
    loop = LoopNest("conv", dims, stride, padding, dilation, transposed)
    return Cost("conv", 2 * loop.macs, 2 * loop.macs, (loop,))


def _pair(value: Any, rank: int) -> tuple[int, ...]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    return tuple(int(v) for v in (values * rank if len(values) == 1 else values))


@formula("conv1d", "conv2d", "conv3d")
def _conv(call: Call) -> Cost:
    data, weight = call.args[0], call.args[1]
    rank = len(weight.shape) - 2
    padding = call.arg(4, "padding", 0)
    dilation = _pair(call.arg(5, "dilation", 1), rank)
    if padding == "same":
        padding = tuple(d * (k - 1) // 2 for d, k in zip(dilation, weight.shape[2:], strict=True))
    pads = (0,) * rank if isinstance(padding, str) else _pair(padding, rank)
    stride = _pair(call.arg(3, "stride", 1), rank)
    return conv_cost(data.shape, weight.shape, call.outputs[0].shape, int(call.arg(6, "groups", 1)), stride, pads, dilation)


@formula("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(call: Call) -> Cost:
    data, weight = call.args[0], call.args[1]
    rank = len(weight.shape) - 2
    stride, pads = _pair(call.arg(3, "stride", 1), rank), _pair(call.arg(4, "padding", 0), rank)
    dilation = _pair(call.arg(7, "dilation", 1), rank)
    return conv_cost(data.shape, weight.shape, call.outputs[0].shape, int(call.arg(6, "groups", 1)), stride, pads, dilation, True)


@formula("convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution", "cudnn_convolution")
def _convolution(call: Call) -> Cost:
    data, weight = call.args[0], call.args[1]
    if call.operator in ("mkldnn_convolution", "cudnn_convolution"):
        rank = len(weight.shape) - 2
        first = 3 if call.operator == "mkldnn_convolution" else 2
        pads, stride, dilation = (_pair(call.args[first + i], rank) for i in range(3))
        return conv_cost(data.shape, weight.shape, call.outputs[0].shape, int(call.args[first + 3]), stride, pads, dilation)
    rank = len(weight.shape) - 2
    stride, pads, dilation = (_pair(call.args[i], rank) for i in (3, 4, 5))
    return conv_cost(data.shape, weight.shape, call.outputs[0].shape, int(call.args[8]), stride, pads, dilation, bool(call.args[6]))


@formula("linear")
def _linear(call: Call) -> Cost:
    data, weight = call.args[0], call.args[1]
    return matmul_cost("linear", 1, prod(data.shape[:-1]), weight.shape[0] if len(weight.shape) > 1 else 1, weight.shape[-1])


@formula("addmm", "mm", "addmv", "mv", "dot", "vdot", "addr", "outer", "ger")
def _mm(call: Call) -> Cost:
    tensors = call.tensors()
    a, b = tensors[-2:]
    if call.operator in ("addr", "outer", "ger"):
        return matmul_cost("matmul", 1, a.numel, b.numel, 1)
    m = a.shape[0] if len(a.shape) == 2 else 1
    n = b.shape[1] if len(b.shape) == 2 else 1
    # a product with a stored weight is a linear layer, however it was written
    kind = "linear" if "weights" in (a.role, b.role) else "matmul"
    return matmul_cost(kind, 1, m, n, a.shape[-1])


@formula("bmm", "baddbmm", "matmul", "_int_mm", "_scaled_mm")
def _bmm(call: Call) -> Cost:
    a, b = call.args[1:3] if call.operator == "baddbmm" else call.args[:2]
    m = a.shape[-2] if len(a.shape) > 1 else 1
    n = b.shape[-1] if len(b.shape) > 1 else 1
    k = a.shape[-1]
    out = call.outputs[0].numel
    batch = max(1, out // max(1, m * n)) if out else 0
    shared = tuple(name for name, t in (("a", a), ("b", b)) if len(t.shape) <= 2)
    if "b" in shared and b.role == "weights":
        return matmul_cost("linear", 1, batch * m, n, k)
    return matmul_cost("matmul", batch, m, n, k, shared)


@formula("einsum")
def _einsum(call: Call) -> Cost:
    equation, tensors = str(call.args[0]).replace(" ", ""), call.tensors()
    terms = equation.split("->")[0].split(",")
    if len(tensors) == 1:
        return Cost("reduction", tensors[0].numel)
    if len(tensors) != 2 or "." in equation or len(terms) != 2:
        return Cost("matmul", uncounted="einsum of other than one or two plain operands")
    sizes = dict(zip(terms[0] + terms[1], tensors[0].shape + tensors[1].shape, strict=True))
    result = equation.split("->")[1] if "->" in equation else ""
    left, right, out = set(terms[0]), set(terms[1]), set(result)

    def size(letters: set[str]) -> int:
        return prod(sizes[x] for x in letters)

    return matmul_cost(
        "matmul", size(left & right & out), size((left - right) & out), size((right - left) & out), size((left & right) - out)
    )


@formula("_grouped_mm", "grouped_mm", "grouped_mm_fallback")
def _grouped(call: Call) -> Cost:
    """Rows [S, K] each through one of the experts [E, K, N]: no more experts are touched than there are rows."""
    rows, experts = call.args[0], call.args[1]
    cost = matmul_cost("linear", 1, rows.shape[0], experts.shape[-1], rows.shape[-1])
    touched = experts.operand(experts.elements // experts.shape[0] * min(experts.shape[0], rows.shape[0]))
    others = tuple(t.operand() for t in call.tensors() if t is not experts)
    return replace(cost, reads=(others[0], touched, *others[1:]))


@formula("copy_")
def _copy_into(call: Call) -> Cost:
    """Reads the source and writes the destination, whose old content nobody reads."""
    return Cost("copy", reads=(call.args[1].operand(),) if isinstance(call.args[1], TensorInfo) else (), writes=(call.args[0].operand(),))


def attention_cost(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> Cost:
    """softmax(QKᵀ)V as two batched products over every query head."""
    batch, queries, keys = prod(q[:-2]), q[-2], k[-2]
    scores = LoopNest("matmul", {"B": batch, "M": queries, "N": keys, "K": q[-1]})
    values = LoopNest("matmul", {"B": batch, "M": queries, "N": v[-1], "K": keys})
    flops = 2 * (scores.macs + values.macs)
    return Cost("attention", flops, flops, (scores, values))


@formula(
    "scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math",
)  # fmt: skip
def _attention(call: Call) -> Cost:
    return attention_cost(*(t.shape for t in call.args[:3]))


@formula("_native_multi_head_attention")
def _native_attention(call: Call) -> Cost:
    query, key, value = call.args[:3]
    width, heads = int(call.args[3]), int(call.args[4])
    batch, queries, keys, head = query.shape[0], query.shape[1], key.shape[1], width // int(call.args[4])
    projections = tuple(LoopNest("matmul", {"B": 1, "M": prod(t.shape[:-1]), "N": width, "K": width}) for t in (query, key, value, query))
    inner = attention_cost((batch, heads, queries, head), (batch, heads, keys, head), (batch, heads, keys, head))
    flops = inner.flops + 2 * sum(p.macs for p in projections)
    return Cost("attention", flops, flops, projections + inner.loops)


@formula("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(call: Call) -> Cost:
    gates = {"lstm": 4, "gru": 3}.get(call.operator, 1)
    steps = prod(call.args[0].shape[:-1])
    weights = [t for t in call.tensors() if t.role == "weights" and len(t.shape) == 2]
    loops = tuple(LoopNest("matmul", {"B": 1, "M": steps, "N": w.shape[0], "K": w.shape[1]}) for w in weights)
    matmul = 2 * sum(loop.macs for loop in loops)
    return Cost("recurrent", matmul + steps * sum(w.shape[0] // gates for w in weights) * gates, matmul, loops)


def _per_input(kind: str, each: int) -> Formula:
    return lambda call: Cost(kind, each * call.args[0].numel)


for _names, _kind, _each in (
    (("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax"), "softmax", 5),
    (("layer_norm", "native_layer_norm", "group_norm", "native_group_norm", "instance_norm"), "norm", 7),
    (("rms_norm", "_fused_rms_norm"), "norm", 4),
    (("batch_norm", "_native_batch_norm_legit_no_training", "native_batch_norm", "_batch_norm_no_update",
      "_native_batch_norm_legit", "cudnn_batch_norm"), "norm", 2),
    (("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "any", "all", "cumsum", "cumprod", "logsumexp",
      "count_nonzero", "median", "nansum", "norm", "linalg_vector_norm", "max.dim", "aminmax", "trace"), "reduction", 1),
    (("var", "std", "var_mean", "std_mean", "var.correction"), "reduction", 3),
):  # fmt: skip
    formula(*_names)(_per_input(_kind, _each))


@formula("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices", "avg_pool1d", "avg_pool2d", "avg_pool3d")
def _pool(call: Call) -> Cost:
    rank = 1 if "1d" in call.operator else 3 if "3d" in call.operator else 2
    return Cost("pool", prod(_pair(call.args[1], rank)) * call.outputs[0].numel)


formula("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "adaptive_max_pool2d")(
    _per_input("pool", 1)
)


@formula("upsample_bilinear2d", "upsample_bicubic2d", "upsample_linear1d", "upsample_trilinear3d", "grid_sampler", "grid_sampler_2d")
def _interpolate(call: Call) -> Cost:
    taps = {"upsample_bicubic2d": 16, "upsample_linear1d": 2, "upsample_trilinear3d": 8}.get(call.operator, 4)
    return Cost("pointwise", 2 * taps * call.outputs[0].numel)


@formula("fft_fft", "fft_rfft", "fft_irfft", "fft_ifft", "fft_fft2", "fft_rfft2", "_fft_r2c", "_fft_c2c", "_fft_c2r")
def _fft(call: Call) -> Cost:
    n = max(call.args[0].shape[-1], 2)
    return Cost("reduction", int(5 * call.args[0].numel * log2(n)))


@formula("embedding", "index_select", "gather", "embedding_bag", "take", "index", "take_along_dim")
def _gather(call: Call) -> Cost:
    """Reads no more rows than it returns: the table counts only as far as it is touched."""
    out = call.outputs[0]
    tensors = call.tensors()
    table = tensors[0]
    touched = table.operand(min(table.elements, out.numel))
    return Cost("embedding", reads=(touched, *(t.operand() for t in tensors[1:])))


@formula("index_copy_", "index_put_", "index_add_", "scatter_", "slice_scatter_", "select_scatter_", "index_fill_")
def _write_part(call: Call) -> Cost:
    """In place: only the new elements are written; the rest of the tensor is not touched."""
    tensors = call.tensors()
    source = tensors[-1]
    written = tensors[0].operand(min(tensors[0].elements, source.numel))
    flops = source.numel if call.operator == "index_add_" else 0
    return Cost("copy", flops, reads=tuple(t.operand() for t in tensors[1:]), writes=(written,))


def cost_of(call: Call) -> Cost | None:
    """The cost of one call, or None when no formula knows the operator."""
    name = call.operator
    if name in FORMULAS:
        return FORMULAS[name](call)
    if name in IGNORED or name in IDENTITIES:
        return Cost("view", reads=(), writes=())
    if name in VIEWS or (name in MAY_COPY and call.alias):
        return Cost("view", reads=(), writes=())
    if name in COPIES or name in MAY_COPY:
        return Cost("copy")
    if name in CREATES:
        return Cost("create", reads=())
    if call.pointwise or name in POINTWISE_EXTRA:
        return Cost("pointwise", call.outputs[0].numel if call.outputs else 0)
    return None
