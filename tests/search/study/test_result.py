"""Lines of a journal: read as they were written, and refused where something else has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ridgeline.core.errors import OptionError
from ridgeline.search.study.objectives import parse_objectives
from ridgeline.search.study.result import Front, Shipped, Trial

TRIAL = Trial(3, 0, (1, 2), 1.0, {"accuracy": 0.5, "parameters": 100}, True, 2.0, same_as=1)
GROWN = Trial(0, 0, (), 1.0, {"accuracy": 0.5}, True, 2.0, genotype={"space": "aso-se", "cells": [1]})
REFUSED = Trial(4, 0, (1, 2), 0.5, {"latency": 3e-3}, False, 0.0, "latency 0.003 breaks latency<=2ms")
SHIPPED = Shipped(0, 3, (1, 2), {"accuracy": 0.5}, {"accuracy": 0.6}, 4.0)


def test_lines_come_back_as_they_were() -> None:
    for one in (TRIAL, GROWN, REFUSED):
        assert Trial.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert Shipped.from_json(json.loads(json.dumps(SHIPPED.to_json()))) == SHIPPED


@pytest.mark.parametrize(
    "changed",
    [{"number": float("inf")}, {"number": 1.0}, {"number": -1}, {"number": True}, {"point": [float("inf")]}, {"point": "12"},
     {"values": {"accuracy": float("nan")}}, {"values": {"accuracy": float("inf")}}, {"values": {"accuracy": 1e308}},
     {"values": {"accuracy": "0.5"}}, {"values": {}}, {"values": {"parameters": 3}}, {"values": []}, {"feasible": "false"}, {"feasible": 1},
     {"seconds": float("nan")}, {"seconds": -1}, {"fidelity": 0}, {"fidelity": 2}, {"why": {}}, {"same_as": 3}, {"same_as": "1"},
     {"genotype": 3}, {"more": 1}, {"seed": 0.0}],
    ids=str,
)  # fmt: skip
def test_a_line_that_is_no_trial_is_told_so(changed: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="is no trial"):
        Trial.from_json({**TRIAL.to_json(), **changed})


def test_a_trial_has_the_figures_that_are_asked_for() -> None:
    Trial.from_json(TRIAL.to_json(), ["accuracy", "parameters"])
    Trial.from_json(REFUSED.to_json(), ["accuracy"])  # never trained
    with pytest.raises(OptionError, match="trial 3 has no latency"):
        Trial.from_json(TRIAL.to_json(), ["accuracy", "latency"])


@pytest.mark.parametrize(
    "changed",
    [{"trial": float("inf")}, {"test": {}}, {"test": {"accuracy": "x"}}, {"values": {"accuracy": float("nan")}}, {"seed": "0"}],
    ids=str,
)
def test_a_line_that_is_no_final_training_is_told_so(changed: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="is no final training"):
        Shipped.from_json({**SHIPPED.to_json(), **changed})


def test_a_final_training_is_of_its_seeds_winner() -> None:
    front = Front({}, parse_objectives("accuracy"), [GROWN], {0: 0}, [SHIPPED])
    with pytest.raises(OptionError, match="of trial 3, but seed 0 ends with trial 0"):
        front.to_json()
