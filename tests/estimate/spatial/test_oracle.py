"""The oracle against counts worked out by hand, and the random cases against what they promise.

Weights and inputs are 8 bits wide, partial sums 16, finished outputs 8, words 8, unless a test says otherwise.
Loops are written innermost first.
"""

from __future__ import annotations

from math import prod
from random import Random
from typing import Any

import pytest
from hypothesis import given

from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.mapping import Loop, MappingPlan, check_mapping
from ridgeline.target.array import DIMENSIONS, OPERANDS, OperandBits, SpatialArraySpec
from tests.estimate.spatial.cases import Case, cases, memory, random_case, small_array
from tests.estimate.spatial.oracle import PES, Ladder, OracleCounts, ProcessingElement, simulate
from tests.support import full_or_tenth


def count(
    layer: Layer,
    array: SpatialArraySpec,
    loops: tuple[Loop, ...],
    spatial: dict[str, tuple[Loop, ...]] | None = None,
    **cuts: tuple[int, ...],
) -> OracleCounts:
    plan = MappingPlan(spatial or {}, loops, {operand: cuts.get(operand, ()) for operand in OPERANDS})
    check_mapping(layer, array, plan)
    return simulate(layer, array, plan)


def array_of(sizes: dict[str, int] | None = None, **memories: dict[str, Any]) -> SpatialArraySpec:
    """Axes and memories; the outermost, `top`, is added unless given."""
    axes = sizes or {"x": 1}
    return small_array(axes, memories if "top" in memories else memories | {"top": memory("WIO", axes)})


def streams(counts: OracleCounts, operand: str, kind: str = "elements") -> dict[str, int]:
    """{"memory direction": number} of one operand, what is zero left out."""
    return {f"{name} {direction}": n for (name, op, direction), n in getattr(counts, kind).items() if op == operand and n}


def test_partial_sums_come_back_when_the_reduction_is_outside() -> None:
    # P2 inside C3, and the register covers no loop: each of the 2 * 3 = 6 cycles brings another output to it.
    # The top holds a sum from the second C step on: (3 - 1) * 2 = 4 come down, and the multiplier finds those 4 in the register.
    counts = count(Layer("l", {"P": 2, "C": 3}), array_of(reg=memory("O")), (("P", 2), ("C", 3)), O=(0,))
    moved = {"reg rd_down": 4, "reg wr_up": 6, "reg wr_down": 4, "reg rd_up": 6, "top rd_down": 4, "top wr_up": 6}
    assert streams(counts, "O") == moved
    assert streams(counts, "O", "transfers") == moved
    # C lies above the register, so all may be partial: 16 bits, two words each.
    assert streams(counts, "O", "words") == {stream: 2 * n for stream, n in moved.items()}
    # A weight depends on C alone and waits in the PE while P runs: 3 reads. An input changes every cycle: 6.
    assert streams(counts, "W") == {"top rd_down": 3}
    assert streams(counts, "I") == {"top rd_down": 6}
    assert (counts.macs, counts.compute_cycles) == (6, 6)


def test_sums_that_stay_leave_once_and_finished() -> None:
    # The register covers P and so both outputs through all of C: one residency, nothing comes down,
    # one transfer of 2 finished outputs, 8 bits each, leaves; the multiplier still rereads 2 outputs in C steps 2 and 3.
    counts = count(Layer("l", {"P": 2, "C": 3}), array_of(reg=memory("O")), (("P", 2), ("C", 3)), O=(1,))
    assert streams(counts, "O") == {"reg rd_down": 4, "reg wr_up": 6, "reg rd_up": 2, "top wr_up": 2}
    assert streams(counts, "O", "words") == {"reg rd_down": 8, "reg wr_up": 12, "reg rd_up": 2, "top wr_up": 2}
    assert counts.transfers["top", "O", "wr_up"] == 1
    assert counts.tile_elements["reg", "O"] == 2


@pytest.mark.parametrize(("cut", "from_top"), [(1, 2), (2, 0)])
def test_sums_pass_through_a_memory_that_forgets(cut: int, from_top: int) -> None:
    # C2, P2, C2 and acc covers the first: 4 residencies of one output, two products each; acc gives 4 up.
    # In the second outer C step buf must return 2. Covering C2 only, it has forgotten them and fetches 2 from the top, and gives
    # 4 up as partial sums (2 words each); covering P2 as well, it kept them, and one transfer of 2 finished outputs (1 word each) leaves.
    # acc: the second product of each residency, 4, and the first of those that got a sum, 2, find one there.
    array = array_of(acc=memory("O"), buf=memory("O"))
    counts = count(Layer("l", {"P": 2, "C": 4}), array, (("C", 2), ("P", 2), ("C", 2)), O=(1, cut))
    moved = {"acc rd_down": 6, "acc wr_up": 8, "acc wr_down": 2, "acc rd_up": 4, "buf rd_down": 2, "buf wr_up": 4}
    above = {"buf wr_down": 2, "buf rd_up": 4, "top rd_down": 2, "top wr_up": 4} if from_top else {"buf rd_up": 2, "top wr_up": 2}
    assert streams(counts, "O") == moved | above
    assert counts.words["top", "O", "wr_up"] == (8 if from_top else 2)
    assert counts.transfers["top", "O", "wr_up"] == (4 if from_top else 1)


