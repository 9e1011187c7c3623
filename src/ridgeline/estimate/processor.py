"""estimate(workload, target): every op under the roofs, then one timeline with dispatch and communication.

    Workload ──shard, fuse──> ops ──parts_of (limits)──> ÷ efficiency ──queue──> OpRow(start, time, bottleneck, cause)
      time = (largest part + (1 − overlap) · the others) / efficiency + exposed communication + exposed dispatch
      synchronous targets (CPU) pay every dispatch and page fault; asynchronous ones (GPU) only where the host falls behind the device

`limit_s` is the same sum at efficiency 1 without dispatch: what no implementation can beat.
A spatial array has no roofs: its layers are mapped instead (`spatial.network`), and give the same rows; on a crossbar
its events are counted (`crossbar`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from ..core.checks import expect, whole
from ..core.errors import OptionError
from ..core.profile import OpRow, Profile, Roofs, Total, shares_of
from ..target.array import SpatialArraySpec
from ..target.crossbar import CrossbarSpec
from ..target.load import Target, load_target
from ..target.spec import ProcessorSpec
from ..workload.graph import ROLES, Op, Operand, Workload, row_fields
from .allocator import faulted_bytes
from .cause import bottleneck, cause_of
from .efficiency import EfficiencyModel, learn
from .fits import misfit
from .fuse import fuse
from .limits import Parts, parts_of
from .parallel import Message, host_copy_s, message_s, shard
from .traffic import reuse_distances


@dataclass(frozen=True, slots=True)
class Settings:
    """How the model is run on the target."""

    mode: str = "eager"  # or fused
    devices: int = 1  # layers split over this many
    host_copy: bool = False  # inputs come from and results go to the host
    graph: bool = False  # launched as one captured graph
    sparse: bool = False  # weights pruned 2:4
    communication_overlap: float | None = None  # the target's own where None
    compression: float = 1.0  # messages made this many times smaller
    channels_last: bool = False  # images stored as NHWC
    keep_memory: bool = False  # the allocator gives nothing back between ops


def estimate(
    workload: Workload,
    target: Target | str,
    *,
    mode: str = "eager",
    devices: int = 1,
    host_copy: bool = False,
    graph: bool = False,
    settings: Settings | None = None,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """How long each op must take and is expected to take on `target`, and what limits it; mapping onto an array tells `progress`."""
    expect("workload", workload, Workload, do="capture the model first: estimate(capture(model, inputs), target)")
    spec = load_target(target) if isinstance(target, str) else target
    expect(
        "target", spec, ProcessorSpec, SpatialArraySpec, CrossbarSpec, do='give a name such as "h200", a path, or what load_target gives'
    )
    chosen = Settings(mode, devices, host_copy, graph) if settings is None else settings
    expect("settings", chosen, Settings, do="give a Settings of ridgeline.estimate.processor, or the options by name")
    if isinstance(spec, SpatialArraySpec):
        return _on_array(workload, spec, chosen, progress)
    if isinstance(spec, CrossbarSpec):
        return _on_crossbar(workload, spec, chosen)
    _check(chosen, spec)
    ops, messages = shard(workload.ops, chosen.devices) if chosen.devices > 1 else (workload.ops, {})
    ops = fuse(ops) if chosen.mode == "fused" else ops
    if chosen.host_copy:
        ops = _with_host_copies(ops, workload)
    rows = _rows(ops, messages, spec, chosen)
    return _profile(workload, spec, chosen, rows)


def _on_array(workload: Workload, spec: SpatialArraySpec, settings: Settings, progress: Callable[[str], None] | None) -> Profile:
    from .spatial.network import estimate_on_array  # numpy, which estimates with roofs do without

    why = "it is a spatial array: how it runs a layer is decided by the mapping, several cores by its file"
    _check_plain(settings, spec.name, why, f"leave the option out, or see `ridgeline map --on {spec.name}`")
    return estimate_on_array(workload, spec, progress=progress)


def _on_crossbar(workload: Workload, spec: CrossbarSpec, settings: Settings) -> Profile:
    from .crossbar import estimate_on_crossbar

    _check_plain(settings, spec.name, "it is a crossbar: how it runs a layer follows from its file", "leave the option out")
    return estimate_on_crossbar(workload, spec)


def _check_plain(settings: Settings, target: str, why: str, do: str) -> None:
    plain = Settings()
    if changed := [name for name in plain.__dataclass_fields__ if getattr(settings, name) != getattr(plain, name)]:
        raise OptionError(f"{changed[0].replace('_', ' ')} {getattr(settings, changed[0])} on {target}", why=why, do=do)


def _check(settings: Settings, spec: ProcessorSpec) -> None:
    if settings.mode not in ("eager", "fused"):
        raise OptionError(f"mode {settings.mode!r}", why="an estimate runs eager or fused", do="use eager or fused")
    whole("devices", settings.devices, do="give a whole number from 1 to 1024")
    if not 1 <= settings.devices <= 1024:
        raise OptionError(f"devices {settings.devices}", why="between 1 and 1024 devices", do="give a number in that range")
    if settings.devices > 1 and "peer" not in spec.links:
        raise OptionError(
            f"devices {settings.devices} on {spec.name}", why="the target has no peer link", do="add [links.peer] to its file"
        )
    if settings.host_copy and "host" not in spec.links:
        raise OptionError(f"host copy on {spec.name}", why="the target has no host link", do="add [links.host] to its file")


def _with_host_copies(ops: Sequence[Op], workload: Workload) -> tuple[Op, ...]:
    def copy(name: str, size: int) -> Op:
        operand = Operand(name, "activations", (size,), "uint8", size)
        return Op(name, "", "host_copy", "copy_", workload.dtype, (operand,), (), 0)

    return (copy("host_to_device", workload.input_bytes), *ops, copy("device_to_host", workload.output_bytes))


def efficiency_model(spec: ProcessorSpec) -> EfficiencyModel:
    """What the target's probes teach: their data stays where the last repetition left it, their weights come from memory."""

    def distances(op: Op) -> tuple[float, ...]:
        return tuple(inf if o.role == "weights" else float(op.bytes - o.bytes) for o in op.operands)

    return learn(spec, lambda op: parts_of(op, spec, distances(op)).limit_s)


