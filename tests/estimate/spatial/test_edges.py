"""Stays that an edge cuts short, followed by whole tiles: by hand, against the schedule, and as a bound on many mappings at once."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

from ridgeline.estimate.spatial import edges, exhaustive, latency
from ridgeline.estimate.spatial.causes import Causes
from ridgeline.estimate.spatial.cost import evaluate
from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.listing import Listing
from ridgeline.estimate.spatial.mapping import MappingPlan
from ridgeline.estimate.spatial.narrow import Narrowing, least_energy_pj
from ridgeline.estimate.spatial.points import Points
from ridgeline.estimate.spatial.schedule.stream import schedule_layer
from ridgeline.estimate.spatial.tilings import Tilings
from ridgeline.target.array import OperandBits, SpatialArraySpec
from tests.estimate.spatial.cases import memory, small_array
from tests.estimate.spatial.schedule.test_stream import BITS, one_buffer
from tests.support import full_or_tenth


def plan(loops: str, weights: int, others: int) -> MappingPlan:
    """W is cut at one place, I above it, O at the first."""
    nest = tuple((item[0], int(item[1:])) for item in loops.split())
    return MappingPlan({}, nest, {"W": (weights,), "I": (others,), "O": (1,)})


def test_a_whole_tile_arrives_in_a_short_stay() -> None:
    """Ten columns, three at a time: stays of 24, 24, 24 and 8 cycles. A tile of W, 12 words, comes in 24 cycles but not in 8; results pass
    another port. So each of the 50 turns but the last waits 4 cycles."""
    layer, nest = Layer("matmul", {"C": 4, "P": 100, "K": 10}, bits=BITS), plan("C4 K3 P2 K4 P50", 3, 4)
    cost = evaluate(layer, one_buffer(), nest)
    time = cost.latency
    assert (time.compute, time.cycles - time.fill - time.compute - time.drain) == (4000, 4 * 49)
    assert schedule_layer(layer, one_buffer(), nest).cycles == pytest.approx(time.cycles, rel=0.002)


def test_a_loop_that_ends_with_a_whole_tile_waits_for_nothing() -> None:
    time = evaluate(Layer("matmul", {"C": 4, "P": 100, "K": 12}, bits=BITS), one_buffer(), plan("C4 K3 P2 K4 P50", 3, 4)).latency
    assert time.cycles == time.fill + time.compute + time.drain


def crooked(seed: int) -> tuple[Layer, SpatialArraySpec, MappingPlan]:
    """An innermost loop over tiles of W that ends at an edge, forty times."""
    random = Random(seed)
    block, depth, rows = random.randint(2, 6), random.choice((4, 8, 16)), random.randint(1, 4)
    tiles = random.randint(2, 6)
    columns = block * (tiles - 1) + random.randint(1, block - 1)
    layer = Layer("matmul", {"C": depth, "P": rows * 40, "K": columns}, bits=BITS)
    wide = random.choice((8, 16, 32))
    return layer, one_buffer(bits=wide, write_bits=random.choice((wide, 64))), plan(f"C{depth} K{block} P{rows} K{tiles} P40", 3, 4)


def apart(cases: int) -> list[float]:
    found = []
    for case in map(crooked, range(cases)):
        cost = evaluate(*case)
        found.append(abs(schedule_layer(*case).cycles / cost.cycles - 1))
    return found


def test_the_schedule_agrees_at_edges() -> None:
    assert max(apart(full_or_tenth(300))) < 0.01


def test_without_short_stays_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "short_stays", lambda *_: [])
    assert sum(each > 0.01 for each in apart(15)) > 2


def edged(count: int) -> Iterator[Tilings]:
    """Unrollings of layers whose loops run 11, 13, 17 or 23 times: tiles of the lattice do not divide them."""
    for seed in range(count):
        random = Random(seed)
        sizes = {"K": random.choice((11, 13, 22, 23)), "P": random.choice((2, 3, 11)), "C": random.choice((2, 4))}
        bits = OperandBits(W=random.choice((8, 32)), I=8, O=16, F=8)
        ports = {"all": {"direction": "read_write", "bits_per_cycle": random.choice((8, 16, 32)), "word_bits": 8}}
        buffer = memory("WIO", "x", capacity_bits=random.randint(600, 2000), granule=64, refill="double")
        spec = small_array({"x": 2}, {"buffer": buffer, "top": memory("WIO", "x", ports=ports)}, bits)
        yield Tilings(Layer("l", sizes, bits=bits), spec, {"x": (("K", 2),) if random.random() < 0.3 else ()})


def bounds_and_costs(count: int) -> dict[tuple[object, ...], tuple[float, int]]:
    """(bound of a listed mapping, its cycles), of every seventh mapping, if its tiles come where the points say."""
    found = {}
    for number, tilings in enumerate(edged(count)):
        points, limit = Points(tilings), 1e9
        causes = Causes(points, frozenset())
        narrowed = Narrowing(causes, "latency", limit, least_energy_pj(tilings), lambda _: limit, causes.allowed()).narrowed({})  # noqa: B023
        for bound, chosen in Listing(causes, "latency", narrowed).mappings(limit) or ():
            if sum(place for cuts in chosen for place in cuts) % 7:
                continue
            places = [[tuple(int(i) for i in np.unravel_index(place, points.shape)) for place in cuts] for cuts in chosen]
            found_plan = tilings.plan(places)
            blocks = [tuple(tilings.lattice.point(place).values()) for cuts in places for place in cuts]
            if exhaustive._refilled_at(found_plan) == tuple(blocks):
                found[number, *map(tuple, chosen)] = bound, evaluate(tilings.layer, tilings.array, found_plan).cycles
    return found


def test_no_mapping_is_below_its_bound_at_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = bounds_and_costs(full_or_tenth(20))
    assert len(pairs) > 100 and [pair for pair in pairs.values() if pair[0] > pair[1] + 1e-6] == []
    monkeypatch.setattr(edges.ShortOnes, "lost", lambda *_: 0.0)
    without = bounds_and_costs(full_or_tenth(20))
    assert without.keys() == pairs.keys()
    raised = [key for key, (bound, _) in pairs.items() if bound > without[key][0]]
    assert any(cycles - bound < 1 <= cycles - without[key][0] for key, (bound, cycles) in pairs.items() if key in raised)


def test_a_bound_that_claims_too_much_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = edges.ShortOnes.lost

    def more(*given: Any) -> Any:
        return 1.5 * lost(*given) + 1

    monkeypatch.setattr(edges.ShortOnes, "lost", more)
    assert any(bound > cycles + 1e-6 for bound, cycles in bounds_and_costs(3).values())
