"""An ONNX file straight to a Workload: the graph is read, its weights are not.

    model.onnx ──load_onnx──> ModelProto ──fix_inputs, Shapes──> node by node ──onnx_cost──> Op, Uncounted ──> Workload
      initialisers and Constant nodes are weights, inputs named like a cache are KV cache, the rest activations

The file is checked before it is followed: size, decoding, a graph with nodes, external data inside the model's folder (its
path is checked; the data is never opened). Operators of other domains, and loops, are listed as uncounted.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from ..core.dtypes import FLOATING, bytes_of
from ..core.errors import MissingExtraError, ModelFileError, OptionError, RidgelineError
from .case import CaseOptions
from .graph import Workload
from .liveness import peak_activation_bytes, peak_cache_bytes
from .onnx_shapes import fix_inputs, strip_data
from .onnx_walk import Walk
from .tensors import TensorInfo

MOST_BYTES = 2**31 - 1  # protobuf's own limit
MOST_NODES = 100_000  # what functions may be written out to


def capture_onnx(path: str, options: CaseOptions) -> Workload:
    """The workload of an ONNX file; an open batch dimension takes `options.batch`, a length `options.context`."""
    name = Path(path).name
    if options.phase is not None:
        raise OptionError(f"phase {options.phase!r} for {name}", why="an ONNX file holds one fixed graph", do="leave the phase out")
    for option, value in (("batch", options.batch), ("context", options.context)):
        if value is not None and value < 1:
            raise OptionError(f"{option} {value} for {name}", why=f"a {option} is at least 1", do="give 1 or more")
    model = load_onnx(path)
    try:
        model = _inlined(model, path)
        batch, notes = fix_inputs(model.graph, options, name)
        walk = Walk(model)
        walk.graph(model.graph)
    except RidgelineError:
        raise
    except Exception as error:  # a decodable file can still be inconsistent in more ways than onnx has error types
        raise _broken(path, error) from error
    return _workload(name, batch, notes, walk)


def load_onnx(path: str) -> Any:
    """The model without the data of its weights, checked to be whole and to point nowhere outside its folder."""
    try:
        import onnx
    except ImportError as error:
        raise MissingExtraError(f"cannot read {path}", why="onnx is not installed", do="pip install 'ridgeline[onnx]'") from error
    file = Path(path)
    if not file.is_file():
        why = "it is a folder or device" if file.exists() else "no such file"
        raise ModelFileError(f"cannot open {path}", why=why, do="give the path of an .onnx file")
    if (size := file.stat().st_size) > MOST_BYTES:
        raise ModelFileError(f"{path} is {size} bytes", why="protobuf files end at 2 GiB", do="save its weights as external data")
    try:
        model = onnx.ModelProto.FromString(file.read_bytes())
        tensors = list(_all_tensors(model.graph)) + [t for function in model.functions for t in _node_tensors(function.node)]
    except OSError as error:
        raise ModelFileError(f"cannot open {path}", why=str(error), do="give a file you may read") from error
    except Exception as error:  # protobuf's DecodeError, or UnicodeDecodeError from a name
        raise _broken(path, error) from error
    if not model.graph.node:
        raise ModelFileError(f"{path} holds no operators", why="it is empty or not an ONNX model", do="export the model again")
    for tensor in tensors:
        _check_external(tensor, file, onnx.TensorProto.EXTERNAL)
        strip_data(tensor)
    return model


def _broken(path: str, error: Exception) -> ModelFileError:
    lines = str(error).strip().splitlines()
    why = f"truncated, damaged or not ONNX ({type(error).__name__}{': ' + lines[0][:160] if lines else ''})"
    return ModelFileError(f"cannot follow {path}", why=why, do="export or download it again; onnx.checker.check_model says more")


def _all_tensors(graph: Any) -> Iterator[Any]:
    """Every stored tensor of a graph, its nested graphs included."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
        for graph in _nested(node):
            yield from _all_tensors(graph)


def _nested(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        yield from (attribute.g, *attribute.graphs)


def _inlined(model: Any, path: str) -> Any:
    """The model with its own functions written out where they are called."""
    if not model.functions:
        return model
    bodies = {(f.domain, f.name): f.node for f in model.functions}
    sizes: dict[tuple[str, str], int] = {}

    def size(nodes: Any) -> int:
        return sum(called((node.domain, node.op_type)) + sum(size(graph.node) for graph in _nested(node)) for node in nodes)

    def called(key: tuple[str, str]) -> int:
        if key not in bodies:
            return 1
        if key not in sizes:
            sizes[key] = MOST_NODES + 1  # what a function that calls itself comes to
            sizes[key] = size(bodies[key])
        return sizes[key]

    # Functions that call one another twice each double with every level: a small file could ask for any number of nodes.
    if size(model.graph.node) > MOST_NODES:
        why = f"written out they exceed {MOST_NODES} nodes"
        raise ModelFileError(f"{path} has functions without end", why=why, do="export it without functions")
    from onnx.inliner import inline_local_functions

    return inline_local_functions(model)


def _check_external(tensor: Any, file: Path, external: int) -> None:
    if tensor.data_location != external and not tensor.external_data:
        return
    location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
    folder = file.resolve().parent
    if not location or "\0" in location or Path(location).is_absolute() or not (folder / location).resolve().is_relative_to(folder):
        raise ModelFileError(
            f"{file} keeps tensor {tensor.name!r} in {location!r}",
            why="external data must lie inside the model's folder",
            do="do not use this file unless you trust its source; save the model again with its data beside it",
        )


def _workload(name: str, batch: int, notes: list[str], walk: Walk) -> Workload:
    activations = [info for info in walk.inputs if info.role == "activations"]
    if walk.folded:
        notes = [*notes, f"{walk.folded} nodes only compute shapes or rearrange weights: done when the model is loaded, not counted"]
    if any("shape depends" in u.why for u in walk.uncounted):
        notes = [*notes, "some shapes depend on data: what follows from them is listed as uncounted"]
    return Workload(
        model=name,
        batch=batch,
        dtype=_majority([*walk.inputs, *walk.weights]),
        ops=tuple(walk.ops),
        captured_by="onnx",
        parameters=sum(w.numel for w in walk.weights if _is_parameter(w)),
        peak_activation_bytes=peak_activation_bytes(walk.ops, walk.storage_bytes, [i.value for i in activations]),
        input_bytes=sum(walk.storage_bytes[i.value] for i in activations),
        output_bytes=sum(bytes_of(walk.infos[o].numel, walk.infos[o].dtype) for o in walk.outputs if o in walk.infos),
        uncounted=tuple(walk.uncounted),
        notes=tuple(notes),
        stored_weights=tuple(weight.operand(weight.numel) for weight in walk.weights),
        peak_cache_bytes=peak_cache_bytes(walk.ops, walk.storage_bytes, [i.value for i in walk.inputs if i.role == "kv_cache"]),
    )


def _is_parameter(weight: TensorInfo) -> bool:
    return weight.dtype in FLOATING or (weight.dtype in ("int8", "uint8", "int4") and len(weight.shape) > 1)


def _majority(infos: list[TensorInfo]) -> str:
    """The floating type that holds most elements."""
    held: dict[str, int] = {}
    for info in infos:
        if info.dtype in FLOATING:
            held[info.dtype] = held.get(info.dtype, 0) + prod(info.shape)
    return max(held, key=lambda dtype: held[dtype], default="float32")
