"""docs/search.md states the CIFAR-10 runs of benchmarks/results/search-cifar-h200.json: every row, and the mean of every group of seeds.

python -m tests.search.test_cifar_table     writes them there anew
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
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
    plain, mirrored = (listed(f"{row[name]:.2%}" for row in some) for name in ("accuracy", "accuracy_mirrored"))
    times = listed(f"{row['total_s']:.0f}" for row in some)
    assert f"| {plain} (with mirror images {mirrored}) in {times} s |" in (ROOT / "README.md").read_text(encoding="utf-8")


def listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}"


def test_page_has_the_hand_made_network() -> None:
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    made = next(row for row in rows() if row["model"] == "matched" and not row.get("summary"))
    found = next(row for row in rows() if row.get("genotype") == made["genotype"] and row["model"] == "searched" and not row.get("summary"))
    assert f"{made['latency_ms']:.3f} ms a pass beside {made['found_latency_ms']:.3f} ms" in page
    assert f"reached {made['accuracy']:.2%} where the winner had {found['accuracy']:.2%}".replace("%", " %") in page
    assert found["accuracy"] > made["accuracy"] and made["latency_ms"] >= made["found_latency_ms"]
    assert (found["recipe_hash"], found["asked_seconds"], found["seed"]) == (made["recipe_hash"], made["asked_seconds"], made["seed"])


def test_page_has_the_fronts() -> None:
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    both = json.loads((RESULTS.parent / "search-fronts-h200.json").read_text(encoding="utf-8"))["rows"]
    (gpu, array), last = both[:2], both[2]
    assert last["shared"] == 0 and "No network is on both fronts" in page
    share = [row["hypervolume"] for row in (gpu, array)]
    assert f"its own front has {share[0]['h200']:.3f} of the box of both and the other's {share[1]['h200']:.3f}" in page
    assert f"its own has {share[1]['eyeriss']:.3f} and the H200's {share[0]['eyeriss']:.3f}" in page
    beaten = [row["beaten"]["eyeriss"] for row in (gpu, array)]
    assert f"{beaten[0]} of the H200's networks are beaten there, {beaten[1]} of Eyeriss's {len(array['front'])}" in page
    assert {row["trials"] for row in (gpu, array)} == {40}


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
