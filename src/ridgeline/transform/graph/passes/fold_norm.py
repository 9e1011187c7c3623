"""Batch norms of inference folded into the layer before or after them.

    norm(x)[c] = scale[c] x + shift[c]      scale = gamma / sqrt(variance + eps)      shift = beta - mean scale
    norm(layer(x)):  weight' = scale[out] weight           bias' = scale bias + shift            layer: conv, transposed conv, linear
    layer(norm(x)):  weight' = weight scale[in]            bias' = bias + sum of weight shift    conv without padding, linear

Computed in float64 and rounded once to the layer's dtype. Layers get new weights, so one that is shared stays as it is for its other
users. Refused, with the reason: an intermediate somebody else reads, weights that are not constants, padding (the border of zeros would
have to become minus the shift), weights or statistics that an in-place op writes.
Ref: Jacob et al. 2018, section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..capture import Captured
from ..edit import argument, bytes_of, constant, insert, is_op, only_user, put_constant, replace_all, storages, tidy, written
from ..manager import PassContext, PassResult, Site, op_name, register, site

aten = torch.ops.aten
CONVOLUTIONS = (aten.conv1d, aten.conv2d, aten.conv3d)
TRANSPOSED = (aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d)
LAYERS = (*CONVOLUTIONS, *TRANSPOSED, aten.linear)


class Refused(Exception):
    """Why a norm stays."""


@dataclass(frozen=True, slots=True)
class Affine:
    """A norm as scale · x + shift, per channel, in float64."""

    scale: Tensor
    shift: Tensor


@register("fold_norm")
class FoldNorm:
    """conv or linear + batch norm -> conv or linear."""

    name = "fold_norm"

    def run(self, graph: Captured, context: PassContext) -> PassResult:
        result = PassResult()
        unsafe = _written_names(graph)
        for node in list(graph.module.graph.nodes):
            if not is_op(node, aten.batch_norm):
                continue
            try:
                result.changed.append(_fold(graph, node, unsafe))
            except Refused as reason:
                result.refused.append(site([node], str(reason)))
        if result.changed:
            for node in [node for node in graph.module.graph.nodes if node.op == "get_attr" and not node.users]:
                graph.module.graph.erase_node(node)
            tidy(graph)
        return result


def _fold(graph: Captured, norm: fx.Node, unsafe: set[str]) -> Site:
    """Fold one norm into the layer before it, else into the one after it; Refused says why neither works."""
    before, after = _neighbours(norm)
    affine = affine_of(graph, norm, unsafe)
    saved_bytes = 2 * bytes_of(graph, norm)
    if before is not None:
        known = site([before, norm], f"{op_name(before)} + batch_norm -> {op_name(before)}", saved_bytes)
        _fold_after(graph, before, norm, affine, unsafe)
    else:
        known = site([norm, after], f"batch_norm + {op_name(after)} -> {op_name(after)}", saved_bytes)
        _fold_before(graph, norm, after, affine, unsafe)
    return known


def _written_names(graph: Captured) -> set[str]:
    """Names of nodes, and of attributes, whose memory some op writes."""
    bases = written(graph)
    return {base.name for base in bases} | {str(base.target) for base in bases if base.op == "get_attr"}


def _neighbours(norm: fx.Node) -> tuple[fx.Node | None, fx.Node]:
    """The layer to fold into: (layer before, _) or (None, layer after)."""
    source, user = norm.args[0], only_user(norm)
    if isinstance(source, fx.Node) and is_op(source, *LAYERS):
        if len(source.users) == 1:
            return source, norm
        why = f"the output of its {op_name(source)} has {len(source.users)} consumers"
    else:
        why = "its input is not the output of a convolution or linear"
    if user is not None and is_op(user, *LAYERS) and user.args[0] is norm:
        return None, user
    raise Refused(why)


def affine_of(graph: Captured, norm: fx.Node, unsafe: set[str]) -> Affine:
    """Scale and shift of a batch norm that uses its stored statistics."""
    if argument(norm, "training"):
        raise Refused("it uses the statistics of the batch")
    gamma, beta, mean, variance = (
        _tensor(graph, argument(norm, name), unsafe) for name in ("weight", "bias", "running_mean", "running_var")
    )
    if mean is None or variance is None:
        raise Refused("it has no stored statistics")
    scale = (variance.double() + float(argument(norm, "eps"))).rsqrt()
    if gamma is not None:
        scale = scale * gamma.double()
    shift = -mean.double() * scale
    if beta is not None:
        shift = shift + beta.double()
    if not bool(torch.isfinite(scale).all() and torch.isfinite(shift).all()):
        raise Refused("its scale or shift is not finite")
    return Affine(scale, shift)


def _tensor(graph: Captured, node: Any, unsafe: set[str]) -> Tensor | None:
    """A constant argument; None where it is not given."""
    if node is None:
        return None
    value = constant(graph, node)
    if value is None:
        raise Refused("a weight or statistic is computed, not a constant")
    if str(node.target) in unsafe:
        raise Refused("an in-place op writes its weights or statistics")
    return value


def _weights(graph: Captured, layer: fx.Node, unsafe: set[str]) -> tuple[Tensor, Tensor | None]:
    weight, bias = (_tensor(graph, argument(layer, name), unsafe) for name in ("weight", "bias"))
    if weight is None or not weight.is_floating_point():
        raise Refused("the layer has no floating-point weight")
    return weight, bias


def _fold_after(graph: Captured, layer: fx.Node, norm: fx.Node, affine: Affine, unsafe: set[str]) -> None:
    """norm(layer(x)): the layer's own arguments are read where it stands, so it stays there."""
    weight, bias = _weights(graph, layer, unsafe)
    if is_op(layer, aten.linear) and layer.meta["val"].dim() != 2:
        raise Refused("it normalises another dimension than the linear's features")
    if norm.meta["val"].dtype != layer.meta["val"].dtype:
        raise Refused("it changes the dtype")
    groups = int(argument(layer, "groups", 1)) if is_op(layer, *TRANSPOSED) else 1
    folded = _scaled_out(weight.double(), affine.scale, transposed=is_op(layer, *TRANSPOSED), groups=groups)
    offset = affine.shift if bias is None else affine.shift + affine.scale * bias.double()
    new = _with_weights(graph, layer, norm, folded.to(weight.dtype), offset.to(weight.dtype))
    replace_all(norm, new)
    graph.module.graph.erase_node(norm)
    graph.module.graph.erase_node(layer)


