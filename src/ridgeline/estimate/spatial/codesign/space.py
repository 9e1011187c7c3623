"""Which chips and schedules are tried: a list of values for every parameter, and one pick from each.

    space.toml ──load_space──> DesignSpace ──choice(index of each list)──> Choice ──chip.build──> SpatialArraySpec
    base array ──default_space──┘   size = product of the lists' lengths

A list left out means "as the base array has it". Hardware: array shape, register files, buffers, bandwidth, network,
operand widths, cores. Software: batch, dataflow, whether layers may be fused; tiles, loop orders and unrollings come from
the exact mapper. How operand widths change a model's answers is not modelled: offer only widths the model can bear.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from ....core.errors import OptionError, TargetSpecError
from ....core.spec import Spec, parse_spec, read_toml
from ....target.array import OPERANDS, Cores, OperandBits, SpatialArraySpec, Whole, Width
from .rules import Rules

Size = Annotated[Whole, Field(ge=1, le=65536)]
Capacity = Annotated[Whole, Field(ge=1, le=1 << 50)]
AXIS_NAMES = ("columns", "rows")
MOST_VALUES = 64


class RegisterBits(Spec):
    """Room for each operand in a PE's register files."""

    W: Capacity
    """Bits for weights."""
    I: Capacity  # noqa: E741 - the field's usual letter
    """Bits for inputs."""
    O: Capacity  # noqa: E741
    """Bits for partial sums."""


def _same_for_all(given: Any) -> Any:
    return {operand: given for operand in OPERANDS} if isinstance(given, int) and not isinstance(given, bool) else given


class DesignSpace(Spec):
    """A list of values a parameter; the chips are all combinations."""

    version: Literal[1] = 1
    """Of this format."""
    rows: tuple[Size, ...] = Field(default=(), max_length=MOST_VALUES)
    """PEs along the axis named rows, or the second one."""
    columns: tuple[Size, ...] = Field(default=(), max_length=MOST_VALUES)
    """PEs along the axis named columns, or the first one."""
    register_bits: tuple[Annotated[RegisterBits, BeforeValidator(_same_for_all)], ...] = Field(default=(), max_length=MOST_VALUES)
    """Room in a PE's first memories, for each operand: one number for all, or a table with W, I and O."""
    local_bits: tuple[Capacity, ...] = Field(default=(), max_length=MOST_VALUES)
    """Capacity of the memories a PE has behind its register files, in one PE."""
    buffer_bits: tuple[Capacity, ...] = Field(default=(), max_length=MOST_VALUES)
    """Capacity of the memories shared by the whole array, together; the base's proportions are kept."""
    bandwidth_bits: tuple[Width, ...] = Field(default=(), max_length=MOST_VALUES)
    """Bits a cycle of the outermost memory's widest port."""
    noc_bits: tuple[Width, ...] = Field(default=(), max_length=MOST_VALUES)
    """Bits a cycle of the network; the shared memories' ports grow with it."""
    precision: tuple[OperandBits, ...] = Field(default=(), max_length=MOST_VALUES)
    """Operand widths."""
    cores: tuple[Cores, ...] = Field(default=(), max_length=MOST_VALUES)
    """Copies of the array, and how they share the work."""
    batch: tuple[Annotated[Whole, Field(ge=1, le=65536)], ...] = Field(default=(1,), min_length=1, max_length=MOST_VALUES)
    """Samples in one pass."""
    dataflow: tuple[Literal["any", "ws", "is", "os", "rs"], ...] = Field(default=("any",), min_length=1, max_length=5)
    """Dataflow of every layer; any: the best for each."""
    fusion: tuple[Annotated[bool, Field(strict=True)], ...] = Field(default=(True,), min_length=1, max_length=2)
    """Whether activations may stay in the shared buffer from a layer to the next."""
    rules: Rules = Rules()
    """How area, leakage and energy follow from sizes."""

    @field_validator("*")
    @classmethod
    def _no_value_twice(cls, values: Any) -> Any:
        if isinstance(values, tuple):
            for value in values:
                if values.count(value) > 1:
                    raise ValueError(f"{value!r} is listed twice")
        return values

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(max(1, len(getattr(self, name))) for name in PARAMETERS)

    @property
    def size(self) -> int:
        """Number of combinations."""
        return prod(self.lengths)

    def choice(self, picks: Sequence[int]) -> Choice:
        """The chip at these places in the lists."""
        values: dict[str, Any] = {name: (getattr(self, name) or (None,))[pick] for name, pick in zip(PARAMETERS, picks, strict=True)}
        return Choice(**values)

    def picks(self, number: int) -> tuple[int, ...]:
        """Places in the lists of combination `number`, the last parameter running fastest."""
        found = []
        for length in reversed(self.lengths):
            number, place = divmod(number, length)
            found.append(place)
        return tuple(reversed(found))


@dataclass(frozen=True, slots=True)
class Choice:
    """One value a parameter; None: as the base array has it."""

    rows: int | None = None
    columns: int | None = None
    register_bits: RegisterBits | None = None
    local_bits: int | None = None
    buffer_bits: int | None = None
    bandwidth_bits: int | None = None
    noc_bits: int | None = None
    precision: OperandBits | None = None
    cores: Cores | None = None
    batch: int = 1
    dataflow: str = "any"
    fusion: bool = True

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in PARAMETERS}
        plain = {name: value.model_dump() if isinstance(value, Spec) else value for name, value in values.items()}
        return {name: value for name, value in plain.items() if value is not None}

    @property
    def key(self) -> str:
        """The same for equal choices of any space."""
        return json.dumps(self.to_json(), sort_keys=True)


