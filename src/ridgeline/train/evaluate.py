"""One scorer for everyone: how well a model does on a data set, and how far it is from a reference.

    inputs ──data.prepare──> model (eval mode, no gradient) ──> logits [B,C] or [B,T,V]
      ──float64, a few MB at a time──> Σ nll, Σ correct, Σ KL, count     [nats, targets]; read back once, at the end

    loss = Σ nll / count          perplexity = exp(loss)          perplexity_per_byte = exp(Σ nll / bytes of the text)
    accuracy = correct / count    KL(reference ‖ model) = Σ p (log p − log q), mean a target

Targets equal to IGNORE (-100) are not counted. Sums do not depend on the batch size, the last batch may be a part. The model's own
dtype is used: images are cast to that of its first floating-point parameter. Rows whose logits are not finite count as wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.checks import expect
from ..core.errors import DataError, OptionError
from ..workload.data import Data, Split, unchanged
from .loss import IGNORE, call_model

CHUNK_BYTES = 64 * 2**20  # of float64 logits at a time: a vocabulary of 50,000 times 1,024 tokens would be 400 MB


@dataclass(frozen=True, slots=True)
class Scores:
    """Sums over every target that counts; the means are what users read."""

    count: int  # targets scored: samples, or tokens
    correct: int
    nll_sum: float  # nats
    text_bytes: int | None = None  # of the text behind the targets, where all of it was scored
    kl_sum: float | None = None  # nats, where there was a reference

    @property
    def accuracy(self) -> float:
        return self.correct / self.count

    @property
    def loss(self) -> float:
        """Mean negative log likelihood [nats]."""
        return self.nll_sum / self.count

    @property
    def perplexity(self) -> float:
        """Per target: exp(loss)."""
        return _exp(self.loss)

    @property
    def perplexity_per_byte(self) -> float | None:
        """The same with the text's bytes as the unit, so that tokenizers compare; None without a text, or where a limit cut it."""
        return _exp(self.nll_sum / self.text_bytes) if self.text_bytes else None

    @property
    def kl(self) -> float | None:
        """Mean KL(reference ‖ model) a target [nats]; None without a reference."""
        return None if self.kl_sum is None else self.kl_sum / self.count

    def to_dict(self) -> dict[str, float]:
        """The scores that exist, by name."""
        found = {name: getattr(self, name) for name in ("accuracy", "loss", "perplexity", "perplexity_per_byte", "kl", "count")}
        return {name: value for name, value in found.items() if value is not None}


def evaluate(
    model: nn.Module,
    data: Data | Split,
    *,
    batch: int = 256,
    device: torch.device | str | None = None,
    reference: nn.Module | None = None,
    limit: int | None = None,
    head: str | int | None = None,
) -> Scores:
    """Scores on the test split (or the split given), its first `limit` rows; `head` names one of several outputs.

    `device`: where to run, None for where the model is; a model that had to be moved is moved back.
    """
    split, prepare = (data.test, data.prepare) if isinstance(data, Data) else (data, unchanged)
    expect("data", split, Data, Split, do="give what load_data gives, or a Split of inputs and targets")
    rows = _rows(split, batch, limit)
    place = torch.device(device) if device is not None else device_of(model)
    models = [model] if reference is None else [model, reference]
    sums, highest = _Sums(place), _highest(split.targets[:rows])
    with scoring(models, place):
        for start in range(0, rows, batch):
            part = slice(start, min(start + batch, rows))
            inputs, targets = prepare(split.inputs[part].to(place)), split.targets[part].to(place)
            logits = [logits_of(call_model(one, as_model(one, inputs)), head) for one in models]
            _check(logits, targets, highest)
            sums.add(logits, targets)
    return sums.read(split.text_bytes if rows == len(split) else None, reference is not None)


