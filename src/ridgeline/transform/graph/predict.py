"""What a pass should gain on a target: the graph's work counted again after it, and estimated again.

    GraphModule + example inputs ──fake run, node by node──> Workload ──estimate(target)──> seconds
      seconds before the pass / seconds after it = predicted gain

Nothing is computed: tensors of the run have shapes, strides and no values. Fused operators that passes put in are counted by formulas
registered here; an operator without one, or one that has no fake version, leaves the gain unknown (None) and says why.
Ref: the estimate's own limits apply; weight prepacking changes no byte it sees, so it predicts nothing for it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from ...estimate.processor import Settings, estimate
from ...target.load import Target
from ...target.spec import ProcessorSpec
from ...workload.exported import layer_of, quiet
from ...workload.formulas import FORMULAS, Call, Cost, conv_cost, formula, matmul_cost
from ...workload.graph import Workload
from ...workload.liveness import peak_activation_bytes
from ...workload.recorder import Recorder
from ...workload.tensors import TensorInfo, dtype_name


class Predictor:
    """Seconds of a graph on a target, remembering the last ones so that gains can be told one pass at a time."""

    def __init__(self, target: Target, name: str = "model", report: Callable[[str], None] = lambda message: None) -> None:
        self.target, self.name, self.report = target, name, report
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.notes: list[str] = []

    def seconds(self, module: fx.GraphModule, inputs: tuple[Any, ...]) -> float | None:
        """The estimate of one pass over the graph; None where its work cannot be counted, with a note."""
        try:
            workload, channels_last = workload_of(module, inputs, self.name)
        except Exception as error:  # an operator without a fake version raises whatever its author chose
            return self._unknown(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error).strip() else ''}")
        unknown = sorted({one.operator for one in workload.uncounted if not one.zero_flop})
        if unknown:
            return self._unknown(f"no formula for {', '.join(unknown)}")
        how = Settings(channels_last=channels_last) if isinstance(self.target, ProcessorSpec) else None
        return estimate(workload, self.target, settings=how).total.time_s

    def start(self, module: fx.GraphModule, inputs: tuple[Any, ...]) -> None:
        """Take the graph as it is for the one to compare with."""
        self.first_s = self.last_s = self.seconds(module, inputs)

    def gain(self, module: fx.GraphModule, inputs: tuple[Any, ...]) -> float | None:
        """The last estimate over the one of the graph as it is now."""
        before, self.last_s = self.last_s, self.seconds(module, inputs)
        return before / self.last_s if before and self.last_s else None

    @property
    def whole(self) -> float | None:
        """The first estimate over the last."""
        return self.first_s / self.last_s if self.first_s and self.last_s else None

    def _unknown(self, why: str) -> float | None:
        note = f"no prediction for some passes: {why}"
        if note not in self.notes:
            self.notes.append(note)
        return None


def workload_of(module: fx.GraphModule, inputs: tuple[Any, ...], name: str = "model") -> tuple[Workload, bool]:
    """The graph's ops at the shapes of `inputs`, and whether most of its convolutions read channels-last."""
    tensors = [one for one in inputs if isinstance(one, Tensor)]
    with quiet(), FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        run = _Counting(module, mode)
        given = tree_map_only(Tensor, lambda tensor: mode.from_tensor(tensor, static_shapes=True), inputs)
        for one in torch.utils._pytree.tree_leaves(given):
            if isinstance(one, Tensor):
                run.recorder.bind_input(one, "activations")
        run.run(*given, enable_io_processing=_flat(module))
    found = run.recorder
    floating = [one.dtype for one in (*module.parameters(), *module.buffers(), *tensors) if one.is_floating_point()]
    workload = Workload(
        model=name,
        batch=int(tensors[0].shape[0]) if tensors and tensors[0].dim() else 1,
        dtype=dtype_name(floating[0]) if floating else "float32",
        ops=tuple(found.ops),
        captured_by="graph",
        parameters=sum(one.numel() for one in module.parameters()),
        peak_activation_bytes=peak_activation_bytes(found.ops, found.storage_bytes, found.input_values),
        input_bytes=sum(found.storage_bytes[value] for value in found.input_values),
        uncounted=tuple(found.uncounted),
    )
    return workload, 2 * run.by_pixel > run.images


