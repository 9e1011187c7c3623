"""A loop nest walked step by step, every transfer counted: what the analytical counts must equal.

    walk      time tuples, outermost loop slowest, iterations past the layer's edge skipped
                └─> Step(digits of each loop, for each operand the (PE, element) pairs of the active PEs)
    climb     per operand, outermost memory first: its residency is cut where a loop at or above the child's position advances
                ├─ start   tiles come down: parent rd_down (the union of its children's tiles), each child wr_down (its own)
                ├─ inside  the child's own children, down to the PEs, which multiply
                └─ end     outputs go up: child rd_up, parent wr_up, and the child forgets them

Nothing is multiplied out: a tile is the Python set of elements that active PEs ask for during a residency, and a partial sum
carries the number of products in it, so that one lost or added twice fails an assertion at the end. Level 0 of each ladder
is the PEs, level l its l-th memory. Needs no search, no capacity, no timing; one call of the layer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, product
from operator import ge
from typing import NamedTuple

from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.mapping import MappingPlan
from ridgeline.target.array import DIMENSIONS, OPERANDS, SpatialArraySpec

# Stated again here, so that a slip in the engine's own table is seen.
INDEXED_BY = {"W": "GKCRS", "I": "BGCPQRS", "O": "BGKPQ"}
SUMMED_OVER = "CRS"
PES = "PE"

Element = tuple[int, ...]
Instance = tuple[int, ...]
Stream = tuple[str, str, str]
"""(memory, operand, direction)."""
Tiles = dict[Instance, set[Element]]


@dataclass(slots=True)
class OracleCounts:
    """Whole numbers, summed over instances and events; what never moved counts 0."""

    words: Counter[Stream] = field(default_factory=Counter)
    elements: Counter[Stream] = field(default_factory=Counter)
    transfers: Counter[Stream] = field(default_factory=Counter)
    compute_cycles: int = 0
    macs: int = 0
    hops: Counter[Stream] = field(default_factory=Counter)
    """Elements by (child memory or PES, operand, "down" or "up")."""
    hops_elements: Counter[str] = field(default_factory=Counter)
    hops_bits: Counter[str] = field(default_factory=Counter)
    injected_elements: Counter[str] = field(default_factory=Counter)
    injected_bits: Counter[str] = field(default_factory=Counter)
    tile_elements: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Largest tile of (memory, operand) in any instance at any event."""


class ProcessingElement(NamedTuple):
    place: dict[str, int]
    """Along each axis."""
    lane: dict[str, int]
    """Along each dimension, all axes together."""
    digits: tuple[tuple[str, str, int], ...]
    """(axis, dimension, digit) of each unrolled loop."""


class Step(NamedTuple):
    """One cycle: where each loop stands, innermost first, and who asks for what."""

    digits: tuple[int, ...]
    needs: dict[str, list[tuple[int, Element]]]


def simulate(layer: Layer, array: SpatialArraySpec, plan: MappingPlan) -> OracleCounts:
    """Walk the mapping once and count."""
    counts = OracleCounts()
    pes = list(working_pes(array, plan))
    steps = list(walk(layer, plan, pes))
    counts.compute_cycles = len(steps)
    counts.macs = sum(len(step.needs["O"]) for step in steps)
    for operand in OPERANDS:
        Ladder(operand, layer, array, plan, pes, counts).run(steps)
    return counts


def working_pes(array: SpatialArraySpec, plan: MappingPlan) -> Iterator[ProcessingElement]:
    """The PEs the unrolling reaches; lanes are numbered innermost axis first, within an axis innermost loop first."""
    for place in product(*(range(size) for size in array.axes.values())):
        along = dict(zip(array.axes, place, strict=True))
        lane, radix, digits = dict.fromkeys(DIMENSIONS, 0), dict.fromkeys(DIMENSIONS, 1), []
        idle = False
        for axis, rest in along.items():
            for dim, factor in plan.spatial.get(axis, ()):
                rest, digit = divmod(rest, factor)
                lane[dim] += digit * radix[dim]
                radix[dim] *= factor
                digits.append((axis, dim, digit))
            idle = idle or rest > 0
        if not idle:
            yield ProcessingElement(along, lane, tuple(digits))


