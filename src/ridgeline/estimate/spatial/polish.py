"""A mapping made better step by step: what the searches, which weigh causes one by one, leave on the table.

    LayerCost ──loops cut into primes──> neighbours: one cut moved by a loop, or two neighbouring loops swapped
              ──evaluate each, take the best, again──> LayerCost that no single step improves

Every step is costed exactly and must fit, and keep its dataflow, so the answer is never worse than what came in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...target.array import DIMENSIONS, SpatialArraySpec
from .cost import InfeasibleMappingError, LayerCost, boundary_points, evaluate
from .counts import Unrolled
from .layer import RELEVANT, Layer
from .mapping import Loop, MappingPlan
from .unrolling import STATIONARY, stationary_place

PRIMES = (2, 3, 5, 7)


def polished(cost: LayerCost, array: SpatialArraySpec, objective: str, trials: int) -> LayerCost:
    """The best mapping reached by single steps, each the best of its neighbourhood; at most `trials` of them costed."""
    layer, best = cost.layer, cost
    unrolled = Unrolled(layer, array, cost.plan.spatial)
    seen = set()
    improved = True
    while improved:
        improved, start = False, best
        for plan in neighbours(in_primes(start.plan)):
            key = (plan.loops, *plan.cuts.values())
            if key in seen or not keeps_dataflow(layer, array, plan):
                continue
            seen.add(key)
            if trials == 0:
                return best
            try:
                found = evaluate(layer, array, plan, unrolled)
            except InfeasibleMappingError:
                continue  # costs next to nothing
            trials -= 1
            if found.objective(objective) < best.objective(objective):
                best, improved = found, True
    return best


def in_primes(plan: MappingPlan) -> MappingPlan:
    """The same mapping, its loops cut into loops of prime length."""
    loops: list[Loop] = []
    position = [0]
    for dim, factor in plan.loops:
        loops += [(dim, prime) for prime in _primes(factor)]
        position.append(len(loops))
    return replace(plan, loops=tuple(loops), cuts={op: tuple(position[cut] for cut in cuts) for op, cuts in plan.cuts.items()})


def _primes(number: int) -> list[int]:
    found = []
    for prime in PRIMES:
        while number % prime == 0:
            found.append(prime)
            number //= prime
    return found if number == 1 else [*found, number]


def neighbours(plan: MappingPlan) -> Iterator[MappingPlan]:
    """Mappings one step away."""
    loops = plan.loops
    for op, cuts in plan.cuts.items():
        for which, cut in enumerate(cuts):
            lowest = cuts[which - 1] if which else 0
            highest = cuts[which + 1] if which + 1 < len(cuts) else len(loops)
            for moved in (cut - 1, cut + 1):
                if lowest <= moved <= highest:
                    yield replace(plan, cuts={**plan.cuts, op: (*cuts[:which], moved, *cuts[which + 1 :])})
    for at in range(len(loops) - 1):
        if loops[at][0] != loops[at + 1][0]:
            yield replace(plan, loops=(*loops[:at], loops[at + 1], loops[at], *loops[at + 2 :]))


def keeps_dataflow(layer: Layer, array: SpatialArraySpec, plan: MappingPlan) -> bool:
    """Whether the dataflow's stationary operand still waits in the PEs until its work is done."""
    operand = "W" if plan.dataflow == "rs" else STATIONARY.get(plan.dataflow)
    if operand is None:
        return True
    over = ("Q", "S") if plan.dataflow == "rs" else tuple(d for d in DIMENSIONS if d not in RELEVANT[operand])
    unrolled, place = Unrolled(layer, array, plan.spatial), stationary_place(array, operand)
    points = boundary_points(unrolled, plan, operand)
    return place >= len(points) or bool((unrolled.count(over, points[place]) == 1).all())
