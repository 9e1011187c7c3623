"""What the tests of the array engine share: engine against oracle, arrays changed in one respect, stored reference cases.

differences(case) ──> what the engine and the walked loop nest do not agree on, in words; [] is the only good answer
with_bandwidth, with_capacity, roomy(array) ──> the same array but for one thing
reference(name) ──> a file of $RIDGELINE_NPU_CASES, else of tests/estimate/npu_cases; None where neither has it
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import combinations_with_replacement, permutations, product
from math import inf, prod
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from ridgeline.estimate.spatial import cost as engine
from ridgeline.estimate.spatial.chain import smooth_above
from ridgeline.estimate.spatial.cost import InfeasibleMappingError, evaluate
from ridgeline.estimate.spatial.counts import Unrolled, boundary_flows
from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.mapping import Loop, MappingPlan
from ridgeline.target.array import DIMENSIONS, DIRECTIONS, OPERANDS, OperandBits, SpatialArraySpec
from tests.estimate.spatial.cases import Case, memory, random_case, small_array
from tests.estimate.spatial.oracle import Ladder, OracleCounts, Stream, walk, working_pes
from tests.support import ROOT

PACKAGED = ROOT / "tests" / "estimate" / "npu_cases"
FOLDER = Path(os.environ.get("RIDGELINE_NPU_CASES") or PACKAGED)
UNLIMITED = 1e15
MOST_LOOPS = 4


def references(name: str) -> list[Any]:
    """A stored file as data, that of the chosen folder before the packaged one."""
    paths = dict.fromkeys((FOLDER / name, PACKAGED / name))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def reference(name: str, fall_back: bool = False) -> Any:
    """One of them; without `fall_back` only that of the chosen folder, None where there is none."""
    return references(name)[0] if fall_back or (FOLDER / name).exists() else None


def changed(array: SpatialArraySpec, **fields: Any) -> SpatialArraySpec:
    """The array with some top-level fields replaced, checked again."""
    return SpatialArraySpec.model_validate(array.model_dump() | fields)


def with_memory(array: SpatialArraySpec, name: str, **fields: Any) -> SpatialArraySpec:
    memories = array.model_dump()["memories"]
    return changed(array, memories=memories | {name: memories[name] | fields})


def with_capacity(array: SpatialArraySpec, name: str, bits: float) -> SpatialArraySpec:
    return with_memory(array, name, capacity_bits=bits)


def roomy(array: SpatialArraySpec) -> SpatialArraySpec:
    """No capacity limits anything."""
    memories = array.model_dump()["memories"]
    return changed(array, memories={name: m | {"capacity_bits": UNLIMITED} for name, m in memories.items()})


def with_bandwidth(array: SpatialArraySpec, times: int, only: str | None = None) -> SpatialArraySpec:
    """Ports so many times wider, of all memories or one; words stay as wide as they are, or traffic would be rounded anew."""
    data = array.model_dump()
    for name, fields in data["memories"].items():
        for port in fields["ports"].values():
            if only in (None, name):
                port["word_bits"] = port["word_bits"] or port["bits_per_cycle"]
                port["bits_per_cycle"] *= times
    if only is None and data["noc"]["bits_per_cycle"]:
        data["noc"]["bits_per_cycle"] *= times
    return SpatialArraySpec.model_validate(data)


class Walked:
    """What the oracle saw: its counts, and the cycles its transfers take through ports, one after another."""

    def __init__(self, case: Case) -> None:
        layer, array, plan = case
        pes = list(working_pes(array, plan))
        steps = list(walk(layer, plan, pes))
        self.counts = OracleCounts(compute_cycles=len(steps), macs=sum(len(step.needs["O"]) for step in steps))
        self.port_cycles: dict[Stream, int] = {}
        for operand in OPERANDS:
            ladder = Ladder(operand, layer, array, plan, pes, self.counts)
            ladder.run(steps)
            for (level, direction, count, bits), times in ladder.moved.items():
                here, stream = array.memories[ladder.names[level]], (ladder.names[level], operand, direction)
                port = here.ports[here.port_of(operand, direction)]
                words = -(-count * bits // port.granule)
                cycles = -(-words * port.granule // port.bits_per_cycle)
                self.port_cycles[stream] = self.port_cycles.get(stream, 0) + times * cycles


@lru_cache(maxsize=256)
def walked(seed: int) -> tuple[Case, Walked]:
    """A random case and its oracle; kept, for the planted errors run the same few over and over."""
    case = random_case(Random(seed))
    return case, Walked(case)


def differences(case: Case, seen: Walked) -> list[str]:
    """What engine and oracle do not agree on."""
    found = engine.evaluate(*case)
    return [
        *_different_accesses(case, seen, found),
        *_different_tiles(case, seen.counts),
        *_different_network(case, seen.counts, found),
        *_different("compute cycles", found.latency.compute, seen.counts.compute_cycles),
        *_different("MACs", case.layer.macs, seen.counts.macs),
    ]


def _different(what: str, engine_says: Any, oracle_says: Any) -> list[str]:
    return [] if engine_says == oracle_says else [f"{what}: engine {engine_says}, oracle {oracle_says}"]


def _different_accesses(case: Case, seen: Walked, found: engine.LayerCost) -> list[str]:
    wrong, counts = [], seen.counts
    here = {(a.memory, a.operand, a.direction): a for a in found.accesses}
    streams = [(name, op, way) for name, m in case.array.memories.items() for op in m.operands for way in DIRECTIONS]
    wrong += _different("streams", sorted(here.keys() - set(streams)), [])
    for stream in streams:
        one = here.get(stream)
        ours = (one.words, one.elements, one.transfers) if one else (0, 0, 0)
        wrong += _different(" ".join(stream), ours, (counts.words[stream], counts.elements[stream], counts.transfers[stream]))
        # one instance: its transfers follow one another; several: the busiest does no less than its share, no more than all
        in_all, instances = seen.port_cycles.get(stream, 0), case.array.instances(stream[0])
        if one and not -(-in_all // instances) <= one.cycles <= in_all:
            wrong.append(f"{' '.join(stream)}: {one.cycles} port cycles, oracle {in_all} over {instances} instances")
    return wrong


def _different_tiles(case: Case, counts: OracleCounts) -> list[str]:
    """Largest tile of every memory in elements; O may be stated at the width of finished outputs."""
    layer, array, plan = case
    unrolled = Unrolled(layer, array, plan.spatial)
    bits = engine.tile_bits(unrolled, {op: engine.boundary_points(unrolled, plan, op) for op in OPERANDS})
    wrong = _different("tiles", sorted(bits), sorted((name, op) for name, m in array.memories.items() for op in m.operands))
    for (name, op), ours in bits.items():
        widths = {getattr(layer.bits, op), layer.bits.F if op == "O" else getattr(layer.bits, op)}
        if ours not in {width * counts.tile_elements[name, op] for width in widths}:
            wrong.append(f"tile of {op} in {name}: engine {ours} bits, oracle {counts.tile_elements[name, op]} elements")
    return wrong


def network_bits(case: Case, operand: str) -> tuple[int, int]:
    """(bits times places they reach, bits put in) of one operand, as the engine counts them."""
    layer, array, plan = case
    unrolled = Unrolled(layer, array, plan.spatial)
    points = engine.boundary_points(unrolled, plan, operand)
    back = engine.returned_partials(unrolled, points) if operand == "O" else [None] * len(points)
    hops = injected = 0
    for place, blocks in enumerate(points):
        if engine.crosses_noc(array, operand, place):
            flows = boundary_flows(unrolled, operand, place, blocks, back[place], engine.sliding(array, plan, operand, place))
            reached, sent = engine.noc_traffic(unrolled, operand, place, blocks, flows)
            hops, injected = hops + engine.one(reached), injected + engine.one(sent)
    return hops, injected


def _different_network(case: Case, counts: OracleCounts, found: engine.LayerCost) -> list[str]:
    noc, wrong = case.array.noc, []
    for op in OPERANDS:
        wrong += _different(f"network, {op}", network_bits(case, op), (counts.hops_bits[op], counts.injected_bits[op]))
    wrong += _different("network energy", found.energy_by_pj["noc"], sum(counts.hops_bits.values()) / noc.hop_bits * noc.hop_pj.value)
    if noc.bits_per_cycle:
        wrong += _different("network cycles", found.port_cycles["noc"], -(-sum(counts.injected_bits.values()) // noc.bits_per_cycle))
    return wrong


class Problem(NamedTuple):
    layer: Layer
    array: SpatialArraySpec
    spatial: dict[str, tuple[Loop, ...]]


def random_problem(random: Random, refills: tuple[str, ...] = ("double", "single")) -> Problem:
    """A few loops, registers and buffers with too little room for everything, some shared by two or three operands."""
    bits = OperandBits(W=random.choice((8, 4, 16)), I=random.choice((8, 4)), O=random.choice((16, 24)), F=random.choice((8, 16)))
    sizes = dict.fromkeys(DIMENSIONS, 1)
    while not 8 <= prod(sizes.values()) <= 400:
        sizes = dict.fromkeys(DIMENSIONS, 1) | {d: random.choice((2, 3, 4, 5)) for d in random.sample(DIMENSIONS, random.randint(2, 4))}
    layer = Layer("l", sizes, *(tuple(random.randint(low, high) for _ in "yx") for low, high in ((1, 2), (1, 1), (0, 1))), bits=bits)  # type: ignore[arg-type]
    axes = {"x": random.randint(2, 4), "y": random.randint(1, 3)}

    def store(operands: Any, over: Any, capacity: int, price: float) -> dict[str, Any]:
        more = {"read_pj": price, "write_pj": price * 1.25, "refill": random.choice(refills)}
        return memory(operands, over, granule=random.choice((8, 16, 32)), capacity_bits=capacity, **more)

    memories, kind = {}, random.choice(("registers", "buffer", "both"))
    for op, width in (("W", bits.W), ("I", bits.I), ("O", max(bits.O, bits.F))):
        if kind != "buffer" and random.random() < 0.7:
            memories[f"reg_{op}"] = store(op, (), width * random.randint(1, 4), random.randint(1, 5) / 10)
    if kind != "registers":
        held = random.choice(("WIO", "WI", "IO", "WO"))
        memories["near"] = store(held, random.choice(("xy", "xy", "x")), 64 + random.randint(0, 400), random.randint(1, 8))
    if kind == "both" or random.random() < 0.3:
        memories["far"] = store("WIO", "xy", 64 + random.randint(100, 900), random.randint(5, 12))
    memories["top"] = memory("WIO", "xy", granule=random.choice((8, 16, 64)), read_pj=50.0, write_pj=60.0)
    array = small_array(axes, memories, bits, noc=random.choice(({}, {"hop_pj": 0.5, "hop_bits": 8})))
    return Problem(layer, array, random_lanes(random, layer, axes))


def returning_problem(random: Random) -> Problem:
    """Wide weights that are dear to fetch again, narrow sums with room for one or two: best sent back and forth."""
    bits = OperandBits(W=64, I=4, O=8, F=8)
    sizes = {"C": random.choice((2, 3, 4)), "P": random.choice((2, 3, 4)), random.choice("KQR"): random.choice((1, 2, 3))}
    registers = {"reg_W": memory("W", capacity_bits=64), "reg_O": memory("O", capacity_bits=8 * random.randint(1, 2))}
    near = {"near": memory("IO", "xy", capacity_bits=random.randint(12, 40), read_pj=3.0)} if random.random() < 0.5 else {}
    top = memory("WIO", "xy", granule=random.choice((8, 16)), read_pj=50.0, write_pj=60.0)
    array = small_array({"x": random.randint(1, 2), "y": random.randint(1, 2)}, registers | near | {"top": top}, bits)
    layer = Layer("l", sizes, bits=bits)
    return Problem(layer, array, random_lanes(random, layer, dict(array.axes)))


def random_lanes(random: Random, layer: Layer, axes: dict[str, int]) -> dict[str, tuple[Loop, ...]]:
    left, spatial = dict(layer.dims), dict[str, tuple[Loop, ...]]()
    for axis, size in axes.items():
        open_to = [d for d in DIMENSIONS if min(left[d], size) > 1]
        spatial[axis] = ()
        if open_to and random.random() < 0.8:
            dim = random.choice(open_to)
            spatial[axis] = ((dim, random.randint(2, min(left[dim], size))),)
            left[dim] = -(-left[dim] // spatial[axis][0][1])
    return spatial


def prime_loops(problem: Problem) -> list[Loop]:
    """The loops of every mapping in the space: primes of the steps each dimension takes, rounded up to products of 2, 3, 5, 7."""
    lanes = MappingPlan(problem.spatial, (), {}).unrolled
    loops = []
    for dim, size in problem.layer.dims.items():
        steps = smooth_above(-(-size // lanes(dim)))
        for prime in (2, 3, 5, 7):
            while steps % prime == 0:
                loops.append((dim, prime))
                steps //= prime
    return loops


def problems(count: int, make: Callable[..., Problem] = random_problem, **more: Any) -> Iterator[Problem]:
    """The first so many random problems small enough to list."""
    seed = 0
    while count:
        problem = make(Random(seed), **more)
        seed += 1
        if len(prime_loops(problem)) <= MOST_LOOPS:
            count -= 1
            yield problem


class Part(NamedTuple):
    """One operand's cuts under a loop order."""

    energy_pj: float
    tile_bits: dict[str, int]
    cuts: tuple[int, ...]


