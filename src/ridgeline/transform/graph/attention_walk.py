"""From the product with the values back to query and key: how attention by hand is recognised.

    p @ v                 the result; p through casts and dropout to
    softmax(s, -1)        then, in any order that keeps the meaning:
      s + mask            an additive mask                  masked_fill(s, hidden, -inf), where(seen, s, -inf): boolean ones
      s * c, s / c        the scale (inside the mask only: outside it would scale the mask too)
    q @ k'                matmul, bmm, baddbmm, einsum; q * c and k * c join the scale

`Attention.reason` is set where the shape of it is there but the meaning is not (softmax over another dimension).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from .edit import argument, is_op, only_user
from .patterns import ADD, DIV, MUL, Match, Scene, aten, below, given

PRODUCTS = (aten.matmul, aten.bmm, aten.einsum, aten.baddbmm)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor and the order of its dimensions that makes it [..., tokens, features]."""

    node: fx.Node
    order: tuple[int, ...]
    turned_by: tuple[fx.Node, ...] = ()  # transposes between it and the product

    @property
    def shape(self) -> tuple[Any, ...]:
        sizes = self.node.meta["val"].shape
        return tuple(sizes[dim] for dim in self.order)


@dataclass(frozen=True, slots=True)
class Mask:
    """Added to the scores; or, with a `fill`, a boolean one: True where the fill goes (`inverted`), or where it does not."""

    node: fx.Node
    fill: float | None = None
    inverted: bool = False


@dataclass(slots=True)
class Attention:
    """softmax(scale * query key' + masks) value."""

    inside: list[fx.Node]
    query: Operand
    key: Operand
    value: Operand
    result_order: tuple[int, ...]
    scale: float = 1.0
    masks: list[Mask] = field(default_factory=list)
    outside: list[fx.Node] = field(default_factory=list)
    reason: str | None = None

    @property
    def match(self) -> Match:
        return Match({}, tuple(self.inside), tuple(self.outside))


@dataclass(frozen=True, slots=True)
class _Product:
    """Two operands as a product takes them, and the order of its result."""

    left: Operand
    right: Operand
    result_order: tuple[int, ...]


def find_attention(scene: Scene, node: fx.Node) -> Attention | None:
    """The attention whose result `node` is."""
    if not is_op(node, aten.matmul, aten.bmm, aten.einsum):
        return None
    last = _einsum_value(node) if is_op(node, aten.einsum) else _plain(given(node, 0), given(node, 1), transposed=False)
    if last is None:
        return None
    softmax, passed = below(last.left.node)
    if not is_op(softmax, aten.softmax, aten._softmax):
        return None
    inside = [node, *passed, softmax]
    found = Attention(inside, last.right, last.right, last.right, last.result_order)
    product = _scores(scene, given(softmax, 0), found)
    if product is None:
        return None
    rank = softmax.meta["val"].dim()
    if argument(softmax, "dim") not in (-1, rank - 1):
        found.reason = f"its softmax is over dimension {argument(softmax, 'dim')}, not the last"
        return found
    if last.left.order != tuple(range(rank)):
        found.reason = "its probabilities are not multiplied over their last dimension"
        return found
    found.query, found.key = (_unscaled(scene, operand, found) for operand in (product.left, product.right))
    return found


def _scores(scene: Scene, value: fx.Node, found: Attention) -> _Product | None:
    """Masks and scales down to the product of query and key; None where there is none."""
    node, passed = below(value, stop=PRODUCTS)
    found.inside += passed
    if is_op(node, *PRODUCTS):
        found.inside.append(node)
        return _score_product(node, found)
    if is_op(node, *MUL, *DIV):
        number = scene.number(given(node, 1))
        rest = given(node, 0)
        if number is None and is_op(node, *MUL):
            number, rest = scene.number(given(node, 0)), given(node, 1)
        if number is None or not number or argument(node, "rounding_mode") is not None or not isinstance(rest, fx.Node):
            return None
        found.scale *= number if is_op(node, *MUL) else 1 / number
        found.inside.append(node)
        return _scores(scene, rest, found)
    return _masked(scene, node, found)


def _masked(scene: Scene, node: fx.Node, found: Attention) -> _Product | None:
    """An added or filled-in mask, and what is below it."""
    choices: list[tuple[Any, Mask]] = []
    if is_op(node, *ADD) and argument(node, "alpha", 1) == 1:
        left, right = node.args[:2]
        choices = [
            (rest, Mask(below(mask, narrowing=False)[0])) for rest, mask in ((left, right), (right, left)) if isinstance(mask, fx.Node)
        ]
    elif is_op(node, aten.masked_fill, aten.masked_fill_):
        fill = scene.number(given(node, 2))
        choices = [] if fill is None else [(given(node, 0), Mask(given(node, 1), fill, inverted=True))]
    elif is_op(node, aten.where) and len(node.args) == 3:
        condition, yes, no = (given(node, index) for index in range(3))
        for rest, other, inverted in ((yes, no, False), (no, yes, True)):
            fill = scene.number(other)
            fill = _filled(scene, other) if fill is None else fill
            if fill is not None and isinstance(rest, fx.Node):
                choices.append((rest, Mask(condition, fill, inverted)))
    for rest, mask in choices:
        if not isinstance(rest, fx.Node):
            continue
        state = (list(found.inside), list(found.masks), found.scale, found.reason)
        if found.scale != 1:
            found.reason = "its mask is scaled together with the scores"
        found.inside.append(node)
        found.masks.append(mask)
        product = _scores(scene, rest, found)
        if product is not None:
            return product
        found.inside, found.masks, found.scale, found.reason = state
    return None


