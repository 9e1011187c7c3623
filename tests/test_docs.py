"""Figures in the docs come from committed result files, and the pages named in the navigation exist."""

from __future__ import annotations

import json
import re
from statistics import median
from typing import Any

import pytest

from tests.support import ROOT


@pytest.mark.parametrize("label", ["cpu", "h200"])
def test_accuracy_page_equals_its_results(label: str) -> None:
    data = json.loads((ROOT / "benchmarks" / "results" / f"analyze-latency-{label}.json").read_text())
    assert {"schema", "machine", "versions", "commit", "command", "rows"} <= set(data) and re.fullmatch(r"[0-9a-f]{40}", data["commit"])
    page, readme = (ROOT / "docs" / "accuracy.md").read_text(), (ROOT / "README.md").read_text()
    for row in data["rows"]:
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
        times = f"{row['predicted_s'] * 1e3:.3f} ms | {row['measured_s'] * 1e3:.3f} ms | {row['error']:+.1%}"
        assert f"| {row['model']} | {row['batch']} | {row['dtype']} | {row['limit_s'] * 1e3:.3f} ms | {times} |" in page
    errors = [abs(row["error"]) for row in data["rows"]]
    summary = f"mean absolute error {sum(errors) / len(errors):.1%}, median {median(errors):.1%}, worst {max(errors):.1%}"
    assert summary in page and summary in readme


def test_cpu_predictions_hold_the_bar() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "analyze-latency-cpu.json").read_text())["rows"]
    wanted = {(model, batch) for model in ("resnet18", "mobilenet-v2", "vit-b16", "bert-base") for batch in (1, 8)}
    assert {(row["model"], row["batch"]) for row in rows} == wanted
    assert all(abs(row["error"]) <= 0.30 for row in rows)


def test_navigation_and_pictures_exist() -> None:
    pages = re.findall(r":\s*([\w-]+\.md)", (ROOT / "mkdocs.yml").read_text())
    assert len(pages) >= 9 and all((ROOT / "docs" / page).exists() for page in pages)
    for text in ("README.md", *(f"docs/{page}" for page in pages)):
        base = ROOT / text
        for link in re.findall(r"\]\(([^)#:]+)\)", base.read_text()):
            assert (base.parent / link).exists(), f"{text}: {link}"


def results(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    assert {"schema", "machine", "versions", "commit", "command", "rows"} <= set(data) and re.fullmatch(r"[0-9a-f]{40}", data["commit"])
    return data


def search_summary() -> dict[tuple[str, str], str]:
    """The page's table of search times: one line an array and objective."""
    rows = [row for row in results("npu-search-cpu")["rows"] if row["layer"] != "all"]
    lines = {}
    for target, objective in dict.fromkeys((row["target"], row["objective"]) for row in rows):
        chosen = [row for row in rows if (row["target"], row["objective"]) == (target, objective)]
        cpu = [row["cpu_s"] for row in chosen]
        best = sum(row["optimal_within_space"] for row in chosen)
        times = f"{sum(cpu) / len(cpu):.2f} s | {max(cpu):.2f} s"
        lines[target, objective] = (
            f"| {target} | {objective} | {times} | {best} of {len(chosen)} | {max(row['gap'] for row in chosen):.0%} |"
        )
    return lines


def test_npu_page_equals_its_search_results() -> None:
    page, readme = (ROOT / "docs" / "npu.md").read_text(), (ROOT / "README.md").read_text()
    for line in search_summary().values():
        assert line in page, line
    rows = results("npu-search-cpu")["rows"]
    for row in rows:
        if row["layer"] == "all":
            assert f"| {row['model']}, {row['layers']} layers | {row['target']} | {row['objective']} | {row['cpu_s']:.1f} s |" in page
        elif row["objective"] == "energy" and row["zigzag_energy_pj"]:
            assert row["energy_pj"] <= row["zigzag_energy_pj"]
            both = f"{row['zigzag_energy_pj'] / 1e6:.1f} µJ | {row['energy_pj'] / 1e6:.1f} µJ"
            assert f"| {row['layer']} | {row['target']} | {both} | {row['energy_pj'] / row['zigzag_energy_pj'] - 1:+.1%} |" in page
    layers = [row["cpu_s"] for row in rows if row["layer"] != "all" and row["objective"] == "energy"]
    assert f"{sum(layers) / len(layers):.2f} CPU s a layer" in readme


def test_npu_search_holds_its_bars() -> None:
    rows = results("npu-search-cpu")["rows"]
    for target in ("tpu-like", "eyeriss-like"):
        for objective in ("energy", "edp", "latency"):
            cpu = [r["cpu_s"] for r in rows if (r["target"], r["objective"]) == (target, objective) and r["layer"] != "all"]
            assert len(cpu) == 12 and sum(cpu) / len(cpu) < 1.0
        assert all(r["cpu_s"] < 30 for r in rows if r["layer"] == "all" and r["target"] == target)


def test_npu_page_equals_its_silicon_results() -> None:
    page = (ROOT / "docs" / "npu.md").read_text()
    for row in results("npu-silicon-eyeriss")["rows"]:
        assert abs(row["error"]) <= 0.10
        times = f"{row['measured_ms']:.1f} ms | {row['modelled_ms']:.2f} ms | {row['error']:+.1%} | {row['computing_ms']:.2f} ms"
        assert f"| {row['layer']} | {times} | {row['passes']} |" in page
    worst = max(abs(row["error"]) for row in results("npu-silicon-eyeriss")["rows"])
    assert f"processing time within {worst:.1%} of the chip" in (ROOT / "README.md").read_text()


def test_npu_page_equals_its_lowering_results() -> None:
    page = (ROOT / "docs" / "npu.md").read_text()
    rows = [row for row in results("npu-lowering-cpu")["rows"] if row["nest"] == "recommended"]
    assert any("256 to 256" in row["layer"] for row in rows)
    for row in rows:
        assert f"| {row['layer']} | {row['speedup']:.1f}x |" in page
        assert row["speedup"] >= 5 or "256 to 256" not in row["layer"]


def test_npu_page_equals_its_schedule_results() -> None:
    page = (ROOT / "docs" / "npu.md").read_text()
    hidden = [abs(row["difference"]) for row in results("npu-schedule-model")["rows"] if row["refills_hide"]]
    near = sum(difference <= 0.01 for difference in hidden)
    assert f"of {len(hidden)} mappings whose refills hide, {near} within 1 %, the worst {max(hidden) * 100:.1f} % apart" in page
