"""Mixed precision: how much each layer's bits matter, measured, then the best bits under a budget.

    per layer and bit width ──that layer alone quantised, calibration batches──> KL(float model ‖ model) [nats]   sensitivity
    Σ KL least, Σ cost ≤ budget ──exact dynamic programme over undominated (cost, KL)──> bits of each layer
      cost: stored bytes, or seconds of the layer's own kernel measured here; 32 bits: left in float

The sum of single rises predicts the rise of all together only to first order: both stand in the result. States of the programme are
kept exactly up to MOST_STATES; beyond, neighbours in cost are merged and the answer says that it may not be the best.
Ref: Dong 2019 (HAWQ) for the split into sensitivity and budget, Kellerer 2004 ch. 11 for the multiple-choice knapsack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ...core.errors import TransformError
from ...core.timing import time_callable
from ...train.evaluate import logits_of
from .fold import fold_norms_, put
from .grid import quantise, sqnr_db
from .int8_layers import Activation, Int8Layer
from .observe import Method
from .packed import PackedConv2d, PackedLinear
from .static import Batch, LayerRow, calibrate, candidates, converted, entries_of, fold_notes, link_, watching, weight_grid

FLOAT = 32
MOST_STATES = 200_000
LINK_BYTES = 5  # a float32 scale and a uint8 zero
Make = Callable[[str, Any, int], nn.Module]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which option each layer takes; `exact` False where states had to be merged."""

    options: tuple[int, ...]
    cost: float
    loss: float
    exact: bool