def exhaustive(problem: Problem) -> tuple[float, MappingPlan | None]:
    """Least energy over all loop orders and cuts. Operands meet only in the room they share, so each is costed by itself."""
    layer, array, spatial = problem
    best, best_plan = inf, None
    for order in sorted(set(permutations(prime_loops(problem)))):
        w_parts, i_parts, o_parts = parts(problem, order)
        for w in w_parts:
            for i in i_parts:
                for o in o_parts:
                    energy = w.energy_pj + i.energy_pj + o.energy_pj
                    if energy >= best:
                        break  # they come cheapest first
                    if fit(array, w, i, o):
                        best, best_plan = energy, MappingPlan(spatial, order, {"W": w.cuts, "I": i.cuts, "O": o.cuts})
    return best + layer.macs * array.mac.energy_pj.value, best_plan


def parts(problem: Problem, order: tuple[Loop, ...]) -> list[list[Part]]:
    """Every way to cut each operand's loops, cheapest first."""
    layer, array, spatial = problem
    unlimited, noc = roomy(array), array.noc
    options = {op: list(combinations_with_replacement(range(len(order) + 1), len(array.ladder(op)) - 1)) for op in OPERANDS}
    found: dict[str, list[Part]] = {op: [] for op in OPERANDS}
    for i in range(max(map(len, options.values()))):
        cuts = {op: options[op][min(i, len(options[op]) - 1)] for op in OPERANDS}
        case = Case(layer, unlimited, MappingPlan(spatial, order, cuts))
        cost = evaluate(*case)
        for op in OPERANDS:
            if i < len(options[op]):
                hops_pj = network_bits(case, op)[0] / noc.hop_bits * noc.hop_pj.value if noc.hop_pj.value else 0.0
                energy = sum(a.energy_pj for a in cost.accesses if a.operand == op) + hops_pj
                found[op].append(Part(energy, {t.memory: t.tile_bits for t in cost.refills if t.operand == op}, cuts[op]))
    return [sorted(found[op], key=lambda part: part.energy_pj) for op in OPERANDS]


def fit(array: SpatialArraySpec, *chosen: Part) -> bool:
    return all(sum(part.tile_bits.get(name, 0) for part in chosen) <= m.capacity_bits.value for name, m in array.memories.items())


def literally_all(problem: Problem) -> float:
    """The same with nothing taken apart: every order and every cut evaluated as it stands."""
    layer, array, spatial = problem
    best = inf
    for order in set(permutations(prime_loops(problem))):
        places = [list(combinations_with_replacement(range(len(order) + 1), len(array.ladder(op)) - 1)) for op in OPERANDS]
        for cuts in product(*places):
            with suppress(InfeasibleMappingError):
                best = min(best, evaluate(layer, array, MappingPlan(spatial, order, dict(zip(OPERANDS, cuts, strict=True)))).energy_pj)
    return best
