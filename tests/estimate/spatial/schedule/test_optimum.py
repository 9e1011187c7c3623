"""The judges, judged: the optimum against plain enumerations, the checker against the definition and against planted faults."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import OptionError
from ridgeline.estimate.spatial.schedule import Instruction, Row, Timeline, check_timeline, optimal_cycles, schedule, scheduler
from tests.support import full_or_tenth

Program = tuple[list[Instruction], dict[str, int]]


@st.composite
def programs(draw: st.DrawFn, most: int = 8, cycles: int = 6) -> Program:
    names = st.sampled_from(["a", "b", "c", "d", "e"])
    units = {"dma": draw(st.integers(1, 3)), "array": 1}
    made = []
    for _ in range(draw(st.integers(0, most))):
        resource = draw(st.sampled_from(["dma", "array", ""]))
        busy = draw(st.none() | st.integers(0, cycles + 2)) if resource else None
        sources = tuple(draw(st.lists(names, max_size=2)))
        made.append(Instruction("op", sources, draw(st.none() | names), draw(st.integers(0, cycles)), resource, busy))
    return made, units


def sound(instructions: Sequence[Instruction], units: Mapping[str, int], starts: Mapping[int, int]) -> bool:
    """The definition, word for word: every pair, every cycle."""
    result = {i: start + instructions[i].latency for i, start in starts.items()}
    held = {i: range(start, start + instructions[i].held_cycles) for i, start in starts.items()}
    for i, j in combinations(sorted(starts), 2):
        a, b = instructions[i], instructions[j]
        if a.destination is not None and a.destination in b.sources and starts[j] < result[i]:
            return False
        if b.destination is not None and b.destination in a.sources and starts[j] < max(result[i], held[i].stop):
            return False
        if a.destination is not None and a.destination == b.destination and (starts[j] < starts[i] or result[j] <= result[i]):
            return False
    everything = [(instructions[i].resource, cycle) for i in held for cycle in held[i]]
    return all(everything.count(use) <= units[use[0]] for use in set(everything))


def cycles_of(instructions: Sequence[Instruction], starts: Mapping[int, int]) -> int:
    return max((starts[i] + it.duration_cycles for i, it in enumerate(instructions)), default=0)


def enumerated(instructions: Sequence[Instruction], units: Mapping[str, int]) -> int:
    """All orders; each instruction in the first cycle that is sound beside those placed before it."""
    horizon = sum(it.duration_cycles + 1 for it in instructions)
    shortest = horizon
    for order in permutations(range(len(instructions))):
        starts: dict[int, int] = {}
        for index in order:
            found = next((t for t in range(horizon) if sound(instructions, units, {**starts, index: t})), None)
            if found is None:  # something that must come later was placed too soon
                break
            starts[index] = found
        else:
            shortest = min(shortest, cycles_of(instructions, starts))
    return shortest


@given(programs())
def test_bounds_optimum_schedule_and_guarantee_are_in_order(program: Program) -> None:
    timeline = schedule(*program)
    check_timeline(*program, timeline)
    best = optimal_cycles(*program)
    assert timeline.bounds.least <= best <= timeline.cycles <= timeline.bounds.most
    kinds = len({it.resource for it in program[0] if it.held_cycles})
    assert timeline.cycles <= (1 + kinds) * best


@settings(max_examples=full_or_tenth(400))
@given(programs(most=5, cycles=4))
def test_the_optimum_is_that_of_all_orders(program: Program) -> None:
    assert optimal_cycles(*program) == enumerated(*program)


@settings(max_examples=full_or_tenth(400))
@given(programs(most=3, cycles=2))
def test_the_optimum_is_that_of_all_starts(program: Program) -> None:
    instructions, units = program
    horizon = range(schedule(*program).cycles + 1)
    every = (dict(enumerate(starts)) for starts in product(horizon, repeat=len(instructions)))
    assert optimal_cycles(*program) == min(cycles_of(instructions, starts) for starts in every if sound(instructions, units, starts))


def test_the_optimum_waits_where_the_scheduler_does_not() -> None:
    """Waiting one cycle for `urgent`, whose result starts a long step, beats filling the unit at once."""
    instructions = [
        Instruction("fetch", (), "a", 1),
        Instruction("filler", (), "b", 5, "u"),
        Instruction("urgent", ("a",), "c", 1, "u"),
        Instruction("long", ("c",), "d", 6),
    ]
    assert optimal_cycles(instructions, {"u": 1}) == 8  # urgent at 1, long 2 to 8, filler 2 to 7
    assert schedule(instructions, {"u": 1}).cycles == 12  # filler 0 to 5, urgent 5 to 6, long 6 to 12


def random_program(chance: random.Random) -> Program:
    units = {"dma": chance.randint(1, 2), "array": 1, "vector": 1}
    made = []
    for _ in range(8):
        resource, latency = chance.choice(["", *units]), chance.randint(0, 6)
        sources = tuple(f"r{chance.randrange(6)}" for _ in range(chance.randint(0, 2)))
        destination = chance.choice([None, *[f"r{chance.randrange(6)}"] * 4])
        made.append(Instruction("op", sources, destination, latency, resource, chance.choice([None, 1, latency + 2]) if resource else None))
    return made, units


def test_four_in_five_short_lists_are_scheduled_optimally() -> None:
    chance = random.Random(1)
    drawn = [random_program(chance) for _ in range(300)]
    optimal = sum(schedule(*program).cycles == optimal_cycles(*program) for program in drawn)
    assert 240 <= optimal < 300  # not all: it is a greedy scheduler, and the oracle can tell


def test_more_than_eight_are_refused() -> None:
    nine = [Instruction("op", (), f"r{i}", 1, "u") for i in range(9)]
    assert optimal_cycles(nine[:8], {"u": 3}) == 3 and optimal_cycles([], {}) == 0
    with pytest.raises(OptionError, match="9 instructions"):
        optimal_cycles(nine, {"u": 3})
    with pytest.raises(OptionError, match="no resource of that name"):
        optimal_cycles(nine[:1], {"v": 1})


LIST = [
    Instruction("load", (), "x", 4, "dma"),
    Instruction("load", (), "y", 4, "dma"),
    Instruction("add", ("x", "y"), "z", 2, "vector"),
    Instruction("load", (), "x", 6, "dma"),
    Instruction("store", ("z",), "out", 5, "dma"),
    Instruction("clear", (), "z", 1, "vector"),
]
UNITS = {"dma": 2, "vector": 1}


def moved(timeline: Timeline, starts: Mapping[int, int], units: Mapping[int, int | None] | None = None) -> Timeline:
    """The timeline with some rows elsewhere."""
    rows = []
    for row in timeline.rows:
        start, unit = starts.get(row.index, row.start), (units or {}).get(row.index, row.unit)
        rows.append(Row(row.index, start, start + row.end - row.start, unit))
    return replace(timeline, rows=tuple(rows))


def refused(timeline: Timeline, resources: Mapping[str, int] = UNITS) -> str:
    with pytest.raises(OptionError) as caught:
        check_timeline(LIST, resources, timeline)
    return f"{caught.value.what}; {caught.value.why}"


def test_the_list_to_plant_faults_in_is_sound() -> None:
    timeline = schedule(LIST, UNITS)
    check_timeline(LIST, UNITS, timeline)
    assert [row.start for row in timeline.rows] == [0, 0, 4, 6, 6, 11]
    check_timeline(LIST, UNITS, replace(timeline, rows=timeline.rows[::-1]))  # the order of the rows says nothing


def test_planted_swap_of_two_starts_is_caught() -> None:
    fault = refused(moved(schedule(LIST, UNITS), {0: 4, 2: 0}))
    assert "instruction 2 (add) starts at 0" in fault and "read after write: it reads 'x', which instruction 0 (load) gives at 8" in fault


@pytest.mark.parametrize(
    ("starts", "rule"),
    [
        ({2: 3}, "read after write: it reads 'x', which instruction 0 (load) gives at 4"),
        ({3: 5}, "write after read: it writes 'x', which instruction 2 (add) reads until 6"),
        ({5: 10}, "write after read: it writes 'z', which instruction 4 (store) reads until 11"),
        ({0: -1}, "time begins at cycle 0"),
    ],
)
def test_planted_early_start_is_caught(starts: dict[int, int], rule: str) -> None:
    assert rule in refused(moved(schedule(LIST, UNITS), starts))


SLOW, FAST = Instruction("slow", (), "a", 10), Instruction("fast", (), "a", 3)


@pytest.mark.parametrize("second", [0, 6, 7])
def test_planted_write_out_of_order_is_caught(second: int) -> None:
    timeline = schedule([SLOW, FAST], {})
    assert timeline.rows[1].start == 8
    with pytest.raises(OptionError, match=r"write after write: instruction 0 \(slow\) writes 'a' at 10"):
        check_timeline([SLOW, FAST], {}, moved(timeline, {1: second}))


def test_planted_write_that_starts_first_is_caught() -> None:
    """Its result is the later one, yet writers of one name start in program order."""
    timeline = schedule([FAST, SLOW], {})
    check_timeline([FAST, SLOW], {}, moved(timeline, {0: 5, 1: 5}))
    with pytest.raises(OptionError, match="which writes 'a' before it, starts at 5"):
        check_timeline([FAST, SLOW], {}, moved(timeline, {0: 5, 1: 4}))


READ = Instruction("read", ("a",), None, 4)


@pytest.mark.parametrize(
    ("pair", "kind"), [((SLOW, READ), "read after write"), ((READ, SLOW), "write after read"), ((SLOW, FAST), "write after write")]
)
def test_planted_missing_dependence_is_caught(monkeypatch: pytest.MonkeyPatch, pair: tuple[Instruction, ...], kind: str) -> None:
    check_timeline(pair, {}, schedule(pair, {}))
    monkeypatch.setattr(scheduler, "dependences", lambda instructions: [[] for _ in instructions])
    with pytest.raises(OptionError, match=kind):
        check_timeline(pair, {}, schedule(pair, {}))


def test_planted_overuse_is_caught() -> None:
    timeline = schedule(LIST, UNITS)
    assert "dma has 1, counted from 0" in refused(timeline, {"dma": 1, "vector": 1})
    assert "instruction 1 (load) starts at 0 on dma[0]; instruction 0 (load) holds this unit until 4" in refused(
        moved(timeline, {}, {1: 0})
    )
    last = moved(timeline, {4: 9, 5: 14}, {4: timeline.rows[3].unit})
    assert "instruction 4 (store) starts at 9 on dma[" in refused(last) and "(load) holds this unit until 12" in refused(last)
    check_timeline(LIST, UNITS, moved(last, {4: 12, 5: 17}))


def test_planted_wrong_rows_are_caught() -> None:
    timeline = schedule(LIST, UNITS)
    first, *rest = timeline.rows
    assert "no row for instruction 0 (load)" in refused(replace(timeline, rows=tuple(rest)))
    assert "a row for instruction 1" in refused(replace(timeline, rows=(*timeline.rows, rest[0])))
    assert "a row for instruction 6" in refused(replace(timeline, rows=(*timeline.rows, replace(first, index=6))))
    assert "ends at 5" in refused(replace(timeline, rows=(replace(first, end=5), *rest)))
    assert "is on unit None of dma" in refused(replace(timeline, rows=(replace(first, unit=None), *rest)))
    loose = [Instruction("wait", (), None, 3)]
    with pytest.raises(OptionError, match="it holds no unit"):
        check_timeline(loose, UNITS, moved(schedule(loose, UNITS), {}, {0: 0}))


@given(programs(), st.integers(0, 7), st.integers(-9, 9))
def test_the_checker_agrees_with_the_definition(program: Program, which: int, offset: int) -> None:
    """Any one row moved: refused exactly if some pair or some cycle says so. The unit is left, so overlaps on it count as well."""
    instructions, units = program
    timeline = schedule(*program)
    if which >= len(instructions) or timeline.rows[which].start + offset < 0:
        return
    changed = moved(timeline, {which: timeline.rows[which].start + offset})
    starts = {row.index: row.start for row in changed.rows}
    spans = [
        (instructions[row.index].resource, row.unit, c)
        for row in changed.rows
        for c in range(row.start, row.start + instructions[row.index].held_cycles)
    ]
    expected = sound(instructions, units, starts) and len(spans) == len(set(spans))
    try:
        check_timeline(*program, changed)
        accepted = True
    except OptionError:
        accepted = False
    assert accepted == expected
