"""Activations that stay in the shared buffer from one layer to the next: where to cut the chain of layers.

    layer 1 ──T1── layer 2 ──T2── layer 3          Tn: whole output of layer n, input of layer n + 1 alone (links)
    [ layer 1   layer 2 ] [ layer 3 ]              T1 kept: no write to and no read from the outermost memory; T2 not

    kept output   the outermost memory's writes of O and the buffer's reads of O towards it fall away
    kept input    the outermost memory's reads of I and the buffer's writes of I from it fall away
    room          tiles the mapping holds in the buffer, second copies it counted on included; a kept tensor in whole
                  takes the place of its tile (and stands beside it where partial sums are added up in the buffer)

A layer's cost depends on what is kept before and after it, so least energy over all cuts is a shortest path, solved by
dynamic programming over (layer, is its output kept). Cycles follow from `latency` with the traffic that is left.

Not modelled: tiles of the next layer that start before the last layer ended; layers mapped afresh for the room that is left;
fusing over cores, but for layers that are split by images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ....target.array import OPERANDS, Cores, SpatialArraySpec
from ..cost import Access, LayerCost, boundary_points
from ..counts import Blocks, Unrolled
from ..latency import Refill, latency
from ..layer import is_transposed
from ..network import MappedOp, NetworkMapping

Path = tuple[tuple[float, int], tuple[bool, ...], tuple["Spent", ...]]
"""(energy, cycles) so far, which outputs were kept, what each layer took."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What a layer takes, all its calls and cores: cycles, and energy without leakage."""

    cycles: int
    dynamic_pj: float
    saved_bits: int = 0
    """Not moved to or from the outermost memory."""


@dataclass(frozen=True, slots=True)
class Fused:
    """Layers in groups, and what each takes."""

    spent: tuple[Spent, ...]
    kept: tuple[bool, ...]
    """Of each layer, whether its output stays in the buffer."""

    def groups(self, names: Sequence[str]) -> list[list[str]]:
        """Runs of two layers or more that pass activations through the buffer."""
        found: list[list[str]] = []
        for place, name in enumerate(names):
            if place and self.kept[place - 1]:
                found[-1].append(name)
            else:
                found.append([name])
        return [group for group in found if len(group) > 1]


def fuse(network: NetworkMapping, allowed: bool = True) -> Fused:
    """Least energy, leakage of the whole chip included, over all ways to cut; of equals the fewer cycles."""
    layers = [Stage(layer, network.array) for layer in network.layers]
    open_to = links(network) if allowed else [False] * len(layers)
    leak_pj = network.array.static_w / network.array.clock_hz.value * 1e12  # a cycle
    best: dict[bool, Path] = {False: ((0.0, 0), (), ())}  # by whether the last output is kept
    for place, stage in enumerate(layers):
        before = layers[place - 1] if place else None
        reached: dict[bool, Path] = {}
        for kept_in, ((energy, cycles), kept, spent) in best.items():
            for kept_out in (False, True) if open_to[place] else (False,):
                one = stage.spent(before.kept_bits if kept_in and before else 0, stage.kept_bits if kept_out else 0)
                if one is None:
                    continue
                total = (energy + one.dynamic_pj + leak_pj * one.cycles, cycles + one.cycles)
                if kept_out not in reached or total < reached[kept_out][0]:
                    reached[kept_out] = (total, (*kept, kept_out), (*spent, one))
        best = reached
    _, kept, spent = best[False]
    return Fused(spent, kept)


def links(network: NetworkMapping) -> list[bool]:
    """Of each layer, whether its output is the next layer's input and nobody else's, and both could share a buffer."""
    layers, readers = network.layers, _readers(network)
    found = [False] * len(layers)
    if buffer_of(network.array) is None or (network.array.cores.use == "pipeline" and network.array.cores.count > 1):
        return found
    for place in range(len(layers) - 1):
        one, two = layers[place], layers[place + 1]
        alone = sum(other.op is one.op for other in layers) == sum(other.op is two.op for other in layers) == 1
        once = one.op.calls == two.op.calls == 1
        together = one.cores == two.cores and (one.cores == 1 or one.split == two.split == "B")
        read_as = int(any(is_transposed(nest) for nest in two.op.loops))  # which of its operands is I
        found[place] = alone and once and together and readers[place] == [(two.op.name, read_as)]
    return found


def _readers(network: NetworkMapping) -> list[list[tuple[str, int]]]:
    """Of each layer, the (op, place among its inputs) that read its result; ops done as it leaves the array pass it on."""
    mapped = {layer.op.name: place for place, layer in enumerate(network.layers)}
    on_host = {op.op.name for op in network.host}
    found: list[list[tuple[str, int]]] = [[] for _ in network.layers]
    made_by: dict[str, int] = {}
    for op in network.workload.ops:
        if op.kind == "view":  # the same storage under the same name
            continue
        leaving = op.name not in mapped and op.name not in on_host
        source = made_by.get(op.inputs[0].value) if leaving and op.inputs else None
        for place, operand in enumerate(op.inputs):
            if operand.value in made_by and not (source is not None and place == 0):
                found[made_by[operand.value]].append((op.name, place))
        for out in op.outputs:
            made_by.pop(out.value, None)
            if op.name in mapped:
                made_by[out.value] = mapped[op.name]
            elif source is not None:
                made_by[out.value] = source
    return found


