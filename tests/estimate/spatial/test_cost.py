"""Energy of a mapping from its counts, what does not fit, and what holds for the cost of every mapping."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import OptionError
from ridgeline.estimate.spatial.cost import InfeasibleMappingError, LayerCost, evaluate
from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.mapping import MappingPlan, mapping_from_json
from ridgeline.target.array import OPERANDS, OperandBits, SpatialArraySpec
from tests.estimate.spatial.cases import Case, cases, memory, random_case, small_array
from tests.estimate.spatial.npu_support import changed, with_capacity, with_memory
from tests.support import full_or_tenth

# 4 weights in a register, 6 inputs from the top: P6 inside K4, so a weight serves 6 cycles.
LAYER = Layer("l", {"K": 4, "P": 6}, bits=OperandBits(W=8, I=8, O=16, F=8))
PLAN = MappingPlan({}, (("P", 6), ("K", 4)), {"W": (2,), "I": (), "O": ()})


def priced(**more: Any) -> SpatialArraySpec:
    """Register: 0.5 pJ to read 16 bits, 2 to write them. Top: 10 to read 32 bits, 20 to write them."""
    reg = memory("W", read_pj=0.5, write_pj=2.0, access_bits=16, capacity_bits=32)
    top = memory("WIO", "x", granule=32, read_pj=10.0, write_pj=20.0, access_bits=32)
    return small_array({"x": 1}, {"reg": reg, "top": top}, mac={"energy_pj": 3.0}, **more)


def test_energy_is_words_times_their_width() -> None:
    found = evaluate(LAYER, priced(), PLAN)
    # reg: 4 weights of one 8-bit word written (1 pJ each), 4 read (0.25 pJ each).
    assert found.energy_by_pj["reg"] == pytest.approx(4 * 1.0 + 4 * 0.25)
    # top: one read of 4 weights (32 bits, one word), 24 reads of an input (a word each), 24 writes of a sum (a word each).
    assert [found.words("top", op, way) for op, way in (("W", "rd_down"), ("I", "rd_down"), ("O", "wr_up"))] == [1, 24, 24]
    assert found.energy_by_pj["top"] == pytest.approx(25 * 10 + 24 * 20)
    assert found.energy_by_pj["mac"] == 24 * 3.0
    assert found.energy_pj == pytest.approx(sum(found.energy_by_pj.values())) == pytest.approx(5 + 730 + 72)


def test_network_energy_is_bits_times_places() -> None:
    array = small_array({"x": 3}, {"top": memory("WIO", "x")}, noc={"hop_pj": 0.5, "hop_bits": 4})
    found = evaluate(Layer("l", {"K": 3, "P": 2}), array, MappingPlan({"x": (("K", 3),)}, (("P", 2),), dict.fromkeys(OPERANDS, ())))
    # 3 weights once; 2 inputs to 3 places; 6 sums of 16 bits up: 24 + 48 + 96 bits, 0.125 pJ each
    assert found.energy_by_pj["noc"] == pytest.approx((24 + 48 + 96) / 4 * 0.5)


def test_leakage_is_paid_for_the_cycles_it_takes() -> None:
    array = priced()
    leaking = with_memory(changed(array, mac={"energy_pj": 3.0, "static_w": 2e-3}), "top", static_w=1e-3)
    found, without = evaluate(LAYER, leaking, PLAN), evaluate(LAYER, array, PLAN)
    assert without.energy_by_pj["static"] == 0
    assert found.energy_by_pj["static"] == pytest.approx(3e-3 * found.cycles / 1e9 * 1e12)
    assert found.energy_pj - without.energy_pj == pytest.approx(found.energy_by_pj["static"])


def test_objectives() -> None:
    found = evaluate(LAYER, priced(), PLAN)
    assert found.objective("energy") == found.energy_pj
    assert found.objective("latency") == found.cycles
    assert found.objective("edp") == found.edp == found.energy_pj * found.cycles


def test_what_does_not_fit_names_the_memory_and_the_bytes() -> None:
    with pytest.raises(InfeasibleMappingError) as caught:
        evaluate(LAYER, with_capacity(priced(), "reg", 24), PLAN)
    assert "layer l needs 1 B more than memory reg of small has" in str(caught.value)
    assert "W 4 B" in str(caught.value) and "capacity is 3 B" in str(caught.value)
    assert isinstance(caught.value, OptionError)


def test_operands_share_the_room() -> None:
    array = small_array({"x": 1}, {"buf": memory("WI", capacity_bits=80), "top": memory("WIO", "x")})
    plan = MappingPlan({}, PLAN.loops, {"W": (2,), "I": (2,), "O": ()})
    assert evaluate(LAYER, array, plan).words("buf", "W", "wr_down") == 4  # 32 + 48 bits
    with pytest.raises(InfeasibleMappingError, match="1 B more than memory buf"):
        evaluate(LAYER, with_capacity(array, "buf", 79), plan)


def test_outermost_memory_holds_everything() -> None:
    array = with_capacity(priced(), "top", 8 * (4 + 6 + 2 * 24))
    assert evaluate(LAYER, array, PLAN).cycles
    with pytest.raises(InfeasibleMappingError, match="memory top"):
        evaluate(LAYER, with_capacity(array, "top", 8 * (4 + 6 + 2 * 24) - 1), PLAN)


def test_finished_outputs_take_less_room() -> None:
    # The register covers C, so only finished outputs (8 bits) reach the buffer: 6 bytes for P6, not 12.
    layer = Layer("l", {"C": 3, "P": 6})
    memories = {"acc": memory("O"), "buf": memory("O", "x", capacity_bits=48), "top": memory("WIO", "x")}
    array, cuts = small_array({"x": 1}, memories), {"W": (), "I": (), "O": (1, 2)}
    assert evaluate(layer, array, MappingPlan({}, (("C", 3), ("P", 6)), cuts)).cycles
    with pytest.raises(InfeasibleMappingError, match="6 B more than memory buf"):
        evaluate(layer, array, MappingPlan({}, (("P", 6), ("C", 3)), {"W": (), "I": (), "O": (0, 2)}))


def test_malformed_mapping_is_refused_before_anything_is_counted() -> None:
    with pytest.raises(OptionError, match="loops over K reach 2"):
        evaluate(LAYER, priced(), MappingPlan({}, (("P", 6), ("K", 2)), PLAN.cuts))


def test_cost_in_json() -> None:
    found = evaluate(LAYER, priced(), PLAN)
    data = json.loads(json.dumps(found.to_json()))
    fields = {"layer", "energy_pj", "energy_by_pj", "cycles", "cycles_by", "port_cycles", "seconds", "utilisation", "spatial_utilisation",
              "bottleneck", "mapping", "accesses", "tiles"}  # fmt: skip
    assert set(data) >= fields
    assert data["energy_pj"] == pytest.approx(sum(data["energy_by_pj"].values()))
    assert data["cycles"] == data["cycles_by"]["cycles"] == found.cycles
    assert mapping_from_json(data["mapping"]).loops == PLAN.loops
    row = next(a for a in data["accesses"] if (a["memory"], a["operand"], a["direction"]) == ("top", "I", "rd_down"))
    assert row == {
        "memory": "top",
        "operand": "I",
        "direction": "rd_down",
        "words": 24,
        "word_bits": 32,
        "elements": 24,
        "energy_pj": 240.0,
    }
    tile = next(t for t in data["tiles"] if (t["memory"], t["operand"]) == ("reg", "W"))
    assert (tile["tile_bits"], tile["events"], tile["hidden"]) == (32, 1, True)


def test_accesses_are_listed_nearest_first() -> None:
    found = evaluate(LAYER, priced(), PLAN)
    assert [(a.memory, a.operand) for a in found.accesses] == sorted(
        ((a.memory, a.operand) for a in found.accesses), key=lambda at: (["reg", "top"].index(at[0]), "WIO".index(at[1]))
    )


def least_energy_pj(layer: Layer, array: SpatialArraySpec) -> float:
    """Multiplying, reading every weight and input from the outermost memory, and writing every output to it, once."""
    outermost = list(array.memories.values())[-1]
    read = sum(layer.elements(op) * getattr(layer.bits, op) for op in "WI") * outermost.energy_per_bit_pj("rd_down")
    written = layer.elements("O") * min(layer.bits.F, layer.bits.O) * outermost.energy_per_bit_pj("wr_up")
    return layer.macs * array.mac.energy_pj.value + read + written


def check_energy(found: LayerCost, array: SpatialArraySpec) -> None:
    assert all(part >= 0 for part in found.energy_by_pj.values())
    assert all(min(a.words, a.elements, a.transfers, a.cycles, a.energy_pj) >= 0 for a in found.accesses)
    assert all(a.transfers <= a.elements and a.transfers <= a.words for a in found.accesses)
    assert found.energy_pj >= least_energy_pj(found.layer, array) * (1 - 1e-12)
    of_memories = {name: sum(a.energy_pj for a in found.accesses if a.memory == name) for name in array.memories}
    assert {name: found.energy_by_pj[name] for name in of_memories} == pytest.approx(of_memories)


@pytest.mark.parametrize("first", range(0, 2000, 1000))
def test_no_mapping_costs_less_than_it_must(first: int) -> None:
    for seed in range(first, first + full_or_tenth(1000)):
        case = random_case(Random(seed))
        found = evaluate(*case)
        check_energy(found, case.array)
        assert evaluate(*case) == found


@given(cases(most_macs=150))
def test_no_generated_mapping_costs_less_than_it_must(case: Case) -> None:
    check_energy(evaluate(*case), case.array)


@given(cases(most_macs=150), st.data())
def test_more_room_changes_nothing_but_waiting(case: Case, data: st.DataObject) -> None:
    layer, array, plan = case
    name = data.draw(st.sampled_from(list(array.memories)))
    held = sum(tile.tile_bits for tile in evaluate(*case).refills if tile.memory == name)
    tight = with_capacity(array, name, max(held, 32)) if name != "outermost" else array
    before, after = evaluate(layer, tight, plan), evaluate(*case)
    assert after.accesses == before.accesses
    assert after.cycles <= before.cycles
