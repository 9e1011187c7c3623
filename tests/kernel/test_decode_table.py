"""docs/kernels.md states the decoder layers of benchmarks/results/kernel-decode-h200.json, as configured."""

from __future__ import annotations

import json

from tests.support import ROOT


def decode_table() -> str:
    found = json.loads((ROOT / "benchmarks" / "results" / "kernel-decode-h200.json").read_text(encoding="utf-8"))["rows"]
    layers = [row for row in found if row["op"] == "layer"]
    lines = [
        "| a layer of | weights, bits | every part apart, µs | five launches, µs | the limit, µs | % of it |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for model in ("8b", "1.1b"):
        for bits in (16, 8, 4):
            mine = [row for row in layers if row["shape"][0] == bits and row["way"].startswith(model + " ")]
            apart = next(row for row in mine if row["way"].endswith("apart"))
            best = next(row for row in mine if row["overlap"] and row["config"] is None)
            limit = best["us"] * best["of_limit"]
            lines.append(f"| {model} | {bits} | {apart['us']:.1f} | {best['us']:.1f} | {limit:.1f} | {100 * best['of_limit']:.0f} |")
    return "\n".join(lines)


def test_page_has_the_measured_layers() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert page.split("<!-- kernel-decode -->")[1].split("<!-- end -->")[0].strip() == decode_table()