def _filled(scene: Scene, value: Any) -> float | None:
    """The number a tensor of one element was made of (full, scalar_tensor)."""
    node: Any = below(value)[0] if isinstance(value, fx.Node) else None
    if is_op(node, aten.full, aten.scalar_tensor) and node.meta["val"].numel() == 1:
        return scene.number(given(node, -1))
    return None


def _score_product(node: fx.Node, found: Attention) -> _Product | None:
    if is_op(node, aten.einsum):
        return _einsum_scores(node)
    if not is_op(node, aten.baddbmm):
        return _plain(given(node, 0), given(node, 1), transposed=True)
    beta, alpha = argument(node, "beta", 1), argument(node, "alpha", 1)
    if beta not in (0, 1):
        return None
    if beta == 1:
        if found.scale != 1:
            found.reason = "its mask is scaled together with the scores"
        found.masks.append(Mask(given(node, 0)))
    found.scale *= alpha
    return _plain(given(node, 1), given(node, 2), transposed=True)


def _plain(left: Any, right: Any, *, transposed: bool) -> _Product | None:
    """matmul and bmm; `transposed`: the right one is key', [..., features, tokens]."""
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    ranks = [node.meta["val"].dim() for node in (left, right)]
    if min(ranks) < 2 or ranks[0] != ranks[1]:
        return None
    straight = tuple(range(ranks[0]))
    if not transposed:
        return _Product(Operand(left, straight), Operand(right, straight), straight)
    turned = (*straight[:-2], straight[-1], straight[-2])
    return _Product(Operand(left, straight), _unturned(Operand(right, turned)), straight)


def _unturned(operand: Operand) -> Operand:
    """The tensor below transposes and permutations where it lies as [..., tokens, features]; as it is where there is none."""
    node, order, passed = operand.node, operand.order, list[fx.Node]()
    while order != tuple(range(len(order))) and is_op(node, aten.transpose, aten.permute, aten.mT):
        dims = list(range(len(order)))
        if is_op(node, aten.permute):
            dims = [int(dim) % len(order) for dim in given(node, 1)]
        else:
            one, other = (-2, -1) if is_op(node, aten.mT) else (given(node, 1), given(node, 2))
            dims[one], dims[other] = dims[other], dims[one]
        passed.append(node)
        node, order = given(node, 0), tuple(dims[dim] for dim in order)
    return Operand(node, order, tuple(passed)) if order == tuple(range(len(order))) else operand


def _labels(node: fx.Node) -> tuple[str, str, str] | None:
    """The labels of both operands and of the result of an einsum of two tensors."""
    equation = str(given(node, 0)).replace(" ", "")
    sides = equation.split("->")
    inputs = sides[0].split(",")
    if len(sides) != 2 or len(inputs) != 2 or "." in equation or any(len(set(part)) != len(part) for part in (*inputs, sides[1])):
        return None
    return inputs[0], inputs[1], sides[1]


def _einsum_scores(node: fx.Node) -> _Product | None:
    """query and key of an einsum whose result is [batch..., query tokens, key tokens]."""
    labels = _labels(node)
    if labels is None or len(labels[2]) < 2:
        return None
    left, right, result = labels
    batch, query, key = result[:-2], result[-2], result[-1]
    summed = set(left) & set(right) - set(result)
    operands = dict(zip((left, right), given(node, 1), strict=True))
    if len(summed) != 1 or len(operands) != 2:
        return None
    features = next(iter(summed))
    for one, other in ((left, right), (right, left)):
        if set(one) == {*batch, query, features} and set(other) == {*batch, key, features}:
            orders = (
                tuple(one.index(name) for name in (*batch, query, features)),
                tuple(other.index(name) for name in (*batch, key, features)),
            )
            return _Product(Operand(operands[one], orders[0]), Operand(operands[other], orders[1]), tuple(range(len(result))))
    return None


def _einsum_value(node: fx.Node) -> _Product | None:
    """Probabilities [batch..., query, key] and value of an einsum, in whatever order its result is."""
    labels = _labels(node)
    if labels is None:
        return None
    left, right, result = labels
    tensors: Any = given(node, 1)
    for one, other, at in ((left, right, 0), (right, left, 1)):
        batch, query, key = one[:-2], one[-2:-1], one[-1:]
        rest = set(other) - {*batch, key}
        if len(one) < 2 or len(rest) != 1 or not {*batch, key} <= set(other) or query in other or key in result:
            continue
        features = next(iter(rest))
        natural = (*batch, query, features)
        if set(result) != set(natural) or not is_op(below(tensors[at])[0], aten.softmax, aten._softmax):
            continue
        value = Operand(tensors[1 - at], tuple(other.index(name) for name in (*batch, key, features)))
        return _Product(Operand(tensors[at], tuple(range(len(one)))), value, tuple(natural.index(name) for name in result))
    return None


def _unscaled(scene: Scene, operand: Operand, found: Attention) -> Operand:
    """A query or key without the number it is multiplied by, where nobody else reads the product."""
    node = operand.node
    if not is_op(node, aten.mul, aten.div) or any(only_user(one) is None for one in (node, *operand.turned_by)):
        return operand
    number = scene.number(given(node, 1))
    source = given(node, 0)
    if number is None and is_op(node, aten.mul):
        number, source = scene.number(given(node, 0)), given(node, 1)
    if not number or not isinstance(source, fx.Node) or argument(node, "rounding_mode") is not None:
        return operand
    if source.meta["val"].dtype != node.meta["val"].dtype or source.meta["val"].dim() != node.meta["val"].dim():
        return operand
    found.scale *= number if is_op(node, aten.mul) else 1 / number
    found.inside += [*operand.turned_by, node]
    return Operand(source, operand.order)
