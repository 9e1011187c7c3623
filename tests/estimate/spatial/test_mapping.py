"""Mappings there and back through JSON, where refills sit, and every way a mapping can fail to fit."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given

from ridgeline.core.errors import OptionError
from ridgeline.estimate.spatial.layer import RELEVANT, Layer
from ridgeline.estimate.spatial.mapping import MappingPlan, check_mapping, mapping_from_json
from tests.estimate.spatial.cases import Case, cases, memory, small_array

LAYER = Layer("l", {"K": 4, "C": 3, "P": 5})
ARRAY = small_array(
    {"x": 2, "y": 3}, {"reg": memory("WO"), "buf": memory("WI", "xy"), "top": memory("WIO", "xy")}, unroll={"y": ("C", "P")}
)
PLAN = MappingPlan(
    {"x": (("K", 2),), "y": (("C", 3),)}, (("K", 2), ("P", 5)), {"W": (1, 2), "I": (1,), "O": (0,)}, "ws"
)  # fmt: skip


def test_the_plan_to_spoil_is_sound() -> None:
    check_mapping(LAYER, ARRAY, PLAN)


@given(cases())
def test_mapping_survives_json(case: Case) -> None:
    plan = case.plan
    again = mapping_from_json(json.loads(json.dumps(plan.to_json())))
    assert again.loops == plan.loops
    assert {axis: tuple(loops) for axis, loops in again.spatial.items()} == dict(plan.spatial)
    assert dict(again.cuts) == dict(plan.cuts)
    assert again.dataflow == plan.dataflow
    check_mapping(case.layer, case.array, again)


def test_json_lists_the_loops_of_every_memory() -> None:
    assert PLAN.to_json() == {
        "spatial": {"x": [["K", 2]], "y": [["C", 3]]},
        "temporal": {"W": [[["K", 2]], [["P", 5]], []], "I": [[["K", 2]], [["P", 5]]], "O": [[], [["K", 2], ["P", 5]]]},
        "dataflow": "ws",
    }


def spoiled(**more: Any) -> dict[str, Any]:
    return PLAN.to_json() | more


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "KeyError"),
        (spoiled(temporal={"W": [], "I": []}), "KeyError: 'O'"),
        (spoiled(spatial=[["K", 2]]), "AttributeError"),
        (spoiled(spatial={"x": [["K", 0]]}), "not \\[dimension, whole factor\\]"),
        (spoiled(spatial={"x": [["K", 2.0]]}), "not \\[dimension, whole factor\\]"),
        (spoiled(spatial={"x": [["K", True]]}), "not \\[dimension, whole factor\\]"),
        (spoiled(spatial={"x": [["X", 2]]}), "not \\[dimension, whole factor\\]"),
        (spoiled(spatial={"x": [["K"]]}), "ValueError"),
        (spoiled(temporal=3), "TypeError"),
    ],
)
def test_what_is_no_mapping_is_refused(data: Any, said: str) -> None:
    with pytest.raises(OptionError, match="not a mapping") as caught:
        mapping_from_json(data)
    assert re.search(said, str(caught.value)), str(caught.value)


def test_operands_must_agree_on_the_order_of_loops() -> None:
    data = PLAN.to_json()
    data["temporal"]["I"] = [[["P", 5]], [["K", 2]]]
    with pytest.raises(OptionError, match="different loop orders"):
        mapping_from_json(data)


@pytest.mark.parametrize(
    ("change", "what", "why"),
    [
        ({"spatial": {"z": (("K", 2),)}}, "axis 'z'", "the axes of small are x, y"),
        ({"spatial": {"x": (("K", 2), ("C", 2))}}, "4 PEs along x", "small has 2 there"),
        ({"spatial": {"x": (("K", 2),), "y": (("K", 3),)}}, "K along y", "small unrolls only C, P there"),
        ({"loops": (("K", 2), ("P", 4))}, "loops over P reach 4", "the layer has 5"),
        ({"spatial": {"x": (("K", 2),)}}, "loops over C reach 1", "the layer has 3"),
        ({"cuts": {"W": (1,), "I": (1,), "O": (0,)}}, "1 cuts for W", "W has 2 memories below the outermost one on small"),
        ({"cuts": {"W": (1, 2), "I": (1,)}}, "0 cuts for O", "O has 1 memories below"),
        ({"cuts": {"W": (2, 1), "I": (1,), "O": (0,)}}, "cuts (2, 1) for W", "cuts must rise and end by 2"),
        ({"cuts": {"W": (1, 3), "I": (1,), "O": (0,)}}, "cuts (1, 3) for W", "cuts must rise and end by 2"),
        ({"cuts": {"W": (1, 2), "I": (-1,), "O": (0,)}}, "cuts (-1,) for I", "cuts must rise"),
    ],
)
def test_mapping_that_does_not_fit_says_what_and_why(change: dict[str, Any], what: str, why: str) -> None:
    fields = {"spatial": PLAN.spatial, "loops": PLAN.loops, "cuts": PLAN.cuts} | change
    with pytest.raises(OptionError) as caught:
        check_mapping(LAYER, ARRAY, MappingPlan(**fields))
    assert what in str(caught.value) and why in str(caught.value) and "layer l" in str(caught.value)


def test_a_factor_of_one_may_lie_anywhere() -> None:
    plan = MappingPlan({"x": (("K", 2),), "y": (("C", 3), ("K", 1))}, PLAN.loops, PLAN.cuts)
    check_mapping(LAYER, ARRAY, plan)


def test_lanes_and_blocks() -> None:
    plan = MappingPlan({"x": (("K", 2), ("C", 3)), "y": (("K", 4),)}, (("K", 2), ("P", 3), ("K", 5)), {})
    assert (plan.unrolled("K"), plan.unrolled("K", ["y"]), plan.unrolled("P")) == (8, 4, 1)
    assert [plan.block("K", cut) for cut in range(4)] == [1, 2, 2, 10]


def test_refill_sits_in_the_first_loop_that_matters() -> None:
    plan = MappingPlan({}, (("P", 4), ("K", 1), ("C", 2), ("K", 3), ("Q", 2)), {})
    # W depends on K and C: P is passed over, and so is a loop that runs once.
    assert [plan.refill_position("W", cut) for cut in range(6)] == [2, 2, 2, 3, 5, 5]
    assert [plan.refill_position("I", cut) for cut in range(6)] == [0, 2, 2, 4, 4, 5]
    assert [plan.refill_position("O", cut) for cut in range(6)] == [0, 3, 3, 3, 4, 5]


@given(cases())
def test_refill_position_by_definition(case: Case) -> None:
    plan = case.plan
    for operand in "WIO":
        for cut in range(len(plan.loops) + 1):
            position = plan.refill_position(operand, cut)
            assert cut <= position <= len(plan.loops)
            assert not any(d in RELEVANT[operand] and f > 1 for d, f in plan.loops[cut:position])
            assert position == len(plan.loops) or plan.loops[position][0] in RELEVANT[operand]