def _rows(ops: Sequence[Op], messages: dict[str, Message], spec: ProcessorSpec, settings: Settings) -> list[OpRow]:
    retains = any(memory.retains for memory in spec.memories.values())
    distances: Sequence[tuple[float, ...] | None] = reuse_distances(ops) if retains else [None] * len(ops)
    model = efficiency_model(spec)
    queue = Queue(spec, settings, model)
    cost = spec.fault_s_per_byte.value if spec.fault_s_per_byte and not settings.keep_memory else 0.0
    faults = faulted_bytes(ops) if cost else [0] * len(ops)
    rows = []
    for op, distance, faulted in zip(ops, distances, faults, strict=True):
        parts = parts_of(op, spec, distance, settings.sparse)
        if op.kind in ("host_copy", "view"):
            parts = replace(parts, memory_s=dict.fromkeys(parts.memory_s, 0.0), limit_s=0.0)
        communication_s = _communication(op, messages, spec, settings)
        rows.append(queue.place(op, parts, model.predict(op, settings.channels_last), communication_s, faulted * cost))
    return rows


def _communication(op: Op, messages: dict[str, Message], spec: ProcessorSpec, settings: Settings) -> float:
    """Seconds of communication that nothing hides."""
    names = op.parts or (op.name,)
    overlap = spec.communication_overlap.value if settings.communication_overlap is None else settings.communication_overlap
    if op.kind == "host_copy":
        return (1.0 - overlap) * host_copy_s(op.bytes, spec.links["host"])
    sent = (messages[name] for name in names if name in messages)
    return (1.0 - overlap) * sum(message_s(m, settings.devices, spec.links["peer"], settings.compression) for m in sent)


