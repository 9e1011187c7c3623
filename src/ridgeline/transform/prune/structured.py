"""Channels removed to a budget, and the removal proved.

    find_sets ──scores──> one list of channels, worst first ──bisection──> shortest head of it whose removal meets the budget
      cost(model) = Σ_layers cost · (outputs kept / outputs) · (inputs kept / inputs)      flops, or parameters
    ──remove──> smaller layers ──checked──> counted FLOPs ≤ budget, output shapes as before, and the same function as the
      original with those channels' readers set to zero (on the example inputs, eval mode)

scope "global" ranks all channels together; "layer" takes the same share of every set. Widths are rounded up to `round_to`, and
no set loses more than `most` of its channels. The budget is met or refused with the smallest ratio that can be reached.
FLOPs are counted by torch.utils.flop_counter (2 per multiply-add).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from ...core.errors import OptionError, TransformError
from .channels import CONV, NORM, ChannelSet, Found, Importance, channel_scores, find_sets, remove

if TYPE_CHECKING:
    from ...workload.data import Data

Budget = Literal["flops", "parameters"]
ROUNDS = 6  # of tightening where the count by layers and the count by operations differ


@dataclass(frozen=True, slots=True)
class Removed:
    """What was taken out, with the counts before and after."""

    widths: Mapping[str, tuple[int, int]]  # root layer → channels before, after
    flops: tuple[int, int]
    parameters: tuple[int, int]
    left: tuple[str, ...]  # sets that could not be pruned, and why

    def rows(self) -> list[dict[str, Any]]:
        return [{"layer": name, "before": before, "after": after} for name, (before, after) in self.widths.items()]


def prune_channels(
    model: nn.Module,
    inputs: tuple[Any, ...],
    ratio: float,
    *,
    budget: Budget = "flops",
    importance: Importance = "l2",
    scope: Literal["global", "layer"] = "global",
    data: Data | None = None,
    skip: Sequence[str] = (),
    round_to: int = 1,
    most: float = 0.9,
    seed: int = 0,
) -> Removed:
    """Shrink `model` in place until its flops or parameters are at most `ratio` of what they were."""
    if not (0.0 < ratio < 1.0 and 0.0 < most < 1.0 and round_to >= 1):
        raise OptionError(
            f"ratio {ratio}, most {most}, round_to {round_to}",
            why="ratio and most lie between 0 and 1, round_to is at least 1",
            do="give e.g. 0.5",
        )
    found = find_sets(model, inputs, skip)
    if not found.sets:
        raise TransformError(
            "no channel can be removed", why="; ".join(found.left[:5]) or "the model has no layer with channels", do="prune by magnitude"
        )
    order = _order(found.sets, channel_scores(model, found.sets, importance, data=data, seed=seed), scope)
    flops, parameters = count_flops(model, inputs), sum(p.numel() for p in model.parameters())
    goal = ratio * (flops if budget == "flops" else parameters)
    cost = _layer_cost(model, inputs, found.sets, budget)
    original, tightened = copy.deepcopy(model), goal
    for _ in range(ROUNDS):
        gone = _choose(found.sets, order, cost, tightened, goal, round_to, most)
        trial = copy.deepcopy(original)
        remove(trial, inputs, gone)
        reached = count_flops(trial, inputs) if budget == "flops" else sum(p.numel() for p in trial.parameters())
        if reached <= goal:
            break
        tightened *= 0.999 * goal / reached
    else:
        raise TransformError(
            f"{budget} stay above {ratio:.0%}", why=f"{reached:,} of {goal:,.0f} after {ROUNDS} rounds", do="report this model"
        )
    check_same(original, trial, inputs, found, gone)
    remove(model, inputs, gone)
    widths = {each.root: (each.width, each.width - len(gone[each.root])) for each in found.sets}
    after = (count_flops(model, inputs), sum(p.numel() for p in model.parameters()))
    return Removed(widths, (flops, after[0]), (parameters, after[1]), found.left)


def count_flops(model: nn.Module, inputs: tuple[Any, ...]) -> int:
    """FLOPs of one forward pass."""
    return int(_counter(model, inputs).get_total_flops())


def _counter(model: nn.Module, inputs: tuple[Any, ...]) -> FlopCounterMode:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(*inputs)
    for module, training in modes.items():
        module.training = training
    return counter


def _order(sets: Sequence[ChannelSet], scores: Sequence[Tensor], scope: str) -> list[tuple[int, int]]:
    """(set, channel), the first to go first; ties by set, then channel."""
    ranked = [values.argsort(stable=True).tolist() for values in scores]
    keys: list[tuple[float, int, int]] = []
    for place, (each, values) in enumerate(zip(sets, scores, strict=True)):
        for rank, channel in enumerate(ranked[place]):
            key = float(values[channel]) if scope == "global" else (rank + 1) / each.width
            keys.append((key, place, channel))
    return [(place, channel) for _, place, channel in sorted(keys, key=lambda entry: entry[:2])]


Cost = Callable[[Sequence[int]], float]


def _layer_cost(model: nn.Module, inputs: tuple[Any, ...], sets: Sequence[ChannelSet], budget: Budget) -> Cost:
    """A function of how many channels each set loses → the model's cost, from the cost of each layer now."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, (*CONV, *NORM, nn.Linear))}
    if budget == "flops":
        counts = _counter(model, inputs).get_flop_counts()
        prefix = type(model).__name__
        base = {name: float(sum(counts.get(f"{prefix}.{name}" if name else prefix, {}).values())) for name in layers}
        total = float(count_flops(model, inputs))
    else:
        base = {name: float(sum(p.numel() for p in module.parameters(recurse=False))) for name, module in layers.items()}
        total = float(sum(p.numel() for p in model.parameters()))
    fixed = total - sum(base.values())
    touched: dict[str, dict[str, list[tuple[int, float]]]] = {name: {"out": [], "in": []} for name in layers}
    for place, each in enumerate(sets):
        for member in each.members:
            layer = layers[member.layer]
            # a depthwise convolution or a norm has one width; its two sides are the same channels
            side = "out" if isinstance(layer, NORM) or getattr(layer, "groups", 1) > 1 else member.side
            if not any(known == place for known, _ in touched[member.layer][side]):
                touched[member.layer][side].append((place, len(member.places) / each.width / _width(layer, side)))

    def cost(lost: Sequence[int]) -> float:
        value = fixed
        for name, sides in touched.items():
            share = math.prod(1.0 - sum(each * lost[place] for place, each in pairs) for pairs in sides.values())
            value += base[name] * share
        return value

    return cost


