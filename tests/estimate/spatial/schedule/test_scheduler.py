"""The list scheduler: examples worked by hand, closed forms of double buffering, bounds, size."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import pytest

from ridgeline.core.errors import OptionError
from ridgeline.estimate.spatial.schedule import (
    Instruction,
    Row,
    Timeline,
    bounds_of,
    check_timeline,
    instructions_to_json,
    schedule,
    timeline_from_json,
)
from tests.support import full_or_tenth

UNITS = {"mul": 1, "add": 1, "mem": 1}
MULTIPLY = Instruction("mul", ("x", "y"), "a", 4, "mul")
ADD = Instruction("add", ("a", "z"), "b", 2, "add")
STORE = Instruction("store", ("b",), "m", 3, "mem")
SUBTRACT = Instruction("sub", ("x", "w"), "z", 2, "add")
AGAIN = Instruction("mul", ("w", "z"), "b", 4, "mul")


def placed(timeline: Timeline) -> list[tuple[int, int]]:
    return [(row.start, row.end) for row in timeline.rows]


def test_five_instructions_with_every_kind_of_dependence() -> None:
    timeline = schedule([MULTIPLY, ADD, STORE, SUBTRACT, AGAIN], UNITS)
    assert placed(timeline) == [
        (0, 4),
        (4, 6),  # reads a, there at 4
        (6, 9),  # reads b, there at 6
        (6, 8),  # writes z, which the add reads until 6
        (9, 13),  # reads z, there at 8; writes b, which the store reads until 9
    ]
    assert timeline.cycles == timeline.bounds.critical_path == timeline.bounds.least == 13
    assert timeline.bounds.resources == {"mul": 8, "add": 4, "mem": 3}
    assert timeline.bounds.most == 13 + 8 + 4 + 3
    assert timeline.utilisation == {"mul": 8 / 13, "add": 4 / 13, "mem": 3 / 13}


def test_renaming_removes_the_false_dependences() -> None:
    subtract = Instruction("sub", ("x", "w"), "z2", 2, "add")
    again = Instruction("mul", ("w", "z2"), "b2", 4, "mul")
    assert placed(schedule([MULTIPLY, ADD, STORE, subtract, again], UNITS)) == [(0, 4), (4, 6), (6, 9), (0, 2), (4, 8)]
    pipelined = Instruction("mul", ("x", "y"), "a", 4, "mul", busy=1)
    assert placed(schedule([pipelined, ADD, STORE, subtract, again], UNITS)) == [(0, 4), (4, 6), (6, 9), (0, 2), (2, 6)]


def test_a_short_write_after_a_long_one_ends_later() -> None:
    assert placed(schedule([Instruction("slow", (), "a", 10), Instruction("fast", (), "a", 2)], {})) == [(0, 10), (9, 11)]


def test_a_unit_can_stay_busy_after_the_result() -> None:
    first = Instruction("op", (), "a", 2, "u", busy=5)
    timeline = schedule([first, Instruction("op", ("a",), "b", 1, "v"), Instruction("op", (), "c", 1, "u")], {"u": 1, "v": 1})
    assert placed(timeline) == [(0, 5), (2, 3), (5, 6)]


def test_the_longest_path_goes_first_and_ties_go_by_program_order() -> None:
    short, head, chain = (Instruction("op", source, name, 3, "u") for source, name in (((), "s"), ((), "h"), (("h",), "c")))
    assert placed(schedule([short, head, chain], {"u": 1})) == [(3, 6), (0, 3), (6, 9)]
    alike = [Instruction("op", (), name, 2, "u") for name in "abcd"]
    timeline = schedule(alike, {"u": 2})
    assert [(row.start, row.unit) for row in timeline.rows] == [(0, 0), (0, 1), (2, 0), (2, 1)]


def test_no_length_no_unit_no_instructions() -> None:
    instant = [Instruction("op", (), "a", 0, "u"), Instruction("op", ("a",), "b", 0, "u"), Instruction("op", ("b",), "c", 3)]
    assert schedule(instant, {"u": 1}).rows == (Row(0, 0, 0, None), Row(1, 0, 0, None), Row(2, 0, 3, None))
    empty = schedule([], {"u": 1})
    assert (empty.cycles, empty.bounds.least, empty.bounds.most, empty.utilisation) == (0, 0, 0, {"u": 0.0})


def test_any_number_of_instructions_without_resource_run_at_once() -> None:
    assert schedule([Instruction("op", (), f"a{i}", 7) for i in range(50)], {}).cycles == 7


@pytest.mark.parametrize(
    ("resources", "message"),
    [({"add": 1}, r"instructions\[0\].resource = 'mul'"), ({"mul": 0}, "resources.mul = 0"), ({"mul": -1}, "resources.mul = -1")],
)
def test_unknown_resources_and_missing_units_are_refused(resources: Mapping[str, int], message: str) -> None:
    for function in (schedule, bounds_of):
        with pytest.raises(OptionError, match=message):
            function([MULTIPLY], resources)


def test_negative_cycles_are_refused() -> None:
    with pytest.raises(OptionError, match="latency = -1"):
        Instruction("op", (), "a", -1)


def stream(tiles: int, load: int, compute: int, buffers: int) -> list[Instruction]:
    """Load a tile, multiply it, into the buffers in turn."""
    return [
        instruction
        for tile in range(tiles)
        for instruction in (
            Instruction("load", (), f"buffer{tile % buffers}", load, "dma"),
            Instruction("matmul", (f"buffer{tile % buffers}",), f"out{tile}", compute, "array"),
        )
    ]


@pytest.mark.parametrize(("load", "compute"), [(7, 5), (5, 7), (4, 4), (1, 9)])
@pytest.mark.parametrize("tiles", [1, 2, 9])
def test_double_buffering_hides_the_shorter_of_load_and_compute(load: int, compute: int, tiles: int) -> None:
    units = {"dma": 1, "array": 1}
    assert schedule(stream(tiles, load, compute, buffers=1), units).cycles == tiles * (load + compute)
    hidden = load + compute + (tiles - 1) * max(load, compute)
    assert schedule(stream(tiles, load, compute, buffers=2), units).cycles == hidden


def test_a_hundred_thousand_instructions_in_five_seconds() -> None:
    instructions = stream(50_000, 5, 7, buffers=2)
    begun = time.process_time()
    timeline = schedule(instructions, {"dma": 1, "array": 1})
    assert time.process_time() - begun < 5
    assert timeline.cycles == 5 + 50_000 * 7
    check_timeline(instructions, {"dma": 1, "array": 1}, timeline)


def random_program(seed: int, count: int) -> tuple[list[Instruction], dict[str, int]]:
    chance = random.Random(seed)
    units = {name: chance.randint(1, 3) for name in ("dma", "array", "vector")}
    made = []
    for _ in range(count):
        resource = chance.choice(["", *units])
        sources = tuple(f"r{chance.randrange(count // 3 + 4)}" for _ in range(chance.randrange(3)))
        busy = chance.choice([None, 1, 12]) if resource else None
        made.append(
            Instruction("op", sources, chance.choice([None, f"r{chance.randrange(count // 3 + 4)}"]), chance.randrange(10), resource, busy)
        )
    return made, units


@pytest.mark.parametrize("seed", range(full_or_tenth(300)))
def test_long_lists_are_sound_and_within_their_bounds(seed: int) -> None:
    instructions, units = random_program(seed, 200)
    timeline = schedule(instructions, units)
    check_timeline(instructions, units, timeline)
    assert timeline.bounds == bounds_of(instructions, units)
    assert timeline.bounds.least <= timeline.cycles <= timeline.bounds.most


def test_no_unit_idles_while_a_ready_instruction_waits_for_it() -> None:
    """One resource and no dependences: the finishing times of two units differ by less than the longest instruction."""
    chance = random.Random(3)
    instructions = [Instruction("op", (), f"r{i}", chance.randint(1, 9), "u") for i in range(100)]
    timeline = schedule(instructions, {"u": 4})
    ends = [max(row.end for row in timeline.rows if row.unit == unit) for unit in range(4)]
    assert max(ends) - min(ends) < 9
    assert sum(row.start == 0 for row in timeline.rows) == 4


CODE = """
import sys, json
from ridgeline.estimate.spatial.schedule import instructions_from_json, schedule
print(json.dumps(schedule(*instructions_from_json(json.load(sys.stdin))).to_json()))
"""


def test_the_same_list_gives_the_same_timeline_in_any_process() -> None:
    text = json.dumps(instructions_to_json(*random_program(1, 300)))
    expected = json.dumps(schedule(*random_program(1, 300)).to_json()) + "\n"
    for seed in ("1", "2"):  # of the order of sets
        environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", CODE], input=text, capture_output=True, text=True, check=True, env=environment)
        assert run.stdout == expected


def test_json_says_all_and_is_read_back() -> None:
    instructions: Sequence[Instruction] = [MULTIPLY, Instruction("wait", ("a",), None, 2, label="settle")]
    timeline = schedule(instructions, UNITS)
    data = json.loads(json.dumps(timeline.to_json()))
    assert data == {
        "schema": "ridgeline/schedule/1",
        "resources": UNITS,
        "cycles": 6,
        "bounds": {"critical_path": 6, "resources": {"mul": 4, "add": 0, "mem": 0}, "least": 6, "most": 10},
        "utilisation": {"mul": 4 / 6, "add": 0.0, "mem": 0.0},
        "rows": [
            {"index": 0, "opcode": "mul", "label": "", "start": 0, "end": 4, "resource": "mul", "unit": 0},
            {"index": 1, "opcode": "wait", "label": "settle", "start": 4, "end": 6, "resource": "", "unit": None},
        ],
    }
    assert timeline_from_json(data, instructions, UNITS) == timeline


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": 1}, "index = 1"),
        ({"index": True}, "index = True"),
        ({"start": 0.5}, "start = 0.5"),
        ({"end": None}, "end = None"),
        ({"unit": "0"}, "unit = '0'"),
    ],
)
def test_a_schedule_that_cannot_be_read_is_refused(change: dict[str, object], message: str) -> None:
    data = schedule([MULTIPLY], UNITS).to_json()
    data["rows"][0].update(change)
    with pytest.raises(OptionError, match=rf"rows\[0\].{message}"):
        timeline_from_json(data, [MULTIPLY], UNITS)
    for odd in ([], {}, {**data, "rows": 3}, {**data, "schema": "ridgeline/schedule/2"}, {**data, "rows": [3]}):
        with pytest.raises(OptionError):
            timeline_from_json(odd, [MULTIPLY], UNITS)


def test_the_chart_draws_each_unit_to_scale() -> None:
    instructions = [*stream(3, 2, 4, buffers=2), Instruction("settle", (), None, 5)]
    assert schedule(instructions, {"dma": 1, "array": 1}).text(60).splitlines() == [
        "14 cycles, never below 12; a column is 1 cycle",
        "dma[0]   llll..ll......   43%",
        "array[0] ..mmmmmmmmmmmm   86%",
        "         ~~~~~.........",
        "l load  m matmul  s settle  ~ in flight, on no unit  . idle",
    ]


def test_a_column_shows_what_fills_most_of_it_and_the_first_of_equals() -> None:
    alternating = [Instruction(opcode, (), None, cycles, "u") for _ in range(29) for opcode, cycles in (("a", 1), ("b", 1))]
    assert schedule(alternating, {"u": 1}).text(40).splitlines()[:2] == [
        "58 cycles, never below 58; a column is 2 cycles",
        f"u[0] {'a' * 29}  100%",
    ]
    uneven = [Instruction(opcode, ("x",), "x", cycles, "u") for _ in range(29) for opcode, cycles in (("a", 1), ("b", 2))]
    assert schedule(uneven, {"u": 1}).text(40).splitlines()[1] == f"u[0] {'b' * 29}  100%"


def test_the_chart_keeps_to_its_width() -> None:
    timeline = schedule(*random_program(2, 500))
    for width in (40, 77, 200):
        lines = timeline.text(width).splitlines()
        assert max(map(len, lines)) <= width or max(map(len, lines)) == len(lines[0])  # the first line is a sentence
    with pytest.raises(OptionError, match="width = 39"):
        timeline.text(39)


def test_the_chart_copes_with_many_opcodes_and_units() -> None:
    many = [Instruction(f"op{i}", (), None, 1, "u") for i in range(100)]
    text = schedule(many, {"u": 100}).text()
    assert "and 36 more units" in text and "# another opcode" in text
    assert schedule([], {"u": 1}).text().splitlines()[1:] == ["u[0]     0%", ". idle"]
