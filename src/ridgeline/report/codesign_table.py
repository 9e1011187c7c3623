"""The front of a co-design search as text: one row a chip, the recommended one marked, and why.

Codesign.to_json() ──render_codesign──> heading, chips, recommendation, how much of the space was seen
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from . import format as fmt

HEADINGS = ("", "array", "registers", "local", "buffer", "DRAM", "network", "bits", "cores", "batch", "dataflow", "time", "energy", "area",
            "power", "used", "fused")  # fmt: skip


def chip_cells(row: Mapping[str, Any]) -> list[str]:
    """The parameters of a chip, in the order of HEADINGS without the mark and what it is worth."""
    chip, bits = row["chip"], row["chip"]["bits"]
    cores = chip["cores"]
    return [
        shape(chip["axes"]),
        *(capacity(chip[name]) for name in ("register_bits", "local_bits", "buffer_bits")),
        f"{chip['bandwidth_bits']} b",
        f"{chip['noc_bits']} b" if chip["noc_bits"] else fmt.MISSING,
        f"{bits['W']}/{bits['I']}/{bits['O']}",
        f"{cores['count']} {cores['use']}" if cores["count"] > 1 else "1",
        str(row["batch"]),
        str(row["dataflow"]),
    ]


def worth_cells(row: Mapping[str, Any], goal: str) -> list[str]:
    """Time, energy, area, power, utilisation and fused layers."""
    return [
        fmt.seconds(row["latency_s"] if goal == "latency" else row["sample_s"]),
        fmt.energy(row["energy_j"]),
        f"{fmt.significant(row['area_mm2'])} mm²",
        fmt.scaled(row["power_w"], "W"),
        fmt.percent(row["utilisation"]),
        str(sum(len(group) for group in row["fusion"])) if row["fusion"] else fmt.MISSING,
    ]


def shape(axes: Mapping[str, int]) -> str:
    """Rows x columns; axes of other names outermost first."""
    sizes = [axes["rows"], axes["columns"]] if set(axes) == {"rows", "columns"} else list(axes.values())[::-1]
    return "x".join(map(str, sizes))


def capacity(memories: Mapping[str, int]) -> str:
    """Bytes of the memories that play one part, together."""
    total = sum(memories.values())
    return fmt.size(total / 8) if total else fmt.MISSING


def coverage(data: Mapping[str, Any]) -> str:
    """What the front rests on."""
    counts = data["counts"]
    words = {"over_a_limit": "over a limit", "beaten_by_its_bound": "ruled out by their bounds", "impossible": "impossible"}
    others = [f"{counts[name]:,} {text}" for name, text in words.items() if counts.get(name)]
    seen = "all" if counts["seen"] == data["space"] else f"{counts['seen']:,}"
    return f"{seen} of {data['space']:,} chips seen: {counts['mapped']:,} mapped" + (f", {', '.join(others)}" if others else "")


def render_codesign(data: Mapping[str, Any], *, limit: int | None = 20, width: int | None = None) -> str:
    """At most `limit` chips, fastest first; the recommended one is always among them."""
    console = Console(
        file=io.StringIO(), width=width or max(100, shutil.get_terminal_size((160, 24)).columns), markup=False, highlight=False
    )
    limits = [f"at most {fmt.significant(value)} {unit}" for value, unit in
              ((data["limits"]["area_mm2"], "mm²"), (data["limits"]["power_w"], "W")) if value is not None]  # fmt: skip
    models = ", ".join(fmt.plain(model) for model in data["models"])
    console.print(" · ".join([f"co-design for {models} from {fmt.plain(data['base'])}", data["goal"], *limits]))
    console.print(_chips(data, limit))
    hidden = len(data["front"]) - (limit or len(data["front"]))
    if hidden > 0:
        console.print(f"  {hidden} more on the front; --rows 0 shows all")
    console.print(f"  * build this one: {data['reason']}")
    console.print(f"  {coverage(data)}; {data['method']}, seed {data['seed']}")
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.rstrip("\n")


def _chips(data: Mapping[str, Any], limit: int | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    rows = [("*" if place == data["best"] else "", row) for place, row in enumerate(data["front"])]
    shown = rows[:limit]
    if limit and data["best"] >= limit:
        shown = [*rows[: limit - 1], rows[data["best"]]]
    cells = [[mark, *chip_cells(row), *worth_cells(row, data["goal"])] for mark, row in shown]
    telling = [place for place in range(len(HEADINGS)) if {row[place] for row in cells} != {fmt.MISSING}]
    for place in telling:
        table.add_column(HEADINGS[place], justify="right" if place > 1 else "left", no_wrap=True)
    for row in cells:
        table.add_row(*(row[place] for place in telling))
    return table
