"""Cycles worked out by hand, one cause at a time, and what holds for every mapping.

Operands are 8 bits wide, sums 16. A memory has a port for each stream, wide enough for anything unless a test says how many bits.
Loops are written innermost first.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.estimate.spatial.cost import LayerCost, evaluate
from ridgeline.estimate.spatial.latency import Refill
from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.mapping import Loop, MappingPlan
from ridgeline.target.array import DIRECTIONS, READS, SpatialArraySpec
from tests.estimate.spatial.cases import Case, cases, memory, random_case, small_array
from tests.estimate.spatial.npu_support import changed, with_bandwidth, with_memory
from tests.support import full_or_tenth

WIDE = 1 << 20


def store(operands: str, shared_over: Any = (), bits: dict[str, int] | None = None, **more: Any) -> dict[str, Any]:
    """A memory whose streams have ports of their own, named after them."""
    ports = {}
    for operand in operands:
        for direction in DIRECTIONS:
            stream = f"{operand} {direction}"
            width = (bits or {}).get(stream, WIDE)
            way = "read" if direction in READS else "write"
            ports[stream] = {"direction": way, "bits_per_cycle": width, "word_bits": min(8, width), "carries": (stream,)}
    return memory(operands, shared_over, ports=ports, **more)


def top(axes: Any = "x", **more: Any) -> dict[str, Any]:
    """The outermost memory; `bits` by stream where they limit."""
    return {"top": store("WIO", axes, **more)}


def one_port(bits: int, *streams: str) -> dict[str, Any]:
    """The outermost memory with one narrow port for some streams."""
    ports = {f"{op} {way}": port(WIDE, f"{op} {way}") for op in "WIO" for way in DIRECTIONS if f"{op} {way}" not in streams}
    return {"top": memory("WIO", "x", ports=ports | {"narrow": port(bits, *streams)})}


def port(bits: int, *carries: str) -> dict[str, Any]:
    return {"direction": "read_write", "bits_per_cycle": bits, "word_bits": 8, "carries": carries}


def timed(dims: dict[str, int], memories: dict[str, Any], loops: tuple[Loop, ...], axes: Any = None, **more: Any) -> LayerCost:
    """A layer on an array with a wide outermost memory unless given; cuts by operand, lanes as `spatial`."""
    axes = axes or {"x": 1}
    outermost = {} if "top" in memories else top(axes)
    array = small_array(axes, memories | outermost, **{key: more.pop(key) for key in ("systolic", "noc") if key in more})
    cuts = {operand: more.get(operand, ()) for operand in "WIO"}
    return evaluate(Layer("l", dims), array, MappingPlan(more.get("spatial", {}), loops, cuts))


def row(found: LayerCost, name: str, operand: str) -> Refill:
    return next(r for r in found.refills if (r.memory, r.operand) == (name, operand))


# P8 inside K4: a weight serves 8 cycles, four weights come through an 8-bit port of the top: one cycle each.
WEIGHTS = ({"K": 4, "P": 8}, (("P", 8), ("K", 4)))
NARROW_TOP = top(bits={"W rd_down": 8})


def weights(**more: Any) -> LayerCost:
    dims, loops = WEIGHTS
    return timed(dims, {"reg": store("W", **more)} | NARROW_TOP, loops, W=(1,))


def test_single_memory_waits_for_every_refill() -> None:
    time = weights(refill="single").latency
    # fill 1, then 32 cycles of computing broken by 3 refills; nothing of O waits on chip
    assert (time.compute, time.fill, time.exposed, time.drain, time.cycles) == (32, 1, 3, 0, 1 + 32 + 3)
    assert time.on_chip == 32  # waiting for the outermost memory is no work of the array
    assert time.passes == 4


@pytest.mark.parametrize(("room", "exposed"), [(16, 0), (15, 3), (8, 3)])
def test_double_memory_hides_a_refill_if_a_second_copy_fits(room: int, exposed: int) -> None:
    found = weights(refill="double", capacity_bits=room)
    assert (found.latency.exposed, found.latency.cycles) == (exposed, 1 + 32 + exposed)
    assert row(found, "reg", "W").hidden == (exposed == 0)


def test_tile_that_is_never_replaced_needs_no_second_copy() -> None:
    dims, loops = WEIGHTS
    found = timed(dims, {"reg": store("W", refill="single", capacity_bits=32)} | NARROW_TOP, loops, W=(2,))
    assert row(found, "reg", "W").events == 1
    assert (found.latency.exposed, found.latency.fill, found.latency.cycles) == (0, 4, 4 + 32)


def test_second_copies_of_all_operands_must_fit() -> None:
    # The register holds a weight (replaced 4 times) and the 8 inputs (never): 2 * 8 + 64 bits.
    dims, loops = WEIGHTS
    for room, hidden in ((80, True), (79, False)):
        found = timed(dims, {"reg": store("WI", capacity_bits=room)}, loops, W=(1,), I=(1,))
        assert row(found, "reg", "W").hidden is hidden
        assert row(found, "reg", "I").hidden is True


def test_streaming_memory_hides_refills_in_one_copy() -> None:
    time = weights(refill="stream", capacity_bits=8).latency
    assert (time.exposed, time.passes, time.cycles) == (0, 1, 33)


def test_break_of_a_run_also_refills_what_streams() -> None:
    # The weight register breaks the run 4 times; each time the streaming input register starts again: 3 more waits of 1 cycle, beside
    # those of the weights on another port.
    dims, loops = WEIGHTS
    reg = {"reg": store("W", refill="single"), "line": store("I", refill="stream")}
    time = timed(dims, reg | top(bits={"W rd_down": 8, "I rd_down": 16}), loops, W=(1,), I=(0,)).latency
    assert (time.passes, time.exposed) == (4, 3)
    # straight from the top a streaming register goes on, whatever else waits at its port
    time = timed(dims, reg | one_port(8, "W rd_down", "I rd_down"), loops, W=(1,), I=(0,)).latency
    assert (time.passes, time.exposed) == (4, 3)


def test_first_bit_takes_its_time() -> None:
    dims, loops = WEIGHTS
    slow = top(bits={"W rd_down": 8}, latency_cycles=5)
    time = timed(dims, {"reg": store("W", refill="single")} | slow, loops, W=(1,)).latency
    assert (time.fill, time.exposed) == (1 + 4, 3 * 5)


def test_slower_side_of_a_transfer_counts() -> None:
    # 4 weights a tile: 32 bits; the top gives 32 a cycle, the register takes 8.
    dims, loops = {"K": 8, "P": 8}, (("K", 4), ("P", 8), ("K", 2))
    reg = store("W", refill="single", bits={"W wr_down": 8})
    found = timed(dims, {"reg": reg} | top(bits={"W rd_down": 32}), loops, W=(1,))
    assert row(found, "reg", "W").cycles_each == 4
    assert (found.latency.fill, found.latency.exposed) == (4, 4)


def test_outputs_wait_going_up_and_coming_back() -> None:
    # P2 inside C3, one output to the register: 6 residencies of 16 bits through 8-bit ports: 2 cycles up; sums come back: 2 down.
    acc = {"acc": store("O", refill="single")} | top(bits={"O wr_up": 8, "O rd_down": 8})
    found = timed({"P": 2, "C": 3}, acc, (("P", 2), ("C", 3)), O=(0,))
    assert (row(found, "acc", "O").cycles_each, row(found, "acc", "O").returned_cycles) == (2, 2)
    # 5 times a store, and a load for the 4 of 6 residencies that are not first visits: at their mean, 5 * (2 + 2 * 4 / 6), rounded up
    assert (found.latency.exposed, found.latency.drain) == (17, 2)
    # C inside: two residencies, each finished, nothing comes back; 8 bits each: 1 cycle
    found = timed({"P": 2, "C": 3}, acc, (("C", 3), ("P", 2)), O=(0,))
    assert row(found, "acc", "O").returned_cycles == 0
    assert (found.latency.exposed, found.latency.drain) == (1 * 1, 1)


def test_ladders_fill_side_by_side_but_one_port_one_after_another() -> None:
    dims, loops = {"K": 4, "P": 8}, (("K", 4), ("P", 8))
    for outermost, fill in ((top(bits={"W rd_down": 8, "I rd_down": 8}), 8), (one_port(8, "W rd_down", "I rd_down"), 4 + 8)):
        found = timed(dims, {"reg": store("WI")} | outermost, loops, W=(2,), I=(2,))
        assert found.latency.fill == fill


def test_outermost_port_can_be_the_limit() -> None:
    # 32 inputs of 8 bits, none kept, through 4 bits a cycle: 64 cycles, twice the computing; it ends with the last multiplication.
    narrow = top(bits={"I rd_down": 4})
    found = timed({"K": 4, "P": 8}, narrow, (("P", 8), ("K", 4)))
    assert (found.port_cycles["top.I rd_down"], found.latency.cycles, found.bottleneck) == (64, 64, "top.I rd_down")
    # With K inside, an input is kept in the PE: 8 * 2 cycles, less than computing.
    found = timed({"K": 4, "P": 8}, narrow, (("K", 4), ("P", 8)))
    assert (found.port_cycles["top.I rd_down"], found.latency.cycles, found.bottleneck) == (16, 32, "compute")


def test_computing_follows_the_last_load() -> None:
    # Inputs come a row of 4 at a time, 8 rows through 8 bits a cycle, 4 cycles a row as computing takes; the last row is still computed.
    found = timed({"P": 32}, {"row": store("I")} | top(bits={"I rd_down": 8}), (("P", 4), ("P", 8)), I=(1,))
    assert (found.port_cycles["top.I rd_down"], found.latency.last_step, found.latency.cycles) == (32, 4, 36)


def test_port_on_chip_can_be_the_limit() -> None:
    buf = store("I", "x", bits={"I rd_down": 8})
    found = timed({"P": 8, "K": 2}, {"buf": buf}, (("P", 4), ("K", 2)), {"x": 2}, spatial={"x": (("P", 2),)}, I=(2,))
    # 2 lanes read 2 inputs a cycle in 8 cycles: 16 through 8 bits a cycle
    assert (found.latency.compute, found.port_cycles["buf.I rd_down"], found.latency.on_chip) == (8, 16, 16)
    assert found.bottleneck == "buf.I rd_down"


def test_network_can_be_the_limit() -> None:
    found = timed({"K": 8, "P": 4}, {}, (("K", 4), ("P", 4)), {"x": 2}, spatial={"x": (("K", 2),)}, noc={"bits_per_cycle": 8})
    # every cycle 2 weights and 2 sums (16 bits), every fourth an input for both: 16 * 2 + 4 + 16 * 4 bytes at one a cycle
    assert (found.latency.compute, found.port_cycles["noc"], found.latency.on_chip) == (16, 32 + 4 + 64, 100)
    assert found.bottleneck == "noc"


def test_ports_are_counted_for_their_busiest_instance() -> None:
    # K5 on 2 lanes: lane 0 has 3 weights to read, lane 1 two; three cycles each way, not five and not two and a half.
    found = timed({"K": 5, "P": 2}, {"reg": memory("W", granule=8)}, (("K", 3), ("P", 2)), {"x": 2}, spatial={"x": (("K", 2),)}, W=(1,))
    assert found.words("reg", "W", "rd_down") == 2 * 5
    assert next(a.cycles for a in found.accesses if (a.memory, a.direction) == ("reg", "rd_down")) == 2 * 3


def test_systolic_run_pays_the_skew_and_shifts_weights_in() -> None:
    # 4 x 3 PEs, C4 K3 across, P10 in time, C and K twice: four weights to a PE, shifted in through 4 rows each time.
    loops = (("P", 10), ("C", 2), ("K", 2))
    found = timed(
        {"P": 10, "C": 8, "K": 6}, {"reg": store("W", refill="single")}, loops, {"rows": 4, "columns": 3},
        spatial={"rows": (("C", 4),), "columns": (("K", 3),)}, W=(1,), systolic=True,
    )  # fmt: skip
    time = found.latency
    assert (time.compute, time.passes, row(found, "reg", "W").cycles_each) == (40, 4, 4)
    assert (time.fill, time.exposed) == (4, 3 * 4 + 4 * (4 + 3 - 2))


def check_time(found: LayerCost, array: SpatialArraySpec) -> None:
    time = found.latency
    assert time.cycles >= time.compute > 0
    assert time.cycles >= time.on_chip >= time.compute
    assert all(time.cycles >= cycles >= 0 for cycles in found.port_cycles.values()), found.port_cycles
    assert min(time.fill, time.drain, time.exposed, time.last_step) >= 0 and time.passes >= 1
    assert all(r.events >= 1 and min(r.cycles_each, r.returned_cycles, r.tile_bits) >= 0 for r in found.refills)
    assert found.cycles == time.cycles and found.seconds == pytest.approx(time.cycles / array.clock_hz.value)
    assert 0 < found.utilisation <= found.spatial_utilisation * (1 + 1e-12) <= 1 + 1e-9
    assert found.limits[found.bottleneck] == max(found.limits.values())


def systolic_too(random: Random) -> Case:
    case = random_case(random)
    return case._replace(array=changed(case.array, systolic=random.random() < 0.5))


@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_no_mapping_is_faster_than_its_parts(first: int) -> None:
    for seed in range(first, first + full_or_tenth(500)):
        case = systolic_too(Random(seed))
        check_time(evaluate(*case), case.array)


@given(cases(most_macs=150), st.booleans())
def test_no_generated_mapping_is_faster_than_its_parts(case: Case, systolic: bool) -> None:
    array = changed(case.array, systolic=systolic)
    check_time(evaluate(case.layer, array, case.plan), array)


@given(cases(most_macs=150), st.booleans(), st.sampled_from([2, 3, 8]), st.data())
def test_more_bandwidth_never_slows_a_mapping_down(case: Case, systolic: bool, times: int, data: st.DataObject) -> None:
    layer, array, plan = case
    array = changed(array, systolic=systolic)
    only = data.draw(st.sampled_from([None, *array.memories]))
    before, after = evaluate(layer, array, plan), evaluate(layer, with_bandwidth(array, times, only), plan)
    assert after.cycles <= before.cycles
    assert after.latency.on_chip <= before.latency.on_chip
    assert after.energy_pj == pytest.approx(before.energy_pj, rel=1e-12)  # words stay as wide as they were
    assert [a.words for a in after.accesses] == [a.words for a in before.accesses]


@given(cases(most_macs=150), st.data())
def test_a_slower_first_bit_never_speeds_a_mapping_up(case: Case, data: st.DataObject) -> None:
    layer, array, plan = case
    name = data.draw(st.sampled_from(list(array.memories)))
    slower = with_memory(array, name, latency_cycles=array.memories[name].latency_cycles + 3)
    assert evaluate(layer, slower, plan).cycles >= evaluate(layer, array, plan).cycles