class Queue:
    """The host hands ops over one by one; the device runs them in order."""

    def __init__(self, spec: ProcessorSpec, settings: Settings, model: EfficiencyModel) -> None:
        self.spec, self.model = spec, model
        self.host_s = self.device_s = 0.0
        dispatch = spec.dispatch
        self.op_s = dispatch.per_op_s.value if dispatch else 0.0
        self.view_s = dispatch.per_view_s.value if dispatch else 0.0
        self.asynchronous = bool(dispatch and dispatch.asynchronous)
        if settings.graph and dispatch:
            self.op_s, self.view_s = (dispatch.in_graph_s or dispatch.per_op_s).value, 0.0
            self.asynchronous = False  # inside a graph the gap between kernels is paid on the device
        if settings.mode == "fused":
            self.view_s = 0.0

    def place(self, op: Op, parts: Parts, efficiency: float, communication_s: float, fault_s: float = 0.0) -> OpRow:
        launch_s = self._launch(op)
        busy_s = parts.limit_s / efficiency
        start = self.device_s
        if self.asynchronous:
            self.host_s += launch_s
            exposed_s = 0.0 if op.kind == "view" else max(self.host_s - self.device_s, 0.0)
        else:
            exposed_s = launch_s + fault_s
        self.device_s = start + exposed_s + busy_s + communication_s
        shown = {
            "compute": max(parts.compute_s, parts.power_s) / efficiency,
            "memory": parts.worst_memory_s / efficiency,
            "communication": communication_s,
            "overhead": exposed_s,
        }
        limit = bottleneck(shown)
        return OpRow(
            **row_fields(op),
            start_s=start,
            time_s=exposed_s + busy_s + communication_s,
            limit_s=parts.limit_s + communication_s,
            efficiency=efficiency,
            compute_s=parts.compute_s,
            memory_s=parts.memory_s,
            level_intensity={level: op.flops / size if size else 0.0 for level, size in parts.traffic.bytes.items()},
            communication_s=communication_s,
            overhead_s=exposed_s,
            roof_flops=parts.roof_flops,
            bottleneck=limit,
            cause=cause_of(op, parts, limit, self.spec, launch_s, fault_s),
            energy_j=self._energy(parts, exposed_s + busy_s + communication_s),
        )

    def _launch(self, op: Op) -> float:
        if op.kind == "view":
            return self.view_s
        measured = self.model.host_s(op) if self.asynchronous else None
        return self.op_s if measured is None else measured

    def _energy(self, parts: Parts, seconds: float) -> float | None:
        if parts.energy_j is None or self.spec.power is None:
            return None
        return parts.energy_j + self.spec.power.idle_w.value * seconds


def _profile(workload: Workload, spec: ProcessorSpec, settings: Settings, rows: list[OpRow]) -> Profile:
    notes = list(workload.notes)
    if impossible := misfit(workload, spec, settings.devices):
        notes.append(impossible)
    if load := spec.machine.get("busy"):
        notes.append(f"{spec.name} was calibrated while other work ran ({load}): run `ridgeline calibrate` on an idle machine")
    return Profile(
        model=workload.model,
        target=spec.name,
        batch=workload.batch,
        dtype=workload.dtype,
        mode=settings.mode,
        rows=tuple(rows),
        total=total_of(rows, workload),
        roofs=roofs_of(spec),
        shares=shares_of(rows),
        uncounted=tuple(
            {"name": u.name, "operator": u.operator, "layer": u.layer, "zero_flop": u.zero_flop, "why": u.why} for u in workload.uncounted
        ),
        notes=tuple(notes),
        phase=workload.phase,
        context=workload.context,
        workload=workload,
        spec=spec,
        settings=settings,
    )


def total_of(rows: Sequence[OpRow], workload: Workload) -> Total:
    """Sums over the rows; the bottleneck is the one that takes most of the time."""
    by: dict[str, float] = {}
    for row in rows:
        names = row.bottleneck.split("+")
        for name in names:
            by[name] = by.get(name, 0.0) + row.time_s / len(names)
    energies = [row.energy_j for row in rows if row.energy_j is not None]
    return Total(
        flops=sum(r.flops for r in rows),
        matmul_flops=sum(r.matmul_flops for r in rows),
        bytes=sum(r.bytes for r in rows),
        bytes_by={role: sum(r.bytes_by[role] for r in rows) for role in ROLES},
        time_s=sum(r.time_s for r in rows),
        limit_s=sum(r.limit_s for r in rows),
        bottleneck=bottleneck(by),
        peak_activation_bytes=workload.peak_activation_bytes,
        weight_bytes=workload.weight_bytes,
        parameters=workload.parameters,
        by_bottleneck=by,
        energy_j=sum(energies) if energies else None,
        kv_cache_bytes=workload.peak_cache_bytes,
    )


def roofs_of(spec: ProcessorSpec) -> Roofs:
    """Every ceiling of a processor, for drawing."""
    compute = {f"{name} {dtype}": rate.value for name, unit in spec.units.items() for dtype, rate in unit.peak_flops.items()}
    return Roofs(compute, {name: memory.bandwidth_bps.value for name, memory in spec.memories.items()})
