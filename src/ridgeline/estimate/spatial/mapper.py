"""The best mapping of a layer onto an array, how good any could be, and whether this is it.

    Layer, SpatialArraySpec, dataflow, objective
      unrollings ──bounds──> cheapest first ──Tilings.solve──> plans ──evaluate──> LayerCost     exact
      stop when the bound of the next unrolling is no better than the best mapping found

energy   solved exactly: the answer is optimal within the space (all unrollings of `unrolling.py`, all tilings whose loop counts
         are products of 2, 3, 5 and 7, all loop orders, all uneven cuts)
latency  a few unrollings are solved for least outermost traffic and for short fills; then every mapping that may be better is
         looked at (`exhaustive`), most being ruled out by bounds without being named: the answer is optimal too
edp      the same; and energy with leakage
         what is left where they are too many, or where inputs stream, is searched by such stand-ins for time, the best few are then
         improved step by step (`polish`), and the bound says how far they may be from the best

A better array (more room, wider ports) has every mapping of a lesser one at no higher cost, so an `optimal` answer never rises. Others
may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ...core.errors import OptionError
from ...target.array import DATAFLOWS, OPERANDS, SpatialArraySpec
from .chain import Costs
from .cost import InfeasibleMappingError, LayerCost, evaluate
from .counts import Known
from .exhaustive import Budget, Everything
from .layer import Layer
from .polish import polished
from .tilings import CutCosts, Tilings
from .unrolling import unrollings

OBJECTIVES = ("edp", "energy", "latency")
OPTIMAL_WITHIN = 1e-9
FASTER_ROUNDS = 2
STARTED = 2
"""Unrollings searched by stand-ins before every mapping is looked at."""
FRUGAL_LIMIT, OFFERED, FAST_LIMIT = 20, 6, {"edp": 8, "energy": 8, "latency": 12}
"""Unrollings solved for energy, those of them whose mapping is costed, and unrollings searched for time, if it could not be."""
NEAR = 0.01
"""Of the objective: an answer nearer to the bound than this is not worth such searches."""
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
    candidates = sorted(_candidates(key, compulsory_cycles(layer, array)), key=lambda item: item[:2])
    search = _Incumbent(key.objective)
    exact = key.objective == "energy" and not array.static_w
    bound = search.least_energy(candidates) if exact else search.best_of_all(candidates)
    if search.best is None:
        raise _infeasible(layer, array)
    return Mapped(search.best, key.objective, key.dataflow, float(min(search.value, bound)), len(candidates), search.solved)


Candidate = tuple[float, float, Callable[[], Tilings]]
"""Bounds on the objective and on the energy of an unrolling, and its tilings when they are asked for."""


class _Incumbent:
    """The best mapping so far."""

    def __init__(self, objective: str) -> None:
        self.objective = objective
        self.best: LayerCost | None = None
        self.value = float("inf")
        self.solved = 0
        self.offered: list[LayerCost] = []

    def offer(self, cost: LayerCost) -> None:
        self.offered.append(cost)
        if cost.objective(self.objective) < self.value:
            self.best, self.value = cost, cost.objective(self.objective)

    def least_energy(self, candidates: list[Candidate]) -> float:
        """Solve one unrolling after another until the next one's bound is no better; a bound on all."""
        bounds = []
        for bound, _, tilings in candidates:
            if bound < self.value:
                self.solved += 1
                bound = max(bound, self._frugal(tilings()))
            bounds.append(bound)
        return min(bounds, default=0.0)

    def _frugal(self, tilings: Tilings, offered: bool = True) -> float:
        """Offer the mapping of least energy, if that is the objective only if it is the best; a bound on the energy of all."""
        energy = tilings.energy_bound_pj()
        if not np.isfinite(energy):
            return energy
        fixed = energy - sum(tilings.least_energies_pj())
        below = self.value if self.objective == "energy" else float("inf")
        plan, value = tilings.solve(_costs(tilings, lambda cut: cut.energy_pj), bound=below - fixed)
        if plan is not None and offered:
            self.offer(evaluate(tilings.layer, tilings.array, plan))
        return max(energy, value + fixed)

    def best_of_all(self, candidates: list[Candidate]) -> float:
        """Look at every mapping that may be better; where these are too many, search by stand-ins for time, and look again; a bound."""
        for number, (_, _, make) in enumerate(candidates):  # something to measure the others against
            if number < STARTED or self.best is None:
                tilings = make()
                energy = self._frugal(tilings)
                if number < STARTED:
                    self._fast(tilings, energy)
        if self.best is None:
            return 0.0
        everything = Everything(self.objective, self.best, Budget())
        for bound, _, make in candidates:
            everything.add(bound, make)
        everything.finish()
        self.offer(everything.best)
        if unsettled := everything.unsettled():
            if everything.bound < (1 - NEAR) * self.value:
                self._stand_ins(unsettled)
            for cost in sorted(self.offered, key=lambda cost: cost.objective(self.objective))[:POLISHED]:
                self.offer(polished(cost, unsettled[0].array, self.objective, POLISH_TRIALS))
            everything.tell(self.best)
            everything.finish()
            self.offer(everything.best)
        self.solved = max(everything.looked, min(STARTED, len(candidates)))
        return everything.bound

    def _stand_ins(self, unsettled: list[Tilings]) -> None:
        """Search some unrollings for what is frugal, then for what is fast."""
        solved = [(self._frugal(tilings, number < OFFERED), tilings) for number, tilings in enumerate(unsettled[:FRUGAL_LIMIT])]
        cycles = [max(tilings.least_cycles, tilings.compute_cycles) for _, tilings in solved]
        bounds = [time * energy if self.objective == "edp" else time for time, (energy, _) in zip(cycles, solved, strict=True)]
        for number in np.argsort(bounds, kind="stable")[: FAST_LIMIT[self.objective]]:
            energy, tilings = solved[number]
            self._fast(tilings, energy)

    def _fast(self, tilings: Tilings, energy: float) -> None:
        """Offer mappings that stand-ins for time lead to; `energy`: what none of them is below, infinite where nothing fits."""
        if not np.isfinite(energy):
            return
        timed = tilings if tilings.with_cycles else replace(tilings, with_cycles=True)
        cycles = max(timed.least_cycles, timed.latency_bound())
        for cost in _faster(timed, energy / cycles if self.objective == "edp" else 0.0):
            self.offer(cost)


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


def _candidates(key: _Key, floor: int) -> Iterator[Candidate]:
    """Every unrolling, with first bounds, which ask nothing of the on-chip ports yet."""
    known = Known()
    for flow in _flows(key):
        for one in unrollings(key.layer, key.array, flow):
            cycles = max(floor, one.cycles)
            make = partial(Tilings, key.layer, key.array, one.spatial, flow, False, cycles, known)
            if key.objective == "latency":  # few are asked for
                yield float(cycles), 0.0, make
                continue
            tilings = make()
            energy = tilings.energy_bound_pj()
            if np.isfinite(energy):
                yield energy * (cycles if key.objective == "edp" else 1), energy, partial(_itself, tilings)


def _itself(tilings: Tilings) -> Tilings:
    return tilings


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