def buffer_of(array: SpatialArraySpec) -> str | None:
    """The memory just inside the outermost one, if results and inputs of the whole array share it."""
    results, inputs = array.ladder("O")[:-1], array.ladder("I")[:-1]
    if not results or not inputs or results[-1] != inputs[-1] or set(array.memories[results[-1]].shared_over) != set(array.axes):
        return None
    return results[-1]


class Stage:
    """One mapped layer, and what it takes with its input or output kept in the buffer."""

    def __init__(self, layer: MappedOp, array: SpatialArraySpec) -> None:
        self.layer, self.cost = layer, layer.mapped.cost
        self.array = array.model_copy(update={"cores": Cores()})
        self.buffer, self.outermost = buffer_of(array), list(array.memories)[-1]

    @property
    def kept_bits(self) -> int:
        """Of the whole output, as the next layer reads it, in one core."""
        shape = self.cost.layer
        return shape.elements("O") * max(shape.bits.F, shape.bits.I)

    def spent(self, kept_in_bits: int, kept_out_bits: int) -> Spent | None:
        """None where it does not fit, or where unfinished results would have to leave the buffer."""
        if not kept_in_bits and not kept_out_bits:
            return self._spent((), self.cost.latency.cycles)
        if kept_out_bits and not self._leaves_once():
            return None
        kept = tuple(op for op, bits in (("I", kept_in_bits), ("O", kept_out_bits)) if bits)
        if self._room(kept_in_bits, kept_out_bits) > self.array.memories[str(self.buffer)].capacity_bits.value:
            return None
        gone = tuple(access for access in self.cost.accesses if access.operand in kept and self._between(access))
        return self._spent(gone, self._cycles(kept, gone))

    def _between(self, access: Access) -> bool:
        """Whether the access moves words between the buffer and the outermost memory."""
        return access.memory == self.outermost or (access.memory == self.buffer and access.direction in ("wr_down", "rd_up"))

    def _spent(self, gone: tuple[Access, ...], cycles: int) -> Spent:
        cores, calls = self.layer.cores, self.layer.op.calls
        dynamic = self.cost.energy_pj - self.cost.energy_by_pj["static"] - sum(access.energy_pj for access in gone)
        saved = sum(access.moved_bits for access in gone if access.memory == self.outermost)
        outside = max(c for name, c in _ports(self.cost, gone).items() if name.startswith(f"{self.outermost}."))
        return Spent(max(cycles, cores * outside if cores > 1 else 0) * calls, dynamic * cores * calls, saved * cores * calls)

    def _cycles(self, kept: tuple[str, ...], gone: tuple[Access, ...]) -> int:
        rows = tuple(row for row in self.cost.refills if not (row.memory == self.buffer and row.operand in kept))
        return latency(self._unrolled, self._points, rows, _ports(self.cost, gone)).cycles

    @cached_property
    def _unrolled(self) -> Unrolled:
        return Unrolled(self.cost.layer, self.array, self.cost.plan.spatial)

    @cached_property
    def _points(self) -> dict[str, list[Blocks]]:
        return {op: boundary_points(self._unrolled, self.cost.plan, op) for op in OPERANDS}

    def _leaves_once(self) -> bool:
        """Whether the outermost memory sees finished results only, each once."""
        up, down = (self._elements(self.outermost, way) for way in ("wr_up", "rd_down"))
        return down == 0 and up == self.cost.layer.elements("O")

    def _elements(self, memory: str | None, direction: str) -> int:
        return sum(a.elements for a in self.cost.accesses if (a.memory, a.operand, a.direction) == (memory, "O", direction))

    def _room(self, kept_in_bits: int, kept_out_bits: int) -> int:
        """Bits the buffer must hold while the layer runs."""
        kept = {"I": kept_in_bits, "O": kept_out_bits}
        finished = self._elements(self.buffer, "rd_down") == 0 and self._elements(self.buffer, "wr_up") == self.cost.layer.elements("O")
        room = kept_in_bits + kept_out_bits
        for row in self.cost.refills:
            if row.memory == self.buffer and (not kept.get(row.operand) or (row.operand == "O" and not finished)):
                room += row.tile_bits * self._copies(row)
        return room

    def _copies(self, row: Refill) -> int:
        return 2 if self.array.memories[row.memory].refill == "double" and row.hidden and row.events > 1 else 1


def _ports(cost: LayerCost, gone: Sequence[Access]) -> dict[str, int]:
    left = dict(cost.port_cycles)
    for access in gone:
        left[f"{access.memory}.{access.port}"] -= access.cycles
    return left
