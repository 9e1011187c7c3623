"""docs/supernet.md states the supernet steps of benchmarks/results/search-step-h200.json; without that file, that they are not measured.

python -m tests.search.test_step_table     writes them there anew, and search-policies-*.json: how policies converge
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from tests.support import ROOT

PAGE = ROOT / "docs" / "supernet.md"
RESULTS = ROOT / "benchmarks" / "results" / "search-step-h200.json"
BLOCK = re.compile(r"(?<=<!-- search-step -->\n).*?(?=<!-- end -->)", re.DOTALL)
POLICIES = re.compile(r"(?<=<!-- search-policies -->\n).*?(?=<!-- end -->)", re.DOTALL)
GOALS = {("all", 64): (100, 2.8), ("all", 256): (400, None), ("sample", 64): (60, 1.5)}
"""(way, batch) → at most so many ms, GB."""
NOT_YET = "\nNot measured yet.\n\n"
Row = dict[str, Any]


def goal(row: Row) -> str:
    if (row["way"], row["batch"]) not in GOALS:
        return "-"
    ms, gb = GOALS[row["way"], row["batch"]]
    met = row["step_ms"] <= ms and (gb is None or row.get("peak_gb", float("inf")) <= gb)  # not known is not met
    said = f"{ms} ms" + (f", {gb} GB" if gb else "")
    return f"{said}: met" if met else f"**{said}: missed**"


def cells(row: Row) -> list[str]:
    """One line of the table; a case that failed or was cut says so."""
    named = [str(row["batch"]), row["way"]]
    if row.get("step_ms") is None:
        return [*named, f"failed: {row['error']}", *["-"] * 5]
    peak, busy, plain = row.get("peak_gb"), row.get("busy"), row.get("against_plain")
    return [
        *named, f"{row['step_ms']:.1f}", f"{peak:.2f}" if peak is not None else "-", f"{busy:.0%}" if busy is not None else "-",
        f"{row.get('skipped_share', 0):.0%}", f"{plain:.1f}" if plain is not None else "-", goal(row),
    ]  # fmt: skip


def step_table(path: Path = RESULTS) -> str:
    if not path.exists():
        return NOT_YET
    found = json.loads(path.read_text(encoding="utf-8"))["rows"]
    head = ("batch", "way", "a step, ms", "peak, GB", "GPU busy", "op work skipped", "times as fast as plain", "goal")
    update = [row for row in found if row["way"] == "architecture update"]
    steps = sorted((row for row in found if row not in update), key=lambda row: row["batch"])
    lines = [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *(cells(row) for row in steps))]
    for row in steps:
        if row["error"] and row.get("step_ms") is not None:
            lines += ["", f"{row['way']}, batch {row['batch']}, was timed and then failed: {row['error']}."]
    for row in update:
        said = f"{row['ratio']:.1f} times as fast as a loop over edges" if not row["error"] else f"failed: {row['error']}"
        lines += ["", f"The architecture's own update, {row['edges']} edges of {row['ops']} ops in one tensor: {said}."]
    return "\n" + "\n".join(lines) + "\n\n"


def policies_table() -> str:
    """A line for each machine and policy: means over seeds."""
    lines = [
        "| data, space | policy | seeds | training loss at the end | validation loss | op work skipped | ended early | derived network |",
        f"|{' --- |' * 8}",
    ]
    for path in sorted(RESULTS.parent.glob("search-policies-*.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        for policy in dict.fromkeys(row["policy"] for row in rows):
            mine = [row for row in rows if row["policy"] == policy]
            last = [row["curve"][-1] for row in mine]
            means = [statistics.fmean(one[name] for one in last) for name in ("train_loss", "valid_loss", "skipped_share")]
            scores = [100 * row["accuracy"] for row in mine]
            spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
            lines.append(
                f"| {mine[0]['data']}, {mine[0]['space']} | `{policy}` | {len(mine)} | {means[0]:.3f} | {means[1]:.3f} | {means[2]:.0%} "
                f"| {sum(bool(row['stopped']) for row in mine)} | {statistics.fmean(scores):.2f}{spread} % |"
            )
    return "\n" + "\n".join(lines) + "\n\n"


def test_page_has_the_measured_steps() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert BLOCK.findall(page) == [step_table()] and POLICIES.findall(page) == [policies_table()]


def test_goals_that_are_missed_and_cases_that_fail_are_said(tmp_path: Path) -> None:
    case = {"peak_gb": 1.7, "busy": 0.99, "skipped_share": 0.0, "against_plain": None, "error": None}
    made = [
        {**case, "way": "sample", "batch": 64, "step_ms": 214.0},
        {**case, "way": "all", "batch": 64, "step_ms": 51.5},
        {**case, "way": "all", "batch": 256, "step_ms": 401.0},
        {"way": "plain", "batch": 64, "error": "OutOfMemoryError: no"},
        {"way": "partial", "batch": 256, "step_ms": 9.0, "error": "RuntimeError: no profile"},
        {"way": "architecture update", "edges": 28, "ops": 8, "step_ms": 1.0, "loop_ms": 5.0, "ratio": 5.0, "error": None},
    ]
    (tmp_path / "rows.json").write_text(json.dumps({"rows": made}), encoding="utf-8")
    told = step_table(tmp_path / "rows.json")
    assert told.count("missed") == 2 and told.count(": met") == 1 and "| 64 | plain | failed: OutOfMemoryError: no |" in told
    assert "partial, batch 256, was timed and then failed: RuntimeError: no profile." in told
    assert "5.0 times as fast as a loop" in told and step_table(tmp_path / "none.json") == NOT_YET


def write() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for block, table in ((BLOCK, step_table()), (POLICIES, policies_table())):
        page, count = block.subn(lambda _, table=table: table, page)  # type: ignore[misc]
        assert count == 1, f"{PAGE.name}: {count} places for a table"
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write()
