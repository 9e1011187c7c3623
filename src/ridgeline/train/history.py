"""What happened in a run, step by step, read from the device only now and then.

    step ──Recorder.add(loss, scale, skipped: device tensors; marks: CUDA events or clock readings)──> pending
    every INTERVAL steps or second ──flush──> History: one list a column, one summary an epoch      (on the CPU: every step)

History columns, one value a step: loss, learning_rate, scale, skipped, forward_s, backward_s, optimiser_s, data_wait_s, step_s,
memory_bytes (CUDA: the largest allocation of the run so far). Seconds of passes are the device's own, step_s is wall time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .precision import Outcome, Watch

INTERVAL, INTERVAL_S = 50, 1.0
COLUMNS = ("loss", "learning_rate", "scale", "skipped", "forward_s", "backward_s", "optimiser_s", "data_wait_s", "step_s", "memory_bytes")


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over the data."""

    epoch: int
    loss: float  # mean of the steps that were taken
    learning_rate: float  # at its end
    seconds: float
    samples_per_s: float
    skipped: int

    def line(self) -> str:
        """For a reader."""
        skipped = f", {self.skipped} steps skipped" if self.skipped else ""
        return f"epoch {self.epoch + 1}: loss {self.loss:.4f}, {self.samples_per_s:,.0f} samples/s{skipped}"


@dataclass(slots=True)
class History:
    """One run: every column has one value a step."""

    batch: int
    steps_per_epoch: int
    loss: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    scale: list[float | None] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    optimiser_s: list[float] = field(default_factory=list)
    data_wait_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    memory_bytes: list[int | None] = field(default_factory=list)
    flops_per_step: float | None = None  # of the model, over all ranks; counted where a peak is known
    peak_flops: float | None = None
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def epochs(self) -> list[Epoch]:
        """A summary of each epoch begun."""
        return [self.epoch(number) for number in range(-(-len(self) // self.steps_per_epoch))]

    def epoch(self, number: int) -> Epoch:
        """A summary of one."""
        part = slice(number * self.steps_per_epoch, (number + 1) * self.steps_per_epoch)
        taken = [loss for loss, skipped in zip(self.loss[part], self.skipped[part], strict=True) if not skipped]
        seconds, count = sum(self.step_s[part]), len(self.loss[part])
        mean = sum(taken) / len(taken) if taken else math.nan
        rate = self.batch * count / seconds if seconds else 0.0
        return Epoch(number, mean, self.learning_rate[part][-1], seconds, rate, sum(self.skipped[part]))

    @property
    def skipped_steps(self) -> int:
        """Steps whose gradients overflowed."""
        return sum(self.skipped)

    @property
    def samples_per_s(self) -> float:
        """Over the whole run."""
        seconds = sum(self.step_s)
        return self.batch * len(self) / seconds if seconds else 0.0

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: FLOPs of the steps over what the machine could have done meanwhile. Ref: Chowdhery 2022."""
        seconds = sum(self.step_s)
        if not (self.flops_per_step and self.peak_flops and seconds):
            return None
        return self.flops_per_step * len(self) / seconds / self.peak_flops

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; values that are not finite are None."""
        columns = {name: [_finite(value) for value in getattr(self, name)] for name in COLUMNS}
        epochs = [{name: _finite(getattr(e, name)) for name in Epoch.__dataclass_fields__} for e in self.epochs]
        facts = {"batch": self.batch, "steps_per_epoch": self.steps_per_epoch, "flops_per_step": self.flops_per_step}
        return {"schema": 1, **facts, "peak_flops": self.peak_flops, "notes": list(self.notes), "columns": columns, "epochs": epochs}

    def load(self, stored: Mapping[str, Any]) -> None:
        """Take up the steps of a checkpoint."""
        for name in COLUMNS:
            values = stored["columns"][name]
            getattr(self, name)[:] = [math.nan if name == "loss" and value is None else value for value in values]
        self.flops_per_step = stored["flops_per_step"]
        self.notes[:0] = stored["notes"]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Clock:
    """Marks in time: CUDA events, which nobody waits for, or readings of the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks; waits for a CUDA event that has not happened yet."""
        if not self.cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


@dataclass(frozen=True, slots=True)
class Passed:
    """One step, as the loop knows it before the device has done it."""

    loss: Tensor
    learning_rate: float
    outcome: Outcome
    marks: Sequence[tuple[Any, Any, Any]]  # of each piece: before forward, after it, after backward
    end: Any  # after the optimiser
    wait_s: float


class Recorder:
    """Gathers steps and moves them into the history when it costs little."""

    def __init__(self, history: History, device: torch.device, watch: Watch) -> None:
        self.history, self.watch, self.clock = history, watch, Clock(device)
        self.pending: list[Passed] = []
        self.flushed_at = time.perf_counter()
        if self.clock.cuda:
            torch.cuda.reset_peak_memory_stats(device)

    def add(self, passed: Passed) -> bool:
        """Keep a step; whether the history was brought up to date."""
        self.pending.append(passed)
        if not self.clock.cuda or len(self.pending) >= INTERVAL or time.perf_counter() - self.flushed_at >= INTERVAL_S:
            self.flush()
            return True
        return False

    def flush(self) -> None:
        """Read everything that is pending; raises where the run cannot go on."""
        if not self.pending:
            return
        steps, history, first = self.pending, self.history, len(self.history)
        self.pending = []
        losses = torch.stack([step.loss for step in steps]).tolist()
        scales = _column([step.outcome.scale for step in steps])
        skipped = [bool(value) for value in _column([step.outcome.skipped for step in steps])]
        memory = torch.cuda.max_memory_allocated(self.clock.device) if self.clock.cuda else None
        history.loss += losses
        history.learning_rate += [step.learning_rate for step in steps]
        history.scale += scales
        history.skipped += skipped
        history.data_wait_s += [step.wait_s for step in steps]
        history.memory_bytes += [memory] * len(steps)
        for step in steps:
            self._times(step)
        now = time.perf_counter()
        history.step_s += [(now - self.flushed_at) / len(steps)] * len(steps)
        self.flushed_at = now
        for offset, (loss, scale, skip) in enumerate(zip(losses, scales, skipped, strict=True)):
            self.watch.see(first + offset, loss, scale, skip)

    def _times(self, step: Passed) -> None:
        between = self.clock.seconds
        self.history.forward_s.append(sum(between(start, middle) for start, middle, _ in step.marks))
        self.history.backward_s.append(sum(between(middle, end) for _, middle, end in step.marks))
        self.history.optimiser_s.append(between(step.marks[-1][2], step.end))


def _column(values: Sequence[Tensor | None]) -> list[float | None]:
    """Numbers of device tensors in one transfer."""
    if values[0] is None:
        return [None] * len(values)
    return [float(value) for value in torch.stack([value for value in values if value is not None]).tolist()]
