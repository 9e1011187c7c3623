"""Runs a model op by op under a clock, so that each op's time carries the name capture() gave it.

    ExportedProgram ──run_graph──> the same aten calls, node by node, values freed after their last use
    a model that does not export ──run_dispatched──> one forward, each call timed as it passes the dispatcher
    passes [OpTime, …] ──line_up(names)──> {(name, occurrence): [s, …]}

An op's time holds the call and the release of what it was the last to use, as in eager code; fetching arguments and
plumbing (getitem, symbolic sizes, asserts) is not timed. Blocks under no_grad or autocast run in place. Names can repeat
(a nested block has its own), so ops are told apart by name and occurrence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from ..workload.case import ModelCase
from ..workload.dispatched import RecordingMode
from ..workload.exported import WRAPPERS
from ..workload.recorder import Recorder
from .clocks import Clock, OpTime

Key = tuple[str, int]  # op name, how many of that name came before


def graph_pass(program: ExportedProgram, case: ModelCase, clock: Clock) -> Callable[[], list[OpTime]]:
    """A function that runs the whole program once and returns its op times."""
    inputs = program._graph_module_flat_inputs(case.args, case.kwargs)
    deaths: dict[fx.Graph, dict[fx.Node, list[fx.Node]]] = {}

    def run() -> list[OpTime]:
        clock.begin()
        with torch.inference_mode():
            run_graph(program.graph_module, list(inputs), clock, deaths)
        return clock.end()

    return run


def dispatched_pass(case: ModelCase, clock: Clock) -> Callable[[], list[OpTime]]:
    """A function that runs the module once, timed where its calls are dispatched."""

    def run() -> list[OpTime]:
        clock.begin()
        # no_grad as in capture: under inference_mode composite ops would arrive whole and be named differently.
        with torch.no_grad(), _TimingMode(clock):
            case.module(*case.args, **case.kwargs)
        return clock.end()

    return run


class _TimingMode(RecordingMode):
    """Times every call; borrows only the naming from the recording mode, so there is no module to follow."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(Recorder(), torch.nn.Module())
        self.clock = clock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, keywords = self.next_name(func), kwargs or {}
        self.clock.start()
        result = func(*args, **keywords)
        self.clock.stop(name)
        return result


def run_graph(module: fx.GraphModule, inputs: list[Any], clock: Clock, deaths: dict[fx.Graph, dict[fx.Node, list[fx.Node]]]) -> Any:
    """Run one graph; `deaths` remembers, graph by graph, which values each node is the last to use."""
    if module.graph not in deaths:
        deaths[module.graph] = last_uses(module.graph)
    dying, supply = deaths[module.graph], iter(inputs)
    values: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(supply)
        elif node.op == "get_attr":
            values[node] = _attribute(module, str(node.target))
        elif node.op == "output":
            return fx.node.map_arg(node.args[0], values.__getitem__)
        else:
            _run_node(node, values, dying.get(node, ()), clock, deaths)
    return None


def _run_node(node: fx.Node, values: dict[fx.Node, Any], dying: Iterable[fx.Node], clock: Clock, deaths: Any) -> None:
    args: Any
    kwargs: Any
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    target: Any = node.target
    name = getattr(target, "__name__", str(target))
    nested = next((a for a in args if isinstance(a, fx.GraphModule)), None) if name in WRAPPERS else None
    if nested is not None:
        place = args.index(nested)
        with _surroundings(name, args[:place]):
            values[node] = run_graph(nested, list(args[place + 1 :]), clock, deaths)
    elif name == "getitem" or name.startswith(("sym_", "_assert")):
        values[node] = target(*args, **kwargs)
    else:
        clock.start()
        values[node] = target(*args, **kwargs)
        args = kwargs = None
        for dead in dying:
            del values[dead]
        clock.stop(node.name)
        return
    for dead in dying:
        del values[dead]


def _surroundings(name: str, settings: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """The autocast a nested graph runs under; gradient modes make no difference inside inference_mode."""
    if name != "wrap_with_autocast":
        return nullcontext()
    device, dtype, enabled, cached = settings
    return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cached)


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values no later node needs; a value nobody uses dies where it is made."""
    dying: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if node.op == "placeholder":
            continue
        for value in [*node.all_input_nodes, node]:
            if value not in seen and node.op != "output":
                dying.setdefault(node, []).append(value)
            seen.add(value)
    return dying


def line_up(passes: Iterable[Iterable[OpTime]]) -> dict[Key, list[OpTime]]:
    """Collect, pass by pass, the times of each op."""
    found: dict[Key, list[OpTime]] = {}
    for times in map(list, passes):
        for key, time in zip(keys_of(time.name for time in times), times, strict=True):
            found.setdefault(key, []).append(time)
    return found


def keys_of(names: Iterable[str]) -> list[Key]:
    """Names in order → (name, occurrence)."""
    counts: dict[str, int] = {}
    keys = []
    for name in names:
        counts[name] = counts.get(name, -1) + 1
        keys.append((name, counts[name]))
    return keys


def _attribute(module: fx.GraphModule, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return found
