"""The command line as a user meets it: output forms, exit codes, errors in three lines, nothing half-written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from onnx import TensorProto, helper

TINY = """
version = 1
kind = "processor"
name = "tiny"
[units.alu.peak_flops]
float32 = 2e12
float16 = 2e12
[memories.dram]
bandwidth_bps = 1e12
capacity_bytes = 80e9
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)


def test_analyze_json_has_the_documented_fields(run, tiny: str) -> None:
    result = run("analyze", "resnet50", "--on", tiny, "--dtype", "float16", "--json")
    assert result.code == 0 and "analysing" in result.err
    data = json.loads(result.out)
    assert (data["model"], data["target"], data["batch"], data["dtype"]) == ("resnet50", "tiny", 1, "float16")
    assert {"flops", "bytes", "time_s", "bottleneck", "peak_activation_bytes"} <= set(data["total"])
    op = data["ops"][0]
    assert {"name", "layer", "kind", "flops", "bytes", "intensity", "time_s", "compute_s", "memory_s", "communication_s", "overhead_s",
            "roof_flops", "bottleneck", "cause"} <= set(op)  # fmt: skip
    assert op["flops"] == 236_027_904 and op["bytes"] == 1_925_504 and op["time_s"] == pytest.approx(118.0e-6, rel=1e-3)
    assert data["uncounted"] == [] and {"change", "predicted_speedup", "next_limit"} <= set(data["advice"][0])


def test_analyze_table_html_and_trace(run, tiny: str, tmp_path: Path) -> None:
    html, trace = tmp_path / "out" / "report.html", tmp_path / "trace.json"
    result = run("analyze", "resnet18", "--on", tiny, "--html", str(html), "--trace", str(trace), "--rows", "3", "--no-advice")
    assert result.code == 0 and "resnet18 on tiny" in result.out and "more ops" in result.out
    assert html.read_text().startswith("<!doctype html>") and json.loads(trace.read_text())["traceEvents"]


def test_sweep_and_compare(run, tiny: str, tmp_path: Path) -> None:
    data = json.loads(run("analyze", "resnet18", "--on", tiny, "--sweep", "batch=1..4", "--json").out)
    assert [p["value"] for p in data["points"]] == [1, 2, 4]
    html = tmp_path / "sweep.html"
    assert run("analyze", "resnet18", "--on", tiny, "--sweep", "bandwidth=0.5..2", "--html", str(html)).code == 0 and html.exists()
    data = json.loads(run("compare", "resnet18", "--on", f"{tiny},npu-256,h200", "--json").out)
    assert [t["target"] for t in data["targets"]] == ["tiny", "npu-256", "h200"]
    assert "npu-256" in run("compare", "resnet18", "--on", "npu-256,h200").out


def test_listings(run) -> None:
    assert "h200" in run("targets", "list").out and len(json.loads(run("targets", "list", "--json").out)) >= 9
    assert "llama-3-8b" in run("models").out and len(json.loads(run("models", "--json").out)) >= 11
    shown = run("targets", "show", "npu-256").out
    assert 'unit = "B/s"' in shown and 'source = "' in shown and 'status = "' in shown
    assert json.loads(run("env", "--json").out)["torch"]
    assert run("--version").out.startswith("ridgeline ")


def onnx_model(folder: Path, location: str | None = None) -> Path:
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 4], [0.0] * 16)
    if location:
        weight.ClearField("float_data")
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=location)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 4]) for n in ("x", "y"))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    path = folder / "model.onnx"
    path.write_bytes(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString())
    return path


