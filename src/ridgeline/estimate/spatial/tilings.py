"""All tilings and loop orders of one unrolling: cost tensors over the lattice, and the cheapest that fits.

    Unrolling ──lattice──> for every cut: energy and port cycles at every point, tile sizes against capacity
                   └──cheapest_chain──> points of all cuts ──> MappingPlan
    memories shared by several operands: branch and bound on how the room is divided
        a node allows each operand a range of tile sizes; its relaxation gives every operand all the room the others
        must leave it; if the answer overflows, the largest tile is split off into two nodes

The cost of a cut is exact, so the bound is, with one exception: on an array with two private memories for O, partial sums
that return between them are counted for one lane only (a lower bound; the mapping found is then costed exactly).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...target.array import DIMENSIONS, OPERANDS, SpatialArraySpec
from .chain import Costs, Cut, Lattice, cheapest_chain, lattice_for
from .cost import crosses_noc, noc_traffic
from .counts import Blocks, Flow, Known, Unrolled, boundary_flows
from .layer import REDUCTION, RELEVANT, Layer
from .mapping import Loop, MappingPlan
from .tiles import Slide
from .unrolling import STATIONARY, Spatial, stationary_place

NODE_LIMIT = 60
WHOLE_RUN = 1 << 40
ANYWHERE = np.ones(1, bool)
NEXT_LOOPS = ("Q", "P", "S", "R", "B", "G", "K", "C")
"""Order of loops between two cuts, which does not matter but where a memory slides along the first of them."""
Limits = Mapping[tuple[str, str], tuple[int, int]]
"""Range of tile bits allowed to (memory, operand)."""


@dataclass(frozen=True, slots=True)
class CutCosts:
    """What setting one cut costs, at every lattice point."""

    operand: str
    place: int
    memory: str | None
    """Whose tile the cut bounds; None: the register of a PE."""
    energy_pj: Costs
    port_cycles: Mapping[str, Costs]
    fill_cycles: Costs
    """Bringing one tile from the memory above, or taking it there."""
    wait_cycles: Costs
    """Refills that computing must wait for wherever the cut is: those of a memory that cannot hold two tiles."""
    tile_elements: Costs
    whole: NDArray[np.bool_]
    """Points where the tile is never refilled."""
    complete: NDArray[np.bool_]
    """For O: points outside which no reduction is left."""
    allowed: NDArray[np.bool_]


@dataclass(slots=True)
class Tilings:
    """Every tiling of a layer under one unrolling."""

    layer: Layer
    array: SpatialArraySpec
    spatial: Spatial
    dataflow: str = "any"
    with_cycles: bool = True
    least_cycles: int = 0
    """Cycles that no mapping of the layer can do without; leakage is charged for them."""
    known: Known = field(default_factory=Known)
    unrolled: Unrolled = field(init=False)
    lattice: Lattice = field(init=False)
    cuts: dict[str, list[CutCosts]] = field(init=False)
    fixed_energy_pj: float = field(init=False)
    fixed_cycles: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.unrolled = Unrolled(self.layer, self.array, self.spatial, self.with_cycles, self.known)
        self.lattice = lattice_for({d: -(-size // self.unrolled.lanes(d)) for d, size in self.layer.dims.items()})
        self.fixed_energy_pj = self.layer.macs * self.array.mac.energy_pj.value
        self.fixed_cycles = {}
        self._fix_accumulation()
        self.cuts = {op: [self._cut(op, place) for place in self._places(op)] for op in OPERANDS}

    @property
    def compute_cycles(self) -> int:
        return self.unrolled.compute_cycles()

    def energy_bound_pj(self) -> float:
        """No tiling costs less: every cut at its own cheapest point, with all the room there is."""
        static = self.array.static_w * max(self.least_cycles, self.compute_cycles) / self.array.clock_hz.value * 1e12
        return self.fixed_energy_pj + static + sum(self.least_energies_pj())

    def least_energies_pj(self) -> list[float]:
        """Of every cut by itself."""
        return [self._least(cut, cut.energy_pj) for cuts in self.cuts.values() for cut in cuts]

    def latency_bound(self) -> int:
        """No tiling is faster: compute, and each port's least traffic."""
        ports = dict(self.fixed_cycles)
        for cuts in self.cuts.values():
            for cut in cuts:
                for port, cycles in cut.port_cycles.items():
                    ports[port] = ports.get(port, 0) + int(min(self._least(cut, cycles), 1e18))
        return max(self.compute_cycles, *ports.values(), 0)

    def _least(self, cut: CutCosts, costs: Costs) -> float:
        return float(np.where(self.fits(cut), costs, np.inf).min())

    def fits(self, cut: CutCosts) -> NDArray[np.bool_]:
        """Where a cut may be, its tile alone in its memory."""
        if not cut.memory:
            return cut.allowed
        return cut.allowed & (self.least_bits(cut) <= self.array.memories[cut.memory].capacity_bits.value)

    def least_bits(self, cut: CutCosts) -> Costs:
        """Of a tile: results are narrow if the tile below was finished, which it was not if this one is not."""
        width: Any = getattr(self.layer.bits, cut.operand)
        if cut.operand == "O" and cut.place > 1:
            width = np.where(cut.complete, min(width, self.layer.bits.F), width)
        bits: Costs = cut.tile_elements * width
        return bits

    def _places(self, operand: str) -> range:
        """O has no cut at the PEs: a PE adds into it every cycle."""
        return range(1 if operand == "O" else 0, len(self.array.ladder(operand)))

    def _fix_accumulation(self) -> None:
        """What O costs at the PEs whatever the tiling; how often sums are read back there depends on the first cut above."""
        blocks = {d: np.ones(1, np.int64) for d in DIMENSIONS}
        flows = boundary_flows(self.unrolled, "O", 0, blocks, np.zeros(1, np.int64))
        steps = boundary_flows(self.unrolled, "O", 0, blocks)
        self.fixed_energy_pj += float(self._energy("O", 0, blocks, flows).reshape(-1)[0])
        for (name, direction), flow in steps.items():
            port = f"{name}.{self.array.memories[name].port_of('O', direction)}"
            self.fixed_cycles[port] = self.fixed_cycles.get(port, 0) + int(flow.cycles.reshape(-1)[0])
        if len(self.array.ladder("O")) == 1:
            self.fixed_energy_pj += self._read_back(np.asarray(self.unrolled.count(REDUCTION, blocks) - 1)).reshape(-1)[0]

    def _read_back(self, returned: NDArray[np.int64]) -> Costs:
        """Energy of reading partial sums back to the PEs `returned` times each."""
        blocks = {d: np.ones(1, np.int64) for d in DIMENSIONS}
        name = self.array.ladder("O")[0]
        flow = self.unrolled.flow("O", blocks, name, "rd_down", name, self.layer.bits.O)
        memory = self.array.memories[name]
        granule = memory.ports[memory.port_of("O", "rd_down")].granule
        energy = flow.words * granule * memory.energy_per_bit_pj("rd_down")
        if crosses_noc(self.array, "O", 0):
            energy = energy + flow.elements * self.layer.bits.O / self.array.noc.hop_bits * self.array.noc.hop_pj.value
        return np.asarray(energy * returned, np.float64)

    def _energy(self, operand: str, place: int, blocks: Blocks, flows: Mapping[tuple[str, str], Flow]) -> Costs:
        energy: Any = np.zeros(1)
        for (name, direction), flow in flows.items():
            memory = self.array.memories[name]
            granule = memory.ports[memory.port_of(operand, direction)].granule
            energy = energy + flow.words * (granule * memory.energy_per_bit_pj(direction))
        if self.array.noc.hop_pj.value and crosses_noc(self.array, operand, place):
            hops, _ = noc_traffic(self.unrolled, operand, place, blocks, flows)
            energy = energy + hops * (self.array.noc.hop_pj.value / self.array.noc.hop_bits)
        return np.asarray(energy, np.float64)

    def _cut(self, operand: str, place: int) -> CutCosts:
        unrolled, lattice, ladder = self.unrolled, self.lattice, self.array.ladder(operand)
        blocks = lattice.blocks
        ways = [boundary_flows(unrolled, operand, place, blocks, slide=slide) for slide in self._slides(operand, place)]
        energy: NDArray[Any] = np.asarray(reduce(np.minimum, [self._energy(operand, place, blocks, flows) for flows in ways]), np.float64)
        if operand == "O" and place == 1:
            energy = energy + self._read_back(self._returned_to_pes(blocks))
        ports: dict[str, Costs] = {}
        for name, direction in ways[0] if self.with_cycles else ():
            port = f"{name}.{self.array.memories[name].port_of(operand, direction)}"
            ports[port] = ports.get(port, np.zeros(1)) + reduce(np.minimum, [flows[name, direction].cycles for flows in ways])
        memory = ladder[place - 1] if place else None
        fill = self._fill_cycles(operand, ladder[place], blocks) if memory and self.with_cycles else np.zeros(1)
        waits = memory is not None and self.array.memories[memory].refill != "stream" and not self._can_double(memory)
        shared = self.array.memories[memory].shared_over if memory else ()
        tile = unrolled.largest(operand, blocks, shared)
        steps = unrolled.count(RELEVANT[operand], blocks)
        complete = unrolled.count(REDUCTION, blocks) == 1
        spread = lattice.spread
        nothing = np.zeros(1)
        waiting = spread(fill * unrolled.count(DIMENSIONS, blocks)) if waits and self.with_cycles else nothing
        timed = {p: spread(c) for p, c in ports.items()} if self.with_cycles else {}
        return CutCosts(
            operand, place, memory, spread(energy), timed, spread(fill) if self.with_cycles else nothing, waiting, spread(tile),
            spread(steps == 1), spread(complete) if operand == "O" else ANYWHERE, spread(self._allowed(operand, place, blocks)),
        )  # fmt: skip

    def _slides(self, operand: str, place: int) -> list[Slide | None]:
        """Ways a memory that streams inputs may move on, at best to the end of the layer: which loop comes next is not known yet."""
        if operand != "I" or place == 0 or self.array.memories[self.array.ladder("I")[place - 1]].refill != "stream":
            return [None]
        dims = self.layer.dims
        pairs = [pair for pair in (("P", "R"), ("Q", "S")) if dims[pair[1]] > 1]
        return [None, *(Slide(d, WHOLE_RUN) for pair in pairs for d in pair if dims[d] > 1)]

    def _fill_cycles(self, operand: str, above: str, blocks: Blocks) -> Costs:
        memory = self.array.memories[above]
        port = memory.ports[memory.port_of(operand, "wr_up" if operand == "O" else "rd_down")]
        tile = self.unrolled.largest(operand, blocks, memory.shared_over) * getattr(self.layer.bits, operand)
        cycles: Costs = np.ceil(tile / port.bits_per_cycle)
        return cycles

    def _returned_to_pes(self, blocks: Blocks) -> NDArray[np.int64]:
        """Visits less residencies that start from zero, all lanes of the PEs' memory counted."""
        shared = self.array.memories[self.array.ladder("O")[0]].shared_over
        ones = {d: np.ones(1, np.int64) for d in DIMENSIONS}
        visits = self.unrolled.active(REDUCTION, ones, shared)
        return visits - self.unrolled.active(REDUCTION, blocks, shared) + self.unrolled.count(REDUCTION, blocks) - 1

    def _allowed(self, operand: str, place: int, blocks: Blocks) -> NDArray[np.bool_]:
        """A register holds one element; a dataflow's stationary operand waits until its work is done."""
        ones = np.ones((1,) * len(DIMENSIONS), bool)

        def whole(dims: tuple[str, ...]) -> NDArray[np.bool_]:
            return np.asarray(self.unrolled.count(dims, blocks) == 1)

        if place == 0:
            for dim in RELEVANT[operand]:
                ones = ones & (np.asarray(blocks[dim]) == 1).reshape([-1 if d == dim else 1 for d in DIMENSIONS])
        if place != stationary_place(self.array, operand):
            return ones
        if self.dataflow == "rs" and operand == "W":
            return ones & whole(("Q", "S"))
        if STATIONARY.get(self.dataflow) == operand:
            return ones & whole(tuple(d for d in DIMENSIONS if d not in RELEVANT[operand]))
        return ones

    def tile_bits(self, cut: CutCosts, finished_below: bool, doubled: bool) -> Costs:
        """Room a cut's tile takes; `doubled` counts a second copy of a tile that is refilled, in memories that keep one."""
        width = self.layer.bits.F if finished_below else getattr(self.layer.bits, cut.operand)
        tile = cut.tile_elements * width
        if doubled and cut.memory and self._can_double(cut.memory):
            tile = tile * np.where(cut.whole, 1, 2)
        return tile

    def _can_double(self, name: str) -> bool:
        """Whether a memory could hold two elements of each of its operands."""
        memory = self.array.memories[name]
        return memory.refill == "double" and memory.capacity_bits.value >= 2 * sum(getattr(self.layer.bits, op) for op in memory.operands)

    def solve(
        self, costs: Mapping[tuple[str, int], Costs], doubled: bool = False, bound: float = np.inf
    ) -> tuple[MappingPlan | None, float]:
        """(cheapest mapping that fits, lower bound on all of them) for given costs of each (operand, place)."""
        capacity = {name: int(m.capacity_bits.value) for name, m in self.array.memories.items()}
        limits: dict[tuple[str, str], tuple[int, int]] = {
            (name, op): (0, capacity[name]) for name, m in self.array.memories.items() for op in m.operands
        }
        order = count()
        value, points = self._relaxed(costs, limits, doubled, bound)
        queue = [(value, next(order), limits, points)]
        for _ in range(NODE_LIMIT):
            value, _, limits, points = heapq.heappop(queue)
            if not np.isfinite(value) or value >= bound:
                return None, value
            split = self._overflow(points, limits, doubled)
            if split is None:
                return self.plan(points), value
            key, size = split
            low, high = limits[key]
            for narrowed in ((low, size - 1), (size, high)):
                child = {**limits, key: narrowed}
                value, points = self._relaxed(costs, child, doubled, bound)
                if np.isfinite(value):
                    heapq.heappush(queue, (value, next(order), child, points))
            if not queue:
                return None, float("inf")
        return self._even_shares(costs, doubled), queue[0][0]

    def _even_shares(self, costs: Mapping[tuple[str, int], Costs], doubled: bool) -> MappingPlan | None:
        """What fits when every operand of a memory gets an equal part of it: for when dividing it better takes too long."""
        limits: Limits = {
            (name, op): (0, int(memory.capacity_bits.value) // len(memory.operands))
            for name, memory in self.array.memories.items()
            for op in memory.operands
        }
        value, points = self._relaxed(costs, limits, doubled, np.inf)
        return self.plan(points) if np.isfinite(value) else None

    def _relaxed(
        self, costs: Mapping[tuple[str, int], Costs], limits: Limits, doubled: bool, bound: float
    ) -> tuple[float, list[list[tuple[int, ...]]]]:
        ladders = [[self._variants(cut, costs[cut.operand, cut.place], limits, doubled) for cut in self.cuts[op]] for op in OPERANDS]
        return cheapest_chain(ladders, self.lattice.fine_shape, bound)

    def _variants(self, cut: CutCosts, costs: Costs, limits: Limits, doubled: bool) -> dict[int, list[Cut]]:
        def fitted(finished_below: bool) -> Costs:
            fits = cut.allowed
            if cut.memory:
                others = sum(low for (name, op), (low, _) in limits.items() if name == cut.memory and op != cut.operand)
                low, high = limits[cut.memory, cut.operand]
                tile = self.tile_bits(cut, finished_below, doubled)
                fits = fits & (tile >= low) & (tile <= min(high, self.array.memories[cut.memory].capacity_bits.value - others))
            return np.where(fits, costs, np.inf)

        if cut.operand != "O":
            return {0: [Cut(fitted(False))]}
        variants = {}
        for before in (0, 1) if cut.place > 1 else (0,):
            fits = fitted(before == 1)
            variants[before] = [Cut(np.where(cut.complete, fits, np.inf), 1), Cut(np.where(cut.complete, np.inf, fits), 0)]
        return variants

    def _overflow(self, points: list[list[tuple[int, ...]]], limits: Limits, doubled: bool) -> tuple[tuple[str, str], int] | None:
        """The operand whose tile to split on, in the first memory whose tiles do not fit together."""
        tiles: dict[str, dict[str, int]] = {}
        for op, places in zip(OPERANDS, points, strict=True):
            finished = False
            for cut, point in zip(self.cuts[op], places, strict=True):
                if cut.memory:
                    tiles.setdefault(cut.memory, {})[op] = int(self.tile_bits(cut, finished and cut.place > 1, doubled)[point])
                finished = op == "O" and bool(cut.complete[point])
        for name, used in tiles.items():
            if sum(used.values()) > self.array.memories[name].capacity_bits.value:
                # split where both halves exclude this answer: the largest tile that its range does not pin down
                open_to_split = [op for op in used if limits[name, op][0] < used[op]]
                largest = max(open_to_split, key=lambda op: used[op])
                return (name, largest), used[largest]
        return None

    def plan(self, points: list[list[tuple[int, ...]]], first: str = NEXT_LOOPS[0]) -> MappingPlan:
        """Loops between the points, in rising order, and where each operand's cuts fall among them; loops over `first` come first."""
        chain = sorted(
            {point for places in points for point in places} | {tuple(n - 1 for n in self.lattice.fine_shape)}, key=lambda p: (sum(p), p)
        )
        loops: list[Loop] = []
        position: dict[tuple[int, ...], int] = {}
        inside = dict.fromkeys(DIMENSIONS, 1)
        for point in chain:
            reached = self.lattice.point(point)
            loops += [(d, reached[d] // inside[d]) for d in dict.fromkeys((first, *NEXT_LOOPS)) if reached[d] > inside[d]]
            inside, position[point] = reached, len(loops)
        cuts = {}
        for op, places in zip(OPERANDS, points, strict=True):
            kept = places if op == "O" else places[1:]
            cuts[op] = tuple(position[p] for p in kept)
        return MappingPlan(dict(self.spatial), tuple(loops), cuts, self.dataflow)
