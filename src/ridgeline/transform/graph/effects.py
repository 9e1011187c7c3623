"""What an op does to memory: whose it shares, whose it writes, whether it draws random numbers.

    aliases(node)    its result may lie in an argument's memory: views, in-place ops, getitem, reshape, to, …
    mutates(node)    it writes an argument (or is a call nobody knows)      written_arguments(node): which
    storages(graph)  node -> the nodes whose memory its value may lie in    written, returned: those ops write, callers get

From the ops' schemas, and on the safe side: an op torch builds from others counts as a view unless it is listed in COMPUTES.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from .capture import Captured

_aten = torch.ops.aten
NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)  # values that are sizes, not tensors


def is_op(node: Any, *packets: Any) -> bool:
    """Whether `node` calls one of these ops: `is_op(n, aten.conv2d)`, an overload or a Python function work too."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    return any(node.target is packet or getattr(node.target, "overloadpacket", None) is packet for packet in packets)


def schema_of(node: fx.Node) -> torch.FunctionSchema | None:
    """The schema of the op a node calls; None for Python functions and other nodes."""
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    return schema if isinstance(schema, torch.FunctionSchema) else None


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """An argument of an aten call by its schema name, wherever it was passed; the schema's default, else `default`."""
    schema = schema_of(node)
    if name in node.kwargs or schema is None:
        return node.kwargs.get(name, default)
    for position, known in enumerate(schema.arguments):
        if known.name == name:
            if position < len(node.args):
                return node.args[position]
            return known.default_value if known.has_default_value() else default
    return default


SOMETIMES_VIEWS = (
    "reshape",
    "contiguous",
    "to",
    "flatten",
    "dropout",
    "expand_as",
    "type_as",
    "float",
    "double",
    "half",
    "feature_dropout",
)
"""Ops whose schema promises a new tensor or says nothing, but which may return their argument or a view of it."""


def aliases(node: fx.Node) -> bool:
    """Whether the result may share memory with an argument: views, in-place ops, getitem, and ops such as reshape and to."""
    if node.op != "call_function" or isinstance(node.meta.get("val"), NUMBERS):
        return False
    if node.target is operator.getitem:
        return True
    schema = schema_of(node)
    if schema is None:
        return isinstance(node.meta.get("val"), torch.Tensor)
    if any(value.alias_info is not None for value in schema.returns):
        return True
    return schema.name.split("::")[-1] in SOMETIMES_VIEWS or _composite_view(node)


def _composite_view(node: fx.Node) -> bool:
    """Whether torch implements the op by calling others (then it may return a view without saying so)."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or node.target in COMPUTES:
        return False
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), composite))


COMPUTES = {
    _aten.linear.default,
    _aten.conv1d.default,
    _aten.conv2d.default,
    _aten.conv3d.default,
    _aten.conv2d.padding,
    _aten.matmul.default,
    _aten.layer_norm.default,
    _aten.batch_norm.default,
    _aten.group_norm.default,
    _aten.instance_norm.default,
    _aten.rms_norm.default,
    _aten.softmax.int,
    _aten.log_softmax.int,
    _aten.scaled_dot_product_attention.default,
    _aten.embedding.default,
    _aten.max_pool2d.default,
    _aten.adaptive_avg_pool2d.default,
    _aten.silu.default,
    _aten.selu.default,
    _aten.relu6.default,
    _aten.multiply.Tensor,
    _aten.square.default,
    _aten.stack.default,
    _aten.upsample_nearest2d.vec,
    _aten.upsample_bilinear2d.vec,
    _aten.pad.default,
    _aten.cross_entropy_loss.default,
    _aten.where.ScalarSelf,
    _aten.where.ScalarOther,
    _aten.where.Scalar,
    _aten.std.default,
    _aten.var.default,
    _aten.std.dim,
    _aten.var.dim,
    _aten.linalg_vector_norm.default,
    _aten.argsort.default,
    _aten.one_hot.default,
}
"""Ops torch builds from others that always write a new tensor."""


def mutates(node: fx.Node) -> bool:
    """Whether the op writes one of its arguments, or is a Python call nobody knows the effects of."""
    if node.op in ("call_module", "call_method"):
        return True
    if node.op != "call_function":
        return False
    schema = schema_of(node)
    if schema is None:
        return node.target not in PURE_PYTHON and getattr(node.target, "__module__", None) != "_operator"
    return bool(schema.is_mutable)


PURE_PYTHON: set[Any] = {operator.getitem, torch.sym_max, torch.sym_min, torch.sym_int, torch.sym_float, torch.sym_not, torch.sym_sum}


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory this op writes."""
    if not mutates(node):
        return []
    schema = schema_of(node)
    if schema is None:
        return list(node.all_input_nodes)
    found: list[fx.Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.kwargs.get(argument.name, node.args[position] if position < len(node.args) else None)
        fx.node.map_arg(value, found.append)
    return found


DROPOUTS = (_aten.dropout, _aten.dropout_, _aten.feature_dropout, _aten.feature_dropout_, _aten.alpha_dropout, _aten.alpha_dropout_)


def is_random(node: fx.Node) -> bool:
    """Whether the op draws random numbers (dropout outside training does not)."""
    if is_op(node, *DROPOUTS):
        return bool(node.args[2])
    tags = getattr(node.target, "tags", ())
    if is_op(node, _aten.scaled_dot_product_attention):
        return float(argument(node, "dropout_p", 0.0)) != 0.0
    return bool(torch.Tag.nondeterministic_seeded in tags)


def storages(graph: Captured) -> dict[fx.Node, frozenset[fx.Node]]:
    """For every node: the nodes whose memory its value may lie in (itself, or what it is a view of)."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.module.graph.nodes:
        if aliases(node):
            sources = (source for source in node.all_input_nodes if not isinstance(source.meta.get("val"), NUMBERS))
            found[node] = frozenset().union(*(found[source] for source in sources)) or frozenset((node,))
        else:
            found[node] = frozenset((node,))
    return found


def written(graph: Captured) -> set[fx.Node]:
    """The storages (see `storages`) that some op of the graph writes."""
    where = storages(graph)
    return {base for node in graph.module.graph.nodes for target in written_arguments(node) for base in where[target]}


def returned(graph: Captured) -> set[fx.Node]:
    """The storages the outputs lie in: the caller may write them, so they must not become inputs, constants or each other."""
    where = storages(graph)
    last = next(node for node in reversed(graph.module.graph.nodes) if node.op == "output")
    return {base for source in last.all_input_nodes for base in where[source]}


def has_mutation(graph: Captured) -> bool:
    """Whether any op of the graph writes an existing tensor."""
    return any(mutates(node) for node in graph.module.graph.nodes)
