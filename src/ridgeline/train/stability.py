"""Would float16 train this model? What its range does to gradients, at which loss scale, and whether bfloat16 is the better choice.

    model, batches ──float32 passes on a copy──> per layer: gradients, gradients of outputs, activations (weights)
      ──spread.py──> Spread: shares that under- and overflow at the scale, histogram of exponents, ‖g − g₁₆‖₂

    best scale = the largest 2^k with max |g| · headroom · 2^k ≤ 65504; rows at that scale ──> verdict, with its numbers
    scales of a run ──> overflow rate, mean, variance, stability = 1 / (1 + variance / mean²)

Without the history of a run, GradScaler's rule is replayed on the largest gradient of each batch. Outputs are those of layers without
children. The forward pass is not scaled: an activation beyond 65504 rules float16 out. Ref: Micikevicius 2018 (loss scaling).
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import DataError, OptionError, TrainError
from ..workload.data import Data
from .evaluate import as_model, device_of
from .feed import batches as feed_batches
from .history import History
from .loss import call_model, cross_entropy
from .options import Scaling
from .seeds import epoch_order, mix
from .spread import LARGEST, Spread, Tally

KINDS = ("gradients", "output_gradients", "activations", "weights")
SCALED = ("gradients", "output_gradients")  # what the loss scale multiplies
FLUSHED_LIMIT = 0.01  # of the weights' gradients lost at the best scale: from here on float16 is not advised
SCALE_EXPONENTS = (-126, 100)  # a power of two beyond these would overflow or vanish itself when it meets a loss in float32


@dataclass(frozen=True, slots=True)
class ScaleHistory:
    """The loss scale of each step and which steps overflowed and were skipped."""

    scales: tuple[float, ...]
    skipped: tuple[bool, ...]

    @property
    def overflow_rate(self) -> float:
        return sum(self.skipped) / len(self.skipped)

    @property
    def mean(self) -> float:
        return sum(self.scales) / len(self.scales)

    @property
    def variance(self) -> float:
        return sum((scale - self.mean) ** 2 for scale in self.scales) / len(self.scales)

    @property
    def stability(self) -> float:
        """1 for a scale that never moves, towards 0 the more it swings."""
        return 1.0 / (1.0 + self.variance / self.mean**2)

    def to_dict(self) -> dict[str, Any]:
        numbers = {name: getattr(self, name) for name in ("overflow_rate", "mean", "variance", "stability")}
        return {"scales": list(self.scales), "skipped": list(self.skipped), **numbers}


def scale_history(scales: Sequence[float | None], skipped: Sequence[bool]) -> ScaleHistory:
    """From what a run recorded, one entry a step: history.scale, history.skipped of fit."""
    given = [scale for scale in scales if scale is not None and math.isfinite(scale) and scale > 0]
    if not given or not len(given) == len(scales) == len(skipped):
        raise TrainError(
            f"a history of {len(scales)} scales and {len(skipped)} skipped steps",
            why="each step has one scale above 0 and one mark",
            do="give the history of a float16 run",
        )
    return ScaleHistory(tuple(map(float, given)), tuple(map(bool, skipped)))


def replay_scaling(largest: Sequence[float], scaling: Scaling) -> ScaleHistory:
    """What GradScaler would have done to steps whose largest gradient elements are `largest`."""
    scale, good, scales, skipped = scaling.initial, 0, [], []
    for value in largest:
        over = not value * scale <= LARGEST  # a NaN is an overflow too
        scales.append(scale)
        skipped.append(over)
        good = 0 if over else good + 1
        if scaling.dynamic and over:
            scale *= scaling.backoff
        elif scaling.dynamic and good == scaling.interval:
            scale, good = scale * scaling.growth, 0
    return scale_history(scales, skipped)


def best_scale(largest: float, headroom: float = 4.0) -> float | None:
    """The largest power of two that keeps `headroom` times the largest element finite in float16; None where there is none."""
    if not headroom >= 1 or not math.isfinite(headroom):
        raise OptionError(f"headroom = {headroom}", why="the largest gradient itself must fit", do="give 1 or more; 4 leaves two doublings")
    room = largest * headroom
    if not math.isfinite(room) or room == 0:
        return None
    power = math.floor(math.log2(LARGEST / room)) if room > 1e-300 else SCALE_EXPONENTS[1]
    power += (math.ldexp(room, power + 1) <= LARGEST) - (math.ldexp(room, power) > LARGEST)  # log2 may be off by a rounding
    low, high = SCALE_EXPONENTS
    return 2.0 ** min(max(power, low), high)


@dataclass(frozen=True, slots=True)
class StabilityReport:
    """Everything the verdict rests on."""

    scale: float
    rows: tuple[Spread, ...]  # at `scale`
    best_scale: float | None
    headroom: float
    best_rows: tuple[Spread, ...]  # at the best scale
    history: ScaleHistory
    replayed: bool  # the history is GradScaler's rule on these batches, not a run
    verdict: str  # float16, bfloat16, float32 (breaks there already) or undecided (no gradient)
    reason: str

    def chosen(self, kind: str, *, best: bool = False) -> list[Spread]:
        """Rows of one kind."""
        return [row for row in (self.best_rows if best else self.rows) if row.kind == kind]

    @property
    def underflow_remains(self) -> int:
        """Elements of the weights' gradients below float16's least number even at the best scale."""
        return sum(row.underflow for row in self.chosen("gradients", best=True))

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready object; numbers that are not finite read null."""
        return {
            "schema": 1, "scale": self.scale, "best_scale": self.best_scale, "headroom": self.headroom,
            "underflow_remains": self.underflow_remains, "verdict": self.verdict, "reason": self.reason,
            "history": self.history.to_dict(), "history_replayed": self.replayed,
            "rows": [row.to_dict() for row in self.rows], "best_rows": [row.to_dict() for row in self.best_rows],
        }  # fmt: skip

    def table(self) -> str:
        """Text for a terminal, one line a layer and kind."""
        wide = max(len("layer"), *(len(row.layer) for row in self.rows))
        kinds = max(len(row.kind) for row in self.rows)
        columns = "underflow  subnormal   overflow  fp16 error  bf16 error"
        head = f"{'layer':{wide}}  {'values':{kinds}}  {'smallest':>9}  {'largest':>9}  {columns}"
        lines = [f"float16 at scale {_power(self.scale)}", head]
        for row in self.rows:
            shares = "  ".join(f"{row.share(count):9.2%}" for count in (row.underflow, row.subnormal, row.overflow))
            errors = f"{row.relative_error:10.3%}  {row.bfloat16_relative_error:10.3%}"
            ends = f"{row.smallest:9.2e}  {row.largest:9.2e}"
            lines.append(f"{row.layer:{wide}}  {row.kind:{kinds}}  {ends}  {shares}  {errors}")
        past = "replayed on these batches" if self.replayed else "of the run"
        lines.append(
            f"scale history {past}: overflow rate {self.history.overflow_rate:.2%}, mean {self.history.mean:.6g}, "
            f"variance {self.history.variance:.6g}, stability {self.history.stability:.4f}"
        )
        if self.best_scale is not None:
            left = f"{self.underflow_remains} gradient elements underflow" if self.underflow_remains else "no gradient element underflows"
            lines.append(f"best scale {_power(self.best_scale)} (headroom {self.headroom:g}): {left} there")
        return "\n".join([*lines, f"verdict: {self.verdict}: {self.reason}"])