def test_lanes_of_a_reduction_are_added_on_the_way_up() -> None:
    # C4 = 2 lanes * 2 steps outside P2: 4 residencies, and in each both lanes hold the same output.
    # Up: 2 lanes * 4 = 8 leave, the top is written once each: 4. Down, in the second C step: 2 sums, to lane 0 only.
    # The multiplier of lane 0 finds those 2; lane 1 always starts from zero. Network: 8 up + 2 down; the top takes 4 and gives 2.
    layer = Layer("l", {"P": 2, "C": 4})
    counts = count(layer, array_of({"x": 2}, acc=memory("O")), (("P", 2), ("C", 2)), {"x": (("C", 2),)}, O=(0,))
    assert streams(counts, "O") == {"acc rd_down": 2, "acc wr_up": 8, "acc wr_down": 2, "acc rd_up": 8, "top rd_down": 2, "top wr_up": 4}
    assert counts.transfers["acc", "O", "rd_up"] == 8
    assert (counts.hops["acc", "O", "up"], counts.hops["acc", "O", "down"], counts.hops["PE", "O", "up"]) == (8, 2, 0)
    assert (counts.hops_elements["O"], counts.injected_elements["O"], counts.injected_bits["O"]) == (10, 6, 6 * 16)


def test_lanes_without_a_memory_of_their_own() -> None:
    # The same without acc: 4 cycles write one output each, 2 of them reread it. Network: 2 PEs * 4 up,
    # and a sum that comes down reaches one of the two PEs that are added up: 2.
    layer = Layer("l", {"P": 2, "C": 4})
    counts = count(layer, array_of({"x": 2}), (("P", 2), ("C", 2)), {"x": (("C", 2),)})
    assert streams(counts, "O") == {"top rd_down": 2, "top wr_up": 4}
    assert dict(counts.hops) == {(PES, "O", "up"): 8, (PES, "O", "down"): 2, (PES, "W", "down"): 4, (PES, "I", "down"): 8}
    # W: 2 events (C steps) of 2 different weights, I: 4 of 2 different inputs; nothing is shared, so as much goes in.
    assert dict(counts.injected_elements) == {"W": 4, "I": 8, "O": 6}


def test_one_read_serves_all_lanes() -> None:
    # K3 over x: the three PEs use the same input. P2: 2 reads at the top, 3 registers written each time: 6. The fourth PE
    # along x is not in the plan: idle, gets nothing.
    array = array_of({"x": 4}, reg=memory("I"), top=memory("WIO", "x", granule=16))
    counts = count(Layer("l", {"K": 3, "P": 2}), array, (("P", 2),), {"x": (("K", 3),)}, I=(0,))
    assert streams(counts, "I") == {"top rd_down": 2, "reg wr_down": 6, "reg rd_down": 6}
    assert counts.transfers["reg", "I", "wr_down"] == 6
    assert (counts.hops["reg", "I", "down"], counts.hops_elements["I"], counts.injected_elements["I"]) == (6, 6, 2)
    # Weights stay in the PEs through P: one read of 3 * 8 = 24 bits, in words of 16: two.
    assert (counts.elements["top", "W", "rd_down"], counts.words["top", "W", "rd_down"]) == (3, 2)
    # Outputs: 3 each cycle, 3 * 16 = 48 bits = 3 words, 2 cycles.
    assert counts.words["top", "O", "wr_up"] == 6


