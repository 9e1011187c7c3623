"""A whole network on an array: every layer mapped, the rest on the host, several cores where there are any.

    Workload ──layers_of──> Layer ──map_layer──> Mapped       matmuls and convolutions, each distinct shape searched once
        └── other ops ──────────────> HostOp                  time and energy of the stated host
    ──> NetworkMapping(layers, host ops, totals)  .to_json()  ──profile_of──> Profile: the same rows as any other target

cores = split      a layer is cut along the dimension that serves the objective best; the cores share the outermost memory's ports
cores = pipeline   runs of layers on one core each; a result leaves every `interval_s`, the slowest stage's time
leakage            of several cores is the whole chip's, for as long as the layers take (in a pipeline, for an interval)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...core.checks import expect
from ...core.dtypes import BITS
from ...core.errors import unknown_name
from ...core.profile import OpRow, Profile, Roofs, Total, shares_of
from ...target.array import Cores, SpatialArraySpec
from ...target.load import load_array
from ...workload.graph import ROLES, Op, Workload, row_fields
from .layer import Layer, layers_of
from .mapper import Mapped, compulsory_cycles, map_layer

SCHEMA = "ridgeline/map/1"
ACTIVATIONS = ("relu", "relu6", "hardtanh", "leaky_relu", "gelu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "clamp")
SPLITS = ("G", "K", "P", "B")
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MappedOp:
    """One layer of the network on the array."""

    op: Op
    mapped: Mapped
    macs: int
    """Of the whole layer, all calls."""
    cores: int = 1
    split: str = ""
    """Dimension cut over the cores."""
    leak_pj: float | None = None
    """Leakage of several cores a cycle, idle ones and the memory they share included; None: of the one that was mapped."""

    @property
    def port_cycles(self) -> dict[str, int]:
        """Cycles of a call each port is busy; the cores take turns at those of the memory they share."""
        ports = self.mapped.cost.port_cycles
        outermost = f"{_outermost(ports)}."
        return {name: cycles * (self.cores if name.startswith(outermost) else 1) for name, cycles in ports.items()}

    @property
    def cycles(self) -> int:
        return max(self.mapped.cost.cycles, *self.port_cycles.values()) * self.op.calls

    @property
    def limit(self) -> tuple[str, int]:
        """What limits a call, and the cycles it needs by itself."""
        cost, (port, busy) = self.mapped.cost, max(self.port_cycles.items(), key=lambda item: item[1])
        return (port, busy) if busy > cost.cycles else (cost.bottleneck, cost.limits[cost.bottleneck])

    @property
    def static_pj(self) -> float:
        """What leaks meanwhile."""
        if self.leak_pj is None:
            return self.mapped.cost.energy_by_pj["static"] * self.cores * self.op.calls
        return self.leak_pj * self.cycles

    @property
    def energy_pj(self) -> float:
        if self.leak_pj is None:
            return self.mapped.cost.energy_pj * self.cores * self.op.calls
        dynamic_pj = self.mapped.cost.energy_pj - self.mapped.cost.energy_by_pj["static"]
        return dynamic_pj * self.cores * self.op.calls + self.static_pj

    def to_json(self) -> dict[str, Any]:
        more = {"cores": self.cores, "split": self.split} if self.cores > 1 else {}
        other = self.cores > 1 or self.op.calls > 1 or self.leak_pj is not None
        whole = {"energy_pj": self.energy_pj, "cycles": self.cycles, "calls": self.op.calls} if other else {}
        return {**self.mapped.to_json(), "op": self.op.name, **whole, **more}


@dataclass(frozen=True, slots=True)
class HostOp:
    """An op the array does not run."""

    op: Op
    seconds: float
    energy_pj: float
    why: str

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.op.name,
            "layer": self.op.layer,
            "kind": self.op.kind,
            "seconds": self.seconds,
            "energy_pj": self.energy_pj,
            "why": self.why,
        }


@dataclass(frozen=True, slots=True)
class NetworkMapping:
    """Every layer's mapping, and what they add up to."""

    workload: Workload
    array: SpatialArraySpec
    dataflow: str
    objective: str
    layers: tuple[MappedOp, ...]
    host: tuple[HostOp, ...]
    interval_s: float
    """Time between results; less than `seconds` only where cores form a pipeline."""

    @property
    def cycles(self) -> int:
        return sum(layer.cycles for layer in self.layers)

    @property
    def seconds(self) -> float:
        return self.cycles / self.array.clock_hz.value + sum(op.seconds for op in self.host)

    @property
    def energy_pj(self) -> float:
        return sum(layer.energy_pj for layer in self.layers) + sum(op.energy_pj for op in self.host)

    @property
    def macs(self) -> int:
        return sum(layer.macs for layer in self.layers)

    @property
    def utilisation(self) -> float:
        """Of all PEs of all cores, while the array works."""
        return self.macs / (self.cycles * self.array.pes * self.array.cores.count) if self.cycles else 0.0

    def to_json(self) -> dict[str, Any]:
        """The documented schema of `ridgeline map --json`."""
        return {
            "schema": SCHEMA,
            "model": self.workload.model,
            "batch": self.workload.batch,
            "target": self.array.name,
            "dataflow": self.dataflow,
            "objective": self.objective,
            "total": {
                "energy_pj": self.energy_pj,
                "cycles": self.cycles,
                "seconds": self.seconds,
                "interval_s": self.interval_s,
                "macs": self.macs,
                "utilisation": self.utilisation,
                "area_mm2": self.array.area_mm2,
                "optimal_within_space": all(layer.mapped.optimal for layer in self.layers),
            },
            "layers": [layer.to_json() for layer in self.layers],
            "host": [op.to_json() for op in self.host],
        }


