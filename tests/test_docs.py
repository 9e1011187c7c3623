"""Figures in the docs come from committed result files, and the pages named in the navigation exist."""

from __future__ import annotations

import json
import re
from statistics import median

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
