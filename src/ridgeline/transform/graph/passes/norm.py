"""Norms written by hand become one op; a residual added before an RMS norm joins it on GPUs.

    w * (x * rsqrt(mean(x², -1) + eps)).to(dtype)                     -> rms_norm(x, w, eps)
    (x - mean x) / sqrt(mean((x - mean x)²) + eps) * w + b            -> layer_norm(x, w, b, eps)
    s = x + residual;  rms_norm(s)                                    -> add_rms_norm(x, residual), where the shipped table says it wins

Hugging Face's norms go to float32 and back: the op computes in float32 too and rounds once, not twice. A float64 model whose norm goes
through float32 is left: the op would keep the digits it throws away. On CPUs torch's rms_norm of half precision is slower than the
formula (measured up to 2.8x), so only float32 and float64 are replaced there. Ref: Zhang and Sennrich 2019; Ba 2016.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx

from ..edit import argument, bytes_of, insert, is_op, same_sizes, tidy
from ..manager import PassContext, PassResult, register, site
from ..patterns import (
    DIV,
    Call,
    Either,
    Input,
    Match,
    Number,
    Pattern,
    Scene,
    aten,
    below,
    between,
    given,
    loosen_views,
    product,
    replace,
    total,
)

if TYPE_CHECKING:
    from ..capture import Captured

X = Input("x")
HALVES = (torch.float16, torch.bfloat16)


def _mean(of: Pattern) -> Call:
    return Call.of(aten.mean, of, keepdim=True)


def _square(of: Pattern) -> Either:
    return Either.of(Call.of(aten.pow, of, Number(equals=2.0)), product(of, of), Call.of(aten.square, of))


def _over_root(top: Pattern, variance: Pattern) -> Either:
    """top / sqrt(variance + eps), however it is written."""
    inner = total(variance, Number("eps"))
    root = Call.of(aten.sqrt, inner)
    flipped = Call.of(aten.reciprocal, root)
    inverse = Either.of(
        Call.of(aten.rsqrt, inner), flipped, product(flipped, Number(equals=1.0)), Call.of(aten.pow, inner, Number(equals=-0.5))
    )  # fmt: skip
    return Either.of(product(top, inverse), Call.of(DIV, top, root, rounding_mode=None))


CENTRED = Call.of(aten.sub, X, _mean(X), alpha=1)
VARIANCE = Either.of(_mean(_square(CENTRED)), Call.of(aten.var, X, keepdim=True))
RMS, LAYER = _over_root(X, _mean(_square(X))), _over_root(CENTRED, VARIANCE)
FORMULAS: tuple[tuple[str, Pattern], ...] = (  # the longest first: the weight belongs to the norm
    ("layer_norm", total(product(LAYER, Input("weight")), Input("bias"))),
    ("layer_norm", product(LAYER, Input("weight"))),
    ("rms_norm", product(RMS, Input("weight"))),
    ("layer_norm", LAYER),
    ("rms_norm", RMS),
)


def by_hand(scene: Scene, node: fx.Node) -> Iterator[tuple[str, Match]]:
    """The norms whose result `node` is, the longest formula first; weight and bias are of the last dimension's length."""
    if not is_op(node, *product(X, X).ops, *total(X, X).ops, *DIV):
        return
    for op, formula in FORMULAS:
        match = scene.match(formula, node)
        if match is not None and _parameters_fit(match):
            yield op, match


def _parameters_fit(match: Match) -> bool:
    cols = match.names["x"].meta["val"].shape[-1:]
    given = (match.names[name].meta["val"] for name in ("weight", "bias") if name in match.names)
    return all(isinstance(value, torch.Tensor) and tuple(value.shape) == tuple(cols) for value in given)


def objection(scene: Scene, op: str, match: Match) -> str | None:
    """Why a norm by hand must stay; None where the op computes the same."""
    x = match.names["x"].meta["val"]
    for node in match.inside:
        if is_op(node, aten.mean, aten.var) and not _over_last(node, x.dim()):
            return f"{node.name} is not over the last dimension"
        if is_op(node, aten.var) and (argument(node, "unbiased", False) or argument(node, "correction", 0) not in (0, 0.0)):
            return f"{node.name} divides by one less than the number of values"
    if not isinstance(x.shape[-1], int) or not x.is_floating_point():
        return "the length of its rows is not fixed, or they are no floats"
    used = [match.root, *(match.names[name] for name in ("weight", "bias") if name in match.names)]
    other = next((node for node in used if node.meta["val"].dtype != x.dtype), None)
    if other is not None:
        return f"{other.name} is {other.meta['val'].dtype}, the input {x.dtype}"
    if op == "rms_norm" and x.dtype in HALVES and x.device.type == "cpu":
        return "torch's rms_norm of half precision is slower than the formula on CPUs"
    return scene.objection(match, "x")


