"""A choice made flesh: the base array with the chosen sizes, its areas, leakages and energies following by the rules.

    base SpatialArraySpec, Choice, Rules ──build──> SpatialArraySpec          every changed constant says by which rule it changed

    rows, columns     axes                         precision   MAC; ports of memories that serve part of the array, to the new words
    register, local,  capacity, hence energy,      bandwidth   ports of the outermost memory; its interface's area and leakage
    buffer bits       area and leakage             noc_bits    network, ports of shared memories, a link into every PE

Not modelled: longer wires of a larger array (a hop costs what it costs in the base), routing, a clock that falls with size.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd
from typing import Any

from ....core.spec import parse_spec
from ....target.array import DIRECTIONS, OperandBits, SpatialArraySpec
from .rules import Rules
from .space import Choice, Parts, axis_of, parts_of

Table = dict[str, Any]


def build(base: SpatialArraySpec, choice: Choice, rules: Rules) -> SpatialArraySpec:
    """The chip; raises a TargetSpecError for one that cannot be, such as a register smaller than a word."""
    parts, data = parts_of(base), base.model_dump()
    data["name"], data["description"] = f"{base.name}-codesign"[:80], f"found by co-design from {base.name}"
    for name in ("rows", "columns"):
        if (size := getattr(choice, name)) and (axis := axis_of(base, name)):
            data["axes"][axis] = size
    _resize(data["memories"], base, choice, parts, rules)
    if choice.precision:
        _widen_words(data, base, choice.precision, rules)
    _network(data, base, choice, parts, rules)
    _interface(data["memories"][parts.outermost], base, choice, parts, rules)
    if choice.cores:
        data["cores"] = choice.cores.model_dump()
    return parse_spec(SpatialArraySpec, data, f"a chip of the design space {choice.key}")


def describe(array: SpatialArraySpec) -> Table:
    """The parameters of a built chip, as people compare them."""
    parts = parts_of(array)

    def bits(names: Iterable[str]) -> dict[str, int]:
        return {name: int(array.memories[name].capacity_bits.value) for name in names}

    return {
        "axes": dict(array.axes),
        "register_bits": bits(parts.registers),
        "local_bits": bits(parts.local),
        "buffer_bits": bits(parts.buffers),
        "bandwidth_bits": max(port.bits_per_cycle for port in array.memories[parts.outermost].ports.values()),
        "noc_bits": array.noc.bits_per_cycle,
        "bits": array.bits.model_dump(),
        "cores": array.cores.model_dump(),
    }


def _resize(memories: dict[str, Table], base: SpatialArraySpec, choice: Choice, parts: Parts, rules: Rules) -> None:
    if choice.register_bits:
        for name in parts.registers:
            _set_capacity(memories[name], sum(getattr(choice.register_bits, op) for op in base.memories[name].operands), rules)
    for total, names in ((choice.local_bits, parts.local), (choice.buffer_bits, parts.buffers)):
        if total:
            whole = sum(base.memories[name].capacity_bits.value for name in names)
            for name in names:
                _set_capacity(memories[name], max(1, int(total * base.memories[name].capacity_bits.value / whole)), rules)


def _set_capacity(memory: Table, bits: int, rules: Rules) -> None:
    ratio = bits / memory["capacity_bits"]["value"]
    if ratio == 1:
        return
    why = f"capacity x {ratio:.4g}"
    memory["capacity_bits"] = {"value": bits, "unit": "b", "source": "chosen by co-design", "status": "assumed"}
    for name in ("read_pj", "write_pj"):
        memory[name] = _times(memory[name], rules.memory_energy(ratio), f"{why} ^ {rules.sram_energy_exponent.value:g}")
    memory["area_mm2"] = _times(memory["area_mm2"], rules.memory_area(ratio), f"{why}, {rules.sram_fixed_area.value:g} of it fixed")
    memory["static_w"] = _times(memory["static_w"], ratio, why)


def _times(constant: Table, factor: float, why: str) -> Table:
    if factor == 1:
        return constant
    return {**constant, "value": constant["value"] * factor, "source": f"{constant['source']}; scaled: {why}", "status": "assumed"}


def _plus(constant: Table, more: float, why: str) -> Table:
    if not more:
        return constant
    source = why if not constant["value"] else f"{constant['source']}; with {why}"
    return {**constant, "value": constant["value"] + more, "source": source, "status": "assumed"}


def _widen_words(data: Table, base: SpatialArraySpec, bits: OperandBits, rules: Rules) -> None:
    """New operand widths: arithmetic by rule; near memories, which move single words, get ports of as many new words."""
    data["bits"] = bits.model_dump()
    factor = rules.arithmetic(bits, base.bits)
    for name in ("energy_pj", "area_mm2", "static_w"):
        data["mac"][name] = _times(data["mac"][name], factor, f"{bits.W} x {bits.I} + {bits.O} bits")
    for name, memory in base.memories.items():
        if set(memory.shared_over) == set(base.axes):
            continue  # whole rows of words: packed, whatever their width
        for label, port in memory.ports.items():
            streams = [op for op in memory.operands for way in _ways(op) if memory.port_of(op, way) == label]
            before, after = ([getattr(widths, op) for op in streams] for widths in (base.bits, bits))
            if before == after:
                continue
            granule = gcd(*after)
            width = -(-port.bits_per_cycle * sum(after) // (sum(before) * granule)) * granule
            data["memories"][name]["ports"][label] |= {"bits_per_cycle": width, "word_bits": granule}


def _ways(operand: str) -> tuple[str, ...]:
    """Directions in which an operand moves: weights and inputs never go up."""
    return DIRECTIONS if operand == "O" else ("rd_down", "wr_down")


def _network(data: Table, base: SpatialArraySpec, choice: Choice, parts: Parts, rules: Rules) -> None:
    width = choice.noc_bits or base.noc.bits_per_cycle
    if not width:
        return
    data["noc"]["bits_per_cycle"] = width
    if base.noc.bits_per_cycle and width != base.noc.bits_per_cycle:
        for name in parts.buffers:
            _scale_ports(data["memories"][name], width / base.noc.bits_per_cycle)
    area = rules.link_mm2_per_bit.value * width
    data["mac"]["area_mm2"] = _plus(data["mac"]["area_mm2"], area, f"a link of {width} bits: {rules.link_mm2_per_bit.source}")


def _scale_ports(memory: Table, ratio: float) -> None:
    for port in memory["ports"].values():
        width = max(1, round(port["bits_per_cycle"] * ratio))
        port["word_bits"] = gcd(width, port["word_bits"] or port["bits_per_cycle"])
        port["bits_per_cycle"] = width


def _interface(memory: Table, base: SpatialArraySpec, choice: Choice, parts: Parts, rules: Rules) -> None:
    """The outermost memory's ports, and the area and leakage of the interface to it."""
    widths = [port.bits_per_cycle for port in base.memories[parts.outermost].ports.values()]
    ratio = choice.bandwidth_bits / max(widths) if choice.bandwidth_bits else 1.0
    if ratio != 1:
        _scale_ports(memory, ratio)
    gbps = sum(port["bits_per_cycle"] for port in memory["ports"].values()) * base.clock_hz.value / 1e9
    for name, rule in (("area_mm2", rules.interface_mm2_per_gbps), ("static_w", rules.interface_w_per_gbps)):
        stated = memory[name]["value"]
        memory[name] = (
            _times(memory[name], ratio, f"bandwidth x {ratio:.4g}")
            if stated
            else _plus(memory[name], rule.value * gbps, f"an interface of {gbps:g} Gb/s: {rule.source}")
        )