def _flat(module: fx.GraphModule) -> bool:
    """Whether the graph's own signature maps the user's arguments to placeholders, so that the interpreter must use it too."""
    return isinstance(module.graph._codegen, fx.graph._PyTreeCodeGen)


class _Counting(fx.Interpreter):
    """Runs a graph on fake tensors and records every call."""

    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.mode, self.recorder = mode, Recorder()
        self.weights: dict[int, FakeTensor] = {}
        self.node: fx.Node | None = None
        self.images = self.by_pixel = 0

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self._fake(value) if isinstance(value, Tensor) else value

    def _fake(self, value: Tensor) -> FakeTensor:
        """The same weight is the same fake tensor every time; one in a layout of its own (oneDNN's) has its shape alone."""
        if id(value) not in self.weights:
            plain = value if value.layout is torch.strided else torch.empty(value.shape, dtype=value.dtype, device="meta")
            fake = self.mode.from_tensor(plain.detach(), static_shapes=True)
            self.recorder.bind(fake, "weights")
            self.weights[id(value)] = fake
        return self.weights[id(value)]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = target(*args, **kwargs)
        if getattr(target, "__module__", "") == operator.__name__ or not isinstance(target, torch._ops.OpOverload):
            return result
        if isinstance(result, int | float | bool | torch.SymInt) or self.node is None:
            return result
        op = self.recorder.call(self.node.name, layer_of(self.node), target, args, kwargs, result)
        if op.kind == "conv" and isinstance(args[0], Tensor) and args[0].dim() == 4 and args[0].shape[1] > 3:
            self.images += 1
            self.by_pixel += args[0].is_contiguous(memory_format=torch.channels_last) and not args[0].is_contiguous()
        return result


def _count(*names: str) -> Callable[[Callable[[Call], Cost]], Callable[[Call], Cost]]:
    """Register a formula for those names that have none yet: another module may know an operator too."""
    return formula(*(name for name in names if name not in FORMULAS))


def _riding(call: Call) -> int:
    """FLOPs of what rides along: one an element for a sum (the fourth argument), one for an activation that is named."""
    activation = any(isinstance(one, str) and one != "none" for one in call.args)
    return call.outputs[0].numel * (isinstance(call.arg(3, "other"), TensorInfo) + activation)


@_count("onednn_conv")
def _fused_conv(call: Call) -> Cost:
    """(x, weight, bias, other, stride, padding, dilation, groups, activation, …)"""
    data, weight = call.args[0], call.args[1]
    rank = len(data.shape) - 2
    stride, padding, dilation = (tuple(int(size) for size in (list(one) * rank)[:rank]) for one in call.args[4:7])
    cost = conv_cost(data.shape, weight.shape, call.outputs[0].shape, int(call.args[7]), stride, padding, dilation)
    return replace(cost, flops=cost.flops + _riding(call))


@_count("onednn_linear")
def _fused_linear(call: Call) -> Cost:
    """(x, weight, bias, other, activation, …)"""
    data = call.args[0]
    cost = matmul_cost("linear", 1, prod(data.shape[:-1]), call.outputs[0].shape[-1], data.shape[-1])
    return replace(cost, flops=cost.flops + _riding(call))


def _each(kind: str, flops: int) -> Callable[[Call], Cost]:
    return lambda call: Cost(kind, flops * sum(one.numel for one in call.outputs))


for _names, _kind, _flops in (
    (("graph_rms_norm",), "norm", 4),
    (("graph_add_rms_norm", "add_rms_norm", "graph_add_layer_norm"), "norm", 3),
    (("graph_swiglu", "swiglu", "swiglu_packed"), "pointwise", 5),
    (("graph_rope", "graph_rope_one", "rope", "rope_one"), "pointwise", 3),
):
    _count(*_names)(_each(_kind, _flops))
