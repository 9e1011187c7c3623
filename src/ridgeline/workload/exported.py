"""Capture through torch.export: the whole graph before decomposition, on the meta device if the model is there.

    ModelCase ──export_case──> ExportedProgram ──record_program──> Recorder(ops)
      placeholders: parameters and buffers are weights, inputs named like a cache are KV cache, the rest activations

Graphs nested by `no_grad` or `autocast` blocks inside a model are walked in place; other nested graphs (cond, loops)
are listed as uncounted, because how often they run depends on data.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from .case import CACHE_NAMES, ModelCase
from .graph import Role, Uncounted
from .recorder import Recorder

WRAPPERS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def export_case(case: ModelCase) -> ExportedProgram:
    """torch.export of the model as it is, for inference, with static shapes."""
    with torch.no_grad(), quiet():
        return torch.export.export(case.module, case.args, case.kwargs or None, strict=False)


@contextmanager
def quiet() -> Iterator[None]:
    """torch.export prints pages on a module it cannot trace; the caller says in one line what came of it."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def is_cache(name: str) -> bool:
    """Whether a forward argument's name says that it holds keys and values of earlier tokens."""
    return any(name == cache or name.startswith(cache + "_") for cache in CACHE_NAMES)


def record_program(program: ExportedProgram) -> Recorder:
    """All ops of an exported program, in order."""
    recorder = Recorder()
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")}
    stored: set[int] = set()  # tied weights are inputs of their own, of one storage
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            spec = specs.get(node.name)
            weight = program.state_dict.get(spec.target) if spec and spec.target else None
            storage = weight.untyped_storage()._cdata if weight is not None else None
            recorder.bind_input(value, input_role(node.name, spec.kind if spec else None), tied=storage in stored)
            stored |= {storage} if storage is not None else set()
    _walk(program.graph_module, recorder, {})
    return recorder


def input_role(name: str, kind: InputKind | None) -> Role:
    if kind != InputKind.USER_INPUT:
        return "weights"
    return "kv_cache" if is_cache(name) else "activations"


def _walk(module: fx.GraphModule, recorder: Recorder, outer: dict[str, Any]) -> list[Any]:
    """Record every call of `module`; `outer` maps placeholder names of a nested graph to the caller's values."""
    values: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = outer.get(node.name, node.meta.get("val"))
        elif node.op == "get_attr":
            values[node] = node.meta["val"] if "val" in node.meta else _attribute(module, str(node.target))
        elif node.op == "call_function":
            values[node] = _call(node, values, module, recorder)
        elif node.op == "output":
            results: Any = fx.node.map_arg(node.args[0], lambda n: values[n])
            return list(results) if isinstance(results, list | tuple) else [results]
    return []


def _call(node: fx.Node, values: dict[fx.Node, Any], module: fx.GraphModule, recorder: Recorder) -> Any:
    given: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
    args, kwargs = given
    name, layer = node.name, layer_of(node)
    target = getattr(node.target, "__name__", str(node.target))
    if target == "getitem":
        return args[0][args[1]]
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        nested = next((a for a in args if isinstance(a, fx.GraphModule)), None)
        if target in WRAPPERS and nested is not None:
            inputs = args[args.index(nested) + 1 :]
            names = [n.name for n in nested.graph.nodes if n.op == "placeholder"]
            return _walk(nested, recorder, dict(zip(names, inputs, strict=False)))
        recorder.uncounted.append(
            Uncounted(name, target, layer, zero_flop=False, why="its nested graph runs a data-dependent number of times")
        )
        return node.meta.get("val")
    result = node.meta.get("val")
    if isinstance(result, int | float | bool | torch.SymInt) or target.startswith(("sym_", "_assert")):
        return result
    recorder.call(name, layer, node.target, args, kwargs, result)
    return result


def layer_of(node: fx.Node) -> str:
    """The module path a node came from, e.g. `layer1.0.conv1`."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return str(path).removeprefix("L['self'].")


def _attribute(module: fx.GraphModule, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return found
