"""What is to be scheduled: instructions, the units they need, and which must wait for which.

    {"schema": "ridgeline/instructions/1",
     "resources": {"dma": 2, "array": 1, "vector": 1},                                             units of each kind
     "instructions": [{"opcode": "load", "sources": ["dram.w"], "destination": "w0", "latency": 40, "resource": "dma"}, …]}
       ──instructions_from_json──> (instructions, resources) ──dependences──> [[(later, lag), …], …]           [cycles]

opcode and latency must be given; sources [], destination null, resource "", busy null and label "" are the defaults.
An instruction that starts at cycle s
    gives its result at s + latency,
    holds one unit of its resource during s … s + busy - 1 (busy null: latency; no unit if resource is "" or busy is 0),
    has finished at s + max(latency, busy), and reads its sources from s until it has finished.

Program order, the order of the list, defines the dependences. For i before j and a register or buffer both name:
    read after write    i writes, j reads:   j starts when i has given its result, or later
    write after read    i reads, j writes:   j starts when i has finished, or later
    write after write   both write:          j starts no sooner than i, and gives its result after i (not in the same cycle)
A name that nobody wrote before is there from cycle 0. An instruction may read and write the same name (an accumulator).
All lags are at least 0, and the edges from the last writer and from the readers since then imply all the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....core.errors import OptionError, nearest

SCHEMA = "ridgeline/instructions/1"
MOST_INSTRUCTIONS = 1_000_000
MOST_SOURCES = 64
MOST_CHARACTERS = 200
MOST_CYCLES = 10**9  # of one instruction: a million of these in a row are still an exact number in JSON
MOST_RESOURCES, MOST_UNITS = 64, 4096
FIELDS = ("opcode", "sources", "destination", "latency", "resource", "busy", "label")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of an accelerator; the module says what its numbers mean."""

    opcode: str
    sources: tuple[str, ...]
    destination: str | None
    latency: int
    resource: str = ""
    busy: int | None = None
    label: str = ""

    def __post_init__(self) -> None:
        _check_text("opcode", self.opcode)
        if not isinstance(self.sources, tuple) or len(self.sources) > MOST_SOURCES:
            raise _bad("sources", self.sources, f"sources are names in a tuple (a list in JSON), at most {MOST_SOURCES}")
        for source in self.sources:
            _check_text("sources", source)
        if self.destination is not None:
            _check_text("destination", self.destination)
        _check_cycles("latency", self.latency)
        _check_text("resource", self.resource, least=0)
        if self.busy is not None:
            _check_cycles("busy", self.busy)
            if self.busy and not self.resource:
                raise _bad("busy", self.busy, "an instruction without a resource has nothing to keep busy")
        _check_text("label", self.label, least=0)

    @property
    def held_cycles(self) -> int:
        """Cycles it holds a unit; 0: it needs none."""
        if not self.resource:
            return 0
        return self.latency if self.busy is None else self.busy

    @property
    def duration_cycles(self) -> int:
        """From its start until its result is there and its unit is free."""
        return max(self.latency, self.held_cycles)

    def to_json(self) -> dict[str, Any]:
        return {name: list(self.sources) if name == "sources" else getattr(self, name) for name in FIELDS}


def _check_text(field: str, value: object, least: int = 1) -> None:
    # Unprintable characters would reach a terminal through the text chart.
    if not isinstance(value, str) or not least <= len(value) <= MOST_CHARACTERS or not value.isprintable():
        raise _bad(field, value, f"a name here has {least} to {MOST_CHARACTERS} printable characters")


def _check_cycles(field: str, value: object) -> None:
    if type(value) is not int or not 0 <= value <= MOST_CYCLES:
        raise _bad(field, value, f"cycles are a whole number from 0 to {MOST_CYCLES:,}")


def _bad(field: str, value: object, why: str) -> OptionError:
    shown = repr(value)
    return OptionError(f"{field} = {shown if len(shown) <= 80 else shown[:77] + '...'}", why=why, do=f"correct {field} of this instruction")


def instructions_from_json(data: object) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    """Instructions and units of each resource; an OptionError names the index and the field at fault."""
    top = ("schema", "resources", "instructions")
    if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
        raise OptionError(
            f"schema = {found!r}", why=f'an instruction file is an object with "schema": "{SCHEMA}"', do=f"give {', '.join(top)}"
        )
    if odd := [key for key in data if key not in top]:
        raise OptionError(
            f"unknown field {odd[0]!r}", why=f"an instruction file has {', '.join(top)}", do="remove it or correct its spelling"
        )
    resources, listed = data.get("resources", {}), data.get("instructions")
    check_resources(resources)
    if not isinstance(listed, list):
        raise OptionError(
            f"instructions is a {type(listed).__name__}", why="it must be a list", do="give a list of instructions, in program order"
        )
    check_count(listed)
    instructions = tuple(_read(index, item) for index, item in enumerate(listed))
    check_program(instructions, resources)
    return instructions, dict(resources)


