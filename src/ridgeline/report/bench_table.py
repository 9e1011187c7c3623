"""Measured kernels as text: one line a row, then what needs attention.

{"machine", "ceilings", "rows"} ──render_bench──> heading, table, notes        [cases] ──render_ops──> one line an op

The figures after eager, compile and the best peer are how many times as fast ours is: below 1x, ours is slower.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from . import format as fmt

HEADINGS = ("op", "shape", "dtype", "pass", "ours", "host", "eager", "compile", "best peer", "of ceiling", "rate", "error", "status",
            "issue", "anchor")  # fmt: skip
COLOURS = {"at the roof": "green", "good": "green", "fair": "yellow", "slow": "red", "failed": "bold red"}
NOT_KERNELS = "these are the CPU references, not kernels: they only try the command out"


def heading(data: Mapping[str, Any]) -> str:
    """Machine, versions and ceilings in one line."""
    machine, ceilings = data["machine"], data["ceilings"]
    words = [fmt.plain(machine["name"]), f"torch {machine['torch']}"] + ([f"triton {machine['triton']}"] if machine.get("triton") else [])
    words += [f"copy {fmt.byte_rate(ceilings['copy_bps'])}", f"read {fmt.byte_rate(ceilings['read_bps'])}"]
    words += [f"{name} {fmt.flop_rate(rate)}" for name, rate in ceilings["flops"].items()]
    return " · ".join(words)


def cells(row: Mapping[str, Any]) -> list[str]:
    """The row in the order of HEADINGS."""
    ours = row["ours"]
    return [
        fmt.plain(row["op"]),
        "x".join(map(str, row["shape"])),
        row["dtype"],
        "f+b" if row["backward"] else "fwd",
        _milliseconds(ours["gpu_ms"]) if ours["gpu_ms"] else "error",
        f"{ours['host_us']:.1f} µs" if ours["host_us"] else fmt.MISSING,
        _times(row["vs_eager"], row["eager"]),
        _times(row["vs_compile"], row["compile"]),
        _peer(row),
        f"{fmt.percent(row['fraction'])} {row['ceiling']}" if row["fraction"] else fmt.MISSING,
        rate(row),
        _error(row),
        row["status"] or fmt.MISSING,
        row["issue"] or fmt.MISSING,
        anchor(row),
    ]


def rate(row: Mapping[str, Any]) -> str:
    """What was reached, in the unit of what limits the row."""
    if row["ceiling"] == "compute" and row["tflops"]:
        return fmt.flop_rate(row["tflops"] * 1e12)
    return fmt.byte_rate(row["gbps"] * 1e9) if row["gbps"] else fmt.MISSING


def anchor(row: Mapping[str, Any]) -> str:
    """Whether an anchor stays in its limit and beside the best of the others."""
    words = []
    if row["limit_ms"] is not None:
        words.append(f"{'within' if row['within_limit'] else 'OVER'} {_milliseconds(row['limit_ms'])}")
    if row["holds"] is not None:
        words.append("holds" if row["holds"] else f"LOST to {row['best']}" if row["best"] else "LOST")
    if row["regression"]:
        words.append(f"REGRESSION {row['regression']:.2f}x")
    return ", ".join(words) or fmt.MISSING


def notes(data: Mapping[str, Any]) -> list[str]:
    """Errors, regressions, tuning: what the table has no room for."""
    lines = [] if data["machine"].get("kernels", True) else [NOT_KERNELS]
    for row in data["rows"]:
        name = " ".join(cells(row)[:4])
        entries = {"ours": row["ours"], "eager": row["eager"], "compile": row["compile"], **row["peers"]}
        lines += [f"{name}: {who} failed: {timed['error']}" for who, timed in entries.items() if timed and timed["error"]]
        lines += [f"{name}: {who} waits for the GPU inside; its time holds those waits" for who, timed in entries.items()
                  if timed and timed["gpu_ms"] and not timed["ahead"]]  # fmt: skip
        if row["regression"]:
            lines.append(f"{name}: REGRESSION, {row['regression']:.2f}x the median of its last runs")
        spilled = [kernel["name"] for kernel in row["kernels"] if kernel["spills"]]
        lines += [f"{name}: {', '.join(spilled)} spill registers"] if spilled else []
        lines += [f"{name}: {text}" for text in (*row["tuned"], *row["notes"])]
    return [fmt.plain(line) for line in lines]


def summary(data: Mapping[str, Any]) -> str:
    """How many rows stand where."""
    rows = data["rows"]
    counts = [f"{sum(row['status'] == status for row in rows)} {status}" for status in COLOURS if any(r["status"] == status for r in rows)]
    anchors = [row for row in rows if row["size"] == "anchors"]
    words = [fmt.many(len(rows), "row"), *counts]
    if limited := [row for row in anchors if row["within_limit"] is not None]:
        words.append(f"{sum(row['within_limit'] for row in limited)} of {len(limited)} within their limits")
    if compared := [row for row in anchors if row["holds"] is not None]:
        words.append(f"{sum(row['holds'] for row in compared)} of {len(compared)} anchors hold against the best other")
    return " · ".join(words)


def render_bench(data: Mapping[str, Any], *, color: bool = False, width: int | None = None) -> str:
    """The whole answer of a run."""
    console = _console(color, width)
    console.print(heading(data))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    lines = [cells(row) for row in data["rows"]]
    telling = [place for place in range(len(HEADINGS)) if {line[place] for line in lines} - {fmt.MISSING}]
    for place in telling:
        table.add_column(HEADINGS[place], justify="right" if 4 <= place <= 11 else "left", no_wrap=True)
    for row, line in zip(data["rows"], lines, strict=True):
        style = COLOURS.get(row["status"], "") if color else ""
        table.add_row(*(line[place] for place in telling), style=style)
    console.print(table)
    console.print(f"  {summary(data)}")
    for note in notes(data):
        console.print(f"  {note}")
    return _text(console)


def render_ops(ops: Sequence[Mapping[str, Any]], width: int | None = None) -> str:
    """One line an op: name, directions, dtypes, size classes, anchors."""
    console = _console(False, width)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for op in ops:
        direction = "forward, backward" if op["differentiable"] else "forward"
        peers = f"peers {', '.join(op['peers'])}" if op["peers"] else ""
        table.add_row(op["op"], direction, ", ".join(op["dtypes"]), ", ".join(op["sizes"]), fmt.many(op["anchors"], "anchor"), peers)
    console.print(table)
    return _text(console)


def _console(color: bool, width: int | None) -> Console:
    columns = width or max(100, shutil.get_terminal_size((200, 24)).columns)
    return Console(file=io.StringIO(), width=columns, markup=False, highlight=False, force_terminal=color, soft_wrap=True)


def _text(console: Console) -> str:
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.rstrip("\n").splitlines())


def _milliseconds(value: float) -> str:
    return f"{value:.4f} ms" if value < 1 else f"{fmt.significant(value, 4)} ms"


def _times(ratio: float | None, timed: Mapping[str, Any] | None) -> str:
    if ratio is not None:
        return f"{ratio:.2f}x"
    return "error" if timed and timed["error"] else fmt.MISSING


def _peer(row: Mapping[str, Any]) -> str:
    timed = {name: one["gpu_ms"] for name, one in row["peers"].items() if one["gpu_ms"]}
    if not timed or not row["ours"]["gpu_ms"]:
        return "error" if row["peers"] else fmt.MISSING
    best = min(timed, key=lambda name: timed[name])
    return f"{best} {timed[best] / row['ours']['gpu_ms']:.2f}x"


def _error(row: Mapping[str, Any]) -> str:
    """Ours, and eager's where it differs by more than a tenth."""
    ours, eager = row["error_ours"], row["error_eager"]
    if ours is None:
        return fmt.MISSING
    same = eager is None or abs(ours - eager) <= 0.1 * max(ours, eager)
    return f"{ours:.1e}" if same else f"{ours:.1e} (eager {eager:.1e})"
