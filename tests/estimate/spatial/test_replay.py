"""What was saved is evaluated to the same figures; what is not a mapping of this layer on this array is an error that says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.errors import OptionError, UnknownNameError
from ridgeline.estimate.spatial.cost import InfeasibleMappingError
from ridgeline.estimate.spatial.network import NetworkMapping, map_layers
from ridgeline.estimate.spatial.replay import SCHEMA, mappings_to_json, read_mappings, replay
from tests.estimate.spatial.nets import array, mapped, workload


def saved(network: NetworkMapping) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(mappings_to_json(network)))
    return data


@pytest.mark.parametrize("layer", ["0", "2", "6"])
def test_saved_mappings_cost_the_same_again(layer: str) -> None:
    before = next(one for one in mapped().layers if one.op.layer == layer)
    again = replay(workload(), array(), layer, saved(mapped()))
    (after,) = again.layers
    assert (after.cycles, after.energy_pj, after.macs) == (before.cycles, before.energy_pj, before.macs)
    assert after.mapped.cost.accesses == before.mapped.cost.accesses
    assert again.dataflow == "given" and again.interval_s == pytest.approx(again.seconds) and not after.mapped.optimal
    alone = replay(workload(), array(), layer, before.mapped.cost.plan.to_json())
    assert alone.layers[0].cycles == before.cycles


def test_another_mapping_costs_something_else() -> None:
    data = saved(mapped())
    plan = next(entry["mapping"] for entry in data["layers"] if entry["layer"] == "2")
    for levels in plan["temporal"].values():  # nothing stays on chip: every loop lies above every memory
        levels[:] = [[] for _ in levels[:-1]] + [[loop for level in levels for loop in level]]
    after = replay(workload(), array(), "2", data).layers[0]
    assert after.energy_pj > next(one for one in mapped().layers if one.op.layer == "2").energy_pj


def test_a_layer_split_over_cores_comes_back_split() -> None:
    pair = array(cores={"count": 2, "use": "split"})
    before = map_layers(workload(), pair, layer="2")
    (one,) = before.layers
    assert one.cores == 2 and one.split
    (after,) = replay(workload(), pair, "2", saved(before)).layers
    assert (after.cycles, after.energy_pj, after.cores, after.split) == (one.cycles, one.energy_pj, 2, one.split)


@pytest.mark.parametrize("wrong", [{"cores": 3}, {"cores": True}, {"cores": 2, "split": "Z"}, {"cores": -1}, {"cores": "2"}])
def test_a_split_that_cannot_be(wrong: dict[str, Any]) -> None:
    data = saved(mapped())
    data["layers"][1] |= wrong
    # True counts as one core, which is what it was
    if wrong == {"cores": True}:
        assert replay(workload(), array(), "2", data).layers[0].cores == 1
        return
    with pytest.raises(OptionError, match=r"split .* for layer 2"):
        replay(workload(), array(cores={"count": 2, "use": "split"}), "2", data)


def test_an_op_of_two_products_needs_two_mappings() -> None:
    before = map_layers(workload("attention"), array(), layer="attention")
    assert len(before.layers) == 2
    again = replay(workload("attention"), array(), "attention", saved(before))
    assert [one.cycles for one in again.layers] == [one.cycles for one in before.layers]
    with pytest.raises(OptionError, match="one mapping for 2 loop nests"):
        replay(workload("attention"), array(), "attention", before.layers[0].mapped.cost.plan.to_json())


def test_wrong_layers_are_named() -> None:
    with pytest.raises(UnknownNameError, match="unknown layer '7'"):
        replay(workload(), array(), "7", saved(mapped()))
    data = saved(mapped())
    data["layers"] = data["layers"][:1]
    with pytest.raises(OptionError, match=r"no mapping of layer '6' in the file[\s\S]*1 layers, e.g. 0"):
        replay(workload(), array(), "6", data)
    with pytest.raises(OptionError, match="no layer at all"):
        replay(workload(), array(), "6", {"layers": []})


def broken(**changes: Any) -> dict[str, Any]:
    plan = next(entry["mapping"] for entry in saved(mapped())["layers"] if entry["layer"] == "2")
    return plan | changes


def test_mappings_that_do_not_fit_say_where() -> None:
    everything = [loop for level in broken()["temporal"]["W"] for loop in level]
    on_chip = {operand: [everything] + [[] for _ in levels[1:]] for operand, levels in broken()["temporal"].items()}
    with pytest.raises(InfeasibleMappingError, match=r"layer 2 needs \d+ B more than memory registers of two-by-two has"):
        replay(workload(), array(), "2", broken(temporal=on_chip))
    with pytest.raises(OptionError, match="axis 'depth'"):
        replay(workload(), array(), "2", broken(spatial={"depth": [["K", 2]]}))
    with pytest.raises(OptionError, match="does not fit layer 2: loops over"):
        replay(workload(), array(), "2", broken(temporal={op: [[] for _ in levels] for op, levels in on_chip.items()}))


@pytest.mark.parametrize("factor", [10**15, 10**40, 10**400])
def test_loops_beyond_reason_are_refused(factor: int) -> None:
    grown = {operand: [*levels[:-1], [*levels[-1], ["K", factor]]] for operand, levels in broken()["temporal"].items()}
    with pytest.raises(OptionError, match="loops over K take more than"):
        replay(workload(), array(), "2", broken(temporal=grown))


@pytest.mark.parametrize(
    "data",
    [
        {"layers": 3}, {"layers": [3]}, {"layers": [{"layer": "2"}]}, {"layers": [{"layer": "2", "mapping": 3}]}, {"temporal": 3},
        {"temporal": {}, "spatial": {}}, {"temporal": {"W": [], "I": [], "O": []}, "spatial": []},
        {"temporal": {"W": [[["K"]]], "I": [[]], "O": [[]]}, "spatial": {}},
        {"temporal": {"W": [[["K", 2]]], "I": [[["C", 2]]], "O": [[]]}, "spatial": {}},
        {"temporal": {"W": [[["K", "2"]]], "I": [[]], "O": [[]]}, "spatial": {}},
    ],
)  # fmt: skip
def test_data_that_is_no_mapping_is_an_error(data: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        replay(workload(), array(), "2", data)


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "not JSON"), ("{", "not JSON"), ("[1]", "holds no mapping"), ('{"a": 1}', "holds no mapping"), ("[" * 100_000, "not JSON")],
)
def test_files_that_hold_none(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mapping.json"
    path.write_text(text)
    with pytest.raises(OptionError, match=words):
        read_mappings(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for path, words in ((tmp_path / "none.json", "No such file"), (tmp_path, "directory"), (tmp_path / "binary.json", "not JSON")):
        with pytest.raises(OptionError, match=words):
            read_mappings(path)


def test_a_file_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mappings.json"
    path.write_text(json.dumps(mappings_to_json(mapped())))
    data = read_mappings(path)
    assert data["schema"] == SCHEMA and data["target"] == "two-by-two" and [e["layer"] for e in data["layers"]] == ["0", "2", "6"]
