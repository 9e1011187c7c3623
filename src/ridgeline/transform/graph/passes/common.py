"""The same op on the same arguments is computed once.

    a = relu(x) … b = relu(x)   ──>   every use of b uses a

Never merged: random ops, ops that write, a value that lies in memory some op writes (the two may be read at different
times), and two values that are both outputs (the caller may write one of them).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..capture import Captured
from ..edit import aliases, bytes_of, is_random, mutates, replace_all, returned, storages, tidy, written
from ..manager import PassContext, PassResult, op_name, register, site


@register("common")
@dataclass(frozen=True, slots=True)
class Common:
    """Common subexpressions."""

    name: str = "common"

    def run(self, graph: Captured, context: PassContext) -> PassResult:
        result = PassResult()
        where, changed, outputs = storages(graph), written(graph), returned(graph)
        seen: dict[Hashable, fx.Node] = {}
        for node in list(graph.module.graph.nodes):
            if node.op != "call_function" or mutates(node) or is_random(node):
                continue
            first = seen.setdefault((node.target, key(node.args), key(node.kwargs)), node)
            if first is node:
                continue
            touched = where[node] | where[first] | {base for source in node.all_input_nodes for base in where[source]}
            if touched & changed:
                result.refused.append(site([first, node], "an op writes what they read or give"))
            elif where[node] & outputs and where[first] & outputs and not aliases(node):
                result.refused.append(site([first, node], "both are outputs"))
            else:
                saved = 0 if aliases(node) else bytes_of(graph, node)
                result.changed.append(site([first, node], f"two equal {op_name(node)} -> one", saved))
                replace_all(node, first)
                graph.module.graph.erase_node(node)
        if result.changed:
            tidy(graph)
        return result


def key(value: Any) -> Hashable:
    """A hashable stand-in for an argument that tells 1, 1.0 and True, and 0.0 and -0.0, apart."""
    if isinstance(value, fx.Node | torch.dtype | torch.device | torch.layout | torch.memory_format):
        return value
    if isinstance(value, dict):
        return ("dict", *((name, key(one)) for name, one in sorted(value.items())))
    if isinstance(value, list | tuple):
        return ("list", *(key(one) for one in value))
    return (type(value).__name__, repr(value))
