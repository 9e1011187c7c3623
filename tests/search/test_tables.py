"""Figures of docs/search.md and the README are those of benchmarks/results/search-tables-cpu.json."""

from __future__ import annotations

import json
from typing import Any

from tests.support import ROOT


def rows(part: str) -> list[dict[str, Any]]:
    found = json.loads((ROOT / "benchmarks" / "results" / "search-tables-cpu.json").read_text(encoding="utf-8"))["rows"]
    return [row for row in found if row["part"] == part]


def table() -> str:
    lines = ["| strategy | test accuracy | worst seed | hypervolume, as seen | by test accuracy |", "| --- | --- | --- | --- | --- |"]
    fronts = {row["strategy"]: row for row in rows("front")}
    for row in rows("accuracy"):
        front = fronts[row["strategy"]]
        lines.append(
            f"| `{row['strategy']}` | {row['test_mean']:.2f} ± {row['test_std']:.2f} | {row['test_worst']:.2f} "
            f"| {front['seen_mean']:.2f} ± {front['seen_std']:.2f} | {front['test_mean']:.2f} ± {front['test_std']:.2f} |"
        )
    best = rows("best")[0]
    lines.append(
        f"| all {best['points']:,} cells | {best['test']:.2f} | - | {best['seen_hypervolume']:.2f} | {best['test_hypervolume']:.2f} |"
    )
    return "\n".join(lines)


def test_page_has_the_measured_rows() -> None:
    page = (ROOT / "docs" / "search.md").read_text(encoding="utf-8")
    assert page.split("<!-- search-tables -->")[1].split("<!-- end -->")[0].strip() == table()


def test_readme_and_goals() -> None:
    by = {row["strategy"]: row for row in rows("accuracy")}
    model, random, tpe = (by[name]["test_mean"] for name in ("model", "random", "tpe"))
    told = f"{model:.2f} % over {by['model']['seeds']} seeds (random {random:.2f}, Optuna's TPE {tpe:.2f})"
    assert told in (ROOT / "README.md").read_text(encoding="utf-8")
    assert by["model"]["seeds"] == 100 and by["model"]["trials"] == 100 and by["model"]["test_mean"] >= 94.15
    fronts = {row["strategy"]: row for row in rows("front")}
    assert fronts["model"]["seen_mean"] > fronts["tpe"]["seen_mean"]