def test_padding_is_never_moved() -> None:
    # y = p + r - 1 over P3, R3 on rows 0..2: the row buffer covers R and holds {0,1}, {0,1,2}, {1,2}: 2 + 3 + 2 = 7 in 3 transfers;
    # in words of 16 bits 1 + 2 + 1 = 4. The PE reads an input in 9 cycles less the two that meet padding.
    array = array_of(row=memory("I", granule=16))
    counts = count(Layer("l", {"P": 3, "R": 3}, padding=(1, 0)), array, (("R", 3), ("P", 3)), I=(1,))
    assert streams(counts, "I") == {"top rd_down": 7, "row wr_down": 7, "row rd_down": 7}
    assert streams(counts, "I", "transfers") == {"top rd_down": 3, "row wr_down": 3, "row rd_down": 7}
    assert streams(counts, "I", "words") == {"top rd_down": 7, "row wr_down": 4, "row rd_down": 7}
    assert counts.tile_elements["row", "I"] == 3
    assert (counts.macs, counts.compute_cycles) == (9, 9)


def test_nothing_but_padding_moves_nothing() -> None:
    # One output whose single tap lies at y = -1: a multiplication, a weight, an output, no input.
    counts = count(Layer("l", {"P": 1}, padding=(1, 0), input_size=(1, 1)), array_of(), ())
    assert streams(counts, "I") == streams(counts, "I", "transfers") == {}
    assert streams(counts, "W") == {"top rd_down": 1}
    assert (counts.macs, counts.hops_elements["I"], counts.tile_elements["top", "I"]) == (1, 0, 0)


@pytest.mark.parametrize(("taps", "touched"), [(1, 3), (2, 6), (3, 7)])
def test_stride_leaves_gaps(taps: int, touched: int) -> None:
    # Stride 2, P3: one tap touches rows 0 2 4, two 0..5, three 0..6 (rows 2 and 4 twice, held once). One refill brings them all.
    array = array_of(buf=memory("I"))
    counts = count(Layer("l", {"P": 3, "R": taps}, stride=(2, 1)), array, (("R", taps), ("P", 3)), I=(2,))
    assert streams(counts, "I") == {"top rd_down": touched, "buf wr_down": touched, "buf rd_down": 3 * taps}
    assert counts.tile_elements["buf", "I"] == touched
    assert counts.transfers["buf", "I", "wr_down"] == 1


def test_edge_tiles_are_short() -> None:
    # K5 on 2 lanes, loops K2 K2: t = 0, 1 then 2 (t = 3 starts at k = 6 > 4 and is skipped): 3 cycles for 5 products.
    # buf, shared by the lanes, covers the first K2: {0..3} then {4}: in words of 24 bits ceil(32/24) + ceil(8/24) = 2 + 1 = 3.
    # The PEs get 2, 2 and 1 weights: words of 24 bits, one each time.
    array = array_of({"x": 2}, buf=memory("W", "x", granule=24))
    counts = count(Layer("l", {"K": 5}), array, (("K", 2), ("K", 2)), {"x": (("K", 2),)}, W=(1,))
    assert (counts.compute_cycles, counts.macs) == (3, 5)
    assert streams(counts, "W") == {"top rd_down": 5, "buf wr_down": 5, "buf rd_down": 5}
    assert streams(counts, "W", "transfers") == {"top rd_down": 2, "buf wr_down": 2, "buf rd_down": 3}
    assert streams(counts, "W", "words") == {"top rd_down": 5, "buf wr_down": 3, "buf rd_down": 3}
    assert counts.tile_elements["buf", "W"] == 4


def test_private_edge_tile_may_be_empty() -> None:
    # The same with a register in each PE: lane 0 holds {0,2} then {4}, lane 1 {1,3} then nothing: 3 writes of 2, 1 and 2.
    counts = count(Layer("l", {"K": 5}), array_of({"x": 2}, reg=memory("W", granule=16)), (("K", 2), ("K", 2)), {"x": (("K", 2),)}, W=(1,))
    assert counts.transfers["reg", "W", "wr_down"] == 3
    assert counts.words["reg", "W", "wr_down"] == 1 + 1 + 1
    assert counts.transfers["top", "W", "rd_down"] == 2
    assert counts.tile_elements["reg", "W"] == 2


def test_a_lane_that_works_only_in_some_inner_steps_still_gets_its_tile() -> None:
    # P3 on 2 lanes, P2 in time, inside K2: lane 1 is past the edge at t_P = 1 only. Weights stay through P: at each of the
    # 2 events both registers get the weight although the last inner step leaves one idle.
    counts = count(
        Layer("l", {"P": 3, "K": 2}), array_of({"x": 2}, reg=memory("W")), (("P", 2), ("K", 2)), {"x": (("P", 2),)}, W=(0,)
    )  # fmt: skip
    assert streams(counts, "W") == {"top rd_down": 2, "reg wr_down": 4, "reg rd_down": 4}
    # With K inside, P's steps become events: the second, at t_P = 1, finds lane 1 idle: (2 + 1) * 2 = 6 writes.
    counts = count(
        Layer("l", {"P": 3, "K": 2}), array_of({"x": 2}, reg=memory("W")), (("K", 2), ("P", 2)), {"x": (("P", 2),)}, W=(0,)
    )  # fmt: skip
    assert streams(counts, "W") == {"top rd_down": 4, "reg wr_down": 6, "reg rd_down": 6}


