"""What a SpatialArray is: a grid of multipliers, the memories that feed it, their ports, the network between, the cores.

    target.toml ──load_target──> SpatialArraySpec
      axes.<name>      how many processing elements (PEs) lie along it; the first axis is the innermost lane of an unrolled loop
      bits             width of weights (W), inputs (I), partial sums (O) and finished outputs (F)
      memories.<name>  nearest to the multipliers first: which operands live there, over which axes one instance is shared,
                       capacity, energy of one access *of a stated width*, ports, how a refill overlaps with computing
      noc              energy of one hop between a shared memory and an instance below it, and the bits a cycle it carries

Each operand climbs its own ladder: the memories that hold it, in file order, ending in the outermost one, which holds all three.
A port moves data in four directions, seen from its memory: rd_down (to the multipliers), wr_up (results from below),
wr_down (a refill from above), rd_up (results going out).
"""

from __future__ import annotations

from itertools import pairwise
from math import isclose, prod
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ..core.spec import Constant, Spec, quantity

Operand = Literal["W", "I", "O"]
OPERANDS: tuple[str, ...] = ("W", "I", "O")
Direction = Literal["rd_down", "wr_up", "wr_down", "rd_up"]
DIRECTIONS: tuple[str, ...] = ("rd_down", "wr_up", "wr_down", "rd_up")
READS = ("rd_down", "rd_up")
DIMENSIONS = ("B", "G", "K", "C", "P", "Q", "R", "S")
Dataflow = Literal["ws", "is", "os", "rs"]
DATAFLOWS: tuple[Dataflow, ...] = ("ws", "is", "os", "rs")

# The bounds above are far beyond anything built: a prefix too many is an error, and no sum of theirs leaves the floats.
Hertz = Annotated[Constant, quantity("Hz", most=1e13)]
Bits = Annotated[Constant, quantity("b", most=1e18)]
Picojoules = Annotated[Constant, quantity("pJ", least=0.0, most=1e12)]
SquareMillimetres = Annotated[Constant, quantity("mm2", least=0.0, most=1e9)]
Watts = Annotated[Constant, quantity("W", least=0.0, most=1e9)]
Whole = Annotated[int, Field(strict=True)]  # neither "64", 64.0 nor true
Width = Annotated[Whole, Field(ge=1, le=1 << 24)]

NOT_STATED = "not stated"


def _zero(unit: str) -> Constant:
    return Constant(value=0.0, unit=unit, source=NOT_STATED, status="assumed")


class OperandBits(Spec):
    """How wide each operand is on this array."""

    W: Whole = Field(default=8, ge=1, le=64)
    """Bits of a weight (of the second operand of a matmul)."""
    I: Whole = Field(default=8, ge=1, le=64)  # noqa: E741 - the field's usual letter
    """Bits of an input."""
    O: Whole = Field(default=16, ge=1, le=128)  # noqa: E741
    """Bits of a partial sum."""
    F: Whole = Field(default=8, ge=1, le=128)
    """Bits of a finished output, no more than those of a partial sum."""

    @model_validator(mode="after")
    def _finished_is_narrower(self) -> OperandBits:
        if self.F > self.O:
            raise ValueError(f"F must be <= O, a finished output is not wider than a partial sum, got {self.F} and {self.O}")
        return self


class Port(Spec):
    """One port of a memory; the streams it carries share its bits."""

    direction: Literal["read", "write", "read_write"]
    """What it can do."""
    bits_per_cycle: Width
    """Bits it moves in a cycle."""
    word_bits: Width | None = None
    """Smallest piece it moves; a transfer is rounded up to whole pieces. Not given: bits_per_cycle."""
    carries: tuple[str, ...] = ()
    """Streams it carries, e.g. "W rd_down"; empty: every stream of its direction that no other port names."""

    @property
    def granule(self) -> int:
        return self.word_bits or self.bits_per_cycle

    def serves(self, direction: str) -> bool:
        return self.direction == "read_write" or self.direction == ("read" if direction in READS else "write")

    @field_validator("word_bits")
    @classmethod
    def _whole_words(cls, word_bits: int | None, info: ValidationInfo) -> int | None:
        each_cycle = info.data.get("bits_per_cycle")
        if word_bits and each_cycle and each_cycle % word_bits:
            raise ValueError(f"bits_per_cycle must be a multiple of word_bits, got {each_cycle} and {word_bits}")
        return word_bits

    @field_validator("carries")
    @classmethod
    def _known_streams(cls, carries: tuple[str, ...]) -> tuple[str, ...]:
        for stream in carries:
            operand, _, direction = stream.partition(" ")
            if operand not in OPERANDS or direction not in DIRECTIONS:
                raise ValueError(f"{stream!r} is not an operand (W, I, O), a space and one of {', '.join(DIRECTIONS)}")
        return _once(carries)


