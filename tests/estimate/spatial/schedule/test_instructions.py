"""Instructions: the file format, what it refuses, and the dependences of hand-worked lists."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import OptionError
from ridgeline.estimate.spatial.schedule import Instruction, dependences, instructions_from_json, instructions_to_json
from ridgeline.estimate.spatial.schedule import instructions as module

LOAD = {"opcode": "load", "sources": ["dram"], "destination": "w0", "latency": 40, "resource": "dma", "busy": 8, "label": "tile 0"}


def document(*items: object, **changes: object) -> dict[str, object]:
    return {"schema": "ridgeline/instructions/1", "resources": {"dma": 2, "array": 1}, "instructions": list(items), **changes}


def test_a_file_is_read_field_by_field() -> None:
    instructions, resources = instructions_from_json(document(LOAD, {"opcode": "sync", "latency": 3}))
    assert resources == {"dma": 2, "array": 1}
    assert instructions == (Instruction("load", ("dram",), "w0", 40, "dma", 8, "tile 0"), Instruction("sync", (), None, 3, "", None, ""))


names = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=5)
resourced = st.tuples(st.sampled_from(["dma", "array"]), st.none() | st.integers(0, 99))
instruction = st.builds(
    lambda opcode, sources, destination, latency, where, label: Instruction(opcode, tuple(sources), destination, latency, *where, label),
    names, st.lists(names, max_size=4), st.none() | names, st.integers(0, 10**9), resourced | st.just(("", None)), names | st.just(""),
)  # fmt: skip


@given(st.lists(instruction, max_size=6))
def test_json_there_and_back(instructions: list[Instruction]) -> None:
    resources = {"dma": 2, "array": 1}
    text = json.dumps(instructions_to_json(instructions, resources))
    assert instructions_from_json(json.loads(text)) == (tuple(instructions), resources)


@pytest.mark.parametrize(
    ("item", "where"),
    [
        ({**LOAD, "latency": -1}, "instructions[1].latency = -1"),
        ({**LOAD, "latency": 1.5}, "instructions[1].latency = 1.5"),
        ({**LOAD, "latency": True}, "instructions[1].latency = True"),
        ({**LOAD, "latency": 10**9 + 1}, "instructions[1].latency = 1000000001"),
        ({**LOAD, "busy": -2}, "instructions[1].busy = -2"),
        ({**LOAD, "resource": ""}, "instructions[1].busy = 8"),
        ({**LOAD, "resource": "dmaa"}, "instructions[1].resource = 'dmaa'"),
        ({**LOAD, "opcode": ""}, "instructions[1].opcode = ''"),
        ({**LOAD, "opcode": "\x1b[31m"}, "instructions[1].opcode = '\\x1b[31m'"),
        ({**LOAD, "label": "x" * 201}, "instructions[1].label = "),
        ({**LOAD, "destination": 5}, "instructions[1].destination = 5"),
        ({**LOAD, "sources": "dram"}, "instructions[1].sources = 'dram'"),
        ({**LOAD, "sources": ["a", 3]}, "instructions[1].sources = 3"),
        ({**LOAD, "sources": ["a"] * 65}, "instructions[1].sources = "),
        ({**LOAD, "lateny": 3}, "instructions[1].lateny is not a field"),
        ({"opcode": "load"}, "instructions[1].latency is missing"),
        ({"latency": 3}, "instructions[1].opcode is missing"),
        (["load"], "instructions[1] is a list"),
    ],
)
def test_a_bad_instruction_is_named_by_index_and_field(item: object, where: str) -> None:
    with pytest.raises(OptionError) as caught:
        instructions_from_json(document(LOAD, item))
    assert caught.value.what.startswith(where)


def test_a_near_miss_is_guessed() -> None:
    with pytest.raises(OptionError, match="did you mean latency"):
        instructions_from_json(document({**LOAD, "lateny": 3}))
    with pytest.raises(OptionError, match="did you mean dma"):
        instructions_from_json(document({**LOAD, "resource": "dmaa"}))


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ([], "schema = 'list'"),
        ({}, "schema = None"),
        (document(schema="ridgeline/instructions/2"), "schema = 'ridgeline/instructions/2'"),
        (document(instruction=[]), "unknown field 'instruction'"),
        (document(instructions={}), "instructions is a dict"),
        (document(resources=["dma"]), "resources cannot be read"),
        (document(resources={"dma": 0}), "resources.dma = 0"),
        (document(resources={"dma": 1.0}), "resources.dma = 1.0"),
        (document(resources={"dma": 4097}), "resources.dma = 4097"),
        (document(resources={"": 1}), "resource ''"),
        (document(resources={f"r{i}": 1 for i in range(65)}), "resources cannot be read"),
    ],
)
def test_a_bad_file_is_refused(data: object, where: str) -> None:
    with pytest.raises(OptionError) as caught:
        instructions_from_json(data)
    assert caught.value.what.startswith(where)


def test_the_count_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_INSTRUCTIONS", 2)
    assert len(instructions_from_json(document(LOAD, LOAD))[0]) == 2
    with pytest.raises(OptionError, match="3 instructions"):
        instructions_from_json(document(LOAD, LOAD, LOAD))


def test_cycles_held_and_taken() -> None:
    def cycles(*arguments: object) -> tuple[int, int]:
        it = Instruction("op", (), None, *arguments)  # type: ignore[arg-type]
        return it.held_cycles, it.duration_cycles

    assert cycles(5) == (0, 5)  # on no unit
    assert cycles(5, "array") == (5, 5)
    assert cycles(5, "array", 1) == (1, 5)  # pipelined
    assert cycles(5, "array", 8) == (8, 8)  # the unit recovers after the result is there
    assert cycles(5, "array", 0) == (0, 5)


def edges(*instructions: Instruction) -> set[tuple[int, int, int]]:
    return {(earlier, later, lag) for earlier, followers in enumerate(dependences(instructions)) for later, lag in followers}


def op(destination: str | None, *sources: str, latency: int = 1, **more: object) -> Instruction:
    return Instruction("op", sources, destination, latency, **more)  # type: ignore[arg-type]


def test_read_after_write_waits_for_the_latency() -> None:
    assert edges(op("a", latency=4), op("b", "a")) == {(0, 1, 4)}
    assert edges(op("a", latency=4, resource="u", busy=9), op("b", "a")) == {(0, 1, 4)}
    assert edges(op("a", latency=4), op("a", latency=7), op("b", "a")) == {(0, 1, 0), (1, 2, 7)}  # the last writer counts


def test_write_after_read_waits_until_the_reader_has_finished() -> None:
    assert edges(op("b", "a", latency=4), op("a")) == {(0, 1, 4)}
    assert edges(op("b", "a", latency=4, resource="u", busy=9), op("a")) == {(0, 1, 9)}
    assert edges(op(None, "a", latency=2), op(None, "a", latency=3), op("a"), op("a")) == {(0, 2, 2), (1, 2, 3), (2, 3, 1)}


@pytest.mark.parametrize(("first", "second", "lag"), [(10, 2, 9), (3, 3, 1), (3, 4, 0), (2, 10, 0), (0, 0, 1)])
def test_write_after_write_gives_the_later_result_later(first: int, second: int, lag: int) -> None:
    assert edges(op("a", latency=first), op("a", latency=second)) == {(0, 1, lag)}


def test_an_accumulator_waits_for_its_last_value_and_not_for_itself() -> None:
    both = edges(op("acc", "acc", "x", latency=5), op("acc", "acc", "y", latency=5))
    assert both == {(0, 1, 5), (0, 1, 1)}  # the value; its finished reading too; the order of the writes
    assert edges(op("acc", "acc", latency=5)) == set()


def test_what_shares_no_name_is_independent() -> None:
    assert edges(op("a", "x"), op("b", "x"), op(None, "y")) == set()