def _scaled_out(weight: Tensor, scale: Tensor, *, transposed: bool, groups: int) -> Tensor:
    """weight times scale of its output channel: [O, I/g, ..], transposed [I, O/g, ..] with group-major outputs."""
    if not transposed:
        return weight * scale.view(-1, *[1] * (weight.dim() - 1))
    inputs, per_group = weight.shape[:2]
    split = weight.view(groups, inputs // groups, per_group, *weight.shape[2:])
    return (split * scale.view(groups, 1, per_group, *[1] * (weight.dim() - 2))).view_as(weight)


def _fold_before(graph: Captured, norm: fx.Node, layer: fx.Node, affine: Affine, unsafe: set[str]) -> None:
    """layer(norm(x)): x is read where the norm stood, so the layer moves there."""
    weight, bias = _weights(graph, layer, unsafe)
    if any(base.name in unsafe for base in storages(graph)[norm.args[0]]):  # type: ignore[index]
        raise Refused("an in-place op writes its input")
    if norm.meta["val"].dtype != layer.meta["val"].dtype:
        raise Refused("it changes the dtype")
    if is_op(layer, *TRANSPOSED):
        raise Refused("after it comes a transposed convolution, whose borders see fewer taps")
    if is_op(layer, aten.linear):
        if norm.meta["val"].dim() != 2:
            raise Refused("it normalises another dimension than the linear's features")
        scale, shift = affine.scale.view(1, -1), affine.shift.view(1, -1)
    else:
        if bool(affine.shift.any()) and _padded(argument(layer, "padding")):
            raise Refused(f"the {op_name(layer)} after it pads with zeros, which its shift would have changed")
        scale, shift = (_per_input(value, weight, int(argument(layer, "groups", 1))) for value in (affine.scale, affine.shift))
    wide = weight.double()
    offset = (wide * shift).flatten(1).sum(1)
    if bias is not None:
        offset = offset + bias.double()
    new = _with_weights(graph, layer, layer, (wide * scale).to(weight.dtype), offset.to(weight.dtype), source=norm.args[0])
    replace_all(layer, new)
    graph.module.graph.erase_node(layer)
    graph.module.graph.erase_node(norm)


def _per_input(value: Tensor, weight: Tensor, groups: int) -> Tensor:
    """A value for each input channel [I], laid out for a convolution's weight [O, I/g, ..]."""
    outputs = weight.shape[0]
    rows = value.view(groups, 1, -1).expand(groups, outputs // groups, -1).reshape(outputs, -1)
    return rows.view(*rows.shape, *[1] * (weight.dim() - 2))


def _padded(padding: object) -> bool:
    """Whether a convolution pads: numbers, or the words "same" and "valid"."""
    if isinstance(padding, str):
        return padding != "valid"
    return any(padding) if isinstance(padding, list | tuple) else bool(padding)


def _with_weights(graph: Captured, layer: fx.Node, before: fx.Node, weight: Tensor, bias: Tensor, source: object = None) -> fx.Node:
    """The same layer with other weights, placed before a node."""
    names = [one.name for one in layer.target._schema.arguments]  # type: ignore[union-attr]
    values = {name: argument(layer, name) for name in names}
    first, second, third = names[:3]
    values[second] = put_constant(graph, f"{argument(layer, 'weight').target}_folded", weight)
    values[third] = put_constant(graph, f"{argument(layer, 'weight').target}_folded_bias", bias)
    if source is not None:
        values[first] = source
    position = layer if source is None else before
    return insert(graph, position, layer.target, [values[name] for name in names], like=layer)  # type: ignore[arg-type]