class ArrayMemory(Spec):
    """One memory, or one instance of it for every place along the axes it is not shared over."""

    operands: tuple[Operand, ...] = Field(min_length=1, max_length=3)
    """Which operands live here."""
    shared_over: tuple[str, ...] = ()
    """Axes whose PEs share one instance; an instance exists for each place along the other axes."""
    capacity_bits: Bits
    """Of one instance; write unit = "kb" or "Kib" for kilobits, and so on."""
    read_pj: Picojoules
    """Energy of reading access_bits."""
    write_pj: Picojoules
    """Energy of writing access_bits."""
    access_bits: Width
    """Width of the access the energies are stated for."""
    ports: dict[str, Port] = Field(min_length=1, max_length=16)
    """Its ports."""
    refill: Literal["double", "single", "stream"] = "double"
    """double: a refill hides if a second copy of the tile fits; single: never; stream: words are replaced as they are used up."""
    latency_cycles: Whole = Field(default=1, ge=0, le=1_000_000)
    """From asking to the first bit."""
    area_mm2: SquareMillimetres = _zero("mm2")
    """Of one instance."""
    static_w: Watts = _zero("W")
    """Leakage of one instance."""

    def port_of(self, operand: str, direction: str) -> str:
        """Name of the port a stream passes; a port that names it wins, else the first open one of its direction."""
        stream = f"{operand} {direction}"
        named = [name for name, port in self.ports.items() if stream in port.carries]
        open_to_all = [name for name, port in self.ports.items() if not port.carries and port.serves(direction)]
        return (named or open_to_all or [""])[0]

    def energy_per_bit_pj(self, direction: str) -> float:
        return (self.read_pj if direction in READS else self.write_pj).value / self.access_bits

    @field_validator("operands", "shared_over")
    @classmethod
    def _named_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return _once(names)

    @field_validator("capacity_bits")
    @classmethod
    def _whole_bits(cls, capacity: Constant) -> Constant:
        whole = float(round(capacity.value))
        if not isclose(capacity.value, whole, rel_tol=1e-12):
            raise ValueError(f"must be a whole number of bits, got {capacity.value}")
        return capacity.model_copy(update={"value": whole})  # 1.1 kb is 1,100 bits, whatever the floats make of it

    def check_ports(self, name: str) -> None:
        """Raise for a port that carries what it cannot, or what another port carries; `name` is this memory's."""
        taken: dict[str, str] = {}
        for label, port in self.ports.items():
            field = f"memories.{name}.ports.{label}.carries"
            for stream in port.carries:
                operand, _, direction = stream.partition(" ")
                if not port.serves(direction):
                    raise ValueError(f"{field}: {stream!r} cannot pass a {port.direction} port")
                if operand not in self.operands:
                    raise ValueError(f"{field}: {stream!r} is of an operand that does not live here")
                if stream in taken:
                    raise ValueError(f"{field}: {stream!r} already passes port {taken[stream]}")
                taken[stream] = label


class Noc(Spec):
    """The network between shared memories and the instances, or PEs, below them."""

    hop_pj: Picojoules = _zero("pJ")
    """Energy of bringing hop_bits to one place, or of passing a partial sum to its neighbour."""
    hop_bits: Width = 16
    """Width hop_pj is stated for."""
    bits_per_cycle: Width | None = None
    """Bits it takes in or gives out in a cycle, a word sent to many places counted once; None: never a limit."""


class MacUnit(Spec):
    """One multiply-accumulate unit; every PE has one."""

    energy_pj: Picojoules
    """Of one multiplication with its addition."""
    area_mm2: SquareMillimetres = _zero("mm2")
    """Of one PE's arithmetic."""
    static_w: Watts = _zero("W")
    """Leakage of one PE."""


class Cores(Spec):
    """Several copies of the array around one outermost memory."""

    count: Whole = Field(default=1, ge=1, le=4096)
    """How many."""
    use: Literal["split", "pipeline"] = "split"
    """split: every layer is cut along a dimension and shared out; pipeline: each core runs a run of layers, one input behind the next."""


class HostFallback(Spec):
    """What an op the array cannot run costs on its host."""

    ops_per_s: Annotated[Constant, quantity("op/s", most=1e21)] = Constant(value=8e9, unit="op/s", source=NOT_STATED, status="assumed")
    """Arithmetic operations a second."""
    bytes_per_s: Annotated[Constant, quantity("B/s", most=1e21)] = Constant(value=8e9, unit="B/s", source=NOT_STATED, status="assumed")
    """Bytes a second in and out."""
    pj_per_op: Picojoules = _zero("pJ")
    """Energy of one operation."""
    pj_per_byte: Picojoules = _zero("pJ")
    """Energy of one byte moved."""


