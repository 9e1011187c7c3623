"""Let an op write over an input that dies there, as an in-place op would: one place in the arena instead of two.

    Facts + {node: positions of arguments its Writer may write over} ──reuse──> Facts with merged storages, `reused` nodes
      pointwise op with a Writer   over an argument of the same dtype, size and strides         (tried: same bits)
      op whose result is copied    over any argument of the same bytes: it is read before the copy

Only where the argument lives in the arena and nothing looks at it later. Merged storages have one interval, so the lower
bound falls too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx
from torch.utils import _pytree as pytree

from ..edit import written_arguments
from .facts import ARENA, Facts, TensorFact
from .lifetimes import homes_of, touched


def reuse(graph: fx.Graph, facts: Facts, overwrites: Mapping[str, tuple[int, ...]]) -> Facts:
    """The same facts with results put over dying arguments; nodes missing in `overwrites` copy their result into the arena."""
    homes = homes_of(graph, facts)
    step = {node: number for number, node in enumerate(graph.nodes)}
    last = {storage: step[node] for node in graph.nodes for storage in touched(node, facts)}
    root = list(range(len(facts.storages)))
    reused: dict[str, int] = {}
    for node in graph.nodes:
        made = facts.made_by(node.name)
        mine = facts.tensors.get(node.name, ())
        if node.op != "call_function" or len(made) != 1 or homes[made[0]] != ARENA or written_arguments(node):
            continue
        size = facts.storages[made[0]].bytes
        for source, fact in _candidates(node, mine, facts, overwrites):
            old = root[fact.storage]
            fits = homes[old] == ARENA and facts.storages[old].bytes == size > 0 and last[old] == step[node] and fact.plain
            if fits and _alone(node, source, facts, root) and facts.storages[old].device == facts.storages[made[0]].device:
                root[made[0]] = old
                last[old] = last[made[0]]
                reused[node.name] = old
                break
    return _merged(facts, root, reused)


def _candidates(
    node: fx.Node, mine: tuple[TensorFact, ...], facts: Facts, overwrites: Mapping[str, tuple[int, ...]]
) -> list[tuple[fx.Node, TensorFact]]:
    """Arguments whose place may be taken."""
    if node.name not in overwrites:
        return [(source, fact) for source in node.all_input_nodes for fact in facts.tensors[source.name]]
    given = [node.args[position] for position in overwrites[node.name]]
    single = [(source, facts.tensors[source.name][0]) for source in given if isinstance(source, fx.Node)]
    return [(source, fact) for source, fact in single if len(mine) == 1 and replace(fact, storage=mine[0].storage) == mine[0]]


def _alone(node: fx.Node, source: fx.Node, facts: Facts, root: list[int]) -> bool:
    """Whether no other argument looks at the same place (a second view of it would be read while it is written)."""
    places = {root[fact.storage] for fact in facts.tensors[source.name]}
    others = (fact for other in node.all_input_nodes if other is not source for fact in facts.tensors[other.name])
    return all(root[fact.storage] not in places for fact in others)


def _merged(facts: Facts, root: list[int], reused: dict[str, int]) -> Facts:
    def moved(leaf: object) -> object:
        return replace(leaf, storage=root[leaf.storage]) if isinstance(leaf, TensorFact) else leaf

    tensors = {name: tuple(replace(fact, storage=root[fact.storage]) for fact in mine) for name, mine in facts.tensors.items()}
    values = {name: pytree.tree_map(moved, value) for name, value in facts.values.items()}
    written = {root[storage] for storage in facts.written}
    return Facts(tensors, values, facts.storages, written, reused)
