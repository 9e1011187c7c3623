"""List scheduling with critical-path priority: of the instructions that could start now, the one with most work behind it does.

    instructions, resources ──schedule──> Timeline(rows: index, start, end, unit)        [cycles]
      tail   = longest path from an instruction's start to the end of the program, over dependences alone
      clock  moves to the next cycle in which an operand arrives or a unit falls free; every unit takes the ready
             instruction with the largest tail, ties by program order; of free units the one idle longest, then the lowest

No unit idles while an instruction that is ready waits for it. Hence (Graham 1966, for several kinds of unit and for lags):
the last instruction's chain of causes consists of lags, which no schedule can shorten, and of waits, in which all units of one
resource are busy, so with a resource's work = the cycles its units are held,

    max(critical path, ⌈work / units⌉ of each resource)  <=  optimum  <=  cycles  <=  critical path + Σ ⌊work / units⌋

which is at most (1 + kinds of resource) x the optimum; 2 x for one kind. It is greedy: waiting for a more urgent
instruction can be better, and is never tried; `optimum` tells by how much for a short list.
Time: O((n + e) log n) for n instructions and e operands named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain
from typing import Any

from ....core.errors import OptionError
from .instructions import Instruction, check_program, dependences

SCHEMA = "ridgeline/schedule/1"
LEAST_WIDTH, MOST_LANES, LANE_NAME = 40, 64, 20
IDLE, MERGED, IN_FLIGHT = ".", "#", "~"
Span = tuple[int, int, str]  # start, stop, mark


@dataclass(frozen=True, slots=True)
class Row:
    """When one instruction runs; `unit` is the number of the unit it holds, None if it holds none."""

    index: int
    start: int
    end: int
    unit: int | None


@dataclass(frozen=True, slots=True)
class Bounds:
    """What holds for the cycles of any schedule, and of this scheduler's."""

    critical_path: int
    """Longest path of dependences."""
    resources: Mapping[str, int]
    """Of each resource: cycles its units are held, divided by their number, rounded up."""
    most: int
    """A list schedule never takes longer."""

    @property
    def least(self) -> int:
        """No schedule is shorter."""
        return max(self.critical_path, *self.resources.values(), 0)

    def to_json(self) -> dict[str, Any]:
        return {"critical_path": self.critical_path, "resources": dict(self.resources), "least": self.least, "most": self.most}


@dataclass(frozen=True, slots=True)
class Timeline:
    """A schedule: one row an instruction, in program order."""

    instructions: tuple[Instruction, ...]
    resources: Mapping[str, int]
    rows: tuple[Row, ...]
    bounds: Bounds

    @property
    def cycles(self) -> int:
        """Until everything has finished."""
        return max((row.end for row in self.rows), default=0)

    @property
    def utilisation(self) -> dict[str, float]:
        """Of each resource, the share of its units' cycles that are held."""
        work, cycles = _work(self.instructions, self.resources), self.cycles
        return {name: work[name] / (units * cycles) if cycles else 0.0 for name, units in self.resources.items()}

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "resources": dict(self.resources),
            "cycles": self.cycles,
            "bounds": self.bounds.to_json(),
            "utilisation": self.utilisation,
            "rows": [
                {
                    "index": row.index,
                    "opcode": it.opcode,
                    "label": it.label,
                    "start": row.start,
                    "end": row.end,
                    "resource": it.resource,
                    "unit": row.unit,
                }
                for row in self.rows
                for it in (self.instructions[row.index],)
            ],
        }

    def text(self, width: int = 100) -> str:
        """A chart of at most `width` characters a line: one line a unit, a letter for each opcode."""
        return "\n".join(_draw(self, width))


def schedule(instructions: Sequence[Instruction], resources: Mapping[str, int]) -> Timeline:
    """The list schedule; the same input always gives the same timeline."""
    check_program(instructions, resources)
    followers = dependences(instructions)
    tails = _tails(instructions, followers)
    starts, units = _Run(instructions, resources, followers, tails).place()
    rows = tuple(
        Row(index, start, start + instruction.duration_cycles, unit)
        for index, (instruction, start, unit) in enumerate(zip(instructions, starts, units, strict=True))
    )
    return Timeline(tuple(instructions), dict(resources), rows, _bounds(instructions, resources, tails))


def bounds_of(instructions: Sequence[Instruction], resources: Mapping[str, int]) -> Bounds:
    """Bounds without a schedule."""
    check_program(instructions, resources)
    return _bounds(instructions, resources, _tails(instructions, dependences(instructions)))


