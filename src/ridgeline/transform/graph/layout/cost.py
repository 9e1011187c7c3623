"""What an op and a conversion cost in the plain order and in channels-last.

    MeasuredCosts    the op where it stands in the graph, both orders in turn (measure.py), conversions by themselves
                     ──> cache_dir()/layout/<device>-<digest of machine, threads, torch>.json, so that each is timed once
    EstimatedCosts   a target that is not here: bytes / bandwidth; a plain convolution also repacks its input and output

prepare(…) times what is not known yet; probe(call) ──> seconds in (plain, last) and the order the result comes out in;
convert(…) ──> seconds of (to last, to plain).
Noise must not decide: pointwise ops on equal shapes cost the same in both orders, and differences below 5 % count as none.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only

from ....core.files import cache_dir, write_json
from ....core.timing import sampler
from .choose import LAST, PLAIN
from .order import EITHER, OTHER, Frame, Seen, dense_strides, label_of, natural, orders, seen_of

if TYPE_CHECKING:
    from ..capture import Captured
    from .measure import Timed
    from .regions import Region

VERSION = 1
ROUNDS, BUDGET_S = (3, 30), 0.01
NOISE = 0.05
NOMINAL_BPS = 100e9  # of a local kind of machine that is not here; only ratios count
CONVERSION_FACTOR, PER_CONVERSION_S = 1.25, 2e-6  # in a graph a copy finds its tensor colder than when timed alone; of equals, fewer


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument: its strides when the op runs plain and when it runs channels-last."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[tuple[int, ...], tuple[int, ...]]

    def made_up(self, label: int, device: str) -> Tensor:
        """A tensor of zeros like it."""
        return torch.empty_strided(self.shape, self.strides[label], dtype=getattr(torch, self.dtype), device=device).fill_(0)


@dataclass(frozen=True, slots=True)
class Call:
    """An op with its arguments, tensors replaced by Operands."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result_frame: Frame | None  # None: the result has another rank
    pointwise: bool
    convolution: bool

    @property
    def key(self) -> str:
        return f"{self.target}|{self.args}|{sorted(self.kwargs.items())}|{self.result_frame}"

    @property
    def operands(self) -> list[Operand]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs), is_leaf=_is_operand) if isinstance(leaf, Operand)]

    def on_meta(self, label: int) -> Any:
        """What the op answers in one order, without values."""
        args, kwargs = tree_map_only(Operand, lambda operand: operand.made_up(label, "meta"), (self.args, self.kwargs), is_leaf=_is_operand)
        return self.target(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Probe:
    """Seconds of an op in (plain, last), and the order its result then has: PLAIN, LAST, EITHER or OTHER."""

    seconds: tuple[float, float]
    results: tuple[int, int]


class Costs(Protocol):
    """Where the seconds come from; `measured`: a plan made of them can be, and is, confirmed by timing the whole graph."""

    measured: ClassVar[bool]

    def prepare(self, graph: Captured, region: Region, seen: dict[fx.Node, Any], calls: Mapping[fx.Node, Call]) -> None: ...

    def probe(self, call: Call) -> Probe: ...

    def convert(self, shape: tuple[int, ...], dtype: str) -> tuple[float, float]: ...

    def save(self) -> None: ...

    def forget(self, calls: Iterable[Call]) -> None: ...


def _is_operand(leaf: Any) -> bool:
    return isinstance(leaf, Operand)


def result_orders(call: Call, plain: Seen | None, last: Seen | None) -> tuple[int, int]:
    """The order of the result in both cases; OTHER where it failed, or is no image and its strides would change."""
    if call.result_frame is None:
        same = plain is not None and last is not None and plain.strides == last.strides
        return (EITHER, EITHER) if same else (OTHER, OTHER)
    frame = call.result_frame
    labels = [OTHER if result is None else label_of(result.shape, result.strides, frame) for result in (plain, last)]
    return labels[0], labels[1]


class MeasuredCosts:
    """Timed on this machine, each op and shape once; remembered on disk."""

    measured: ClassVar[bool] = True

    def __init__(self, device: torch.device, path: Path | None = None) -> None:
        self.device = device
        self.path = path or cost_file(device.type)
        self.known = _read(self.path)
        self.fresh: dict[str, list[float]] = {}
        self.stale: set[str] = set()

    def prepare(self, graph: Captured, region: Region, seen: dict[fx.Node, Any], calls: Mapping[fx.Node, Call]) -> None:
        if all(call.key in self.known for call in calls.values()):
            return
        from .measure import time_in_graph

        by_key: dict[str, list[tuple[Call, Timed]]] = {}
        for node, timed in time_in_graph(graph, region, seen, self.device).items():
            by_key.setdefault(calls[node].key, []).append((calls[node], timed))
        for key, group in by_key.items():
            call, first = group[0]
            seconds = [mean(timed.seconds[label] for _, timed in group) for label in (PLAIN, LAST)]
            alike = call.pointwise and len({operand.shape for operand in call.operands}) == 1
            if alike or abs(seconds[0] - seconds[1]) < NOISE * max(seconds):
                seconds = [min(seconds)] * 2
            orders_found = result_orders(call, *first.results)
            self._remember(key, [second if second < math.inf else -1.0 for second in seconds] + list(orders_found))

    def probe(self, call: Call) -> Probe:
        plain_s, last_s, *results = self.known[call.key]
        return Probe((plain_s, last_s), (int(results[0]), int(results[1])))

    def convert(self, shape: tuple[int, ...], dtype: str) -> tuple[float, float]:
        key = f"convert|{shape}|{dtype}"
        found = self.known.get(key)
        if found is None:
            to_last, to_plain = (_conversion(shape, dtype, str(self.device), label) for label in (PLAIN, LAST))
            with torch.no_grad():
                found = self._remember(key, fastest([to_last, to_plain], str(self.device)))
        return CONVERSION_FACTOR * found[0] + PER_CONVERSION_S, CONVERSION_FACTOR * found[1] + PER_CONVERSION_S

    def _remember(self, key: str, found: list[float]) -> list[float]:
        self.known[key] = self.fresh[key] = found
        return found

    def forget(self, calls: Iterable[Call]) -> None:
        """Timings that led to a plan that did not hold: they are taken again next time."""
        keys = {call.key for call in calls}
        self.stale |= keys
        for table in (self.known, self.fresh):
            for key in keys & set(table):
                del table[key]

    def save(self) -> None:
        """Bring the file up to date; processes that do so at the same time lose nothing."""
        if not self.fresh and not self.stale:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept = {key: found for key, found in _read(self.path).items() if key not in self.stale}
            write_json(self.path, {**kept, **self.fresh})
        self.fresh, self.stale = {}, set()


def _conversion(shape: tuple[int, ...], dtype: str, device: str, label: int) -> Callable[[], Tensor]:
    """A copy of a tensor in one order into the other."""
    both = orders(natural(len(shape)))
    source = Operand(shape, dtype, (dense_strides(shape, both[PLAIN]), dense_strides(shape, both[LAST]))).made_up(label, device)
    strides = dense_strides(shape, both[1 - label])
    return lambda: torch.empty_strided(shape, strides, dtype=source.dtype, device=device).copy_(source)


def fastest(functions: list[Callable[[], Any]], device: str) -> list[float]:
    """The fastest run of each function, in turns: whatever slows the machine down meets all of them."""
    samples = [sampler(function, device) for function in functions]
    best = [sample() for sample in samples]
    start, rounds = perf_counter(), 0
    while rounds < ROUNDS[0] or (rounds < ROUNDS[1] and perf_counter() - start < BUDGET_S * len(functions)):
        best = [min(known, sample()) for known, sample in zip(best, samples, strict=True)]
        rounds += 1
    return best


def cost_file(device: str) -> Path:
    """Where this machine's timings are kept; another machine, thread count or torch is another file."""
    from ....target.machine import identity

    digest = hashlib.sha256(json.dumps([VERSION, identity(device)], sort_keys=True).encode()).hexdigest()[:12]
    return cache_dir() / "layout" / f"{device}-{digest}.json"


def _read(path: Path) -> dict[str, list[float]]:
    """Stored timings; a missing, broken or foreign file is an empty one: it is a cache."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, list) and all(isinstance(one, int | float) for one in value)}


class EstimatedCosts:
    """For a target that is not here: bytes moved over the bandwidth of its outermost memory."""

    measured: ClassVar[bool] = False

    def __init__(self, bandwidth_bps: float) -> None:
        self.bandwidth_bps = bandwidth_bps

    def prepare(self, graph: Captured, region: Region, seen: dict[fx.Node, Any], calls: Mapping[fx.Node, Call]) -> None:
        """Nothing is measured."""

    def probe(self, call: Call) -> Probe:
        with torch.no_grad():
            plain, last = call.on_meta(PLAIN), call.on_meta(LAST)
        sizes = [prod(operand.shape) * getattr(torch, operand.dtype).itemsize for operand in call.operands]
        result = plain.numel() * plain.element_size() if isinstance(plain, Tensor) else 0
        seconds = (sum(sizes) + result) / self.bandwidth_bps
        repacking = 2 * (sizes[0] + result) / self.bandwidth_bps if call.convolution else 0.0  # read and written once more
        results = result_orders(call, *(seen_of(one) if isinstance(one, Tensor) else None for one in (plain, last)))
        if call.convolution and results[PLAIN] == PLAIN:
            results = (PLAIN, LAST)  # cuDNN and oneDNN answer in the order they are given; the meta device does not say so
        return Probe((seconds + repacking, seconds), results)

    def convert(self, shape: tuple[int, ...], dtype: str) -> tuple[float, float]:
        seconds = 2 * prod(shape) * getattr(torch, dtype).itemsize / self.bandwidth_bps + PER_CONVERSION_S
        return seconds, seconds

    def save(self) -> None:
        """Nothing was measured."""

    def forget(self, calls: Iterable[Call]) -> None:
        """Nothing was measured."""


def costs_for(target: str, device: torch.device) -> Costs:
    """Measured where the model lies on the target itself, estimated otherwise."""
    from ....target.load import LOCAL_TARGETS, as_processor, load_target

    here = device.type if device.type != "cuda" else f"cuda {torch.cuda.get_device_name(device)}".lower()
    if target.lower() in here.split():
        return MeasuredCosts(device)
    if target in LOCAL_TARGETS:
        return EstimatedCosts(NOMINAL_BPS)
    memories = as_processor(load_target(target)).memories
    return EstimatedCosts(list(memories.values())[-1].bandwidth_bps.value)
