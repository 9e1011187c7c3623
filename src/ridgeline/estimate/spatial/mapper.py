"""The best mapping of a layer onto an array, how good any could be, and whether this is it.

    Layer, SpatialArraySpec, dataflow, objective
      unrollings ──bounds──> cheapest first ──Tilings.solve──> plans ──evaluate──> LayerCost     exact
      stop when the bound of the next unrolling is no better than the best mapping found

energy   solved exactly: the answer is optimal within the space (all unrollings of `unrolling.py`, all tilings whose loop counts
         are products of 2, 3, 5 and 7, all loop orders, all uneven cuts)
latency  each unrolling is solved for least outermost traffic and for short fills, with and without room for second copies; the
         bound is what compute and each port need at least
edp      the same solutions and those for energy; bound = energy bound * latency bound
         of both, and of energy with leakage, the best few are then improved step by step (`polish`), and where mappings are few all
         of them are looked at (`exhaustive`): the answer is then optimal too

A better array (more room, wider ports) has every mapping of a lesser one at no higher cost, so an `optimal` answer never rises. Others
may: each solution is the best by a stand-in for time, which on a better array is another mapping, and single steps do not always lead
from there to the one that won before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ...core.errors import OptionError
from ...target.array import DATAFLOWS, OPERANDS, SpatialArraySpec
from .chain import Costs
from .cost import InfeasibleMappingError, LayerCost, evaluate
from .exhaustive import Budget, best_of_all, can_be_listed
from .layer import Layer
from .polish import polished
from .tilings import CutCosts, Tilings
from .unrolling import unrollings

OBJECTIVES = ("edp", "energy", "latency")
OPTIMAL_WITHIN = 1e-9
FASTER_ROUNDS = 2
ALSO_FRUGAL = 6
"""Unrollings whose mapping of least energy is looked at when the objective is another."""
ENERGY_LIMIT = 20
TIMED_LIMIT = {"edp": 6, "latency": 10}
"""Unrollings solved for energy, and then for time, when the objective is not energy alone; the others keep their bounds."""
POLISHED, POLISH_TRIALS = 3, 40
"""Mappings made better step by step, and the steps costed for each."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A layer, its best mapping, and what is known of better ones."""

    cost: LayerCost
    objective: str
    dataflow: str
    lower_bound: float
    """No mapping of the space has a smaller objective."""
    unrollings: int
    solved: int
    """Unrollings that were searched; the others' bounds ruled them out."""

    @property
    def gap(self) -> float:
        """How far the mapping may be from the best, as a share of its objective."""
        value = self.cost.objective(self.objective)
        return max(0.0, 1 - self.lower_bound / value) if value else 0.0

    @property
    def optimal(self) -> bool:
        return self.gap <= OPTIMAL_WITHIN

    def to_json(self) -> dict[str, Any]:
        return {
            **self.cost.to_json(),
            "shape": self.cost.layer.to_json(),
            "objective": self.objective,
            "lower_bound": self.lower_bound,
            "gap": self.gap,
            "optimal_within_space": self.optimal,
            "unrollings": self.unrollings,
            "unrollings_searched": self.solved,
        }


def map_layer(layer: Layer, array: SpatialArraySpec, dataflow: str = "any", objective: str = "edp") -> Mapped:
    """Search; the same layer on the same array is searched once."""
    if objective not in OBJECTIVES:
        raise OptionError(f"objective {objective!r}", why=f"the objectives are {', '.join(OBJECTIVES)}", do="choose one of them")
    if dataflow != "any" and dataflow not in DATAFLOWS:
        raise OptionError(f"dataflow {dataflow!r}", why=f"the dataflows are {', '.join(DATAFLOWS)} and any", do="choose one of them")
    if dataflow != "any" and dataflow not in array.dataflows:
        raise OptionError(
            f"dataflow {dataflow!r} on {array.name}", why=f"its control runs {', '.join(array.dataflows)}", do="choose one of these"
        )
    found = _search(_Key(layer, array, dataflow, objective))
    return replace(found, cost=replace(found.cost, layer=layer))


class _Key:
    """Arguments of a search, compared by content, but for the layer's name."""

    def __init__(self, layer: Layer, array: SpatialArraySpec, dataflow: str, objective: str) -> None:
        self.layer, self.array, self.dataflow, self.objective = layer, array, dataflow, objective
        shape = (tuple(layer.dims.items()), layer.stride, layer.dilation, layer.padding, layer.input_size, layer.bits.model_dump_json())
        self.text = (shape, array.model_dump_json(), dataflow, objective)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.text == other.text


