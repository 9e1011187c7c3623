"""The nodes of a graph as JSON, and a graph built again from it: names of operators, never code.

    fx.Node ──describe_node──> {"op", "name", "target": "aten.conv2d.default", "args", "kwargs", "layer"}
      argument: number, word, null, list │ {"node": name} {"tuple": [...]} {"slice": [...]} {"dtype": ...} {"device": ...} {"float": "inf"}
    [described nodes] + structure of the result ──build_graph──> fx.Graph, every name, operator and argument checked

A node may call what SPACES and FUNCTIONS name. fx turns a graph into Python: so names are identifiers, and words only appear quoted.
"""

from __future__ import annotations

import importlib
import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree

from ...core.errors import ModelFileError
from ..tensor_file import CODES
from .edit import layer_of

MOST_DEPTH = 32
SPACES = ("aten", "ridgeline", "mkldnn", "prims")
REFUSED = ("from_file", "_foobar", "_print")  # operators that touch more than tensors
OURS = (".onednn", ".fused_ops", "...kernel.rms_norm", "...kernel.layer_norm", "...kernel.rope", "...kernel.swiglu", "...kernel.matmul",
        "...kernel.attention", "...kernel.activation", "...kernel.pointwise", "...kernel.softmax", "...kernel.reduce")  # fmt: skip
