"""Offsets: against brute force on small sets, and by properties on random ones."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from ridgeline.transform.graph.capture import Captured
from ridgeline.transform.graph.memory.facts import observe
from ridgeline.transform.graph.memory.lifetimes import Interval, lifetimes, peak_bytes, round_up
from ridgeline.transform.graph.memory.order import reorder
from ridgeline.transform.graph.memory.plan import Plan, plan
from tests.support import full_or_tenth

from .nets import interval

SPANS = st.lists(st.tuples(st.integers(1, 700), st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=24)


def intervals_of(spans: list[tuple[int, int, int]]) -> list[Interval]:
    return [interval(number, size, first, first + length) for number, (size, first, length) in enumerate(spans)]


def overlaps(found: Plan) -> list[tuple[str, str]]:
    """Pairs that are alive together and share bytes: there must be none."""
    pairs = list(zip(found.intervals, found.offsets, strict=True))
    return [
        (one.node, two.node)
        for position, (one, at) in enumerate(pairs)
        for two, there in pairs[:position]
        if one.first <= two.last and two.first <= one.last and at < there + two.bytes and there < at + one.bytes
    ]


def optimum(intervals: list[Interval], align: int) -> int:
    """The smallest arena: some order, each at the lowest offset that is free, reaches it."""
    best = sum(round_up(one.bytes, align) for one in intervals)
    for order in permutations(intervals):
        placed: list[tuple[Interval, int]] = []
        for one in order:
            size, at = round_up(one.bytes, align), 0
            near = sorted(
                (there, there + round_up(two.bytes, align)) for two, there in placed if one.first <= two.last and two.first <= one.last
            )
            for start, end in near:
                if start - at >= size:
                    break
                at = max(at, end)
            placed.append((one, at))
        best = min(best, max(at + round_up(one.bytes, align) for one, at in placed))
    return best


@given(SPANS)
@settings(max_examples=full_or_tenth(400), deadline=None, derandomize=True)
def test_nothing_alive_together_overlaps_and_the_bound_is_a_bound(spans: list[tuple[int, int, int]]) -> None:
    intervals = intervals_of(spans)
    for found in (plan(intervals, effort=0), plan(intervals, effort=40)):
        assert not overlaps(found)
        assert found.lower_bound_bytes <= found.arena_bytes
        assert found.lower_bound_bytes >= peak_bytes(intervals)
        assert all(offset % 64 == 0 for offset in found.offsets)
        assert max(offset + one.bytes for one, offset in zip(intervals, found.offsets, strict=True)) <= found.arena_bytes


def test_the_overlap_check_can_fail() -> None:
    spoiled = plan(intervals_of([(64, 0, 3), (64, 2, 3)]))
    assert not overlaps(spoiled)
    wrong = Plan(spoiled.intervals, (0, 0), 64, 128, "wrong", 0.0)
    assert overlaps(wrong)


def test_search_finds_the_optimum_of_small_sets() -> None:
    chance = random.Random(3)
    for _ in range(full_or_tenth(120)):
        spans = [(chance.choice([64, 128, 192, 320, 448]), chance.randrange(6), chance.randrange(4)) for _ in range(6)]
        intervals = intervals_of(spans)
        best = optimum(intervals, 64)
        found = plan(intervals, effort=400)
        assert peak_bytes(intervals, 64) <= best, "no placement is below the bound"
        assert found.arena_bytes == best


def test_search_betters_greedy_by_size() -> None:
    chance = random.Random(5)
    won = 0
    for _ in range(6):
        intervals = intervals_of([(chance.randrange(1, 900), chance.randrange(40), chance.randrange(12)) for _ in range(60)])
        greedy, searched = plan(intervals, effort=0), plan(intervals, effort=300)
        assert searched.arena_bytes <= greedy.arena_bytes
        won += searched.arena_bytes < greedy.arena_bytes
    assert won >= 3


def test_the_same_input_gives_the_same_plan() -> None:
    chance = random.Random(9)
    intervals = intervals_of([(chance.randrange(1, 900), chance.randrange(40), chance.randrange(12)) for _ in range(60)])
    assert plan(intervals, effort=60, time_limit_s=60).offsets == plan(intervals, effort=60, time_limit_s=60).offsets


def test_two_thousand_intervals_within_five_seconds() -> None:
    chance = random.Random(1)
    intervals = intervals_of([(chance.randrange(64, 100_000), step, chance.randrange(1, 30)) for step in range(2000)])
    found = plan(intervals, time_limit_s=1.0)
    assert found.seconds < 5
    assert found.over_bound < 0.05
    assert not overlaps(replace(found, intervals=found.intervals[900:1100], offsets=found.offsets[900:1100]))


def test_a_graph_of_two_thousand_nodes_is_planned_within_five_seconds() -> None:
    chance, graph, aten = random.Random(6), fx.Graph(), torch.ops.aten
    pool = [graph.placeholder("x")]
    while len(graph.nodes) < 1999:
        left, right = chance.choice(pool[-12:]), chance.choice(pool[-40:])
        kind = chance.randrange(3)
        row = graph.call_function(aten.sum.dim_IntList, (right, [0], True))
        pool.append(row if kind == 0 else graph.call_function(aten.add.Tensor, (left, row)))
        if kind == 2:
            pool.append(graph.call_function(aten.repeat.default, (row, [chance.randrange(1, 9), 1])))
    graph.output((graph.call_function(aten.add.Tensor, (pool[-1], pool[-2])),))
    captured = Captured(fx.GraphModule(nn.Module(), graph), (torch.randn(4, 32),), False)
    start = time.process_time()
    facts = observe(captured)
    reorder(captured, facts)
    found = plan(lifetimes(captured, facts))
    assert time.process_time() - start < 5
    assert found.over_bound <= 0.03


def test_nothing_to_plan_is_an_empty_arena() -> None:
    found = plan([])
    assert (found.arena_bytes, found.lower_bound_bytes, found.over_bound) == (0, 0, 0.0)


def test_json_is_the_memory_map() -> None:
    found = plan(intervals_of([(100, 0, 2), (50, 1, 2), (60, 4, 1)]))
    data = found.to_json()
    assert [row["offset"] for row in data["intervals"]] == list(found.offsets)
    assert data["live_bytes"] == [128, 192, 192, 64, 64, 64]
    assert data["unrounded_peak_bytes"] == 150
    assert data["over_bound"] == pytest.approx(0)
