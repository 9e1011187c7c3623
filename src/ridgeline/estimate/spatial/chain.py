"""The cheapest chain of cuts through a lattice of tilings, over every loop order at once.

    lattice   one axis for each prime of each dimension's loop count: a point says how much of each dimension is inside
    cut       a place where one operand's tile in one memory ends; its cost depends on its point only
    chain     cuts at points that rise along every axis: exactly the loop orders, for the loops between two cuts commute

A loop order is a rising path, so the best mapping is the cheapest way to set every operand's cuts, inner before outer, at
rising points. With `best[s]` the cheapest setting of the cuts in s at points no higher than p, kept for all p,

    best[s + cut](p) = min over q <= p of best[s](q) + cost_cut(q)         a running minimum along every axis

which visits every interleaving of the operands' cuts and every order of loops: nothing is sampled, nothing is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...target.array import DIMENSIONS

Costs = NDArray[np.float64]
SMOOTH = (2, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Lattice:
    """Block sizes of every dimension, laid out so that a higher point along each axis is a multiple."""

    blocks: Mapping[str, NDArray[np.int64]]
    shape: tuple[int, ...]
    """One axis a dimension."""
    fine_shape: tuple[int, ...]
    """One axis a prime power of a dimension."""

    def spread(self, costs: NDArray[Any]) -> NDArray[Any]:
        """Broadcast over the lattice, then one axis a prime."""
        found = np.empty(self.shape, costs.dtype)
        found[...] = costs
        return found.reshape(self.fine_shape)

    def point(self, fine: Sequence[int]) -> dict[str, int]:
        """Block of each dimension at a fine index."""
        coarse = np.unravel_index(int(np.ravel_multi_index(tuple(fine), self.fine_shape)), self.shape)
        return {d: int(self.blocks[d][i]) for d, i in zip(DIMENSIONS, coarse, strict=True)}


def lattice_for(counts: Mapping[str, int]) -> Lattice:
    """Blocks for loops that must run `counts` times: all divisors of the next number whose primes are at most 7."""
    axes = {dim: _axis(counts[dim]) for dim in DIMENSIONS}
    blocks = {dim: sizes for dim, (sizes, _) in axes.items()}
    fine = tuple(length for _, lengths in axes.values() for length in lengths)
    return Lattice(blocks, tuple(map(len, blocks.values())), fine or (1,))


@lru_cache(maxsize=4096)
def _axis(count: int) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """(block sizes of a dimension, lengths of its axes of one prime each)."""
    powers = _factorise(smooth_above(count))
    sizes = [prod(p**e for (p, _), e in zip(powers, chosen, strict=True)) for chosen in product(*(range(e + 1) for _, e in powers))]
    found = np.array(sizes, np.int64)
    found.flags.writeable = False
    return found, tuple(e + 1 for _, e in powers)


def smooth_above(count: int) -> int:
    """The smallest number >= count without primes above 7; the edge of the layer cuts the last tiles short."""
    while prod(p**e for p, e in _factorise(count)) != count:
        count += 1
    return count


def _factorise(number: int) -> list[tuple[int, int]]:
    found = []
    for prime in SMOOTH:
        power = 0
        while number % prime == 0:
            number, power = number // prime, power + 1
        if power:
            found.append((prime, power))
    return found


@dataclass(frozen=True, slots=True)
class Cut:
    """One step of an operand's ladder. `phase` tells variants apart that depend on the operand's cut before this one."""

    costs: Costs
    """Over the fine lattice; infinite where the tile does not fit."""
    leads_to: int = 0
    """Phase the operand is in afterwards."""


Ladder = Sequence[Mapping[int, Sequence[Cut]]]
"""Per step of an operand: phase before -> the variants of the cut open to it."""
State = tuple[tuple[int, int], ...]
"""Per operand: how many of its cuts are set, and its phase."""


def cheapest_chain(ladders: Sequence[Ladder], shape: tuple[int, ...], bound: float = np.inf) -> tuple[float, list[list[tuple[int, ...]]]]:
    """(cost, fine point of every step of every ladder); infinite cost if nothing fits, or nothing below `bound`.

    Operands alone and in pairs come first: if what they cost, with the least the others can, is not below `bound`, that is all.
    """
    variants = tuple(
        tuple((before, tuple(cut.leads_to for cut in cuts)) for before, cuts in step.items()) for ladder in ladders for step in ladder
    )
    moves = _moves(variants, tuple(len(ladder) for ladder in ladders))
    best: dict[State, Costs] = {tuple((0, 0) for _ in ladders): np.zeros(shape)}
    arrivals: dict[State, Costs] = {}
    for rounds in moves:
        for states in rounds:
            found = {state: arrival for state, sources in states if (arrival := _arrive(ladders, sources, best)) is not None}
            arrivals |= found
            if found:
                best |= dict(zip(found, _running_minimum(np.stack(list(found.values()))), strict=True))
        if lower_bound(_least(ladders, best), len(ladders)) >= bound:
            return float("inf"), []
    full = [s for s in best if all(step == len(ladder) for (step, _), ladder in zip(s, ladders, strict=True))]
    if not full:
        return float("inf"), []
    end = min(full, key=lambda s: float(best[s].flat[-1]))
    cost = float(best[end].flat[-1])
    return (cost, _trace(ladders, moves, best, arrivals, end, shape)) if np.isfinite(cost) else (cost, [])


def _least(ladders: Sequence[Ladder], best: Mapping[State, Costs]) -> dict[frozenset[int], float]:
    """Cost of the operands in each set when all their cuts, and no others, are set."""
    least: dict[frozenset[int], float] = {}
    for state, costs in best.items():
        members = frozenset(i for i, (step, _) in enumerate(state) if step)
        if all(state[i][0] == len(ladders[i]) for i in members):
            least[members] = min(least.get(members, float("inf")), float(costs.flat[-1]))
    return least


def lower_bound(least: Mapping[frozenset[int], float], operands: int) -> float:
    """What all operands together cost at least, from what some of them do."""
    single = [least.get(frozenset([i]), 0.0) for i in range(operands)]
    bounds = [sum(single)]
    pairs = [(members, cost) for members, cost in least.items() if len(members) == 2]
    bounds += [cost + sum(single[i] for i in range(operands) if i not in members) for members, cost in pairs]
    if operands == 3 and len(pairs) == 3:
        bounds.append(sum(cost for _, cost in pairs) / 2)  # each operand is in two of the pairs
    return max([*bounds, least.get(frozenset(range(operands)), 0.0)])


def _arrive(ladders: Sequence[Ladder], sources: Sequence[Move], best: Mapping[State, Costs]) -> Costs | None:
    """Cost of setting the last cut of a state exactly at each point."""
    arrival = None
    for move in sources:
        if move.source in best:
            total = best[move.source] + move.cut(ladders).costs
            arrival = total if arrival is None else np.minimum(arrival, total, out=arrival)
    return arrival


def _running_minimum(values: Costs) -> Costs:
    """Along every axis but the first, over which independent tables are stacked.

    Slice by slice: np.minimum.accumulate takes 20 times longer, for it handles the short axes one line at a time.
    """
    running = values.copy()
    for axis in range(1, values.ndim):
        along = running.swapaxes(0, axis)
        for i in range(1, values.shape[axis]):
            np.minimum(along[i], along[i - 1], out=along[i])
    return running


class Move(NamedTuple):
    """Setting one cut: from which state, and which of the cuts open there."""

    source: State
    operand: int
    step: int
    before: int
    variant: int

    def cut(self, ladders: Sequence[Ladder]) -> Cut:
        return ladders[self.operand][self.step][self.before][self.variant]


Rounds = list[list[tuple[State, list[Move]]]]
"""States that do not depend on each other, each with the moves that lead to it."""


@lru_cache(maxsize=256)
def _moves(variants: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...], lengths: tuple[int, ...]) -> tuple[Rounds, Rounds]:
    """(states with cuts of one or two operands set, states with cuts of all), in rounds of equally many cuts.

    `variants` lists, step by step, ladder after ladder, the phases before and where each open cut leads.
    """
    steps = iter(variants)
    ladders = [[next(steps) for _ in range(length)] for length in lengths]
    options = [
        [(0, 0), *((at + 1, phase) for at, step in enumerate(ladder) for phase in sorted({p for _, leads in step for p in leads}))]
        for ladder in ladders
    ]
    groups: tuple[dict[int, list[tuple[State, list[Move]]]], ...] = ({}, {})
    for state in product(*options):
        total = sum(step for step, _ in state)
        moves = [
            Move((*state[:which], (at - 1, before), *state[which + 1 :]), which, at - 1, before, variant)
            for which, (at, phase) in enumerate(state)
            if at
            for before, leads in ladders[which][at - 1]
            for variant, lead in enumerate(leads)
            if lead == phase
        ]
        if total:
            everyone = all(step for step, _ in state)
            groups[everyone].setdefault(total, []).append((state, moves))
    first, last = ([group[total] for total in sorted(group)] for group in groups)
    return first, last


def _trace(
    ladders: Sequence[Ladder],
    moves: tuple[Rounds, Rounds],
    best: Mapping[State, Costs],
    arrivals: Mapping[State, Costs],
    state: State,
    shape: tuple[int, ...],
) -> list[list[tuple[int, ...]]]:
    """Walk back from the full state: where was the minimum reached, and which cut was set there."""
    leading_to = {reached: sources for rounds in moves for states in rounds for reached, sources in states}
    points: list[list[tuple[int, ...]]] = [[() for _ in ladder] for ladder in ladders]
    ceiling = tuple(length - 1 for length in shape)
    while state in arrivals:
        box = arrivals[state][tuple(slice(0, c + 1) for c in ceiling)]
        ceiling = tuple(int(i) for i in np.unravel_index(int(box.argmin()), box.shape))
        cost = arrivals[state][ceiling]
        move = next(m for m in leading_to[state] if m.source in best and best[m.source][ceiling] + m.cut(ladders).costs[ceiling] == cost)
        points[move.operand][move.step] = ceiling
        state = move.source
    return points
