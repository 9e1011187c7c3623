"""Seconds of a block and of a whole network, on this machine's CPU or its GPU.

    block, CPU           touch the input | first call = cold_s | REPEATS more = alone_s    others ran before: their bytes fill the caches
    block, CUDA eager    CALLS calls, one wait    less a wait for nothing    / CALLS = alone_s    what host or GPU needs, whichever is more
    block, CUDA graph    one graph of CALLS calls less one of none, replayed / CALLS = alone_s
    network              a call nobody times, then REPEATS timed one by one, each to its last kernel

`time_in_rounds` visits all in a new order every round, so that a slow moment of the machine meets all, and takes the LOW quantile: what
else runs on the machine only ever adds. One call of a few microseconds is timed with the clock's own 0.1 µs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from ...core.errors import MeasureError, OptionError
from ...core.timing import garbage_collector_off

REPEATS, CALLS = 3, 20
LOW = 0.1
MOST_BATCH, MOST_THREADS = 65536, 4096
Mode = Literal["eager", "graph"]
MODES: tuple[Mode, ...] = ("eager", "graph")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Samples = tuple[float, ...]
Turn = Callable[[], list[Samples]]
"""Runs once in its turn; each sample is (alone_s, cold_s) of a block, (seconds,) of a network."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a latency depends on besides the network."""

    device: str = "cpu"
    batch: int = 1
    dtype: str = "float32"
    mode: Mode = "eager"
    threads: int = 1

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(cpu|cuda)(:\d{1,3})?", self.device):
            raise OptionError(f"device {self.device!r}", why="times are taken on cpu or cuda", do="give cpu, cuda or e.g. cuda:1")
        if self.mode == "graph" and not self.on_cuda:
            raise OptionError(f"mode {self.mode!r} on {self.device}", why="graphs are CUDA's", do="use eager, or graph on cuda")
        if self.dtype not in DTYPES:
            raise OptionError(f"dtype {self.dtype!r}", why="networks run here in a floating type", do=f"use {', '.join(DTYPES)}")
        if not 1 <= self.batch <= MOST_BATCH or not 1 <= self.threads <= MOST_THREADS:
            why = f"a batch is 1 to {MOST_BATCH:,}, threads are 1 to {MOST_THREADS:,}"
            raise OptionError(f"batch {self.batch}, threads {self.threads}", why=why, do="give e.g. batch 1, 2 threads")
        if self.on_cuda and not torch.cuda.is_available():
            raise MeasureError(
                f"cannot measure on {self.device}", why="torch finds no CUDA device here", do="use --on cpu or a named target"
            )

    @property
    def on_cuda(self) -> bool:
        return self.device.partition(":")[0] == "cuda"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def usual_mode(device: str) -> str:
    """What times are taken in where nobody says."""
    return "graph" if device.partition(":")[0] == "cuda" else "eager"


def mode_named(name: str) -> Mode:
    if name not in MODES:
        raise OptionError(f"mode {name!r}", why=f"modes are {', '.join(MODES)}", do="use eager, or graph on cuda")
    return name


@contextmanager
def under(conditions: Conditions) -> Iterator[None]:
    """Threads and device as asked, no gradients, no garbage collection; everything as before afterwards."""
    threads = torch.get_num_threads()
    if not conditions.on_cuda:
        torch.set_num_threads(conditions.threads)
    place: Any = torch.cuda.device(torch.device(conditions.device)) if conditions.on_cuda else nullcontext()
    try:
        with torch.inference_mode(), garbage_collector_off(), place:
            yield
    finally:
        torch.set_num_threads(threads)


def placed(module: nn.Module, conditions: Conditions) -> nn.Module:
    return module.eval().requires_grad_(False).to(device=conditions.device, dtype=DTYPES[conditions.dtype])