def stability_report(
    model: nn.Module,
    data: Data | Iterable[tuple[Tensor, Tensor]],
    loss: Callable[[Any, Tensor], Tensor] | None = None,
    scale: float = 65536.0,
    batches: int = 4,
    *,
    batch: int = 128,
    device: torch.device | str | None = None,
    of: Sequence[str] = ("gradients", "output_gradients", "activations"),
    headroom: float = 4.0,
    history: History | ScaleHistory | None = None,
    seed: int = 0,
) -> StabilityReport:
    """What float16 would do to this model on the first `batches` batches, in training mode; the model is not touched."""
    _check(scale, batches, of)
    place = torch.device(device) if device is not None else device_of(model)
    given = _batches(data, batches, batch, place, seed)
    one = copy.deepcopy(model).to(place).train()
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in one.parameters()):
        one = one.float()  # the reference is what the gradient would be without rounding to 16 bits
    rows, largest = _passes(one, given, loss or cross_entropy, scale, of, seed)
    best = best_scale(max(largest), headroom)
    best_rows = rows if best in (None, scale) else _passes(one, given, loss or cross_entropy, best or scale, of, seed)[0]
    verdict, reason = _verdict(rows, best_rows, best)
    past = scale_history(history.scale, history.skipped) if isinstance(history, History) else history
    past = past or replay_scaling(largest, Scaling(initial=scale))
    return StabilityReport(scale, rows, best, headroom, best_rows, past, history is None, verdict, reason)


def _passes(
    model: nn.Module, given: list[tuple[Tensor, Tensor]], loss: Callable[[Any, Tensor], Tensor], scale: float, of: Sequence[str], seed: int
) -> tuple[tuple[Spread, ...], list[float]]:
    """Rows over all batches, and the largest scaled kind of element of each batch."""
    probe = _Probe(model, scale, of)
    devices = [tensor.device for tensor in given[0] if tensor.is_cuda][:1]
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            torch.manual_seed(mix(seed, 0))  # dropout draws the same at every scale
            largest = [probe.measure(inputs, targets, loss) for inputs, targets in given]
    finally:
        probe.close()
    if "weights" in of:
        probe.weights()
    layers = ["(model)", *(name for name, _ in model.named_modules())]  # the order of the model: hooks on gradients run backwards
    ordered = sorted(probe.tallies.items(), key=lambda item: (KINDS.index(item[0][0]), layers.index(item[0][1])))
    return tuple(tally.read(layer, kind) for (kind, layer), tally in ordered), largest