def walk(layer: Layer, plan: MappingPlan, pes: list[ProcessingElement]) -> Iterator[Step]:
    lanes = {dim: 1 + max(pe.lane[dim] for pe in pes) for dim in DIMENSIONS}
    sizes = [layer.dims[dim] for dim in "BGKCPQRS"]
    for digits, time in time_tuples(layer, plan, lanes):
        needs: dict[str, list[tuple[int, Element]]] = {operand: [] for operand in OPERANDS}
        for number, pe in enumerate(pes):
            index = [time[dim] * lanes[dim] + pe.lane[dim] for dim in "BGKCPQRS"]
            if any(map(ge, index, sizes)):
                continue
            b, g, k, c, p, q, r, s = index
            needs["W"].append((number, (g, k, c, r, s)))
            needs["O"].append((number, (b, g, k, p, q)))
            y = p * layer.stride[0] + r * layer.dilation[0] - layer.padding[0]
            x = q * layer.stride[1] + s * layer.dilation[1] - layer.padding[1]
            if 0 <= y < layer.input_size[0] and 0 <= x < layer.input_size[1]:
                needs["I"].append((number, (b, g, c, y, x)))
        yield Step(digits, needs)


def time_tuples(layer: Layer, plan: MappingPlan, lanes: dict[str, int]) -> Iterator[tuple[tuple[int, ...], dict[str, int]]]:
    """(digit of each loop, time index of each dimension) in the order the loops run."""
    weights, seen = [], dict.fromkeys(DIMENSIONS, 1)
    for dim, factor in plan.loops:
        weights.append(seen[dim])
        seen[dim] *= factor

    def nest(loop: int, digits: tuple[int, ...], time: dict[str, int]) -> Iterator[tuple[tuple[int, ...], dict[str, int]]]:
        if loop < 0:
            yield digits, time
            return
        dim, factor = plan.loops[loop]
        for digit in range(factor):
            begins = time[dim] + digit * weights[loop]
            if begins * lanes[dim] >= layer.dims[dim]:
                return  # already the first point inside lies past the edge
            yield from nest(loop - 1, (digit, *digits), {**time, dim: begins})

    yield from nest(len(plan.loops) - 1, (), dict.fromkeys(DIMENSIONS, 0))


def residencies(steps: list[Step], position: int) -> Iterator[list[Step]]:
    """Runs of steps during which no loop at or above `position` advances."""
    for _, run in groupby(steps, key=lambda step: step.digits[position:]):
        yield list(run)


