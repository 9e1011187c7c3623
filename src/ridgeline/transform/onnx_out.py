"""A model as an ONNX file, where ONNX can hold it, compared with onnxruntime's answers.

    module + inputs ──torch.export──> Core ATen graph ──onnx_ops.py──> model.onnx (opset 20) ──onnxruntime──> largest difference

Float32 models (pruned, factored, distilled ones among them) are written as they are, zeros included; static int8 layers as
QuantizeLinear and DequantizeLinear pairs around int8 weights (onnx_view.py). Weight-only packed and N:M layers have no ONNX form
here that keeps them small: an error names the layer. The first dimension of the inputs is left open where the model allows it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import MissingExtraError, TransformError
from ..workload.exported import quiet
from .kinds import is_ours, kind_of
from .onnx_ops import NUMPY_TYPES, Graph, converter
from .onnx_view import QdqLayer, qdq_view
from .tensor_file import write_pieces

OPSET, IR_VERSION = 20, 10
TOLERANCE = 1e-4  # of the largest answer: float32 sums in another order
INT8_TOLERANCE = 0.05  # a sum that lies on the edge of two codes may fall to either side


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """What was written, and how far onnxruntime's answers are from the module's."""

    path: Path
    bytes: int
    largest_difference: float  # as a share of the largest answer
    open_batch: bool  # whether other batch sizes than the example's run
    notes: tuple[str, ...] = ()


def export_onnx(model: nn.Module, inputs: tuple[Any, ...], path: str | Path, *, tolerance: float | None = None) -> OnnxFile:
    """Write the model and compare it; answers further apart than `tolerance` are an error, and no file is left."""
    onnx = _require("onnx")
    runtime = _require("onnxruntime")
    plain = copy.deepcopy(model).cpu().eval()
    inputs = tuple(one.detach().cpu() if isinstance(one, Tensor) else one for one in inputs)
    viewed = as_onnx_view(model)
    whole, open_batch, notes = _converted(onnx, viewed, inputs)
    onnx.checker.check_model(whole)
    data = whole.SerializeToString()
    largest = _compared(runtime, data, plain, inputs)
    in_integers = any(isinstance(module, QdqLayer) for module in viewed.modules())
    allowed = tolerance if tolerance is not None else INT8_TOLERANCE if in_integers else TOLERANCE
    if not largest <= allowed:
        raise TransformError(
            f"the ONNX model's answers differ by {largest:.2e} of the largest",
            why=f"at most {allowed:.0e} is taken for rounding",
            do="report this with the model, or give a larger tolerance=",
        )
    target = write_pieces(Path(path), [data])
    return OnnxFile(target, len(data), largest, open_batch, notes)


def as_onnx_view(model: nn.Module) -> nn.Module:
    """A copy in eval mode whose layers torch.export sees as plain operators; a layer without such a view is an error."""
    viewed = copy.deepcopy(model).cpu().eval()
    for path, module in list(viewed.named_modules()):
        if not is_ours(module):
            continue
        view = qdq_view(module)
        if view is None:
            raise TransformError(
                f"layer {path} ({kind_of(module)}) cannot be exported to ONNX",
                why="ONNX has no form that keeps it packed",
                do="save the model with save_model, or quantise with method static",
            )
        parent, _, name = path.rpartition(".")
        if path:
            viewed.get_submodule(parent)._modules[name] = view
        else:
            viewed = view
    odd = next((n for n, t in viewed.named_parameters() if t.is_floating_point() and t.dtype != torch.float32), None)
    if odd is not None:
        raise TransformError(f"{odd} is not float32", why="onnxruntime computes in float32 on a CPU", do="export model.float()")
    return viewed


def _converted(onnx: Any, model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, bool, tuple[str, ...]]:
    """(ONNX model, whether the batch is open, notes): open where torch.export and the converter both manage it."""
    why = "the inputs do not share their first dimension"
    tensors = [one for one in inputs if isinstance(one, Tensor) and one.dim()]
    if len(tensors) == len(inputs) and len({one.shape[0] for one in tensors}) == 1:
        twice = tuple(torch.cat([one, one]) if one.shape[0] == 1 else one for one in tensors)  # a batch of 1 would be taken as fixed
        dimension = torch.export.Dim("batch", min=1)
        try:
            with quiet():
                program = torch.export.export(model, twice, dynamic_shapes=tuple({0: dimension} for _ in twice)).run_decompositions()
            return _written(onnx, program, True), True, ()
        except Exception as error:  # whatever is said against an open batch, a fixed one may still do
            why = str(error).splitlines()[0][:160]
    try:
        with quiet():
            program = torch.export.export(model, inputs).run_decompositions()
    except Exception as error:  # torch.export raises many types
        raise TransformError("torch.export cannot read the model", why=str(error).splitlines()[0][:200], do="see torch.export") from error
    return _written(onnx, program, False), False, (f"the batch is fixed at the example's: {why}",)


def _written(onnx: Any, program: Any, open_batch: bool) -> Any:
    graph = Graph()
    signature = program.graph_signature
    stored = {**program.state_dict, **program.constants}
    held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    entries, results = [], []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            graph.names[node] = node.name
            if node.name in held:
                if node.users:
                    graph.constants[node.name] = stored[held[node.name]].detach()
            else:
                entries.append(_value(onnx, node.name, node.meta["val"], open_batch))
        elif node.op == "call_function":
            graph.names[node] = converter(node)(graph, node)
        elif node.op == "output":
            for one in node.args[0]:
                results.append(_value(onnx, graph.names[one], one.meta["val"], open_batch))
    constants = [_initializer(onnx, name, tensor) for name, tensor in graph.constants.items()]
    body = onnx.helper.make_graph(graph.nodes, "ridgeline", entries, results, constants)
    opset = onnx.helper.make_opsetid("", OPSET)
    return onnx.helper.make_model(body, opset_imports=[opset], ir_version=IR_VERSION, producer_name="ridgeline")


def _value(onnx: Any, name: str, tensor: Tensor, open_batch: bool) -> Any:
    kind = onnx.helper.np_dtype_to_tensor_dtype(torch.empty(0, dtype=tensor.dtype).numpy().dtype)
    shape = ["batch" if place == 0 and open_batch else int(size) for place, size in enumerate(tensor.shape)]
    return onnx.helper.make_tensor_value_info(name, kind, shape)


def _initializer(onnx: Any, name: str, tensor: Tensor) -> Any:
    if tensor.dtype not in NUMPY_TYPES:
        raise TransformError(f"constant {name} is {tensor.dtype}", why="ONNX constants are written from NumPy", do="export model.float()")
    return onnx.numpy_helper.from_array(tensor.detach().cpu().contiguous().numpy(), name)


def _compared(runtime: Any, data: bytes, model: nn.Module, inputs: tuple[Any, ...]) -> float:
    """Largest |onnxruntime - torch| over the largest |torch|, on the example inputs."""
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    feeds = {entry.name: given.detach().cpu().numpy() for entry, given in zip(session.get_inputs(), inputs, strict=True)}
    with torch.no_grad():
        expected = model(*inputs)
    wanted = [leaf for leaf in torch.utils._pytree.tree_leaves(expected) if isinstance(leaf, Tensor)]
    apart = [
        (torch.from_numpy(got).double() - want.double()).abs().max() / (want.double().abs().max() or 1.0)
        for got, want in zip(session.run(None, feeds), wanted, strict=True)
    ]
    return float(torch.stack(apart).max())  # NaN where any is


def _require(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(f"no {name}", why="it is not installed", do="pip install 'ridgeline[onnx]'") from error