class _Probe:
    """Hooks on the layers without children, and a tally for each layer and kind."""

    def __init__(self, model: nn.Module, scale: float, of: Sequence[str]) -> None:
        self.model, self.scale, self.of = model, scale, of
        self.tallies: dict[tuple[str, str], Tally] = {}
        self.largest: list[Tensor] = []
        leaves = [(name, module) for name, module in model.named_modules() if next(module.children(), None) is None]
        self.handles = [module.register_forward_hook(self._hook(name or "(model)")) for name, module in leaves]

    def measure(self, inputs: Tensor, targets: Tensor, loss: Callable[[Any, Tensor], Tensor]) -> float:
        """One forward and backward pass; the largest gradient element of weights and outputs."""
        self.model.zero_grad(set_to_none=True)
        self.largest = []
        loss(call_model(self.model, as_model(self.model, inputs)), targets).backward()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self.add("gradients", name.rpartition(".")[0] or "(model)", parameter.grad)
        if not self.largest:
            raise TrainError(
                "no gradient", why="the loss depends on no parameter that is trained", do="unfreeze a layer, or check the loss"
            )
        return float(torch.stack([value.double().cpu() for value in self.largest]).amax())

    def add(self, kind: str, layer: str, values: Tensor) -> None:
        if kind in SCALED and values.numel():
            self.largest.append(values.detach().abs().amax())
        if kind in self.of and values.numel():
            own = self.scale if kind in SCALED else 1.0
            self.tallies.setdefault((kind, layer), Tally(own, values.device)).add(values.detach())

    def weights(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.add("weights", name.rpartition(".")[0] or "(model)", parameter)

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _hook(self, layer: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for value in torch.utils._pytree.tree_leaves(output):
                if isinstance(value, Tensor) and value.is_floating_point():
                    self.add("activations", layer, value)
                    if value.requires_grad:
                        value.register_hook(lambda gradient: self.add("output_gradients", layer, gradient))

        return hook


def _verdict(rows: Sequence[Spread], best_rows: Sequence[Spread], best: float | None) -> tuple[str, str]:
    broken = next((row for row in rows if row.nonfinite), None)
    if broken:
        return "float32", f"{broken.nonfinite} {broken.kind} of {broken.layer} are not finite in float32 already: mend the model first"
    forward = max((row for row in rows if row.kind == "activations"), key=lambda row: row.largest, default=None)
    if forward is not None and forward.overflow:
        return (
            "bfloat16",
            f"activations of {forward.layer} reach {forward.largest:.4g}, float16 ends at 65504 and no loss scale helps there",
        )
    gradients = [row for row in best_rows if row.kind == "gradients"]
    norm = math.hypot(*(row.norm for row in gradients))
    if best is None or not norm:
        return "undecided", "every gradient of the weights is zero"
    lost, there = sum(row.flushed for row in gradients), sum(row.nonzero for row in gradients)
    half, brain = (math.hypot(*errors) / norm for errors in zip(*((row.error, row.bfloat16_error) for row in gradients), strict=True))
    numbers = (
        f"at scale {_power(best)} float16 turns {lost / there:.2%} of the weights' gradients to zero, "
        f"and its error is {half:.3%} of the gradient against {brain:.3%} in bfloat16"
    )
    if lost > FLUSHED_LIMIT * there:
        return "bfloat16", f"{numbers}; more than {FLUSHED_LIMIT:.0%} lost is too many"
    return ("float16", numbers) if half <= brain else ("bfloat16", numbers)


def _batches(
    data: Data | Iterable[tuple[Tensor, Tensor]], count: int, batch: int, device: torch.device, seed: int
) -> list[tuple[Tensor, Tensor]]:
    if isinstance(data, Data):
        rows = len(data.train)
        fed = feed_batches(
            data.train, lambda epoch: epoch_order(rows, seed, epoch), batch=min(batch, rows), steps=count, device=device, mode="blocking",
            augment=data.augment, prepare=data.prepare, seed=seed,
        )  # fmt: skip
        return [(one.inputs, one.targets) for one in fed]
    found = [(inputs.to(device), targets.to(device)) for inputs, targets in itertools.islice(data, count)]
    if not found:
        raise DataError("no batch", why="there is nothing to measure gradients on", do="give data, or (inputs, targets) pairs")
    return found


def _check(scale: float, batches: int, of: Sequence[str]) -> None:
    if not (math.isfinite(scale) and scale > 0) or batches < 1:
        raise OptionError(
            f"scale = {scale}, batches = {batches}", why="both must be above 0, and finite", do="give e.g. scale=65536, batches=4"
        )
    wrong = [kind for kind in of if kind not in KINDS]
    if wrong or "gradients" not in of:
        raise OptionError(f"of = {tuple(of)}", why=f"it is gradients and any of {', '.join(KINDS[1:])}", do="name those to look at")


def _power(scale: float) -> str:
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"
