"""The cheapest chain of cuts through every point of a lattice: which places a cut can be at, if the whole is to stay below a limit.

    inwards   least[s](p)   the cuts of s set at rising points no higher than p          (chain.py, without phases)
    outwards  rest[s](p)    all other cuts set at rising points no lower than p
    through   for a cut at p: min over s of least[s](p) + cost(p) + rest[s + cut](p)

Costs are of cuts at points, as in chain.py; s says how many cuts of each operand are set. Infinite costs forbid a point.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = tuple[int, ...]


class Cheapest:
    """Of all chains, given the costs of each operand's cuts over the lattice."""

    def __init__(self, costs: Sequence[Sequence[Floats]], shape: tuple[int, ...]) -> None:
        self.costs, self.shape = [[cost.reshape(shape) for cost in cuts] for cuts in costs], shape
        self.lengths = tuple(len(cuts) for cuts in costs)
        self.least = np.zeros((*(n + 1 for n in self.lengths), *shape))
        self.arrivals: dict[Counts, Floats] = {}
        for group in _rounds(self.lengths)[1:]:
            stack = np.empty((len(group), *shape))
            for at, state in enumerate(group):
                self.arrivals[state] = self._arrive(state, stack[at]).copy()
            _running_minimum(stack, False)
            for at, state in enumerate(group):
                self.least[state] = stack[at]

    def _arrive(self, state: Counts, into: Floats) -> Floats:
        """The last cut of a state exactly at each point."""
        into.fill(np.inf)
        for operand, count in enumerate(state):
            if count:
                np.minimum(into, self.least[_step(state, operand, -1)] + self.costs[operand][count - 1], out=into)
        return into

    def of(self, operands: Sequence[int]) -> float:
        """All cuts of some operands, and no others."""
        return float(self.least[tuple(n if i in operands else 0 for i, n in enumerate(self.lengths))].flat[-1])

    @property
    def all(self) -> float:
        return self.of(range(len(self.lengths)))

    def points(self) -> list[list[int]]:
        """Flat places of each operand's cuts in the cheapest chain."""
        found: list[list[int]] = [[0] * n for n in self.lengths]
        state, ceiling = self.lengths, tuple(n - 1 for n in self.shape)
        while any(state):
            box = self.arrivals[state][tuple(slice(0, c + 1) for c in ceiling)]
            ceiling = tuple(int(i) for i in np.unravel_index(int(box.argmin()), box.shape))
            reached = self.arrivals[state][ceiling]
            operand = next(
                i for i, n in enumerate(state) if n and self.least[_step(state, i, -1)][ceiling] + self.costs[i][n - 1][ceiling] == reached
            )
            found[operand][state[operand] - 1] = int(np.ravel_multi_index(ceiling, self.shape))
            state = _step(state, operand, -1)
        return found

    def through(self) -> list[list[Floats]]:
        """For each operand's cuts, over the flat lattice, the cheapest chain that has the cut there."""
        rest = np.zeros_like(self.least)
        found = [[np.full(self.shape, np.inf) for _ in cuts] for cuts in self.costs]
        for group in _rounds(self.lengths)[-2::-1]:
            stack = np.full((len(group), *self.shape), np.inf)
            for at, state in enumerate(group):
                for operand, count in enumerate(state):
                    if count < self.lengths[operand]:
                        onwards = self.costs[operand][count] + rest[_step(state, operand, 1)]
                        np.minimum(stack[at], onwards, out=stack[at])
                        np.minimum(found[operand][count], self.least[state] + onwards, out=found[operand][count])
            _running_minimum(stack, True)
            for at, state in enumerate(group):
                rest[state] = stack[at]
        return [[cost.reshape(-1) for cost in cuts] for cuts in found]


def _step(state: Counts, operand: int, by: int) -> Counts:
    return (*state[:operand], state[operand] + by, *state[operand + 1 :])


@lru_cache(maxsize=64)
def _rounds(lengths: Counts) -> list[list[Counts]]:
    """States by how many cuts they have set."""
    states = list(product(*(range(n + 1) for n in lengths)))
    return [[state for state in states if sum(state) == total] for total in range(sum(lengths) + 1)]


def _running_minimum(stack: Floats, outwards: bool) -> None:
    """In place, along every axis but the first; outwards: from the far end. Slice by slice, as chain.py does."""
    for axis in range(1, stack.ndim):
        along = stack.swapaxes(0, axis)
        along = along[::-1] if outwards else along
        for i in range(1, len(along)):
            np.minimum(along[i], along[i - 1], out=along[i])
