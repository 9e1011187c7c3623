"""Figures of docs/llm.md and the README are those of the committed result files.

benchmarks/results/llm-cpu-cpu.json ──cpu_table──> the text between <!-- llm-cpu --> and <!-- end -->
benchmarks/results/llm-gpu-h200.json ──gpu_table, serving_table──> llm-gpu, llm-serving
"""

from __future__ import annotations

import json
from typing import Any

from tests.support import ROOT


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))["rows"]
    return found


def cpu_table() -> str:
    lines = ["| weights | bytes a token, MB | tokens/s | times bf16 | limit, tokens/s | % of it |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows("llm-cpu-cpu.json"):
        lines.append(
            f"| {row['weights']} | {row['bytes_per_token'] / 1e6:.0f} | {row['tokens_per_s']:.1f} | {row['times_bf16']:.2f} "
            f"| {row['limit_tokens_per_s']:.0f} | {row['percent_of_limit']:.0f} |"
        )
    return "\n".join(lines)


GOALS = {"8b-bf16": 245, "8b-int8": 400, "8b-int4": 550, "1.1b-bf16": 1200, "1.1b-int8": 1700}


def gpu_table() -> str:
    lines = ["| shape and weights | tokens/s | goal | limit, tokens/s | % of it | ready, s |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows("llm-gpu-h200.json"):
        if row["case"] == "decode":
            lines.append(
                f"| {row['name']} | {row['tokens_per_s']:,.0f} | {GOALS[row['name']]:,} | {row['limit_tokens_per_s']:,.0f} "
                f"| {row['percent_of_limit']:.0f} | {row['ready_s']:.0f} |"
            )
    return "\n".join(lines)


def serving() -> dict[str, Any]:
    return next(row for row in rows("llm-gpu-h200.json") if row["case"] == "serving")


def serving_table() -> str:
    row = serving()
    first, between = row["first_token_ms"], row["inter_token_ms"]
    return "\n".join((
        "| requests | tokens in | out | output tokens/s | one at a time | times | first token p50, p99, s | between tokens p50, p99, ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        f"| {row['requests']} | {row['prompt'][0]} to {row['prompt'][1]:,} | {row['new']} | {row['output_tokens_per_s']:,.0f} "
        f"| {row['alone']['output_tokens_per_s']:.0f} | {row['times_faster']:.1f} | {first['p50'] / 1e3:.1f}, {first['p99'] / 1e3:.1f} "
        f"| {between['p50']:.0f}, {between['p99']:.0f} |",
    ))  # fmt: skip


def test_page_has_the_measured_rows() -> None:
    page = (ROOT / "docs" / "llm.md").read_text(encoding="utf-8")
    assert page.split("<!-- llm-cpu -->")[1].split("<!-- end -->")[0].strip() == cpu_table()
    assert page.split("<!-- llm-gpu -->")[1].split("<!-- end -->")[0].strip() == gpu_table()
    assert page.split("<!-- llm-serving -->")[1].split("<!-- end -->")[0].strip() == serving_table()


def test_readme_states_what_was_measured() -> None:
    by = {row["weights"]: row for row in rows("llm-cpu-cpu.json")}
    told = (
        f"int8 {by['int8']['times_bf16']:.2f}x, int4 {by['int4']['times_bf16']:.2f}x bfloat16; "
        f"{by['bf16']['percent_of_limit']:.0f}, {by['int8']['percent_of_limit']:.0f} and {by['int4']['percent_of_limit']:.0f}% of the limit"
    )
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert told in readme
    fast = {row["name"]: row for row in rows("llm-gpu-h200.json")}
    speeds, shares = (
        [f"{fast[f'8b-{bits}'][key]:.0f}" for bits in ("bf16", "int8", "int4")] for key in ("tokens_per_s", "percent_of_limit")
    )
    assert (
        f"{speeds[0]}, {speeds[1]} and {speeds[2]} tokens/s" in readme
        and f"{shares[0]}, {shares[1]} and {shares[2]}% of the limit; 256 requests" in readme
    )
    served = serving()
    assert f"{served['output_tokens_per_s']:,.0f}, {served['times_faster']:.1f}x one at a time" in readme


def test_one_sequence_and_many_reach_the_goals() -> None:
    decoded = [row for row in rows("llm-gpu-h200.json") if row["case"] == "decode"]
    assert all(row["tokens_per_s"] >= GOALS[row["name"]] and row["ready_s"] < 30 for row in decoded)
    assert serving()["times_faster"] >= 10 and serving()["unfinished"] == 0
