"""docs/search.md states the CIFAR-10 runs of benchmarks/results/search-cifar-h200.json: every row, and the mean of every group of seeds.

python -m tests.search.test_cifar_table     writes them there anew
"""

from __future__ import annotations

import json
import re
import statistics
from typing import Any

import pytest

from tests.support import ROOT

PAGE = ROOT / "docs" / "search.md"
RESULTS = ROOT / "benchmarks" / "results" / "search-cifar-h200.json"
BLOCK = re.compile(r"(?<=<!-- search-cifar -->\n).*?(?=<!-- end -->)", re.DOTALL)
SHARED = ("model", "recipe_hash", "held_out", "asked_epochs", "asked_seconds", "request")
Row = dict[str, Any]


def rows() -> list[Row]:
    found: list[Row] = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    return found


def cifar_table(found: list[Row]) -> str:
    head = ["network", "recipe", "seed", "search", "epochs", "in all", "parameters", "test accuracy", "with mirror images"]
    lines = [head, ["---"] * len(head)]
    for row in found:
        name = f"{row['model']}, {row['request']['strategy']}" if row.get("request") else row.get("network", row["model"])
        if row["held_out"]:
            continue  # settings tried on training images
        if row.get("summary"):
            if len(row["seeds"]) > 1:
                lines.append([name, row["recipe"], f"mean of {len(row['seeds'])}", "", "", f"{row['total_s_mean']:.0f} s", "",
                              spread(row, "accuracy"), spread(row, "accuracy_mirrored")])  # fmt: skip
            continue
        lines.append([name, row["recipe"], str(row["seed"]), f"{row['search_s'] or 0:.0f} s", str(row["epochs"]), f"{row['total_s']:.0f} s",
                      f"{row['parameters'] / 1e6:.1f} M", f"{row['accuracy']:.2%}", f"{row['accuracy_mirrored']:.2%}"])  # fmt: skip
    return "\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n\n"


def spread(row: Row, name: str) -> str:
    return f"{row[f'{name}_mean']:.2%} ± {100 * row[f'{name}_deviation']:.2f}"


def test_page_has_every_run() -> None:
    found = BLOCK.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None and found.group() == cifar_table(rows())


def test_readme_has_the_seeds() -> None:
    some = [row for row in rows() if row["model"] == "searched" and row["recipe"] == "cifar10-long" and not row.get("summary")]
    plain, mirrored = (" and ".join(f"{row[name]:.2%}" for row in some) for name in ("accuracy", "accuracy_mirrored"))
    times = " and ".join(f"{row['total_s']:.0f}" for row in some)
    assert f"| {plain} (with mirror images {mirrored}) in {times} s |" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_rows_add_up() -> None:
    for row in rows():
        if row.get("summary"):
            group = [one for one in rows() if not one.get("summary") and all(one.get(name) == row.get(name) for name in SHARED)]
            assert sorted(one["seed"] for one in group) == row["seeds"]
            assert row["accuracy_mean"] == pytest.approx(statistics.fmean(one["accuracy"] for one in group))
            continue
        assert row["test_rows"] == (row["held_out"] or 10_000) and row["train_rows"] == 50_000 - row["held_out"]
        assert row["total_s"] == pytest.approx((row["search_s"] or 0.0) + row["measure_s"] + row["train_s"] + row["evaluate_s"])


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda _: cifar_table(rows()), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