def test_lanes_are_numbered_innermost_axis_first() -> None:
    # K4 over x3 and y2: k = x + 3y, so row y = 0 holds {0, 1, 2} and row y = 1 holds {3}: words of 16 bits, 2 + 1.
    spatial: dict[str, tuple[Loop, ...]] = {"y": (("K", 2),), "x": (("K", 3),)}
    rows = array_of({"x": 3, "y": 2}, row=memory("W", "x", granule=16))
    counts = count(Layer("l", {"K": 4}), rows, (), spatial, W=(0,))
    assert (counts.words["row", "W", "wr_down"], counts.tile_elements["row", "W"]) == (3, 3)
    # Columns x = 0 {0, 3}, x = 1 {1}, x = 2 {2}: one word each.
    columns = array_of({"x": 3, "y": 2}, column=memory("W", "y", granule=16))
    counts = count(Layer("l", {"K": 4}), columns, (), spatial, W=(0,))
    assert (counts.words["column", "W", "wr_down"], counts.tile_elements["column", "W"]) == (3, 2)
    assert (counts.macs, counts.compute_cycles) == (4, 1)


def test_two_dimensions_share_an_axis() -> None:
    # x = 4 as K2 (inner) and C2: PEs k0c0, k1c0, k0c1, k1c1. Four weights, two inputs (each for 2 PEs), two outputs (each from 2).
    # C4 takes two steps; in the second both sums return, to the PEs with c lane 0.
    array = array_of({"x": 4}, reg=memory("WIO"))
    counts = count(Layer("l", {"K": 2, "C": 4}), array, (("C", 2),), {"x": (("K", 2), ("C", 2))}, W=(0,), I=(0,), O=(0,))
    assert streams(counts, "W") == {"top rd_down": 8, "reg wr_down": 8, "reg rd_down": 8}
    assert streams(counts, "I") == {"top rd_down": 4, "reg wr_down": 8, "reg rd_down": 8}
    # reg's cut is 0, but C does not move outputs: one residency for both C steps, so sums stay: 4 PEs reread in step 2.
    assert streams(counts, "O") == {"reg rd_down": 4, "reg wr_up": 8, "reg rd_up": 4, "top wr_up": 2}
    assert streams(counts, "O", "words")["top wr_up"] == 2


def test_a_relevant_loop_that_runs_once_still_delimits() -> None:
    # K1 with an overshooting K2 loop: walked once, yet refills sit in it, under P3: three events for the same weight.
    counts = count(Layer("l", {"P": 3}), array_of(), (("K", 2), ("P", 3)))
    assert streams(counts, "W", "transfers") == {"top rd_down": 3}
    # A factor of 1 is no loop: the weight stays.
    counts = count(Layer("l", {"P": 3}), array_of(), (("K", 1), ("P", 3)))
    assert streams(counts, "W", "transfers") == {"top rd_down": 1}


def test_a_reduction_loop_that_runs_once_does_not_make_outputs_partial() -> None:
    # C1 under an overshooting C2 loop above the register: outputs leave finished, 8 bits = one word each.
    counts = count(Layer("l", {"P": 2}), array_of(reg=memory("O")), (("P", 2), ("C", 2)), O=(0,))
    assert streams(counts, "O", "words") == {"reg wr_up": 4, "reg rd_up": 2, "top wr_up": 2}


def test_streams_round_to_the_words_of_their_own_port() -> None:
    # Weights pass a port of 24-bit words, inputs one of 64, outputs one of 128 moved in pieces of 32.
    ports = {
        "w": {"direction": "read", "bits_per_cycle": 24, "carries": ("W rd_down",)},
        "i": {"direction": "read", "bits_per_cycle": 64, "carries": ("I rd_down",)},
        "o": {"direction": "read_write", "bits_per_cycle": 128, "word_bits": 32},
    }
    bits = OperandBits(W=7, I=40, O=20, F=8)
    array = small_array({"x": 4, "y": 2}, {"top": memory("WIO", "xy", ports=ports)}, bits)
    layer = Layer("l", {"K": 4, "P": 2, "C": 2}, bits=bits)
    counts = count(layer, array, (("C", 2),), {"x": (("K", 4),), "y": (("P", 2),)})
    # Each of 2 cycles: 4 weights = 28 bits = 2 words of 24, 2 inputs = 80 bits = 2 of 64, 8 sums = 160 bits = 5 of 32, reread once.
    assert counts.words == {("top", "W", "rd_down"): 4, ("top", "I", "rd_down"): 4, ("top", "O", "wr_up"): 10, ("top", "O", "rd_down"): 5}
    # A word sent to several PEs goes in once: 4 * 7 and 2 * 40 bits a cycle; each of the 8 PEs is reached.
    assert dict(counts.injected_bits) == {"W": 2 * 28, "I": 2 * 80, "O": 3 * 160}
    assert dict(counts.hops_bits) == {"W": 2 * 8 * 7, "I": 2 * 8 * 40, "O": 3 * 8 * 20}


