"""docs/search.md and the README state what results/search-lut-*.json have; the goals, on the CPU: 10 % on 50 networks, rank 0.95."""

from __future__ import annotations

import json
from typing import Any

from tests.support import ROOT


def rows(label: str = "cpu") -> list[dict[str, Any]]:
    text = (ROOT / "benchmarks" / "results" / f"search-lut-{label}.json").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = json.loads(text)["rows"]
    return found


def lut_table(label: str = "cpu") -> str:
    modes = label != "cpu"
    lines = [
        f"| space |{' mode |' if modes else ''} blocks | networks | off by, mean | 90th of 100 | worst | rank "
        "| FLOPs: mean | worst | rank |",
        "|" + " --- |" * (11 if modes else 10),
    ]
    for row in rows(label):
        ours = f"{row['mean']:.1%} | {row['p90']:.1%} | {row['worst']:.1%} | {row['spearman']:.3f}"
        flops = f"{row['flops_mean']:.1%} | {row['flops_worst']:.1%} | {row['flops_spearman']:.3f}"
        lines.append(f"| {row['space']} |{' ' + row['mode'] + ' |' if modes else ''} {row['blocks']} | {row['nets']} | {ours} | {flops} |")
    return "\n".join(lines)


def test_pages_have_the_measured_rows() -> None:
    page = (ROOT / "docs" / "search.md").read_text(encoding="utf-8")
    assert page.split("<!-- search-lut -->")[1].split("<!-- end -->")[0].strip() == lut_table()
    assert page.split("<!-- search-lut-h200 -->")[1].split("<!-- end -->")[0].strip() == lut_table("h200")
    worst, rank = max(row["worst"] for row in rows()), min(row["spearman"] for row in rows())
    flops = f"{max(row['flops_worst'] for row in rows()):.1%}, {min(row['flops_spearman'] for row in rows()):.2f}"
    told = f"off by {worst:.1%} at most, rank correlation {rank:.2f} at least (by FLOPs: {flops})"
    assert told in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_goals_are_reached() -> None:
    assert {row["space"] for row in rows()} == {"nb201", "darts", "macro"}
    assert all(row["nets"] == 50 and row["worst"] <= 0.1 and row["spearman"] >= 0.95 for row in rows())
