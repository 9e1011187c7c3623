"""How long a model really takes: the rows capture() gives, each with its measured time.

    model, inputs ──build_subject──> ModelCase on the device
        ├─ the module called as a user would ──> total.measured [s], total.measured_peak_bytes [B]
        └─ torch.export, op by op under a clock (else one dispatched run) ──> row.measured [s]

The whole-model latency is the truth; op times are taken apart from it, on the CPU each with its own dispatch cost, on CUDA
without launch gaps. Their sum and the whole are both in the notes. `compiled` changes the whole-model latency only: the ops
of a compiled model are not those of the captured graph. Stored weights and inputs are random, from fixed seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..core.dtypes import canonical
from ..core.errors import MeasureError, OptionError
from ..core.profile import OpRow, Profile, Roofs, Timing, Total, shares_of
from ..core.timing import garbage_collector_off, sampler, summarise
from ..workload.capture import capture_case
from ..workload.case import CaseOptions, ModelCase
from ..workload.exported import export_case
from ..workload.graph import ROLES, Op, Workload, row_fields
from .clocks import CudaClock, HostClock, OpTime, make_clock
from .environment import machine_name
from .hardware import hardware_notes
from .memory import measured_peak_bytes, weight_bytes
from .merge import merge
from .passes import Key, dispatched_pass, graph_pass, keys_of, line_up
from .subject import build_subject, choose_device, evaluating

__all__ = ["MeasureSettings", "measure", "merge"]

Progress = Callable[[str], None]


class _Measured(NamedTuple):
    """Raw results: whole-model latencies, and each op's time in every pass that counts."""

    samples_s: list[float]
    times: dict[Key, list[OpTime]]
    gapped: bool  # no pass was free of launch gaps
    clock: HostClock | CudaClock


@dataclass(frozen=True, slots=True)
class MeasureSettings:
    """How a profile was measured; `samples_s` are the whole-model latencies, in the order they were taken."""

    device: str
    machine: str
    threads: int
    repeats: int
    warmup: int
    channels_last: bool
    compiled: bool
    samples_s: tuple[float, ...]


def measure(
    model: str | Path | torch.nn.Module,
    inputs: Any = None,
    *,
    device: str | None = None,
    batch: int | None = None,
    dtype: str | torch.dtype | None = None,
    phase: str | None = None,
    context: int | None = None,
    name: str | None = None,
    repeats: int = 10,
    warmup: int = 3,
    channels_last: bool = False,
    compiled: bool = False,
    progress: Progress | None = None,
) -> Profile:
    """Run the model and say how long it and each of its ops take; `profile.settings` holds the raw latencies."""
    if repeats < 1 or warmup < 0:
        raise OptionError(
            f"repeats={repeats}, warmup={warmup}", why="there must be at least one repeat", do="give repeats >= 1 and warmup >= 0"
        )
    say = progress or (lambda message: None)
    place = choose_device(device, model)
    say("building the model")
    options = CaseOptions(batch, canonical(dtype) if dtype else None, phase, context, str(place))
    case = build_subject(model, inputs, options, name, channels_last)
    with _current(place), _memory_errors(case, place), evaluating(case.module):
        say("capturing its ops")
        workload = capture_case(case)
        clock = make_clock(str(place))
        sample = sampler(_call(case, compiled), str(place))
        run = graph_pass(export_case(case), case, clock) if workload.captured_by == "torch.export" else dispatched_pass(case, clock)
        say("warming up")
        _warm_up(case, sample, run, warmup, compiled)
        say(f"timing the whole model and its {len(workload.ops)} ops, {repeats} times")
        measured = _repeat(sample, run, clock, repeats)
        peak_bytes = measured_peak_bytes(case, place)
        say("reading the machine's meters")
        meters = hardware_notes(_call(case, compiled=False), str(place), summarise(measured.samples_s).median_s)
    settings = MeasureSettings(
        str(place), machine_name(str(place)), torch.get_num_threads(), repeats, warmup, channels_last, compiled, tuple(measured.samples_s)
    )
    timing = summarise(settings.samples_s)
    total = _total(workload, timing, weight_bytes(case.module), peak_bytes)
    profile = _profile(workload, measured, total, settings)
    return replace(profile, notes=(*profile.notes, *meters))