def bad_inputs(folder: Path) -> dict[str, tuple[list[str], str]]:
    (folder / "broken.toml").write_text("kind = [")
    (folder / "twice.toml").write_text(TINY + "capacity_bytes = 1\n")
    (folder / "negative.toml").write_text(TINY.replace("1e12", "-1e12"))
    (folder / "field.toml").write_text(TINY.replace("capacity_bytes", "capacity_byte"))
    (folder / "weights.pt2").write_bytes(b"PK")
    (folder / "weights.pkl").write_bytes(b"\x80")
    (folder / "net.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(4, 4), torch.randn(2, 5)\n")
    whole = onnx_model(folder).read_bytes()
    (folder / "truncated.onnx").write_bytes(whole[: len(whole) // 2])
    (folder / "away").mkdir()
    outside = onnx_model(folder / "away", "../secret.bin")
    on = ["--on", "h200"]
    return {
        "unknown model": (["analyze", "resnet81", *on], "resnet18"),
        "unknown target": (["analyze", "resnet18", "--on", "h20"], "h200"),
        "missing file": (["analyze", str(folder / "none.onnx"), *on], "no such file"),
        "broken TOML": (["analyze", "resnet18", "--on", str(folder / "broken.toml")], "not valid TOML"),
        "duplicate key": (["analyze", "resnet18", "--on", str(folder / "twice.toml")], "not valid TOML"),
        "negative bandwidth": (["analyze", "resnet18", "--on", str(folder / "negative.toml")], "bandwidth_bps"),
        "unknown field": (["analyze", "resnet18", "--on", str(folder / "field.toml")], "did you mean capacity_bytes"),
        "truncated ONNX": (["analyze", str(folder / "truncated.onnx"), *on], "truncated.onnx"),
        "external data outside": (["analyze", str(outside), *on], "secret.bin"),
        "pt2": (["analyze", str(folder / "weights.pt2"), *on], "run code"),
        "pickle": (["analyze", str(folder / "weights.pkl"), *on], "run code"),
        "wrong input shape": (["analyze", f"{folder / 'net.py'}:build", *on], "does not run"),
        "no such factory": (["analyze", f"{folder / 'net.py'}:bild", *on], "build"),
        "phase of a CNN": (["analyze", "resnet18", *on, "--phase", "decode"], "phase"),
        "context too long": (["analyze", "gpt2", *on, "--context", "100000"], "1024"),
        "bad dtype": (["analyze", "resnet18", *on, "--dtype", "float33"], "float32"),
        "bad sweep": (["analyze", "resnet18", *on, "--sweep", "batch=x"], "batch=1..256"),
        "no link": (["analyze", "resnet18", "--on", "l4", "--devices", "2"], "links.peer"),
        "measuring elsewhere": (["profile", "resnet18", "--on", "npu-256"], "no CUDA"),
        "bad baseline name": (["profile", "resnet18", "--save-baseline", "../x"], "letters"),
        "bad variant": (["ab", "resnet18@speed=9", "resnet18"], "speed"),
        "nothing to compare": (["compare", "resnet18", "--on", ","], "nothing to compare"),
    }


def test_bad_input_is_three_lines_and_exit_code_2(run, tmp_path: Path) -> None:
    for name, (args, words) in bad_inputs(tmp_path).items():
        out = tmp_path / "report.html"
        extra = ["--html", str(out)] if args[0] in ("analyze", "compare", "profile") else []
        result = run(*args, *extra)
        assert result.code == 2, (name, result.err)
        assert result.out == "" and "Traceback" not in result.err, name
        assert words in result.err and "why:" in result.err and "do:" in result.err, (name, result.err)
        assert not out.exists(), name
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")], name


def test_unwritable_report_is_an_error_not_a_traceback(run, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("analyze", "alexnet", "--on", tiny, "--no-advice", "--html", str(tmp_path / "file" / "report.html"))
    assert result.code == 2 and "cannot write" in result.err


def test_unknown_option_is_refused() -> None:
    done = subprocess.run([sys.executable, "-m", "ridgeline.cli.main", "analyze", "--speed"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_llama_decode_on_h200_is_quick_and_small(tmp_path: Path) -> None:
    code = (
        "import resource, sys; sys.argv = ['ridgeline', 'analyze', 'llama-3-8b', '--on', 'h200', '--phase', 'decode', '--json'];"
        "import atexit; atexit.register(lambda: sys.stderr.write(f'peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}'));"
        "from ridgeline.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout)["total"]["flops"] > 15e9
    assert int(done.stderr.split("peak ")[1]) < 3_000_000  # kB
