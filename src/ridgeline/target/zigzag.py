"""An architecture written for ZigZag, as a SpatialArray.

    {"memories": {NAME: {size, r_cost, w_cost, operands: [I1, O], ports, served_dimensions}}, "operational_array": {...}}
        ──array_from_zigzag──> SpatialArraySpec

    operands           I1, I2, O   ──memory_operand_links──>  I, W, O
    served_dimensions  axes one instance is shared over; dimensions and sizes are the axes
    ports              bandwidth_max bits a cycle in pieces of bandwidth_min; r_cost and w_cost [pJ] are of bandwidth_max bits
    allocation         "I2, tl" to low = rd_down    fl from low = wr_up    fh from high = wr_down    th to high = rd_up
    refill: a PE hands its outputs on as they are finished (`stream`); any other memory hides a refill where two tiles fit (`double`)

What ZigZag keeps elsewhere is given beside it: operand widths (in its workload), the clock (nowhere). Areas there have no unit and are
taken as mm2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ..core.errors import TargetSpecError
from ..core.spec import Spec, parse_spec
from .array import OperandBits, SpatialArraySpec, Whole, Width

LINKS = {"W": "I2", "I": "I1", "O": "O"}
DIRECTION_OF = {"tl": "rd_down", "fl": "wr_up", "fh": "wr_down", "th": "rd_up"}
SOURCE = "ZigZag's file"
UNITLESS = "ZigZag's file, where areas have no unit"
THEIR_NAMES = {"shared_over": "served_dimensions", "capacity_bits": "size", ".carries": ".allocation",
               "word_bits": "bandwidth_min", "bits_per_cycle": "bandwidth_max"}  # fmt: skip
DO = "correct the architecture; its form is that of ZigZag 3.9"
WIDEST = 32
Amount = Annotated[float, Field(strict=True, ge=0.0, le=1e12, allow_inf_nan=False)]


class ZigzagPort(Spec):
    """One port of a memory."""

    name: str = Field(min_length=1)
    """Unique in its memory."""
    type: Literal["read", "write", "read_write"]
    """What it can do."""
    bandwidth_min: Width
    """Bits of the smallest access."""
    bandwidth_max: Width
    """Bits a cycle."""
    allocation: tuple[str, ...]
    """Streams it carries, e.g. "I1, tl"."""


class ZigzagMemory(Spec):
    """One memory."""

    size: Annotated[Whole, Field(ge=1, le=10**18)]
    """Bits."""
    r_cost: Amount
    """pJ of reading bandwidth_max bits."""
    w_cost: Amount
    """pJ of writing bandwidth_max bits."""
    area: Amount = 0.0
    """No unit."""
    latency: Annotated[Whole, Field(ge=0, le=1_000_000)] = 1
    """Cycles."""
    operands: tuple[str, ...]
    """Memory operands: I1, I2, O."""
    ports: tuple[ZigzagPort, ...] = Field(min_length=1)
    """Its ports."""
    served_dimensions: tuple[str, ...]
    """Dimensions of the array that share an instance."""
    double_buffering_support: bool = Field(default=False, strict=True)
    """Whether a second copy of a tile can be filled while the first is used."""


class ZigzagOperationalArray(Spec):
    """The grid of multipliers."""

    unit_energy: Amount
    """pJ of one operation."""
    unit_area: Amount = 0.0
    """No unit."""
    dimensions: tuple[str, ...] = Field(min_length=1)
    """Names of the axes."""
    sizes: tuple[Annotated[Whole, Field(ge=1, le=65536)], ...]
    """Multipliers along each."""


class ZigzagArchitecture(Spec):
    """One architecture."""

    name: str = ""
    """As ZigZag calls it."""
    memories: dict[str, ZigzagMemory] = Field(min_length=1)
    """Nearest to the multipliers first."""
    operational_array: ZigzagOperationalArray
    """The multipliers."""


def array_from_zigzag(
    name: str,
    data: Mapping[str, Any],
    *,
    links: Mapping[str, str] = LINKS,
    bits: OperandBits | None = None,
    clock_hz: float = 1e9,
) -> SpatialArraySpec:
    """The same architecture as a target; a TargetSpecError names the field that is wrong.

    `links` is the memory_operand_links of ZigZag's mapping file. Without `bits`, an operand is as wide as the port that
    feeds a multiplier from a memory of its own; 8 bits (partial sums 16) where that memory is shared.
    """
    origin = f"ZigZag architecture {name}"
    try:
        read = parse_spec(ZigzagArchitecture, _table(data, origin), origin)
        operand_of = {linked: operand for operand, linked in links.items()}
        spec = {
            "version": 1,
            "kind": "array",
            "name": name,
            "description": f"{read.name or name}, converted from ZigZag",
            "clock_hz": _constant(clock_hz, "Hz", "ZigZag states no clock"),
            "axes": _axes(read.operational_array, origin),
            "bits": bits.model_dump() if bits else _widths(read, operand_of),
            "mac": {
                "energy_pj": _constant(read.operational_array.unit_energy, "pJ"),
                "area_mm2": _constant(read.operational_array.unit_area, "mm2", UNITLESS),
            },
            "memories": {label: _memory(f"memories.{label}", memory, operand_of, origin) for label, memory in read.memories.items()},
        }
        return parse_spec(SpatialArraySpec, spec, origin)
    except TargetSpecError as error:
        raise TargetSpecError(_their_names(error.what), why=_their_names(error.why), do=DO) from error


def _table(data: Mapping[str, Any], origin: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise _wrong("the architecture", f"must be a table with memories and operational_array, got {type(data).__name__}", origin)
    return dict(data)


def _axes(grid: ZigzagOperationalArray, origin: str) -> dict[str, int]:
    if len(grid.dimensions) != len(grid.sizes):
        raise _wrong("operational_array.sizes", f"{len(grid.sizes)} sizes for {len(grid.dimensions)} dimensions", origin)
    if len(set(grid.dimensions)) != len(grid.dimensions):
        raise _wrong("operational_array.dimensions", f"{', '.join(grid.dimensions)}: one is named twice", origin)
    return dict(zip(grid.dimensions, grid.sizes, strict=True))


def _their_names(text: str) -> str:
    """Our names of fields, in an error, as ZigZag's."""
    for ours, theirs in THEIR_NAMES.items():
        text = text.replace(ours, theirs)
    return text