class Ladder:
    """One operand and the memories it climbs, each instance with what it holds now: elements, and the products summed in each."""

    def __init__(
        self, operand: str, layer: Layer, array: SpatialArraySpec, plan: MappingPlan, pes: list[ProcessingElement], counts: OracleCounts
    ) -> None:
        self.operand, self.layer, self.array, self.plan, self.counts = operand, layer, array, plan, counts
        self.names = [PES, *array.ladder(operand)]
        self.shared = [frozenset[str](), *(frozenset(array.memories[name].shared_over) for name in self.names[1:])]
        self.instance_of = [[tuple(at for axis, at in pe.place.items() if axis not in axes) for pe in pes] for axes in self.shared]
        self.positions = [self._position(cut) for cut in (0, *plan.cuts[operand])]
        if operand == "O":
            self.positions[0] = 0  # a PE has no accumulator of its own: sums go up every cycle
        self.parent_of = [dict(zip(low, high, strict=True)) for low, high in zip(self.instance_of, self.instance_of[1:], strict=False)]
        self.first_lane = [self._first_lanes(level, pes) for level in range(len(self.names) - 1)]
        self.held: list[dict[Instance, dict[Element, int]]] = [defaultdict(dict) for _ in self.names]
        self.up_bits = [0] * len(self.names)
        self.before: dict[int, tuple[tuple[int, ...], Tiles]] = {}
        self.moved: dict[tuple[int, str, int, int], int] = defaultdict(int)
        self.crossed: dict[tuple[int, str, int, int, int, int], int] = defaultdict(int)

    def _position(self, cut: int) -> int:
        for at, (dim, factor) in enumerate(self.plan.loops):
            if at >= cut and factor > 1 and dim in INDEXED_BY[self.operand]:
                return at
        return len(self.plan.loops)

    def _first_lanes(self, level: int, pes: list[ProcessingElement]) -> set[Instance]:
        """Instances that partial sums come back to: first along each reduction unrolled between them and their parent."""
        between = self.shared[level + 1] - self.shared[level]
        return {
            instance
            for pe, instance in zip(pes, self.instance_of[level], strict=True)
            if all(digit == 0 for axis, dim, digit in pe.digits if axis in between and dim in SUMMED_OVER)
        }

    def run(self, steps: list[Step]) -> None:
        top = len(self.names) - 1
        everything = self.tiles(top, steps)
        if self.operand == "O":
            self._set_up_bits(steps)
        else:
            self.held[top] = {instance: dict.fromkeys(tile, 0) for instance, tile in everything.items()}
        self.hold(top, steps)
        self.settle()
        if self.operand == "O":
            products = self.layer.dims["C"] * self.layer.dims["R"] * self.layer.dims["S"]
            assert self.held[top] == {instance: dict.fromkeys(tile, products) for instance, tile in everything.items()}

    def _set_up_bits(self, steps: list[Step]) -> None:
        """Width of what leaves each level: finished once no reduction loop that runs twice lies above."""
        summing = [at for at, (dim, _) in enumerate(self.plan.loops) if dim in SUMMED_OVER and any(step.digits[at] for step in steps)]
        bits = self.layer.bits
        for level, position in enumerate(self.positions):
            self.up_bits[level] = bits.O if level == 0 or any(at >= position for at in summing) else bits.F

    def tiles(self, level: int, steps: Iterable[Step]) -> Tiles:
        """What each instance of a level is asked for during `steps`."""
        found: Tiles = defaultdict(set)
        instance_of = self.instance_of[level]
        for step in steps:
            for pe, element in step.needs[self.operand]:
                found[instance_of[pe]].add(element)
        if level > 0:
            key = self.names[level], self.operand
            self.counts.tile_elements[key] = max([self.counts.tile_elements[key], *map(len, found.values())])
        return dict(found)

    def hold(self, level: int, steps: list[Step]) -> None:
        """`level` keeps what it holds during `steps`, while the residencies of the level below come and go."""
        if level == 0:
            return self.multiply(steps)
        below = level - 1
        for run in residencies(steps, self.positions[below]):
            tiles = self.tiles(below, run)
            families: dict[Instance, Tiles] = defaultdict(dict)
            for child, tile in tiles.items():
                families[self.parent_of[below][child]][child] = tile
            kept = self._kept(below, run[0].digits)
            for parent, children in families.items():
                if self.operand == "O":
                    self.return_sums(below, parent, children)
                else:
                    self.refill(below, parent, children, kept)
            self.before[below] = run[0].digits, tiles
            self.hold(below, run)
            if self.operand == "O":
                for parent, children in families.items():
                    self.send_up(below, parent, children)
            self.held[below].clear()

    def _kept(self, below: int, digits: tuple[int, ...]) -> Tiles:
        """What a level that streams inputs still holds of its last tiles: all, if only the loop its refill sits in has moved on."""
        position, loops = self.positions[below], self.plan.loops
        if below == 0 or self.operand != "I" or position == len(loops) or self.array.memories[self.names[below]].refill != "stream":
            return {}
        dim = loops[position][0]
        end = next((at for at in range(position, len(loops)) if loops[at][1] > 1 and loops[at][0] != dim), len(loops))
        last_digits, last_tiles = self.before.get(below, ((), {}))
        return last_tiles if dim in "PQRS" and last_digits[end:] == digits[end:] else {}

    def multiply(self, steps: list[Step]) -> None:
        for step in steps:
            for pe, element in step.needs[self.operand]:
                register = self.held[0][self.instance_of[0][pe]]
                if self.operand == "O":
                    register[element] = register.get(element, 0) + 1
                else:
                    assert element in register

    def refill(self, below: int, parent: Instance, children: Tiles, kept: Tiles) -> None:
        """W and I: one read for all children that share a word, one write in each child; nobody is sent what they keep."""
        news = {child: tile - kept.get(child, set()) for child, tile in children.items()}
        union = set().union(*news.values())
        assert union <= self.held[below + 1][parent].keys()
        bits = getattr(self.layer.bits, self.operand)
        self.move(below + 1, "rd_down", len(union), bits)
        for child, tile in children.items():
            self.move(below, "wr_down", len(news[child]), bits)
            self.held[below][child] = dict.fromkeys(tile, 0)
        self.cross_network(below, "down", sum(map(len, news.values())), len(union), bits)

    def return_sums(self, below: int, parent: Instance, children: Tiles) -> None:
        """O, start of a residency: sums the parent holds go to the first reduction lane; the other lanes start from zero."""
        union, sums, bits = set().union(*children.values()), self.held[below + 1][parent], self.layer.bits.O
        returning = union & sums.keys()
        assert returning in (set(), union)  # the elements of a tile are always visited together
        if not returning:
            return
        self.move(below + 1, "rd_down", len(union), bits)
        receivers = [child for child in children if child in self.first_lane[below]]
        for child in receivers:
            self.move(below, "wr_down", len(children[child]), bits)
            self.held[below][child] = {element: sums.pop(element) for element in children[child]}
        assert not union & sums.keys()  # each sum went to one child; pop() saw to it that none went to two
        self.cross_network(below, "down", sum(len(children[child]) for child in receivers), len(union), bits)

    def send_up(self, below: int, parent: Instance, children: Tiles) -> None:
        """O, end of a residency: each child gives up all it holds; sums of one element are added on the way."""
        union, sums, bits = set().union(*children.values()), self.held[below + 1][parent], self.up_bits[below]
        leaving = self.layer.bits.O if self._summed_on_the_way(below) else bits
        for child, tile in children.items():
            assert self.held[below][child].keys() == tile
            self.move(below, "rd_up", len(tile), leaving)
            for element, products in self.held[below][child].items():
                sums[element] = sums.get(element, 0) + products
        self.move(below + 1, "wr_up", len(union), bits)
        self.cross_network(below, "up", sum(map(len, children.values())), len(union), bits, leaving)

    def _summed_on_the_way(self, below: int) -> bool:
        """Whether a reduction is unrolled between a level and the one above: what leaves is then still partial."""
        between = self.shared[below + 1] - self.shared[below]
        return any(dim in SUMMED_OVER and factor > 1 for axis in between for dim, factor in self.plan.spatial.get(axis, ()))

    def move(self, level: int, direction: str, count: int, bits: int) -> None:
        """One transfer of `count` elements through one port of one instance; the PEs have no ports."""
        if level > 0 and count > 0:
            self.moved[level, direction, count, bits] += 1

    def cross_network(self, below: int, way: str, reached: int, injected: int, bits: int, reached_bits: int | None = None) -> None:
        """Between a level and the one above, where the one above is shared over more axes."""
        if self.shared[below] < self.shared[below + 1]:
            self.crossed[below, way, reached, injected, bits, reached_bits or bits] += 1

    def settle(self) -> None:
        """Add up what moved; each transfer is rounded up to whole words of its port."""
        counts, operand = self.counts, self.operand
        for (level, direction, count, bits), times in self.moved.items():
            memory = self.array.memories[self.names[level]]
            granule = memory.ports[memory.port_of(operand, direction)].granule
            stream = self.names[level], operand, direction
            counts.words[stream] += times * -(-count * bits // granule)
            counts.elements[stream] += times * count
            counts.transfers[stream] += times
        for (below, way, reached, injected, bits, reached_bits), times in self.crossed.items():
            counts.hops[self.names[below], operand, way] += times * reached
            counts.hops_elements[operand] += times * reached
            counts.hops_bits[operand] += times * reached * reached_bits
            counts.injected_elements[operand] += times * injected
            counts.injected_bits[operand] += times * injected * bits