def map_layers(
    workload: Workload,
    array: SpatialArraySpec | str,
    *,
    dataflow: str = "any",
    objective: str = "edp",
    layer: str | None = None,
    progress: Progress | None = None,
) -> NetworkMapping:
    """Map every layer, or the one named; `array` is a spec, or what load_array takes."""
    expect("workload", workload, Workload, do="capture the model first: map_layers(capture(model, inputs), array)")
    array = load_array(array) if isinstance(array, str) else array
    expect("array", array, SpatialArraySpec, do='give a name such as "eyeriss", a path, or what load_target gives of a spatial array')
    ops = [op for op in workload.ops if op.kind != "view"]
    if layer is not None:
        ops = [op for op in ops if layer in (op.layer, op.name) and op.loops]
        if not ops:
            known = [op.layer or op.name for op in workload.ops if op.loops]
            raise unknown_name("layer", layer, known, f"the layers of {workload.model} with multiplications to map")
    mapped: list[MappedOp] = []
    host: list[HostOp] = []
    leaving: set[str] = set()  # values that come straight out of the array
    for number, op in enumerate(ops):
        if progress:
            progress(f"{number + 1} of {len(ops)}: {op.layer or op.name}")
        nests = layers_of(op, array.bits)
        refused = next((f"{array.name} does not run {nest.kind}" for nest in nests if nest.kind not in array.runs), "")
        if _in_epilogue(op, array, leaving):
            leaving |= {out.value for out in op.outputs}
        elif not nests or refused:
            host.append(_on_host(op, array, refused or f"{op.kind} is not multiplications of two operands"))
            leaving -= {out.value for out in op.outputs}  # in place: no longer what the array gave
        else:
            mapped += [_map_on_cores(op, nest, array, dataflow, objective) for nest in nests]
            leaving |= {out.value for out in op.outputs}
    layers = with_leakage(mapped, array)
    return NetworkMapping(workload, array, dataflow, objective, layers, tuple(host), _interval(layers, host, array))


def with_leakage(layers: Sequence[MappedOp], array: SpatialArraySpec) -> tuple[MappedOp, ...]:
    """Layers of several cores with their share of what the whole chip leaks; of one core as they are."""
    if array.cores.count == 1:
        return tuple(layers)
    clock, seconds = array.clock_hz.value, sum(layer.cycles for layer in layers) / array.clock_hz.value
    share = _interval(layers, (), array) / seconds if layers else 1.0  # stages of a pipeline leak together, for several results
    return tuple(replace(layer, leak_pj=array.static_w / clock * 1e12 * share) for layer in layers)


