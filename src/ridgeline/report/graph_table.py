"""An optimised graph as text: what each pass did and why not elsewhere, what could be fused, where the memory lies.

    Change of `optimize` ──render_optimized──> before and after, passes, refusals with reasons, opportunities, memory plan, notes
      pass_rows, refusal_rows, opportunity_rows, memory_lines: the same lines for the page

Rows of passes are in the order they ran. A gain that nobody predicted or measured reads "–".
"""

from __future__ import annotations

import io
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..core.change import Change
from . import format as fmt
from .change_table import HEADINGS, notes, rows, summary

PASS_HEADINGS = ("pass", "round", "nodes before", "after", "changed", "refused", "bytes saved", "predicted", "measured", "error")
REFUSAL_HEADINGS = ("pass", "places", "why not", "for example")
OPPORTUNITY_HEADINGS = ("pattern", "pass", "fusable", "of", "bytes saved", "for example")
MOST_REASONS = 12


def pass_rows(change: Change) -> list[list[str]]:
    """One line for each run of a pass that changed or refused something."""
    lines = []
    for one in change.details.get("passes", ()):
        if not one["changed_sites"] and not one["refused_sites"]:
            continue
        saved = one["saved_bytes"]
        lines.append(
            [
                fmt.plain(one["name"]),
                str(one["round"]),
                f"{one['nodes_before']:,}",
                f"{one['nodes_after']:,}",
                f"{one['changed_sites']:,}",
                f"{one['refused_sites']:,}",
                fmt.size(saved) if saved else "",
                _gain(one["predicted_gain"]) if one["changed"] else "",
                _gain(one["measured_gain"]) if one["changed"] else "",
                f"{one['check_error']:.1e}" if one["changed"] and one["check_error"] is not None else "",
            ]
        )
    return lines


def _gain(ratio: float | None) -> str:
    return fmt.MISSING if ratio is None else f"{ratio:.2f}x"


def idle_line(change: Change) -> str:
    """The passes that found no place at all."""
    busy = {one["name"] for one in change.details.get("passes", ()) if one["changed_sites"] or one["refused_sites"]}
    idle = [one["name"] for one in change.details.get("passes", ()) if one["name"] not in busy]
    return f"nothing to do for: {', '.join(map(fmt.plain, dict.fromkeys(idle)))}" if idle else ""


def refusal_rows(change: Change) -> list[list[str]]:
    """(pass, how many places, why, one of them), the most frequent first."""
    counted: Counter[tuple[str, str]] = Counter()
    example: dict[tuple[str, str], Mapping[str, Any]] = {}
    rounds: dict[str, int] = {}
    for one in change.details.get("passes", ()):
        if rounds.setdefault(one["name"], one["round"]) != one["round"]:
            continue  # a place that was refused once is refused in every round
        for place in one["refused"]:
            key = (one["name"], re.sub(r"\d[\d,.]*( [mµn]?s)?", "#", place["what"]))  # places that differ in a number are alike
            counted[key] += 1
            example.setdefault(key, place)
    lines = []
    for key, count in counted.most_common():
        where = example[key]["layer"] or ", ".join(example[key]["nodes"][:2])
        lines.append(
            [fmt.plain(key[0]), f"{count:,}", fmt.crop(fmt.plain(example[key]["what"]), 90), fmt.crop(fmt.plain(where), 40, keep="end")]
        )
    return lines


def opportunity_rows(change: Change) -> list[list[str]]:
    """Patterns of the model as it came, those that occur."""
    return [
        [
            fmt.plain(one["pattern"]),
            fmt.plain(one["by"]) or fmt.MISSING,
            f"{one['fusable']:,}",
            f"{one['total']:,}",
            fmt.size(one["saved_bytes"]) if one["saved_bytes"] else "",
            fmt.crop(fmt.plain(", ".join(map(str, one["examples"][:2]))), 60),
        ]
        for one in change.details.get("opportunities", ())
        if one["total"]
    ]


def memory_lines(change: Change) -> list[str]:
    """The plan in words; nothing where no memory was planned."""
    plan = change.details.get("memory")
    if not plan:
        return []
    bound, workspace = plan["lower_bound_bytes"], plan["workspace_bytes"]
    over = fmt.signed_percent(plan["arena_bytes"] / bound - 1) if bound else fmt.MISSING
    beside = "workspace not measured" if workspace is None else f"workspace {workspace:,} B beside it"
    lines = [
        f"memory plan: arena {plan['arena_bytes']:,} B, {over} against the lower bound {bound:,} B (most that lives at once); {beside}; "
        f"{fmt.many(len(plan['intervals']), 'tensor')}, {fmt.plain(plan['method'])}"
    ]
    if not plan["used"]:
        lines.append("the model does not run inside the arena: ask for memory='static' (--static), which measures the workspace too")
    if again := plan.get("recomputed"):
        lines.append(fmt.plain(again["said"]))
    return lines


def heading(change: Change) -> str:
    nodes = change.details.get("nodes", {})
    told = f" · {nodes['before']:,} nodes to {nodes['after']:,}" if nodes else ""
    return f"{fmt.plain(change.name)} · {fmt.plain(change.model)} on {fmt.plain(change.target)}{told}"


def render_optimized(change: Change, *, color: bool = False, width: int | None = None) -> str:
    """The whole answer as text."""
    columns = width or max(110, shutil.get_terminal_size((160, 24)).columns)
    console = Console(file=io.StringIO(), width=columns, markup=False, highlight=False, force_terminal=color, soft_wrap=True)
    console.print(heading(change), style="bold" if color else None)
    console.print(_table(HEADINGS, rows(change)))
    console.print(_table(PASS_HEADINGS, pass_rows(change), left=1))
    if idle := idle_line(change):
        console.print(f"  {idle}")
    if refused := refusal_rows(change):
        console.print(_table(REFUSAL_HEADINGS, refused[:MOST_REASONS], left=4))
        if len(refused) > MOST_REASONS:
            console.print(f"  {fmt.many(len(refused) - MOST_REASONS, 'more reason')} in --json and --html")
    if found := opportunity_rows(change):
        console.print("fusion opportunities of the model as it came", style="bold" if color else None)
        console.print(_table(OPPORTUNITY_HEADINGS, found, left=2))
    for line in memory_lines(change):
        console.print(f"  {line}")
    for note in notes(change):
        console.print(f"  {note}")
    console.print(summary(change), style="bold" if color else None)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.rstrip("\n").splitlines())


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < left else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table


def merged_pictures(passes: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """(pass, place) of the place to draw for each run that changed something: the one that saved most and has a picture."""
    found = []
    for one in passes:
        drawn = [place for place in one["changed"] if place["picture"]]
        if drawn:
            found.append((one, max(drawn, key=lambda place: place["saved_bytes"])))
    return found
