"""docs/kernels.md states decoder layers and products of benchmarks/results/kernel-decode-h200.json, as configured."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from tests.support import ROOT


def rows() -> list[dict[str, Any]]:
    found = json.loads((ROOT / "benchmarks" / "results" / "kernel-decode-h200.json").read_text(encoding="utf-8"))
    return list(found["rows"])


def decode_table() -> str:
    layers = [row for row in rows() if row["op"] == "layer"]
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


def product_table() -> str:
    """One row of x by the weights of a layer of Llama 3 8B, overlapping: microseconds and share of the limit."""
    lines = ["| outputs x K | int8, µs | % of the limit | int4, µs | % of the limit |", "| --- | --- | --- | --- | --- |"]
    for n, k, gated in ((6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False)):
        cells = []
        for bits in (8, 4):
            found = next(
                row for row in rows()
                if row["op"] == f"gemv_{bits}" and row["shape"] == [1, n, k] and row["gated"] == gated and row["overlap"]
            )  # fmt: skip
            assert found["config"] is None and found["right"]
            cells += [f"{found['us']:.1f}", f"{100 * found['of_limit']:.0f}"]
        lines.append(f"| {n} x {k}{' of gate and up' if gated else ''} | {' | '.join(cells)} |")
    return "\n".join(lines)


def between(marker: str) -> str:
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    return page.split(f"<!-- {marker} -->")[1].split("<!-- end -->")[0].strip()


def test_page_has_the_measured_layers_and_products() -> None:
    assert between("kernel-decode") == decode_table()
    assert between("kernel-products") == product_table()


def test_the_table_takes_what_is_fastest_in_a_layer_before_what_is_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    fastest = importlib.import_module("kernel_decode").fastest
    alone = [{"op": "gemv_8", "shape": [1, 6, 4], "gated": False, "config": {"bn": bn}, "right": right, "us": us}
             for bn, right, us in ((1, True, 3.0), (2, True, 2.0), (4, False, 1.0))]  # fmt: skip
    layer = [{"op": "layer", "shape": [8], "config": {"bn": bn}, "line": "gemv_8|1,6,4,False", "right": right, "us": us}
             for bn, right, us in ((8, True, 50.0), (1, True, 40.0), (2, False, 30.0))]  # fmt: skip
    whole = [{"op": "layer", "shape": [8], "config": None, "us": 9.0}, {"op": "layer", "shape": [8], "config": None, "failed": "no room"}]
    assert {name: row["config"] for name, row in fastest([*alone, *whole]).items()} == {"gemv_8|1,6,4,False": {"bn": 2}}
    assert {name: row["config"] for name, row in fastest([*layer, *alone]).items()} == {"gemv_8|1,6,4,False": {"bn": 1}}
