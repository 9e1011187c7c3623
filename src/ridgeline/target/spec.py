"""What a Processor is: compute units, memories nearest first, links, dispatch, power, and measured probes.

    target.toml ──load_target──> ProcessorSpec
      units.<name>     peak_flops by dtype, the kinds of op it serves, its tiles and how many copies of it there are
      memories.<name>  bandwidth and capacity, nearest to the arithmetic first, the outermost holds everything
      links.host/peer  latency + bytes / bandwidth
      probes           single ops timed on the machine: from them the estimate learns how near its limit each family gets

A unit with more FLOP/s for an op raises that op's ceiling; units never limit each other.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ..core.dtypes import BITS, STAND_INS
from ..core.spec import Constant, Spec, quantity

FlopRate = Annotated[Constant, quantity("FLOP/s")]
Bandwidth = Annotated[Constant, quantity("B/s")]
Capacity = Annotated[Constant, quantity("B")]
Seconds = Annotated[Constant, quantity("s", least=0.0)]
Watts = Annotated[Constant, quantity("W", least=0.0)]
JoulesPerFlop = Annotated[Constant, quantity("J/FLOP", least=0.0)]
JoulesPerByte = Annotated[Constant, quantity("J/B", least=0.0)]
SecondsPerByte = Annotated[Constant, quantity("s/B", least=0.0)]
Ratio = Annotated[Constant, quantity("ratio", least=0.0, most=1.0)]

MATRIX_KINDS = ("conv", "linear", "matmul", "attention", "recurrent")
Kind = Literal[
    "any", "matrix", "vector", "conv", "linear", "matmul", "attention", "recurrent", "pointwise", "norm", "softmax", "reduction", "pool",
    "embedding", "copy", "create", "other",
]  # fmt: skip


class ComputeUnit(Spec):
    """One kind of arithmetic unit, all copies together."""

    peak_flops: dict[str, FlopRate]
    """Dense FLOP/s of all copies together, by dtype."""
    serves: tuple[Kind, ...] = ("any",)
    """Kinds of op it can run: any, matrix (conv, linear, matmul, attention, recurrent), vector (all others) or single kinds."""
    tiles: tuple[tuple[Annotated[int, Field(gt=0)], Annotated[int, Field(gt=0)]], ...] = ()
    """Output tiles (rows, columns) a copy works on; the best-fitting one is taken. Empty: no padding is modelled."""
    copies: int = Field(default=1, gt=0, le=1_000_000)
    """How many copies share the tiles; a last, part-full wave leaves some idle."""
    sparse_speedup: float = Field(default=1.0, ge=1.0, le=4.0)
    """Gain of 2:4 structured sparsity."""

    @field_validator("peak_flops", mode="before")
    @classmethod
    def _known_dtypes(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not given:
            raise ValueError("give at least one dtype, e.g. {float32 = 2e12}")
        for name in given:
            if name not in BITS:
                raise ValueError(f"{name!r} is not a dtype; known: {', '.join(STAND_INS)}")
        return given

    def serves_kind(self, kind: str) -> bool:
        group = "matrix" if kind in MATRIX_KINDS else "vector"
        return any(s in ("any", group, kind) for s in self.serves)


class Memory(Spec):
    """One level of memory."""

    bandwidth_bps: Bandwidth
    """Bytes a second it delivers, reads and writes together."""
    capacity_bytes: Capacity
    """All instances together."""
    copies: int = Field(default=1, gt=0, le=1_000_000)
    """How many private instances share the capacity (one L1 a core); a tile must fit into one of them."""
    retains: bool = False
    """Whether what one op leaves here is still here for a later op, as long as it fits. False: every op starts cold."""
    energy_j_per_byte: JoulesPerByte | None = None
    """Energy of moving one byte."""


class Link(Spec):
    """A connection to the host or to a peer device."""

    latency_s: Seconds
    """Fixed cost of one message."""
    bandwidth_bps: Bandwidth
    """Bytes a second in one direction."""


class Dispatch(Spec):
    """What it costs to hand an op to the machine."""

    per_op_s: Seconds
    """Host time of one op launched from Python."""
    per_view_s: Seconds = Constant(value=0.0, unit="s", source="views launch nothing", status="assumed")
    """Host time of one view (no data moved)."""
    asynchronous: bool = False
    """Whether the host runs ahead, so that launches hide behind work."""
    in_graph_s: Seconds | None = None
    """The same inside a captured graph."""


class Power(Spec):
    """Power limit and energy."""

    limit_w: Watts
    """Board or package limit."""
    idle_w: Watts = Constant(value=0.0, unit="W", source="not stated", status="assumed")
    """Drawn when nothing runs."""
    energy_j_per_flop: dict[str, JoulesPerFlop] = Field(default_factory=dict)
    """By dtype."""

    @model_validator(mode="after")
    def _idle_below_limit(self) -> Power:
        if self.limit_w.value <= self.idle_w.value:
            raise ValueError("limit_w must be above idle_w")
        return self


class Probe(Spec):
    """One op timed on the machine."""

    family: str
    """Which ops it speaks for."""
    dtype: str
    """Type it computed in."""
    flops: int = Field(ge=0)
    """FLOPs of the op."""
    read_bytes: tuple[Annotated[int, Field(ge=0)], ...]
    """Bytes of each operand read."""
    write_bytes: int = Field(ge=0)
    """Bytes written."""
    matmul: tuple[int, int, int, int] | None = None
    """(batches, M, N, K) of matmul- and conv-like ops."""
    taps: int = Field(default=1, ge=1)
    """Kernel positions of a convolution."""
    seconds: float = Field(gt=0)
    """Median time, dispatch cost taken off."""
    host_s: float | None = Field(default=None, ge=0)
    """Host time of handing it over, where the device runs on its own."""


class ProcessorSpec(Spec):
    """A CPU, GPU or NPU seen as roofs."""

    version: Literal[1]
    """Of this file format."""
    kind: Literal["processor"]
    """The kind of target."""
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """As used on the command line."""
    description: str = ""
    """One line for people."""
    units: dict[str, ComputeUnit] = Field(min_length=1)
    """Arithmetic units by name."""
    memories: dict[str, Memory] = Field(min_length=1)
    """Nearest first."""
    overlap: Ratio = Constant(value=1.0, unit="ratio", source="everything hides behind the largest part", status="assumed")
    """How much of the smaller parts hides behind the largest."""
    communication_overlap: Ratio = Constant(value=0.0, unit="ratio", source="communication waits for its op", status="assumed")
    """How much of communication hides behind computing."""
    dispatch: Dispatch | None = None
    """Cost of launching an op; none when absent."""
    fault_s_per_byte: SecondsPerByte | None = None
    """Cost of a byte that the C allocator gave back to the system and faults in again; none when absent."""
    links: dict[Literal["host", "peer"], Link] = Field(default_factory=dict)
    """Connections to host and peers."""
    power: Power | None = None
    """Power and energy, where known."""
    probes: tuple[Probe, ...] = Field(default=(), max_length=5000)
    """Measured single ops."""
    machine: dict[str, str] = Field(default_factory=dict)
    """Where a calibrated target was measured."""

    @model_validator(mode="after")
    def _nearest_first(self) -> ProcessorSpec:
        levels = list(self.memories.items())
        for (inner, near), (outer, far) in pairwise(levels):
            if far.capacity_bytes.value < near.capacity_bytes.value:
                raise ValueError(f"memories.{outer} is smaller than memories.{inner}: list memories nearest first")
        return self

    @property
    def outermost(self) -> str:
        return list(self.memories)[-1]

    def peak(self, kind: str, dtype: str) -> tuple[str, str, float]:
        """(unit, dtype it really computes in, FLOP/s): the best unit for this op; a lacking dtype falls to the next wider."""
        for candidate in (dtype, *STAND_INS.get(dtype, ("float32",))):
            offers = [
                (unit.peak_flops[candidate].value, name)
                for name, unit in self.units.items()
                if unit.serves_kind(kind) and candidate in unit.peak_flops
            ]
            if offers:
                rate, name = max(offers)
                return name, candidate, rate
        anything = [
            (rate.value, name, d) for name, unit in self.units.items() if unit.serves_kind(kind) for d, rate in unit.peak_flops.items()
        ]
        if not anything:
            anything = [(rate.value, name, d) for name, unit in self.units.items() for d, rate in unit.peak_flops.items()]
        rate, name, used = min(anything)
        return name, used, rate
