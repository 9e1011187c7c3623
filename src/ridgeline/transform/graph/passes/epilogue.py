"""A layer, the sum after it and the activation after that, in one call.

    conv2d ──add(other)──> relu     ──> ridgeline.onednn_conv      CPU; the sum may be left out, or the activation
    linear ──gelu | add(other)      ──> ridgeline.onednn_linear    CPU
    linear ──activation──> add      ──> ridgeline.matmul           CUDA, where the shipped table says our kernel wins

An intermediate is then neither written nor read again. Needed: every intermediate has one consumer, the sum has the layer's own
shape, and no in-place op in between writes what the layer reads (the layer moves down to where its chain ended). In-place
activations and sums into the layer's own output are taken like any other.
On the CPU each layer is timed both ways first (`measure`), with its weight as `prepack` will lay it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from ....kernel.matmul import kind_of
from ....kernel.matmul_kernels import ACTIVATIONS as KERNEL_ACTIVATIONS
from ....kernel.replace import load_wins, worth
from .. import onednn
from ..capture import Captured
from ..chains import Chain, blocked, grow
from ..edit import argument, bytes_of, constant, insert, is_op, replace_all, shape_of, tidy
from ..manager import PassContext, PassResult, Site, op_name, register, site
from ..onednn_time import Layer, timing

aten = torch.ops.aten


@register("epilogue")
@dataclass(frozen=True, slots=True)
class Epilogue:
    """conv/linear + residual + activation -> one call."""

    measure: bool = True
    name = "epilogue"

    def run(self, graph: Captured, context: PassContext) -> PassResult:
        result = PassResult()
        for node in list(graph.module.graph.nodes):
            if not is_op(node, aten.conv2d, aten.linear):
                continue
            on_gpu = node.meta["val"].device.type == "cuda"
            chain = grow(node, activation_first=on_gpu)
            if len(chain.nodes) == 1:
                if chain.reason:
                    result.refused.append(site([node], chain.reason))
                continue
            why = blocked(graph, chain) or (_kernel_loses(graph, chain) if on_gpu else layer_refused(graph, chain, measure=self.measure))
            if why:
                result.refused.append(site(chain.nodes, why))
                continue
            result.changed.append(_site(graph, chain))
            _replace(graph, chain, _to_kernel(graph, chain) if on_gpu else to_onednn(graph, chain))
        if result.changed:
            tidy(graph)
        return result


def _site(graph: Captured, chain: Chain) -> Site:
    names = " + ".join(op_name(node) for node in chain.nodes)
    return site(chain.nodes, f"{names} -> one call", sum(2 * bytes_of(graph, node) for node in chain.nodes[:-1]))


def settings_of(layer: fx.Node) -> list[Any] | None:
    """[stride, padding, dilation, groups] of a conv2d as numbers; None where padding is not the same on both sides."""
    stride, padding, dilation = (argument(layer, name) for name in ("stride", "padding", "dilation"))
    stride, dilation = _pair(stride), _pair(dilation)
    if padding == "valid":
        padding = [0, 0]
    elif padding == "same":
        spans = [int(d) * (int(k) - 1) for d, k in zip(dilation, argument(layer, "weight").meta["val"].shape[2:], strict=True)]
        if any(span % 2 for span in spans):
            return None
        padding = [span // 2 for span in spans]
    return [stride, _pair(padding), dilation, int(argument(layer, "groups"))]


def _pair(value: Any) -> list[int]:
    numbers = [int(one) for one in value] if isinstance(value, list | tuple) else [int(value)]
    return numbers * 2 if len(numbers) == 1 else numbers


def layer_refused(graph: Captured, chain: Chain, *, measure: bool) -> str:
    """Why oneDNN should not do this chain; "" where it should."""
    layer = chain.layer
    x, weight = argument(layer, "input"), argument(layer, "weight")
    value = layer.meta["val"]
    if value.device.type != "cpu" or not onednn.supported(value.dtype):
        return f"oneDNN has no {value.dtype} on {value.device.type} here"
    if constant(graph, weight) is None or weight.meta["val"].dtype != value.dtype:
        return "its weight is computed, or of another dtype"
    if is_op(layer, aten.conv2d) and (x.meta["val"].dim() != 4 or settings_of(layer) is None):
        return "it has no batch dimension, or pads unevenly"
    if is_op(layer, aten.linear) and (x.meta["val"].dim() < 2 or weight.meta["val"].dim() != 2):
        return "it is a product of vectors"
    if measure and not value.is_meta:
        times = timing(described(graph, chain))
        if not times.pays:
            return f"torch's own calls are faster here: {times}"
    return ""


def described(graph: Captured, chain: Chain) -> Layer:
    """The chain as the timer wants it."""
    layer = chain.layer
    settings = settings_of(layer) if is_op(layer, aten.conv2d) else None
    return Layer(
        shape_of(graph, argument(layer, "input")),
        shape_of(graph, argument(layer, "weight")),
        layer.meta["val"].dtype,
        () if settings is None else tuple(tuple(one) if isinstance(one, list) else one for one in settings),
        argument(layer, "bias") is not None,
        chain.other is not None,
        chain.activation,
        chain.scalars,
    )


def to_onednn(graph: Captured, chain: Chain, *, packed: bool = False) -> fx.Node:
    """The call that does the whole chain, placed where the chain ended."""
    layer = chain.layer
    operands = [argument(layer, name) for name in ("input", "weight", "bias")]
    settings = settings_of(layer) if is_op(layer, aten.conv2d) else []
    assert settings is not None
    op = onednn.conv if settings else onednn.linear
    return insert(graph, chain.last, op, [*operands, chain.other, *settings, chain.activation, list(chain.scalars), packed], like=layer)


def _kernel_loses(graph: Captured, chain: Chain) -> str:
    """Why our Triton product should not do this chain on the GPU; "" where it should."""
    layer = chain.layer
    if not is_op(layer, aten.linear) or chain.activation not in KERNEL_ACTIVATIONS:
        return "no kernel of ours does this layer with this activation"
    x, weight = argument(layer, "input"), argument(layer, "weight")
    *rows, k = shape_of(graph, x)
    load_wins()
    kind, size = kind_of(prod(rows), shape_of(graph, weight)[0], k)
    if len(rows) < 1 or not worth("matmul", x.meta["val"], size, kind):
        return "our product with an epilogue is not measured to win at this size on this GPU"
    return ""


def _to_kernel(graph: Captured, chain: Chain) -> fx.Node:
    """activation(x @ weight^T + bias) + other by ridgeline.matmul."""
    layer = chain.layer
    x, weight, bias = (argument(layer, name) for name in ("input", "weight", "bias"))
    turned = insert(graph, chain.last, aten.t.default, [weight], like=layer)
    return insert(graph, chain.last, torch.ops.ridgeline.matmul.default, [x, turned, bias, chain.other, chain.activation], like=layer)


def _replace(graph: Captured, chain: Chain, new: fx.Node) -> None:
    replace_all(chain.last, new)
    for node in reversed(chain.nodes):
        graph.module.graph.erase_node(node)