"""What registers operators of the namespace `ridgeline`."""
FUNCTIONS = {
    f"operator.{one.__name__}": one
    for one in (operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod,
                operator.neg, operator.pow, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
} | {f"torch.{one.__name__}": one for one in (torch.sym_max, torch.sym_min, torch.sym_float, torch.sym_int, torch.sym_not)}  # fmt: skip
NAMES = {function: name for name, function in FUNCTIONS.items()}
CONSTANTS: dict[str, Mapping[str, Any]] = {
    "dtype": {str(one).removeprefix("torch."): one for one in (*CODES, torch.complex64, torch.complex128)},
    "layout": {"strided": torch.strided},
    "memory_format": {
        str(one).removeprefix("torch."): one
        for one in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
    },
}


def describe_node(node: fx.Node) -> dict[str, Any]:
    target = str(node.target) if node.op != "call_function" else _target_name(node)
    layer = layer_of(node)
    found = {"op": node.op, "name": node.name, "target": target, "args": _said(node.args, node), "kwargs": _said(dict(node.kwargs), node)}
    return found | ({"layer": layer} if layer else {})


def _target_name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in SPACES:
        return str(node.target)
    if node.target in NAMES:
        return str(NAMES[node.target])
    raise ModelFileError(
        f"node {node.name} calls {node.target}", why=f"only operators of {', '.join(SPACES)} are stored", do="leave it out"
    )


def _said(value: Any, node: fx.Node) -> Any:
    """An argument as JSON."""
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, tuple):
        return {"tuple": [_said(one, node) for one in value]}
    if isinstance(value, list):
        return [_said(one, node) for one in value]
    if isinstance(value, dict):
        return {"dict": {str(name): _said(one, node) for name, one in value.items()}}
    if isinstance(value, slice):
        return {"slice": [_said(one, node) for one in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, known in CONSTANTS.items():
        for name, constant in known.items():
            if value is constant:
                return {kind: name}
    raise ModelFileError(f"node {node.name} has an argument {value!r:.60}", why="a file cannot hold it", do="optimise without that pass")


def structure_of(spec: Any) -> Any:
    """The user's result: "leaf", None, or a list, tuple or dict of such; other classes are said as dicts or tuples."""
    if spec.is_leaf():
        return "leaf"
    children = [structure_of(one) for one in _children(spec)]
    if spec.type is type(None):
        return None
    if spec.type is list:
        return children
    names = spec.context if isinstance(spec.context, list | tuple) else None
    if spec.type is not tuple and names is not None and names and isinstance(names[0], list | tuple):
        names = names[0]
    if spec.type is not tuple and names is not None and len(names) == len(children) and all(isinstance(one, str) for one in names):
        return {"dict": dict(zip(names, children, strict=True))}
    return {"tuple": children}


def _children(spec: Any) -> list[Any]:
    return list(spec.children()) if callable(getattr(spec, "children", None)) else list(spec.children_specs)


def _shaped(structure: Any, depth: int = 0) -> Any:
    """A result of that structure, of zeros."""
    if depth > MOST_DEPTH:
        raise wrong("outputs", structure)
    if structure == "leaf":
        return 0
    if structure is None:
        return None
    if isinstance(structure, list):
        return [_shaped(one, depth + 1) for one in structure]
    if isinstance(structure, dict) and isinstance(structure.get("tuple"), list):
        return tuple(_shaped(one, depth + 1) for one in structure["tuple"])
    if isinstance(structure, dict) and isinstance(structure.get("dict"), dict):
        return {str(name): _shaped(one, depth + 1) for name, one in structure["dict"].items()}
    raise wrong("outputs", structure)


def build_graph(described: Sequence[Any], result: Any, paths: set[str], device: torch.device | None) -> fx.Graph:
    """The graph of these nodes; `paths` are the attributes there are, `device` replaces the one the graph makes tensors on."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for one in described:
        if not isinstance(one, dict) or not {"op", "name", "target", "args", "kwargs"} <= one.keys():
            raise wrong("a node", one)
        op, name, target = one["op"], one["name"], one["target"]
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w{0,400}", name) or not isinstance(target, str) or name in nodes:
            raise wrong("a node", one)
        args, keywords = (_value(one[part], nodes, device) for part in ("args", "kwargs"))
        called = _called(op, target, paths, one)
        if not isinstance(args, tuple) or not isinstance(keywords, dict):
            raise wrong("a node", one)
        nodes[name] = graph.create_node(op, called, args, keywords, name=name)
        if one.get("layer"):
            nodes[name].meta["nn_module_stack"] = {"": (str(one["layer"]), "torch.nn.Module")}
    if not nodes or next(reversed(nodes.values())).op != "output":
        raise wrong("nodes", "no output at the end")
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    inputs = pytree.tree_structure((tuple(0 for _ in names), {}))
    outputs = pytree.tree_structure(_shaped(result) if result is not None else 0)
    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(names, inputs, outputs)))
    graph.lint()
    return graph


def _called(op: Any, target: str, paths: set[str], one: Any) -> Any:
    """What a node calls, of what may be called."""
    if op == "placeholder" and re.fullmatch(r"[A-Za-z_]\w{0,400}", target):
        return target
    if op == "get_attr" and target in paths:
        return target
    if op == "output":
        return "output"
    if op != "call_function":
        raise wrong("a node", one)
    if target in FUNCTIONS:
        return FUNCTIONS[target]
    space, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    if space not in SPACES or name in REFUSED or not re.fullmatch(r"\w+", name) or not re.fullmatch(r"\w+", overload):
        raise ModelFileError(f"a node calls {target!r:.80}", why=f"only operators of {', '.join(SPACES)} are loaded", do="save it again")
    return _operator(space, name, overload)


def _operator(space: str, name: str, overload: str) -> Any:
    if space == "ridgeline" and not hasattr(torch.ops.ridgeline, name):
        for module in OURS:
            importlib.import_module(module, __package__)
    found = getattr(getattr(getattr(torch.ops, space), name, None), overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise ModelFileError(
            f"no operator {space}.{name}.{overload}", why="this version of torch does not have it", do="optimise again here"
        )
    return found


def _value(said: Any, nodes: Mapping[str, fx.Node], device: torch.device | None, depth: int = 0) -> Any:
    """The argument behind its JSON."""
    if depth > MOST_DEPTH:
        raise wrong("an argument", said)
    if isinstance(said, bool | int | float | str | None):
        return said
    if isinstance(said, list):
        return [_value(one, nodes, device, depth + 1) for one in said]
    if not isinstance(said, dict) or len(said) != 1:
        raise wrong("an argument", said)
    kind, value = next(iter(said.items()))
    if kind == "node" and value in nodes:
        return nodes[value]
    if kind in ("tuple", "slice") and isinstance(value, list):
        parts = tuple(_value(one, nodes, device, depth + 1) for one in value)
        return parts if kind == "tuple" else slice(*parts[:3])
    if kind == "dict" and isinstance(value, dict):
        return {name: _value(one, nodes, device, depth + 1) for name, one in value.items() if re.fullmatch(r"[A-Za-z_]\w*", name)}
    if kind == "float" and value in ("inf", "-inf", "nan"):
        return float(value)
    if kind == "device" and re.fullmatch(r"(cpu|cuda)(:\d+)?", str(value)):
        return device if device is not None else torch.device(value)
    if kind in CONSTANTS and value in CONSTANTS[kind]:
        return CONSTANTS[kind][value]
    raise wrong("an argument", said)


def wrong(what: str, value: Any) -> ModelFileError:
    return ModelFileError(f"{what} of a stored graph: {value!r:.120}", why="it is not what save_graph writes", do="save the graph again")
