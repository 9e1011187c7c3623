"""Compute once what depends on weights and numbers only.

    arange(16), full(…), weight.t(), weight.to(bfloat16), mask + mask   ──run now──>  one constant each, where the rest begins

Only the last node of such a chain becomes a constant. The budget bounds how many bytes the model may grow by (a view of a
weight costs nothing; a weight that is then no longer read counts back). Not folded: random ops, what an op writes, an
output (the caller may write it), anything whose size depends on the batch, ops from outside aten.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..capture import Captured
from ..edit import attribute, constant, is_random, mutates, put_constant, replace_all, returned, schema_of, storages, tidy, written
from ..manager import PassContext, PassResult, op_name, register, site


@register("fold_constants")
@dataclass(slots=True)
class FoldConstants:
    """Constant folding under a size budget."""

    name: str = "fold_constants"
    spent_bytes: int = 0  # over all rounds

    def run(self, graph: Captured, context: PassContext) -> PassResult:
        result = PassResult()
        known = constant_nodes(graph)
        ends = [node for node in known if node.op == "call_function" and any(user not in known for user in node.users)]
        where, outputs = storages(graph), returned(graph)
        for node in ends:
            chain = _chain(node, known)
            if where[node] & outputs:
                result.refused.append(site(chain, "it is an output: the caller may write it"))
                continue
            value = _value(graph, node)
            if not isinstance(value, torch.Tensor):
                continue  # a tuple: its getitem nodes are folded instead
            grown = _growth(graph, node, chain, value)
            if self.spent_bytes + max(grown, 0) > context.constant_budget_bytes:
                result.refused.append(site(chain, f"{grown} more bytes of constants are over the budget"))
                continue
            self.spent_bytes += max(grown, 0)
            result.changed.append(site(chain, " + ".join(dict.fromkeys(op_name(one) for one in chain)) + " -> constant"))
            replace_all(node, put_constant(graph, f"folded_{node.name}", value))
        if result.changed:
            tidy(graph)
        return result


def constant_nodes(graph: Captured) -> dict[fx.Node, None]:
    """Weights no op writes, and calls that depend on nothing else; in graph order."""
    where, changed = storages(graph), written(graph)
    known: dict[fx.Node, None] = {}
    for node in graph.module.graph.nodes:
        if where[node] & changed:
            continue
        if node.op == "get_attr":
            tensor = constant(graph, node)
            if tensor is not None and not tensor.is_meta:
                known[node] = None
        elif node.op == "call_function" and _foldable(node) and all(source in known for source in node.all_input_nodes):
            known[node] = None
    return known


def _foldable(node: fx.Node) -> bool:
    """Whether a call gives the same answer at every run with the same arguments, and a tensor of a fixed size."""
    if mutates(node) or is_random(node):
        return False
    schema = schema_of(node)
    if schema is not None and not schema.name.startswith("aten::"):
        return False
    values = node.meta.get("val")
    for value in values if isinstance(values, list | tuple) else (values,):
        if not isinstance(value, torch.Tensor) or value.is_meta or any(isinstance(size, torch.SymInt) for size in value.shape):
            return False
    return True


def _chain(node: fx.Node, known: dict[fx.Node, None]) -> list[fx.Node]:
    """The calls that are there for `node` alone or together with others, `node` last."""
    found: dict[fx.Node, None] = {}
    todo = [node]
    while todo:
        one = todo.pop()
        if one.op == "call_function" and one not in found and one in known:
            found[one] = None
            todo.extend(one.all_input_nodes)
    return list(reversed(found))


def _value(graph: Captured, node: fx.Node) -> Any:
    """The value of a constant node."""
    done: dict[fx.Node, Any] = {}

    def value(one: fx.Node) -> Any:
        if one not in done:
            if one.op == "get_attr":
                done[one] = attribute(graph.module, str(one.target))
            else:
                args, kwargs = fx.node.map_arg(one.args, value), fx.node.map_arg(one.kwargs, value)
                assert callable(one.target)
                done[one] = one.target(*args, **kwargs)
        return done[one]

    with torch.no_grad():
        return value(node)


def _growth(graph: Captured, node: fx.Node, chain: list[fx.Node], value: torch.Tensor) -> int:
    """Bytes the model grows by: the new tensor, unless it is a view of a weight, less weights only this chain reads."""
    sources = {source for one in chain for source in one.all_input_nodes if source.op == "get_attr"}
    tensors = [tensor for tensor in (constant(graph, source) for source in sources) if tensor is not None]
    if any(_home(tensor) == _home(value) for tensor in tensors):
        return 0
    inside, shared = set(chain), _shared_storages(graph)
    freed = [source for source in sources if all(user in inside and set(user.users) <= inside | set(node.users) for user in source.users)]
    gone = [tensor for tensor in (constant(graph, source) for source in freed) if tensor is not None]
    return value.untyped_storage().nbytes() - sum(tensor.nbytes for tensor in gone if _home(tensor) not in shared)


def _shared_storages(graph: Captured) -> set[int]:
    """Memory that several constants of the graph lie in: it stays as long as one of them does."""
    tensors = (constant(graph, node) for node in graph.module.graph.nodes if node.op == "get_attr")
    homes = Counter(_home(tensor) for tensor in tensors if tensor is not None)
    return {home for home, count in homes.items() if count > 1}


def _home(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
