"""Two judges of a schedule, which share no code with the scheduler: the shortest there is, and whether a given one is sound.

    instructions, resources ──optimal_cycles──> cycles          exact, up to 8 instructions
    instructions, resources, timeline ──check_timeline──> None, or an OptionError that names the first rule broken

optimal_cycles tries the instructions in every order the dependences allow, each on the unit that falls free first, as soon as
its operands are there. One of these orders gives the optimum: take, of all optimal schedules, one with the least sum of starts,
and sort it by start, then by index; placing in this order starts nothing later, hence, the sum being least, nothing sooner.
The same argument lets the search drop orders in which (start, index) falls. A branch ends when its lower bound, the later of
longest path left and units' work left, is not below the best schedule found.

check_timeline compares each instruction with all earlier ones that name the same register, through running maxima.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise

from ....core.errors import OptionError
from .instructions import Instruction, check_program
from .scheduler import Row, Timeline

MOST_EXACT = 8
Breach = tuple[str, str]  # what, why
Extreme = tuple[int, int]  # cycle, index of the instruction that sets it


def optimal_cycles(instructions: Sequence[Instruction], resources: Mapping[str, int]) -> int:
    """Cycles of the shortest schedule."""
    check_program(instructions, resources)
    if len(instructions) > MOST_EXACT:
        why = f"every order is tried, which is done for up to {MOST_EXACT}"
        raise OptionError(f"{len(instructions):,} instructions", why=why, do="shorten the list, or compare with Timeline.bounds.least")
    return _Search(instructions, resources).shortest() if instructions else 0


def _lag(earlier: Instruction, later: Instruction) -> int | None:
    """Least cycles from start to start, by the definition; None if the two are independent."""
    lags = []
    if earlier.destination is not None and earlier.destination in later.sources:
        lags.append(earlier.latency)
    if later.destination is not None and later.destination in earlier.sources:
        lags.append(earlier.duration_cycles)
    if later.destination is not None and later.destination == earlier.destination:
        lags += [0, earlier.latency + 1 - later.latency]
    return max(lags, default=None)


class _Search:
    """Depth-first branch and bound; the units of each resource are a sorted tuple of the cycles they fall free in."""

    def __init__(self, instructions: Sequence[Instruction], resources: Mapping[str, int]) -> None:
        self.count = len(instructions)
        self.all = range(self.count)
        self.duration = [it.duration_cycles for it in instructions]
        self.held = [it.held_cycles for it in instructions]
        self.resource = [it.resource if it.held_cycles else "" for it in instructions]
        # More units than instructions are never used.
        self.units = {name: min(units, self.count) for name, units in resources.items()}
        self.causes = [[(i, lag) for i in range(j) if (lag := _lag(instructions[i], instructions[j])) is not None] for j in self.all]
        self.tail = list(self.duration)
        for j in reversed(self.all):
            for i, lag in self.causes[j]:
                self.tail[i] = max(self.tail[i], lag + self.tail[j])
        self.starts: dict[int, int] = {}
        self.best = sum(self.duration) + sum(lag for causes in self.causes for _, lag in causes) + 1

    def shortest(self) -> int:
        self._extend((0, -1), {name: (0,) * units for name, units in self.units.items()}, 0)
        return self.best

    def _extend(self, last: tuple[int, int], free: Mapping[str, tuple[int, ...]], cycles: int) -> None:
        if len(self.starts) == self.count:
            self.best = min(self.best, cycles)
            return
        choices = []
        for j in self.all:
            if j not in self.starts and all(i in self.starts for i, _ in self.causes[j]):
                operands = max((self.starts[i] + lag for i, lag in self.causes[j]), default=0)
                start = max(operands, free[self.resource[j]][0] if self.resource[j] else 0)
                if (start, j) > last:
                    choices.append((start, -self.tail[j], j))
        for start, _, j in sorted(choices):
            self.starts[j] = start
            after = dict(free)
            if name := self.resource[j]:
                after[name] = tuple(sorted((*free[name][1:], start + self.held[j])))
            if self._least(start, after) < self.best:
                self._extend((start, j), after, max(cycles, start + self.duration[j]))
            del self.starts[j]

    def _least(self, clock: int, free: Mapping[str, tuple[int, ...]]) -> int:
        """No schedule that begins so, and starts the rest at `clock` or later, is shorter."""
        earliest: list[int] = []
        for j in self.all:
            operands = max((earliest[i] + lag for i, lag in self.causes[j]), default=0)
            unit = free[self.resource[j]][0] if self.resource[j] else 0
            earliest.append(self.starts[j] if j in self.starts else max(clock, operands, unit))
        least = max(earliest[j] + self.tail[j] for j in self.all)
        for name, units in self.units.items():
            left = sum(self.held[j] for j in self.all if j not in self.starts and self.resource[j] == name)
            if left:
                least = max(least, -(-(left + sum(max(clock, cycle) for cycle in free[name])) // units))
        return least


def check_timeline(instructions: Sequence[Instruction], resources: Mapping[str, int], timeline: Timeline) -> None:
    """Raise an OptionError unless the timeline's rows hold every instruction once, every dependence and every unit's limit."""
    check_program(instructions, resources)
    rows = {row.index: row for row in timeline.rows}
    found = list(islice(_row_breaches(instructions, resources, timeline.rows), 100))
    if not found:  # without a sound row for every instruction there is nothing to compare
        ordered = [rows[index] for index in range(len(instructions))]
        found = list(islice(chain(_order_breaches(instructions, ordered), _unit_breaches(instructions, ordered)), 100))
    if found:
        what, why = found[0]
        more = f" (and {len(found) - 1}{' or more' * (len(found) == 100)} other faults)" if len(found) > 1 else ""
        raise OptionError(
            f"this timeline is not sound: {what}{more}", why=why, do="correct these rows, or let `schedule` place the instructions"
        )


def _row_breaches(instructions: Sequence[Instruction], resources: Mapping[str, int], rows: Sequence[Row]) -> Iterator[Breach]:
    seen = set()
    for row in rows:
        if not 0 <= row.index < len(instructions) or row.index in seen:
            yield f"a row for instruction {row.index}", f"there must be one row for each of the {len(instructions)} instructions"
            continue
        seen.add(row.index)
        it, who = instructions[row.index], _name(instructions, row.index)
        if row.start < 0:
            yield f"{who} starts at {row.start}", "time begins at cycle 0"
        if row.end != row.start + it.duration_cycles:
            yield f"{who} ends at {row.end}", f"it starts at {row.start} and takes {it.duration_cycles}"
        if not it.held_cycles and row.unit is not None:
            yield f"{who} is on unit {row.unit}", "it holds no unit"
        elif it.held_cycles and (row.unit is None or not 0 <= row.unit < resources[it.resource]):
            yield f"{who} is on unit {row.unit} of {it.resource}", f"{it.resource} has {resources[it.resource]}, counted from 0"
    for index in range(len(instructions)):
        if index not in seen:
            yield f"no row for {_name(instructions, index)}", "every instruction must run"


def _order_breaches(instructions: Sequence[Instruction], rows: Sequence[Row]) -> Iterator[Breach]:
    given: dict[str, Extreme] = {}  # of each name: latest result, latest start of a writer, latest end of a reader, so far
    written: dict[str, Extreme] = {}
    read: dict[str, Extreme] = {}
    never = (-1, -1)
    for index, (it, row) in enumerate(zip(instructions, rows, strict=True)):
        starts, result = f"{_name(instructions, index)} starts at {row.start}", row.start + it.latency
        for name in it.sources:
            cycle, cause = given.get(name, never)
            if row.start < cycle:
                yield starts, f"read after write: it reads {name!r}, which {_name(instructions, cause)} gives at {cycle}"
        target = it.destination
        if target is not None:
            cycle, cause = read.get(target, never)
            if row.start < cycle:
                yield starts, f"write after read: it writes {target!r}, which {_name(instructions, cause)} reads until {cycle}"
            cycle, cause = written.get(target, never)
            if row.start < cycle:
                yield starts, f"write after write: {_name(instructions, cause)}, which writes {target!r} before it, starts at {cycle}"
            cycle, cause = given.get(target, never)
            if result <= cycle:
                yield f"{starts}, writes at {result}", f"write after write: {_name(instructions, cause)} writes {target!r} at {cycle}"
            given[target] = max(given.get(target, never), (result, index))
            written[target] = max(written.get(target, never), (row.start, index))
        for name in it.sources:
            read[name] = max(read.get(name, never), (row.end, index))


def _unit_breaches(instructions: Sequence[Instruction], rows: Sequence[Row]) -> Iterator[Breach]:
    held: dict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
    for it, row in zip(instructions, rows, strict=True):
        if row.unit is not None:
            held[it.resource, row.unit].append((row.start, row.start + it.held_cycles, row.index))
    for (name, unit), spans in held.items():
        for (_, stop, first), (start, _, second) in pairwise(sorted(spans)):
            if start < stop:
                holder = _name(instructions, first)
                yield f"{_name(instructions, second)} starts at {start} on {name}[{unit}]", f"{holder} holds this unit until {stop}"


def _name(instructions: Sequence[Instruction], index: int) -> str:
    return f"instruction {index} ({instructions[index].opcode})"