@lru_cache(maxsize=4096)
def _search(key: _Key) -> Mapped:
    layer, array = key.layer, key.array
    search = _Incumbent(key.objective, compulsory_cycles(layer, array))
    candidates = sorted(_candidates(key, search.floor), key=lambda item: item[:2])
    for bound, _, tilings in candidates:
        if bound < search.value and (key.objective == "energy" or search.solved < ENERGY_LIMIT):
            search.solve_energy(bound, tilings)
        else:
            search.bounds.append((bound, tilings))
    search.solve_time()
    search.polish(array)
    search.look_at_all()
    if search.best is None:
        raise _infeasible(layer, array)
    lowest = float(min([search.value, *(bound for bound, _ in search.bounds)]))
    return Mapped(search.best, key.objective, key.dataflow, lowest, len(candidates), search.solved)


class _Incumbent:
    """The best mapping so far, and bounds on what each unrolling could still bring."""

    def __init__(self, objective: str, floor: int) -> None:
        self.objective, self.floor = objective, floor
        self.best: LayerCost | None = None
        self.value = float("inf")
        self.bounds: list[tuple[float, Tilings]] = []
        """No mapping of the unrolling has a smaller objective; unrollings whose mappings were all looked at are left out."""
        self.solved = 0
        self.waiting: list[tuple[float, float, Tilings]] = []
        """(bound, least energy, unrolling) whose cycles have not been looked at."""
        self.offered: list[LayerCost] = []

    def offer(self, cost: LayerCost) -> None:
        self.offered.append(cost)
        if cost.objective(self.objective) < self.value:
            self.best, self.value = cost, cost.objective(self.objective)

    def polish(self, array: SpatialArraySpec) -> None:
        """Single steps from the best mappings found, until none helps; energy alone is solved exactly but for what leaks meanwhile."""
        if self.objective == "energy" and not array.static_w:
            return
        for cost in sorted(self.offered, key=lambda cost: cost.objective(self.objective))[:POLISHED]:
            if not self.proven():
                self.offer(polished(cost, array, self.objective, POLISH_TRIALS))

    def proven(self) -> bool:
        return self.value <= min((bound for bound, _ in self.bounds), default=0.0) * (1 + OPTIMAL_WITHIN)

    def look_at_all(self) -> None:
        """Every mapping of the unrollings that may hold a better one, where they are few."""
        budget, left = Budget(), []
        for bound, tilings in sorted(self.bounds, key=lambda item: item[0]):
            whole = bound >= self.value
            if not whole and can_be_listed(tilings, budget):
                timed = Tilings(tilings.layer, tilings.array, tilings.spatial, tilings.dataflow, least_cycles=self.floor)
                cost, whole = best_of_all(timed, self.objective, self.value, budget)
                if cost is not None:
                    self.offer(cost)
            if not whole:
                left.append((bound, tilings))
        self.bounds = left

    def solve_energy(self, bound: float, tilings: Tilings) -> None:
        """The mapping of least energy; for other objectives the unrolling waits, with a better bound, to be timed."""
        self.solved += 1
        cycles = 1 if self.objective == "energy" else max(self.floor, tilings.compute_cycles)
        energy = tilings.energy_bound_pj()
        if self.objective != "latency":
            # leakage is charged for the cycles a mapping takes, which are no fewer than compute's
            fixed = energy - sum(tilings.least_energies_pj())
            plan, value = tilings.solve(_costs(tilings, lambda cut: cut.energy_pj), bound=self.value / cycles - fixed)
            energy = max(energy, value + fixed)
            bound = max(bound, energy * cycles)
            if plan is not None and (self.objective == "energy" or self.solved <= ALSO_FRUGAL):
                self.offer(evaluate(tilings.layer, tilings.array, plan))
        if self.objective == "energy" or bound >= self.value:
            self.bounds.append((bound, tilings))
        else:
            self.waiting.append((bound, energy, tilings))
            if self.solved == 1:  # something to measure the others against
                self.solve_time()

    def solve_time(self) -> None:
        """Search the waiting unrollings for fast mappings, most promising first."""
        for number, (bound, energy, tilings) in enumerate(sorted(self.waiting, key=lambda item: item[:2])):
            if bound < self.value and number < TIMED_LIMIT[self.objective]:
                timed = Tilings(tilings.layer, tilings.array, tilings.spatial, tilings.dataflow, least_cycles=self.floor)
                cycles = max(self.floor, timed.latency_bound())
                bound = energy * cycles if self.objective == "edp" else float(cycles)
                if bound < self.value:
                    for cost in _faster(timed, energy / cycles if self.objective == "edp" else 0.0):
                        self.offer(cost)
                    if self.objective == "latency" and number < ALSO_FRUGAL:  # little traffic is often also fast
                        plan, _ = timed.solve(_costs(timed, lambda cut: cut.energy_pj))
                        if plan is not None:
                            self.offer(evaluate(timed.layer, timed.array, plan))
            self.bounds.append((bound, tilings))
        self.waiting = []