class _Sums:
    """Running sums on the device: float64 and int64, so that they are exact and nothing waits for the host."""

    def __init__(self, device: torch.device) -> None:
        # float64 does not exist on Apple's GPUs; there the sums live on the CPU.
        self.device = device if device.type != "mps" else torch.device("cpu")
        self.nll, self.kl = (torch.zeros((), dtype=torch.float64, device=self.device) for _ in range(2))
        self.count, self.correct = (torch.zeros((), dtype=torch.int64, device=self.device) for _ in range(2))

    def add(self, logits: list[Tensor], targets: Tensor) -> None:
        width = logits[0].shape[-1]
        flat, wanted = [one.reshape(-1, width) for one in logits], targets.reshape(-1)  # [N,V], [N]
        step = max(1, CHUNK_BYTES // (8 * width))
        for start in range(0, len(wanted), step):
            self._add([one[start : start + step].to(self.device) for one in flat], wanted[start : start + step].to(self.device))

    def _add(self, logits: list[Tensor], targets: Tensor) -> None:
        counts = targets != IGNORE
        logs = [one.double().log_softmax(-1) for one in logits]  # [n,V]
        safe = targets.clamp_min(0)  # an ignored target reads column 0 and is masked below
        own = logs[0].gather(-1, safe[:, None]).squeeze(-1)  # [n]
        right = (logits[0].argmax(-1) == safe) & ~own.isnan()
        self.nll += torch.where(counts, -own, 0.0).sum()
        self.correct += (right & counts).sum()
        self.count += counts.sum()
        if len(logs) == 2:
            ours, theirs = logs
            chance = theirs.exp()
            terms = torch.where(chance == 0, 0.0, chance * (theirs - ours))  # 0 · log 0 = 0
            self.kl += torch.where(counts, terms.sum(-1), 0.0).sum()

    def read(self, text_bytes: int | None, with_reference: bool) -> Scores:
        count = int(self.count)
        if count == 0:
            raise DataError("no target to score", why=f"every one is {IGNORE}, which means ignore", do="give targets that count")
        return Scores(count, int(self.correct), float(self.nll), text_bytes, float(self.kl) if with_reference else None)


@contextmanager
def scoring(models: list[nn.Module], device: torch.device) -> Iterator[None]:
    """Inside: eval mode, no gradients, on `device`. After: every module's own mode and the models' devices as they were."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    homes = [device_of(model) for model in models]
    try:
        for module, _ in modes:
            module.training = False  # not .eval(): exported modules refuse it, and frozen parts must come back as they were
        for model, home in zip(models, homes, strict=True):
            if home != device:
                model.to(device)
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for model, home in zip(models, homes, strict=True):
            if home != device:
                model.to(home)


def device_of(model: nn.Module) -> torch.device:
    """Where its first parameter or buffer is."""
    expect("model", model, nn.Module, do="give a torch.nn.Module")
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    return first.device if first is not None else torch.device("cpu")


def as_model(model: nn.Module, inputs: Tensor) -> Tensor:
    """Floating-point inputs in the dtype of the model's first floating-point parameter; others as they are."""
    if not inputs.is_floating_point():
        return inputs
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    return inputs if first is None else inputs.to(first.dtype)


def logits_of(outputs: Any, head: str | int | None = None) -> Tensor:
    """The tensor to score: the output, its `logits`, or of several outputs the one called `head`."""
    if head is not None and isinstance(outputs, Mapping | tuple | list):
        try:
            outputs = outputs[head]  # type: ignore[index]
        except (KeyError, IndexError, TypeError) as problem:
            known = list(outputs) if isinstance(outputs, Mapping) else list(range(len(outputs)))
            raise OptionError(f"head = {head!r}", why=f"the model's outputs are {known}", do="name one of them") from problem
    if isinstance(outputs, Mapping) and "logits" in outputs:
        outputs = outputs["logits"]
    found = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if not isinstance(found, Tensor):
        raise OptionError(
            f"a model that returns {type(outputs).__name__}",
            why="one tensor of logits is scored at a time",
            do="name the output with head=, or wrap the model so that it returns logits",
        )
    return found


def _rows(split: Split, batch: int, limit: int | None) -> int:
    if batch < 1 or (limit is not None and limit < 1):
        raise OptionError(f"batch = {batch}, limit = {limit}", why="at least one row is scored at a time", do="give numbers of at least 1")
    if not len(split) or len(split.inputs) != len(split):
        raise DataError(
            f"{len(split.inputs)} inputs and {len(split)} targets",
            why="there must be a target for every input, and at least one",
            do="check the split",
        )
    return len(split) if limit is None else min(limit, len(split))


def _highest(targets: Tensor) -> int:
    if targets.is_floating_point() or targets.is_complex():
        raise DataError(
            f"targets of {targets.dtype}", why="a target is the number of a class", do="give int64 class numbers, or score by hand"
        )
    if bool(((targets < 0) & (targets != IGNORE)).any()):
        raise DataError(
            f"target {int(targets[targets != IGNORE].min())}",
            why=f"a target is a class from 0 on, or {IGNORE} to be ignored",
            do="check the targets",
        )
    return int(targets.max())


def _check(logits: list[Tensor], targets: Tensor, highest: int) -> None:
    shapes = [list(one.shape) for one in logits]
    if shapes[0][:-1] != list(targets.shape) or shapes[0] != shapes[-1]:
        raise DataError(
            f"logits {' and '.join(map(str, shapes))} for targets {list(targets.shape)}",
            why="each target needs one row of logits, from the model and the reference alike",
            do="score [B,C] against [B], or [B,T,V] against [B,T]",
        )
    if highest >= shapes[0][-1]:
        raise DataError(
            f"target {highest} with {shapes[0][-1]} logits",
            why="there is no logit for it",
            do="use a model with as many classes as the data",
        )


def _exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf if value == value else value  # exp overflows a float at 709.8
