"""Mistakes that estimates of accelerators are known for, each with the number it would get wrong.

an input read less than once     ResNet-50's first layer has 150,528 inputs; a row-stationary count once said 192
compulsory traffic left out      231 million multiplications and 675,840 words cannot cost less than 231 uJ where a word from
                                 DRAM costs 200 pJ, from the buffer 5, from a register file 0.1, four of them a multiplication
"""

from __future__ import annotations

import pytest

from ridgeline.estimate.spatial.cost import LayerCost
from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.mapper import map_layer
from ridgeline.target.array import DATAFLOWS, OPERANDS, OperandBits, SpatialArraySpec
from ridgeline.target.load import load_target
from tests.estimate.spatial.cases import memory, small_array
from tests.support import FULL

BITS = OperandBits(W=16, I=16, O=16, F=16)
FIRST = Layer("conv1", {"K": 64, "C": 3, "P": 112, "Q": 112, "R": 7, "S": 7}, (2, 2), padding=(3, 3), input_size=(224, 224), bits=BITS)
MIDDLE = Layer("conv", {"K": 128, "C": 64, "P": 56, "Q": 56, "R": 3, "S": 3}, padding=(1, 1), bits=BITS)
ALL_ROOM = 1e9


def sixteen_square(register_pj: float, mac_pj: float, buffer_bits: float) -> SpatialArraySpec:
    """16 x 16 PEs with 512 B each, a buffer at 5 pJ a word, DRAM at 200; every word has 16 bits."""

    def store(over: str, bits: float, price: float) -> dict[str, object]:
        port = {"all": {"direction": "read_write", "bits_per_cycle": 64, "word_bits": 16}}
        return memory("WIO", over, ports=port, capacity_bits=bits, access_bits=16, read_pj=price, write_pj=price)

    memories = {"rf": store("", 4096, register_pj), "buffer": store("xy", buffer_bits, 5.0), "dram": store("xy", 1e12, 200.0)}
    return small_array({"x": 16, "y": 16}, memories, BITS, mac={"energy_pj": mac_pj})


def from_dram(cost: LayerCost, operand: str) -> int:
    return next(a.elements for a in cost.accesses if (a.memory, a.operand, a.direction) == ("dram", operand, "rd_down"))


def check_compulsory(cost: LayerCost) -> None:
    """Every weight and input is read, every output written, at least once."""
    layer = cost.layer
    assert all(from_dram(cost, operand) >= layer.elements(operand) for operand in "WI")
    assert next(a.elements for a in cost.accesses if (a.memory, a.operand, a.direction) == ("dram", "O", "wr_up")) >= layer.elements("O")


def test_first_layer_touches_every_input() -> None:
    assert FIRST.elements("I") == 3 * 224 * 224 == 150_528


@pytest.mark.parametrize("objective", ["energy", "edp"])
def test_row_stationary_reads_every_input_at_least_once(objective: str) -> None:
    array = load_target("eyeriss")
    assert isinstance(array, SpatialArraySpec)
    cost = map_layer(FIRST, array, "rs", objective).cost
    assert from_dram(cost, "I") >= 150_528
    assert cost.words("dram", "I", "rd_down") >= 150_528  # words of 16 bits
    check_compulsory(cost)


@pytest.mark.parametrize("dataflow", ["any", *DATAFLOWS])
def test_compulsory_traffic_is_paid_for(dataflow: str) -> None:
    assert MIDDLE.macs == 231_211_008
    assert [MIDDLE.elements(op) for op in OPERANDS] == [73_728, 200_704, 401_408]
    # Four accesses of 0.1 pJ a multiplication, stated as its cost: 92.5 uJ. DRAM 675,840 words * 200 pJ = 135.2 uJ, and each of these
    # words passes the buffer, 3.4 uJ if it did so once. The buffer here holds everything, so that no word comes twice.
    cost = map_layer(MIDDLE, sixteen_square(0.0, 0.4, ALL_ROOM), dataflow, "energy").cost
    check_compulsory(cost)
    assert cost.energy_by_pj["mac"] == pytest.approx(92.48e6, rel=1e-3)
    assert cost.energy_by_pj["dram"] >= 135.1e6
    assert cost.energy_by_pj["buffer"] >= 2 * 675_840 * 5  # written and read
    assert cost.energy_pj >= 231e6


@pytest.mark.parametrize("dataflow", ["any", *DATAFLOWS] if FULL else DATAFLOWS)
def test_compulsory_traffic_is_paid_for_in_a_buffer_of_108_kB(dataflow: str) -> None:
    # Register accesses as they are counted: fewer than four a multiplication, for a PE keeps an operand that does not change, and the
    # first product of a sum reads none; a buffer of this size, though, reads some of DRAM twice.
    cost = map_layer(MIDDLE, sixteen_square(0.1, 0.0, 108 * 8192), dataflow, "energy").cost
    check_compulsory(cost)
    accesses = sum(a.words for a in cost.accesses if a.memory == "rf")
    assert 3 <= accesses / MIDDLE.macs <= 4.5
    assert cost.energy_by_pj["rf"] == pytest.approx(accesses * 0.1)
    assert cost.energy_by_pj["dram"] >= 135.1e6
    assert cost.energy_pj >= 231e6


def test_sums_are_read_as_often_as_they_are_added_to() -> None:
    # An accumulation is a read and a write, but for the first product of each sum.
    cost = map_layer(MIDDLE, sixteen_square(0.1, 0.0, ALL_ROOM), "os", "energy").cost
    assert cost.words("rf", "O", "wr_up") == MIDDLE.macs
    assert cost.words("rf", "O", "rd_down") == MIDDLE.macs - MIDDLE.elements("O")
