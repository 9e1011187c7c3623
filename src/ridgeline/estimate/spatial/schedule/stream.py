"""A mapped layer as the instructions an accelerator runs, one turn of its outer loops after another.

    Layer, SpatialArraySpec, MappingPlan ──stream──> (instructions, resources) ──schedule──> Timeline          [cycles]

    step         one turn of the loops from the lowest refill of an operand's top on-chip memory upwards; the rest lies on chip
      load X       a new tile comes down, into buffer X:0 or X:1; holds the port of the outermost memory it passes
      load O       partial sums come back, unless it is the tile's first visit
      begin        the step's tiles are there, and the step before has ended
      compute      the step's share of the on-chip time; holds the array, reads W, I and O, writes O
      store O      results go up once their last step is done; holds the port they pass
    fill, drain  between these and the multipliers: the first tiles on their way down, the last results on their way up

Buffers are the registers that make instructions wait: two an operand where its refill hides (`latency.Refill`), else one. A
`stream` memory, which replaces words as they are used up, counts as two.

stream X     an operand with no memory on chip passes its port while its step runs, and the next step waits for the rest of it.
             So does one whose refills are so many that they would take more than MOST_INSTRUCTIONS: steps are then turns of a
             loop further out, and the label says how many refills each stands for. (Where these do not hide, compute waits too.) A port
             below that serves nothing else holds up the one outside where it is slower, as with single tiles.
bursts       Transfers are cut into pieces of at most an eighth of a mean step, so that a long load lets a short urgent one pass;
             pieces are longer where they would take more than MOST_INSTRUCTIONS.

Durations are those of each tile, edges and padding included; steps share the on-chip time by the cycles they compute, so all
together hold the array for just that, and every port for at least its traffic. A tile is there when the slower of both memories'
ports and the network have passed it on. Meanwhile the outermost port is held for its own part only, unless the port below
serves nothing else; a port below that does counts in the on-chip time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from ....target.array import DIMENSIONS, OPERANDS, Port, SpatialArraySpec
from ..cost import Access, LayerCost, evaluate, sliding
from ..counts import Unrolled
from ..latency import Refill
from ..layer import REDUCTION, RELEVANT, Layer
from ..mapping import MappingPlan
from ..tiles import Slide, extents, lane_groups
from ..windows import BURSTS_A_STEP
from .instructions import MOST_CYCLES, Instruction
from .scheduler import Timeline, schedule

MOST_INSTRUCTIONS = 200_000
MOST_OF_A_STEP = 6  # begin, compute, and W, I, O down, O up
ARRAY = "array"
WINDOWS = (("P", "R"), ("Q", "S"))

Tile = Mapping[str, int]
"""A whole number for each dimension."""
Pair = tuple[int, int]


def schedule_layer(layer: Layer, array: SpatialArraySpec, plan: MappingPlan) -> Timeline:
    """When each instruction of `stream` runs."""
    return schedule(*stream(layer, array, plan))


def stream(layer: Layer, array: SpatialArraySpec, plan: MappingPlan) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    """Instructions in program order; one unit of each resource: the array and the outermost memory's ports."""
    return _Program(evaluate(layer, array, plan), array).write()


@dataclass(frozen=True, slots=True)
class Transfer:
    """One tile through one port of the outermost memory."""

    port: str
    cycles: int
    later: int = 0
    """Cycles from the last one on the port until the tile is there, or its place free."""


class _Sizes:
    """Elements of every tile of an operand: (all that are moved, those of the busiest instance)."""

    def __init__(self, unrolled: Unrolled, operand: str, blocks: Tile, held_over: tuple[str, ...], slide: Slide | None) -> None:
        plain = ("B", "G", "C") if operand == "I" else RELEVANT[operand]
        self.plain = {dim: _lengths(unrolled, dim, blocks[dim], held_over) for dim in plain}
        self.windows = {pair: _rows(unrolled, pair, blocks, held_over, slide) for pair in WINDOWS} if operand == "I" else {}

    def of(self, tile: Tile) -> Pair:
        pairs = [lengths[tile[dim]] for dim, lengths in self.plain.items()]
        pairs += [rows.get((tile[out], tile[tap]), (0, 0)) for (out, tap), rows in self.windows.items()]
        return prod(moved for moved, _ in pairs), prod(busiest for _, busiest in pairs)