def _current(place: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(place) if place.type == "cuda" else nullcontext()


@contextmanager
def _memory_errors(case: ModelCase, place: torch.device) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, a plain one on the CPU
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise MeasureError(
            f"{case.name} ran out of memory on {place}", why=_first_line(error), do="use a smaller batch, context or dtype"
        ) from error


def _call(case: ModelCase, compiled: bool) -> Callable[[], None]:
    module: Callable[..., Any] = torch.compile(case.module) if compiled else case.module

    def call() -> None:
        with torch.inference_mode():
            module(*case.args, **case.kwargs)

    return call


def _warm_up(case: ModelCase, sample: Callable[[], float], run: Callable[[], list[OpTime]], warmup: int, compiled: bool) -> None:
    if compiled:
        try:
            sample()
        except Exception as error:  # Inductor raises many types; the module itself ran when it was captured
            raise MeasureError(f"{case.name} could not be compiled", why=_first_line(error), do="measure it without compiling") from error
    for _ in range(warmup):
        sample()
        run()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def _repeat(sample: Callable[[], float], run: Callable[[], list[OpTime]], clock: HostClock | CudaClock, repeats: int) -> _Measured:
    """Whole and ops in turn, so that what slows the machine meanwhile slows both."""
    if isinstance(clock, CudaClock):
        clock.waiting.clear()  # in warm-up the host also waits for kernels to load
    samples_s: list[float] = []
    passes: list[list[OpTime]] = []
    gapped: list[list[OpTime]] = []
    with garbage_collector_off():
        for _ in range(repeats):
            samples_s.append(sample())
            times = run()
            (gapped if isinstance(clock, CudaClock) and clock.dry else passes).append(times)
    # Passes in which the device caught up with the host hold launch gaps: used only where no better one exists.
    return _Measured(samples_s, line_up(passes or gapped), not passes, clock)


def _profile(workload: Workload, measured: _Measured, total: Total, settings: MeasureSettings) -> Profile:
    rows = _rows(workload.ops, measured.times)
    return Profile(
        model=workload.model,
        target="cpu" if settings.device == "cpu" else settings.machine,
        batch=workload.batch,
        dtype=workload.dtype,
        mode="compiled" if settings.compiled else "eager",
        rows=rows,
        total=total,
        roofs=Roofs({}, {}),
        shares=shares_of(rows),
        uncounted=tuple(asdict(item) for item in workload.uncounted),
        notes=(*workload.notes, *_notes(rows, measured, total, settings)),
        phase=workload.phase,
        context=workload.context,
        workload=workload,
        settings=settings,
    )


def _rows(ops: Sequence[Op], times: dict[Key, list[OpTime]]) -> tuple[OpRow, ...]:
    rows, start_s = [], 0.0
    for op, key in zip(ops, keys_of(op.name for op in ops), strict=True):
        found = times.get(key)
        timing = summarise([time.seconds for time in found]) if found else None
        rows.append(_row(op, timing, start_s))
        start_s += rows[-1].time_s
    return tuple(rows)


def _row(op: Op, timing: Timing | None, start_s: float) -> OpRow:
    return OpRow(
        **row_fields(op),
        start_s=start_s,
        time_s=timing.median_s if timing else 0.0,
        measured=timing,
    )


def _total(workload: Workload, timing: Timing, held_bytes: int, peak_bytes: int) -> Total:
    return Total(
        flops=workload.flops,
        matmul_flops=workload.matmul_flops,
        bytes=workload.bytes,
        bytes_by={role: workload.bytes_of(role) for role in ROLES},
        time_s=timing.median_s,
        limit_s=0.0,
        bottleneck="",
        peak_activation_bytes=workload.peak_activation_bytes,
        weight_bytes=held_bytes,
        parameters=workload.parameters,
        by_bottleneck={},
        measured=timing,
        measured_peak_bytes=peak_bytes,
        kv_cache_bytes=workload.peak_cache_bytes,
    )


def _notes(rows: Sequence[OpRow], measured: _Measured, total: Total, settings: MeasureSettings) -> list[str]:
    sum_s = sum(row.time_s for row in rows)
    notes = [f"measured on {settings.machine}; ops add up to {sum_s * 1e3:.3f} ms, the whole model takes {total.time_s * 1e3:.3f} ms"]
    if settings.compiled:
        notes.append("the whole model ran compiled; ops and memory are those of eager code")
    if unseen := [row.name for row in rows if row.measured is None]:
        notes.append(f"not measured: {', '.join(unseen[:8])}{' …' if len(unseen) > 8 else ''} did not run in the timed passes")
    known = set(keys_of(row.name for row in rows))
    for key in (key for key in measured.times if key not in known):
        spent_s = summarise([time.seconds for time in measured.times[key]]).median_s
        notes.append(f"{key[0]} takes {spent_s * 1e6:.1f} µs and has no row: its work was not counted")
    if isinstance(measured.clock, CudaClock):
        return notes + _cuda_notes(measured, measured.clock)
    return [*notes, "memory peak: tensors alive at once beyond weights and inputs; scratch space inside an op is not seen"]


def _cuda_notes(measured: _Measured, clock: CudaClock) -> list[str]:
    hosts = [summarise([time.host_s for time in found]).median_s for found in measured.times.values()]
    notes = [f"host launch {summarise(hosts).median_s * 1e6:.1f} µs an op, {sum(hosts) * 1e3:.3f} ms total"] if hosts else []
    if clock.waiting:
        notes.append(f"the host waits for the device in {', '.join(sorted(clock.waiting)[:8])}: launch cannot run ahead of these ops")
    if measured.gapped:
        notes.append("the device caught up with the host while ops were queued: op times may hold launch gaps")
    return notes