class SpatialArraySpec(Spec):
    """A dataflow accelerator, all of it."""

    version: Literal[1]
    """Of this format."""
    kind: Literal["array"]
    """Kind of target."""
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """As in `--on NAME`."""
    description: str = Field(default="", max_length=400)
    """One line."""
    clock_hz: Hertz
    """Cycles a second."""
    axes: dict[str, Annotated[Whole, Field(ge=1, le=65536)]] = Field(min_length=1, max_length=4)
    """PEs along each axis, innermost first."""
    systolic: bool = Field(default=False, strict=True)
    """Operands pass from PE to PE: each pass pays the skew of the grid, and a stationary operand is shifted in row by row."""
    unroll: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Dimensions each axis can unroll (of B G K C P Q R S); an axis not named can unroll any."""
    dataflows: tuple[Dataflow, ...] = Field(default=DATAFLOWS, min_length=1)
    """Dataflows the control can run."""
    bits: OperandBits = OperandBits()
    """Operand widths."""
    mac: MacUnit
    """The arithmetic of one PE."""
    memories: dict[str, ArrayMemory] = Field(min_length=1, max_length=12)
    """Nearest to the multipliers first; the last holds all operands and is shared over all axes."""
    noc: Noc = Noc()
    """Between shared memories and the PEs."""
    cores: Cores = Cores()
    """Copies of the array."""
    runs: tuple[Literal["conv", "depthwise", "matmul", "attention"], ...] = ("conv", "depthwise", "matmul", "attention")
    """Work the array can take; the rest goes to the host."""
    epilogue: tuple[Literal["batch_norm", "activation"], ...] = ("batch_norm", "activation")
    """Ops done on results as they leave the array, at no cost of their own."""
    host: HostFallback = HostFallback()
    """Cost of what the array cannot run."""

    @property
    def pes(self) -> int:
        return prod(self.axes.values())

    def ladder(self, operand: str) -> list[str]:
        """Memories an operand passes, nearest first."""
        return [name for name, memory in self.memories.items() if operand in memory.operands]

    def instances(self, memory: str) -> int:
        return prod(size for axis, size in self.axes.items() if axis not in self.memories[memory].shared_over)

    @property
    def area_mm2(self) -> float:
        return self._whole_chip({name: m.area_mm2.value for name, m in self.memories.items()}, self.mac.area_mm2.value)

    @property
    def static_w(self) -> float:
        return self._whole_chip({name: m.static_w.value for name, m in self.memories.items()}, self.mac.static_w.value)

    def _whole_chip(self, memories: dict[str, float], mac: float) -> float:
        """Every core, around one outermost memory."""
        *own, shared = memories
        core = sum(memories[name] * self.instances(name) for name in own) + self.pes * mac
        return self.cores.count * core + memories[shared]

    @model_validator(mode="after")
    def _sound(self) -> SpatialArraySpec:
        for axis, dims in self.unroll.items():
            if axis not in self.axes:
                raise ValueError(f"unroll.{axis}: no such axis; the axes are {', '.join(self.axes)}")
            for dim in dims:
                if dim not in DIMENSIONS:
                    raise ValueError(f"unroll.{axis}: {dim!r} is not one of {' '.join(DIMENSIONS)}")
        for name, memory in self.memories.items():
            for axis in memory.shared_over:
                if axis not in self.axes:
                    raise ValueError(f"memories.{name}.shared_over: no axis {axis!r}; the axes are {', '.join(self.axes)}")
        last_name, last = list(self.memories.items())[-1]
        if set(last.operands) != set(OPERANDS):
            raise ValueError(f"memories.{last_name}.operands: the last memory must hold W, I and O; list memories nearest first")
        if set(last.shared_over) != set(self.axes):
            raise ValueError(f"memories.{last_name}.shared_over: the last memory must be shared over every axis: {', '.join(self.axes)}")
        for name, memory in self.memories.items():
            memory.check_ports(name)
        for operand in OPERANDS:
            self._check_ladder(operand)
        return self

    def _check_ladder(self, operand: str) -> None:
        ladder = self.ladder(operand)
        for below, above in pairwise(ladder):
            if not set(self.memories[below].shared_over) <= set(self.memories[above].shared_over):
                raise ValueError(f"memories.{above}.shared_over: must include the axes of memories.{below}, which it feeds with {operand}")
        widest = max(self.bits.O, self.bits.F) if operand == "O" else getattr(self.bits, operand)
        for place, name in enumerate(ladder):
            memory = self.memories[name]
            if memory.capacity_bits.value < widest:
                raise ValueError(f"memories.{name}.capacity_bits: smaller than one element of {operand} ({widest} bits)")
            for direction in _needed(operand, place, place == len(ladder) - 1):
                if not memory.port_of(operand, direction):
                    raise ValueError(f"memories.{name}.ports: none carries {operand!r} {direction}")


def _once(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is named twice")
    return names


def _needed(operand: str, place: int, outermost: bool) -> tuple[str, ...]:
    down = ("rd_down",) if outermost else ("rd_down", "wr_down")
    if operand != "O":
        return down
    return ("rd_down", "wr_up") if outermost else ("rd_down", "wr_up", "wr_down", "rd_up")