def _over_last(node: fx.Node, rank: int) -> bool:
    dims = argument(node, "dim")
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    return len(dims) == 1 and dims[0] in (-1, rank - 1)


@register("norm")
@dataclass(frozen=True)
class FuseNorms:
    """See the module."""

    name: ClassVar[str] = "norm"

    def run(self, graph: Captured, context: PassContext) -> PassResult:
        """Norms by hand first, then residuals."""
        result = PassResult()
        scene = Scene(graph)
        gone: set[fx.Node] = set()
        for node in reversed(list(scene.order)):
            if node not in gone:
                gone.update(_replace_one(scene, node, result))
        for node in list(scene.order):
            _join_residual(scene, node, result)
        if result.changed:
            tidy(graph)
        return result


def _replace_one(scene: Scene, node: fx.Node, result: PassResult) -> tuple[fx.Node, ...]:
    """Replace the norm that ends in `node`; the nodes that were part of one, replaced or refused."""
    for op, match in by_hand(scene, node):
        inside = tuple(reversed(match.inside))
        reason = objection(scene, op, match)
        if reason is not None:
            result.refused.append(site(inside, reason))
            return inside
        graph = scene.graph
        result.changed.append(site(inside, f"{op} by hand -> {op}", between(graph, match)))
        replace(scene, match, _norm(graph, op, match))
        return inside
    return ()


def _norm(graph: Captured, op: str, match: Match) -> fx.Node:
    weight, bias, x = match.names.get("weight"), match.names.get("bias"), match.names["x"]
    eps, cols = match.names["eps"], x.meta["val"].shape[-1]
    if op == "layer_norm":
        return insert(graph, match.root, aten.layer_norm.default, (x, [cols], weight, bias, eps), like=match.root)
    from .. import fused_ops

    if fused_ops.no_win(graph, "rms_norm", x, columns=True) is None:
        return insert(graph, match.root, fused_ops.graph_rms_norm, (x, weight, eps), like=match.root)
    return insert(graph, match.root, aten.rms_norm.default, (x, [cols], weight, eps), like=match.root)


def _is_ours(node: fx.Node) -> bool:
    """By name: the op itself is defined only once fused_ops, with all of Triton, is imported."""
    return str(node.target) == "ridgeline.graph_rms_norm.default"


def residual_before(node: fx.Node) -> fx.Node | None:
    """The sum of two tensors of one shape and dtype that a norm takes."""
    if not is_op(node, aten.rms_norm, aten.layer_norm) and not _is_ours(node):
        return None
    added, _ = below(given(node, 0))
    if not is_op(added, aten.add) or argument(added, "alpha", 1) != 1:
        return None
    parts = [part.meta["val"] if isinstance(part, fx.Node) else None for part in added.args[:2]]
    whole = node.meta["val"]
    fits = all(isinstance(part, torch.Tensor) and part.dtype == whole.dtype and same_sizes(part, whole) for part in parts)
    return added if fits else None


def _join_residual(scene: Scene, node: fx.Node, result: PassResult) -> None:
    """x + residual and the RMS norm of the sum, both from one kernel."""
    added = residual_before(node)
    if added is None:
        return
    if is_op(node, aten.layer_norm):
        result.refused.append(site((added, node), "no kernel adds a residual and takes a layer norm"))
        return
    graph = scene.graph
    weight, eps = node.args[1:3] if _is_ours(node) else (argument(node, "weight"), argument(node, "eps"))
    reason = _not_joined(scene, node, added, weight, eps)
    if reason is not None:
        result.refused.append(site((added, node), reason))
        return
    from .. import fused_ops

    place = min(added.users, key=scene.order.__getitem__)
    result.changed.append(site((added, node), "add + rms_norm -> add_rms_norm", bytes_of(graph, added)))
    both = insert(graph, place, fused_ops.graph_add_rms_norm, (*added.args[:2], weight, eps), like=node)
    normed, summed = (insert(graph, place, operator.getitem, (both, index), like=node) for index in range(2))
    node.replace_all_uses_with(normed)
    added.replace_all_uses_with(summed)
    for old in (node, *below(given(node, 0))[1], added):
        if not old.users:
            graph.module.graph.erase_node(old)
    loosen_views(graph, [normed, summed])
    scene.refresh()


def _not_joined(scene: Scene, node: fx.Node, added: fx.Node, weight: Any, eps: Any) -> str | None:
    from .. import fused_ops

    if eps is None or (weight is not None and weight.meta["val"].dtype != added.meta["val"].dtype):
        return "its eps is not given, or its weight has another dtype"
    reason = fused_ops.no_win(scene.graph, "add_rms_norm", added, columns=True)
    if reason is not None:
        return reason
    place = min(scene.order[user] for user in added.users)
    if weight is not None and scene.order[weight] > place:
        return "its weight comes after the first reader of the sum"
    return scene.disturbed(Match({}, (node, added), ()), list(added.all_input_nodes))
