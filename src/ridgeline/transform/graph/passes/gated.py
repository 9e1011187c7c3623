"""Activations written by hand become torch's; silu(gate) * up becomes one kernel on GPUs.

    x * sigmoid(x)                                              -> silu(x)
    0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x³)))  (GPT-2)     -> gelu(x, "tanh")
    0.5 x (1 + erf(x / sqrt 2))                                 -> gelu(x)
    silu(gate) * up                                             -> swiglu(gate, up), where the shipped table says it wins

On CPUs the first three save passes over memory (GPT-2's formula is eight ops); the product after silu stays torch's own there.
Ref: Hendrycks and Gimpel 2016 (gelu); Shazeer 2020 (gated perceptrons).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import fx

from ..edit import insert, is_op, same_sizes, tidy
from ..manager import PassContext, PassResult, register, site
from ..patterns import DIV, MUL, Call, Either, Input, Match, Number, Pattern, Scene, aten, between, product, replace, total

if TYPE_CHECKING:
    from ..capture import Captured

X = Input("x")


def _scaled(of: Pattern, factor: float) -> Either:
    return Either.of(product(of, Number(equals=factor)), Call.of(DIV, of, Number(equals=1 / factor), rounding_mode=None))


def _half_of(left: Pattern, right: Pattern) -> Either:
    """0.5 left right, the half standing anywhere."""
    half = 0.5
    return Either.of(product(_scaled(left, half), right), product(left, _scaled(right, half)), _scaled(product(left, right), half))


CUBE = Either.of(Call.of(aten.pow, X, Number(equals=3.0)), product(product(X, X), X))
SMALL_CUBE = Either.of(_scaled(CUBE, 0.044715), product(product(_scaled(X, 0.044715), X), X))
ANGLE = _scaled(total(X, SMALL_CUBE), math.sqrt(2 / math.pi))
TANH = Call.of(aten.tanh, ANGLE)
ERF = Call.of(aten.erf, _scaled(X, 1 / math.sqrt(2)))
ONE = Number(equals=1.0)
BY_HAND: tuple[tuple[str, Pattern, Any, dict[str, Any]], ...] = (
    ("gelu", _half_of(X, total(TANH, ONE)), aten.gelu.default, {"approximate": "tanh"}),
    ("gelu", _half_of(X, total(ERF, ONE)), aten.gelu.default, {}),
    ("silu", product(X, Call.of(aten.sigmoid, X)), aten.silu.default, {}),
)
GATED = product(Call.of((aten.silu, aten.silu_), Input("gate")), Input("up"))


@register("gated")
@dataclass(frozen=True)
class FuseGated:
    """See the module."""

    name: ClassVar[str] = "gated"

    def run(self, graph: Captured, context: PassContext) -> PassResult:
        """Activations first, so that a gate by hand is found too."""
        result = PassResult()
        for step in (_activation, _gate):
            scene = Scene(graph)
            for node in list(scene.order):
                if is_op(node, *MUL, *DIV):
                    step(scene, node, result)
        if result.changed:
            tidy(graph)
        return result


def _activation(scene: Scene, node: fx.Node, result: PassResult) -> None:
    for name, formula, target, options in BY_HAND:
        match = scene.match(formula, node)
        if match is None:
            continue
        inside = tuple(reversed(match.inside))
        reason = scene.objection(match, "x") or _other_dtype(match, "x")
        if reason is not None:
            result.refused.append(site(inside, reason))
        else:
            result.changed.append(site(inside, f"{name} by hand -> {name}", between(scene.graph, match)))
            replace(scene, match, insert(scene.graph, node, target, (match.names["x"],), options, like=node))
        return


def gated(scene: Scene, node: fx.Node) -> Match | None:
    """silu(gate) * up of two tensors of one shape."""
    match = scene.match(GATED, node) if is_op(node, *MUL) else None
    if match is None or not same_sizes(match.names["gate"].meta["val"], match.names["up"].meta["val"]):
        return None
    return match


def _gate(scene: Scene, node: fx.Node, result: PassResult) -> None:
    match = gated(scene, node)
    if match is None:
        return
    from .. import fused_ops

    inside = tuple(reversed(match.inside))
    reason = scene.objection(match, "gate", "up") or _other_dtype(match, "gate", "up")
    reason = reason or fused_ops.no_win(scene.graph, "swiglu", match.names["gate"])
    if reason is not None:
        result.refused.append(site(inside, reason))
        return
    result.changed.append(site(inside, "silu * up -> swiglu", between(scene.graph, match)))
    new = insert(scene.graph, node, fused_ops.graph_swiglu, (match.names["gate"], match.names["up"]), like=node)
    replace(scene, match, new)


def _other_dtype(match: Match, *names: str) -> str | None:
    """One op has one dtype: that of its inputs and of its result."""
    wanted = match.root.meta["val"].dtype
    other = next((match.names[name] for name in names if match.names[name].meta["val"].dtype != wanted), None)
    return None if other is None else f"{other.name} is {other.meta['val'].dtype}, the result {wanted}"
