"""Rows measured one after another.

    [Wanted] ──run(ceilings, settings)──> BenchRow, …      each: errors, launches, tuning, times in turn, judgement, history

A function that raises becomes its entry's error; the run goes on. Only a CUDA context that no longer answers ends it early.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...core.errors import MeasureError
from ...measure.environment import machine_name, package_version
from ..jit import recorded
from .ceilings import Ceilings
from .history import append, entry, history_file, read_history, regression
from .launches import kernels_used, multiprocessor
from .rows import BenchRow, Wanted, dtype_name, judge
from .subjects import Subjects, errors
from .timing import CudaTimer, GraphTimer, RestedTimer, SteadyTimer, Timed, failed, on, time_in_turn
from .tune import tune_step

COMPUTE_REPEATS = 12
"""Of rows limited by tensor cores: every order of three functions twice, of four three times."""
STEADY_MS = 0.1
"""Calls shorter than that do not keep the GPU at work: the host is slower."""
SMALL_OUTPUT = 1 / 16
"""A call that writes less than this share of its bytes is held against the read ceiling."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How rows are measured."""

    device: str = "cuda"
    repeats: int = 7
    compiled: bool = True
    peers: bool = True
    errors: bool = True
    tune: bool = False
    keep: bool = True
    """Append to the history."""
    steady: bool = False
    """Rows limited by tensor cores: at the clock that their own power leaves, instead of a rested GPU's."""

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")


def check_device(device: str) -> None:
    """MeasureError where the rows cannot be measured."""
    kind, colon, index = device.partition(":")
    if kind not in ("cuda", "cpu") or (colon and not (index.isascii() and index.isdigit())) or (kind == "cpu" and int(index or 0)):
        raise MeasureError(f"cannot measure on {device!r}", why="kernels run on CUDA GPUs", do="use --device cuda, cuda:1, … or cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise MeasureError(
            f"cannot measure kernels on {device}",
            why="torch finds no CUDA GPU here",
            do="run on a machine with one; --device cpu tries the command out on the CPU references, which are no kernels",
        )
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise MeasureError(f"cannot measure on {device!r}", why=f"there are {count} GPUs, from 0 on", do="give one of them, or just cuda")


def machine(device: str) -> dict[str, Any]:
    """What the numbers depend on."""
    from ... import __version__

    found: dict[str, Any] = {
        "name": machine_name(device),
        "device": device,
        "kernels": device.startswith("cuda"),
        "ridgeline": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": package_version("triton"),
    }
    if device.startswith("cuda"):
        properties: Any = torch.cuda.get_device_properties(torch.device(device))
        found |= {"multiprocessors": properties.multi_processor_count, "l2_bytes": properties.L2_cache_size, "cuda": torch.version.cuda}
    return found


def run(rows: Iterable[Wanted], ceilings: Ceilings, settings: Settings, say: Callable[[str], None] = lambda _: None) -> Iterator[BenchRow]:
    """Measure, in order; a forward row before its backward one lets the latter say whether autograd is to blame."""
    path = history_file(settings.device)
    earlier = read_history(path)
    done: dict[Any, BenchRow] = {}
    for wanted in rows:
        say(str(wanted))
        row = _on_device(wanted, ceilings, settings, done.get((*wanted.key[:3], False)))
        row.regression = regression(row.ours.gpu_ms, earlier.get(wanted.key, ())) if settings.cuda else None  # references are no kernels
        done[wanted.key] = row
        if settings.keep and row.ours.gpu_ms is not None:
            try:
                append(path, entry(row.to_json()))
            except OSError as error:
                row.notes.append(f"not kept in the history: {error}")
        yield row
        if row.ours.error and settings.cuda and not _alive():
            raise MeasureError(
                f"the GPU stopped answering in {wanted}", why=row.ours.error, do="start again without this op; its error is in its row"
            )


def _on_device(wanted: Wanted, ceilings: Ceilings, settings: Settings, forward: BenchRow | None) -> BenchRow:
    with on(settings.device):
        row = measure_row(wanted, ceilings, settings, forward)
        if settings.cuda and _alive():
            torch.cuda.empty_cache()
        return row


def _alive() -> bool:
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def measure_row(wanted: Wanted, ceilings: Ceilings, settings: Settings, forward: BenchRow | None = None) -> BenchRow:
    """One row, judged; whatever raises is in it."""
    op, shape, dtype, backward = wanted.key
    row = BenchRow(op, shape, dtype, backward, wanted.size, settings.device, Timed())
    row.limit_ms = wanted.anchor.limit_ms if wanted.anchor else None
    try:
        with torch.set_grad_enabled(backward):
            _fill(row, wanted, ceilings, settings)
    except Exception as error:
        row.ours = failed(error)
    return judge(row, forward)


def _fill(row: BenchRow, wanted: Wanted, ceilings: Ceilings, settings: Settings) -> None:
    subjects = Subjects(wanted, settings.device)
    row.kind, row.elements = wanted.case.kind(subjects.sets[0])
    row.bytes, row.flops = subjects.bytes, subjects.flops
    if settings.errors:
        _errors(row, subjects)
    functions, failures = subjects.functions(compiled=settings.compiled and settings.cuda, peers=settings.peers and settings.cuda)
    steps = {name: subjects.step(function) for name, function in functions.items()}
    _launches(row, steps["ours"], settings)
    # forward writes its outputs; forward and backward write gradients, which are as large as the inputs
    writes = wanted.backward or subjects.written_bytes() > SMALL_OUTPUT * subjects.bytes
    row.ceiling_ms, row.ceiling = ceilings.limit(row.bytes, row.flops, dtype_name(wanted.dtype), writes=writes)
    if settings.tune:
        row.tuned = tune_step(steps["ours"], len(subjects.sets), settings.device)
    if wanted.case.in_graph and settings.cuda:
        row.notes.append("GPU times in a CUDA graph")
    kind, repeats = _sampling(row, wanted, settings)
    times = time_in_turn(steps, len(subjects.sets), settings.device, repeats, kind)
    times |= {name: failed(error) for name, error in failures.items()}
    row.ours, row.eager, row.compile = times.pop("ours"), times.pop("eager"), times.pop("compile", None)
    row.peers = times


def _sampling(row: BenchRow, wanted: Wanted, settings: Settings) -> tuple[type[CudaTimer], int]:
    """(how samples are taken, how many)."""
    if wanted.case.in_graph:
        return GraphTimer, settings.repeats
    if row.ceiling != "compute":
        return CudaTimer, settings.repeats
    steady = settings.steady and (row.ceiling_ms or 0.0) >= STEADY_MS
    if settings.cuda:
        row.notes.append("each sample after 0.1 s of the same function" if steady else "short samples after a rest")
    return (SteadyTimer if steady else RestedTimer), max(settings.repeats, COMPUTE_REPEATS if settings.cuda else 0)


def _errors(row: BenchRow, subjects: Subjects) -> None:
    try:
        found = errors(subjects)
    except Exception as error:
        row.notes.append(f"no error against float64: {failed(error).error}")
        return
    if any(one is not None and not math.isfinite(one) for one in found):
        row.notes.append("the error against float64 is not finite")
    row.error_ours, row.error_eager = (one if one is None or math.isfinite(one) else None for one in found)


def _launches(row: BenchRow, step: Callable[[int], object], settings: Settings) -> None:
    """What one call launches; its failure is the timing's to tell."""
    try:
        with recorded() as launches:
            step(0)
        row.kernels = kernels_used(launches, multiprocessor(settings.device))
    except Exception:
        row.kernels = []