def _lengths(unrolled: Unrolled, dim: str, block: int, held_over: tuple[str, ...]) -> list[Pair]:
    size, span, pattern = unrolled.layer.dims[dim], block * unrolled.lanes(dim), unrolled.pattern(dim, held_over)
    lengths = (min(span, size - start) for start in range(0, size, span))
    return [(length, extents(length, block, pattern).largest) for length in lengths]


def _rows(unrolled: Unrolled, dims: tuple[str, str], blocks: Tile, held_over: tuple[str, ...], slide: Slide | None) -> dict[Pair, Pair]:
    """Input rows of each (output tile, tap tile); with `slide`, those that the tile before it in its run does not hold."""
    held = _rows_held(unrolled, dims, blocks, held_over)
    along = dims.index(slide.dim) if slide and slide.dim in dims else None
    moved = {}
    for tile, instances in held.items():
        before: dict[Pair, set[int]] = {}
        if slide and along is not None and tile[along] % slide.run:
            before = held.get((tile[0] - (along == 0), tile[1] - (along == 1)), {})
        new = [rows - before.get(instance, set()) for instance, rows in instances.items()]
        moved[tile] = len(set().union(*new)), max(map(len, new))
    return moved


def _rows_held(unrolled: Unrolled, dims: tuple[str, str], blocks: Tile, held_over: tuple[str, ...]) -> dict[Pair, dict[Pair, set[int]]]:
    """{tile: {instance: rows}}, padding left out."""
    layer, axis = unrolled.layer, WINDOWS.index(dims)
    stride, gap, pad, size = layer.stride[axis], layer.dilation[axis], layer.padding[axis], layer.input_size[axis]
    (_, out_groups), (_, tap_groups) = (lane_groups(unrolled.pattern(dim, held_over)) for dim in dims)
    out_span, tap_span = (blocks[dim] * unrolled.lanes(dim) for dim in dims)
    held: dict[Pair, dict[Pair, set[int]]] = {}
    for out in range(layer.dims[dims[0]]):
        for tap in range(layer.dims[dims[1]]):
            if 0 <= (row := out * stride + tap * gap - pad) < size:
                instance = out_groups[out % len(out_groups)], tap_groups[tap % len(tap_groups)]
                held.setdefault((out // out_span, tap // tap_span), {}).setdefault(instance, set()).add(row)
    return held


class _Boundary:
    """One operand between the outermost memory and its top on-chip one."""

    def __init__(self, unrolled: Unrolled, plan: MappingPlan, refill: Refill, paced: frozenset[str]) -> None:
        array, layer, operand = unrolled.array, unrolled.layer, refill.operand
        self.array, self.operand, self.refill, self.paced = array, operand, refill, paced
        self.position = plan.refill_position(operand, plan.cuts[operand][-1])
        self.blocks = {dim: plan.block(dim, self.position) for dim in DIMENSIONS}
        self.copies = 2 if refill.hidden else 1
        self.below, self.above = array.ladder(operand)[-2:]
        self.between = set(array.memories[self.above].shared_over) - set(array.memories[self.below].shared_over)
        slide = sliding(array, plan, operand, len(array.ladder(operand)) - 1)
        self.sizes = _Sizes(unrolled, operand, self.blocks, array.memories[self.below].shared_over, slide)
        self.bits: int = getattr(layer.bits, operand)
        finished = all(layer.dims[d] <= self.blocks[d] * unrolled.lanes(d) for d in REDUCTION)
        added = any(d in REDUCTION and f > 1 for axis in self.between for d, f in plan.spatial.get(axis, ()))
        self.up_bits = layer.bits.F if finished else layer.bits.O
        self.leaving_bits = layer.bits.O if added else self.up_bits  # sums still to be added to others on the way

    def tile(self, begins: Tile) -> Tile:
        return {dim: begin // self.blocks[dim] for dim, begin in begins.items()}

    def load(self, begins: Tile) -> Transfer:
        asked = max(0, self.array.memories[self.above].latency_cycles - 1)  # a write waits for no answer
        return self._transfer(begins, ("rd_down", "wr_down"), self.bits, self.bits, asked)

    def store(self, begins: Tile) -> Transfer:
        return self._transfer(begins, ("wr_up", "rd_up"), self.up_bits, self.leaving_bits, 0)

    def _transfer(self, begins: Tile, ways: tuple[str, str], bits: int, below_bits: int, asked: int) -> Transfer:
        moved, busiest = self.sizes.of(self.tile(begins))
        (name, port), (name_below, port_below) = self._port(self.above, ways[0]), self._port(self.below, ways[1])
        cycles, below = _port_cycles(port, moved * bits), _port_cycles(port_below, busiest * below_bits)
        if name_below in self.paced:
            cycles = max(cycles, below)
        return Transfer(name, cycles, max(0, below - cycles, self._network(moved * bits) - cycles) + asked)

    def _port(self, memory: str, way: str) -> tuple[str, Port]:
        name = self.array.memories[memory].port_of(self.operand, way)
        return f"{memory}.{name}", self.array.memories[memory].ports[name]

    def _network(self, bits: int) -> int:
        if not self.between:
            return 0
        if self.array.systolic:  # shifted in row by row, all rows whether used or not; results leave with the skew of the grid
            return 0 if self.operand == "O" else next(iter(self.array.axes.values()))
        return -(-bits // self.array.noc.bits_per_cycle) if self.array.noc.bits_per_cycle else 0


def _port_cycles(port: Port, bits: int) -> int:
    words = -(-bits // port.granule)
    return -(-words // (port.bits_per_cycle // port.granule))


def _paced_ports(cost: LayerCost, array: SpatialArraySpec) -> frozenset[str]:
    """On-chip ports that carry nothing but what passes one port of the outermost memory."""
    partners: dict[str, set[str]] = {}
    for access in cost.accesses:
        below, above = ("", *array.ladder(access.operand))[-2:]
        if access.cycles and access.memory != above:
            ways = {"wr_down": "rd_down", "rd_up": "wr_up"}
            crosses = access.memory == below and access.direction in ways
            partner = array.memories[above].port_of(access.operand, ways[access.direction]) if crosses else ""
            partners.setdefault(f"{access.memory}.{access.port}", set()).add(partner)
    return frozenset(name for name, found in partners.items() if len(found) == 1 and "" not in found)


class _Share:
    """A whole number of cycles dealt out by parts, so that all parts together get all of it."""

    def __init__(self, total: int, parts: int) -> None:
        self.total, self.parts, self.seen = total, parts, 0

    def take(self, part: int) -> int:
        before, self.seen = self.total * self.seen // self.parts, self.seen + part
        return self.total * self.seen // self.parts - before


class _Program:
    """Writes the instructions of one layer."""

    def __init__(self, cost: LayerCost, array: SpatialArraySpec) -> None:
        self.cost, self.array, self.layer, self.plan = cost, array, cost.layer, cost.plan
        self.unrolled = Unrolled(self.layer, array, self.plan.spatial)
        self.outermost = list(array.memories)[-1]
        self.tops = {row.operand: row for row in cost.refills if row.memory == array.ladder(row.operand)[-2]}
        self.position = self._walk_from()
        self.steps = self._count(self.position)
        paced = _paced_ports(cost, array)
        self.walked = {
            op: _Boundary(self.unrolled, self.plan, row, paced) for op, row in self.tops.items() if self._refilled_at(op) >= self.position
        }
        outside = [a for a in cost.accesses if a.memory == self.outermost]
        compute = cost.latency.compute
        self.on_chip = _Share(cost.latency.on_chip, compute)
        self.streams = {
            a: (f"{self.outermost}.{a.port}", _Share(self._passing(a, paced), compute))
            for a in outside
            if a.operand not in self.walked and a.cycles
        }
        traffic = sum(a.cycles for a in outside) + sum(cost.port_cycles[name] for name in paced)
        mean_step = cost.latency.on_chip // self.steps
        self.burst = max(1, -(-mean_step // BURSTS_A_STEP), -(-2 * traffic // MOST_INSTRUCTIONS))
        self.instructions: list[Instruction] = []

    def _passing(self, access: Access, paced: frozenset[str]) -> int:
        """Cycles of an access of the outermost memory, or of a port below that is paced by it, where that is slower."""
        below = (*self.array.ladder(access.operand)[-2:-1], "")[0]
        way = {"rd_down": "wr_down", "wr_up": "rd_up"}[access.direction]
        others = [a for a in self.cost.accesses if (a.operand, a.memory, a.direction) == (access.operand, below, way)]
        return max([access.cycles, *(a.cycles for a in others if f"{a.memory}.{a.port}" in paced)])

    def _refilled_at(self, operand: str) -> int:
        return self.plan.refill_position(operand, self.plan.cuts[operand][-1])

    def _count(self, position: int) -> int:
        """Turns of the loops from `position` on."""
        return prod(-(-size // (self.plan.block(d, position) * self.unrolled.lanes(d))) for d, size in self.layer.dims.items())

    def _walk_from(self) -> int:
        """The lowest refill, or as near above it as the number of instructions allows: half of them for bursts."""
        position = min(map(self._refilled_at, self.tops), default=len(self.plan.loops))
        while 2 * MOST_OF_A_STEP * self._count(position) > MOST_INSTRUCTIONS:
            position += 1
        return position

    def write(self) -> tuple[tuple[Instruction, ...], dict[str, int]]:
        buffers, visits = {op: f"{op}:0" for op in OPERANDS}, dict.fromkeys(OPERANDS, -1)
        last: Tile = {}
        for number, (begins, advanced) in enumerate(self._walk()):
            if number and "O" in self.walked and advanced >= self.walked["O"].position:
                self._store(last, buffers["O"], visits["O"])
            for op, boundary in self.walked.items():
                if advanced >= boundary.position:
                    visits[op] += 1
                    buffers[op] = f"{op}:{visits[op] % boundary.copies}"
                    self._load(boundary, begins, buffers[op], visits[op])
            if number == 0:
                self._fill(buffers)
            self._compute(number, begins, buffers)
            last = begins
        self._drain(buffers["O"])
        if "O" in self.walked:
            self._store(last, buffers["O"], visits["O"])
        ports = [f"{self.outermost}.{name}" for name in self.array.memories[self.outermost].ports]
        used = {it.resource for it in self.instructions}
        return tuple(self.instructions), {ARRAY: 1, **{name: 1 for name in ports if name in used}}

    def _walk(self) -> Iterator[tuple[Tile, int]]:
        """(Time index every dimension begins at, highest loop that advanced) of each step; to the first, all have."""
        loops, position = self.plan.loops, self.position
        weights = [self.plan.block(dim, place) for place, (dim, _) in enumerate(loops)]
        ends = {dim: -(-size // self.unrolled.lanes(dim)) for dim, size in self.layer.dims.items()}
        begins, digits = dict.fromkeys(DIMENSIONS, 0), [0] * len(loops)
        advanced: int | None = len(loops)
        while advanced is not None:
            yield dict(begins), advanced
            advanced = None
            for place in range(position, len(loops)):
                dim, factor = loops[place]
                if digits[place] + 1 < factor and begins[dim] + weights[place] < ends[dim]:
                    digits[place] += 1
                    begins[dim] += weights[place]
                    advanced = place
                    break
                begins[dim] -= digits[place] * weights[place]
                digits[place] = 0

    def _load(self, boundary: _Boundary, begins: Tile, buffer: str, visit: int) -> None:
        opcode, tile = f"load {boundary.operand}", boundary.tile(begins)
        sources: tuple[str, ...] = ()
        if boundary.operand == "O":
            if not any(tile[dim] for dim in REDUCTION):
                return  # sums start from zero
            sources = (self._home(tile),)
        self._move(opcode, boundary.load(begins), sources, buffer, f"{opcode} {visit}")

    def _store(self, begins: Tile, buffer: str, visit: int) -> None:
        boundary = self.walked["O"]
        self._move("store O", boundary.store(begins), (buffer,), self._home(boundary.tile(begins)), f"store O {visit}")

    def _home(self, tile: Tile) -> str:
        return f"{self.outermost} O[{','.join(str(tile[dim]) for dim in RELEVANT['O'])}]"

    def _move(self, opcode: str, move: Transfer, sources: tuple[str, ...], destination: str | None, label: str) -> None:
        bursts = -(-move.cycles // self.burst)
        rest = move.cycles - (bursts - 1) * self.burst
        for place in range(1, bursts + 1):
            # Only the last burst's result is waited for. The others' come a cycle before the next one's, where that can be: then no lag
            # lies between them, and a burst is as urgent as its load, however many bursts are behind it.
            latency = max(0, rest + move.later - (bursts - place))
            held = rest if place == bursts else self.burst
            self.instructions.append(Instruction(opcode, sources, destination, latency, move.port, held, label))

    def _fill(self, buffers: Mapping[str, str]) -> None:
        first: dict[str, int] = {}
        for row in (boundary.refill for op, boundary in self.walked.items() if op != "O"):
            first[row.port] = first.get(row.port, 0) + row.cycles_each
        cycles = self.cost.latency.fill - max(first.values(), default=0)
        if cycles > 0:
            self.instructions.append(Instruction("fill", (buffers["W"], buffers["I"]), "filled", cycles, label="first fill"))

    def _drain(self, buffer: str) -> None:
        stored = self.walked["O"].refill.cycles_each if "O" in self.walked else 0
        cycles = self.cost.latency.drain - stored
        if cycles > 0:
            self.instructions.append(Instruction("drain", (buffer,), buffer, cycles, label="last drain"))

    def _compute(self, number: int, begins: Tile, buffers: Mapping[str, str]) -> None:
        part = prod(self._length(dim, begin) for dim, begin in begins.items())
        sources = (*buffers.values(), "filled")
        self.instructions.append(Instruction("begin", sources, "step", 0, label=f"begin {number}"))
        sources += ("step",)
        for access, (port, share) in self.streams.items():
            row = self.tops.get(access.operand)
            waits = f"{access.operand} {access.direction}" if row and not row.hidden else None
            sources += (waits,) if waits else ()
            stands_for = f", {row.events / self.steps:,.3g} refills" if row else ""
            opcode = f"stream {access.operand}"
            self._move(opcode, Transfer(port, share.take(part)), ("step",), waits, f"{opcode} {number}{stands_for}")
        left = self.on_chip.take(part)
        while left > 0:
            cycles = min(left, MOST_CYCLES)
            left -= cycles
            self.instructions.append(
                Instruction("compute", sources, buffers["O"], cycles, ARRAY, label=f"compute {number + 1}/{self.steps}")
            )

    def _length(self, dim: str, begin: int) -> int:
        """Cycles of a dimension's loops in the step that begins there."""
        return min(self.plan.block(dim, self.position), -(-self.layer.dims[dim] // self.unrolled.lanes(dim)) - begin)
