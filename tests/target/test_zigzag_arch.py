"""Architectures of ZigZag as targets: equal to the catalog's copies and to the file they came from, and clear when malformed."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from ridgeline.core.errors import TargetSpecError
from ridgeline.target.array import OperandBits
from ridgeline.target.load import load_array
from ridgeline.target.zigzag import array_from_zigzag
from tests.support import ROOT

REFERENCE = json.loads((ROOT / "tests" / "estimate" / "npu_cases" / "arch_zigzag.json").read_text(encoding="utf-8"))["archs"]
CATALOG = {"tpu_like": "tpu-like", "eyeriss_like": "eyeriss-like"}
WIDTHS = {"tpu_like": {"W": 8, "I": 8, "O": 16, "F": 8}, "eyeriss_like": {"W": 8, "I": 8, "O": 24, "F": 8}}
OURS = {"I1": "I", "I2": "W", "O": "O"}
WAYS = {"tl": "rd_down", "fl": "wr_up", "fh": "wr_down", "th": "rd_up"}


def figures(data: Any) -> Any:
    """A spec without what is only said about its numbers."""
    if isinstance(data, dict):
        if set(data) == {"value", "unit", "source", "status"}:
            return data["value"], data["unit"]
        return {key: figures(value) for key, value in data.items() if key not in ("name", "description", "clock_hz")}
    return data


@pytest.mark.parametrize("key", CATALOG)
def test_zigzag_arrays_are_those_of_the_catalog(key: str) -> None:
    converted, kept = array_from_zigzag(key, REFERENCE[key]).model_dump(), load_array(CATALOG[key]).model_dump()
    ours, theirs = figures(converted), figures(kept)
    assert list(converted["memories"]) == list(kept["memories"])  # the ladders' order
    for field in ours.keys() | theirs.keys():
        assert ours.get(field) == theirs.get(field), field
    assert kept["clock_hz"]["value"] == {"tpu_like": 1e9, "eyeriss_like": 200e6}[key] and kept["clock_hz"]["status"] == "assumed"


@pytest.mark.parametrize("key", CATALOG)
def test_zigzag_figures_are_those_of_the_file(key: str) -> None:
    spec, data = array_from_zigzag(key, REFERENCE[key]), REFERENCE[key]
    grid = data["operational_array"]
    assert spec.axes == dict(zip(grid["dimensions"], grid["sizes"], strict=True)) and spec.bits.model_dump() == WIDTHS[key]
    assert (spec.mac.energy_pj.value, spec.mac.area_mm2.value) == (grid["unit_energy"], grid["unit_area"])
    assert list(spec.memories) == list(data["memories"])
    streams = 0
    for name, given in data["memories"].items():
        memory = spec.memories[name]
        assert (memory.capacity_bits.value, memory.area_mm2.value, memory.latency_cycles) == (
            given["size"],
            given["area"],
            given["latency"],
        )
        assert list(memory.operands) == [OURS[operand] for operand in given["operands"]]
        assert list(memory.shared_over) == given["served_dimensions"]
        for port in given["ports"]:
            found = memory.ports[port["name"]]
            assert (found.word_bits, found.bits_per_cycle, found.direction) == (port["bandwidth_min"], port["bandwidth_max"], port["type"])
            assert memory.read_pj.value / memory.access_bits == given["r_cost"] / port["bandwidth_max"]
            assert memory.write_pj.value / memory.access_bits == given["w_cost"] / port["bandwidth_max"]
            for allocated in port["allocation"]:
                operand, way = allocated.split(", ")
                assert memory.port_of(OURS[operand], WAYS[way]) == port["name"]
                streams += 1
    assert streams == {"tpu_like": 20, "eyeriss_like": 28}[key]


def test_links_widths_and_clock_can_be_given() -> None:
    data = copy.deepcopy(REFERENCE["tpu_like"])
    spec = array_from_zigzag("mine", data, links={"W": "I1", "I": "I2", "O": "O"}, bits=OperandBits(W=4, I=6, O=12, F=6), clock_hz=5e8)
    assert spec.ladder("I") == ["rf_128B", "dram"] and spec.ladder("W") == ["sram_2MB", "dram"]
    assert (spec.name, spec.bits.model_dump(), spec.clock_hz.value) == ("mine", {"W": 4, "I": 6, "O": 12, "F": 6}, 5e8)
    assert spec.memories["rf_2B"].refill == "stream" and spec.memories["rf_128B"].refill == "double"


def test_a_cost_is_of_the_width_of_its_own_ports() -> None:
    data = copy.deepcopy(REFERENCE["tpu_like"])
    data["memories"]["sram_2MB"]["ports"][1] |= {"bandwidth_max": 512}  # writes are narrower than reads
    memory = array_from_zigzag("mine", data).memories["sram_2MB"]
    assert memory.energy_per_bit_pj("rd_down") == 416.16 / 2048
    assert memory.energy_per_bit_pj("wr_up") == pytest.approx(378.4 / 512, rel=1e-12)


Path_ = tuple[str | int, ...]
SRAM: Path_ = ("memories", "sram_2MB")
PORT: Path_ = (*SRAM, "ports", 0)
GRID: Path_ = ("operational_array",)
OF_A_MEMORY = ("size", "r_cost", "w_cost", "operands", "ports", "served_dimensions")
OF_A_PORT = ("name", "type", "bandwidth_min", "bandwidth_max", "allocation")


def malformed(path: Path_, value: Any) -> dict[str, Any]:
    """tpu_like with one place changed; None drops it."""
    data: dict[str, Any] = copy.deepcopy(REFERENCE["tpu_like"])
    table: Any = data
    for part in path[:-1]:
        table = table[part]
    if value is None:
        del table[path[-1]]
    else:
        table[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("memories",), None, "memories"),
        (("memories",), {}, "memories"),
        (("memories",), [1], "memories"),
        (("operational_array",), None, "operational_array"),
        (("operational_aray",), {}, "operational_aray"),
        *(((*SRAM, field), None, f"memories.sram_2MB.{field}") for field in OF_A_MEMORY),
        *(((*SRAM, "size"), wrong, "memories.sram_2MB.size") for wrong in (0, -5, 1.5, "big", float("nan"), 10**30, True, 7)),
        *(((*SRAM, "r_cost"), wrong, "memories.sram_2MB.r_cost") for wrong in (-1, float("inf"), float("nan"), "dear", 1e300)),
        ((*SRAM, "area"), -1, "memories.sram_2MB.area"),
        ((*SRAM, "latency"), -1, "memories.sram_2MB.latency"),
        ((*SRAM, "operands"), ["I1", "I3"], "memories.sram_2MB.operands"),
        ((*SRAM, "operands"), ["I1", "I1"], "memories.sram_2MB.operands"),
        ((*SRAM, "served_dimensions"), ["D1", "D9"], "memories.sram_2MB.served_dimensions"),
        ((*SRAM, "ports"), [], "memories.sram_2MB.ports"),
        ((*SRAM, "double_buffering_support"), "yes", "memories.sram_2MB.double_buffering_support"),
        ((*SRAM, "sise"), 5, "memories.sram_2MB.sise"),
        *(((*PORT, field), None, f"memories.sram_2MB.ports.0.{field}") for field in OF_A_PORT),
        ((*PORT, "type"), "sideways", "memories.sram_2MB.ports.0.type"),
        ((*PORT, "bandwidth_max"), 0, "memories.sram_2MB.ports.0.bandwidth_max"),
        ((*PORT, "bandwidth_min"), 2**30, "memories.sram_2MB.ports.0.bandwidth_min"),
        ((*PORT, "bandwidth_min"), 60, "memories.sram_2MB.ports.r_port_1.bandwidth_min"),
        *(((*PORT, "allocation"), [wrong], "memories.sram_2MB.ports.0.allocation") for wrong in ("I1", "I1 tl", "I1, up", "I7, tl")),
        ((*PORT, "allocation"), ["I2, tl"], "memories.sram_2MB.ports.r_port_1.allocation"),
        ((*PORT, "allocation"), ["I1, fh"], "memories.sram_2MB.ports.r_port_1.allocation"),
        ((*PORT, "allocation"), ["I1, tl"], "memories.sram_2MB.ports"),
        ((*SRAM, "ports", 1, "name"), "r_port_1", "memories.sram_2MB.ports.1.name"),
        ((*SRAM, "ports", 1, "type"), "read", "memories.sram_2MB.ports.w_port_1.allocation"),
        (("memories", "rf_2B", "ports", 1, "bandwidth_max"), 32, "memories.rf_2B.ports"),
        (("memories", "dram", "operands"), ["I1", "O"], "memories.dram.operands"),
        (("memories", "dram", "served_dimensions"), ["D1"], "memories.dram.served_dimensions"),
        ((*GRID, "sizes"), [32], "operational_array.sizes"),
        ((*GRID, "sizes"), [32, 0], "operational_array.sizes.1"),
        ((*GRID, "sizes"), [32, "many"], "operational_array.sizes.1"),
        ((*GRID, "dimensions"), ["D1", "D1"], "operational_array.dimensions"),
        ((*GRID, "unit_energy"), None, "operational_array.unit_energy"),
        ((*GRID, "unit_energy"), -1, "operational_array.unit_energy"),
        ((*GRID, "unit_area"), float("nan"), "operational_array.unit_area"),
    ],
)  # fmt: skip
def test_a_malformed_architecture_names_its_field(path: Path_, value: Any, field: str) -> None:
    with pytest.raises(TargetSpecError) as caught:
        array_from_zigzag("mine", malformed(path, value))
    words = f"{caught.value.what} {caught.value.why}".replace(":", " ").split()
    assert field in words and "mine" in caught.value.what and "ZigZag" in caught.value.do


@pytest.mark.parametrize("nothing", [None, 5, [], "tpu_like", {}, {1: 2}])
def test_what_is_no_architecture_at_all(nothing: Any) -> None:
    with pytest.raises(TargetSpecError):
        array_from_zigzag("mine", nothing)