PARAMETERS: tuple[str, ...] = tuple(Choice.__dataclass_fields__)


def load_space(path: Path) -> DesignSpace:
    """Read a TOML file; what is wrong with it is a TargetSpecError that speaks of design spaces."""
    try:
        return parse_spec(DesignSpace, read_toml(path), path.name)
    except TargetSpecError as error:
        raise TargetSpecError(error.what, why=error.why, do="correct the file; docs/codesign.md shows a full design space") from error


def axis_of(base: SpatialArraySpec, name: str) -> str | None:
    """The base's axis that `rows` or `columns` stands for: by name, else columns first and rows second."""
    axes = list(base.axes)
    if name in axes:
        return name
    free = [axis for axis in axes if axis not in AXIS_NAMES]
    place = AXIS_NAMES.index(name) if not set(AXIS_NAMES) & set(axes) else 0
    return free[place] if place < len(free) else None


@dataclass(frozen=True, slots=True)
class Parts:
    """The base's memories by the part they play."""

    registers: tuple[str, ...]
    local: tuple[str, ...]
    buffers: tuple[str, ...]
    outermost: str


def parts_of(base: SpatialArraySpec) -> Parts:
    """First private memories, further private ones, those shared by the whole array, the last; others keep their size."""
    *inner, outermost = base.memories
    private = [name for name in inner if not base.memories[name].shared_over]
    first = {base.ladder(operand)[0] for operand in OPERANDS}
    buffers = [name for name in inner if set(base.memories[name].shared_over) == set(base.axes)]
    registers = [name for name in private if name in first]
    return Parts(tuple(registers), tuple(name for name in private if name not in first), tuple(buffers), outermost)


def check_space(space: DesignSpace, base: SpatialArraySpec) -> None:
    """Raise for a parameter the base array has nothing to apply to."""
    parts = parts_of(base)
    missing = {
        "rows": axis_of(base, "rows") is None and f"its only axis is {next(iter(base.axes))}",
        "register_bits": not parts.registers and "none of its memories belongs to one PE",
        "local_bits": not parts.local and "its PEs have no memory behind the register files",
        "buffer_bits": not parts.buffers and "it has no memory shared by the whole array but the outermost one",
    }
    for name, why in missing.items():
        if getattr(space, name) and why:
            raise OptionError(
                f"{name} of the design space cannot vary on {base.name}", why=str(why), do="leave it out, or take another --base"
            )
    for flow in space.dataflow:
        if flow != "any" and flow not in base.dataflows:
            raise OptionError(
                f"dataflow {flow!r} on {base.name}",
                why=f"its control runs {', '.join(base.dataflows)}",
                do="leave it out of the design space",
            )


def default_space(base: SpatialArraySpec) -> DesignSpace:
    """Half to double of what the base has, more to the small side for memories; widths, cores and batch stay."""
    parts = parts_of(base)
    axes = {name: axis_of(base, name) for name in AXIS_NAMES}
    wide = max(port.bits_per_cycle for port in base.memories[parts.outermost].ports.values())
    shared = sum(int(base.memories[name].capacity_bits.value) for name in parts.buffers)
    local = sum(int(base.memories[name].capacity_bits.value) for name in parts.local)
    return DesignSpace(
        rows=_around(base.axes[axes["rows"]], (0.5, 1, 2)) if axes["rows"] else (),
        columns=_around(base.axes[axes["columns"]], (0.5, 1, 2)) if axes["columns"] else (),
        register_bits=_registers_around(base, parts),
        local_bits=_around(local, (0.125, 1)),
        buffer_bits=_around(shared, (0.25, 0.5, 1, 2)),
        bandwidth_bits=_around(wide, (0.5, 1, 2)),
        noc_bits=_around(base.noc.bits_per_cycle or 0, (0.5, 1, 2)),
    )


def _around(value: int, factors: Sequence[float]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(max(1, int(value * factor)) for factor in factors)) if value else ()


def _registers_around(base: SpatialArraySpec, parts: Parts) -> tuple[RegisterBits, ...]:
    """A sixteenth, a quarter and all of the base's room, never less than one element an operand."""
    if not parts.registers:
        return ()
    widths = {"W": base.bits.W, "I": base.bits.I, "O": max(base.bits.O, base.bits.F)}
    room = dict.fromkeys(OPERANDS, 1)
    for name in parts.registers:
        memory = base.memories[name]
        room |= {operand: int(memory.capacity_bits.value) // len(memory.operands) for operand in memory.operands}
    found = [{op: max(widths[op], int(room[op] * factor)) for op in OPERANDS} for factor in (1 / 16, 1 / 4, 1)]
    return tuple(RegisterBits(**bits) for place, bits in enumerate(found) if bits not in found[:place])


def choice_from_json(data: Mapping[str, Any]) -> Choice:
    """Read what `Choice.to_json` wrote."""
    kinds = {"register_bits": RegisterBits, "precision": OperandBits, "cores": Cores}
    return Choice(**{name: kinds[name](**value) if name in kinds else value for name, value in data.items()})