def inputs_of(shape: tuple[Any, ...], conditions: Conditions) -> list[torch.Tensor]:
    """Ones of one shape or of several."""
    shapes = shape if shape and isinstance(shape[0], tuple) else (shape,)
    kind = DTYPES[conditions.dtype]
    return [torch.ones((conditions.batch, *one), device=conditions.device, dtype=kind) for one in shapes]


def block_turn(module: nn.Module, shape: tuple[Any, ...], conditions: Conditions) -> Turn:
    """A block, placed and warmed up."""
    module, inputs = placed(module, conditions), inputs_of(shape, conditions)
    for _ in range(2):
        module(*inputs)
    if not conditions.on_cuda:
        return lambda: _cpu_block(module, inputs)
    make = _graph if conditions.mode == "graph" else partial(partial, _calls)
    calls, none = make(module, inputs, CALLS), make(module, inputs, 0)
    return lambda: [(seconds,) for seconds in added_by_each(_cuda_seconds, calls, none)]


def net_turn(module: nn.Module, shape: tuple[Any, ...], conditions: Conditions) -> Turn:
    """A whole network, placed and warmed up."""
    module, inputs = placed(module, conditions), inputs_of(shape, conditions)
    for _ in range(2):
        module(*inputs)
    call = _graph(module, inputs, 1) if conditions.mode == "graph" else lambda: module(*inputs)
    seconds = _cuda_seconds if conditions.on_cuda else _seconds

    def turn() -> list[Samples]:
        call()
        return [(seconds(call),) for _ in range(REPEATS)]

    return turn


def _calls(module: nn.Module, inputs: list[torch.Tensor], calls: int) -> None:
    for _ in range(calls):
        module(*inputs)


def added_by_each(seconds: Callable[[Callable[[], object]], float], calls: Callable[[], object], none: Callable[[], object]) -> list[float]:
    """What each of CALLS adds: starting and waiting happen once in a network, and a block without kernels (skip) adds nothing."""
    waiting_s = min(seconds(none) for _ in range(REPEATS))  # the least, so that a slow moment does not make the block look fast
    return [max(0.0, seconds(calls) - waiting_s) / CALLS for _ in range(REPEATS)]


def _cpu_block(module: nn.Module, inputs: list[torch.Tensor]) -> list[Samples]:
    for tensor in inputs:
        tensor.mul_(1.0)  # inside a network the block before has just written it
    cold = _seconds(lambda: module(*inputs))
    return [(_seconds(lambda: module(*inputs)), cold) for _ in range(REPEATS)]


def _seconds(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def _cuda_seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = perf_counter()
    call()
    torch.cuda.synchronize()
    return perf_counter() - start


def _graph(module: nn.Module, inputs: list[torch.Tensor], calls: int) -> Callable[[], object]:
    """`calls` calls as one CUDA graph; the input is touched first, so that a block without kernels gives no empty graph."""
    cuda: Any = torch.cuda
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        for _ in range(3):
            module(*inputs)
    cuda.current_stream().wait_stream(side)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        inputs[0].mul_(1.0)
        for _ in range(calls):
            module(*inputs)
    return partial(_replay, graph, module, inputs)


def _replay(graph: Any, module: nn.Module, inputs: list[torch.Tensor]) -> None:
    """The graph holds addresses only: whoever replays it keeps module and inputs alive, here by the arguments."""
    graph.replay()


def time_in_rounds(turns: Mapping[str, Turn], rounds: int, seed: int) -> dict[str, Samples]:
    """The LOW quantile of each one's samples, all visited once a round in a new order."""
    random = np.random.default_rng(seed)
    samples: dict[str, list[Samples]] = {name: [] for name in turns}
    names = list(turns)
    for round_ in range(rounds + 1):
        for place in random.permutation(len(names)):
            name = names[place]
            found = turns[name]()
            if round_:  # the first only fills allocators and caches
                samples[name] += found
    return {name: tuple(float(value) for value in np.quantile(np.asarray(found), LOW, axis=0)) for name, found in samples.items()}
