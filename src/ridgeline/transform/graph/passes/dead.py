"""Take out calls nobody uses, and weights no call reads any more.

    h = relu(x)   (no consumers, writes nothing, draws nothing)   ──>  gone, then its arguments if they were only for it

An op that writes a tensor stays, whether or not its own result is used; so does a random op (those after it would draw
other numbers) and a call nothing is known of.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx, nn

from ..capture import Captured
from ..edit import aliases, bytes_of, is_random, mutates, tidy
from ..manager import PassContext, PassResult, op_name, register, site


@register("dead")
@dataclass(frozen=True, slots=True)
class Dead:
    """Dead-code elimination."""

    name: str = "dead"

    def run(self, graph: Captured, context: PassContext) -> PassResult:
        result = PassResult()
        nodes = graph.module.graph
        for node in reversed(list(nodes.nodes)):
            if node.users or node.op in ("placeholder", "output"):
                continue
            if node.op == "get_attr":
                nodes.erase_node(node)
            elif not mutates(node) and not is_random(node):
                saved = 0 if aliases(node) else bytes_of(graph, node)
                result.changed.append(site([node], f"{op_name(node)}: nobody uses its result", saved))
                nodes.erase_node(node)
        drop_unused_attributes(graph.module)
        tidy(graph)
        return result


def drop_unused_attributes(module: fx.GraphModule) -> None:
    """Parameters and buffers no get_attr names, and submodules left empty, are taken off the module."""
    used = {str(node.target) for node in module.graph.nodes if node.op in ("get_attr", "call_module")}
    for path, owner in list(module.named_modules()):
        if any(path == name or path.startswith(f"{name}.") for name in used if name):
            continue  # part of a module that is called or fetched whole
        for name in (*owner._parameters, *owner._buffers):
            if (f"{path}.{name}" if path else name) not in used:
                delattr(owner, name)
    for path in sorted((path for path, _ in module.named_modules() if path), key=lambda path: -path.count(".")):
        if path not in used and _is_empty(module.get_submodule(path)):
            module.delete_submodule(path)


def _is_empty(part: nn.Module) -> bool:
    """A bare container that holds nothing."""
    return type(part) is nn.Module and not part._parameters and not part._buffers and not part._modules