def _flows(key: _Key) -> tuple[str, ...]:
    """Kinds of search: one without constraints where the array runs every dataflow."""
    if key.dataflow != "any":
        return (key.dataflow,)
    return ("any",) if set(key.array.dataflows) == set(DATAFLOWS) else key.array.dataflows


def compulsory_cycles(layer: Layer, array: SpatialArraySpec) -> int:
    """Cycles the outermost ports need to move every operand once, whatever the mapping."""
    memory = array.memories[list(array.memories)[-1]]
    busy: dict[str, int] = {}
    for operand, direction, bits in (
        ("W", "rd_down", layer.bits.W),
        ("I", "rd_down", layer.bits.I),
        ("O", "wr_up", min(layer.bits.F, layer.bits.O)),
    ):
        port = memory.port_of(operand, direction)
        busy[port] = busy.get(port, 0) + layer.elements(operand) * bits // memory.ports[port].bits_per_cycle
    return max(busy.values())


def _candidates(key: _Key, floor: int) -> Iterator[tuple[float, float, Tilings]]:
    """(Bound, energy bound, tilings) of every unrolling, with a first bound, which asks nothing of the on-chip ports yet."""
    for flow in _flows(key):
        for one in unrollings(key.layer, key.array, flow):
            cycles = max(floor, one.cycles)
            tilings = Tilings(key.layer, key.array, one.spatial, flow, with_cycles=False, least_cycles=cycles)
            energy = tilings.energy_bound_pj()
            bound = {"energy": energy, "latency": float(cycles), "edp": energy * cycles}[key.objective]
            if np.isfinite(energy):
                yield bound, energy, tilings


def _faster(tilings: Tilings, price: float) -> Iterator[LayerCost]:
    """Mappings that trade traffic, waiting and crowded ports (and energy, at 1 / `price` cycles a pJ) by what last limited them."""
    outermost = f"{list(tilings.array.memories)[-1]}."
    weights = {"outside": 1.0, "waiting": 1.0, "ports": 0.0}
    seen = set()
    for _ in range(FASTER_ROUNDS):
        costs = _costs(tilings, lambda cut: _time_cost(cut, outermost, weights, price))
        plan = tilings.solve(costs, doubled=True)[0] or tilings.solve(costs)[0]
        if plan is None or plan.loops in seen:
            return
        seen.add(plan.loops)
        cost = evaluate(tilings.layer, tilings.array, plan)
        yield cost
        time = cost.latency
        if time.cycles > time.fill + time.on_chip + time.drain:
            weights["outside"] *= 4
        elif time.on_chip > time.compute + time.exposed_on_chip:
            weights["ports"] += 0.5
        else:
            weights["waiting"] *= 4


def _time_cost(cut: CutCosts, outermost: str, weights: dict[str, float], price: float) -> Costs:
    """Cycles a cut stands for, by cause, and its energy where that counts too."""
    cost: Costs = weights["waiting"] * (cut.fill_cycles + cut.wait_cycles)
    for port, cycles in cut.port_cycles.items():
        cost = cost + weights["outside" if port.startswith(outermost) else "ports"] * cycles
    return cut.energy_pj + price * cost if price else cost


def _costs(tilings: Tilings, measure: Callable[[CutCosts], Costs]) -> dict[tuple[str, int], Costs]:
    return {(cut.operand, cut.place): measure(cut) for op in OPERANDS for cut in tilings.cuts[op]}


def _infeasible(layer: Layer, array: SpatialArraySpec) -> InfeasibleMappingError:
    """Name the memory that cannot hold the smallest tiles."""
    for name, memory in array.memories.items():
        least = {op: getattr(layer.bits, op) for op in memory.operands}
        if name == list(array.memories)[-1]:
            least = {op: layer.elements(op) * min(getattr(layer.bits, op), layer.bits.F if op == "O" else 64) for op in memory.operands}
        over = sum(least.values()) - int(memory.capacity_bits.value)
        if over > 0:
            return InfeasibleMappingError(
                f"layer {layer.name} needs {-(-over // 8)} B more than memory {name} of {array.name} has",
                why=f"its smallest tiles take {sum(least.values()) // 8} B; capacity is {int(memory.capacity_bits.value) // 8} B",
                do=f"give {name} more room, or split the layer",
            )
    return InfeasibleMappingError(
        f"layer {layer.name} cannot be mapped onto {array.name}", why="no unrolling of the dataflow fits its axes and memories together",
        do="try --dataflow any, or relax `unroll` in the target file",
    )  # fmt: skip
