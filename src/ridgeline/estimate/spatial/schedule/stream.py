"""A mapped layer as the instructions an accelerator runs, one turn of its outer loops after another.

    Layer, SpatialArraySpec, MappingPlan ──stream──> (instructions, resources) ──schedule──> Timeline          [cycles]

    step      one turn of the loops from the lowest refill of an operand's top on-chip memory upwards; what lies below is on chip
      load X     a new tile comes down                   holds its port of the outermost memory, into a buffer X:0 or X:1
      load O     partial sums come back, unless this is the tile's first visit
      compute    the step's share of the on-chip time    holds the array; reads W, I and O, writes O
      store O    results go up when the next O tile begins
    fill      before the first step: the first tiles go on down to the PEs;  drain: after the last step, the last results come up

Buffers are the registers that make instructions wait: two an operand where its refill hides (see `latency.Refill`), else one. A
`stream` memory, which replaces words as they are used up, counts as two.

stream X  an operand with no memory on chip: its words pass the port while the step runs, and the next step waits for the last
          (`begin` marks where a step may start). So do operands whose refills are so many that walking them would take more than
          MOST_INSTRUCTIONS: steps are then turns of a loop further out, and the label says how many refills they hold.

A port's transfers are cut into bursts of at most an eighth of a mean step, so that a long load lets a short, urgent one pass;
bursts are longer where there would be too many. All durations are exact: transfers are those of each tile, edges and padding
included, and steps share the on-chip time by the cycles they compute. A load's result is there when the slower of both memories'
ports and the network have passed it on, though only the outermost port is held; the other ports count in the on-chip time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from ....target.array import DIMENSIONS, OPERANDS, Port, SpatialArraySpec
from ..cost import LayerCost, evaluate, sliding
from ..counts import Unrolled
from ..latency import Refill
from ..layer import REDUCTION, RELEVANT, Layer
from ..mapping import MappingPlan
from ..tiles import Slide, extents, lane_groups
from .instructions import MOST_CYCLES, Instruction
from .scheduler import Timeline, schedule

MOST_INSTRUCTIONS = 200_000
BURSTS_A_STEP = 8
ARRAY = "array"
WINDOWS = (("P", "R"), ("Q", "S"))

Pair = tuple[int, int]
Tile = Mapping[str, int]
"""Place of a tile along each dimension."""


def schedule_layer(layer: Layer, array: SpatialArraySpec, plan: MappingPlan) -> Timeline:
    """When each instruction of `stream` runs."""
    return schedule(*stream(layer, array, plan))


def stream(layer: Layer, array: SpatialArraySpec, plan: MappingPlan) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    """Instructions in program order, and one unit of each resource: the array and the outermost memory's ports."""
    return _Program(layer, array, plan, evaluate(layer, array, plan)).write()


@dataclass(frozen=True, slots=True)
class Transfer:
    """One tile through one port of the outermost memory."""

    port: str
    cycles: int
    later: int = 0
    """Cycles from the port's last until the tile is there."""


class _Sizes:
    """(Elements read once for all, elements of the largest instance) of every tile of an operand."""

    def __init__(self, unrolled: Unrolled, operand: str, blocks: Tile, held_over: tuple[str, ...], slide: Slide | None) -> None:
        plain = ("B", "G", "C") if operand == "I" else RELEVANT[operand]
        self.plain = {dim: _lengths(unrolled, dim, blocks[dim], held_over) for dim in plain}
        self.windows = [_rows(unrolled, which, blocks, held_over, slide) for which in (0, 1)] if operand == "I" else []

    def of(self, tile: Tile) -> Pair:
        pairs = [lengths[tile[dim]] for dim, lengths in self.plain.items()]
        pairs += [rows.get((tile[out], tile[tap]), (0, 0)) for rows, (out, tap) in zip(self.windows, WINDOWS, strict=False)]
        return prod(union for union, _ in pairs), prod(largest for _, largest in pairs)