def _tails(instructions: Sequence[Instruction], followers: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
    tails = [instruction.duration_cycles for instruction in instructions]
    for index in range(len(tails) - 1, -1, -1):
        for later, lag in followers[index]:
            if lag + tails[later] > tails[index]:
                tails[index] = lag + tails[later]
    return tails


def _work(instructions: Iterable[Instruction], resources: Mapping[str, int]) -> dict[str, int]:
    """Cycles the units of each resource are held, all together."""
    work = dict.fromkeys(resources, 0)
    for instruction in instructions:
        if instruction.resource:
            work[instruction.resource] += instruction.held_cycles
    return work


def _bounds(instructions: Sequence[Instruction], resources: Mapping[str, int], tails: Sequence[int]) -> Bounds:
    critical, work = max(tails, default=0), _work(instructions, resources)
    each = {name: -(-work[name] // units) for name, units in resources.items()}
    return Bounds(critical, each, critical + sum(work[name] // units for name, units in resources.items()))


class _Pool:
    """The units of one resource: (cycle it falls free, number) of each, and who waits: (-tail, index)."""

    __slots__ = ("free", "waiting")

    def __init__(self, units: int) -> None:
        self.free = [(0, unit) for unit in range(units)]  # in order, so already a heap
        self.waiting: list[tuple[int, int]] = []


class _Run:
    """State of one scheduling run."""

    def __init__(
        self,
        instructions: Sequence[Instruction],
        resources: Mapping[str, int],
        followers: Sequence[Sequence[tuple[int, int]]],
        tails: Sequence[int],
    ) -> None:
        self.followers, self.tails = followers, tails
        self.held = [instruction.held_cycles for instruction in instructions]
        self.pools = [_Pool(units) for units in resources.values()]
        number = {name: position for position, name in enumerate(resources)}
        self.pool_of = [number[it.resource] if held else -1 for it, held in zip(instructions, self.held, strict=True)]
        self.missing = [0] * len(instructions)  # dependences whose earlier end has not started yet
        for later, _ in chain.from_iterable(followers):
            self.missing[later] += 1
        self.ready = [0] * len(instructions)
        self.starts = [0] * len(instructions)
        self.units: list[int | None] = [None] * len(instructions)
        self.arrivals = [(0, index) for index, count in enumerate(self.missing) if not count]
        heapify(self.arrivals)
        self.wakes: list[tuple[int, int]] = []  # (cycle, pool) in which a unit falls free

    def place(self) -> tuple[list[int], list[int | None]]:
        while self.arrivals or self.wakes:
            clock = min(events[0][0] for events in (self.arrivals, self.wakes) if events)
            # Dependences of lag 0 can add arrivals to the cycle that is being dealt with; the loop then comes back to it.
            for number in sorted(self._touched(clock)):
                self._fill(number, clock)
        return self.starts, self.units

    def _touched(self, clock: int) -> set[int]:
        """Pools to look at in this cycle; instructions that need no unit start at once."""
        touched = set()
        while self.arrivals and self.arrivals[0][0] <= clock:
            index = heappop(self.arrivals)[1]
            number = self.pool_of[index]
            if number < 0:
                self._start(index, clock)
            else:
                heappush(self.pools[number].waiting, (-self.tails[index], index))
                touched.add(number)
        while self.wakes and self.wakes[0][0] <= clock:
            touched.add(heappop(self.wakes)[1])
        return touched

    def _fill(self, number: int, clock: int) -> None:
        pool = self.pools[number]
        while pool.waiting and pool.free[0][0] <= clock:
            index = heappop(pool.waiting)[1]
            unit, until = pool.free[0][1], clock + self.held[index]
            heapreplace(pool.free, (until, unit))
            heappush(self.wakes, (until, number))
            self.units[index] = unit
            self._start(index, clock)

    def _start(self, index: int, clock: int) -> None:
        self.starts[index] = clock
        for later, lag in self.followers[index]:
            if clock + lag > self.ready[later]:
                self.ready[later] = clock + lag
            self.missing[later] -= 1
            if not self.missing[later]:
                heappush(self.arrivals, (self.ready[later], later))


def timeline_from_json(data: object, instructions: Sequence[Instruction], resources: Mapping[str, int]) -> Timeline:
    """Someone's schedule of these instructions; of its rows index, start, end and unit are read. `check_timeline` judges it."""
    if not isinstance(data, Mapping) or data.get("schema") != SCHEMA or not isinstance(data.get("rows"), list):
        raise OptionError(
            "this is not a schedule", why=f'a schedule is an object with "schema": "{SCHEMA}" and rows', do="see Timeline.to_json"
        )
    rows = sorted((_read_row(place, item, len(instructions)) for place, item in enumerate(data["rows"])), key=lambda row: row.index)
    return Timeline(tuple(instructions), dict(resources), tuple(rows), bounds_of(instructions, resources))


def _read_row(place: int, item: object, count: int) -> Row:
    if not isinstance(item, Mapping):
        raise OptionError(f"rows[{place}] is a {type(item).__name__}", why="a row is an object", do="give index, start, end and unit")
    for field in ("index", "start", "end", "unit"):
        value = item.get(field)
        sound = type(value) is int and (field != "index" or 0 <= value < count)
        if not sound and not (field == "unit" and value is None):
            why = f"index counts the {count} instructions from 0; start and end are whole cycles; unit is a whole number or null"
            raise OptionError(f"rows[{place}].{field} = {value!r}", why=why, do=f"correct {field}")
    return Row(item["index"], item["start"], item["end"], item["unit"])


def _draw(timeline: Timeline, width: int) -> Iterable[str]:
    if width < LEAST_WIDTH:
        raise OptionError(f"width = {width}", why=f"a chart needs {LEAST_WIDTH} characters a line", do="ask for more")
    names = [(name, unit) for name, units in timeline.resources.items() for unit in range(units)]
    labels = {lane: f"{lane[0][:LANE_NAME]}[{lane[1]}]" for lane in names[:MOST_LANES]}
    margin = max(map(len, labels.values()), default=0)
    columns, cycles = max(1, width - margin - 7), timeline.cycles
    scale = max(1, -(-cycles // columns))
    marks = _marks(timeline.instructions)
    lanes: dict[tuple[str, int], list[Span]] = defaultdict(list)
    loose: list[Span] = []
    for row in timeline.rows:
        it = timeline.instructions[row.index]
        if row.unit is not None:
            lanes[it.resource, row.unit].append((row.start, row.start + it.held_cycles, marks[it.opcode]))
        elif row.end > row.start:
            loose.append((row.start, row.end, IN_FLIGHT))
    yield f"{cycles:,} cycles, never below {timeline.bounds.least:,}; a column is {scale:,} cycle{'s' * (scale > 1)}"
    for lane, label in labels.items():
        held = sum(stop - start for start, stop, _ in lanes[lane])
        yield f"{label:<{margin}} {_lane(lanes[lane], scale, -(-cycles // scale))} {held / cycles if cycles else 0:>5.0%}"
    if len(names) > MOST_LANES:
        yield f"and {len(names) - MOST_LANES:,} more units"
    if loose:
        yield f"{'':<{margin}} {_lane(_union(loose), scale, -(-cycles // scale))}"
    yield from _legend(marks, bool(loose), width)


def _marks(instructions: Iterable[Instruction]) -> dict[str, str]:
    """A letter for each opcode, of its own if one is left; the opcodes that find none share one mark."""
    marks: dict[str, str] = {}
    taken: set[str] = set()
    for opcode in dict.fromkeys(instruction.opcode for instruction in instructions):
        own = (
            letter for letter in opcode + opcode.upper() + "abcdefghijklmnopqrstuvwxyz0123456789" if letter.isalnum() and letter.isascii()
        )
        marks[opcode] = next((letter for letter in own if letter not in taken), MERGED)
        taken.add(marks[opcode])
    return marks


def _lane(spans: Iterable[Span], scale: int, columns: int) -> str:
    """In each column the mark of the span that fills most of it, the first of equals."""
    marks, best = [IDLE] * columns, [0] * columns
    for start, stop, mark in spans:
        for column in range(max(0, start // scale), min(columns, -(-stop // scale))):
            share = min(stop, (column + 1) * scale) - max(start, column * scale)
            if share > best[column]:
                marks[column], best[column] = mark, share
    return "".join(marks)


def _union(spans: Iterable[Span]) -> list[Span]:
    """Overlapping spans made one: drawing a hundred thousand that each fill the line would take minutes."""
    merged: list[Span] = []
    for start, stop, mark in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]), mark)
        else:
            merged.append((start, stop, mark))
    return merged


def _legend(marks: Mapping[str, str], loose: bool, width: int) -> Iterable[str]:
    entries = [f"{mark} {opcode}" for opcode, mark in marks.items() if mark != MERGED]
    entries += [f"{MERGED} another opcode"] * (MERGED in marks.values()) + [f"{IN_FLIGHT} in flight, on no unit"] * loose + [f"{IDLE} idle"]
    line = ""
    for entry in entries:
        entry = entry[:width]
        if line and len(line) + 2 + len(entry) > width:
            yield line
            line = ""
        line += ("  " if line else "") + entry
    yield line
