"""Layers as instruction streams: schedules worked by hand, closed forms, exact port cycles, agreement with the analytical latency."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from random import Random
from typing import Any

import pytest

from ridgeline.estimate.spatial.cost import LayerCost, evaluate
from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.mapping import MappingPlan
from ridgeline.estimate.spatial.schedule import Timeline, check_timeline, schedule
from ridgeline.estimate.spatial.schedule import stream as module
from ridgeline.estimate.spatial.schedule.stream import schedule_layer, stream
from ridgeline.report.timeline_trace import render_timeline
from ridgeline.target.array import DIRECTIONS, READS, OperandBits, SpatialArraySpec
from ridgeline.target.load import load_array
from tests.estimate.spatial.cases import Case, memory, random_case, small_array
from tests.support import full_or_tenth

BITS = OperandBits(W=8, I=8, O=8, F=8)


def _port(direction: str, bits: int = 8, **more: Any) -> dict[str, Any]:
    return {"direction": direction, "bits_per_cycle": bits} | ({"word_bits": 8} if bits > 8 else {}) | more


def own_ports(operands: str | tuple[str, ...], bits: int) -> dict[str, Any]:
    """A port for every stream."""
    streams = [(operand, way) for operand in operands for way in DIRECTIONS]
    return {f"{op}_{way}": _port("read" if way in READS else "write", bits, carries=(f"{op} {way}",)) for op, way in streams}


def one_buffer(refill: str = "double", bits: int = 8, write_bits: int = 8, latency: int = 1, operands: str = "WIO") -> SpatialArraySpec:
    """One PE, a buffer whose ports are never a limit, and an outermost memory that reads and writes side by side."""
    memories = {"buffer": memory(operands, ["x"], ports=own_ports(operands, 4096), refill=refill)}
    ports = {"read": _port("read", bits), "write": _port("write", write_bits)}
    return small_array({"x": 1}, memories | {"dram": memory("WIO", ["x"], ports=ports, latency_cycles=latency)}, BITS)


def matmul(rows: int, columns: int, depth: int) -> Layer:
    return Layer("matmul", {"P": rows, "K": columns, "C": depth}, bits=BITS)


def nest(*loops: tuple[str, int], cut: int, operands: str = "WIO") -> MappingPlan:
    """No unrolling; every operand in the buffer is cut at one place."""
    return MappingPlan({}, loops, {op: (cut,) if op in operands else () for op in "WIO"})


def spans(timeline: Timeline, opcode: str) -> list[tuple[int, int]]:
    return [(row.start, row.end) for row in timeline.rows if timeline.instructions[row.index].opcode == opcode]


def held(timeline: Timeline) -> Counter[str]:
    found: Counter[str] = Counter()
    for instruction in timeline.instructions:
        found[instruction.resource] += instruction.held_cycles
    return found


def test_four_steps_by_hand() -> None:
    """W: 3 words a step. I: 6 words, once. O: 2 words a step. A step computes 6 cycles, and bursts are of one cycle."""
    timeline = schedule_layer(matmul(2, 4, 3), one_buffer(), nest(("C", 3), ("P", 2), ("K", 4), cut=2))
    assert spans(timeline, "compute") == [(9, 15), (15, 21), (21, 27), (27, 33)]
    of_w = spans(timeline, "load W")
    assert sorted(of_w[:3] + spans(timeline, "load I")) == [(cycle, cycle + 1) for cycle in range(9)]
    # the third tile takes the place of the first, which is in use until 15
    assert of_w[3:] == [(cycle, cycle + 1) for begin in (9, 15, 21) for cycle in range(begin, begin + 3)]
    assert spans(timeline, "store O") == [(15, 16), (16, 17), (21, 22), (22, 23), (27, 28), (28, 29), (33, 34), (34, 35)]
    assert timeline.cycles == 35
    assert timeline.resources == {"array": 1, "dram.read": 1, "dram.write": 1}
    assert [it.label for it in timeline.instructions if it.opcode == "compute"] == [f"compute {n}/4" for n in (1, 2, 3, 4)]


def test_the_same_with_one_buffer_waits_for_every_load() -> None:
    timeline = schedule_layer(matmul(2, 4, 3), one_buffer("single"), nest(("C", 3), ("P", 2), ("K", 4), cut=2))
    assert spans(timeline, "compute") == [(9, 15), (18, 24), (27, 33), (36, 42)]
    assert timeline.cycles == 44


def test_partial_sums_come_back_except_on_first_visits() -> None:
    """Two O tiles of 4 words, visited three times each; every one of them stays a step."""
    layer, array, plan = matmul(4, 2, 3), one_buffer(), nest(("P", 4), ("K", 2), ("C", 3), cut=1)
    timeline = schedule_layer(layer, array, plan)
    cost = evaluate(layer, array, plan)
    opcodes = [it.opcode for it in timeline.instructions if it.opcode in ("load O", "store O")]
    assert Counter(opcodes) == {"load O": 16, "store O": 24}
    assert held(timeline)["dram.read"] == cost.port_cycles["dram.read"] == 6 + 3 * 4 + 16
    homes = {it.destination for it in timeline.instructions if it.opcode == "store O"}
    assert len(homes) == 2
    for home in homes:
        ends = [row.end for row in timeline.rows if timeline.instructions[row.index].destination == home]
        starts = [row.start for row in timeline.rows if home in timeline.instructions[row.index].sources]
        assert all(max(ends[4 * n : 4 * n + 4]) <= min(starts[4 * n : 4 * n + 4]) for n in (0, 1))  # stored before it is fetched again


@pytest.mark.parametrize(("bits", "cycles"), [(16, 64 + 300 * 64 + 1), (8, 128 + 300 * 64 + 1), (4, 301 * 128 + 64 + 1)])
def test_a_step_takes_the_longer_of_computing_and_loading(bits: int, cycles: int) -> None:
    """64 words of W a step of 64 cycles, 64 words of I once: computing, both or the port set the pace; exact at both ends."""
    assert schedule_layer(matmul(1, 300, 64), one_buffer(bits=bits), nest(("C", 64), ("K", 300), cut=1)).cycles == cycles


@pytest.mark.parametrize(("computing", "step"), [(4, (4 + 1 + 50) / 2), (30, (30 + 1 + 50) / 2), (100, 100)])
def test_two_buffers_hide_a_latency_only_up_to_their_stay(computing: int, step: float) -> None:
    """A word of W a step, there 50 cycles later; it is asked for when the one before the last has been used up."""
    timeline = schedule_layer(
        matmul(computing, 1000, 1), one_buffer(latency=51, write_bits=1024), nest(("P", computing), ("K", 1000), cut=1)
    )
    assert timeline.cycles == pytest.approx(1000 * step, rel=0.01)


def test_what_has_no_memory_on_chip_passes_its_port_while_the_step_runs() -> None:
    """W is read anew for each of 20 x 30 x 10 multiplications, one word a cycle; then two words a cycle are asked of one port."""
    layer, plan = matmul(20, 30, 10), nest(("P", 20), ("C", 10), ("K", 30), cut=2, operands="IO")
    array = one_buffer(operands="IO")
    timeline = schedule_layer(layer, array, plan)
    assert held(timeline)["dram.read"] == evaluate(layer, array, plan).port_cycles["dram.read"] == 200 + 300
    none = nest(("C", 10), ("P", 20), ("K", 30), cut=0, operands="")
    array = small_array({"x": 1}, {"dram": memory("WIO", ["x"], ports={"read": _port("read"), "write": _port("write")})}, BITS)
    cost, timeline = evaluate(layer, array, none), schedule_layer(layer, array, none)
    assert timeline.cycles == cost.port_cycles["dram.read"] == 3 * 6000 - 600  # W, I and, except at first, O
    assert {it.opcode for it in timeline.instructions} == {"begin", "compute", "stream W", "stream I", "stream O"}


def test_bursts_let_a_short_load_pass_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """I: 8 cycles of the port in a step of 16. W: 128 cycles of it every 20 steps. In one piece, W keeps the array waiting for I."""
    layer, array = matmul(20, 16 * 40, 1), one_buffer(bits=1, write_bits=1024)
    plan = nest(("K", 16), ("P", 20), ("K", 40), cut=1)
    smooth = schedule_layer(layer, array, plan)
    assert smooth.cycles == pytest.approx(layer.macs, rel=0.02)
    assert {it.held_cycles for it in smooth.instructions if it.opcode == "load W"} == {16 // 8}
    monkeypatch.setattr(module, "BURSTS_A_STEP", Fraction(1, 1000))
    assert schedule_layer(layer, array, plan).cycles > 1.1 * smooth.cycles


# Mappings found by map_layer for ResNet-18, objective latency: array, (K, C, P, Q, R, S), spatial, loops, cuts, steps.
FOUND = [
    (
        "tpu-like", (64, 64, 56, 56, 3, 3), {"D1": "C8 K4", "D2": "K16 P2"}, "S3 R3 C8 Q2 Q4 P7 Q7 P4",
        {"W": (8,), "I": (6,), "O": (3, 4)}, 784,
    ),
    (
        "tpu-like", (256, 256, 14, 14, 3, 3), {"D1": "C8 K4", "D2": "C16 P2"}, "S3 R3 C2 Q14 P7 K64",
        {"W": (5,), "I": (6,), "O": (3, 4)}, 448,
    ),
    (
        "eyeriss-like", (128, 128, 28, 28, 3, 3), {"D1": "C2 P7", "D2": "P4 R3"}, "Q4 S3 C8 C8 Q7 K128",
        {"W": (3, 5), "I": (2, 6), "O": (4, 4, 4)}, 896,
    ),
    (
        "array-16", (64, 64, 56, 56, 3, 3), {"columns": "C16", "rows": "C4 K4"}, "Q14 P14 S3 R3 K2 K2 K4 Q2 Q2 P4",
        {"W": (6, 10, 10), "I": (7, 7, 8), "O": (4, 5, 5)}, 128,
    ),
    (
        "eyeriss", (64, 64, 56, 56, 3, 3), {"rows": "C4 R3", "columns": "C2 P7"}, "K16 S3 P2 Q56 C8 P4 K4",
        {"W": (4, 4), "I": (3, 4), "O": (2, 5)}, 128,
    ),
    (
        "eyeriss", (256, 256, 14, 14, 3, 3), {"rows": "C4 R3", "columns": "C2 P7"}, "K16 S3 P2 Q14 K4 C32 K4",
        {"W": (4, 4), "I": (3, 5), "O": (2, 6)}, 512,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("target", "sizes", "spatial", "loops", "cuts", "steps"), FOUND)
def test_searched_mappings_agree_with_the_analytical_latency(
    target: str, sizes: tuple[int, ...], spatial: dict[str, str], loops: str, cuts: dict[str, tuple[int, ...]], steps: int
) -> None:
    array = load_array(target)
    layer = Layer("conv", dict(zip("KCPQRS", sizes, strict=True)), padding=(1, 1), bits=array.bits)
    plan = MappingPlan({axis: _loops(text) for axis, text in spatial.items()}, _loops(loops), cuts)
    cost, timeline = evaluate(layer, array, plan), schedule_layer(layer, array, plan)
    assert timeline.cycles == pytest.approx(cost.latency.cycles, rel=0.01)
    assert sum(it.opcode == "compute" for it in timeline.instructions) == steps
    check_bounds(cost, timeline)


def _loops(text: str) -> tuple[tuple[str, int], ...]:
    return tuple((item[0], int(item[1:])) for item in text.split())


@pytest.mark.parametrize("seed", range(full_or_tenth(200)))
def test_double_buffered_mappings_agree_from_a_hundred_steps_on(seed: int) -> None:
    """Tiles that divide the layer, each operand refilled at least a hundred times or once; no latency; results leave finished."""
    random = Random(seed)
    inner = [("C", random.choice((4, 8, 16))), ("P", random.choice((1, 4, 16))), ("K", random.choice((1, 4, 16)))]
    outer = [("K", random.choice((2, 5, 10))), ("P", random.randint(100, 150))]
    if random.random() < 0.5:
        outer = [("P", outer[0][1]), ("K", outer[1][1])]
    loops = (*inner, *outer)
    sizes = Counter[str]()
    for dim, factor in loops:
        sizes[dim] = max(1, sizes[dim]) * factor
    layer = Layer("matmul", dict(sizes), bits=BITS)
    array = one_buffer(bits=random.choice((8, 16, 32, 64)))
    plan = nest(*loops, cut=3)
    cost, timeline = evaluate(layer, array, plan), schedule_layer(layer, array, plan)
    assert timeline.cycles == pytest.approx(cost.latency.cycles, rel=0.01)
    check_bounds(cost, timeline)


def check_bounds(cost: LayerCost, timeline: Timeline) -> None:
    """Never below computing, the on-chip time or any port's traffic; ports are held at least for it, the array exactly."""
    assert timeline.cycles >= max(cost.latency.compute, cost.latency.on_chip, *cost.port_cycles.values())
    found = held(timeline)
    assert found["array"] == cost.latency.on_chip
    for name in timeline.resources:
        assert name == "array" or found[name] >= cost.port_cycles[name]
    assert {name for name, cycles in cost.port_cycles.items() if cycles} >= set(timeline.resources) - {"array"}
    check_timeline(timeline.instructions, timeline.resources, timeline)


