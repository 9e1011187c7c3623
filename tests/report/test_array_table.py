"""The terminal's view of a mapped network: its numbers, its width, and what it survives."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ridgeline.estimate.spatial.compare import compare_dataflows
from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.network import map_layers
from ridgeline.estimate.spatial.replay import mappings_to_json, replay
from ridgeline.estimate.spatial.whatif import ArrayAdvice
from ridgeline.report import array_table as table
from tests.estimate.spatial.nets import array, mapped, workload


def test_totals_add_up() -> None:
    network = mapped()
    text = table.render_network(network, width=200)
    line = next(line for line in text.splitlines() if line.lstrip().startswith("energy"))
    shares = [float(value) for value in re.findall(r"([\d.]+) %", line)]
    assert sum(shares) == pytest.approx(100, abs=1.5)
    cycles = next(line for line in text.splitlines() if line.lstrip().startswith("cycles"))
    assert f"{network.cycles:,} at 100 MHz" in cycles and sum(map(float, re.findall(r"([\d.]+) %", cycles))) == pytest.approx(100, abs=1.5)
    assert "0 of 3 layers" in text or "optimal within the space" in text


def test_a_proven_layer_says_optimal() -> None:
    network = mapped("energy")
    text = table.render_network(network, width=200)
    optimal = [layer for layer in network.layers if layer.mapped.optimal]
    assert text.count("optimal\n") == len(optimal)
    for layer in network.layers:
        assert table.gap_text(layer) == ("optimal" if layer.mapped.optimal else table.fmt.percent(layer.mapped.gap))
    planted = replace(
        network.layers[0], mapped=replace(network.layers[0].mapped, lower_bound=0.5 * network.layers[0].mapped.cost.energy_pj)
    )
    assert table.gap_text(planted) == "50 %"
    assert "of 3 layers optimal within the space; elsewhere a better mapping could save at most 50 %" in table.optimality(
        replace(network, layers=(planted, *network.layers[1:]))
    )


def test_a_given_mapping_claims_nothing() -> None:
    given = replay(workload(), array(), "2", mappings_to_json(mapped()))
    assert table.gap_text(given.layers[0]) == "given" and table.optimality(given) == "not searched: the mapping was given"
    text = table.render_layers(given)
    assert "mapping given" in text and "unrollings searched" not in text


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_tables_keep_to_the_width(width: int) -> None:
    advice = [ArrayAdvice("twice the buffer", 1.5, "dram (1 of 2 cycles)", "x " * 80, 2.0, 1.0, 1.2, 2.0, 1.0, 1.3, "mapped again: 0")]
    network = table.render_network(mapped(), advice, width=width)
    full = table.render_layers(mapped(), advice, width=width)
    loops = {f"  {line}" for layer in mapped().layers for line in table.nest_text(layer, mapped()).splitlines()}
    assert all(len(line) <= width for text in (network, full) for line in text.splitlines() if line not in loops)
    assert "1.5x time" in network and "1.2x energy" in network and "1.3x the area" in network.replace("\n", " ")


def test_one_layer_in_full_names_every_access_and_port() -> None:
    network = replace(mapped(), layers=mapped().layers[1:2])
    cost = network.layers[0].mapped.cost
    text = table.render_layers(network, width=160)
    moved = [access for access in cost.accesses if access.words]
    rows = [line for line in text.splitlines() if re.search(r"\b(rd_down|wr_up|wr_down|rd_up)\b", line)]
    assert len(rows) == len(moved)
    for access, row in zip(moved, rows, strict=True):
        assert row.split()[:3] == [access.memory, access.operand, access.direction] and f"{access.words:,}" in row
    assert table.nest_text(network.layers[0], network).splitlines()[0].strip() in text
    for name, cycles in (("compute", cost.latency.compute), ("fill", cost.latency.fill), ("drain", cost.latency.drain)):
        assert re.search(rf"^{name} +{cycles:,} ", text, re.MULTILINE), name


def test_dataflow_tables_have_a_column_each() -> None:
    found = compare_dataflows(workload(), array(dataflows=["ws", "os"]))
    text = table.render_dataflows(found, width=160)
    assert re.search(r"^largest tile +of +ws +os$", text, re.MULTILINE) and f"take {found.best.dataflow} · best for: ws" in text
    assert f"*  {found.best.dataflow} " in text and text.count("not possible") == 2
    for one in found.feasible:
        assert f"{one.cycles:,}" in text


def test_several_cores_show_how_a_layer_is_cut() -> None:
    network = map_layers(workload(), array(cores={"count": 2, "use": "split"}), layer="2")
    (layer,) = network.layers
    assert f"2 ({layer.split})" in table.render_network(network, width=200)
    assert f"one of 2 cores, cut along {layer.split}" in table.render_layers(network, width=200)
    assert table.utilisation(layer, network) == pytest.approx(network.utilisation)


def test_a_pipeline_states_its_pace() -> None:
    assert "a result every" not in table.render_network(mapped(), width=200)
    assert "a result every" in table.render_network(replace(mapped(), interval_s=mapped().seconds / 2), width=200)


def test_nothing_mapped_still_prints() -> None:
    bare = replace(mapped(), layers=(), host=())
    assert "0 of 0 layers" in table.render_network(bare) and table.render_layers(bare).startswith("tiny on")


def test_control_characters_do_not_reach_the_terminal() -> None:
    odd = replace(mapped(), workload=replace(workload(), model="\x1b[31mred\x07"))
    assert "\x1b" not in table.render_network(odd) and "\x07" not in table.render_layers(odd)


def test_loops_in_short() -> None:
    assert table.shape_text(Layer("a", {"K": 8, "P": 4}, stride=(2, 2), dilation=(3, 1))) == "K8 P4 /2 ×3"
    assert table.shape_text(Layer("a", {})) == "1"
    assert [table.bits_text(bits) for bits in (3, 64, 8e6)] == ["3 b", "8 B", "1 MB"]
