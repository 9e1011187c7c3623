"""Advice is the mapping run again: its gains equal those of an array changed by hand, and nothing small or impossible is advised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ridgeline import advise, estimate
from ridgeline.core.errors import OptionError
from ridgeline.estimate.spatial import whatif
from ridgeline.estimate.spatial.network import NetworkMapping, map_layers
from ridgeline.estimate.spatial.whatif import ArrayAdvice, advise_on_array, changes, heaviest
from ridgeline.target.array import OperandBits, SpatialArraySpec
from tests.estimate.spatial.nets import array, mapped, workload


def by_name(network: NetworkMapping) -> dict[str, tuple[SpatialArraySpec, str]]:
    return {name: (changed, flow) for name, _, changed, flow in changes(network)}


def rest(before: SpatialArraySpec, after: SpatialArraySpec, *fields: str) -> bool:
    """Whether nothing but the named top-level fields differs."""
    return before.model_dump(exclude=set(fields)) == after.model_dump(exclude=set(fields))


@pytest.fixture(scope="module")
def advice() -> list[ArrayAdvice]:
    return advise_on_array(mapped())


def test_every_change_changes_one_thing() -> None:
    old = array()
    found = by_name(mapped())
    assert list(found) == [
        "twice the registers",
        "twice the buffer",
        "twice the bandwidth of dram",
        "half the precision",
        "twice the PEs along columns",
    ]
    larger = found["twice the buffer"][0]
    assert larger.memories["buffer"].capacity_bits.value == 2048 and larger.memories["buffer"].area_mm2.value == 0.04
    assert rest(old, larger, "memories") and larger.memories["registers"] == old.memories["registers"]
    assert larger.memories["buffer"].read_pj == old.memories["buffer"].read_pj
    wider = found["twice the bandwidth of dram"][0].memories["dram"].ports["channel"]
    assert (wider.bits_per_cycle, wider.granule) == (16, 8), "words stay as they were, or traffic would be rounded anew"
    assert found["twice the PEs along columns"][0].axes == {"columns": 4, "rows": 2}
    assert found["half the precision"][0].bits == OperandBits(W=4, I=4, O=16, F=4)
    assert {flow for _, flow in found.values()} == {"any"}
    for changed, _ in found.values():
        SpatialArraySpec.model_validate(changed.model_dump())  # none breaks a rule of the target file


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"W": 8, "I": 8, "O": 32, "F": 8}, OperandBits(W=4, I=4, O=24, F=4)),
        ({"W": 16, "I": 16, "O": 16, "F": 16}, OperandBits(W=8, I=8, O=8, F=8)),
        ({"W": 1, "I": 2, "O": 9, "F": 3}, OperandBits(W=1, I=1, O=8, F=1)),
    ],
)
def test_half_the_precision(old: dict[str, int], new: OperandBits) -> None:
    assert by_name(replace(mapped(), array=array(bits=old)))["half the precision"][0].bits == new


def test_axes_that_differ_grow_one_at_a_time() -> None:
    for different in (array(axes={"columns": 2, "rows": 3}), array(unroll={"rows": ["C"]}), array(systolic=True)):
        names = list(by_name(replace(mapped(), array=different)))
        assert names[-2:] == ["twice the PEs along columns", "twice the PEs along rows"]


def test_dataflows_are_advised_where_the_mapping_was_not_free() -> None:
    asked = by_name(replace(mapped(), dataflow="ws"))
    assert [name for name in asked if "dataflow" in name] == ["dataflow is", "dataflow os", "dataflow rs"]
    assert asked["dataflow os"] == (array(), "os") and asked["twice the buffer"][1] == "ws"
    fixed = array(dataflows=["rs"], unroll={"rows": ["R"]})
    able = by_name(replace(mapped(), array=fixed))
    changed, flow = able["dataflow os"]
    assert flow == "os" and changed.dataflows == ("rs", "os") and changed.unroll == {}


def test_gains_are_those_of_an_array_changed_by_hand(advice: list[ArrayAdvice]) -> None:
    network = mapped()
    chosen, _ = heaviest(network)
    names = {layer.op.name for layer in chosen}
    part = replace(workload(), ops=tuple(op for op in workload().ops if op.name in names))
    assert 0 < len(chosen) < len(network.layers)
    wide = array()
    dram = wide.memories["dram"].model_dump() | {"ports": {"channel": {"direction": "read_write", "bits_per_cycle": 16, "word_bits": 8}}}
    by_hand = array(memories={**{n: m.model_dump() for n, m in wide.memories.items()}, "dram": dram})
    after = map_layers(part, by_hand)
    saved_s = (sum(layer.cycles for layer in chosen) - after.cycles) / 1e8
    saved_pj = sum(layer.energy_pj for layer in chosen) - sum(layer.energy_pj for layer in after.layers)
    found = next(one for one in advice if one.change == "twice the bandwidth of dram")
    assert found.after_s == pytest.approx(network.seconds - saved_s, rel=1e-12) and found.before_s == network.seconds
    assert found.predicted_speedup == pytest.approx(network.seconds / (network.seconds - saved_s)) and found.predicted_speedup > 1.02
    assert found.energy_gain == pytest.approx(network.energy_pj / (network.energy_pj - saved_pj))
    slowest = max(after.layers, key=lambda layer: layer.cycles).mapped.cost
    assert found.next_limit.startswith(slowest.bottleneck) and f"of {slowest.cycles:,} cycles" in found.next_limit
    assert "the rest as it was" in found.basis and all((layer.op.layer or layer.op.name) in found.basis for layer in chosen)


def test_advice_is_sorted_by_the_objective_and_never_small(advice: list[ArrayAdvice]) -> None:
    gains = [one.predicted_speedup * one.energy_gain for one in advice]
    assert gains and gains == sorted(gains, reverse=True) and min(gains) >= 1.02
    assert next(one for one in advice if "PEs" in one.change).area_ratio > 1.1
    assert {"change", "predicted_speedup", "energy_gain", "next_limit", "basis"} <= set(advice[0].to_dict())


@pytest.mark.parametrize("objective", ["energy", "latency"])
def test_gain_follows_the_objective(objective: str) -> None:
    found = advise_on_array(mapped(objective))
    gains = [one.energy_gain if objective == "energy" else one.predicted_speedup for one in found]
    assert gains == sorted(gains, reverse=True) and all(gain >= 1.02 for gain in gains)


def planted(monkeypatch: pytest.MonkeyPatch, changed: Any) -> list[ArrayAdvice]:
    monkeypatch.setattr(whatif, "changes", lambda network: iter([("planted", "", changed, "any")]))
    return advise_on_array(mapped())


def test_a_change_that_gains_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planted(monkeypatch, array()) == []
    assert planted(monkeypatch, array(clock_hz=1.01e8)) == []
    faster = planted(monkeypatch, array(clock_hz=2e8))
    assert len(faster) == 1 and faster[0].predicted_speedup > 1.3, "the same check lets a real gain through"


def test_a_change_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **more: object) -> NetworkMapping:
        raise OptionError("no", why="because", do="nothing")

    network = mapped()
    monkeypatch.setattr(whatif, "map_layers", refuse)
    assert advise_on_array(network) == []


def test_same_shapes_count_together() -> None:
    network = mapped()
    heavy = max(network.layers, key=lambda layer: layer.cycles / network.cycles + layer.energy_pj / network.energy_pj)
    light = min(network.layers, key=lambda layer: layer.cycles / network.cycles + layer.energy_pj / network.energy_pj)
    many = replace(network, layers=(heavy, *(replace(light, op=replace(light.op, name=f"copy{n}")) for n in range(200))))
    chosen, share = heaviest(many)
    assert {layer.op.name for layer in chosen} == {f"copy{n}" for n in range(200)} and share > 0.5
    assert advise_on_array(replace(network, layers=())) == []


def test_progress_names_the_changes() -> None:
    said: list[str] = []
    advise_on_array(mapped(), said.append)
    assert said == list(by_name(mapped()))


def test_advise_takes_a_profile_of_an_array(advice: list[ArrayAdvice]) -> None:
    profile = estimate(workload(), array())
    found = advise(profile)
    assert [one.change for one in found] == [one.change for one in advice]
    assert found[0].predicted_speedup == advice[0].predicted_speedup
    assert advice[0].energy_text in found[0].detail and advice[0].basis in found[0].detail


@pytest.mark.parametrize(("gain", "text"), [(1.0, "the same energy"), (1.25, "1.25x less energy"), (0.5, "2.00x more energy")])
def test_energy_in_words(gain: float, text: str) -> None:
    assert ArrayAdvice("c", 1.0, "", energy_gain=gain).energy_text == text
