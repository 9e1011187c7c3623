"""One optimiser step after another.

    Batch (this rank's rows) ──cut into `accumulate` pieces──> forward, loss · rows / batch ──backward──> gradients
      ──sum over ranks──> unscale, clip ──> step or skip ──> after_step ──> history ──> checkpoint now and then

The mean over a batch is exact however it is cut: every piece weighs as much as its share of the rows, or, where targets are
ignored (-100), as its share of the targets that count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import TrainError
from ..workload.data import Data
from . import checkpoint as store
from .average import Average
from .checkpoint import Snapshot
from .feed import Batch
from .flops import FlopCount
from .graphed import GraphedPasses
from .heads import Head, Loss
from .history import Passed, Recorder
from .identity import fingerprint, rest_fingerprint, told
from .loss import IGNORE, call_model, counted
from .optimiser import Schedule, factor, set_rate
from .options import TrainSettings
from .parallel import GradientSum, World, average_buffers, share_number
from .precision import Precision, bad_loss
from .seeds import seed_step

Objective = Callable[[nn.Module, Tensor, Tensor], Tensor]
AfterStep = Callable[[nn.Module, int], object]


@dataclass(slots=True)
class Loop:
    """A run with everything it needs; `step` is called once a batch."""

    model: nn.Module
    called: nn.Module  # the model, or what torch.compile made of it
    data: Data
    settings: TrainSettings
    total: int  # steps
    batch: int
    loss: Loss
    objective: Objective | None
    schedule: Schedule | None
    optimiser: torch.optim.Optimizer
    names: Mapping[nn.Parameter, str]  # of every trained parameter
    precision: Precision
    recorder: Recorder
    world: World
    device: torch.device
    still: Sequence[nn.Module] = ()  # norms kept in evaluation mode
    average: Average | None = None  # of the weights
    identity: Mapping[str, Any] = field(default_factory=dict)  # see describe
    counting: bool = field(init=False)  # whether pieces weigh by targets that count, not by rows
    trained: list[nn.Parameter] = field(init=False)
    sum_gradients: GradientSum = field(init=False)
    count: FlopCount | None = field(init=False, default=None)  # in the first step only
    graphed: GraphedPasses | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.trained = list(self.names)
        self.sum_gradients = GradientSum(self.trained, self.world)
        pieces, targets = self.settings.accumulate * self.world.size, self.data.train.targets
        if self.settings.graph:
            self.graphed = GraphedPasses(self._both, self._forget_gradients, self.device)
        self.counting = pieces > 1 and not targets.is_floating_point() and bool((targets == IGNORE).any())

    def step(self, batch: Batch) -> Passed:
        """Train on one batch."""
        if batch.step == 0 and self.recorder.history.peak_flops:
            self.count = FlopCount(self.settings.checkpoint_activations)
        seed_step(self.settings.seed, batch.step, self.world.rank, self.device)
        for norm in self.still:
            norm.eval()
        rate = set_rate(self.optimiser, factor(self.settings, batch.step, self.total, self.schedule))
        if self.graphed is None or not self.graphed.captured:
            self._forget_gradients()
        marks, numbers = [], []
        for inputs, targets in self._pieces(batch):
            times, number = self._passes(inputs, targets)
            marks.append(times)
            numbers.append(number)
            if len(numbers) == 1 and self.settings.compile and self.settings.accumulate > 1:
                self._own_gradients()
        summed = self.sum_gradients(torch.stack(numbers).sum(0) if len(numbers) > 1 else numbers[0])
        loss = self._normalise(summed)
        if self.device.type == "cpu" and self.precision.scaler is None and not math.isfinite(value := float(loss)):
            raise bad_loss(batch.step, value)  # nothing to wait for on the CPU: stop before the weights are lost
        outcome = self.precision.step(self.optimiser, self.trained)
        if self.count:
            self.recorder.history.flops_per_step = self.count.total * self.batch / len(batch.targets)
            self.count = None
        return Passed(loss, rate, outcome, marks, self.recorder.clock.mark(), batch.wait_s)

    def _forget_gradients(self) -> None:
        self.optimiser.zero_grad(set_to_none=True)

    def _own_gradients(self) -> None:
        """Move gradients out of a compiled graph's memory, which the next piece's replay will write over."""
        for parameter in self.trained:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def _pieces(self, batch: Batch) -> Iterable[tuple[Tensor, Tensor]]:
        rows, pieces = len(batch.targets), min(self.settings.accumulate, len(batch.targets))
        for index in range(pieces):
            part = slice(index * rows // pieces, (index + 1) * rows // pieces)
            yield batch.inputs[part], batch.targets[part]

    def _passes(self, inputs: Tensor, targets: Tensor) -> tuple[tuple[Any, Any, Any], Tensor]:
        """Forward and backward of one piece; its marks, and (loss, counted targets) weighted by its share of the batch."""
        clock, count = self.recorder.clock, self.count
        start = clock.mark()
        if self.graphed is not None and count is None:
            number = self.graphed(inputs, targets).reshape(1)
            end = clock.mark()
            return (start, end, end), number  # one graph: its time counts as forward
        with count.in_forward() if count else nullcontext(), self.precision.autocast():
            loss = self._loss(inputs, targets)
            told = []
            if self.counting:
                share = counted(targets).to(loss.dtype) / (self.batch * targets[0].numel())
                loss = loss * share
                told = [share]
            elif len(targets) != self.batch:
                loss = loss * (len(targets) / self.batch)
        middle = clock.mark()
        with count.in_backward() if count else nullcontext():
            self.precision.scale(loss).backward()
        return (start, middle, clock.mark()), torch.stack([loss.detach(), *told])

    def _both(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """What a graph holds: both passes of a whole batch."""
        with self.precision.autocast():
            loss = self._loss(inputs, targets)
        self.precision.scale(loss).backward()
        return loss.detach()

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.settings.compile:
            torch.compiler.cudagraph_mark_step_begin()
        # counted in eager mode: torch.compile does not run under the counter
        model = self.model if self.count else self.called
        loss = self.loss(call_model(model, inputs), targets) if self.objective is None else self.objective(model, inputs, targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            given = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TrainError(
                f"the loss is {given}" + (" without a gradient" if isinstance(loss, Tensor) and not loss.requires_grad else ""),
                why="backward starts from one number that depends on the parameters",
                do="return a mean over the batch, computed by torch from the model's outputs",
            )
        return loss.reshape(()) if loss.dtype in (torch.float32, torch.float64) else loss.reshape(()).float()

    def _normalise(self, summed: Tensor) -> Tensor:
        """The batch's loss; with ignored targets the gradients become means over those that count."""
        if not self.counting:
            return summed[0]
        back = 1.0 / summed[1].clamp(min=1e-12)
        gradients = [parameter.grad for parameter in self.trained if parameter.grad is not None]
        torch._foreach_mul_(gradients, back)
        return summed[0] * back

    def describe(self, loss: object, heads: Mapping[str, float | Head] | None) -> dict[str, Any]:
        """What a checkpoint must agree with: settings, the model's and the data's layout, the optimiser and the loss."""
        split = self.data.train
        layout = {name: f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" for name, value in self.model.state_dict().items()}
        data = {
            "name": self.data.name,
            "inputs": list(split.inputs.shape),
            "crc32": [fingerprint(split.inputs), fingerprint(split.targets)],
        }
        weights = {name: head.weight if isinstance(head, Head) else float(head) for name, head in (heads or {}).items()}
        functions = {"loss": _called(loss), "heads": weights, "objective": _called(self.objective), "schedule": _called(self.schedule)}
        optimiser = type(self.optimiser).__name__
        known = {"settings": self.settings.deciding(), "model": layout, "data": data, "optimiser_class": optimiser, **functions}
        augment = self.data.augment if self.settings.augment else None
        told_of = {"loss": loss, "heads": heads, "objective": self.objective, "schedule": self.schedule, "prepare": self.data.prepare}
        return {
            **known,
            "data_rest": [rest_fingerprint(split.inputs), rest_fingerprint(split.targets)],
            "trained": {name: True for name in self.names.values()},
            "optimiser_groups": store.group_numbers(self.optimiser) if self.settings.optimiser == "custom" else [],
            "functions": {name: told(thing) for name, thing in {**told_of, "augment": augment}.items()},
        }

    def snapshot(self) -> Snapshot:
        """Everything that changes while training."""
        tensors, facts = store.pack_optimiser(self.optimiser, self.names)
        tensors |= {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {name: parameter.detach() for parameter, name in self.names.items() if name.startswith("objective.")}
        tensors |= self.average.tensors() if self.average else {}
        history = self.recorder.history.to_json()
        return Snapshot(
            len(self.recorder.history), tensors, {**self.identity, "scaler": self.precision.state(), "optimiser": facts, "history": history}
        )

    def save(self, folder: Path) -> None:
        """Write a checkpoint; only rank 0 does, after all ranks agreed on running statistics."""
        self.recorder.flush()
        average_buffers(self.model, self.world)
        if self.world.leads:
            store.save(folder, self.snapshot())

    def restore(self, folder: Path, say: Callable[[str], None]) -> None:
        """Take up the newest whole checkpoint, if there is one; all ranks read the one rank 0 chose."""
        chosen = store.newest(folder, say) if self.world.leads else None
        step = share_number(chosen.step if chosen else -1, self.world, self.device)
        if step >= 0 and chosen is None:
            chosen = store.newest(folder, say, at=step)
        if chosen is None:
            return
        here = {name: value for name, value in self.identity.items() if name in chosen.facts}  # an older version wrote less
        store.check_same({name: chosen.facts[name] for name in here}, here, folder)
        own = {name.removeprefix("model."): value for name, value in chosen.tensors.items() if name.startswith("model.")}
        self.model.load_state_dict(own)
        with torch.no_grad():
            for parameter, name in self.names.items():
                if name.startswith("objective."):
                    parameter.copy_(chosen.tensors[name])
        store.unpack_optimiser(self.optimiser, self.names, chosen.tensors, chosen.facts["optimiser"])
        if self.average:
            self.average.load(chosen.tensors)
        self.precision.load(chosen.facts["scaler"])
        self.recorder.history.load(chosen.facts["history"])
        say(f"resumed from step {chosen.step} of {folder}")


def _called(function: object) -> str | None:
    if isinstance(function, Mapping):
        return ", ".join(f"{name}: {_called(part)}" for name, part in function.items())
    return None if function is None else str(getattr(function, "__qualname__", type(function).__qualname__))