def _width(layer: Any, side: str) -> int:
    if isinstance(layer, NORM):
        return int(layer.num_features)
    names = ("out_channels", "in_channels") if isinstance(layer, CONV) else ("out_features", "in_features")
    return int(getattr(layer, names[0] if side == "out" else names[1]))


def _choose(
    sets: Sequence[ChannelSet], order: Sequence[tuple[int, int]], cost: Cost, goal: float, asked: float, round_to: int, most: float
) -> dict[str, list[int]]:
    """Channels of each set to remove: the shortest head of `order` that meets the goal."""

    def lost(head: int) -> list[int]:
        counts = [0] * len(sets)
        for place, _ in order[:head]:
            counts[place] += 1
        return [_allowed(each.width, count, round_to, most) for each, count in zip(sets, counts, strict=True)]

    low, high = 0, len(order)
    if cost(lost(high)) > goal:
        share = cost(lost(high)) / cost([0] * len(sets))
        raise TransformError(
            f"a budget of {asked:,.0f} cannot be reached",
            why=f"with {most:.0%} of every prunable set gone, {share:.1%} of the cost is left",
            do="ask for less, raise most=, lower round_to=, or skip fewer layers",
        )
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if cost(lost(middle)) <= goal else (middle + 1, high)
    counts = lost(low)
    gone: dict[str, list[int]] = {each.root: [] for each in sets}
    for place, channel in order:
        if len(gone[sets[place].root]) < counts[place]:
            gone[sets[place].root].append(channel)
    return gone


def _allowed(width: int, wanted: int, round_to: int, most: float) -> int:
    """How many of `wanted` channels may go: the rest is rounded up, and at least one and 1 − most of them stay."""
    keep = max(width - wanted, math.ceil((1.0 - most) * width - 1e-9), 1)
    return width - min(width, -(-keep // round_to) * round_to)


def _outputs(twin: nn.Module, pruned: nn.Module, inputs: tuple[Any, ...]) -> tuple[list[Any], list[Any], float]:
    """What both give and how far apart they may be: in float64, or in their own type where the model does not run in another."""
    try:
        wide = tree_map_only(Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, inputs)
        twin64, pruned64 = copy.deepcopy(twin).double().eval(), copy.deepcopy(pruned).double().eval()
        return tree_leaves(twin64(*wide)), tree_leaves(pruned64(*wide)), 1e-6
    except (RuntimeError, TypeError):
        return tree_leaves(twin.eval()(*inputs)), tree_leaves(pruned.eval()(*inputs)), 1e-2


@torch.no_grad()
def check_same(original: nn.Module, pruned: nn.Module, inputs: tuple[Any, ...], found: Found, gone: Mapping[str, Sequence[int]]) -> None:
    """The pruned model must compute what the original computes once nothing reads the removed channels any more."""
    twin = copy.deepcopy(original)
    for each in found.sets:
        chosen = torch.zeros(each.width, dtype=torch.bool)
        chosen[list(gone[each.root])] = True
        for member in each.members:
            layer: Any = twin.get_submodule(member.layer)
            if member.side == "in" and isinstance(layer, (*CONV, nn.Linear)) and getattr(layer, "groups", 1) == 1:
                layer.weight[:, member.places[chosen[member.channels]].to(layer.weight.device)] = 0.0
    expected, actual, tolerance = _outputs(twin, copy.deepcopy(pruned), inputs)
    for want, have in zip(expected, actual, strict=True):
        if not isinstance(want, Tensor):
            continue
        if want.shape != have.shape:
            raise TransformError(
                f"the output changed from {list(want.shape)} to {list(have.shape)}", why="its channels were removed", do="skip= it"
            )
        error = float((want.double() - have.double()).abs().max())
        if want.is_floating_point() and not error <= tolerance * (float(want.double().abs().max()) + 1e-6):
            raise TransformError(
                f"removing channels changed the function by {error:.3g}",
                why="channels were tied in a way the dependency graph does not see (a shuffle, a product, a reshape of channels)",
                do="leave the layers concerned out with skip=",
            )
