"""`ridgeline map` and arrays in the other commands, as a user meets them: output forms, files, errors in three lines."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.map import map_model
from ridgeline.target.load import load_array
from tests.estimate.spatial.nets import ARRAY, NET, mapped

PROCESSOR = """
version = 1
kind = "processor"
name = "tiny"
[units.alu.peak_flops]
float32 = 2e12
[memories.dram]
bandwidth_bps = 1e12
capacity_bytes = 80e9
"""
LAYER_FIELDS = {"layer", "energy_pj", "cycles", "utilisation", "mapping", "accesses", "lower_bound", "bottleneck"}


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(ARRAY)
    return str(path)


def test_json_has_the_documented_fields_and_the_figures_of_the_api(run: Any, small: str) -> None:
    result = run("map", NET, "--on", small, "--json")
    assert result.code == 0 and result.err.startswith("mapping ")
    data = json.loads(result.out)
    assert data["schema"] == "ridgeline/map/1" and data["target"] == "two-by-two" and data["objective"] == "edp"
    assert [row["layer"] for row in data["layers"]] == ["0", "2", "6"] and all(set(row) >= LAYER_FIELDS for row in data["layers"])
    network = mapped()
    assert data["total"]["cycles"] == network.cycles and data["total"]["energy_pj"] == pytest.approx(network.energy_pj)
    assert {"change", "predicted_speedup", "energy_gain", "next_limit"} <= set(data["advice"][0])
    port = data["layers"][0]["ports"][0]
    assert {"memory", "port", "bytes", "intensity", "bandwidth_bps", "attainable_ops", "achieved_ops", "busy"} <= set(port)
    assert [op["kind"] for op in data["host"]] == ["pool"] and "loops" not in data["layers"][0]


def test_table_totals_host_and_advice(run: Any, small: str) -> None:
    result = run("map", NET, "--on", small, "--show-mapping")
    network = mapped()
    assert result.code == 0 and "on two-by-two · batch 1 · W 8, I 8, O 24, F 8 bits · any dataflow" in result.out
    for layer in network.layers:
        assert f"{layer.cycles:,}" in result.out and layer.mapped.cost.bottleneck in result.out
    assert f"{network.cycles:,} at 100 MHz" in result.out and "on the host · 1 op" in result.out
    assert "what would help" in result.out and "twice the bandwidth of dram; next limit:" in result.out
    assert "# 2: K 4, C 4, P 2, Q 2, R 3, S 3" in result.out and "O[0, 0, " in result.out


def test_rows_are_capped_to_the_costliest(run: Any, small: str) -> None:
    result = run("map", NET, "--on", small, "--no-advice", "--rows", "1")
    costliest = max(mapped().layers, key=lambda layer: layer.mapped.cost.edp)
    assert "2 cheaper layers not shown" in result.out and f"{costliest.cycles:,}" in result.out and "what would help" not in result.out
    assert "not shown" not in run("map", NET, "--on", small, "--no-advice", "--rows", "0").out


def test_one_layer_in_full_with_its_schedule(run: Any, small: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = run("map", NET, "--on", small, "--layer", "2", "--no-advice", "--trace", trace)
    assert result.code == 0
    layer = next(one for one in mapped().layers if one.op.layer == "2")
    for words in ("mapping · outermost loop first", "accesses", "tiles · on chip", "energy: ", "roofline of each memory", "dram.channel"):
        assert words in result.out
    assert f"cycles: {layer.cycles:,}" in result.out and "wr_up" in result.out and "fill" in result.out
    for access in layer.mapped.cost.accesses:
        assert not access.words or f"{access.words:,}" in result.out
    events = json.loads(trace.read_text())
    assert any(event["ph"] == "X" for event in events["traceEvents"]) and events["otherData"]["cycles"] > 0
    data = json.loads(run("map", NET, "--on", small, "--layer", "2", "--no-advice", "--json").out)
    assert len(data["layers"]) == 1 and data["layers"][0]["loops"].startswith("# 2: ") and data["advice"] == []


def test_mappings_are_saved_and_replayed(run: Any, small: str, tmp_path: Path) -> None:
    saved = tmp_path / "out" / "mappings.json"
    first = run("map", NET, "--on", small, "--no-advice", "--save-mappings", saved, "--json")
    assert f"mappings: {saved}" in first.err
    again = json.loads(run("map", NET, "--on", small, "--layer", "2", "--mapping", saved, "--json").out)
    before = json.loads(first.out)["layers"][1]
    assert again["dataflow"] == "given" and again["advice"] == []
    assert all(again["layers"][0][name] == before[name] for name in ("energy_pj", "cycles", "accesses", "mapping"))
    assert "not searched" not in run("map", NET, "--on", small, "--layer", "2", "--no-advice").out
    assert "mapping given" in run("map", NET, "--on", small, "--layer", "2", "--mapping", saved).out


def test_dataflows_side_by_side(run: Any, small: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    result = run("map", NET, "--on", small, "--dataflow", "compare", "--html", page)
    assert result.code == 0 and "take " in result.out and "the energy-delay product of" in result.out
    for words in ("largest tile", "MACs an element", "words moved", "bandwidth used"):
        assert words in result.out
    assert 'id="dataflows"' in page.read_text() and 'id="advice"' in page.read_text()
    data = json.loads(run("map", NET, "--on", small, "--layer", "2", "--dataflow", "compare", "--objective", "energy", "--json").out)
    assert data["schema"] == "ridgeline/dataflows/1" and [row["dataflow"] for row in data["dataflows"]] == ["ws", "is", "os", "rs"]
    energies = {row["dataflow"]: row["energy_pj"] for row in data["dataflows"]}
    assert energies[data["recommended"]] == min(energies.values())


def test_an_array_that_runs_one_dataflow_lists_the_others(run: Any, small: str) -> None:
    Path(small).write_text(ARRAY.replace("[mac]", 'dataflows = ["os"]\n[mac]', 1))
    result = run("map", NET, "--on", small, "--layer", "6", "--dataflow", "compare")
    assert result.code == 0 and "ws: not possible; the control of two-by-two runs os" in result.out and "take os" in result.out


def test_analyze_takes_an_array(run: Any, small: str, tmp_path: Path) -> None:
    html, trace = tmp_path / "report.html", tmp_path / "trace.json"
    result = run("analyze", NET, "--on", small, "--html", html, "--trace", trace)
    assert result.code == 0 and "on two-by-two · batch 1 · int8 · mapped" in result.out and "twice the bandwidth of dram" in result.out
    assert html.read_text().startswith("<!doctype html>") and json.loads(trace.read_text())["traceEvents"]
    data = json.loads(run("analyze", NET, "--on", small, "--json", "--no-advice").out)
    network = mapped()
    assert data["total"]["time_s"] == pytest.approx(network.seconds) and data["total"]["energy_j"] == pytest.approx(
        network.energy_pj * 1e-12
    )
    assert {row["kind"]: row["bottleneck"] for row in data["ops"]}["pool"] == "host"


def test_processors_and_arrays_in_one_table(run: Any, small: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(PROCESSOR)
    html = tmp_path / "both.html"
    both = f"{small},{tmp_path / 'tiny.toml'}"
    result = run("compare", NET, "--on", both, "--mode", "fused", "--html", html)
    assert result.code == 0 and "float32 · fused" in result.out, "the heading is the processor's"
    line = next(line for line in result.out.splitlines() if line.split()[:1] == ["two-by-two"])
    assert "nJ" in line and mapped().seconds > 0
    assert "operands of their own width, whatever --dtype and --mode say: two-by-two int8" in result.out
    assert "because no op was timed on them: tiny" in result.out
    assert '<b>two-by-two</b> <span class="small">int8</span>' in html.read_text() and "<li>float32</li>" not in html.read_text()
    data = json.loads(run("compare", NET, "--on", both, "--json").out)
    rows = {row["target"]: row for row in data["targets"]}
    assert rows["two-by-two"]["dtype"] == "int8" and rows["tiny"]["dtype"] == "float32"
    assert rows["two-by-two"]["total"]["time_s"] == pytest.approx(mapped().seconds)


def bad_inputs(folder: Path, small: str) -> dict[str, tuple[list[str], str]]:
    (folder / "broken.json").write_text("{")
    (folder / "other.json").write_text('{"a": 1}')
    plan = next(one for one in mapped().layers if one.op.layer == "2").mapped.cost.plan.to_json()
    everything = [loop for level in plan["temporal"]["W"] for loop in level]
    on_chip = plan | {"temporal": {op: [everything] + [[] for _ in levels[1:]] for op, levels in plan["temporal"].items()}}
    (folder / "large.json").write_text(json.dumps(on_chip))
    (folder / "narrow.toml").write_text(ARRAY.replace('{ value = 1, unit = "Mib" }', "256"))
    (folder / "ws.toml").write_text(ARRAY.replace("[mac]", 'dataflows = ["ws"]\n[mac]', 1))
    tiny = ["map", NET, "--on", small]
    return {
        "unknown layer": ([*tiny, "--layer", "conv9"], "unknown layer 'conv9'"),
        "unknown dataflow": ([*tiny, "--dataflow", "wss"], "did you mean ws"),
        "a dataflow near none": ([*tiny, "--dataflow", "foo"], "known: any, compare, is, os, rs, ws"),
        "unknown objective": ([*tiny, "--objective", "speed"], "edp"),
        "dataflow the array cannot run": (["map", NET, "--on", str(folder / "ws.toml"), "--dataflow", "os"], "its control runs ws"),
        "nothing fits": (["map", NET, "--on", str(folder / "narrow.toml")], "B more than memory dram of two-by-two has"),
        "mapping too large": ([*tiny, "--layer", "2", "--mapping", str(folder / "large.json")], "B more than memory registers"),
        "mapping of another layer": ([*tiny, "--layer", "0", "--mapping", str(folder / "large.json")], "does not fit layer 0"),
        "broken mapping file": ([*tiny, "--layer", "2", "--mapping", str(folder / "broken.json")], "is not JSON"),
        "no mapping in the file": ([*tiny, "--layer", "2", "--mapping", str(folder / "other.json")], "holds no mapping"),
        "no mapping file": ([*tiny, "--layer", "2", "--mapping", str(folder / "none.json")], "No such file"),
        "mapping without layer": ([*tiny, "--mapping", str(folder / "large.json")], "--mapping without --layer"),
        "trace without layer": ([*tiny, "--trace", str(folder / "trace.json")], "--trace without --layer"),
        "mapping and dataflow": ([*tiny, "--layer", "2", "--mapping", str(folder / "large.json"), "--dataflow", "ws"], "not searched for"),
        "a processor": (["map", NET, "--on", "h200"], "h200 is a processor"),
        "unknown target": (["map", NET, "--on", "eyeris"], "eyeriss"),
        "phase of a CNN": ([*tiny, "--phase", "decode"], "phase"),
        "devices of an array": (["analyze", NET, "--on", small, "--devices", "2"], "is a spatial array"),
        "sweep of an array": (["analyze", NET, "--on", small, "--sweep", "bandwidth=1..4"], "is a spatial array"),
    }  # fmt: skip


def test_bad_input_is_three_lines_and_exit_code_2(run: Any, small: str, tmp_path: Path) -> None:
    for name, (args, words) in bad_inputs(tmp_path, small).items():
        out = tmp_path / "report.html"
        result = run(*args, "--html", out, "--no-advice")
        assert result.code == 2, (name, result.err)
        assert result.out == "" and "Traceback" not in result.err, name
        lines = [line for line in result.err.splitlines() if not line.endswith("…")]
        assert len(lines) == 3 and lines[1].startswith("  why: ") and lines[2].startswith("  do:  "), (name, result.err)
        assert words in result.err, (name, result.err)
        assert not out.exists() and not (tmp_path / "trace.json").exists(), name


def test_unwritable_files_are_errors(run: Any, small: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for option in ("--html", "--save-mappings"):
        result = run("map", NET, "--on", small, "--layer", "6", "--no-advice", option, tmp_path / "file" / "x")
        assert result.code == 2 and "cannot write" in result.err and "Traceback" not in result.err


def test_the_default_answers_at_once() -> None:
    """`ridgeline map` alone must not make anybody wait: its array has one dataflow and a fixed unrolling."""
    default = load_array(inspect.signature(map_model).parameters["on"].default)
    assert default.dataflows == ("ws",) and default.unroll