def test_bounds_hold_for_crooked_mappings() -> None:
    for seed in range(full_or_tenth(2000)):
        case = random_case(Random(seed))
        timeline = schedule_layer(*case)
        check_bounds(evaluate(*case), timeline)
        if seed % 10 == 0:
            assert schedule_layer(*case) == timeline


def with_own_ports(case: Case, bits: int, outermost_bits: int) -> Case:
    data = case.array.model_dump()
    for name, spec in data["memories"].items():
        spec["ports"] = own_ports(spec["operands"], outermost_bits if name == "outermost" else bits)
    return case._replace(array=SpatialArraySpec.model_validate(data))


@pytest.mark.parametrize(("bits", "outermost_bits", "exact"), [(1024, 8, "outermost"), (8, 1024, "below")])
def test_transfers_take_the_exact_cycles_of_the_slower_port(bits: int, outermost_bits: int, exact: str) -> None:
    """Edges, padding, sliding inputs and lanes: all transfers of a stream together take what the counts say of that port."""
    checked = 0
    for seed in range(full_or_tenth(1200)):
        case = with_own_ports(random_case(Random(seed)), bits, outermost_bits)
        found, cost = held(schedule_layer(*case)), evaluate(*case)
        for operand in "WIO":
            ladder = case.array.ladder(operand)
            for above, below in (("rd_down", "wr_down"), ("wr_up", "rd_up"))[: 2 if operand == "O" else 1]:
                inside = exact == "below" and len(ladder) > 1
                wanted = (ladder[-2], operand, below) if inside else ("outermost", operand, above)
                cycles = sum(a.cycles for a in cost.accesses if (a.memory, a.operand, a.direction) == wanted)
                assert found[f"outermost.{operand}_{above}"] == cycles, (seed, operand, above)
                checked += cycles > 0
    assert checked > full_or_tenth(1200)