def choose(costs: Sequence[Sequence[float]], losses: Sequence[Sequence[float]], budget: float) -> Choice:
    """One option a layer: least total loss with total cost at most `budget`."""
    rest = numpy.cumsum([0.0, *(min(row) for row in reversed(costs))])[::-1]  # rest[i]: the least that layers i.. cost
    if rest[0] > budget:
        raise TransformError(f"a budget of {budget:g}", why=f"even the cheapest choice costs {rest[0]:g}", do="raise the budget")
    cost, loss, exact = numpy.zeros(1), numpy.zeros(1), True
    trail: list[tuple[Any, Any]] = []
    for layer, (own_costs, own_losses) in enumerate(zip(costs, losses, strict=True)):
        options = len(own_costs)
        all_costs = (cost[:, None] + numpy.asarray(own_costs, float)).ravel()
        all_losses = (loss[:, None] + numpy.asarray(own_losses, float)).ravel()
        # a sum of seconds in another order may differ in its last bit
        fits = numpy.flatnonzero(all_costs <= (budget - rest[layer + 1]) * (1 + 1e-12))
        order = fits[numpy.lexsort((all_losses[fits], all_costs[fits]))]
        least = numpy.minimum.accumulate(all_losses[order])
        kept = order[numpy.concatenate(([True], all_losses[order][1:] < least[:-1]))]  # cheaper than all that lose less
        if len(kept) > MOST_STATES:
            kept, exact = _thinned(kept, all_costs, all_losses), False
        cost, loss = all_costs[kept], all_losses[kept]
        trail.append((kept // options, kept % options))
    at = int(loss.argmin())
    best = Choice((), float(cost[at]), float(loss[at]), exact)
    chosen = []
    for before, option in reversed(trail):
        chosen.append(int(option[at]))
        at = int(before[at])
    return Choice(tuple(reversed(chosen)), best.cost, best.loss, exact)


def _thinned(kept: Any, costs: Any, losses: Any) -> Any:
    """At most MOST_STATES: of each narrow band of cost the state that loses least, its real cost kept."""
    span = costs[kept].max() - costs[kept].min()
    band = ((costs[kept] - costs[kept].min()) / span * (MOST_STATES - 1)).astype(int)
    last = numpy.concatenate((band[1:] != band[:-1], [True]))  # losses fall along `kept`: the last of a band is its best
    return kept[last]


@torch.no_grad()
def answers(model: nn.Module, batches: Sequence[Batch]) -> list[Tensor]:
    """Log-probabilities of each batch, float32."""
    return [logits_of(model(*batch)).float().log_softmax(-1) for batch in batches]


@torch.no_grad()
def divergence(model: nn.Module, batches: Sequence[Batch], wanted: Sequence[Tensor]) -> float:
    """Mean KL(wanted ‖ model) a row of logits [nats]."""
    total = count = torch.zeros((), dtype=torch.float64)
    for batch, reference in zip(batches, wanted, strict=True):
        ours = logits_of(model(*batch)).float().log_softmax(-1)
        rows = (reference.exp() * (reference - ours)).sum(-1).double().cpu()
        total, count = total + rows.sum(), count + rows.numel()
    return float(total / count)


def sensitivities(
    model: nn.Module, layers: Mapping[str, nn.Module], choices: Sequence[int], make: Make, batches: Sequence[Batch]
) -> dict[str, list[float]]:
    """For each layer, the KL rise at each of `choices` with every other layer left alone; never below 0."""
    wanted, found = answers(model, batches), {}
    for name, module in layers.items():
        row = []
        for bits in choices:
            if bits == FLOAT:
                row.append(0.0)
                continue
            changed = make(name, module, bits)
            put(model, name, changed)
            row.append(max(0.0, divergence(model, batches, wanted)))
            put(model, name, module)
        found[name] = row
    return found


def _bytes(layer: Any) -> int:
    """Stored bytes of a layer, with those of an output grid in case it is linked."""
    stored: int = sum(tensor.nbytes for tensor in layer.state_dict().values())
    return stored + (LINK_BYTES if isinstance(layer, Int8Layer) else 0)


@torch.no_grad()
def layer_seconds(
    model: nn.Module, layers: Mapping[str, nn.Module], choices: Sequence[int], make: Make, batch: Batch
) -> dict[str, list[float]]:
    """Median time of each layer on the inputs that `batch` brings it, at each of `choices`. Widths up to 8 bits share one kernel."""
    seen: dict[str, Tensor] = {}

    def keep(name: str, x: Tensor) -> None:
        seen.setdefault(name, x.detach().clone())

    with watching(layers, keep):
        model(*batch)
    times = {}
    for name, module in layers.items():
        x = seen[name]

        def seconds(layer: nn.Module, x: Tensor = x) -> float:
            return time_callable(lambda: layer(x), device=x.device.type, max_repeats=30, budget_s=0.2).median_s

        whole = seconds(module)
        narrow = seconds(make(name, module, 8)) if any(bits != FLOAT for bits in choices) else whole
        times[name] = [whole if bits == FLOAT else narrow for bits in choices]
    return times


@dataclass(frozen=True, slots=True)
class Mixed:
    """What was measured, chosen and found afterwards."""

    rows: list[LayerRow]
    bits: dict[str, int]
    table: list[dict[str, Any]]  # a row a layer: sensitivity and cost at each width
    predicted_kl: float
    measured_kl: float
    cost: float
    budget: float
    unit: str
    notes: list[str]


@torch.no_grad()
def quantise_mixed_(
    model: nn.Module, batches: Sequence[Batch], *, choices: Sequence[int] = (2, 3, 4, 5, 6, 8), budget_bits: float | None = None,
    budget_bytes: int | None = None, budget_latency_s: float | None = None, activations: bool = True, method: Method = "mse",
    percentile: float = 99.99, skip: Sequence[str] = (), pairs: Sequence[tuple[str, str]] | None = None, timed: Batch | None = None,
    report: Callable[[str], None] = lambda message: None,
) -> Mixed:  # fmt: skip
    """Measure, choose and replace in place. One budget: mean bits a weight, bytes of all layers' tensors, or seconds of all layers
    on the inputs that `timed` brings them."""
    model.eval()
    folded = fold_norms_(model, pairs)
    layers, notes = candidates(model, skip)
    notes += fold_notes(model, folded, pairs)
    make = _maker(model, layers, batches, activations, method, percentile)
    report(f"measuring {len(layers)} layers at {len(choices)} widths")
    rises = sensitivities(model, layers, choices, make, batches)
    if budget_latency_s is not None:
        costs, budget, unit = layer_seconds(model, layers, choices, make, timed or batches[0]), budget_latency_s, "s"
    elif budget_bits is not None:
        counts = {name: _weight(module).numel() for name, module in layers.items()}
        costs = {name: [float(count * bits) for bits in choices] for name, count in counts.items()}
        budget, unit = budget_bits * sum(counts.values()), "bit"
    elif budget_bytes is not None:
        costs = {
            name: [_bytes(module if bits == FLOAT else make(name, module, bits)) for bits in choices] for name, module in layers.items()
        }
        budget, unit = float(budget_bytes), "B"
    else:
        raise TransformError("mixed precision without a budget", why="it trades quality against one", do="give budget_bits=4, say")
    best = choose(list(costs.values()), [rises[name] for name in costs], budget)
    bits = {name: choices[option] for name, option in zip(costs, best.options, strict=True)}
    wanted = answers(model, batches)
    rows = _replace(model, layers, bits, make)
    linked = link_(model)
    if not best.exact:
        notes.append("too many states to keep all: the choice may not be the best")
    notes.append(f"{len(folded)} batch norms folded, {len(linked)} of {len(rows)} layers hand on codes")
    table = [{"layer": name, "choices": list(choices), "kl": rises[name], "cost": list(costs[name]), "bits": bits[name]} for name in costs]
    return Mixed(rows, bits, table, best.loss, divergence(model, batches, wanted), best.cost, budget, unit, notes)


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight
    return weight


def _maker(
    model: nn.Module, layers: Mapping[str, nn.Module], batches: Sequence[Batch], activations: bool, method: Method, percentile: float
) -> Make:
    """What makes a layer of so many bits: in integers with calibrated inputs, or packed with float inputs."""
    if activations:
        entries = entries_of(calibrate(model, layers, batches), method, percentile)
        return lambda name, module, bits: converted(name, module, bits, entries[name])[0]

    def packed(name: str, module: Any, bits: int) -> nn.Module:
        quantised = quantise(module.weight.detach().float(), weight_grid(bits), name)
        if isinstance(module, nn.Conv2d):
            return PackedConv2d.from_quantised(quantised, module, module.bias)
        return PackedLinear.from_quantised(quantised, module.bias)

    return packed


def _replace(model: nn.Module, layers: Mapping[str, nn.Module], bits: Mapping[str, int], make: Make) -> list[LayerRow]:
    rows = []
    for name, module in layers.items():
        if bits[name] == FLOAT:
            continue
        layer: Any = make(name, module, bits[name])
        put(model, name, layer)
        sqnr = sqnr_db(_weight(module).detach(), layer.dequantised())
        entry: Activation | None = getattr(layer, "entry", None)
        low, high = (entry.low, entry.high) if entry is not None else (None, None)
        rows.append(LayerRow(name, bits[name], sqnr, layer.packed_bytes(), low, high))
    return rows
