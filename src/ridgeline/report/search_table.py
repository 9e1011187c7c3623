"""A search as text: the front, each seed's winner, mean ± std, where files are.

Front.to_json() ──render_search──> tables        front_rows(data) ──> the cells of the front, also for the live table and the page
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from . import format as fmt

SHOWN = {"latency": fmt.seconds, "energy": fmt.energy, "memory": fmt.size, "parameters": fmt.count, "flops": fmt.flop}


def shown(name: str, value: float | None) -> str:
    """A figure as people read it; names ending in accuracy are shares."""
    if value is None:
        return fmt.MISSING
    if name.endswith("accuracy") or name.endswith("mirrored"):
        return f"{100 * value:.2f} %"
    return SHOWN.get(name, fmt.significant)(value)


def heading(data: Mapping[str, Any]) -> str:
    """One line: what was searched."""
    request = data["request"]
    words = [f"{fmt.plain(request['space'])} on {fmt.plain(request['data'])}", f"for {fmt.plain(request['target'])}"]
    words += [fmt.plain(request["strategy"]), f"{_budget(request['budget'])} a seed", fmt.many(len(request["seeds"]), "seed")]
    return " · ".join(words + [fmt.plain(text) for text in request["limits"]])


def _budget(text: str) -> str:
    """40trials as 40 trials; a time as it is given."""
    trials = re.fullmatch(r"\s*(\d{1,9})\s*trials?\s*", text, re.ASCII)
    return fmt.many(int(trials[1]), "trial") if trials else fmt.plain(text)


def trained(data: Mapping[str, Any]) -> int:
    """Trials that took a training."""
    return sum("accuracy" in trial["values"] and trial["same_as"] is None for trial in data["trials"])


def tried(data: Mapping[str, Any]) -> str:
    """How many networks were asked for, and what became of them."""
    trials = data["trials"]
    beyond = sum(not trial["feasible"] for trial in trials)
    again = sum(trial["same_as"] is not None for trial in trials)
    words = [f"{fmt.many(trained(data), 'network')} trained"]
    words += [f"{beyond:,} not feasible"] if beyond else []
    words += [f"{again:,} computed the same as one before"] if again else []
    return ", ".join(words) + f", {fmt.seconds(sum(trial['seconds'] for trial in trials))} of search"


def front_rows(data: Mapping[str, Any]) -> list[list[str]]:
    """One a network of the front: trial, seed, objectives; * marks the winner."""
    trials = data["trials"]
    return [
        [f"{'* ' if number == data['winner'] else ''}{number}", str(trials[number]["seed"])]
        + [shown(name, trials[number]["values"].get(name)) for name in data["objectives"]]
        for number in data["front"]
    ]


def front_headings(data: Mapping[str, Any]) -> list[str]:
    return ["trial", "seed", *data["objectives"]]


def seed_rows(data: Mapping[str, Any]) -> list[list[str]]:
    """One a seed: its winner as found, then on the test split."""
    shipped = {one["seed"]: one for one in data["shipped"]}
    lines = []
    for one in data["winners"]:
        trial, test = data["trials"][one["trial"]], shipped.get(one["seed"], {}).get("test", {})
        found = [shown(name, trial["values"].get(name)) for name in data["objectives"]]
        lines.append([str(one["seed"]), str(one["trial"]), *found, *(shown(name, test.get(name)) for name in test_names(data))])
    return lines


def winners_lead(data: Mapping[str, Any]) -> str:
    """What the winners are, and what was done with them since their trials."""
    seeds, done = len(data["winners"]), len(data["shipped"])
    if not done:
        return "The network each seed's search would ship; none has been trained again, and the test split has not been touched."
    trained_again = "trained again from scratch on the whole training split, and scored on the test split once"
    return f"The network each seed's search would ship; {trained_again if done >= seeds else f'{done:,} of {seeds:,} {trained_again}'}."


def seed_headings(data: Mapping[str, Any]) -> list[str]:
    return ["seed", "winner", *data["objectives"], *(f"test {name.replace('_', ' ')}" for name in test_names(data))]


def test_names(data: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for one in data["shipped"] for name in one["test"]))


def summary_lines(data: Mapping[str, Any]) -> list[str]:
    """accuracy: 93.10 ± 0.20 % over 3 seeds."""
    lines = []
    for name, value in data["summary"].items():
        spread = f" ± {shown(name, value['std'])}" if value["seeds"] > 1 else ""
        lines.append(f"{name.replace('_', ' ')}: {shown(name, value['mean'])}{spread} ({fmt.many(int(value['seeds']), 'seed')})")
    return lines


def render_search(data: Mapping[str, Any], *, limit: int | None = 20, color: bool = False, width: int | None = None) -> str:
    """The front (its first `limit` rows), the seeds, and what was written."""
    wide = width or max(shutil.get_terminal_size((120, 24)).columns, 60)
    buffer = io.StringIO()
    console = Console(file=buffer, width=wide, force_terminal=color, no_color=not color, highlight=False)
    console.print(heading(data), markup=False)
    console.print(tried(data), markup=False)
    rows = front_rows(data)
    console.print("the front: no trial is better in everything", markup=False)
    console.print(_table(front_headings(data), rows[: limit or None]))
    if limit and len(rows) > limit:
        console.print(f"and {len(rows) - limit} more", markup=False)
    if data["winners"]:
        console.print("winners", markup=False)
        console.print(_table(seed_headings(data), seed_rows(data)))
    for line in [*summary_lines(data), *(f"note: {fmt.plain(note)}" for note in data["notes"])]:
        console.print(line, markup=False)
    for name in ("genotype", "weights", "onnx", "drawing", "report"):
        if name in data["exported"]:
            console.print(f"{name}: {fmt.plain(data['exported'][name])}", markup=False, soft_wrap=True)
    return buffer.getvalue().rstrip("\n")


def trial_line(data: Mapping[str, Any], trial: Mapping[str, Any]) -> str:
    """One trial in a line, for progress without a terminal."""
    figures = ", ".join(f"{name} {shown(name, value)}" for name, value in trial["values"].items())
    said = trial["why"] if not trial["feasible"] else "on the front" if trial["number"] in data["front"] else ""
    return fmt.plain(f"  trial {trial['number']}: {figures}" + (f" ({said})" if said else ""))


def live_table(data: Mapping[str, Any], message: str, rows: int = 12) -> Group:
    """The front while the search goes on, for a terminal."""
    return Group(Text(heading(data)), Text(tried(data)), _table(front_headings(data), front_rows(data)[:rows]), Text(fmt.plain(message)))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in headings:
        table.add_column(fmt.plain(name), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