def test_long_streams_are_merged_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, array = matmul(64, 64, 32), one_buffer(bits=16)
    plan = MappingPlan({}, (("C", 4), ("P", 4), ("C", 8), ("K", 64), ("P", 16)), {"W": (1,), "I": (2,), "O": (3,)})
    cost, full = evaluate(layer, array, plan), schedule_layer(layer, array, plan)
    assert not any(it.opcode.startswith("stream") for it in full.instructions)
    monkeypatch.setattr(module, "MOST_INSTRUCTIONS", 4000)
    merged = schedule_layer(layer, array, plan)
    assert len(merged.instructions) <= 4000 < len(full.instructions)
    assert "stream I 0, 512 refills" in {it.label for it in merged.instructions}
    assert merged.cycles == pytest.approx(full.cycles, rel=0.02)
    check_bounds(cost, merged)


@pytest.mark.parametrize("most", [50, 300, 2000])
def test_the_number_of_instructions_is_kept(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_INSTRUCTIONS", most)
    for seed in {*range(full_or_tenth(300)), 35}:  # 35: a port on chip that only hands on is slower than the one outside
        case = random_case(Random(seed))
        timeline = schedule_layer(*case)
        assert len(timeline.instructions) <= most
        check_bounds(evaluate(*case), timeline)


def test_fill_and_drain_of_the_levels_below_stand_at_the_ends() -> None:
    """Registers below the buffer that take a word a cycle of W and of I, and give up O at once."""
    slow = own_ports("WIO", 4096) | {f"{op}_wr_down": _port("write", carries=(f"{op} wr_down",)) for op in "WI"}
    memories = {"registers": memory("WIO", ports=slow), "buffer": memory("WIO", ["x"], ports=own_ports("WIO", 4096))}
    dram = memory("WIO", ["x"], ports={"read": _port("read"), "write": _port("write")})
    array = small_array({"x": 1}, memories | {"dram": dram}, BITS)
    plan = MappingPlan({}, (("C", 3), ("P", 2), ("K", 4)), {op: (2, 2) for op in "WIO"})
    layer = matmul(2, 4, 3)
    cost, timeline = evaluate(layer, array, plan), schedule_layer(layer, array, plan)
    assert cost.latency.fill == 6 + 6  # I, twice; W and I come down side by side from the buffer on
    assert spans(timeline, "fill") == [(9, 12)]
    assert spans(timeline, "compute") == [(12, 18), (18, 24), (24, 30), (30, 36)]
    assert spans(timeline, "drain") == [(36, 37)]
    assert spans(timeline, "store O")[-2:] == [(37, 38), (38, 39)]


def test_a_trace_shows_the_port_and_the_array() -> None:
    timeline = schedule_layer(matmul(2, 4, 3), one_buffer(), nest(("C", 3), ("P", 2), ("K", 4), cut=2))
    trace = render_timeline(timeline, "matmul")
    tracks = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert tracks == ["array[0]", "dram.read[0]", "dram.write[0]"]
    names = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {"load W 3", "load I 0", "compute 4/4", "store O 3"} <= names
    assert trace["otherData"]["instructions_beyond_tracks"] == 0


def test_the_same_stream_twice() -> None:
    case = random_case(Random(7))
    assert stream(*case) == stream(*case)
    assert schedule(*stream(*case)) == schedule_layer(*case)