def _in_epilogue(op: Op, array: SpatialArraySpec, leaving: set[str]) -> bool:
    """Whether the op is done on results on their way out of the array."""
    kind = "batch_norm" if "batch_norm" in op.operator else "activation" if op.operator.strip("_") in ACTIVATIONS else ""
    return kind in array.epilogue and bool(op.inputs) and op.inputs[0].value in leaving


def _on_host(op: Op, array: SpatialArraySpec, why: str) -> HostOp:
    host, calls = array.host, op.calls
    size = sum(o.elements for o in op.operands) * array.bits.F / 8  # the array's results, whatever the model's dtype
    seconds = max(op.flops / host.ops_per_s.value, size / host.bytes_per_s.value) * calls
    return HostOp(op, seconds, (op.flops * host.pj_per_op.value + size * host.pj_per_byte.value) * calls, why)


def _map_on_cores(op: Op, layer: Layer, array: SpatialArraySpec, dataflow: str, objective: str) -> MappedOp:
    single = array.model_copy(update={"cores": Cores()})
    if array.cores.count == 1 or array.cores.use == "pipeline":
        return MappedOp(op, map_layer(layer, single, dataflow, objective), layer.macs * op.calls)
    options = []
    for dim in SPLITS:
        share = -(-layer.dims[dim] // array.cores.count)
        if share < layer.dims[dim]:
            part = map_layer(layer.with_dims(**{dim: share}), single, dataflow, objective)
            options.append(MappedOp(op, part, layer.macs * op.calls, -(-layer.dims[dim] // share), dim))
    options = options or [MappedOp(op, map_layer(layer, single, dataflow, objective), layer.macs * op.calls)]
    options = [replace(option, leak_pj=array.static_w / array.clock_hz.value * 1e12) for option in options]
    value = {"energy": lambda m: m.energy_pj, "latency": lambda m: m.cycles, "edp": lambda m: m.energy_pj * m.cycles}[objective]
    return min(options, key=value)


def _interval(layers: Sequence[MappedOp], host: Sequence[HostOp], array: SpatialArraySpec) -> float:
    """Time between results: the sum of all, or in a pipeline the slowest stage."""
    seconds = [layer.cycles / array.clock_hz.value for layer in layers]
    elsewhere = sum(op.seconds for op in host)
    if array.cores.use != "pipeline" or array.cores.count == 1:
        return sum(seconds) + elsewhere
    return max(slowest_stage(seconds, array.cores.count), elsewhere, _shared_port_seconds(layers, array))


def _shared_port_seconds(layers: Sequence[MappedOp], array: SpatialArraySpec) -> float:
    """All stages' traffic through the busiest port of the memory they share."""
    busy: dict[str, int] = {}
    outermost = f"{list(array.memories)[-1]}."
    for layer in layers:
        for name, cycles in layer.mapped.cost.port_cycles.items():
            if name.startswith(outermost):
                busy[name] = busy.get(name, 0) + cycles * layer.op.calls
    return max(busy.values(), default=0) / array.clock_hz.value


def slowest_stage(times: Sequence[float], stages: int) -> float:
    """Least possible time of the slowest of `stages` runs of consecutive layers."""
    best = [0.0, *([float("inf")] * len(times))]
    for _ in range(stages):
        best = [0.0, *(min(max(best[start], sum(times[start:end])) for start in range(end)) for end in range(1, len(times) + 1))]
    return best[-1]


def _outermost(ports: Iterable[str]) -> str:
    """Name of the last memory: accesses are listed nearest first."""
    return [name for name in ports if name != "noc"][-1].split(".")[0]


def profile_of(network: NetworkMapping) -> Profile:
    """The rows every report draws: one an op, in the order of the network."""
    array, clock = network.array, network.array.clock_hz.value
    dtype = f"int{array.bits.I}"
    work = network.workload.with_dtype(dtype) if dtype in BITS else network.workload
    by_op: dict[str, list[MappedOp]] = {}
    for layer in network.layers:
        by_op.setdefault(layer.op.name, []).append(layer)
    on_host = {op.op.name: op for op in network.host}
    rows: list[OpRow] = []
    start = 0.0
    for op in work.ops:
        if op.name in by_op:
            rows.append(_array_row(op, by_op[op.name], array, start))
        elif op.name in on_host:
            host = on_host[op.name]
            rows.append(OpRow(**row_fields(op), start_s=start, time_s=host.seconds, limit_s=host.seconds, bottleneck="host", cause=host.why,
                              energy_j=host.energy_pj * 1e-12))  # fmt: skip
        else:
            continue
        start += rows[-1].time_s
    peak = 2 * array.pes * array.cores.count * clock
    outermost = list(array.memories)[-1]
    widths = [port.bits_per_cycle for port in array.memories[outermost].ports.values()]
    roofs = Roofs({f"array int{array.bits.W}": peak}, {outermost: sum(widths) / 8 * clock})
    bits = array.bits
    note = f"operands of {bits.W}, {bits.I} and {bits.F} bits, whatever the model's dtype"
    return Profile(
        work.model, array.name, work.batch, dtype, "mapped", tuple(rows), _total(network, work, rows), roofs, shares_of(rows),
        notes=(note,), phase=work.phase, context=work.context, workload=work, spec=array,
    )  # fmt: skip


def _array_row(op: Op, layers: list[MappedOp], array: SpatialArraySpec, start: float) -> OpRow:
    clock = array.clock_hz.value
    slowest = max(layers, key=lambda layer: layer.cycles)
    limiting, needed = slowest.limit
    time = sum(layer.cycles for layer in layers) / clock
    limit = sum(_least_cycles(layer, array) for layer in layers) / clock
    memory_s: dict[str, float] = {}
    for layer in layers:  # one nest after another
        busy: dict[str, float] = {}
        for name, cycles in layer.port_cycles.items():
            memory = name.split(".")[0]
            busy[memory] = max(busy.get(memory, 0.0), cycles * op.calls / clock)
        memory_s = {memory: memory_s.get(memory, 0.0) + seconds for memory, seconds in busy.items()}
    compute = sum(layer.mapped.cost.latency.compute * op.calls for layer in layers) / clock
    return OpRow(
        **row_fields(op), start_s=start, time_s=time, limit_s=min(limit, time), efficiency=min(1.0, limit / time), compute_s=compute,
        memory_s=memory_s, roof_flops=op.flops / limit if limit else 0.0, bottleneck=limiting.split(".")[0],
        cause=f"{limiting} takes {needed} of {slowest.cycles // op.calls} cycles",
        energy_j=sum(layer.energy_pj for layer in layers) * 1e-12,
    )  # fmt: skip


def _least_cycles(layer: MappedOp, array: SpatialArraySpec) -> int:
    """What no mapping can beat: every PE busy, of one core in a pipeline, and every operand moved once."""
    cores = array.cores.count if array.cores.use == "split" else 1
    return max(-(-layer.macs // (array.pes * cores)), compulsory_cycles(layer.mapped.cost.layer, array) * layer.op.calls)


def _total(network: NetworkMapping, work: Workload, rows: Sequence[OpRow]) -> Total:
    """Sums over the rows; what is held is that of `work`, the network at the array's width."""
    workload = network.workload
    spent: dict[str, float] = {}
    for row in rows:
        spent[row.bottleneck] = spent.get(row.bottleneck, 0.0) + row.time_s
    by_role: dict[str, int] = {role: sum(row.bytes_by[role] for row in rows) for role in ROLES}
    peak, worst = _narrowed(workload, network.array), max(spent, key=lambda k: spent[k], default="")
    return Total(
        sum(r.flops for r in rows), sum(r.matmul_flops for r in rows), sum(r.bytes for r in rows), by_role, sum(r.time_s for r in rows),
        sum(r.limit_s for r in rows), worst, peak, work.weight_bytes, workload.parameters, spent, energy_j=network.energy_pj * 1e-12,
        kv_cache_bytes=work.peak_cache_bytes,
    )  # fmt: skip


def _narrowed(workload: Workload, array: SpatialArraySpec) -> int:
    """Peak activations at the array's width."""
    return workload.peak_activation_bytes * array.bits.I // BITS.get(workload.dtype, 32)


def estimate_on_array(
    workload: Workload, array: SpatialArraySpec, dataflow: str = "any", objective: str = "edp", progress: Progress | None = None
) -> Profile:
    """`estimate` for an array: the best mapping of every layer."""
    return profile_of(map_layers(workload, array, dataflow=dataflow, objective=objective, progress=progress))