def test_a_lost_partial_sum_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_of_them(self: Ladder, level: int, pes: list[ProcessingElement]) -> set[tuple[int, ...]]:
        return set()

    monkeypatch.setattr(Ladder, "_first_lanes", none_of_them)
    with pytest.raises(AssertionError):
        test_partial_sums_come_back_when_the_reduction_is_outside()


def check_invariants(case: Case) -> OracleCounts:
    check_mapping(*case)
    counts, outermost = simulate(*case), list(case.array.memories)[-1]
    assert counts.macs == case.layer.macs
    assert counts.compute_cycles == prod(-(-size // case.plan.unrolled(dim)) for dim, size in case.layer.dims.items())
    for operand in OPERANDS:
        assert counts.tile_elements[outermost, operand] == case.layer.elements(operand)
    for operand in "WI":
        assert counts.elements[outermost, operand, "rd_down"] >= case.layer.elements(operand)
    # each sum that comes down goes up again: what goes up less what comes down is each output, once
    up, down = (counts.elements[outermost, "O", direction] for direction in ("wr_up", "rd_down"))
    assert up - down == case.layer.elements("O")
    return counts


def features(case: Case, counts: OracleCounts) -> set[str]:
    """What this case exercises."""
    layer, array, plan = case
    ladders = [len(array.ladder(operand)) for operand in OPERANDS]
    unrolled = {axis: [loop for loop in loops if loop[1] > 1] for axis, loops in plan.spatial.items()}
    used = prod(factor for loops in unrolled.values() for _, factor in loops)
    found = {
        "groups": layer.dims["G"] > 1,
        "batch": layer.dims["B"] > 1,
        "stride": max(layer.stride) > 1,
        "dilation": max(layer.dilation) > 1,
        "padding": max(layer.padding) > 0,
        "larger input": layer.input_size != Layer("l", layer.dims, layer.stride, layer.dilation, layer.padding).input_size,
        "short ladder": 1 in ladders,
        "long ladder": 4 in ladders,
        "shared memory": any(len(m.operands) > 1 for m in list(array.memories.values())[:-1]),
        "half shared": any(0 < len(m.shared_over) < len(array.axes) for m in array.memories.values()),
        "named port": any(port.carries for m in array.memories.values() for port in m.ports.values()),
        "two dims on an axis": any(len({dim for dim, _ in loops}) > 1 for loops in unrolled.values()),
        "a dim on two axes": any(sum(dim in dict(loops) for loops in unrolled.values()) > 1 for dim in DIMENSIONS),
        "idle PEs": used < prod(array.axes.values()),
        "edge": counts.macs < counts.compute_cycles * used,
        "split loops": any(sum(d == dim and f > 1 for d, f in plan.loops) > 1 for dim in DIMENSIONS),
        "overshoot": any(plan.block(dim, len(plan.loops)) > -(-size // plan.unrolled(dim)) for dim, size in layer.dims.items()),
        "uneven cuts": len({cut[0] for cut in plan.cuts.values() if cut}) > 1,
        "sum returns": any(op == "O" and direction == "wr_down" for _, op, direction in counts.words),
        "sums added on the way": any(counts.hops[name, "O", "up"] > counts.injected_elements["O"] for name in array.memories),
        "multicast": any(counts.hops_elements[operand] > counts.injected_elements[operand] for operand in "WI"),
    }
    return {name for name, here in found.items() if here}


def test_random_cases_are_sound_and_reach_everything() -> None:
    runs, seen = full_or_tenth(2000), dict[str, int]()
    for seed in range(runs):
        case = random_case(Random(seed))
        for name in features(case, check_invariants(case)):
            seen[name] = seen.get(name, 0) + 1
    assert len(seen) == 21
    assert {name: n for name, n in seen.items() if n < runs / 50} == {}


@given(cases(most_macs=100))
def test_generated_cases_are_sound(case: Case) -> None:
    check_invariants(case)