def _read(index: int, item: object) -> Instruction:
    where = f"instructions[{index}]"
    if not isinstance(item, Mapping):
        raise OptionError(f"{where} is a {type(item).__name__}", why="an instruction is an object", do=f"give {', '.join(FIELDS)}")
    for field in item:
        if field not in FIELDS:
            close = nearest(str(field), FIELDS, 1)
            hint = f"did you mean {close[0]}?" if close else f"an instruction has {', '.join(FIELDS)}"
            raise OptionError(f"{where}.{field} is not a field", why=hint, do="remove it or correct its spelling")
    for field in ("opcode", "latency"):
        if field not in item:
            raise OptionError(f"{where}.{field} is missing", why=f"every instruction has {field}", do=f"give {field}")
    sources = item.get("sources", [])
    given = {**item, "sources": tuple(sources) if isinstance(sources, list) else sources}
    try:
        return Instruction(**{"destination": None, **given})
    except OptionError as error:
        raise OptionError(f"{where}.{error.what}", why=error.why, do=error.do) from error


def instructions_to_json(instructions: Sequence[Instruction], resources: Mapping[str, int]) -> dict[str, Any]:
    """What `instructions_from_json` reads."""
    return {"schema": SCHEMA, "resources": dict(resources), "instructions": [instruction.to_json() for instruction in instructions]}


def check_program(instructions: Sequence[Instruction], resources: Mapping[str, int]) -> None:
    """Raise an OptionError where an instruction asks for a resource that is not there."""
    check_count(instructions)
    check_resources(resources)
    for index, instruction in enumerate(instructions):
        if instruction.resource and instruction.resource not in resources:
            close = nearest(instruction.resource, resources, 1)
            hint = f"did you mean {close[0]}?" if close else f"the resources are {', '.join(resources) or 'none'}"
            what = f"instructions[{index}].resource = {instruction.resource!r}"
            raise OptionError(
                what, why=f"no resource of that name; {hint}", do='name one of the resources, or "" for an instruction that needs none'
            )


def check_count(instructions: Sequence[object]) -> None:
    if len(instructions) > MOST_INSTRUCTIONS:
        raise OptionError(
            f"{len(instructions):,} instructions", why=f"at most {MOST_INSTRUCTIONS:,} are scheduled at once", do="cut the list into pieces"
        )


def check_resources(resources: object) -> None:
    """Names with a whole number of units, at least one."""
    if not isinstance(resources, Mapping) or len(resources) > MOST_RESOURCES:
        why = f'resources are names with a number of units, at most {MOST_RESOURCES}, e.g. {{"dma": 2}}'
        raise OptionError("resources cannot be read", why=why, do="correct resources")
    for name, units in resources.items():
        if not isinstance(name, str) or not 1 <= len(name) <= MOST_CHARACTERS or not name.isprintable():
            raise OptionError(f"resource {name!r}", why=f"a name here has 1 to {MOST_CHARACTERS} printable characters", do="rename it")
        if type(units) is not int or not 1 <= units <= MOST_UNITS:
            why = f"a resource has a whole number of units, 1 to {MOST_UNITS}"
            raise OptionError(f"resources.{name} = {units!r}", why=why, do="correct it, or remove the resource")


def dependences(instructions: Sequence[Instruction]) -> list[list[tuple[int, int]]]:
    """For each instruction, (later instruction, least cycles from start to start); a pair may occur more than once."""
    followers: list[list[tuple[int, int]]] = [[] for _ in instructions]
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}  # since the last write
    for later, instruction in enumerate(instructions):
        for name in instruction.sources:
            if (earlier := writer.get(name)) is not None:
                followers[earlier].append((later, instructions[earlier].latency))
        target = instruction.destination
        if target is not None:
            for earlier in readers.pop(target, ()):
                followers[earlier].append((later, instructions[earlier].duration_cycles))
            if (earlier := writer.get(target)) is not None:
                followers[earlier].append((later, max(0, instructions[earlier].latency - instruction.latency + 1)))
            writer[target] = later
        for name in instruction.sources:
            readers.setdefault(name, []).append(later)
    return followers
