"""Run a graph inside one arena that is allocated once: the planned peak is the real peak.

    Captured ──observe──> Facts, and for each call a Writer that fills a given place with the same bits (outs.py)
      ──plan──> offsets ──> StaticModule.forward(x): for each step
          view of the arena or of a weight     made once at build time, no step at all
          view of an input or output           run as it is
          in-place op                          run as it is
          op with a Writer                     writes into its place in the arena
          any other op (conv2d, layer_norm, scaled_dot_product_attention on the CPU)   runs, its result is copied into its place
    what ops allocate for themselves is measured at build time: `workspace`, per op; outputs are fresh tensors, counted there

Bit for bit the graph run eagerly. `poison=True` fills the arena with NaN bytes before each run and each interval when it
dies. For the example's shapes, dtypes, strides and device only. One caller at a time. Inference only.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ....core.errors import TransformError
from ..edit import attribute, is_random, layer_of, written_arguments
from ..manager import op_name
from .facts import ARENA, Facts, observe, tensors_in
from .lifetimes import homes_of, lifetimes, round_up
from .order import Reordered, reorder
from .outs import Writer, find_writer, overwritable, same_bits
from .plan import ROUNDS, Plan, plan
from .reuse import reuse as reuse_places
from .steps import Builder, Env, Step
from .workspace import allocations, region

if TYPE_CHECKING:
    from ..capture import Captured

POISON = 255  # in every byte: NaN in every float dtype


@dataclass(frozen=True, slots=True)
class Temporary:
    """What one op allocates while it runs, beside the arena."""

    node: str
    op: str
    layer: str
    bytes: int  # gone when the op ends
    output_bytes: int  # stays: an output of the model
    copied: bool  # True: no out variant; the result is made and then copied into the arena


class StaticModule(nn.Module):
    """The graph of a model, run in one preallocated arena. `plan`: offsets; `workspace`: what ops allocate for themselves."""

    def __init__(self, captured: Captured, *, poison: bool = False, effort: int = ROUNDS, order: bool = False, reuse: bool = True) -> None:
        super().__init__()
        self.graph_module, self.poison = captured.module, poison
        self._captured = captured
        self._settings: dict[str, Any] = {"effort": effort, "order": order, "reuse": reuse}
        self.threads = torch.get_num_threads()  # what ops allocate for themselves on a CPU grows with it
        facts, writers, overwrites = _studied(captured)
        self.reordered: Reordered | None = reorder(captured, facts) if order else None
        if reuse:
            facts = reuse_places(captured.module.graph, facts, overwrites)
        self.plan: Plan = plan(lifetimes(captured, facts), effort=effort)
        given = captured.module.graph.process_inputs(*captured.inputs)
        self._expected = [_signature(value) for value in given]
        first = next((value.device for value in given if isinstance(value, torch.Tensor)), torch.device("cpu"))
        device = _only_device(facts, homes_of(captured.module.graph, facts), first)
        self._arena = torch.empty(self.plan.arena_bytes, dtype=torch.uint8, device=device)
        built = Builder(captured.module, facts, writers, self.plan, self._arena)
        self._steps, self._bound, self._copied = built.steps, built.bound, built.copied
        self._placeholders = [node for node in captured.module.graph.nodes if node.op == "placeholder"]
        self._result = next(node for node in reversed(captured.module.graph.nodes) if node.op == "output").args[0]
        self._deaths = self._dying()
        self._written = [attribute(captured.module, str(node.target)) for node in _written_weights(captured.module.graph, facts)]
        inputs = tuple(captured.inputs)
        self.workspace, self.workspace_bytes = self._measured(inputs)
        self._verify(inputs)

    @property
    def arena_bytes(self) -> int:
        """The arena [B]."""
        return self.plan.arena_bytes

    @property
    def peak_bytes(self) -> int:
        """All memory of one pass beside weights and inputs: the arena and the workspace at its peak, outputs among it [B]."""
        return self.plan.arena_bytes + self.workspace_bytes

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the graph returns for these inputs; outputs are fresh tensors that the next call leaves alone."""
        env: Env = dict(zip(self._placeholders, self._checked(inputs, named), strict=True))
        with torch.no_grad():
            if self.poison:
                self._run_poisoned(env)
            else:
                for step in self._steps:
                    step.run(env)
        return self._returned(env)

    def to_json(self) -> dict[str, Any]:
        """Plan, workspace and the names of the steps, for the report's memory map."""
        return {
            **self.plan.to_json(),
            "steps": [node.name for node in self.graph_module.graph.nodes],
            "workspace_bytes": self.workspace_bytes,
            "threads": self.threads,
            "peak_bytes": self.peak_bytes,
            "workspace": [asdict(temporary) for temporary in self.workspace],
            "reordered": None if self.reordered is None else asdict(self.reordered),
        }

    def _run_poisoned(self, env: Env) -> None:
        self._arena.fill_(POISON)
        done = 0
        for step in self._steps:
            self._bury(range(done, step.index))
            step.run(env)
            done = step.index

    def _bury(self, indices: range) -> None:
        for index in indices:
            for dead in self._deaths.get(index, ()):
                dead.fill_(POISON)

    def _dying(self) -> dict[int, list[torch.Tensor]]:
        """The bytes of the arena that die after each node."""
        deaths: dict[int, list[torch.Tensor]] = {}
        for interval, offset in zip(self.plan.intervals, self.plan.offsets, strict=True):
            deaths.setdefault(interval.last, []).append(self._arena[offset : offset + round_up(interval.bytes, self.plan.align)])
        return deaths

    def _returned(self, env: Env) -> Any:
        result = fx.map_arg(self._result, lambda node: env[node] if node in env else self._bound[node])
        return self.graph_module.graph.process_outputs(result)

    def _checked(self, inputs: tuple[Any, ...], named: Mapping[str, Any] | None = None) -> list[Any]:
        """The inputs in the order of the placeholders, or an error that says which differs from the example."""
        names = [str(node.target) for node in self._placeholders]
        if named and sorted(named) == sorted(names[len(inputs) :]):
            inputs, named = (*inputs, *(named[name] for name in names[len(inputs) :])), None
        if named or len(inputs) != len(names):
            raise TransformError(
                f"{len(inputs)} inputs" + (f" and {', '.join(named)}" if named else ""),
                why=f"the graph takes {len(names)}: {', '.join(names)}",
                do="give the inputs it was captured with, by position or by these names",
            )
        given = list(self.graph_module.graph.process_inputs(*inputs))
        for node, value, expected in zip(self._placeholders, given, self._expected, strict=True):
            found = _signature(value)
            if found != expected:
                raise TransformError(
                    f"input {node.name} is {_words(found)}",
                    why=f"the memory plan is for {_words(expected)}",
                    do="capture and plan again with such an input, or use the module without the arena",
                )
        return given

    def _measured(self, inputs: tuple[Any, ...]) -> tuple[tuple[Temporary, ...], int]:
        """Run under the profiler, twice after a first run: the larger of each op's allocations, and of the whole peak."""
        saved = [tensor.detach().clone() for tensor in self._written]
        peaks: dict[int, int] = {}
        kept: dict[int, int] = {}
        whole = 0

        def run() -> None:
            env: Env = dict(zip(self._placeholders, given, strict=True))
            with torch.no_grad():
                for step in self._steps:
                    with region(step.index):
                        step.run(env)

        for repeat in range(3):
            given = self._checked(pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, inputs))
            if not repeat:
                run()
                continue
            found, _ = allocations(run, self._arena.device)
            held = 0
            for step in self._steps:
                allocated = found[step.index]
                peaks[step.index] = max(peaks.get(step.index, 0), allocated.peak - max(allocated.kept, 0))
                kept[step.index] = max(kept.get(step.index, 0), allocated.kept)
                whole = max(whole, held + allocated.peak)
                held += allocated.kept
        with torch.no_grad():
            for tensor, old in zip(self._written, saved, strict=True):
                tensor.copy_(old)
        return tuple(
            self._temporary(step, peaks[step.index], kept[step.index]) for step in self._steps if peaks[step.index] or kept[step.index]
        ), whole

    def _temporary(self, step: Step, size: int, kept: int) -> Temporary:
        return Temporary(step.node.name, op_name(step.node), layer_of(step.node), size, kept, step.node in self._copied)

    def _verify(self, inputs: tuple[Any, ...]) -> None:
        """The example's answers must be those of the graph, bit by bit. Graphs that draw numbers or write weights are taken as they are."""
        if self._written or any(is_random(node) for node in self.graph_module.graph.nodes):
            return

        def copies() -> Any:
            return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, inputs)

        with torch.no_grad():
            expected = tensors_in(self.graph_module(*copies()))
        found = tensors_in(self(*copies()))
        for position, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            if not same_bits(ours, theirs):
                raise TransformError(
                    f"output {position} in the arena differs from the graph's",
                    why="an op of the graph reads or writes memory in a way its schema does not say",
                    do="use the module without the arena, and report the model",
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> StaticModule:
        """A module of its own, with an arena of its own: planned again."""
        captured = replace(self._captured, module=copy.deepcopy(self.graph_module, memo))
        made = StaticModule(captured, poison=self.poison, **self._settings)
        memo[id(self)] = made
        return made

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> StaticModule:
        """Moving or casting would leave the arena behind; what changes nothing is let through."""
        probe = torch.empty(0, device=self._arena.device)
        moved = fn(probe)
        if moved.device != probe.device or moved.dtype != probe.dtype:
            raise TransformError(
                "a StaticModule was moved or cast",
                why="its arena and its ops belong to the device and dtype it was planned for",
                do="move the model first, then capture and plan again",
            )
        return self


def _studied(captured: Captured) -> tuple[Facts, dict[str, Writer], dict[str, tuple[int, ...]]]:
    """One run of the graph: its facts, a writer for each call that has one, and the arguments each may write over."""
    writers: dict[str, Writer] = {}
    overwrites: dict[str, tuple[int, ...]] = {}

    def visit(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        found = None if written_arguments(node) or node.target is operator.getitem else find_writer(node, args, kwargs, result)
        if found is not None:
            writers[node.name] = found
            overwrites[node.name] = overwritable(found, node, args, kwargs, result)

    return observe(captured, visit), writers, overwrites


def _written_weights(graph: fx.Graph, facts: Facts) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "get_attr" and any(t.storage in facts.written for t in facts.tensors[node.name])]


def _only_device(facts: Facts, homes: list[str], example: torch.device) -> torch.device:
    """The device of everything that goes into the arena."""
    devices = {storage.device for storage, home in zip(facts.storages, homes, strict=True) if home == ARENA and storage.bytes}
    if len(devices) > 1 or "meta" in {device.type for device in devices}:
        raise TransformError(
            f"intermediate tensors on {', '.join(sorted(map(str, devices)))}",
            why="an arena lies in the memory of one real device",
            do="keep the model on one device, with its weights",
        )
    return devices.pop() if devices else example


def _signature(value: Any) -> tuple[Any, ...]:
    """What the plan depends on: dtype, shape, device, and the strides of dimensions that have any."""
    if not isinstance(value, torch.Tensor):
        return (value,)
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(value.shape, value.stride(), strict=True))
    return str(value.dtype).removeprefix("torch."), tuple(value.shape), str(value.device), strides


def _words(signature: tuple[Any, ...]) -> str:
    if len(signature) == 1:
        return f"the value {signature[0]!r}"
    dtype, shape, device, strides = signature
    return f"{dtype} {list(shape)} on {device} with strides {list(strides)}"