def _lengths(unrolled: Unrolled, dim: str, block: int, held_over: tuple[str, ...]) -> list[Pair]:
    size, span, pattern = unrolled.layer.dims[dim], block * unrolled.lanes(dim), unrolled.pattern(dim, held_over)
    lengths = (min(span, size - start) for start in range(0, size, span))
    return [(length, extents(length, block, pattern).largest) for length in lengths]


def _rows(unrolled: Unrolled, which: int, blocks: Tile, held_over: tuple[str, ...], slide: Slide | None) -> dict[Pair, Pair]:
    """Of each (output tile, tap tile): input rows that no instance holds yet. With `slide` a tile keeps what it shares with the last."""
    layer, dims = unrolled.layer, WINDOWS[which]
    stride, gap, pad, size = (values[which] for values in (layer.stride, layer.dilation, layer.padding, layer.input_size))
    (_, out_groups), (_, tap_groups) = (lane_groups(unrolled.pattern(dim, held_over)) for dim in dims)
    spans = [blocks[dim] * unrolled.lanes(dim) for dim in dims]
    held: dict[Pair, dict[Pair, set[int]]] = {}
    for out in range(layer.dims[dims[0]]):
        for tap in range(layer.dims[dims[1]]):
            if 0 <= (row := out * stride + tap * gap - pad) < size:
                instance = out_groups[out % len(out_groups)], tap_groups[tap % len(tap_groups)]
                held.setdefault((out // spans[0], tap // spans[1]), {}).setdefault(instance, set()).add(row)
    moved = {}
    for tile, instances in held.items():
        along = dims.index(slide.dim) if slide and slide.dim in dims else None
        before: dict[Pair, set[int]] = {}
        if along is not None and slide and tile[along] % slide.run:
            before = held.get((tile[0] - (along == 0), tile[1] - (along == 1)), {})
        new = [rows - before.get(instance, set()) for instance, rows in instances.items()]
        moved[tile] = len(set().union(*new)), max(map(len, new))
    return moved


class _Boundary:
    """One operand between the outermost memory and its top on-chip one."""

    def __init__(self, unrolled: Unrolled, plan: MappingPlan, refill: Refill) -> None:
        self.array, self.operand, self.refill = unrolled.array, refill.operand, refill
        self.position = plan.refill_position(refill.operand, plan.cuts[refill.operand][-1])
        self.blocks = {dim: plan.block(dim, self.position) for dim in DIMENSIONS}
        self.copies = 2 if refill.hidden else 1
        ladder = unrolled.array.ladder(refill.operand)
        self.above, self.below = ladder[-1], ladder[-2]
        self.large, self.small = (unrolled.array.memories[name] for name in (self.above, self.below))
        between = set(self.large.shared_over) - set(self.small.shared_over)
        self.spreads = bool(between)
        slide = sliding(unrolled.array, plan, refill.operand, len(ladder) - 1)
        self.sizes = _Sizes(unrolled, refill.operand, self.blocks, self.small.shared_over, slide)
        bits = unrolled.layer.bits
        self.bits: int = getattr(bits, refill.operand)
        finished = all(unrolled.layer.dims[d] <= self.blocks[d] * unrolled.lanes(d) for d in REDUCTION)
        added = any(d in REDUCTION and f > 1 for axis in between for d, f in unrolled.spatial.get(axis, ()))
        self.up_bits = bits.F if finished else bits.O
        self.leaving_bits = bits.O if added else self.up_bits
        self.lanes = {dim: unrolled.lanes(dim) for dim in DIMENSIONS}

    def tile(self, begins: Tile) -> dict[str, int]:
        return {dim: begin // self.blocks[dim] for dim, begin in begins.items()}

    def load(self, begins: Tile) -> Transfer:
        return self._transfer(begins, "rd_down", "wr_down", self.bits, self.bits)

    def store(self, begins: Tile) -> Transfer:
        return self._transfer(begins, "wr_up", "rd_up", self.up_bits, self.leaving_bits)

    def _transfer(self, begins: Tile, outer: str, inner: str, bits: int, inner_bits: int) -> Transfer:
        union, largest = self.sizes.of(self.tile(begins))
        name = self.large.port_of(self.operand, outer)
        cycles = _port_cycles(self.large.ports[name], union * bits)
        others = _port_cycles(self.small.ports[self.small.port_of(self.operand, inner)], largest * inner_bits)
        if self.spreads:
            others = max(others, self._network(union * bits))
        asked = max(0, self.large.latency_cycles - 1) if outer == "rd_down" else 0  # a write waits for no answer
        return Transfer(f"{self.above}.{name}", cycles, max(0, others - cycles) + asked)

    def _network(self, bits: int) -> int:
        if self.array.systolic:
            return 0 if self.operand == "O" else next(iter(self.array.axes.values()))
        width = self.array.noc.bits_per_cycle
        return -(-bits // width) if width else 0


def _port_cycles(port: Port, bits: int) -> int:
    return -(-(-(-bits // port.granule)) // (port.bits_per_cycle // port.granule))


class _Share:
    """A whole number of cycles dealt out by parts, so that all parts together get all of it."""

    def __init__(self, total: int, parts: int) -> None:
        self.total, self.parts, self.seen = total, parts, 0

    def take(self, part: int) -> int:
        before, self.seen = self.total * self.seen // self.parts, self.seen + part
        return self.total * self.seen // self.parts - before


class _Program:
    """Writes the instructions of one layer."""

    def __init__(self, layer: Layer, array: SpatialArraySpec, plan: MappingPlan, cost: LayerCost) -> None:
        self.layer, self.array, self.plan, self.cost = layer, array, plan, cost
        self.unrolled = Unrolled(layer, array, plan.spatial)
        self.outermost = list(array.memories)[-1]
        tops = {op: array.ladder(op)[-2] for op in OPERANDS if len(array.ladder(op)) > 1}
        rows = {row.operand: row for row in cost.refills if tops.get(row.operand) == row.memory}
        found = {op: _Boundary(self.unrolled, plan, row) for op, row in rows.items()}
        self.position = self._walk_from(found)
        self.walked = {op: b for op, b in found.items() if b.position >= self.position}
        self.merged = {op: b for op, b in found.items() if b.position < self.position}
        self.steps = self._count(self.position)
        self.instructions: list[Instruction] = []
        step, traffic = cost.latency.on_chip / self.steps, sum(a.cycles for a in cost.accesses if a.memory == self.outermost)
        self.burst = int(max(1, -(-step // BURSTS_A_STEP), -(-2 * traffic // MOST_INSTRUCTIONS)))
        compute = cost.latency.compute
        self.on_chip = _Share(cost.latency.on_chip, compute)
        self.streams = [
            (a.operand, a.direction, f"{self.outermost}.{a.port}", _Share(a.cycles, compute))
            for a in cost.accesses
            if a.memory == self.outermost and a.operand not in self.walked and a.cycles
        ]

    def _count(self, position: int) -> int:
        """Steps, if they are turns of the loops from `position` on."""
        return prod(-(-size // (self.plan.block(d, position) * self.unrolled.lanes(d))) for d, size in self.layer.dims.items())

    def _walk_from(self, found: Mapping[str, _Boundary]) -> int:
        """The lowest refill, or as near above it as the number of instructions allows."""
        position = min((b.position for b in found.values()), default=len(self.plan.loops))
        while 8 * self._count(position) > MOST_INSTRUCTIONS and position < len(self.plan.loops):
            position += 1
        return position

    def write(self) -> tuple[tuple[Instruction, ...], dict[str, int]]:
        buffers = {op: f"{op}:0" for op in OPERANDS}
        visits = dict.fromkeys(OPERANDS, -1)
        output = self.walked.get("O")
        leaving: Tile | None = None
        for number, (begins, advanced) in enumerate(self._walk()):
            if output and leaving is not None and advanced >= output.position:
                self._store(output, leaving, buffers["O"])
            for op, boundary in self.walked.items():
                if advanced >= boundary.position:
                    visits[op] += 1
                    buffers[op] = f"{op}:{visits[op] % boundary.copies}"
                    self._load(boundary, begins, buffers[op], visits[op])
            if number == 0:
                self._fill(buffers)
            self._compute(number, begins, buffers)
            leaving = begins
        self._drain(buffers["O"])
        if output and leaving is not None:
            self._store(output, leaving, buffers["O"])
        ports = sorted({it.resource for it in self.instructions if it.resource} - {ARRAY})
        return tuple(self.instructions), {ARRAY: 1, **dict.fromkeys(ports, 1)}

    def _walk(self) -> Iterator[tuple[Tile, int]]:
        """(Time index every dimension begins at, highest loop that advanced) of each step; the first advances them all."""
        loops, position = self.plan.loops, self.position
        weights = [self.plan.block(dim, place) for place, (dim, _) in enumerate(loops)]
        ends = {dim: -(-size // self.unrolled.lanes(dim)) for dim, size in self.layer.dims.items()}
        begins = dict.fromkeys(DIMENSIONS, 0)
        digits = [0] * len(loops)
        advanced = len(loops)
        while True:
            yield dict(begins), advanced
            for place in range(position, len(loops)):
                dim, factor = loops[place]
                if digits[place] + 1 < factor and begins[dim] + weights[place] < ends[dim]:
                    digits[place] += 1
                    begins[dim] += weights[place]
                    advanced = place
                    break
                begins[dim] -= digits[place] * weights[place]
                digits[place] = 0
            else:
                return

    def _load(self, boundary: _Boundary, begins: Tile, buffer: str, visit: int) -> None:
        op, sources = boundary.operand, ()
        if op == "O":
            tile = boundary.tile(begins)
            if not any(tile[dim] for dim in REDUCTION):
                return  # sums start from zero
            sources = (self._home(tile),)
        self._move(f"load {op}", boundary.load(begins), sources, buffer, f"{op} {visit}")

    def _store(self, boundary: _Boundary, begins: Tile, buffer: str) -> None:
        home = self._home(boundary.tile(begins))
        self._move("store O", boundary.store(begins), (buffer,), home, home)

    def _home(self, tile: Tile) -> str:
        return f"{self.outermost} O[{','.join(str(tile[dim]) for dim in RELEVANT['O'])}]"

    def _move(self, opcode: str, move: Transfer, sources: tuple[str, ...], destination: str | None, label: str) -> None:
        left = move.cycles
        while left > 0:
            cycles = min(left, self.burst)
            left -= cycles
            latency = cycles + (0 if left else move.later)
            self.instructions.append(Instruction(opcode, sources, destination, latency, move.port, cycles, f"{opcode} {label}"))

    def _fill(self, buffers: Mapping[str, str]) -> None:
        first: dict[str, int] = {}
        for row in (b.refill for op, b in self.walked.items() if op != "O"):
            first[row.port] = first.get(row.port, 0) + row.cycles_each
        cycles = self.cost.latency.fill - max(first.values(), default=0)
        if cycles > 0:
            self.instructions.append(Instruction("fill", (buffers["W"], buffers["I"]), "on chip", cycles, label="first fill"))

    def _drain(self, buffer: str) -> None:
        stored = self.walked["O"].refill.cycles_each if "O" in self.walked else 0
        cycles = self.cost.latency.drain - stored
        if cycles > 0:
            self.instructions.append(Instruction("drain", (buffer,), buffer, cycles, label="last drain"))

    def _compute(self, number: int, begins: Tile, buffers: Mapping[str, str]) -> None:
        part = prod(min(self.plan.block(d, self.position), -(-self.layer.dims[d] // self.unrolled.lanes(d)) - begins[d]) for d in DIMENSIONS)
        sources = tuple(buffers[op] for op in OPERANDS) + ("on chip",)
        if self.streams:
            self.instructions.append(Instruction("begin", sources, "step", 0))
            sources += ("step",)
        for op, direction, port, share in self.streams:
            hides = op not in self.merged or self.merged[op].copies == 2
            destination = None if hides else f"{op} {direction}"
            if destination:
                sources += (destination,)
            self._move(f"stream {op}", Transfer(port, share.take(part)), ("step",), destination, f"{number}")
        left = self.on_chip.take(part)
        while left > 0:
            cycles = min(left, MOST_CYCLES)
            left -= cycles
            self.instructions.append(Instruction("compute", sources, buffers["O"], cycles, ARRAY, label=f"step {number}"))
