"""An optimised graph on disk: its weights as safetensors, its nodes as JSON; loading runs no code that came with it.

    save_graph(module, folder, change=...)      folder/graph.safetensors   the tensors the graph uses
                                                folder/graph.json          nodes, structure of the result, tensors, digest, the Change
    load_graph(folder) ──JSON checked──> operators looked up by name in torch's registry ──> tensors read ──> fx.GraphModule

What a node may say is in node_json.py. Layouts of weights (channels-last) come back as they were. A graph that runs inside an arena is
stored as the graph; its plan is made again. Results of a class of the model's own (Hugging Face's outputs) come back as dicts. A save that
is cut short leaves nothing that loads: the JSON goes first and comes last.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import _PyTreeCodeGen

from ...core.change import Change, finite
from ...core.errors import ModelFileError
from ...core.files import write_text
from ..tensor_file import plan, read_entries, read_tensors, write_tensors
from .edit import attribute
from .node_json import build_graph, describe_node, structure_of, wrong

SCHEMA, KIND = 1, "graph"
MOST_JSON_BYTES, MOST_NODES = 256 << 20, 1_000_000
FIELDS = {"schema", "kind", "nodes", "inputs", "outputs", "tensors", "strides", "parameters", "file", "bytes", "sha256", "change"}


def graph_of(module: nn.Module) -> fx.GraphModule:
    """The graph inside what optimize gave."""
    for inner in (module, getattr(module, "_orig_mod", None), getattr(module, "module", None), getattr(module, "graph_module", None)):
        if isinstance(inner, fx.GraphModule):
            return inner
    raise ModelFileError(f"{type(module).__name__} holds no graph", why="only what optimize gives is stored this way", do="use save_model")


def save_graph(module: nn.Module, folder: str | Path, *, change: Change | None = None) -> Path:
    """Write the graph; returns the path of the JSON, which is written last."""
    graph = graph_of(module)
    home = Path(folder)
    described = [describe_node(node) for node in graph.graph.nodes]
    paths = dict.fromkeys(str(node.target) for node in graph.graph.nodes if node.op == "get_attr")
    state = {path: attribute(graph, path) for path in paths}
    entries = plan(state)
    codegen = graph.graph._codegen
    spec = codegen.pytree_info.out_spec if isinstance(codegen, _PyTreeCodeGen) else None
    tensors = home / "graph.safetensors"
    (home / "graph.json").unlink(missing_ok=True)
    write_tensors(tensors, state, entries)
    document = {
        "schema": SCHEMA,
        "kind": KIND,
        "nodes": described,
        "inputs": [str(node.target) for node in graph.graph.nodes if node.op == "placeholder"],
        "outputs": structure_of(spec) if spec is not None else None,
        "tensors": {entry.name: entry.to_json() for entry in entries},
        "strides": {path: list(tensor.stride()) for path, tensor in state.items() if not tensor.is_contiguous() and _dense(tensor)},
        "parameters": [path for path, tensor in state.items() if isinstance(tensor, nn.Parameter)],
        "file": tensors.name,
        "bytes": tensors.stat().st_size,
        "sha256": _digest(tensors),
        "change": change.to_json() if change is not None else None,
    }
    return write_text(home / "graph.json", json.dumps(finite(document), allow_nan=False) + "\n")


def load_graph(folder: str | Path, *, device: str | torch.device | None = None) -> fx.GraphModule:
    """The stored graph as a module; `device` moves it, and what it makes on the way."""
    home = Path(folder)
    document = read_graph_document(home / "graph.json" if home.suffix != ".json" else home)
    home = home if home.suffix != ".json" else home.parent
    tensors = home / document["file"]
    if not tensors.is_file() or tensors.stat().st_size != document["bytes"] or _digest(tensors) != document["sha256"]:
        raise ModelFileError(f"{tensors} is missing, changed or cut short", why="its size or SHA-256 differs", do="save or copy it again")
    place = torch.device(device) if device is not None else None
    state = read_tensors(tensors, read_entries(document["tensors"]))
    root = nn.Module()
    kept = set(document["parameters"])
    made: dict[int, Tensor] = {}
    for path, tensor in state.items():
        if id(tensor) not in made:
            laid = _laid(tensor, document["strides"].get(path), path)
            laid = laid.to(place) if place is not None else laid
            made[id(tensor)] = nn.Parameter(laid, requires_grad=False) if path in kept else laid
        _attach(root, path, made[id(tensor)])
    graph = build_graph(document["nodes"], document["outputs"], set(state), place)
    return fx.GraphModule(root, graph).eval()


def read_graph_document(path: Path) -> dict[str, Any]:
    """The JSON of a stored graph, its fields present; nodes are checked where they are built."""
    try:
        if path.stat().st_size > MOST_JSON_BYTES:
            raise ModelFileError(f"{path} is too large", why=f"at most {MOST_JSON_BYTES:,} bytes are read", do="save the graph again")
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(f"cannot open {path}", why=str(error), do="give the folder that `optimize --out` wrote") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON", why=str(error)[:200] or "nested too deeply", do="save the graph again") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA or document.get("kind") != KIND or FIELDS ^ document.keys():
        raise ModelFileError(f"{path} is no stored graph", why=f"this version reads schema {SCHEMA}, kind {KIND!r}", do="save it again")
    kinds = {"nodes": list, "inputs": list, "tensors": dict, "strides": dict, "parameters": list, "file": str, "bytes": int, "sha256": str}
    for name, kind in kinds.items():
        if not isinstance(document[name], kind):
            raise ModelFileError(f"{path}: {name} = {document[name]!r:.60}", why="it is of the wrong type", do="save the graph again")
    if not re.fullmatch(r"\w[\w.-]{0,200}\.safetensors", document["file"]) or len(document["nodes"]) > MOST_NODES:
        raise ModelFileError(f"{path}: file = {document['file']!r:.80}", why="tensors lie beside the JSON", do="save the graph again")
    return document


def _attach(root: nn.Module, path: str, tensor: Tensor) -> None:
    """Put a tensor at its path, making modules on the way."""
    if not re.fullmatch(r"\w+(\.\w+)*", path):
        raise wrong("a tensor's name", path)
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    if hasattr(root, name):
        raise wrong("a tensor's name", path)
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(name, tensor)
    else:
        root.register_buffer(name, tensor)


def _dense(tensor: Tensor) -> bool:
    """Whether its strides are those of a contiguous tensor in another order of dimensions."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda one: (-strides[one], -tensor.shape[one]))
    return tensor.permute(order).is_contiguous()


def _laid(tensor: Tensor, strides: Any, path: str) -> Tensor:
    """The tensor with the strides it had."""
    if strides is None:
        return tensor
    if not isinstance(strides, list) or len(strides) != tensor.dim() or not all(type(one) is int and one >= 0 for one in strides):
        raise wrong(f"strides of {path}", strides)
    order = sorted(range(tensor.dim()), key=lambda one: (-strides[one], -tensor.shape[one]))
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
