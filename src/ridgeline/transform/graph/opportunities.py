"""How many places of a graph one op could do what several do now, pattern by pattern, and the bytes that would not move.

    graph ──for each pattern──> places where its ops stand one after the other (total)
                               of these, where nobody else reads what is between and nothing else speaks against it (fusable)
                               bytes written and read again between the ops of the fusable ones (saved)

Counted in the graph, so across the borders of modules and inside ModuleLists alike. `by` is the pass that takes it up; whether it does
depends also on the device: passes refuse, with the reason, what would not be faster there. "" means that no pass does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from .attention_walk import find_attention
from .edit import argument, bytes_of, is_op, layer_of, same_sizes
from .patterns import ADD, MUL, Match, Scene, aten, below, between, given

if TYPE_CHECKING:
    from .capture import Captured

CONVOLUTIONS = (aten.conv1d, aten.conv2d, aten.conv3d)
LINEARS = (aten.linear, aten.addmm)
SHAPES = (aten.view, aten.reshape, aten.transpose, aten.permute, aten.flatten, aten.contiguous)
EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Opportunity:
    """One pattern in one graph."""

    pattern: str  # "conv + norm"
    fusable: int
    total: int
    saved_bytes: int  # intermediate bytes the fusable ones would no longer write and read
    examples: tuple[str, ...] = ()  # module paths of some fusable ones, first
    by: str = ""  # the pass


@dataclass(frozen=True, slots=True)
class Place:
    """One place where a pattern stands."""

    node: fx.Node
    fusable: bool
    saved_bytes: int


def opportunities(captured: Captured) -> list[Opportunity]:
    """All patterns that stand somewhere in the graph."""
    scene = Scene(captured)
    found = []
    for pattern, by, look in PATTERNS:
        places = sorted(look(scene), key=lambda place: scene.order[place.node])
        good = [place for place in places if place.fusable]
        paths = list(dict.fromkeys(layer_of(place.node) for place in good))
        if places:
            saved = sum(place.saved_bytes for place in good)
            found.append(Opportunity(pattern, len(good), len(places), saved, tuple(paths[:EXAMPLES]), by))
    return found


def _source(node: object) -> tuple[fx.Node | None, tuple[fx.Node, ...]]:
    """What computed a value, and the copies, casts and changes of shape between."""
    passed: list[fx.Node] = []
    while isinstance(node, fx.Node):
        node, more = below(node)
        passed += more
        if not is_op(node, *SHAPES):
            return node, tuple(passed)
        passed.append(node)
        node = given(node, 0)
    return None, ()


def _alone(*nodes: fx.Node) -> bool:
    return all(len(node.users) == 1 for node in nodes)


def _twice(scene: Scene, *nodes: fx.Node) -> int:
    """Bytes written once and read once."""
    return sum(2 * bytes_of(scene.graph, node) for node in nodes)


def _activations(scene: Scene) -> Iterator[tuple[fx.Node, fx.Node, Match | None]]:
    """Activations and what they are taken of; with the match, where they are written by hand."""
    from .passes.gated import BY_HAND
    from .passes.merge_qkv import ACTIVATIONS

    for node in scene.order:
        if is_op(node, *ACTIVATIONS):
            yield node, given(node, 0), None
        elif is_op(node, *MUL):
            match = next((match for _, formula, *_ in BY_HAND if (match := scene.match(formula, node)) is not None), None)
            if match is not None:
                yield node, match.names["x"], match


def _layer_activation(*layers: object) -> Callable[[Scene], Iterator[Place]]:
    def look(scene: Scene) -> Iterator[Place]:
        for node, taken, match in _activations(scene):
            source, passed = _source(taken)
            if source is not None and is_op(source, *layers):
                first = passed[0] if passed else source
                only = set(first.users) <= set(match.inside) if match is not None else _alone(first)
                yield Place(node, only and _alone(*passed[1:], *((source,) if passed else ())), _twice(scene, source))

    return look


def _conv_norm(scene: Scene) -> Iterator[Place]:
    for node in scene.order:
        source, passed = _source(given(node, 0)) if is_op(node, aten.batch_norm) else (None, ())
        if source is not None and is_op(source, *CONVOLUTIONS):
            yield Place(node, _alone(source, *passed), _twice(scene, source))


def _conv_norm_activation(scene: Scene) -> Iterator[Place]:
    for node, taken, match in _activations(scene):
        norm, passed = _source(taken)
        if match is not None or norm is None or not is_op(norm, aten.batch_norm):
            continue
        source, more = _source(given(norm, 0))
        if source is not None and is_op(source, *CONVOLUTIONS):
            yield Place(node, _alone(norm, source, *passed, *more), _twice(scene, norm, source))


def _layer_residual(*layers: object) -> Callable[[Scene], Iterator[Place]]:
    def look(scene: Scene) -> Iterator[Place]:
        by_hand = {node for *_, match in _activations(scene) if match is not None for node in match.inside}
        for node in scene.order:
            if not is_op(node, *ADD) or node in by_hand or not all(isinstance(part, fx.Node) for part in node.args[:2]):
                continue
            places = [place for side in (0, 1) if (place := _added(scene, node, given(node, side), layers)) is not None]
            if places:  # both sides may be layers: one of them can take the other
                yield max(places, key=lambda place: place.fusable)

    return look


def _added(scene: Scene, node: fx.Node, part: fx.Node, layers: tuple[object, ...]) -> Place | None:
    """A layer (and its norm) whose result is added to a tensor of the same shape."""
    chain: list[fx.Node] = []
    source, passed = _source(part)
    while source is not None and is_op(source, aten.batch_norm):
        chain += [source, *passed]
        source, passed = _source(given(source, 0))
    if source is None or not is_op(source, *layers):
        return None
    same = all(same_sizes(given(node, side).meta["val"], node.meta["val"]) for side in (0, 1))
    written = [one for one in (*chain, source) if one not in passed and not is_op(one, *SHAPES)]
    return Place(node, same and _alone(*chain, source, *passed), _twice(scene, *written))


def _attention(scene: Scene) -> Iterator[Place]:
    from .passes.attention import objection

    for node in scene.order:
        found = find_attention(scene, node)
        if found is not None:
            yield Place(node, objection(scene, found) is None, between(scene.graph, found.match))


def _attention_projection(scene: Scene) -> Iterator[Place]:
    for node in scene.order:
        source, passed = _source(node.args[1 if is_op(node, aten.addmm) else 0]) if is_op(node, *LINEARS) else (None, ())
        if source is None:
            continue
        if is_op(source, aten.scaled_dot_product_attention) or find_attention(scene, source) is not None:
            yield Place(node, _alone(source, *passed), _twice(scene, source))


def _norm_residual(scene: Scene) -> Iterator[Place]:
    from .passes.norm import by_hand, residual_before

    for node in scene.order:
        added = residual_before(node)
        for _, match in by_hand(scene, node):
            source, _ = below(match.names["x"])
            fits = is_op(source, *ADD) and all(isinstance(part, fx.Node) for part in source.args[:2])
            same = fits and all(same_sizes(given(source, side).meta["val"], source.meta["val"]) for side in (0, 1))
            added = source if same and "weight" in match.names else added
        if added is not None:
            yield Place(node, argument(added, "alpha", 1) == 1, bytes_of(scene.graph, added))


def _norms(wanted: str) -> Callable[[Scene], Iterator[Place]]:
    def look(scene: Scene) -> Iterator[Place]:
        from .passes.norm import by_hand, objection

        inside: set[fx.Node] = set()
        for node in reversed(list(scene.order)):
            for op, match in by_hand(scene, node) if node not in inside else ():
                inside.update(match.inside)
                if op == wanted:
                    slow = _plain_half(match)  # a matter of speed on one device, not of meaning
                    yield Place(node, slow or objection(scene, op, match) is None, between(scene.graph, match))
                break

    return look


def _plain_half(match: Match) -> bool:
    return bool(match.names["x"].meta["val"].dtype in (torch.float16, torch.bfloat16) and match.names["x"].meta["val"].device.type == "cpu")


def _rope(scene: Scene) -> Iterator[Place]:
    from .passes.rope import rotation

    for node in scene.order:
        found = rotation(scene, node)
        if found is not None:
            yield Place(node, scene.objection(found.match, "x") is None, between(scene.graph, found.match))


def _swiglu(scene: Scene) -> Iterator[Place]:
    from .passes.gated import gated

    for node in scene.order:
        match = gated(scene, node)
        if match is not None:
            yield Place(node, scene.objection(match, "gate", "up") is None, between(scene.graph, match))


def _shared_input(gates: bool) -> Callable[[Scene], Iterator[Place]]:
    def look(scene: Scene) -> Iterator[Place]:
        from .passes.merge_qkv import gate_linears, groups, input_read_again, objection

        with_gate = gate_linears(scene)
        for linears in groups(scene):
            if bool(with_gate.intersection(linears)) is gates:
                yield Place(linears[0], objection(scene, linears, always=True) is None, input_read_again(scene.graph, linears))

    return look


PATTERNS: tuple[tuple[str, str, Callable[[Scene], Iterator[Place]]], ...] = (
    ("conv + norm", "fold_norm", _conv_norm),
    ("conv + norm + activation", "fold_norm", _conv_norm_activation),
    ("conv + activation", "epilogue", _layer_activation(*CONVOLUTIONS)),
    ("conv + residual", "epilogue", _layer_residual(*CONVOLUTIONS)),
    ("linear + activation", "epilogue", _layer_activation(*LINEARS)),
    ("linear + residual", "epilogue", _layer_residual(*LINEARS)),
    ("attention", "attention", _attention),
    ("attention + projection", "", _attention_projection),
    ("qkv", "merge_qkv", _shared_input(gates=False)),
    ("gate + up", "merge_qkv", _shared_input(gates=True)),
    ("norm + residual", "norm", _norm_residual),
    ("rms_norm", "norm", _norms("rms_norm")),
    ("layer_norm by hand", "norm", _norms("layer_norm")),
    ("rope", "rope", _rope),
    ("swiglu", "gated", _swiglu),
)