def _memory(field: str, memory: ZigzagMemory, operand_of: Mapping[str, str], origin: str) -> dict[str, Any]:
    read_bits, write_bits = (_access_bits(field, memory, verb, origin) for verb in ("read", "write"))
    ports: dict[str, Any] = {}
    for place, port in enumerate(memory.ports):
        if port.name in ports:
            raise _wrong(f"{field}.ports.{place}.name", f"there are two ports {port.name!r}", origin)
        ports[port.name] = {
            "direction": port.type,
            "bits_per_cycle": port.bandwidth_max,
            "word_bits": port.bandwidth_min,
            "carries": [_stream(f"{field}.ports.{place}.allocation", text, operand_of, origin) for text in port.allocation],
        }
    return {
        "operands": [_operand(f"{field}.operands", text, operand_of, origin) for text in memory.operands],
        "shared_over": list(memory.served_dimensions),
        "capacity_bits": _constant(memory.size, "b"),
        "read_pj": _constant(memory.r_cost, "pJ"),
        "write_pj": _constant(memory.w_cost * (read_bits / write_bits), "pJ"),
        "access_bits": read_bits,
        "ports": ports,
        "refill": "stream" if memory.operands == ("O",) and not memory.served_dimensions else "double",
        "latency_cycles": memory.latency,
        "area_mm2": _constant(memory.area, "mm2", UNITLESS),
    }


def _access_bits(field: str, memory: ZigzagMemory, verb: str, origin: str) -> int:
    """Width the cost of reading, or writing, is stated for; a memory that cannot do it costs nothing, at any width."""
    widths = {port.bandwidth_max for port in memory.ports if port.type in (verb, "read_write")}
    if len(widths) > 1:
        raise _wrong(f"{field}.ports", f"{verb} ports of {', '.join(map(str, sorted(widths)))} bits, but one cost of an access", origin)
    return max(widths or {port.bandwidth_max for port in memory.ports})


def _operand(field: str, text: str, operand_of: Mapping[str, str], origin: str) -> str:
    if text not in operand_of:
        raise _wrong(field, f"{text!r} is not one of {', '.join(sorted(operand_of))}", origin)
    return operand_of[text]


def _stream(field: str, text: str, operand_of: Mapping[str, str], origin: str) -> str:
    operand, _, way = (part.strip() for part in text.partition(","))
    if way not in DIRECTION_OF:
        raise _wrong(field, f"{text!r} is not an operand, a comma and one of {', '.join(DIRECTION_OF)}", origin)
    return f"{_operand(field, operand, operand_of, origin)} {DIRECTION_OF[way]}"


def _widths(read: ZigzagArchitecture, operand_of: Mapping[str, str]) -> dict[str, int]:
    widths = {"W": 8, "I": 8, "O": 16, "F": 8}
    for linked, operand in operand_of.items():
        nearest = next((memory for memory in read.memories.values() if linked in memory.operands), None)
        if nearest and not nearest.served_dimensions:
            feeding = [port.bandwidth_min for port in nearest.ports if f"{linked}, tl" in port.allocation]
            if feeding and feeding[0] <= WIDEST:  # a wider port moves several elements at once
                widths[operand] = feeding[0]
    return widths


def _constant(value: float, unit: str, source: str = SOURCE) -> dict[str, Any]:
    return {"value": value, "unit": unit, "source": source, "status": "read" if source == SOURCE else "assumed"}


def _wrong(field: str, why: str, origin: str) -> TargetSpecError:
    return TargetSpecError(f"{field} in {origin}", why=why, do=DO)
